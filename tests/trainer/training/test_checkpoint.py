"""Checkpoints: whole or absent, whatever happens while they are written; damaged ones are found and passed over."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from stoker.hardware.device import Device, SideStream
from stoker.training import checkpoint
from stoker.training.checkpoint import (
    CheckpointWriter,
    reserve_arenas,
    snapshot,
)
from stoker_watch.errors import CheckpointError
from tests.fixtures.hardware_host_arena import pinning_device
from tests.fixtures.training_checkpoint import STREAM, make_snapshot, newest, save


def ignore(*_: object, **__: object) -> None:
    """Drops the message."""


def test_the_newest_two_are_kept_and_the_newest_is_loaded(tmp_path: Path):
    said = save(tmp_path, 1, 20, 300)
    assert [kind for kind, _ in said] == ["checkpoint_saved"] * 3
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000020", "step-00000300"]
    loaded, said = newest(tmp_path)
    assert loaded is not None
    assert said == []
    assert loaded.step == 300
    assert torch.equal(loaded.weights["w"], torch.full((1000,), 300.0))
    assert torch.equal(loaded.state["moments"][0], torch.full((3,), -300.0))
    assert loaded.state["nested"] == {"n": 300, "text": "x"}
    assert loaded.state["pair"] == (1, 2)
    with safe_open(tmp_path / "checkpoints/step-00000300/weights.safetensors", "pt") as file:
        assert file.metadata() == {"model": "m"}


def test_a_snapshot_is_a_copy():
    weight = torch.ones(3)
    taken = snapshot(STREAM, step=1, metadata={}, weights={"w": weight}, state={"s": [weight]})
    weight.zero_()
    assert torch.equal(taken.weights["w"], torch.ones(3))
    assert torch.equal(taken.state["s"][0], torch.ones(3))


class QueueStream(contextlib.nullcontext[None]):
    """In the place of an accelerator's stream; its work is done at once."""

    def wait_stream(self, _: object) -> None:
        """Nothing is pending."""

    def record_event(self) -> None:
        """No event: done."""


def test_snapshots_of_an_accelerator_pin_no_memory_after_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """300 tensors, saved three times while the weights of another snapshot wait for their evaluation."""
    device = pinning_device()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: None)
    stream = SideStream(Device(torch.device("cpu")))
    monkeypatch.setattr(stream, "_device", device)
    monkeypatch.setattr(stream, "_stream", QueueStream())
    weights = {f"w{n}": torch.full((n + 1,), 0.0) for n in range(100)}
    state = {
        "moments": [torch.zeros(n + 1) for n in range(200)],
        "skipped_streak": (torch.zeros(()), torch.tensor(-1)),  # of two types, in one piece of memory
    }
    arenas = reserve_arenas(device, weights, state)
    waiting = snapshot(stream, step=0, metadata={}, weights=weights, state={}, arenas=arenas)
    assert len(device.allocated) == 1
    writer = CheckpointWriter(tmp_path, ignore)
    for step in (1, 2, 3):
        for tensor in (*weights.values(), *state["moments"]):
            tensor.fill_(step)
        writer.save(snapshot(stream, step=step, metadata={}, weights=weights, state=state, arenas=arenas))
        writer.wait()
        loaded, _ = newest(tmp_path)
        assert loaded is not None
        assert all(torch.equal(loaded.weights[name], weights[name]) for name in weights)
        assert all(map(torch.equal, loaded.state["moments"], state["moments"]))
    assert len(device.allocated) == 2, "the one that waits and the one that is written"
    assert not any(tensor.any() for tensor in waiting.weights.values()), "kept as they were"
    del waiting
    snapshot(stream, step=4, metadata={}, weights=weights, state={}, arenas=arenas)
    assert len(device.allocated) == 2


@pytest.mark.parametrize("name", ["weights.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_loaded(tmp_path: Path, name: str, how: str):
    save(tmp_path, 1, 2)
    path = tmp_path / "checkpoints/step-00000002" / name
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data if how == "flip" else data[: len(data) // 2])
    loaded, said = newest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert said[0][0] == "checkpoint_corrupt"
    assert "step-00000002" in said[0][1]
    assert (tmp_path / "checkpoints/damaged-step-00000002").is_dir()
    save(tmp_path, 3)
    assert newest(tmp_path)[1] == []
    assert (tmp_path / "checkpoints/step-00000001").is_dir()


def test_the_checkpoint_of_a_step_is_damaged_twice(tmp_path: Path):
    """It was trained again from the previous one meanwhile."""
    for _ in range(2):
        save(tmp_path, 1, 2)
        (tmp_path / "checkpoints/step-00000002/state.pt").write_bytes(b"")
        loaded, _said = newest(tmp_path)
        assert loaded is not None
        assert loaded.step == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "damaged-step-00000002",
        "step-00000001",
    ]


def test_all_damaged_is_an_error_and_no_checkpoint_is_none(tmp_path: Path):
    assert newest(tmp_path) == (None, [])
    save(tmp_path, 1, 2)
    for path in tmp_path.glob("checkpoints/*/state.pt"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="Every checkpoint") as caught:
        newest(tmp_path)
    assert "state.pt has 0 bytes" in str(caught.value)


@pytest.mark.slow
def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path):
    """A file-size limit stands for the full disk: the write fails in the same place with an OSError."""
    save(tmp_path, 1)
    script = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import make_snapshot
from stoker.training.evaluator import PendingEvaluation
from stoker.training.checkpoint import CheckpointWriter
writer = CheckpointWriter(Path({str(tmp_path)!r}), lambda kind, text, **_: print(kind, text))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
writer.save(make_snapshot(2, size=1_000_000))
writer.save_weights(make_snapshot(2, size=1_000_000), "best.safetensors")
writer.wait()
writer.save(make_snapshot(3, size=10))
writer.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint_failed", "checkpoint_failed", "checkpoint_saved"]
    assert "File too large" in lines[0]
    assert not (tmp_path / "best.safetensors").exists()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.slow
@pytest.mark.parametrize("delay_writes", [17, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 40, 77))])
def test_killed_while_saving(tmp_path: Path, delay_writes: int):
    """A process that saves without end is killed in the middle; what is left loads, and leftovers are cleared away."""
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import make_snapshot
from stoker.training.evaluator import PendingEvaluation
from stoker.training.checkpoint import CheckpointWriter
writer = CheckpointWriter(Path({str(tmp_path)!r}), lambda kind, text, **_: print(text, flush=True))
step = 0
while True:
    step += 1
    writer.save(make_snapshot(step, size=300_000))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(delay_writes)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    loaded, corrupt = newest(tmp_path)
    assert corrupt == []
    assert loaded is not None
    assert loaded.step >= int(said[-1].split("step-")[1])
    assert torch.equal(loaded.weights["w"], torch.full((300_000,), float(loaded.step)))
    CheckpointWriter(tmp_path, ignore)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_an_error_in_the_writer_is_raised_by_wait(tmp_path: Path):
    writer = CheckpointWriter(tmp_path, ignore)
    broken = make_snapshot(1)
    broken.weights = {"w": "no tensor"}  # type: ignore[dict-item]
    writer.save(broken)
    with pytest.raises(Exception, match="str"):
        writer.wait()
    writer.wait()


def test_weights_that_a_full_disk_refused_are_written_as_soon_as_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """best.safetensors: no later evaluation writes it again unless it is better."""
    is_full, write = True, checkpoint.write_atomic

    def refuse(path: Path, data: bytes) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "no space")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_atomic", refuse)
    writer = CheckpointWriter(tmp_path, ignore)
    writer.save_weights(make_snapshot(1), "best.safetensors")
    writer.save_weights(make_snapshot(2), "final.safetensors")
    writer.wait()
    assert writer.failure is not None
    is_full = False
    writer.save(make_snapshot(3))
    writer.wait()
    assert writer.failure is None
    for name, step in (("best", 1), ("final", 2)):
        with safe_open(tmp_path / f"{name}.safetensors", "pt") as file:
            assert file.get_tensor("w")[0] == step


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_other_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumed at its last step and is stopped again: a kill must not leave it without both."""
    save(tmp_path, 6)
    kept: list[bool] = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        kept.append(any((folder / "manifest.json").exists() for folder in (tmp_path / "checkpoints").iterdir()))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    save(tmp_path, 6)
    assert kept
    assert all(kept)
    monkeypatch.undo()
    save(tmp_path, 9)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000009"]
