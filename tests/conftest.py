"""What all tests share: a cache folder of their own, and the real data sets where they are."""

import contextlib
import ctypes
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from stoker_watch.hardware.cgroup import set_spin_count

set_spin_count()  # before torch is imported, as the trainer does it

# How long an example takes says something about the machine, which others use, too. The examples are the same each
# time, so that a failure is the fault of the code; STOKER_RANDOM_EXAMPLES=1 draws others, as `make test-long` does.
hypothesis.settings.register_profile(
    "stoker", deadline=None, derandomize="STOKER_RANDOM_EXAMPLES" not in os.environ, database=None
)
hypothesis.settings.load_profile("stoker")

_NUMBERS = itertools.count()


LONG = {line for line in Path(__file__).with_name("long.txt").read_text().splitlines() if not line.startswith("#")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of long.txt, before any are left out by their marks; `make test-long` refuses a name that no test
    has. Slow tests get more time than `timeout` in pyproject.toml: some take minutes where other work has the cores."""
    unknown = LONG - {item.nodeid for item in items} - {""}
    if unknown and config.getoption("markexpr").startswith("long") and not config.getoption("file_or_dir"):
        raise pytest.UsageError(f"tests/long.txt names tests that do not exist: {', '.join(sorted(unknown))}")
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.long)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the user's cache; the demo data set is drawn by the first test that needs it."""
    base = tmp_path_factory.getbasetemp()
    # a name of our own: to find the next number, pytest reads all of a folder that has one entry per test
    cache = base / f"cache-{next(_NUMBERS)}"
    cache.mkdir()
    monkeypatch.setenv("STOKER_CACHE_DIR", str(cache))
    # of all workers of pytest-xdist, whose folders are next to each other
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "drawn"
    shared.mkdir(exist_ok=True)
    for drawn in shared.iterdir():
        (cache / drawn.name).symlink_to(drawn)
    yield cache
    for drawn in cache.glob("demo-v*"):
        if not drawn.is_symlink():
            with contextlib.suppress(OSError):  # another worker has drawn it meanwhile
                drawn.rename(shared / drawn.name)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Gives freed memory back: a process that has trained on a CPU keeps it (`configure_malloc`), and the heap of one
    that runs hundreds of tests grew to 7 GB."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Of pytest-xdist: says how a test process ended. One that was killed from outside leaves no other trace."""
    if error:
        code = node.gateway._io.popen.wait(10)
        print(f"\n{node.gateway.id} ended with exit code {code}; -9 is SIGKILL, as of the kernel without memory")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Where pydantic is imported, as by the client of Kubernetes, cyclopts parses command lines by its rules: a process
    of the command line has none."""
    sys.modules.pop("pydantic", None)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets, which are never part of the repository: STOKER_TEST_DATA, else ../shared/data."""
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    folder = Path(os.environ.get("STOKER_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no real data sets in {folder}; STOKER_TEST_DATA names their folder")
    return folder
