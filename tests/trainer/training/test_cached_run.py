"""A run with a cache of decoded images: its weights do not depend on what the cache holds, also after a kill."""

import os
import signal
import time
from pathlib import Path

import pytest

from stoker.config.settings import from_toml
from stoker.data.images.pixel_cache import CachedImageSpec, cache_file_path
from stoker.data.index import open_index
from stoker_watch.runs.records import CONFIG, EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw, run_stoker, stoker

FLAGS = [
    "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "4", "--eval-every", "0",
    "--checkpoint-every", "6", "--scale-jitter-prob", "0.5", "--precision", "fp32", "--workers", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"), side=128)


def cache_file(data: Path, run: Path) -> Path:
    """Where a run caches its images; they are cached at a smaller size."""
    index = open_index(data)
    settings = from_toml(run / CONFIG)[0].data
    form = CachedImageSpec.for_augmentation(
        settings.image_size,
        settings.resize,
        scale_jitter_prob=settings.scale_jitter_prob,
        scale_range=settings.scale_range,
    )
    assert (form.cached_sizes(index.original_size) == 96).all()
    return cache_file_path(index, form)


def weights(run: Path) -> bytes:
    return (run / "final.safetensors").read_bytes()


def train(data: Path, folder: Path, cache: str = "disk", length: str = "20") -> Path:
    flags = [*FLAGS, "--steps", length, "--cache", cache, "--run-dir", "run"]
    code, output = run_stoker("train", data, *flags, cwd=folder)
    assert code == 0, output
    return folder / "run"


@pytest.mark.slow
def test_the_weights_do_not_depend_on_what_the_cache_holds(data: Path, tmp_path: Path) -> None:
    for name in ("empty", "full", "half", "none", "memory"):
        (tmp_path / name).mkdir()
    run = train(data, tmp_path / "empty")
    kept = cache_file(data, run)
    assert kept.stat().st_blocks * 512 > 20 * 96 * 96 * 3
    assert weights(train(data, tmp_path / "full")) == weights(run)
    os.truncate(kept, kept.stat().st_size // 2)
    assert weights(train(data, tmp_path / "half")) == weights(run)
    assert weights(train(data, tmp_path / "memory", "ram")) == weights(run)
    assert weights(train(data, tmp_path / "none", "none")) != weights(run)


@pytest.mark.slow
def test_a_run_killed_while_its_cache_fills_continues(data: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = train(data, tmp_path / "whole")
    kept = cache_file(data, whole)
    kept.unlink()
    run = tmp_path / "killed" / "run"
    flags = [*FLAGS, "--steps", "20", "--cache", "disk", "--run-dir", "run"]
    process = stoker("train", data, *flags, cwd=tmp_path / "killed")
    while process.poll() is None and not list(run.glob("checkpoints/step-*")):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    content = bytearray(kept.read_bytes())
    content[:: 96 * 96] = bytes(len(content[:: 96 * 96]))  # as if it had been killed in the middle of every entry
    kept.write_bytes(content)
    code, output = run_stoker("train", data, *flags, cwd=tmp_path / "killed")
    assert code == 0, output
    assert "continuing from step" in output
    assert weights(run) == weights(whole)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_reported_and_changes_no_weight(data: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "not").mkdir()
    whole = train(data, tmp_path / "kept")
    kept = cache_file(data, whole)
    kept.unlink()
    kept.mkdir()
    run = train(data, tmp_path / "not")
    assert weights(run) == weights(whole)
    said = [event.text for event in read_lines(run, EVENTS, Event) if event.kind == "warning"]
    assert any("not cached" in text for text in said)
