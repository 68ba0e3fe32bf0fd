"""docs/gpu-status.md is the table of docs/gpu-status.toml, whose files and commands exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.write_gpu_status import NEVER, read_features, render_page

ROOT = Path(__file__).resolve().parent.parent
WORDS = {
    *("run", "measured", "rendered", "fakes", "xla client", "n/a", "off", "refused", "threads only", "no streams"),
    *("the CPU", "host's clock", "not used", "not offered", "not predicted", "not there", *NEVER),
}
KEYS = {"area", "name", "file", "cpu", "cuda", "other", "tpu", "command", "note", "ran"}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/gpu-status.md").read_text() == render_page(), "make docs writes it"


def test_no_feature_is_listed_twice() -> None:
    names = [feature["name"] for feature in read_features()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("feature", read_features(), ids=lambda feature: feature["name"][:40])
def test_a_feature_names_files_that_exist_and_words_of_the_page(feature: dict[str, Any]) -> None:
    assert KEYS >= feature.keys() >= KEYS - {"note", "ran"}
    package = {"stoker": "packages/stoker", "stoker_watch": "packages/stoker-watch"}.get(
        feature["file"].split("/")[0], ""
    )
    assert (ROOT / package / feature["file"]).exists()
    for device in ("cpu", "cuda", "other", "tpu"):
        assert feature[device].removesuffix(", fakes") in WORDS
    for path in re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", feature["command"]):
        assert (ROOT / path).exists()
    assert all((ROOT / run["result"]).exists() and {"gpu", "date"} <= run.keys() for run in feature.get("ran", ()))
