"""Data sets whose names lead to devices, FIFOs and files of others, and small files that claim to be huge."""

import gzip
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data.convert import convert
from stoker.data.formats import tfrecord_bytes
from stoker.data.formats import yolo as yolo_module
from stoker.data.formats.webdataset import DamagedArchive, iter_members
from stoker.data.index import Index, open_index
from stoker.data.remote import download_image
from stoker.data.validation.check import check_dataset
from stoker_watch import regular_files
from stoker_watch.errors import DataError, StokerError, StorageError
from tests.bounded import bounded
from tests.drawn import draw
from tests.trainer.data.hostile import encoded
from tests.trainer.data.tfrecords import frame

BOX = [4, 5, 20, 21]


@pytest.fixture(autouse=True)
def _bounds() -> Iterator[None]:
    with bounded():
        yield


def coco(folder: Path, *names: str) -> Path:
    """A COCO set of eight images on the disk, and of these names."""
    (folder / "images").mkdir(parents=True)
    own = [f"good {n}.jpg" for n in range(8)]
    for n, name in enumerate(own):
        (folder / "images" / name).write_bytes(encoded(n))
    images = [{"id": n, "file_name": name, "width": 64, "height": 48} for n, name in enumerate([*own, *names])]
    annotations = [{"id": n, "image_id": n, "category_id": 1, "bbox": BOX} for n in range(len(images))]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    (folder / "labels.json").write_text(json.dumps(content))
    return folder


def kinds(report: Any) -> dict[str, tuple[str, ...]]:
    return {item.kind: item.examples for item in report.items}


def test_special_files_are_reported_and_never_read(tmp_path: Path) -> None:
    root = coco(tmp_path / "set", "fifo.jpg", "folder.jpg", "zero.jpg", "huge.jpg", "/dev/zero", "socket.jpg")
    images = root / "images"
    os.mkfifo(images / "fifo.jpg")
    (images / "folder.jpg").mkdir()
    (images / "zero.jpg").symlink_to("/dev/zero")
    os.mkfifo(images / "socket.jpg")
    with (images / "huge.jpg").open("wb") as file:
        file.truncate(regular_files.MAX_BYTES + 1)
    report = check_dataset(root, allow_outside=True, max_bad_fraction=1)
    found = kinds(report)["unreadable-image"]
    for name, reason in (("fifo", "FIFO"), ("folder", "directory"), ("zero", "device"), ("huge", "at most 1,073")):
        assert any(f"{name}.jpg: " in text and reason in text for text in found), found
    assert len(found) == 6
    assert report.num_usable_images == 8
    assert not any("outside" in reason for reason in report.refusals)
    converted = convert(open_index(root, allow_outside=True), tmp_path / "out", "coco")
    assert sum(converted.num_images.values()) == 8
    assert len(converted.skipped) == 6


def outside_paths(folder: Path) -> dict[str, str]:
    """Name → the text of an annotation, which leads out of `folder`/set by each way."""
    (folder / "secret").mkdir()
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (folder / "secret" / name).write_bytes(encoded(50))
    return {
        "absolute": str(folder / "secret" / "a.jpg"),
        "above": "../../secret/b.jpg",
        "link": "link.jpg",
        "device": "/dev/zero",
    }


@pytest.mark.parametrize("way", ["absolute", "above", "link", "device"])
def test_a_path_that_leads_out_is_refused_unless_allowed(tmp_path: Path, way: str) -> None:
    name = outside_paths(tmp_path)[way]
    root = coco(tmp_path / "set", name)
    if way == "link":
        (root / "images" / name).symlink_to(tmp_path / "secret" / "c.jpg")
    for opened in (root, root / "labels.json"):
        with pytest.raises(DataError, match="1 of the 9 images are outside") as caught:
            open_index(opened)
        assert "--allow-outside" in str(caught.value)
    report = check_dataset(root)
    assert len(kinds(report)["outside-path"]) == 1
    assert any("outside the data set's folder" in reason for reason in report.refusals)
    index = open_index(root, allow_outside=True)
    assert len(index) == 9
    assert any("outside the folder, as --allow-outside allows" in note for note in index.notes)
    with pytest.raises(DataError):  # the cache of the other reading is not used
        open_index(root)


def test_an_absolute_path_into_the_folder_and_links_within_it_are_fine(tmp_path: Path) -> None:
    root = coco(tmp_path / "set", str(tmp_path / "set" / "images" / "absolute.jpg"), "link.jpg")
    (root / "images" / "absolute.jpg").write_bytes(encoded(60))
    (root / "more").mkdir()
    (root / "more" / "real.jpg").write_bytes(encoded(61))
    (root / "images" / "link.jpg").symlink_to("../more/real.jpg")
    assert len(open_index(root)) == 10


def test_a_missing_image_is_missing_wherever_it_would_be(tmp_path: Path) -> None:
    root = coco(tmp_path / "set", "/no/such/folder/a.jpg")
    assert "outside-path" not in kinds(check_dataset(root))


def yolo(folder: Path, *, images: Path | None = None, text: str = "train: images/train\nval: images/val\n") -> Path:
    """A YOLO set; images: the folder of images and labels, else its own."""
    images = folder if images is None else images
    for split, count in (("train", 6), ("val", 2)):
        for kind in ("images", "labels"):
            (images / kind / split).mkdir(parents=True)
        for n in range(count):
            (images / "images" / split / f"{n}.jpg").write_bytes(encoded(n))
            (images / "labels" / split / f"{n}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "data.yaml").write_text(text + "names: [cat]\n")
    return folder


def boxes(index: Index) -> list[Any]:
    return [index.boxes.tolist(), index.labels.tolist(), len(index), index.splits]


def test_a_link_to_a_folder_of_images_is_followed_with_a_note(tmp_path: Path) -> None:
    own = boxes(open_index(yolo(tmp_path / "plain")))
    root = yolo(tmp_path / "set")
    for kind in ("images", "labels"):
        (root / kind).rename(tmp_path / f"big {kind}")
        (root / kind).symlink_to(tmp_path / f"big {kind}")
    index = open_index(root)
    assert boxes(index) == own
    assert any("images/train/ is a link to" in note for note in index.notes)


def test_a_description_may_name_another_folder_if_the_user_names_the_description(tmp_path: Path) -> None:
    text = f"path: {tmp_path / 'big'}\ntrain: images/train\nval: images/val\n"
    root = yolo(tmp_path / "set", images=tmp_path / "big", text=text)
    assert boxes(open_index(root / "data.yaml")) == boxes(open_index(yolo(tmp_path / "plain")))
    with pytest.raises(DataError, match="8 of the 8 images are outside") as caught:
        open_index(root)
    assert f"name the file {root / 'data.yaml'} instead" in str(caught.value)
    lists = yolo(tmp_path / "lists", text="train: train.txt\nval: val.txt\n")
    for split in ("train", "val"):
        names = sorted((tmp_path / "big/images" / split).glob("*.jpg"))
        (lists / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))
    assert boxes(open_index(lists / "data.yaml")) == boxes(open_index(root / "data.yaml"))
    with pytest.raises(DataError, match="outside"):
        open_index(lists)


def test_the_root_of_the_disk_as_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = boxes(open_index(yolo(tmp_path / "plain")))
    root = yolo(tmp_path / "set", text="path: /\ntrain: images/train\nval: images/val\n")
    assert boxes(open_index(root)) == plain
    monkeypatch.setattr(yolo_module, "MAX_WALKED_DIRS", 30)
    for number in range(30):
        (root / f"images/train/{number}").mkdir()
    with pytest.raises(DataError, match="more than 30 folders below"):
        open_index(root)


@pytest.mark.parametrize("where", ["/", "~/", "~/..", "../../..", "HOME/..", "../link"])
def test_a_folder_of_images_far_above_is_refused_and_not_walked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    home = tmp_path / "homes" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    root = yolo(tmp_path / "sets/a/b")
    (root / "../link").symlink_to("/")
    (root / "data.yaml").write_text(f"path: {where.replace('HOME', str(home))}\ntrain: .\nval: .\nnames: [cat]\n")
    monkeypatch.setattr(os, "walk", lambda *_, **__: pytest.fail("it is walked"))
    with pytest.raises(DataError, match="much more than a data set") as caught:
        open_index(root / "data.yaml")
    assert "data.yaml: train: ." in str(caught.value)


def test_the_home_of_a_user_who_does_not_exist(tmp_path: Path) -> None:
    plain = boxes(open_index(yolo(tmp_path / "plain")))
    root = yolo(tmp_path / "set", text="path: ~nobody_has_this_name\ntrain: images/train\nval: images/val\n")
    assert boxes(open_index(root)) == plain


def test_a_pax_header_with_thousands_of_digits() -> None:
    """Python refuses to read such a number with an error of its own."""
    record = b"1" * 4500 + b" path=a.jpg\n"
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(record)
    data = header.tobuf() + record + bytes(-len(record) % 512) + tarfile.TarInfo("a.jpg").tobuf() + bytes(1024)
    with pytest.raises(DamagedArchive) as caught:
        list(iter_members(lambda start, length: data[start : start + length], len(data)))
    assert caught.value.args == ("damaged-shard", "byte 0: a pax header that cannot be read")


@pytest.mark.usefixtures("own_cache")
def test_a_redirect_to_ftp_is_not_followed() -> None:
    connections = []

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            connections.append(self.path)
            to = {"/a.jpg": "/b.jpg", "/b.jpg": f"FTP://127.0.0.1:{self.server.server_port}/c.jpg"}[self.path]
            self.send_response(302)
            self.send_header("Location", to)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Redirect) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(DataError, match="redirects to ftp:"):
            download_image(f"http://127.0.0.1:{server.server_port}/a.jpg")
        server.shutdown()
    assert connections == ["/a.jpg", "/b.jpg"]


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [fifo, zero])
@pytest.mark.parametrize(
    "name",
    [
        "labels/train/1.txt",
        "data.yaml",
        "train.txt",
        "classes.txt",
        "labels.json",
        "train.csv",
        "a.record",
        "label_map.pbtxt",
    ],
)
def test_special_files_in_place_of_annotations(tmp_path: Path, name: str, plant: Callable[[Path], None]) -> None:
    """They are an error or ignored; reading never blocks, and never goes on for ever."""
    text = "train: train.txt\nval: images/val\n" if name == "train.txt" else "train: images/train\nval: images/val\n"
    root = yolo(tmp_path / "set", text=text)
    plant(root / name)
    for data in (root, root / name):
        read, message = 0, ""
        try:
            read = len(open_index(data))
        except StokerError as error:
            message = str(error)
        assert read == 8 or any(
            text in message for text in (Path(name).name, "/dev/zero", "No annotations", "do not exist")
        )


def test_special_files_in_place_of_xml(tmp_path: Path) -> None:
    for folder in ("Annotations", "JPEGImages"):
        (tmp_path / "set" / folder).mkdir(parents=True)
    for n in range(12):
        (tmp_path / "set/JPEGImages" / f"{n}.jpg").write_bytes(encoded(n))
        box = "<xmin>4</xmin><ymin>5</ymin><xmax>24</xmax><ymax>26</ymax>"
        text = f"<annotation><object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
        (tmp_path / "set/Annotations" / f"{n}.xml").write_text(text)
    fifo(tmp_path / "set/Annotations/3.xml")
    zero(tmp_path / "set/Annotations/4.xml")
    bomb = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10 if n else "lol"}">' for n in range(9))
    (tmp_path / "set/Annotations/5.xml").write_text(f"<!DOCTYPE a [{bomb}]><annotation>&e8;</annotation>")
    found = kinds(check_dataset(tmp_path / "set"))["unreadable-annotations"]
    assert [text.partition(":")[0] for text in found] == [f"Annotations/{n}.xml" for n in (3, 4, 5)]
    assert "FIFO" in found[0]
    assert "device" in found[1]


@pytest.mark.parametrize(
    "text",
    [
        "nc: 999999999",
        "nc: " + "9" * 5000,
        "names: {99999999999: a}",
        "names: {5: a, 99999: b}",
        "nc: 1\nkpt_shape: [999999999999, 3]",
        "names: " + "[" * 3000,
        "names: " + "{a: " * 3000,
        "path: [a]",
        "names: &a [*a]",
        "names: classes.txt",
    ],
    ids=lambda text: text[:24],
)
def test_absurd_descriptions(tmp_path: Path, text: str) -> None:
    root = yolo(tmp_path / "set")
    (root / "classes.txt").write_text("")
    (root / "data.yaml").write_text(f"train: images/train\nval: images/val\n{text}\n")
    with bounded(megabytes=256), pytest.raises(DataError) as caught:
        open_index(root)
    assert "data.yaml" in str(caught.value) or "classes.txt" in str(caught.value)


def test_more_classes_than_any_data_set_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.data.index.MAX_CLASSES", 2)
    with pytest.raises(DataError, match="3 classes; at most 2"):
        open_index(draw(tmp_path / "set"))


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"images": ' + "[" * 200_000, '{"images": [NaN, ' + '{"a":' * 200_000],
    ids=["list", "key", "nan"],
)
def test_json_that_is_nested_deeply(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError):
        open_index(tmp_path / "a.json")
    root = yolo(tmp_path / "set")
    (root / "data.yaml").unlink()
    (root / "notes.json").write_text('{"categories": ' + text)
    with pytest.raises(DataError, match=r"class names|not COCO JSON|nested too deeply"):
        open_index(root)


def unpacked_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and "shards" in path.parts)


@pytest.mark.parametrize("head", [b"", frame(b"not an example")], ids=["nothing", "a frame"])
def test_a_gzip_bomb_is_left_at_its_first_bad_frame(tmp_path: Path, own_cache: Path, head: bytes) -> None:
    (tmp_path / "set").mkdir()
    with gzip.open(tmp_path / "set" / "train.record", "wb") as file:
        file.write(head)
        for _ in range(64):
            file.write(bytes(1 << 20))
    written: list[int] = []
    copy = tfrecord_bytes._copy_frames

    def measure(packed: Any, append: Any) -> None:
        pieces: list[bytes] = []
        copy(packed, lambda data: (append(data), pieces.append(data)))
        written.append(sum(map(len, pieces)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord_bytes, "_copy_frames", measure)
        with pytest.raises(DataError, match="No record can be used"):
            open_index(tmp_path / "set")
    assert written == [len(head) + tfrecord_bytes.HEADER_BYTES]
    assert unpacked_bytes(own_cache) == 0


def test_a_shard_is_not_unpacked_onto_a_full_disk(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    with gzip.open(tmp_path / "set" / "train.record", "wb") as file:
        file.write(frame(bytes(5000)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(10**12, 10**12, 2**28))
    with pytest.raises(StorageError, match="cannot be unpacked") as caught:
        open_index(tmp_path / "set")
    assert "would remain" in str(caught.value)
    assert unpacked_bytes(own_cache) == 0


def test_the_sets_of_others_are_read_as_before(real_data: Path) -> None:
    """The paths of real sets are inside their folders. What they contain: the tests of each format."""
    names = {"bccd/BCCD": 364, "blood_png": 100, "cars": 1200, "dice": 250, "microcontroller": 149}
    for name, count in names.items():
        index = open_index(real_data / name)
        assert len(index) == count
        assert not any(problem.kind == "outside-path" for problem in index.problems)
        assert np.isfinite(index.boxes).all()
