"""Checkpoints that survive a kill: written to a temporary folder, flushed, renamed; checksums are verified on loading.

    checkpoints/step-00001200/weights.safetensors   the EMA weights, with the model's metadata: usable alone
                              state.pt              the rest that an exact continuation needs
                              manifest.json         sizes and SHA-256 of both, written last

The training thread only starts the copies to the host; a thread of `CheckpointWriter` waits for them and writes. A save
that fails (a full disk) is reported, and training continues with the checkpoints it has. What the state contains is in
`resume.py`.
"""

import dataclasses
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.utils import _pytree

from stoker.hardware.device import Device, ReadyEvent, SideStream
from stoker.hardware.host_arenas import ArenaLease, HostArenas
from stoker_watch import regular_files
from stoker_watch.errors import CheckpointError
from stoker_watch.runs.records import CHECKPOINTS, EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from stoker_watch.storage.local_files import fsync_folder, write_atomic
from stoker_watch.storage.uri import display_path

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "state.pt", "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
NUM_KEPT = 2


class FileEntry(msgspec.Struct):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, kw_only=True):
    """manifest.json. A folder without a complete one is not a checkpoint. healthy: the last step was not skipped, so a
    rollback may take it; rollbacks: before this checkpoint."""

    version: int = 1
    step: int
    healthy: bool = True
    rollbacks: int = 0
    files: dict[str, FileEntry]


@dataclasses.dataclass
class HostSnapshot:
    """A run's state as host tensors. ready: says when their copies have arrived; lease: keeps their memory."""

    step: int
    metadata: dict[str, str]
    weights: dict[str, Tensor]
    state: dict[str, Any]
    ready: ReadyEvent
    lease: ArenaLease | None = None


def snapshot(
    stream: SideStream,
    *,
    step: int,
    metadata: dict[str, str],
    weights: dict[str, Tensor],
    state: dict[str, Any],
    arenas: HostArenas | None = None,
) -> HostSnapshot:
    """Starts copying everything to the host. The device must not change the tensors before
    `ready.block_main_stream()`; on one stream a later event covers earlier copies.

    state: any tree of dicts, lists, numbers and tensors. The manifest takes its `skipped_streak` (consecutive skipped
    steps, and the step that reached the limit or -1) and `rollbacks`. arenas: memory for the copies, used again when
    nothing refers to the snapshot any longer; not for a CPU.
    """
    tensors = [*weights.values(), *list_tensors(state)]
    targets, lease = (None, None) if arenas is None else arenas.take(tensors)
    copies, ready = stream.to_host(tensors, targets)
    copied = dict(zip(weights, copies, strict=False))
    remaining = iter(copies[len(weights) :])
    return HostSnapshot(step, metadata, copied, map_tensors(state, lambda _: next(remaining)), ready, lease)


def reserve_arenas(device: Device, weights: dict[str, Tensor], state: dict[str, Any]) -> HostArenas | None:
    """Allocates pinned memory for snapshots of these tensors; None where there are no streams."""
    if not device.has_streams:
        return None
    arenas = HostArenas(device)
    arenas.reserve([*weights.values(), *list_tensors(state)])
    return arenas


def list_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of `map_tensors`."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(tree: Any, fn: Callable[[Tensor], Tensor | None]) -> Any:
    return _pytree.tree_map_only(Tensor, fn, tree)


def shape_of(tensor: Tensor) -> Tensor:
    """Shape and type of a tensor: without values, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class CheckpointWriter:
    """Writes snapshots on its own thread, one at a time; `report(kind, text, **data)` is called from that thread.
    has_folder: the run's folder is this rank's; the others save nothing."""

    def __init__(self, run: Path, report: Callable[..., object], *, has_folder: bool = True) -> None:
        self._run, self._report = run, report
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stoker-checkpoint")
        self._pending: Future[None] | None = None
        self.saved_step = -1
        """Step of the newest checkpoint that this writer has completed. Valid after `wait`, like `failure`."""
        self.failure: str | None = None
        """Why the last write failed; None if it did not, and nothing waits to be written again."""
        self._unwritten: dict[str, HostSnapshot] = {}
        """File of weights → its content, which could not be written: tried again at each later write."""
        self.write_s: float | None = None
        """Seconds of the last complete write of a checkpoint, with the wait for the copies; None before one."""
        self.longest_write_s = 0.0
        if not has_folder:
            return
        (run / CHECKPOINTS).mkdir(exist_ok=True)
        for leftover in (run / CHECKPOINTS).glob(".step-*"):
            shutil.rmtree(leftover)

    def save(self, snapshot: HostSnapshot) -> None:
        """Writes a checkpoint in the background; waits for the previous write first."""
        self._start(self._write_checkpoint, snapshot)

    def save_weights(self, snapshot: HostSnapshot, name: str) -> None:
        """Writes only the weights, as `run/name` (best.safetensors, final.safetensors)."""
        self._start(lambda held: self._write_weights(held, name), snapshot)

    def _start(self, write: Callable[[HostSnapshot], None], snapshot: HostSnapshot) -> None:
        self.wait()
        held = [snapshot]  # the pool lets go of its arguments only after the result is there; the lease must end before
        self._pending = self._pool.submit(lambda: write(held.pop()))

    def wait(self) -> None:
        """Returns when nothing is left to write. Raises the error of the thread, except for a full or failing disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write_weights(self, snapshot: HostSnapshot, name: str) -> None:
        self._unwritten[name] = snapshot
        del snapshot
        if (error := self._write_unwritten()) is not None:
            self._report_failure(*error)

    def _write_unwritten(self) -> tuple[OSError, int] | None:
        """Writes the weights that wait. Returns an error, whose text `failure` has, and its step."""
        for name, snapshot in list(self._unwritten.items()):
            try:
                snapshot.ready.synchronize()
                write_atomic(self._run / name, _serialize_weights(snapshot))
            except OSError as error:
                self.failure = str(error)
                return error, snapshot.step
            del self._unwritten[name]
        self.failure = None
        return None

    def _write_checkpoint(self, snapshot: HostSnapshot) -> None:
        final_dir = self._run / CHECKPOINTS / f"step-{snapshot.step:08d}"
        temp_dir = final_dir.with_name(f".{final_dir.name}")
        start_s = time.perf_counter()
        try:
            snapshot.ready.synchronize()
            temp_dir.mkdir(exist_ok=True)
            files = {}
            for name, serialize in ((WEIGHTS, _serialize_weights), (STATE, _serialize_state)):
                data = serialize(snapshot)
                write_atomic(temp_dir / name, data)
                files[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
                del data  # a file of weights and one of the state are not in memory at once
            skipped_streak, diverged_step = (int(number) for number in snapshot.state["skipped_streak"])
            manifest = Manifest(
                step=snapshot.step,
                healthy=skipped_streak == 0 and diverged_step < 0,
                rollbacks=snapshot.state.get("rollbacks", 0),
                files=files,
            )
            write_atomic(temp_dir / MANIFEST, msgspec.json.encode(manifest))
            replaced = final_dir.with_name(f".{final_dir.name}-replaced")
            if final_dir.exists():  # from an earlier attempt: it stays until the new one can take its place
                final_dir.rename(replaced)
            temp_dir.rename(final_dir)
            fsync_folder(final_dir.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(temp_dir, ignore_errors=True)
            self._report_failure(error, snapshot.step)
        else:
            self.saved_step = snapshot.step
            self._write_unwritten()  # whose failure was reported before
            self.write_s = time.perf_counter() - start_s
            self.longest_write_s = max(self.longest_write_s, self.write_s)
            folders = list_checkpoints(self._run)
            rollback_targets = [folder for folder in folders if _is_healthy(folder)][:NUM_KEPT]
            for old in folders[NUM_KEPT:]:
                if old not in rollback_targets:
                    shutil.rmtree(old, ignore_errors=True)  # if it fails, the next save tries again
            # `stoker launch` compares the seconds with a grace period.
            self._report("checkpoint_saved", f"saved {CHECKPOINTS}/{final_dir.name}", write_s=round(self.write_s, 3))

    def _report_failure(self, error: OSError, step: int) -> None:
        self.failure = str(error)
        text = f"could not save at step {step}: {error}; training continues; the previous checkpoint is kept"
        self._report("checkpoint_failed", text)


def _serialize_weights(snapshot: HostSnapshot) -> bytes:
    """The bytes of a weights file, independent of the memory format on the device."""
    return to_safetensors({name: t.contiguous() for name, t in snapshot.weights.items()}, snapshot.metadata)


def _serialize_state(snapshot: HostSnapshot) -> bytes:
    buffer, state = io.BytesIO(), snapshot.state
    if snapshot.lease is not None:
        # they share memory, of which `save` would write all; and it refuses parts of one that have several types
        state = map_tensors(state, Tensor.clone)
    torch.save(state, buffer)
    # not getbuffer(), of which garbage collection can crash Python 3.12 (github.com/python/cpython/issues/111049)
    return buffer.getvalue()


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders, newest step first."""
    paths = [p for p in (run / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name)]
    return sorted(paths, key=lambda p: int(p.name[5:]), reverse=True)


def _read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if it is missing, incomplete or not a manifest."""
    try:
        data = regular_files.read_bytes(folder / MANIFEST, max_bytes=MAX_MANIFEST_BYTES)
        return msgspec.json.decode(data, type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError("damaged", cause=f"{MANIFEST}: {error}") from error


def _is_healthy(folder: Path) -> bool:
    try:
        return _read_manifest(folder).healthy
    except CheckpointError:
        return False


def healthy_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that a rollback may take, newest first. Their files are not checked."""
    return [int(folder.name[5:]) for folder in list_checkpoints(run) if _is_healthy(folder)]


def newest_healthy_weights(run: Path) -> Path | None:
    """The weights file of the newest healthy checkpoint, unchecked; None if there is none."""
    steps = healthy_steps(run)
    return run / CHECKPOINTS / f"step-{steps[0]:08d}" / WEIGHTS if steps else None


def discard_checkpoints(run: Path, *, after: int, rollback_count: int) -> None:
    """Removes the checkpoints after step `after` that were made before rollback number `rollback_count`."""
    for folder in list_checkpoints(run):
        try:
            manifest = _read_manifest(folder)
        except CheckpointError:
            continue  # `load_newest` reports it
        if manifest.step > after and manifest.rollbacks < rollback_count:
            # If interrupted, the next CheckpointWriter removes it.
            shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.gone")))


@dataclasses.dataclass
class LoadedCheckpoint:
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]


def load_newest(
    run: Path, report: Callable[[str, str], None], *, rejected: Mapping[int, str] | None = None
) -> LoadedCheckpoint | None:
    """The newest checkpoint with correct checksums; damaged ones are reported and skipped. None if there is none.
    rejected: step → why the state of this checkpoint cannot be restored; it counts as damaged. Raises CheckpointError
    if there are checkpoints and all are damaged: a silent restart could cost days."""
    folders = list_checkpoints(run)
    reasons, damaged = [], []
    for folder in folders:
        try:
            if (reason := (rejected or {}).get(int(folder.name[5:]))) is not None:
                raise CheckpointError("damaged", cause=reason)
            loaded = _load(folder)
        except CheckpointError as error:
            reasons.append(f"{folder.name}: {error.cause}")
            report("checkpoint_corrupt", f"{folder.name} is damaged ({error.cause}); trying the previous one")
            damaged.append(folder)
        else:
            for folder in damaged:  # not counted among those to keep, and not checked again
                aside = folder.with_name(f"damaged-{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)  # of the same step, which was damaged, trained again, saved
                folder.rename(aside)
            return loaded
    if not folders:
        return None
    shown, local = f"{display_path(run)}/{CHECKPOINTS}", str(run / CHECKPOINTS)
    where = shown if shown == local else f"{shown} and {local}"  # of a run in a bucket
    raise CheckpointError(
        "Every checkpoint of the run is damaged.",
        location=shown,
        cause="; ".join(reasons),
        fix=f"start a new run, or remove {where} to restart this one from its first step",
    )


def load_checkpoint(run: Path, report: Callable[[str, str], None]) -> LoadedCheckpoint | None:
    """The newest checkpoint, without those that a rollback abandoned: they are removed here if a kill left them."""
    if rollbacks := read_rollbacks(run):
        discard_checkpoints(run, after=rollbacks[-1].data["rollback_step"], rollback_count=rollbacks[-1].data["count"])
    return load_newest(run, report)


def read_rollbacks(run: Path) -> list[Event]:
    """The rollbacks of the run. A rollback counts from the moment that its event is written."""
    events = (event for event in read_lines(run, EVENTS, Event) if event.kind == "rolled_back")
    return [event for event in events if event.data.keys() >= {"rollback_step", "count", "best_ap"}]


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint's files match the checksums of its manifest."""
    try:
        _verify(folder)
    except CheckpointError:
        return False
    return True


def _verify(folder: Path) -> Manifest:
    """Raises CheckpointError, also for a manifest that names other files than those of a checkpoint."""
    manifest = _read_manifest(folder)
    if set(manifest.files) != {WEIGHTS, STATE}:
        named = ", ".join(sorted(repr(name[:60]) for name in manifest.files)[:5])
        raise CheckpointError("damaged", cause=f"{MANIFEST} names {named or 'no files'}, not {WEIGHTS} and {STATE}")
    if manifest.step != int(folder.name[5:]):
        raise CheckpointError("damaged", cause=f"{MANIFEST} is that of step {manifest.step}")
    try:
        for name, entry in manifest.files.items():
            with regular_files.open_file(folder / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size_bytes:
                    raise CheckpointError("damaged", cause=f"{name} has {size} bytes, not {entry.size_bytes}")
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    raise CheckpointError("damaged", cause=f"the checksum of {name} is wrong")
    except OSError as error:
        raise CheckpointError("damaged", cause=f"{name}: {error.strerror or error}") from error
    return manifest


def _load(folder: Path) -> LoadedCheckpoint:
    manifest = _verify(folder)
    try:
        weights = load_file(folder / WEIGHTS)
        with regular_files.open_torch_file(folder / STATE) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that torch did not write raises many types
        cause = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError("damaged", cause=f"{STATE} or {WEIGHTS} cannot be read: {cause}") from error
    return LoadedCheckpoint(manifest.step, weights, state)
