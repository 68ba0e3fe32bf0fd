"""What is around the jobs of the second half: their drawn data, and a few faults besides those of `around.py`."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.diagnosis import diagnose_outside as outside
from benchmarks.diagnosis.diagnose_outside import Around, NotPermitted
from benchmarks.diagnosis.wild.around import Fault

HERE = Path(__file__).resolve().parent
_drawing = threading.Lock()


def data(*kinds: str, then: Fault | None = None) -> Fault:
    """Draws data sets of `second_data.py` next to the job's folder, {folder}/../second/KIND, and adds another fault."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Around]:
        python = HERE.parents[2] / ".peers" / "bin" / "python" if "records" in kinds else Path(sys.executable)
        if not python.exists():
            raise NotPermitted("install the peers: make peers")
        with _drawing:
            command = [str(python), str(HERE / "second_data.py"), str(folder.parent / "second"), *kinds]
            subprocess.run(command, check=True, capture_output=True)
        if then is None:
            yield Around()
        else:
            with then(folder) as other:
                yield other

    return around


def slow_files(path: str, *, open_s: float = 0.0, write_s: float = 0.0) -> Fault:
    """Opening a file with `path` in its path takes so much longer, and each write to it (LD_PRELOAD)."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Around]:
        library = outside._compiled(HERE / "second_slow.c", folder.parent / "second_slow.so", "-ldl")
        yield Around(variables={
            "LD_PRELOAD": str(library), "SLOW_PATH": path, "SLOW_OPEN_NS": str(int(open_s * 1e9)),
            "SLOW_WRITE_NS": str(int(write_s * 1e9)),
        })  # fmt: skip

    return around


MATRICES = "import numpy as n; a = n.random.rand(900, 900)\nwhile True: a = a @ a; a /= abs(a).max()"
"""A program for `busy_neighbors` that multiplies matrices on all cores."""
