"""Checkpoints that survive: written beside, flushed, renamed; checked by checksum before they are believed.

    checkpoints/step-00001200/weights.safetensors   the averaged weights, with the model's card: usable alone
                              state.pt              the rest that an exact continuation needs
                              manifest.json         sizes and SHA-256 of both, written last

The training thread only starts the copies to the host; a thread of `Writer` waits for them and writes. A save that
fails (a full disk) is reported and training goes on with the checkpoints it has.
"""

import dataclasses
import hashlib
import io
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from stoker.config import old_names
from stoker.errors import CheckpointError
from stoker.hardware.device import ReadyEvent, SideStream
from stoker.runs.records import CHECKPOINTS
from stoker.storage.local_files import fsync_folder, write_atomic
from stoker.storage.run_uri import display_path

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.pt", "manifest.json"
NUM_KEPT = 2


class FileEntry(msgspec.Struct):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """manifest.json. A folder without a whole one is not a checkpoint."""

    version: int = 1
    step: int
    healthy: bool = True
    """Whether the step before it moved the weights: a run whose gradients stay non-finite goes back to such a one."""
    rollbacks: int = 0
    """How often the run had gone back before."""
    files: dict[str, FileEntry]


@dataclasses.dataclass
class HostSnapshot:
    """A run's state as host tensors whose copies may still be under way (`ready`)."""

    step: int
    metadata: dict[str, str]
    weights: dict[str, Tensor]
    state: dict[str, Any]
    ready: ReadyEvent


def snapshot(
    stream: SideStream, *, step: int, metadata: dict[str, str], weights: dict[str, Tensor], state: dict[str, Any]
) -> HostSnapshot:
    """Starts copying everything to the host. The device must not change the tensors before `ready.block_device()`; on
    one stream a later one covers those before.

    weights: of the file to use; state: any tree of dicts, lists, numbers and tensors. Its `streak` (skipped steps in a
    row, and the step that made them too many or -1) and `slowed` say which way back the checkpoint is for.
    """
    copies, ready = stream.to_host([*weights.values(), *_list_tensors(state)])
    copied = dict(zip(weights, copies, strict=False))
    remaining = iter(copies[len(weights) :])
    return HostSnapshot(step, metadata, copied, _map_tensors(state, lambda _: next(remaining)), ready)


def _list_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order in which `_map` meets them."""
    tensors: list[Tensor] = []

    def append(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _map_tensors(tree, append)
    return tensors


def _map_tensors(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, fn) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_tensors(value, fn) for value in tree)
    return tree


class CheckpointWriter:
    """Writes snapshots on its own thread, one at a time. `report(kind, text)` is called from that thread."""

    def __init__(self, run: Path, report: Callable[[str, str], None]) -> None:
        self._run = run
        self._report = report
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step = -1
        """Step of the newest checkpoint that this writer has written whole. Valid after `wait`, like `failed`."""
        self.failure: str | None = None
        """Why the last write failed; None when it did not."""
        (run / CHECKPOINTS).mkdir(exist_ok=True)
        for leftover in (run / CHECKPOINTS).glob(".step-*"):
            shutil.rmtree(leftover)

    def save(self, snapshot: HostSnapshot) -> None:
        """Writes a checkpoint in the background; first waits for the write before it, if that one still runs."""
        self._start(lambda: self._write_checkpoint(snapshot))

    def save_weights(self, snapshot: HostSnapshot, names: list[str]) -> None:
        """Writes only the weights, as `run/name` for each name (best.safetensors, final.safetensors)."""
        self._start(lambda: self._write_weights(snapshot, names))

    def wait(self) -> None:
        """Returns when nothing is left to write. Raises what went wrong there, a full or failing disk apart."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _start(self, task: Callable[[], None]) -> None:
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001  # carried to the training thread by `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="stoker-checkpoint")
        self._thread.start()

    def _write_weights(self, snapshot: HostSnapshot, names: list[str]) -> None:
        try:
            snapshot.ready.synchronize()
            data = _serialize_weights(snapshot)
            for name in names:
                write_atomic(self._run / name, data)
        except OSError as error:
            self._report_failure(error, snapshot.step)
        else:
            self.failure = None

    def _write_checkpoint(self, snapshot: HostSnapshot) -> None:
        parent = self._run / CHECKPOINTS
        final_dir = parent / f"step-{snapshot.step:08d}"
        temp_dir = parent / f".step-{snapshot.step:08d}"
        try:
            snapshot.ready.synchronize()
            temp_dir.mkdir(exist_ok=True)
            buffer = io.BytesIO()
            torch.save(snapshot.state, buffer)
            files = {}
            for name, data in ((WEIGHTS, _serialize_weights(snapshot)), (STATE, buffer.getbuffer())):
                write_atomic(temp_dir / name, data)
                files[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
            skipped_streak, diverged_step = (int(number) for number in snapshot.state["skipped_streak"])
            manifest = Manifest(
                step=snapshot.step,
                healthy=skipped_streak == 0 and diverged_step < 0,
                rollbacks=snapshot.state.get("rollbacks", 0),
                files=files,
            )
            write_atomic(temp_dir / MANIFEST, msgspec.json.encode(manifest))
            if final_dir.exists():  # of an attempt before, from which training did not continue
                shutil.rmtree(final_dir)
            temp_dir.rename(final_dir)
            fsync_folder(parent)
        except OSError as error:
            shutil.rmtree(temp_dir, ignore_errors=True)
            self._report_failure(error, snapshot.step)
        else:
            self.saved_step, self.failure = snapshot.step, None
            folders = list_checkpoints(self._run)
            rollback_targets = [folder for folder in folders if _is_healthy(folder)][:NUM_KEPT]
            for old in folders[NUM_KEPT:]:
                if old not in rollback_targets:
                    shutil.rmtree(old, ignore_errors=True)  # one more is kept then, and tried again at the next save
            self._report("checkpoint_saved", f"saved {final_dir.relative_to(self._run)}")

    def _report_failure(self, error: OSError, step: int) -> None:
        self.failure = str(error)
        text = f"could not save at step {step}: {error}; training goes on, the checkpoint before stays"
        self._report("checkpoint_failed", text)


def _serialize_weights(snapshot: HostSnapshot) -> bytes:
    """The bytes of a weights file, whatever memory format the device likes."""
    return to_safetensors({name: t.contiguous() for name, t in snapshot.weights.items()}, snapshot.metadata)


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders, newest step first."""
    paths = [p for p in (run / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(paths, key=lambda p: int(p.name[5:]), reverse=True)


def _read_manifest(folder: Path) -> Manifest:
    """Raises OSError or msgspec.DecodeError when there is no whole one."""
    return old_names.decode((folder / MANIFEST).read_bytes(), Manifest)


def _is_healthy(folder: Path) -> bool:
    try:
        return _read_manifest(folder).healthy
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


def healthy_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that a run may go back to, the newest first. Their files are not checked."""
    return [int(folder.name[5:]) for folder in list_checkpoints(run) if _is_healthy(folder)]


def newest_healthy_weights(run: Path) -> Path | None:
    """The weights file of the newest checkpoint to go back to, unchecked; None when there is none."""
    steps = healthy_steps(run)
    return run / CHECKPOINTS / f"step-{steps[0]:08d}" / WEIGHTS if steps else None


def discard_checkpoints(run: Path, *, after: int, rollback_count: int) -> None:
    """Removes the checkpoints behind step `after` that were made before the run went back for the `slowed`-th time."""
    for folder in list_checkpoints(run):
        try:
            manifest = _read_manifest(folder)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue  # `load_newest` says what is wrong with it
        if manifest.step > after and manifest.rollbacks < rollback_count:
            hidden_dir = folder.with_name(f".{folder.name}.gone")  # the next Writer ends this, should it be interrupted
            folder.rename(hidden_dir)
            shutil.rmtree(hidden_dir)


@dataclasses.dataclass
class LoadedCheckpoint:
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]


def load_newest(run: Path, report: Callable[[str, str], None]) -> LoadedCheckpoint | None:
    """The newest checkpoint whose checksums hold; damaged ones are reported and passed over. None when there is none.

    Raises CheckpointError when there are checkpoints and all are damaged: starting over in silence would cost days.
    """
    folders = list_checkpoints(run)
    reasons, damaged = [], []
    for folder in folders:
        try:
            loaded = _load(folder)
        except CheckpointError as error:
            reasons.append(f"{folder.name}: {error.cause}")
            report("checkpoint_corrupt", f"{folder.name} is damaged ({error.cause}); trying the one before")
            damaged.append(folder)
        else:
            for folder in damaged:  # out of the way of the two that are kept, and not looked at again
                folder.rename(folder.with_name(f"damaged-{folder.name}"))
            return loaded
    if folders:
        locations = dict.fromkeys(
            (f"{display_path(run)}/{CHECKPOINTS}", str(run / CHECKPOINTS))
        )  # of a run in a bucket, two
        raise CheckpointError(
            "Every checkpoint of the run is damaged.",
            location=next(iter(locations)),
            cause="; ".join(reasons),
            fix=f"start a new run, or remove {' and '.join(locations)} to start this one from its first step",
        )
    return None


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint's files are those of its manifest, by their checksums."""
    try:
        _verify(folder)
    except CheckpointError:
        return False
    return True


def _verify(folder: Path) -> Manifest:
    """Raises CheckpointError."""
    try:
        manifest = _read_manifest(folder)
        for name, entry in manifest.files.items():
            size = (folder / name).stat().st_size
            if size != entry.size_bytes:
                raise CheckpointError("damaged", cause=f"{name} has {size} bytes, not {entry.size_bytes}")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    raise CheckpointError("damaged", cause=f"the checksum of {name} is wrong")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError("damaged", cause=str(error)) from error
    return manifest


def _load(folder: Path) -> LoadedCheckpoint:
    manifest = _verify(folder)
    try:
        weights = load_file(folder / WEIGHTS)
        state = old_names.checkpoint_state(torch.load(folder / STATE, map_location="cpu", weights_only=True))
    except (OSError, SafetensorError) as error:
        raise CheckpointError("damaged", cause=str(error)) from error
    return LoadedCheckpoint(manifest.step, weights, state)
