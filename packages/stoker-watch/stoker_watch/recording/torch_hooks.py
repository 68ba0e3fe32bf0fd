"""Observes torch while a training loop runs: its device's clock, compilation, saving, waits for other ranks, and the
values that the loop logs.

torch is never imported here: a loop without it is measured by the host's clock alone. Each step checks again, since a
script may import torch, choose its GPU and join its process group at any time. Nothing here uses a GPU that the loop
does not use. The host never waits for a logged tensor: those of a window are sent to the host together, asynchronously,
so the loss of a GPU is in the line after the window that it belongs to.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from stoker_watch.errors import UsageError
from stoker_watch.recording.hook.stoker_hook.instruments import Patch, patch_collectives, time_compilations, timed
from stoker_watch.recording.ledger import Ledger
from stoker_watch.recording.torch_device import Copies, TorchDevice

LR_KEY, GRAD_NORM_KEY = "lr", "grad_norm"
_RECORD_NAMES = {"loss": "total"}
"""Name in `Measure.log` → name in the records, where they differ."""


class TorchHooks:
    """Adds intervals of torch's work to the ledger. Created in the training thread, which calls `poll` and `flush`.

    device_name: the device that the loop uses, as in torch; None: the accelerator, as soon as it is in use.
    """

    def __init__(self, ledger: Ledger, device_name: str | None) -> None:
        self.device: TorchDevice | None = None
        self._ledger = ledger
        self._device_name = device_name
        self._thread = threading.get_ident()
        self._device_pending = True
        self._torch_device: Any = None
        self._is_device_initialized: Callable[[], bool] | None = None
        self._patches: list[Patch] = []
        self._save_patched = self._collectives_patched = False
        self._unhook_compiler: Callable[[], None] | None = None
        self._compilations: deque[tuple[float, float]] = deque()
        self._is_active = True

    def poll(self) -> None:
        """Patches parts of torch that were loaded since the last call. A microsecond if there are none."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "accelerator"):  # not loaded, too old, or just being imported
            return
        if self._device_pending:
            self._find_device(torch)
        if not self._save_patched:
            self._save_patched = True
            self._patches.append(Patch(torch, "save", lambda save: timed(save, lambda: self._begin("checkpoint"))))
        if self._unhook_compiler is None and (module := sys.modules.get("torch._dynamo.callback")) is not None:
            self._unhook_compiler = time_compilations(module.callback_handler, self._begin_compilation)
        if not self._collectives_patched:
            dist = sys.modules.get("torch.distributed")
            if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._collectives_patched = True
                self._patches += patch_collectives(
                    lambda: self._begin("comm"), self._is_training_thread, lambda: self._ledger.begin("comm")
                )

    def flush(self) -> None:
        """Adds the compilations since the last call to the ledger; call it before a window is requested."""
        while self._compilations:
            self._ledger.attribute("compile", *self._compilations.popleft())

    def peak_bytes(self) -> int:
        """Peak allocated memory of the device; without a device, the resident memory of this process."""
        return psutil.Process().memory_info().rss if self.device is None else self.device.peak_bytes()

    def close(self) -> None:
        self._is_active = False
        for patch in reversed(self._patches):
            patch.restore()
        self._patches.clear()
        if self._unhook_compiler is not None:
            self._unhook_compiler()

    def abandon(self) -> None:
        """In a forked process: records nothing any more."""
        self._is_active = False

    def _is_training_thread(self) -> bool:
        """False also in a forked process, which records nothing."""
        return self._is_active and threading.get_ident() == self._thread

    def _begin(self, phase: str) -> Callable[[], None] | None:
        return self._ledger.begin(phase) if self._is_training_thread() else None

    def _begin_compilation(self) -> Callable[[], None]:
        """Any thread may compile, as one of autograd in a backward pass: so the training thread adds the interval."""
        start_s = time.perf_counter()

        def end() -> None:
            if self._is_active:
                self._compilations.append((start_s, time.perf_counter()))

        return end

    def _find_device(self, torch: Any) -> None:
        if self._is_device_initialized is None:
            name = self._device_name
            device = torch.accelerator.current_accelerator() if name is None else torch.device(name)
            if device is None or device.type == "cpu":
                self._device_pending = False
                return
            module = torch.get_device_module(device.type)
            self._torch_device = device
            self._is_device_initialized = getattr(module, "is_initialized", torch.accelerator.is_available)
        # Do not ask whether a device exists: CUDA would then refuse to work in forked children.
        if not self._is_device_initialized():
            return
        device = self._torch_device
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device_pending = False
        self.device = TorchDevice(torch, device)
        self._ledger.clock = self.device.make_clock()  # waits for it once


class ScalarLogger:
    """The values of `Measure.log` since the last window. Device tensors are copied, as the loop may change them."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lr: float | None = None
        self._not_finite: str | None = None
        self._is_reported = False
        self._device_values: dict[str, list[Any]] = {}
        self._pending_copy: tuple[list[str], Copies] | None = None

    def add(self, values: Mapping[str, Any]) -> None:
        """Raises UsageError for a value that is neither a number nor a tensor of one number."""
        for key, value in values.items():
            name = _RECORD_NAMES.get(key, key)
            if value is None:
                continue
            try:
                if getattr(getattr(value, "device", None), "type", "cpu") != "cpu" and hasattr(value, "detach"):
                    self._device_values.setdefault(name, []).append(value.detach().reshape(()).clone())
                else:
                    self._add_value(name, float(value.detach() if hasattr(value, "detach") else value))
            except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
                needed = "a number, or a tensor of one number"
                raise UsageError(f"m.log({key}=…) needs {needed}; it is a {type(value).__name__}.") from error

    def take(self, device: TorchDevice | None, *, wait: bool = False) -> tuple[dict[str, Any], str | None]:
        """(fields of `StepWindow`: means of the finite losses, newest lr; the first loss that was not finite, once), of
        the values on the host; starts the copies of the others. wait: for the copies."""
        self._read_copies(wait=wait)
        if device is None:  # not known yet, or not used by torch: keep only the newest values
            self._device_values = {name: values[-1:] for name, values in self._device_values.items()}
        elif self._device_values and self._pending_copy is None:
            self._pending_copy = list(self._device_values), device.scalars_to_host([*self._device_values.values()])
            self._device_values = {}
            if wait:
                self._read_copies(wait=True)
        means = {name: total / count for name, (total, count) in self._sums.items()}
        fields = {"lr": self._lr, "grad_norm": means.pop(GRAD_NORM_KEY, None), "losses": means}
        not_finite = self._not_finite
        self._sums, self._lr, self._not_finite = {}, None, None
        return fields, not_finite

    def _add_value(self, name: str, value: float) -> None:
        if name == LR_KEY:
            self._lr = value
        elif math.isfinite(value):
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        elif name != GRAD_NORM_KEY and not self._is_reported:  # with a loss scaler, a gradient may be infinite
            self._is_reported = True
            self._not_finite = f"{'loss' if name == 'total' else name} is {value}"

    def _read_copies(self, *, wait: bool) -> None:
        if self._pending_copy is None:
            return
        names, copies = self._pending_copy
        if wait:
            copies.synchronize()
        if copies.done():
            self._pending_copy = None
            for name, values in zip(names, copies.tensors, strict=True):
                for value in values.tolist():
                    self._add_value(name, value)
