"""Data sets in buckets, on real servers: the same index as of the local folder, and no byte more than is needed."""

import os
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.data import remote
from stoker.data.images.headers import FIRST_READ_BYTES, HEAD_BYTES, read_header
from stoker.data.index import Index, open_index, require_images
from stoker.data.remote import locked_mirror, mirror_dir_for
from stoker.data.validation.check import check_dataset
from stoker_watch.errors import ConfigError, DataError, StorageError
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import run_stoker
from tests.fixtures.data_same_index import WRITE
from tests.trainer.data.buckets import DRAWN, Bucket, count_read_bytes, filled, put_folder, same
from tests.watch.storage.servers import Conditions, Server, apply, google_server, s3_server


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


@pytest.fixture
def s3(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with servers["s3"].bucket().through() as (served, proxy):
        apply(monkeypatch, served.environment)
        yield Bucket(served, proxy, open_store(parse_uri(served.uri)))


@pytest.mark.parametrize("name", WRITE)
def test_index_equals_the_local_one(bucket: Bucket, tmp_path: Path, name: str) -> None:
    folder = filled(bucket, tmp_path / "set", WRITE[name])
    if name == "parquet":
        with pytest.raises(DataError, match="Parquet is not read from a bucket") as error:
            open_index(bucket.data)
        assert f"{bucket.data}/data/train-00000-of-00001.parquet" in str(error.value)
        return
    remote, local = open_index(bucket.data), open_index(folder)
    same(remote, local)
    assert remote.source == bucket.data
    assert [note.replace(bucket.data, str(folder)) for note in remote.notes][: len(local.notes)] == list(local.notes)
    assert not missing(remote)
    image_index = int(remote.image_indices("val")[0])
    if name == "tfrecord":
        assert remote.remote_object(image_index) is None
        assert remote.notes[-1].startswith(f"copied from {bucket.data}: 2 TFRecord file(s), ")
        assert remote.display_source(image_index) == f"{bucket.data}/val.record/val-0.jpg"
    else:
        found = remote.remote_object(image_index)
        assert found is not None
        store, key, start, length = found
        assert store.read(key, start=start, length=length) == local.read(image_index)
        assert remote.display_source(image_index).startswith(f"{bucket.served.uri}/{key}")
        is_inside = remote.byte_range(image_index) is not None
        stub, file = (index.path(image_index) for index in (remote, local))
        stub, file = (stub.parent, file.parent) if is_inside else (stub, file)
        assert stub.stat().st_size == file.stat().st_size
        assert not any(stub.read_bytes()), "a placeholder has no content"


def missing(index: Index) -> list[int]:
    return require_images(index)


def test_local_data_set_has_no_remote_objects(tmp_path: Path) -> None:
    WRITE["coco"](tmp_path / "set", DRAWN)
    index = open_index(tmp_path / "set")
    assert index.remote_object(0) is None
    assert index.display_source(0) == str(index.path(0))
    assert index.source == str(tmp_path / "set")


def test_only_annotations_are_downloaded_and_only_once(bucket: Bucket, tmp_path: Path) -> None:
    filled(bucket, tmp_path / "set", WRITE["voc"])
    bucket.got()
    first = open_index(bucket.data)
    xml = [f"Annotations/{item.name.replace('.jpg', '.xml')}" for item in DRAWN]
    assert bucket.got() == sorted([*xml, "ImageSets/Main/train.txt", "ImageSets/Main/val.txt"])
    again = open_index(bucket.data)
    assert bucket.got() == []
    same(again, first)


def test_only_changed_files_are_downloaded(bucket: Bucket, tmp_path: Path) -> None:
    folder = filled(bucket, tmp_path / "set", WRITE["voc"])
    open_index(bucket.data)
    changed = folder / "Annotations" / "train-2.xml"
    text = changed.read_text().replace("<xmin>4<", "<xmin>5<")  # of the same size
    changed.write_text(text)
    bucket.store.write("some/set/Annotations/train-2.xml", text.encode())
    for gone in ("JPEGImages/train-1.jpg", "Annotations/train-1.xml"):
        bucket.store.delete(f"some/set/{gone}")
        (folder / gone).unlink()
    (folder / "ImageSets/Main/train.txt").write_text("train-0\ntrain-2")
    bucket.store.write("some/set/ImageSets/Main/train.txt", b"train-0\ntrain-2")
    bucket.got()
    remote = open_index(bucket.data)
    assert bucket.got() == ["Annotations/train-2.xml", "ImageSets/Main/train.txt"]
    same(remote, open_index(folder))
    assert len(remote) == 3
    assert not (remote.root / "JPEGImages/train-1.jpg").exists()


def test_size_of_a_replaced_image_is_read_again(bucket: Bucket, tmp_path: Path) -> None:
    """Boxes of YOLO depend on the sizes of the images; the new one is a placeholder of as many bytes."""
    folder = filled(bucket, tmp_path / "set", WRITE["yolo"])
    before = open_index(bucket.data)
    image_index = int(before.image_indices("train")[0])
    wide, high = before.original_size[image_index, ::-1].tolist()
    data = (folder / "images/train/train-0.jpg").read_bytes()
    frame = data.index(b"\xff\xc0") + 5
    turned = data[:frame] + bytes([0, wide, 0, high]) + data[frame + 4 :]
    bucket.store.write("some/set/images/train/train-0.jpg", turned)
    after = open_index(bucket.data)
    assert after.original_size[image_index].tolist() == [wide, high]


def test_image_sizes_need_only_the_first_bytes(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    WRITE["yolo"](folder, DRAWN)
    for path in folder.rglob("*.jpg"):  # as large as a photograph, behind the end of the image
        path.write_bytes(path.read_bytes() + bytes(200_000))
    s3.put(folder)
    read = count_read_bytes(monkeypatch)
    index = open_index(s3.data)
    text = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".txt", ".yaml"))
    assert sum(read) == text + len(DRAWN) * FIRST_READ_BYTES
    same(index, open_index(folder))


@pytest.mark.parametrize(
    ("before", "read"),
    [(1, FIRST_READ_BYTES), (5_000, FIRST_READ_BYTES + HEAD_BYTES), (100_000, FIRST_READ_BYTES + HEAD_BYTES + 201_000)],
)
def test_jpeg_header_after_long_segments_is_read(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, read: int
) -> None:
    """EXIF and color profiles stand before a JPEG's size; what is read grows until it is there."""
    folder = tmp_path / "set"
    WRITE["coco"](folder, DRAWN)
    path = folder / "train" / "train-0.jpg"
    data, filler = path.read_bytes(), b""
    while before > 0:
        part = min(before, 60_000)
        filler, before = filler + b"\xff\xee" + (part + 2).to_bytes(2, "big") + bytes(part), before - part
    path.write_bytes(data[:2] + filler + data[2:] + bytes(100_000))
    s3.put(folder)
    index = open_index(s3.data)
    image_index = int(index.image_indices("train")[0])
    counted = count_read_bytes(monkeypatch)
    assert read_header(index.path(image_index)) == read_header(path)
    assert sum(counted) == pytest.approx(read, abs=1_000)


def test_killed_download_is_completed(s3: Bucket, tmp_path: Path) -> None:
    folder = filled(s3, tmp_path / "set", WRITE["voc"])
    code = f"from stoker.data.index import open_index; open_index({s3.data!r})"
    s3.got()
    s3.proxy.conditions = Conditions(plan=lambda _n, _method, path: "hang" if "train-2.xml" in path else None)
    process = subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))
    copied = mirror_dir_for(parse_uri(s3.data)) / "set" / "Annotations" / "train-0.xml"
    try:
        while not copied.exists() or not any("train-2.xml" in request.path for request in s3.proxy.requests):
            assert process.poll() is None, "it should hang"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    s3.proxy.conditions = Conditions()
    s3.got()
    same(open_index(s3.data), open_index(folder))
    fetched = s3.got()
    assert "Annotations/train-2.xml" in fetched
    assert "Annotations/train-0.xml" not in fetched, "what was whole is not fetched again"
    assert not list(copied.parent.glob(".*")), "no temporary file stays"


def test_one_process_at_a_time(s3: Bucket, tmp_path: Path) -> None:
    filled(s3, tmp_path / "set", WRITE["voc"])
    s3.got()
    code = f"from stoker.data.index import open_index; print(len(open_index({s3.data!r}).boxes))"
    uri = parse_uri(s3.data)
    with locked_mirror(uri, uri):  # as a process that copies holds it
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        output = process.stderr.readline()
        assert output == f"Another process is copying the annotations of {s3.data}: waiting for it\n"
        assert s3.got() == []
    assert process.communicate(timeout=60)[0].strip() == "7"
    assert len(s3.got()) == len(DRAWN) + 2


def test_waiting_process_uses_the_mirror_of_the_other(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(s3, tmp_path / "set", WRITE["coco"])
    uri = parse_uri(s3.data)
    waits = threading.Event()
    monkeypatch.setattr(remote, "print_status", lambda _: waits.set())
    made = list[tuple[Path, tuple[str, ...]]]()
    other = threading.Thread(target=lambda: made.append(remote.sync_mirror(uri)))

    def while_listing(_number: int, _method: str, _path: str) -> None:
        if not other.ident:
            other.start()
            assert waits.wait(60)

    s3.proxy.conditions = Conditions(plan=while_listing)
    first = remote.sync_mirror(uri)
    other.join()
    assert made == [first]
    assert sum("list-type" in request.path for request in s3.proxy.requests) == 1
    remote.sync_mirror(uri)
    assert sum("list-type" in request.path for request in s3.proxy.requests) == 2, "later it is listed again"


def test_annotation_file_as_data_set(bucket: Bucket, tmp_path: Path) -> None:
    WRITE["coco"](tmp_path / "set", DRAWN)
    (tmp_path / "official" / "annotations").mkdir(parents=True)
    (tmp_path / "set" / "train").rename(tmp_path / "official" / "train2017")
    file = tmp_path / "official" / "annotations" / "instances_train2017.json"
    (tmp_path / "official" / "train2017" / "_annotations.coco.json").rename(file)
    bucket.put(tmp_path / "official")
    remote = open_index(f"{bucket.data}/annotations/instances_train2017.json")
    same(remote, open_index(file))
    assert remote.source == bucket.data


def test_shard_pattern(s3: Bucket, tmp_path: Path) -> None:
    folder = filled(s3, tmp_path / "set", WRITE["tfrecord"])
    same(open_index(f"{s3.data}/train.rec*"), open_index(f"{folder}/train.rec*"))


def test_missing_folder_bucket_and_file(bucket: Bucket, tmp_path: Path) -> None:
    filled(bucket, tmp_path / "set", WRITE["coco"])
    with pytest.raises(DataError) as nothing:
        open_index(f"{bucket.served.uri}/some/sett")
    assert nothing.value.location == f"{bucket.served.uri}/some/sett"
    assert nothing.value.cause == f"the folders in {bucket.served.uri}/some are set"
    assert nothing.value.fix == f"did you mean {bucket.data}?"
    with pytest.raises(DataError) as only_files:
        open_index(f"{bucket.data}/train/trian-0.jpg")
    assert str(only_files.value.cause).startswith(f"{bucket.data}/train has other objects, e.g. ")
    with pytest.raises(DataError, match="is an object, but not an annotation file"):
        open_index(f"{bucket.data}/train/train-0.jpg")
    with pytest.raises(StorageError, match="no bucket") as no_bucket:
        open_index(bucket.data.replace("//bucket", "//another"))
    assert no_bucket.value.exit_code == 3
    with pytest.raises(DataError, match="does not exist") as no_file:
        open_index(f"{bucket.data}/train/instances.json")
    assert str(mirror_dir_for(parse_uri(bucket.data)).parent) not in str(no_file.value), "users do not know the mirror"
    assert f"{bucket.data}/train/instances.json" in str(no_file.value)


def test_permission_denied(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    served = servers["gs"].bucket()
    apply(monkeypatch, served.environment)
    monkeypatch.setattr(servers["gs"].objects, "denied", {"GET"})
    with pytest.raises(StorageError) as forbidden:
        open_index(f"{served.uri}/set")
    assert "storage.objects.list" in str(forbidden.value)
    assert f"{served.uri}/set" in str(forbidden.value)


def test_errors_name_the_uri_of_broken_annotations(s3: Bucket, tmp_path: Path) -> None:
    folder = filled(s3, tmp_path / "set", WRITE["coco"])
    s3.store.write("some/set/train/_annotations.coco.json", b'{"images": [')
    with pytest.raises(DataError) as raised:
        open_index(s3.data)
    assert raised.value.location is not None
    assert raised.value.location.startswith(f"{s3.data}/train/_annotations.coco.json")
    (folder / "train" / "train-0.jpg").unlink()


def test_keys_that_cannot_be_file_names(s3: Bucket, tmp_path: Path) -> None:
    filled(s3, tmp_path / "set", WRITE["coco"])
    for key in (f"train/{'x' * 300}.jpg", "train/other", "train/other/within.jpg", "train/back\\slash.jpg"):
        s3.store.write(f"some/set/{key}", b"data")
    for key in ("some/set/", "some/set/train/", "some/set/empty/"):  # as consoles make them
        put_folder(s3.served, key)
    index = open_index(s3.data)
    assert len(index) == len(DRAWN)
    assert index.notes[-3:] == (
        "1 object(s) left out: its name has a character that file names cannot have, e.g."
        " 'some/set/train/back\\\\slash.jpg'",
        f"1 object(s) left out: its name is longer than 255 bytes, e.g. 'some/set/train/{'x' * 300}.jpg'",
        "1 object(s) left out: it is an object and a folder, e.g. 'some/set/train/other'",
    )
    assert not (index.root / "some").exists(), "the folder itself is no file in it"


def test_key_that_breaks_the_listing_is_named(s3: Bucket, tmp_path: Path) -> None:
    filled(s3, tmp_path / "set", WRITE["coco"])
    put_folder(s3.served, "some/set/train//doubled.jpg")
    with pytest.raises(StorageError, match=r"'some/set/train//doubled\.jpg' has a name that") as raised:
        open_index(s3.data)
    bucket = f"s3://{s3.store.uri.bucket}"
    move = f"aws s3 mv {bucket}/some/set/train//doubled.jpg {bucket}/some/set/train/doubled.jpg"
    assert move in (raised.value.fix or "")


@pytest.mark.parametrize("name", ["a//b.jpg", "../b.jpg", "/b.jpg", "x" * 256, "a\\b", "nul\0"])
def test_invalid_names(name: str) -> None:
    assert remote.invalid_name_reason(name) is not None
    assert remote.invalid_name_reason("fine/ö b.jpg") is None


def test_disk_full(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(s3, tmp_path / "set", WRITE["tfrecord"])
    monkeypatch.setattr(remote, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(StorageError, match="not enough disk space") as raised:
        open_index(s3.data)
    assert "STOKER_CACHE_DIR" in str(raised.value)
    assert str(mirror_dir_for(parse_uri(s3.data))) in str(raised.value)


def test_data_check_of_a_bucket(s3: Bucket, tmp_path: Path) -> None:
    folder = filled(s3, tmp_path / "set", WRITE["voc"])
    for name in ("train-1.jpg", "train-2.jpg"):
        s3.store.write(f"some/set/JPEGImages/{name}", b"no image")
        (folder / "JPEGImages" / name).write_bytes(b"no image")
    remote, local = check_dataset(s3.data), check_dataset(folder)
    assert remote.items == local.items
    assert remote.splits == local.splits
    code, output = run_stoker("data", "check", s3.data, cwd=tmp_path)
    assert code == 4, "more images are none than may be"
    assert s3.data in output
    assert "train-1.jpg" in output
    assert "buckets" not in output, "users do not know the mirror"


def test_environment_variables_in_the_uri(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(s3, tmp_path / "set", WRITE["coco"])
    monkeypatch.setenv("DATA_ROOT", f"{s3.served.uri}/some")
    assert open_index("$DATA_ROOT/set").source == s3.data
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    assert open_index("${DATA_ROOT}/set").source == str(tmp_path / "set")
    monkeypatch.delenv("DATA_ROOT")
    with pytest.raises(ConfigError, match="DATA_ROOT") as raised:
        open_index("$DATA_ROOT/set")
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("chunk", [2_000, 10**9])
def test_headers_of_other_formats(s3: Bucket, tmp_path: Path, chunk: int) -> None:
    """What stands behind the pixels (EXIF of a PNG, the tags of a TIFF) is looked for there, at most a few times."""
    folder = tmp_path / "set"
    WRITE["coco"](folder, DRAWN)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 150, 3), np.uint8))
    orientation = Image.Exif()
    orientation[0x0112] = 6
    pixels = zlib.compress(np.random.default_rng(1).bytes(90_000))
    parts = [pixels[at : at + chunk] for at in range(0, len(pixels), chunk)]
    content = [b"IHDR" + struct.pack(">IIBBBBB", 150, 200, 8, 2, 0, 0, 0), *(b"IDAT" + part for part in parts),
               b"eXIf" + orientation.tobytes()[6:], b"IEND"]  # fmt: skip
    chunks = (struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in content)
    (folder / "train" / "train-0.jpg").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    noise.save(folder / "train" / "train-1.jpg", "TIFF", exif=orientation)
    noise.save(folder / "train" / "train-2.jpg", "WEBP", exif=orientation, lossless=True)
    s3.put(folder)
    index = open_index(s3.data)
    for image_index, kind in enumerate(("png", "tiff", "webp")):
        s3.got()
        expected = read_header(folder / "train" / f"train-{image_index}.jpg")
        assert read_header(index.path(image_index)) == expected
        assert (expected.image_format, expected.orientation, expected.size) == (kind, 6, (150, 200))
        assert len(s3.got()) <= 3


def test_names_that_differ_in_case_only(tmp_path: Path) -> None:
    names = ["a/B.jpg", "a/c.jpg", "A/b.jpg"]
    remote.require_distinct_names(names, tmp_path / "mirror")  # this disk distinguishes case
    (tmp_path / "MIRROR").mkdir()  # what a disk that does not would show
    with pytest.raises(DataError, match=r"'a/B.jpg' and 'A/b.jpg' differ in case only"):
        remote.require_distinct_names(names, tmp_path / "mirror")
    remote.require_distinct_names(names[:2], tmp_path / "mirror")
