"""The index: opened from the cache while the source is the same, built again when it is not, whatever happens to the
cache; splits that depend on file names alone; images that are not there are named."""

import gc
import json
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.index import Index, missing_images, open_index, require_images
from stoker.data.validation import clean
from stoker.data.validation.clean import SplitOptions, hash_to_unit_interval
from stoker_watch.errors import ConfigError, DataError, PreflightError, StokerError, UsageError
from tests.fixtures.data_index import content, refuse_reading

HASHES = (0.3741817284737937, 0.8564542239357997)


def numbered(count: int) -> list[str]:
    return [f"{i:05d}.jpg" for i in range(count)]


def dataset(folder: Path, names: list[str], *, exist: bool = True) -> Path:
    (folder / "images").mkdir(parents=True)
    (folder / "all.json").write_text(content(names))
    for name in names if exist else ():
        (folder / "images" / name).touch()
    return folder


def names_of(index: Index, split: str) -> set[str]:
    return {index.path(image_index).name for image_index in index.image_indices(split)}


def test_an_unchanged_source_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset(tmp_path / "set", numbered(20))
    first = open_index(tmp_path / "set")
    refuse_reading(monkeypatch)
    second = open_index(str(tmp_path / "set"))
    assert second.notes == first.notes
    assert second.splits == first.splits == ("train", "val")
    np.testing.assert_array_equal(second.boxes, first.boxes)
    with pytest.raises(AssertionError, match="read again"):
        open_index(tmp_path / "set", val_fraction=0.4)


def test_a_changed_source_is_read_again(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", numbered(20))
    assert set(open_index(folder).labels.tolist()) == {0}
    (folder / "all.json").write_text(content(numbered(20), label=2))
    assert set(open_index(folder).labels.tolist()) == {1}


def test_a_data_set_that_was_moved(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "here", numbered(5))
    open_index(folder)
    folder.rename(tmp_path / "there")
    index = open_index(tmp_path / "there")
    assert index.path(0) == tmp_path / "there" / "images" / "00000.jpg"
    assert require_images(index) == []
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert open_index(tmp_path / "link").path(0) == index.path(0)


def test_images_that_are_added_after_the_annotations(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content(numbered(3)))
    assert missing_images(open_index(tmp_path)) == [0, 1, 2]
    (tmp_path / "images").mkdir()
    for name in numbered(3):
        (tmp_path / "images" / name).touch()
    assert missing_images(open_index(tmp_path)) == []


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.3, 0.7, 0.99])
def test_a_truncated_cache_is_built_again(tmp_path: Path, own_cache: Path, fraction: float) -> None:
    folder = dataset(tmp_path / "set", numbered(50))
    boxes = open_index(folder).boxes.tolist()
    (file,) = own_cache.rglob("*.arrow")
    whole = file.read_bytes()
    file.unlink()  # a new file: the old one stays mapped
    file.write_bytes(whole[: int(fraction * len(whole))])
    assert open_index(folder).boxes.tolist() == boxes
    assert len(file.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"00003.jpg", b"\xff\xfe003.jpg"),
        (b'"dog"', b'"fog"'),
        (np.arange(21).tobytes(), np.full(21, 2**40).tobytes()),
        (np.zeros(20, np.int32).tobytes(), np.full(20, 7, np.int32).tobytes()),
    ],
    ids=["name", "class", "offsets", "labels"],
)
def test_a_damaged_cache_is_built_again(tmp_path: Path, own_cache: Path, old: bytes, new: bytes) -> None:
    folder = dataset(tmp_path / "set", numbered(20))
    open_index(folder)
    (file,) = own_cache.rglob("*.arrow")
    whole = file.read_bytes()
    assert old in whole
    file.unlink()  # a new file: the old one stays mapped
    file.write_bytes(whole.replace(old, new))
    index = open_index(folder)
    assert file.read_bytes() == whole
    assert (index.class_names, index.path(3).name) == (("cat", "dog"), "00003.jpg")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_cache_never_leads_outside_the_arrays(damage: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CACHE_DIR", folder + "/cache")
        data = dataset(Path(folder) / "set", numbered(20))
        open_index(data)
        (file,) = Path(folder, "cache").rglob("*.arrow")
        whole = bytearray(file.read_bytes())
        for place, value in damage:
            whole[int(place * len(whole))] = value
        file.unlink()
        file.write_bytes(whole)
        index = open_index(data)
        assert (len(index), len(index.boxes)) == (20, 20)
        assert index.offsets[-1] == len(index.labels) == len(index.crowd) == len(index.area)
        assert 0 <= index.labels.min() <= index.labels.max() < len(index.class_names)
        assert len([index.path(image_index) for image_index in range(len(index))]) == 20


def test_the_arrays_are_views_that_keep_the_file_mapped(tmp_path: Path, own_cache: Path) -> None:
    index = open_index(dataset(tmp_path / "set", numbered(20)))
    arrays = (index.original_size, index.image_id, index.offsets, index.boxes, index.labels, index.crowd, index.area)
    for array in arrays:
        assert not array.flags.owndata
        assert not array.flags.writeable
    boxes = index.boxes
    (file,) = own_cache.rglob("*.arrow")
    del index, arrays
    file.unlink()
    gc.collect()
    assert boxes.tolist() == [[1, 2, 4, 6]] * 20


@pytest.mark.slow
def test_processes_that_build_at_once_all_get_the_index(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", numbered(200))
    script = "import sys; from stoker.data.index import open_index; input(); i = open_index(sys.argv[1]); print(len(i))"
    command = [sys.executable, "-c", script, str(folder)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0].strip() for process in processes] == ["200"] * 3


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(PreflightError, match="cannot be written") as raised:
        open_index(dataset(tmp_path / "set", numbered(3)))
    assert "STOKER_CACHE_DIR" in str(raised.value)


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read|does not exist") as raised:
        open_index(tmp_path / ("x" * 300))
    assert "x" * 300 in str(raised.value)


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    folder = tmp_path / "caf\udce9"
    with pytest.raises(DataError, match="not valid Unicode"):
        open_index(dataset(folder, numbered(3)))


def test_the_index_needs_no_torch() -> None:
    script = "import sys, stoker.data.index; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_hash_of_a_name_is_the_same_everywhere() -> None:
    """Another value would move images between training and validation of everyone's data sets."""
    hashes = hash_to_unit_interval(["000000000009.jpg", "Zürich 1.png"])
    assert hashes.tolist() == pytest.approx(HASHES, abs=1e-15)
    decomposed = unicodedata.normalize("NFD", "Zürich 1.png")
    assert hash_to_unit_interval([decomposed]).tolist() == hashes[1:].tolist()


def hold_out(names: list[str], fraction: float, boxed: np.ndarray, method: Literal["hash", "stratified"]) -> np.ndarray:
    """boxed: whether each image has a box, all of one class."""
    images = np.flatnonzero(boxed)
    options = SplitOptions(val_fraction=fraction, method=method)
    return clean._hold_out(names, images, np.zeros(len(images), np.int32), options)


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 10**6), min_size=2, max_size=300), st.floats(0.05, 0.9))
def test_each_image_keeps_its_split_when_others_are_added(numbers: set[int], fraction: float) -> None:
    names = [f"{number}.jpg" for number in sorted(numbers)]
    held = hold_out(names, fraction, np.ones(len(names), np.bool_), "hash")
    assert 0 < held.sum() < len(names)
    fewer = hold_out(names[::2], fraction, np.ones(len(names[::2]), np.bool_), "hash")
    # only the two that keep both splits from being empty may differ
    assert (held[::2] != fewer).sum() <= 2
    alone = hash_to_unit_interval(names) < fraction
    if 0 < alone.sum() < len(names):
        assert (held == alone).all()


@given(st.lists(st.booleans(), max_size=40), st.floats(0.01, 0.9))
def test_both_splits_have_boxes(boxes: list[bool], fraction: float) -> None:
    boxed = np.array(boxes, np.bool_)
    names = [f"{n}.jpg" for n in range(len(boxes))]
    for held in (hold_out(names, fraction, boxed, "hash"), hold_out(names, fraction, boxed, "stratified")):
        if sum(boxes) > 1:
            assert 0 < np.count_nonzero(held & boxed) < sum(boxes)
        else:
            assert not (held & boxed).any(), "what there is is learned from"


def test_the_split_depends_on_the_name_and_not_on_the_folder(tmp_path: Path) -> None:
    by_hash = SplitOptions(method="hash")
    here = open_index(dataset(tmp_path / "a", numbered(300)), splits=by_hash)
    there = open_index(dataset(tmp_path / "b", numbered(400)), splits=by_hash)
    assert names_of(here, "val") == names_of(there, "val") & set(numbered(300))
    stratified = [open_index(dataset(tmp_path / name, numbered(300))) for name in ("c", "d")]
    assert names_of(stratified[0], "val") == names_of(stratified[1], "val")
    assert len(names_of(stratified[0], "val")) == 30
    assert 15 <= len(here.image_indices("val")) <= 45
    assert set(here.splits) == {"train", "val"}
    assert any("held out" in note for note in here.notes)


def test_unused_split_setting_is_noted(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "_annotations.coco.json").write_text(content(numbered(3)))
    assert any("val_fraction 0.2 is not used" in note for note in open_index(tmp_path, val_fraction=0.2).notes)
    assert not any("val_fraction" in note for note in open_index(tmp_path).notes)


def test_images_in_two_splits_are_reported(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "train.json").write_text(content(numbered(3)))
    (tmp_path / "annotations" / "val.json").write_text(content(numbered(1)))
    index = open_index(tmp_path)
    found = {problem.kind: problem.examples for problem in index.problems}
    assert found["in-two-splits"] == ("00000.jpg: train, val",)
    assert found["unused-class"] == ("dog",)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 149)), st.booleans())
def test_exactly_the_missing_images_are_listed(gone: set[int], few: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = open_index(dataset(Path(folder) / "set", numbered(150)))
        for image_index in gone:
            index.path(image_index).unlink()
        asked = range(20) if few else None
        assert missing_images(index, asked) == sorted(gone & set(asked or range(150)))


def test_few_missing_images_are_tolerated(tmp_path: Path) -> None:
    index = open_index(dataset(tmp_path / "set", numbered(400)))
    image_indices = index.image_indices("train")
    few = -(-image_indices.size // 100)
    for image_index in image_indices[:few].tolist():
        index.path(image_index).unlink()
    assert require_images(index) == image_indices[:few].tolist()
    index.path(image_indices[few]).unlink()
    with pytest.raises(
        DataError, match=rf"{few + 1} of {image_indices.size} images \(1 %\) of the train split"
    ) as raised:
        require_images(index)
    assert str(index.path(image_indices[0])) in str(raised.value)


@pytest.mark.parametrize(
    ("max_bad", "gone", "enough"), [(0.0, 1, False), (0.001, 1, True), (0.1, 5, True), (0.1, 6, False)]
)
def test_how_many_images_may_be_missing(tmp_path: Path, max_bad: float, gone: int, enough: bool) -> None:
    index = open_index(dataset(tmp_path / "set", numbered(50)))
    image_indices = index.image_indices("train")
    assert 40 <= image_indices.size < 50
    for image_index in image_indices[:gone].tolist():
        index.path(image_index).unlink()
    if enough:
        assert require_images(index, max_bad_fraction=max_bad) == image_indices[:gone].tolist()
    else:
        with pytest.raises(DataError, match=rf"{gone} of {image_indices.size} images .* of the train split") as raised:
            require_images(index, max_bad_fraction=max_bad)
        assert f"more than --max-bad-fraction {max_bad:g} allows" in str(raised.value)


def test_images_left_out_because_of_their_annotations(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", numbered(50))
    whole = json.loads(content(numbered(50)))
    for bad in (1, 2):
        (folder / "all.json").write_text(json.dumps(whole | {"images": whole["images"] + [{"id": "x"}] * bad}))
        index = open_index(folder)
        if bad == 1:
            assert require_images(index) == []
        else:
            with pytest.raises(DataError, match=r"2 of 52 images \(4 %\) are left out") as raised:
                require_images(index)
            assert '"images" number 50: {"id": "x"}' in str(raised.value)
            assert f"stoker data check {folder}" in str(raised.value)
            assert require_images(index, max_bad_fraction=0.04) == []


@pytest.mark.parametrize(
    ("names", "fix"), [(["../x/00000.jpg"], "is in"), (["images/00000.JPEG"], "00000.JPEG exists")]
)
def test_location_of_missing_images_is_suggested(tmp_path: Path, names: list[str], fix: str) -> None:
    folder = dataset(tmp_path / "set", numbered(1), exist=False)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    with pytest.raises(DataError) as raised:
        require_images(open_index(folder))
    assert fix in str(raised.value)


def test_a_folder_without_annotations(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match="No annotations found") as raised:
        open_index(tmp_path)
    for fragment in (str(tmp_path), "_annotations.coco.json", "Annotations/*.xml", "notes.txt, photos/"):
        assert fragment in str(raised.value)


def test_a_wrong_path_names_the_nearest(tmp_path: Path) -> None:
    dataset(tmp_path / "birds", numbered(1))
    with pytest.raises(DataError, match="does not exist") as raised:
        open_index(tmp_path / "brids")
    assert f"did you mean {tmp_path / 'birds'}?" in str(raised.value)
    with pytest.raises(DataError, match="does not exist") as raised:
        open_index(tmp_path / "no" / "where")
    assert str(tmp_path) in str(raised.value)


def test_several_data_sets_below_a_folder(tmp_path: Path) -> None:
    for name in ("birds", "cats"):
        dataset(tmp_path / name, numbered(2))
    with pytest.raises(DataError, match="2 data sets") as raised:
        open_index(tmp_path)
    assert raised.value.choices == ("birds", "cats")


def test_both_formats_in_one_folder(tmp_path: Path) -> None:
    folder = dataset(tmp_path / "set", numbered(2))
    (folder / "Annotations").mkdir()
    (folder / "Annotations" / "x.xml").write_text(
        "<annotation><object><name>bird</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax>"
        "</bndbox></object></annotation>"
    )
    assert any("no image of the other exists" in note for note in open_index(folder).notes)
    folder = folder.rename(tmp_path / "with_image")
    (folder / "Annotations" / "x.xml").rename(folder / "Annotations" / f"{Path(numbered(1)[0]).stem}.xml")
    index = open_index(folder)
    assert index.format == "coco"
    assert any("--format voc reads the other" in note for note in index.notes)
    assert open_index(folder, format="voc").class_names == ("bird",)


@pytest.mark.parametrize(
    ("data", "options", "kind", "fragment"),
    [
        (
            "set",
            {"format": "bdd100k"},
            UsageError,
            "coco, voc, kitti, yolo, tfrecord, openimages, via, csv, cvat, labelme, label-studio, createml",
        ),
        ("set", {"val_fraction": 0.0}, ConfigError, "val_fraction"),
        ("set", {"val_fraction": 1.0}, ConfigError, "val_fraction"),
        ("set/images/00000.jpg", {}, DataError, "not a data set"),
        ("set", {"format": "voc"}, DataError, "in the format 'voc'"),
    ],
)
def test_invalid_arguments(
    tmp_path: Path, data: str, options: dict[str, str], kind: type[StokerError], fragment: str
) -> None:
    dataset(tmp_path / "set", numbered(2))
    with pytest.raises(kind) as raised:
        open_index(tmp_path / data, **options)
    assert fragment in str(raised.value)


def test_a_name_that_is_empty_is_not_this_folder() -> None:
    with pytest.raises(DataError, match="name of the data set is empty"):
        open_index("")


def test_image_folder_outside_belongs_to_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("elsewhere/a.jpg", "b.jpg"):
        (tmp_path / name).touch()
    folder = dataset(tmp_path / "set", [str(tmp_path / "elsewhere" / "a.jpg"), "b.jpg"], exist=False)
    index = open_index(folder, allow_outside=True)
    places = ("elsewhere/a.jpg", "set/b.jpg", "set/new", "other/a.jpg")
    assert [index.contains_file(tmp_path / name) for name in places] == [True, True, True, False]
