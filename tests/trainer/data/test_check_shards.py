"""stoker data check of packed shards: those that are lost, cut or changed are named; packing again makes them again."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.data import packing
from stoker.data.formats.webdataset import INDEX_FILE
from stoker.data.index import Index, open_index
from stoker.data.packing import PackOptions, in_threads, pack
from stoker.data.validation.check import DatasetCheck, check_dataset
from stoker_watch.cli.app import main
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.fixtures.data_convert import annotated, coco
from tests.fixtures.data_pack import small_shards
from tests.trainer.data.tfrecords import jpeg
from tests.watch.storage.servers import Server, apply, google_server, s3_server

CHANGED, LOST, CUT = "train-00000.tar", "train-00001.tar", "train-00002.tar"


@pytest.fixture(autouse=True)
def three_images_to_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan = packing.make_plan
    monkeypatch.setattr(packing, "make_plan", lambda index, options: small_shards(make_plan(index, options)))


@pytest.fixture
def source(tmp_path: Path) -> Index:
    images = {f"{n}.jpg": (jpeg(60, 50, n), [annotated([1, 2, 30, 20])]) for n in range(12)}
    return open_index(coco(tmp_path / "source", images), val_fraction=0.25)


def packed(source: Index, out: Path | str) -> str:
    pack(source, str(out), PackOptions(), run_shards=in_threads(2))
    return str(out)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with s3_server() as s3, google_server() as google:
        yield {"s3": s3, "gs": google}


class Folder:
    """Files of a packed data set in a folder or a bucket."""

    def __init__(self, data: str) -> None:
        self.data = data
        self._uri = parse_uri(data) if "://" in data else None

    def read(self, name: str) -> bytes:
        if self._uri is None:
            return (Path(self.data) / name).read_bytes()
        return open_store(self._uri).read(self._uri.child(name).key)

    def write(self, name: str, data: bytes) -> None:
        if self._uri is None:
            (Path(self.data) / name).write_bytes(data)
        else:
            open_store(self._uri).write(self._uri.child(name).key, data)

    def delete(self, name: str) -> None:
        if self._uri is None:
            (Path(self.data) / name).unlink()
        else:
            open_store(self._uri).delete(self._uri.child(name).key)

    def flip(self, name: str) -> None:
        """Changes a byte in the annotations of the last sample, which no decoder reads."""
        data = bytearray(self.read(name))
        data[data.rindex(b'"area"') + 1] ^= 1
        self.write(name, bytes(data))


@pytest.fixture(params=["folder", "s3", "gs"])
def make_packed(
    request: pytest.FixtureRequest,
    servers: dict[str, Server],
    source: Index,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Folder:
    if request.param == "folder":
        return Folder(packed(source, tmp_path / "packed"))
    served = servers[request.param].bucket()
    apply(monkeypatch, served.environment)
    return Folder(packed(source, f"{served.uri}/packed"))


def found(report: DatasetCheck) -> dict[str, list[str]]:
    """Kind → the shards that its locations name."""
    return {
        item.kind: [location.split()[0] for location in item.examples]
        for item in report.items
        if item.kind.endswith("-packed-shard")
    }


def test_lost_cut_and_changed_shards_are_named_and_made_again(make_packed: Folder, source: Index) -> None:
    folder = make_packed
    names = (INDEX_FILE, CHANGED, LOST, CUT, "val-00000.tar")
    before = {name: folder.read(name) for name in names}
    report = check_dataset(folder.data)
    assert (found(report), report.has_failed, report.num_images) == ({}, False, 12)

    folder.flip(CHANGED)
    report = check_dataset(folder.data)
    assert found(report) == {"changed-packed-shard": [CHANGED]}
    assert (report.refusals, report.has_failed) == ((), True)
    assert found(check_dataset(folder.data, decode_images=False)) == {}, "--annotations-only opens no shard"

    folder.delete(LOST)
    folder.write(CUT, folder.read(CUT)[:-512])
    report = check_dataset(folder.data)
    assert found(report) == {
        "missing-packed-shard": [LOST],
        "cut-packed-shard": [CUT],
        "changed-packed-shard": [CHANGED],
    }
    assert report.refusals == ("2 of 4 packed shards are missing or have another size.",)
    assert all("the same `stoker data pack` again" in item.fix for item in report.items if "packed" in item.kind)

    folder.delete(CHANGED)  # as its fix says
    packed(source, folder.data)
    assert {name: folder.read(name) for name in names} == before
    assert not check_dataset(folder.data).has_failed


def test_a_changed_index_is_one_error(source: Index, tmp_path: Path) -> None:
    folder = Folder(packed(source, tmp_path / "packed"))
    folder.write(INDEX_FILE, folder.read(INDEX_FILE)[:-40])
    report = check_dataset(folder.data)
    assert report.refusals == ("The index of the packed shards cannot be read.",)
    assert found(report) == {}


def test_the_command_prints_them_and_fails(
    source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(packed(source, tmp_path / "packed"))

    def check() -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["stoker", "data", "check", folder.data])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert check() == 0
    folder.flip(CHANGED)
    assert check() == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert "packed shard with another checksum" in printed
    assert f"{CHANGED} with 3 images: SHA-256 " in printed
    assert "delete it, then: the same `stoker data pack` again" in printed


def test_chunks_give_the_checksum_of_the_whole(source: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.data.validation.check.CHUNK_BYTES", 700)
    calls: list[tuple[int, int]] = []
    report = check_dataset(packed(source, tmp_path / "packed"), progress=lambda *numbers: calls.append(numbers))
    assert not report.has_failed
    assert calls[:4] == [(3, 12), (6, 12), (9, 12), (12, 12)]
