"""Data sets on a web server, which cannot list: the same index as of the local files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.data.formats.detect import data_file_suffixes
from stoker.data.index import open_index
from stoker.data.remote.resolve import resolve_dataset
from stoker.errors import DataError, StokerError
from stoker.storage.uri import parse_uri
from tests.data.buckets import DRAWN, same
from tests.data.test_same_index import WRITE
from tests.storage.servers import Server, apply, web_server


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, str]]:
    with web_server() as server:
        place = server.bucket()
        apply(monkeypatch, place.environment)
        yield server, place.address


@pytest.mark.parametrize("pictures", ["train", "images", "annotations", "images/train"])
def test_coco_on_a_web_server(web: tuple[Server, str], tmp_path: Path, pictures: str) -> None:
    server, address = web
    WRITE["coco"](tmp_path / "set", DRAWN)
    (tmp_path / "set" / "annotations").mkdir()
    file = tmp_path / "set" / "annotations" / "instances_train.json"
    (tmp_path / "set" / "train" / "_annotations.coco.json").rename(file)
    server.objects.put("", "my set/annotations/instances_train.json", file.read_bytes())
    for path in (tmp_path / "set" / "train").iterdir():
        server.objects.put("", f"my set/{pictures}/{path.name}", path.read_bytes())
    remote = open_index(f"{address}/my%20set/annotations/instances_train.json")
    same(remote, open_index(file))
    assert remote.display_source(0) == f"{address}/my%20set/{pictures}/train-0.jpg"
    document = json.loads(file.read_text())
    document["annotations"].pop()
    server.objects.put("", "my set/annotations/instances_train.json", json.dumps(document).encode())
    assert len(open_index(f"{address}/my%20set/annotations/instances_train.json").boxes) == len(remote.boxes) - 1


def test_a_table_on_a_web_server(web: tuple[Server, str], tmp_path: Path) -> None:
    server, address = web
    table = "filename,class,xmin,ymin,xmax,ymax\ntrain-0.jpg,cat,0.1,0.1,0.5,0.5\ntrain-2.jpg,cat,0.25,0.2,0.5,0.5\n"
    WRITE["csv"](tmp_path / "set", DRAWN)
    for path in (tmp_path / "set").glob("*.csv"):
        path.unlink()
    (tmp_path / "set" / "boxes.csv").write_text(table)
    for path in (tmp_path / "set").rglob("*"):
        if path.is_file():
            server.objects.put("", str(path.relative_to(tmp_path / "set")), path.read_bytes())
    remote = open_index(f"{address}/boxes.csv")  # shares: the sizes are measured
    same(remote, open_index(tmp_path / "set" / "boxes.csv"))


def test_what_a_web_server_has_not(web: tuple[Server, str]) -> None:
    server, address = web
    with pytest.raises(DataError, match="does not list") as folder:
        open_index(f"{address}/set")
    assert f"{address}/set/annotations.json" in str(folder.value)
    with pytest.raises(DataError, match="no such file"):
        open_index(f"{address}/set/a.json")
    entry = {"id": 1, "file_name": "a.jpg", "width": 9, "height": 9}
    server.objects.put("", "set/a.json", json.dumps({"images": [entry], "annotations": [], "categories": []}).encode())
    with pytest.raises(DataError, match="images are not found") as pictures:
        open_index(f"{address}/set/a.json")
    assert "'a.jpg'" in str(pictures.value)


def test_a_stopped_server_says_who_and_what(monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server() as server:
        place = server.bucket()
    apply(monkeypatch, {**place.environment, "STOKER_STORAGE_TIMEOUT_S": "0.2"})
    with pytest.raises(StokerError) as raised:
        resolve_dataset(parse_uri(f"{place.address}/a.json"), data_file_suffixes())
    assert place.address in str(raised.value)
