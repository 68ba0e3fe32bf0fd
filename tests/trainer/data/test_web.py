"""Data sets on a web server, which cannot list: the index equals that of the local files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.data.formats.finder import data_file_suffixes
from stoker.data.index import open_index
from stoker.data.remote import resolve_dataset
from stoker_watch.errors import DataError, StokerError
from stoker_watch.storage.uri import parse_uri
from tests.fixtures.data_same_index import WRITE
from tests.trainer.data.buckets import DRAWN, same
from tests.watch.storage.servers import Server, apply, web_server


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, str]]:
    with web_server() as server:
        served = server.bucket()
        apply(monkeypatch, served.environment)
        yield server, served.uri


@pytest.mark.parametrize("images", ["train", "images", "annotations", "images/train"])
def test_coco(web: tuple[Server, str], tmp_path: Path, images: str) -> None:
    server, uri = web
    WRITE["coco"](tmp_path / "set", DRAWN)
    (tmp_path / "set" / "annotations").mkdir()
    file = tmp_path / "set" / "annotations" / "instances_train.json"
    (tmp_path / "set" / "train" / "_annotations.coco.json").rename(file)
    server.objects.put("", "my set/annotations/instances_train.json", file.read_bytes())
    for path in (tmp_path / "set" / "train").iterdir():
        server.objects.put("", f"my set/{images}/{path.name}", path.read_bytes())
    remote = open_index(f"{uri}/my%20set/annotations/instances_train.json")
    same(remote, open_index(file))
    assert remote.display_source(0) == f"{uri}/my%20set/{images}/train-0.jpg"
    document = json.loads(file.read_text())
    document["annotations"].pop()
    server.objects.put("", "my set/annotations/instances_train.json", json.dumps(document).encode())
    assert len(open_index(f"{uri}/my%20set/annotations/instances_train.json").boxes) == len(remote.boxes) - 1


def test_csv(web: tuple[Server, str], tmp_path: Path) -> None:
    server, uri = web
    table = "filename,class,xmin,ymin,xmax,ymax\ntrain-0.jpg,cat,0.1,0.1,0.5,0.5\ntrain-2.jpg,cat,0.25,0.2,0.5,0.5\n"
    WRITE["csv"](tmp_path / "set", DRAWN)
    for path in (tmp_path / "set").glob("*.csv"):
        path.unlink()
    (tmp_path / "set" / "boxes.csv").write_text(table)
    for path in (tmp_path / "set").rglob("*"):
        if path.is_file():
            server.objects.put("", str(path.relative_to(tmp_path / "set")), path.read_bytes())
    remote = open_index(f"{uri}/boxes.csv")  # relative boxes: the sizes are read
    same(remote, open_index(tmp_path / "set" / "boxes.csv"))


def test_missing_files(web: tuple[Server, str]) -> None:
    server, uri = web
    with pytest.raises(DataError, match="does not list") as folder:
        open_index(f"{uri}/set")
    assert f"{uri}/set/annotations.json" in str(folder.value)
    with pytest.raises(DataError, match="no such file"):
        open_index(f"{uri}/set/a.json")
    entry = {"id": 1, "file_name": "a.jpg", "width": 9, "height": 9}
    server.objects.put("", "set/a.json", json.dumps({"images": [entry], "annotations": [], "categories": []}).encode())
    with pytest.raises(DataError, match="images are not found") as images:
        open_index(f"{uri}/set/a.json")
    assert "'a.jpg'" in str(images.value)


def test_error_of_a_stopped_server_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server() as server:
        served = server.bucket()
    apply(monkeypatch, {**served.environment, "STOKER_STORAGE_TIMEOUT_S": "0.2"})
    with pytest.raises(StokerError) as raised:
        resolve_dataset(parse_uri(f"{served.uri}/a.json"), data_file_suffixes())
    assert served.uri in str(raised.value)
