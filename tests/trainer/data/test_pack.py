"""stoker data pack: what is packed is read back the same, by stoker and by others; the same bytes after kill -9."""

import contextlib
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from stoker.data import packing
from stoker.data.formats.webdataset import INDEX_FILE, PLAN_FILE, WORK_DIR, read_info
from stoker.data.index import Index, open_index, require_images
from stoker.data.loading.loader import Loader, compute_max_boxes
from stoker.data.loading.samples import LoaderSpec
from stoker.data.packing import PackOptions, PackResult, in_threads, pack
from stoker.hardware.selection import select_device
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError, UsageError
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.fixtures.data_convert import annotated, coco, data_sets, two_splits
from tests.fixtures.data_pack import small_shards
from tests.fixtures.data_same_index import WRITE, Drawn, content, drawings
from tests.trainer.data.buckets import Bucket
from tests.trainer.data.examples import property_test
from tests.trainer.data.tfrecords import jpeg
from tests.watch.storage.servers import Server, apply, google_server, s3_server

COLUMNS = ("boxes", "labels", "crowd", "area", "offsets", "original_size", "image_id")


def packed(source: Index, out: Path | str, **options: Any) -> PackResult:
    return pack(source, str(out), PackOptions(**options), run_shards=in_threads(2))


def tree(folder: Path) -> dict[str, str]:
    """Path → SHA-256 of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def same(index: Index, source: Index) -> None:
    for name in COLUMNS:
        assert np.array_equal(getattr(index, name), getattr(source, name)), name
    for name in ("class_names", "category_ids", "splits"):
        assert getattr(index, name) == getattr(source, name), name
    for split in source.splits:
        assert index.image_indices(split).tolist() == source.image_indices(split).tolist()
    for row in range(len(source)):
        assert index.read(row) == source.read(row)
        assert index.path(row).name == source.path(row).name


@pytest.fixture
def source(tmp_path: Path) -> Index:
    return open_index(two_splits(tmp_path / "source"))


@property_test(data_sets(), few=3, many=30)
def test_every_data_set_is_read_back_the_same(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    """With the index; and without it, as an ordinary WebDataset, apart from order, ids, areas and unused classes."""
    root = tmp_path_factory.mktemp("round")
    for split, images in drawn.items():
        coco(root / "source", images, split)
    source = open_index(root / "source")
    result = packed(source, root / "out", shard_mib=1)
    assert result.num_images == {split: len(source.image_indices(split)) for split in source.splits}
    same(open_index(root / "out"), source)
    (root / "out" / INDEX_FILE).unlink()
    scanned = open_index(root / "out")
    assert set(scanned.class_names) == {source.class_names[label] for label in source.labels}
    assert by_name(scanned) == by_name(source)


def by_name(index: Index) -> dict[tuple[str, str], tuple[list[list[float]], list[str], list[bool], list[int], bytes]]:
    found = {}
    for split in index.splits:
        for row in index.image_indices(split).tolist():
            own = slice(index.offsets[row], index.offsets[row + 1])
            found[split, index.path(row).name] = (
                index.boxes[own].tolist(),
                [index.class_names[label] for label in index.labels[own]],
                index.crowd[own].tolist(),
                index.original_size[row].tolist(),
                index.read(row),
            )
    return found


@property_test(drawings(), few=2, many=20)
def test_every_format_is_packed(tmp_path_factory: pytest.TempPathFactory, drawn: list[Drawn]) -> None:
    root = tmp_path_factory.mktemp("formats")
    for name, write in WRITE.items():
        write(root / name, drawn)
        source = open_index(root / name)
        packed(source, root / f"{name}-packed")
        index = open_index(root / f"{name}-packed")
        assert index.format == "webdataset"
        assert content(index) == content(source), name


def test_an_image_is_one_byte_range_of_an_ordinary_archive(source: Index, tmp_path: Path) -> None:
    """Against Python's own tarfile, GNU tar's end of archive, and the checksums of the index."""
    packed(source, tmp_path / "out")
    info = read_info(tmp_path / "out" / INDEX_FILE)
    assert [shard.name for shard in info.shards] == ["train-00000.tar", "val-00000.tar"]
    index = open_index(tmp_path / "out")
    rows = {}
    for shard in info.shards:
        data = (tmp_path / "out" / shard.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard.size_bytes, shard.sha256)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            members = archive.getmembers()
            assert all((member.mtime, member.uid, member.uname) == (0, 0, "") for member in members)
            for image, annotations in zip(members[::2], members[1::2], strict=True):
                stem, suffix = image.name.split(".")
                assert (annotations.name, suffix) == (f"{stem}.json", "jpg")
                file = archive.extractfile(annotations)
                assert file is not None
                rows[int(stem)] = json.load(file)
                assert index.byte_range(int(stem)) == (image.offset_data, image.size)
                assert image.offset_data % 512 == 0
                own = slice(image.offset_data, image.offset_data + image.size)
                assert data[own] == source.read(int(stem))
    assert sorted(rows) == list(range(len(source)))
    assert rows[1] == {
        "file_name": "1.jpg", "image_id": 11, "width": 40, "height": 30,
        "annotations": [{"category_id": 2, "bbox": [1, 2, 10.5, 20], "area": 210.0, "iscrowd": 0, "category": "a b"}],
    }  # fmt: skip


def test_training_reads_the_same_batches(source: Index, tmp_path: Path) -> None:
    packed(source, tmp_path / "out")
    batches = []
    for index in (source, open_index(tmp_path / "out")):
        require_images(index)
        image_indices = index.image_indices("train")
        spec = LoaderSpec(
            device=select_device("cpu"), batch_size=2, image_size=(32, 32), resize="letterbox", seed=3, workers=2,
            max_boxes=compute_max_boxes(index, image_indices),
        )  # fmt: skip
        with contextlib.closing(Loader(index, image_indices, spec)) as loader:
            batches.append([[tensor.clone() for tensor in next(loader)] for _ in range(3)])
    for one, other in zip(*batches, strict=True):
        assert all((tensor == same_tensor).all() for tensor, same_tensor in zip(one, other, strict=True))


def test_the_same_command_again_changes_nothing(source: Index, tmp_path: Path) -> None:
    first = packed(source, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = packed(source, tmp_path / "out")
    assert (first.was_packed, again.was_packed) == (False, True)
    assert again.info == first.info
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    packed(source, tmp_path / "other", shard_mib=64)
    assert tree(tmp_path / "other") == tree(tmp_path / "out")


def test_the_number_of_threads_does_not_change_a_byte(tmp_path: Path) -> None:
    images = {f"{n}.jpg": (jpeg(900, 700, n), [annotated([1, 2, 30, 20])]) for n in range(12)}
    source = open_index(coco(tmp_path / "source", images), val_fraction=0.2)
    one = pack(source, str(tmp_path / "one"), PackOptions(), run_shards=in_threads(1))
    many = pack(source, str(tmp_path / "many"), PackOptions(), run_shards=in_threads(8))
    assert tree(tmp_path / "one") == tree(tmp_path / "many")
    assert one.info == many.info


def test_training_images_are_stored_in_a_random_order_and_listed_in_that_of_the_source(tmp_path: Path) -> None:
    images = {f"{n:03d}.jpg": (jpeg(20, 20, n), [annotated([1, 2, 9, 9])]) for n in range(60)}
    coco(tmp_path / "source", images)
    source = open_index(coco(tmp_path / "source", dict(list(images.items())[:9]), "valid"))
    packed(source, tmp_path / "out")
    index = open_index(tmp_path / "out")
    ranges = np.array([index.byte_range(row) for row in index.image_indices("train")])
    assert (np.diff(ranges[:, 0]) < 0).any()
    ranges = np.array([index.byte_range(row) for row in index.image_indices("val")])
    assert (np.diff(ranges[:, 0]) > 0).all()
    assert [index.path(row).name for row in index.image_indices("train")] == sorted(images)


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_a_start_that_failed_is_continued(stop_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = {f"{n}.jpg": (jpeg(60, 50, n), [annotated([1, 2, 30, 20])]) for n in range(12)}
    source = open_index(coco(tmp_path / "source", images), val_fraction=0.25)
    plan = packing.make_plan
    monkeypatch.setattr(packing, "make_plan", lambda index, options: small_shards(plan(index, options)))
    packed(source, tmp_path / "whole")
    out, written = tmp_path / "out", 0
    make_shard = packing.make_shard

    def failing(*arguments: Any) -> Any:
        nonlocal written
        written += 1
        if written > stop_after:
            raise OSError(28, "No space left on device")
        return make_shard(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(packing, "make_shard", failing)
        with pytest.raises(OSError, match="No space"):
            pack(source, str(out), PackOptions(), run_shards=in_threads(1))
    with pytest.raises(DataError, match="not packed to its end"):
        open_index(out)
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert len(finished) == stop_after
    (out / ".train-00001.tar.123.tmp").write_bytes(b"half")
    result = packed(source, out)
    assert result.num_kept == stop_after
    assert tree(out) == tree(tmp_path / "whole")
    assert all((out / name).stat().st_mtime_ns == time_ns for name, time_ns in finished.items())


def test_a_start_with_other_shards_is_not_mixed_with_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may plan other shards for the same images and options."""
    source, make_plan, out = open_index(two_splits(tmp_path / "source")), packing.make_plan, tmp_path / "out"

    def plan_otherwise(*arguments: Any) -> packing.PackPlan:
        plan = make_plan(*arguments)
        first = msgspec.structs.replace(plan.shards[0], rows=plan.shards[0].rows[:1])
        return msgspec.structs.replace(plan, shards=(first, *plan.shards[1:]))

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "make_plan", plan_otherwise)
        patch.setattr(packing, "_write_index", stop)
        with pytest.raises(KeyboardInterrupt):
            packed(source, out)
    packed(source, out)
    same(open_index(out), source)


def test_other_data_in_the_destination_is_refused_and_kept(source: Index, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="has other data") as error:
        packed(source, out)
    assert "mine.txt" in str(error.value)
    assert tree(out).keys() == {"mine.txt"}
    with pytest.raises(UsageError, match="is a file"):
        packed(source, out / "mine.txt")
    packed(source, tmp_path / "packed")
    other = open_index(coco(tmp_path / "other", {"z.jpg": (jpeg(), [annotated([0, 0, 9, 9])])}), val_fraction=0.5)
    before = tree(tmp_path / "packed")
    for index, options in ((other, {}), (source, {"image_size": (32, 32)}), (source, {"shard_mib": 2})):
        with pytest.raises(UsageError, match="another packed data set"):
            packed(index, tmp_path / "packed", **options)
    assert tree(tmp_path / "packed") == before


def test_lost_and_truncated_shards_are_made_again_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {f"{n}.jpg": (jpeg(60, 50, n), [annotated([1, 2, 30, 20])]) for n in range(12)}
    source = open_index(coco(tmp_path / "source", images), val_fraction=0.25)
    plan = packing.make_plan
    monkeypatch.setattr(packing, "make_plan", lambda index, options: small_shards(plan(index, options)))
    out = tmp_path / "out"
    packed(source, out)
    before = tree(out)
    kept = {name: (out / name).stat().st_mtime_ns for name in before}
    lost = {"train-00001.tar", "val-00000.tar"}
    (out / "train-00001.tar").unlink()
    (out / "val-00000.tar").write_bytes((out / "val-00000.tar").read_bytes()[:-512])
    (out / ".train-00001.tar.12.tmp").write_bytes(b"half")
    others = (out / ".notes.tmp", out / "mine" / ".a.tmp")
    others[1].parent.mkdir()
    for other in others:
        other.write_bytes(b"not of a pack")
    result = packed(source, out)
    for other in others:
        other.unlink()
    others[1].parent.rmdir()
    assert (result.was_packed, result.num_kept, len(result.info.shards)) == (False, len(before) - 1 - len(lost), 4)
    assert tree(out) == before
    assert {name for name in before if (out / name).stat().st_mtime_ns != kept[name]} == lost
    assert packed(source, out).was_packed


def test_a_shard_that_would_get_other_bytes_is_not_made_again(
    source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another version of the encoder; the index has the places of the images in the old bytes."""
    out = tmp_path / "out"
    packed(source, out, image_size=(32, 32))
    (out / "train-00000.tar").unlink()
    shrink = packing.shrink

    def other_encoder(*arguments: Any, quality: int, **options: Any) -> Any:
        return shrink(*arguments, quality=quality - 40, **options)

    monkeypatch.setattr(packing, "shrink", other_encoder)
    with pytest.raises(DataError, match="cannot be made again") as error:
        packed(source, out, image_size=(32, 32))
    assert "train-00000.tar" in str(error.value)
    assert {name for name in tree(out) if not name.startswith(WORK_DIR)} == {INDEX_FILE, "val-00000.tar"}


def test_the_beginning_of_another_data_set_is_refused(source: Index, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / WORK_DIR).mkdir(parents=True)
    (out / PLAN_FILE).write_text('{"id": "another"}')
    with pytest.raises(UsageError, match="beginning of another packed data set"):
        packed(source, out)


def test_the_source_is_never_written(source: Index, tmp_path: Path) -> None:
    before = tree(tmp_path / "source")
    packed(source, tmp_path / "out")
    for out in (source.root, source.root / "packed"):
        with pytest.raises(UsageError, match="in the data set's own folder"):
            packed(source, out)
    assert tree(tmp_path / "source") == before


def test_images_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    root = two_splits(tmp_path / "source")
    (root / "train" / "1.jpg").write_bytes(b"<html>")
    (root / "train" / "2.jpg").unlink()
    result = packed(open_index(root), tmp_path / "out")
    assert result.num_images == {"train": 2, "val": 2}
    reasons = dict(result.skipped)
    assert "web page" in reasons[str(root / "train" / "1.jpg")]
    assert reasons[str(root / "train" / "2.jpg")] == "No such file or directory"
    index = open_index(tmp_path / "out")
    assert sorted(index.path(row).name for row in index.image_indices("train")) == ["0.jpg", "3.jpg"]
    assert any("2 images of the source could not be read" in note for note in index.notes)
    for path in (root / "train").glob("*.jpg"):
        path.unlink()
    for path in (root / "valid").glob("*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match="No image could be packed"):
        packed(open_index(root), tmp_path / "empty")


def test_larger_images_are_encoded_again_and_boxes_are_scaled(tmp_path: Path) -> None:
    pixels = np.linspace(0, 255, 200 * 100 * 3).reshape(100, 200, 3).astype(np.uint8)
    wide = io.BytesIO()
    Image.fromarray(pixels).save(wide, "PNG")
    small = jpeg(40, 30, 1)
    images = {"wide.png": (wide.getvalue(), [annotated([20, 10, 100, 50], area=4000)]), "small.jpg": (small, [])}
    images["crowd.jpg"] = (jpeg(160, 320, 2), [annotated([0, 0, 160, 320], iscrowd=1, area=160 * 320)])
    coco(tmp_path / "source", images)
    source = open_index(coco(tmp_path / "source", images, "valid"))
    result = packed(source, tmp_path / "out", image_size=(80, 80))
    assert result.num_encoded == 4
    index = open_index(tmp_path / "out")
    rows = {index.path(row).name: row for row in index.image_indices("train")}
    assert index.read(rows["small.jpg"]) == small
    row = rows["wide.png"]
    with Image.open(io.BytesIO(index.read(row))) as image:
        assert (image.format, image.size) == ("JPEG", (80, 40))
        assert np.abs(np.asarray(image.resize((200, 100))).astype(float) - pixels).mean() < 4
    assert index.original_size[row].tolist() == [40, 80]
    own = slice(index.offsets[row], index.offsets[row + 1])
    assert index.boxes[own].tolist() == [[8, 4, 48, 24]]
    assert index.area[own].tolist() == pytest.approx([4000 * 0.16])
    assert index.boxes[index.offsets[rows["crowd.jpg"]]].tolist() == [0, 0, 40, 80]
    (tmp_path / "out" / INDEX_FILE).unlink()
    assert by_name(open_index(tmp_path / "out"))["train", "wide.png"][0] == [[8, 4, 48, 24]]


@pytest.mark.parametrize("annotated_as", ["upright", "stored"])
def test_exif_orientation(annotated_as: str, tmp_path: Path) -> None:
    """Decision 5: boxes refer to the upright image, unless the annotated size is that of the stored pixels."""
    pixels = np.zeros((60, 100, 3), np.uint8)
    pixels[:30, :50] = 255  # the upper left quarter, as stored
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn: upright it is the upper right
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", exif=exif, quality=95)
    box = [30.0, 0.0, 30.0, 50.0] if annotated_as == "upright" else [0.0, 0.0, 50.0, 30.0]
    width, height = (60, 100) if annotated_as == "upright" else (100, 60)
    for split in ("train", "valid"):
        folder = coco(tmp_path / "source", {"a.jpg": (data.getvalue(), [annotated(box)])}, split) / split
        document = json.loads((folder / "_annotations.coco.json").read_text())
        document["images"][0] |= {"width": width, "height": height}
        (folder / "_annotations.coco.json").write_text(json.dumps(document))
    source = open_index(tmp_path / "source")
    packed(source, tmp_path / "bytes")
    same(open_index(tmp_path / "bytes"), source)
    (tmp_path / "bytes" / INDEX_FILE).unlink()
    assert by_name(open_index(tmp_path / "bytes")) == by_name(source)
    packed(source, tmp_path / "small", image_size=(50, 50))
    index = open_index(tmp_path / "small")
    assert index.boxes[0].tolist() == [value / 2 for value in (box[0], box[1], box[0] + box[2], box[1] + box[3])]
    with Image.open(io.BytesIO(index.read(0))) as image:
        assert image.getexif().get(0x0112, 1) == 1
        assert image.size == (width // 2, height // 2)
        x1, y1, x2, y2 = index.boxes[0].astype(int).tolist()
        inside = np.asarray(image.crop((x1 + 2, y1 + 2, x2 - 2, y2 - 2)))
        assert inside.min() > 200
        assert np.asarray(image).mean() < 100


DAMAGE = {
    "a byte range outside its shard": ("length", 10**9),
    "a shard that is not listed": ("shard", 9),
    "a split that does not exist": ("split", 3),
    "a negative offset": ("offset", -1),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused(name: str, source: Index, tmp_path: Path) -> None:
    import pyarrow as pa

    packed(source, tmp_path / "out")
    path = tmp_path / "out" / INDEX_FILE
    with pa.ipc.open_file(path.read_bytes()) as reader:
        batch = reader.get_batch(0)
    column, value = DAMAGE[name]
    position = batch.schema.get_field_index(column)
    kind = batch.schema.field(column).type
    columns = [pa.array([value] * len(batch), kind) if k == position else batch.column(k) for k in range(12)]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(pa.record_batch(columns, schema=batch.schema))
    with pytest.raises(DataError, match="index of the packed shards cannot be read"):
        open_index(tmp_path / "out")


def test_lost_and_truncated_shards_are_refused(tmp_path: Path, source: Index) -> None:
    packed(source, tmp_path / "out")
    open_index(tmp_path / "out")  # now the cache has it, too
    shard = tmp_path / "out" / "val-00000.tar"
    shard.write_bytes(shard.read_bytes()[:-600])
    with pytest.raises(DataError, match="1 of 2 packed shards") as error:
        open_index(tmp_path / "out")
    assert "val-00000.tar has 5,544 bytes instead of 6,144" in str(error.value)
    for path in (tmp_path / "out").glob("*.tar"):
        path.unlink()
    with pytest.raises(DataError, match="2 of 2 packed shards") as error:
        open_index(tmp_path / "out")
    assert "train-00000.tar with 4 images does not exist" in str(error.value)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_splits(tmp_path / "source")
    assert run(monkeypatch, "data", "pack", root, tmp_path / "out", "--image-size", "32", "--quality", "80") == 0
    text = capsys.readouterr().out
    assert "6 images (train 4, val 2) in 2 shards" in text
    assert "size of the images before 3.8 KiB, of the shards 17.0 KiB" in text
    assert "5 images encoded again" in text
    assert run(monkeypatch, "data", "pack", root, tmp_path / "out", "--image-size", "32", "--quality", "80") == 0
    assert "already packed: " in capsys.readouterr().out
    assert run(monkeypatch, "data", "pack", root, tmp_path / "out", "--json") == 2
    for wrong in (
        ["--quality", "80"],
        ["--image-size", "4"],
        ["--image-size", "40", "9"],
        ["--shard-mib", "0"],
        ["--workers", "-1"],
    ):
        assert run(monkeypatch, "data", "pack", root, tmp_path / "x", *wrong) == 2
    assert run(monkeypatch, "data", "pack", root, "https://host/x") == 2
    assert "gs://…" in capsys.readouterr().err


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with s3_server() as s3, google_server() as google:
        yield {"s3": s3, "gs": google}


@pytest.fixture(params=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    with servers[request.param].bucket().through() as (served, proxy):
        apply(monkeypatch, served.environment)
        yield Bucket(served, proxy, open_store(parse_uri(served.uri)))


def test_into_a_bucket_and_from_there_without_a_scan(bucket: Bucket, source: Index, tmp_path: Path) -> None:
    packed(source, tmp_path / "out")
    result = packed(source, bucket.data)
    assert not result.was_packed
    keys = [info.key.removeprefix("some/set/") for info in bucket.store.list("some/set")]
    assert keys == sorted([INDEX_FILE, "train-00000.tar", "val-00000.tar"])
    for name, digest in tree(tmp_path / "out").items():
        assert hashlib.sha256(bucket.store.read(f"some/set/{name}")).hexdigest() == digest, name
    assert packed(source, bucket.data).was_packed
    bucket.got()
    index = open_index(bucket.data)
    assert bucket.got() == [INDEX_FILE]
    same(index, source)
    row = int(index.image_indices("val")[0])
    found = index.remote_object(row)
    assert found is not None
    store, key, start, length = found
    assert (key, (start, length)) == ("some/set/val-00000.tar", index.byte_range(row))
    assert store.read(key, start=start, length=length) == source.read(row)
    assert index.display_source(row).startswith(f"{bucket.data}/val-00000.tar/")
    bucket.store.write("some/other/mine.txt", b"mine")
    with pytest.raises(UsageError, match="has other data"):
        packed(source, bucket.data.replace("/set", "/other"))


def test_from_a_bucket_into_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(two_splits(tmp_path / "source"))
    local = open_index(tmp_path / "source")
    packed(local, tmp_path / "out")
    packed(open_index(bucket.data), f"{bucket.served.uri}/packed")
    for name, digest in tree(tmp_path / "out").items():
        assert hashlib.sha256(bucket.store.read(f"packed/{name}")).hexdigest() == digest, name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [[], ["--image-size", "450", "--quality", "97"]], ids=["bytes", "encoded"])
def test_after_kill_9_the_checksums_are_those_of_an_undisturbed_run(options: list[str], tmp_path: Path) -> None:
    """A real process, killed again and again as soon as another shard is finished."""
    rng = np.random.default_rng(0)
    images = {}
    for number in range(60):
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (500, 600, 3), np.uint8)).save(data, "JPEG", quality=95)
        images[f"{number}.jpg"] = data.getvalue(), [annotated([10, 20, 300, 200], 1 + number % 3)]
    root = coco(tmp_path / "source", images)
    command = [sys.executable, "-m", "stoker", "data", "pack", str(root)]
    arguments = ["--shard-mib", "1", "--workers", "1", *options]
    environment = {**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache")}
    undisturbed = subprocess.run(
        [*command, str(tmp_path / "whole"), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert undisturbed.returncode == 0, undisturbed.stderr
    whole, out, kills = tree(tmp_path / "whole"), tmp_path / "out", 0
    assert len(whole) > 4
    while not (out / INDEX_FILE).exists():
        finished = len(list(out.glob("*.tar")))
        process = subprocess.Popen(
            [*command, str(out), *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and len(list(out.glob("*.tar"))) < finished + 2:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
        assert kills < 100
    assert kills > 1
    last = subprocess.run(
        [*command, str(out), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert last.returncode == 0, last.stderr
    assert tree(out) == whole
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")} == kept
