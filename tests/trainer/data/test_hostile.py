"""Data sets full of defects: each is reported with its location, none crashes, training uses the healthy images."""

import contextlib
import json
import sys
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.index import open_index
from stoker.data.loading.loader import Loader, compute_max_boxes
from stoker.data.loading.samples import LoaderSpec
from stoker.data.validation.check import check_dataset
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker.hardware.selection import select_device
from stoker_watch.cli.app import main
from stoker_watch.errors import StokerError
from tests.trainer.data import hostile
from tests.trainer.data.hostile_tfrecord import tfrecord

SETS: dict[str, Callable[[Path], hostile.Planted]] = {
    "coco": hostile.coco,
    "voc": hostile.voc,
    "yolo": hostile.yolo,
    "tfrecord": tfrecord,
    "csv": hostile.csv,
}
TRAIN = [
    "--model",
    "retinanet_tiny_fpn",
    "--image-size",
    "64",
    "64",
    "--batch-size",
    "8",
    "--steps",
    "3",
    "--eval-every",
    "0",
]
QUARANTINED = {
    "missing-image", "empty-image", "not-an-image", "damaged-image", "too-large-image", "unreadable-image",
    "size-disagrees",
}  # fmt: skip
"""Kinds that only the loader can detect, because it reads the image files."""
UNPLANTED = {"unreadable-set", "unreadable-test-split", "empty-split", "outside-path"}
"""Kinds that stop reading or training: `test_check.py`, `test_hostile_files.py`, `test_verdict.py`."""
UNPLANTED |= {"placeholder-box", "more-boxes-in-another-format"}
"""Of `test_near.py`."""
UNPLANTED |= {"missing-packed-shard", "cut-packed-shard", "changed-packed-shard"}
"""Of sets that `stoker data pack` made: `test_check_shards.py`."""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit code of a command, in this process."""
    monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def tree(folder: Path) -> dict[str, str]:
    """Path → digest of content and time of change, of everything below a folder."""
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mtime_ns} "
        + (blake2b(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted([folder, *folder.rglob("*")])
    }


@pytest.mark.parametrize("name", SETS)
def test_every_defect_is_reported_and_no_file_changes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = SETS[name](tmp_path / "set")
    before = tree(tmp_path / "set")
    assert run(monkeypatch, "data", "check", tmp_path / "set", "--json") == 4
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    locations = {item["kind"]: item["locations"] for item in report["items"]}
    assert not [(kind, part) for kind, part in planted if not any(part in text for text in locations.get(kind, ()))]
    assert set(locations) <= {kind for kind, _ in planted} | {"class-not-in-split"}
    for item in report["items"]:
        assert item["count"] == len(item["locations"]) or item["kind"] == "ambiguous-id"
        assert item["effect"]
        assert item["fix"]
    assert report["num_usable_images"] >= hostile.HEALTHY + 6
    assert any("more than --max-bad-fraction 0.01 allows" in reason for reason in report["refusals"])
    assert tree(tmp_path / "set") == before

    assert run(monkeypatch, "data", "check", tmp_path / "set", "--max-bad-fraction", "1", "--max-bad-boxes", "1") == 0
    page = capsys.readouterr().out
    for kind in locations:
        assert PROBLEM_KINDS[kind].title in page
    assert f"training would use {report['num_usable_images']} of {report['num_images']} images" in page


def test_every_kind_is_planted(tmp_path: Path) -> None:
    planted = {kind for name, make in SETS.items() for kind, _ in make(tmp_path / name)}
    assert planted == set(PROBLEM_KINDS) - UNPLANTED


@pytest.mark.parametrize("name", SETS)
def test_the_rest_can_be_loaded(name: str, tmp_path: Path) -> None:
    planted = SETS[name](tmp_path / "set")
    index = open_index(tmp_path / "set")
    image_indices = index.image_indices("train")
    spec = LoaderSpec(
        device=select_device("cpu"), batch_size=4, image_size=(64, 64), resize="letterbox",
        max_boxes=compute_max_boxes(index, image_indices), seed=0, workers=2, max_bad_fraction=1.0,
    )  # fmt: skip
    loader = Loader(index, image_indices, spec)
    loaded: set[int] = set()
    with contextlib.closing(loader):
        for _ in range(-(-len(image_indices) // 4)):
            loaded.update(next(loader).image_index.tolist())
        bad = set(loader.state_dict()["quarantined"])
    paths = {str(index.path(image_index)) for image_index in bad}
    expected = [part.partition(":")[0] for kind, part in planted if kind in QUARANTINED]
    assert all(any(part in path for path in paths) for part in expected)
    assert len(bad) == len(expected)
    assert not loaded & bad
    healthy = {i for i in image_indices.tolist() if "good" in index.path(i).name}
    assert healthy <= loaded


ANNOTATIONS = {"coco": "train/_annotations.coco.json", "voc": "Annotations/good1.xml", "yolo": "labels/train/good1.txt",
               "csv": "train_labels.csv", "tfrecord": "train.record-00005-of-00006"}  # fmt: skip


@pytest.fixture(scope="module")
def small_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("small") / name for name in SETS}
    for name, make in SETS.items():
        make(folders[name])
    return folders


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_damaged_bytes_of_annotations_never_crash(name: str, small_sets: dict[str, Path], data: st.DataObject) -> None:
    """Bytes are replaced, inserted or deleted anywhere: the data set is read, or a StokerError says what is wrong."""
    file = small_sets[name] / ANNOTATIONS[name]
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.sampled_from([0, 1, 1, 7, len(whole)]))
    new = data.draw(
        st.binary(max_size=4) | st.sampled_from([b'"', b"}", b"NaN", b"1e999", b"\0", b"\xff", b"<", b",", b"-"])
    )
    try:
        file.write_bytes(whole[:start] + new + whole[start + length :])
        with contextlib.suppress(StokerError):
            open_index(small_sets[name])
        assert check_dataset(small_sets[name], decode_images=False).items
    finally:
        file.write_bytes(whole)


@pytest.mark.slow
def test_the_command_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.coco(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "train", tmp_path / "set", *TRAIN) == 4
    messages = capsys.readouterr().err
    assert f"stoker data check {tmp_path / 'set'}" in messages
    assert "--max-bad-fraction" in messages
    assert (
        run(monkeypatch, "train", tmp_path / "set", *TRAIN, "--max-bad-fraction", "0.9", "--max-bad-boxes", "0.9") == 0
    )
    assert f"1 × {PROBLEM_KINDS['tiny-box'].title}" in "".join(capsys.readouterr())
