"""A custom job of Vertex AI: results are where its variables say, in a bucket or on a mounted one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.config.settings import from_fields
from stoker.training.bucket_run import VertexFolders, copying_results, vertex_folders
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.errors import UsageError
from stoker_watch.runs.records import BEST, CONFIG, EVENTS
from stoker_watch.storage.store import list_keys, open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw
from tests.watch.storage.servers import Server, apply, google_server

SETTINGS = {
    "model": "retinanet_tiny_fpn", "image_size": (64, 64), "batch_size": 4, "max_duration": "4", "eval_every": "0",
    "precision": "fp32", "workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def google() -> Iterator[Server]:
    with google_server() as server:
        yield server


def set_folders(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    for name, folder in (("CHECKPOINT", "checkpoints"), ("MODEL", "model"), ("TENSORBOARD_LOG", "logs")):
        monkeypatch.setenv(f"AIP_{name}_DIR", f"{base}/{folder}/")


def test_a_run_in_the_folders_of_a_job(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    set_folders(monkeypatch, str(tmp_path / "gcs"))
    config = from_fields({"data": str(data), **SETTINGS})
    run = train(config).run
    assert run == tmp_path / "gcs" / "checkpoints"
    for name in (BEST, CONFIG):
        assert (tmp_path / "gcs" / "model" / name).read_bytes() == (run / name).read_bytes()
    names = [path.relative_to(run / "tensorboard") for path in (run / "tensorboard").rglob("*") if path.is_file()]
    assert names
    for name in names:
        copied = tmp_path / "gcs" / "logs" / name
        assert copied.read_bytes() == (run / "tensorboard" / name).read_bytes()
    with pytest.raises(UsageError, match="finished"):  # the same command, as after a restart of the job
        train(config)


@pytest.mark.slow
def test_a_run_in_the_bucket_of_a_job(data: Path, google: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    place = google.bucket()
    apply(monkeypatch, place.environment)
    set_folders(monkeypatch, f"{place.uri}/job")
    train(from_fields({"data": str(data), **SETTINGS}))
    job = parse_uri(f"{place.uri}/job")
    names = set(list_keys(open_store(job), job))
    assert {f"checkpoints/{EVENTS}", f"model/{BEST}", f"model/{CONFIG}"} <= names
    assert any(name.startswith("logs/events.out.tfevents") for name in names)


@pytest.mark.slow
def test_a_named_run_folder_is_not_replaced(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIP_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    run = train(from_fields({"data": str(data), **SETTINGS}), TrainOptions(run_dir=str(tmp_path / "mine"))).run
    assert run == tmp_path / "mine"
    assert not (tmp_path / "checkpoints").exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path):
    run = tmp_path / "run"
    (run / "tensorboard").mkdir(parents=True)
    (run / "tensorboard" / "events").write_text("x")
    (tmp_path / "file").touch()
    reported: list[tuple[str, str]] = []
    folders = VertexFolders(tensorboard=str(tmp_path / "file"))
    with copying_results(run, folders, lambda kind, text, **_: reported.append((kind, text))):
        pass
    assert [kind for kind, _ in reported] == ["warning"]


def test_only_what_is_set_counts():
    assert vertex_folders({"AIP_MODEL_DIR": "", "AIP_CHECKPOINT_DIR": "gs://b/c/"}) == VertexFolders("gs://b/c")
