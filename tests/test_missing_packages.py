"""Packages that only some jobs need: without them a training on local files runs, and what needs one names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.data.formats import tfrecord_bytes
from stoker.data.images.pixel_cache import CachedImageSpec, open_cache
from stoker.data.index import open_index
from stoker.report.tensorboard import Board
from stoker_watch.errors import PreflightError
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw

TRAIN_WITHOUT = """
import sys

for name in ("obstore", "google_crc32c", "tensorboardX", "plotly"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError

import stoker

if __name__ == "__main__":
    fields = {"model": "retinanet_tiny_fpn", "image_size": 64, "batch_size": 4, "device": "cpu", "workers": 1}
    stoker.train(sys.argv[1], **fields, cache="disk", steps=2, run_dir=sys.argv[2])
"""


@pytest.mark.slow
def test_a_training_on_local_files_needs_none_of_them(tmp_path: Path) -> None:
    data, run = draw(tmp_path / "data", train=8, val=2), tmp_path / "run"
    (tmp_path / "job.py").write_text(TRAIN_WITHOUT)
    command = [sys.executable, str(tmp_path / "job.py"), str(data), str(run)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert completed.returncode == 0, completed.stderr
    assert (run / "checkpoints" / "step-00000002").exists()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("pip install tensorboardX" in event.get("text", "") for event in events)
    assert "pip install google-crc32c" in completed.stdout + completed.stderr


def test_a_bucket_names_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(PreflightError, match="needs the package obstore") as caught:
        open_store(parse_uri("s3://bucket-that-nobody-has/images"))
    assert caught.value.fix == "pip install obstore"


def test_tfrecords_name_google_crc32c(monkeypatch: pytest.MonkeyPatch) -> None:
    tfrecord_bytes._crc32c.cache_clear()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(PreflightError, match="needs the package google-crc32c"):
        tfrecord_bytes.masked_crc(b"")


def test_a_cache_that_was_asked_for_keeps_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(draw(tmp_path / "data", train=2, val=1))
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    messages: list[tuple[str, str]] = []
    spec = CachedImageSpec((64, 64), "letterbox", 1.0)
    cache = open_cache("disk", index, index.image_indices("train"), spec, lambda *message: messages.append(message))
    assert cache is not None
    assert not cache.contains(0)
    assert [level for level, _ in messages] == ["warning"]
    assert "pip install google-crc32c" in messages[0][1]


def test_the_board_names_tensorboardx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.delitem(sys.modules, "tensorboardX.event_file_writer", raising=False)
    reported: list[str] = []
    board = Board(tmp_path, on_error=reported.append)
    board.close()
    assert len(reported) == 1
    assert "pip install tensorboardX" in reported[0]
