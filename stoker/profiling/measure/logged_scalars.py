"""Losses, learning rates and counts that a loop logs, without a wait for the device.

Numbers and CPU tensors are added up at once. Device tensors are copied on the device, so that the loop may change them.
The copies of a window are sent to the host together, asynchronously, and read when the next window is written. So the
loss of a GPU is in the line after the window that it belongs to.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.hardware.device import Device, ReadyEvent, SideStream

LR_KEY, GRAD_NORM_KEY = "lr", "grad_norm"
_RECORD_NAMES = {"loss": "total"}
"""Name in `Measure.log` → name in the records, where they differ."""


class ScalarSummary(NamedTuple):
    """losses: means over the finite values; lr: the newest; warnings: text by name, each once: `not_finite`, the first
    loss that was not finite; `other_device`, losses are on another device than the measured one."""

    losses: dict[str, float]
    lr: float | None
    grad_norm: float | None
    warnings: dict[str, str]


class ScalarLogger:
    """The values of `Measure.log` since the last window."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lr: float | None = None
        self._warnings: dict[str, str] = {}
        self._warned: set[str] = set()
        self._stream: SideStream | None = None
        self._device_values: dict[str, list[Any]] = {}
        self._pending_copy: tuple[list[str], list[Any], ReadyEvent] | None = None

    def add(self, values: Mapping[str, Any]) -> None:
        """Raises UsageError for a value that is neither a number nor a tensor of one number."""
        for key, value in values.items():
            name = _RECORD_NAMES.get(key, key)
            if value is None:
                continue
            if _is_on_device(value):
                if value.numel() != 1:
                    raise _not_a_number_error(key, value)
                self._device_values.setdefault(name, []).append(value.detach().reshape(()).clone())
                continue
            try:
                self._add_value(name, float(value.detach() if hasattr(value, "detach") else value))
            except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
                raise _not_a_number_error(key, value) from error

    def take(self, device: "Device | None", *, wait: bool = False) -> ScalarSummary:
        """Returns the values on the host and starts the copies of the others. wait: for the copies."""
        self._read_copies(wait=wait)
        if device is None:  # not known yet, or not used by torch: keep only the newest values
            self._device_values = {name: values[-1:] for name, values in self._device_values.items()}
        elif self._device_values and self._pending_copy is None:
            self._start_copy(device)
            if wait:
                self._read_copies(wait=True)
        grad_norm = self._sums.pop(GRAD_NORM_KEY, None)
        losses = {name: total / count for name, (total, count) in self._sums.items()}
        summary = ScalarSummary(losses, self._lr, grad_norm[0] / grad_norm[1] if grad_norm else None, self._warnings)
        self._sums, self._lr, self._warnings = {}, None, {}
        return summary

    def _add_value(self, name: str, value: float) -> None:
        if name == LR_KEY:
            self._lr = value
        elif math.isfinite(value):
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        elif name != GRAD_NORM_KEY:  # with a loss scaler, a gradient may be infinite now and then
            self._warn_once("not_finite", f"{'loss' if name == 'total' else name} is {value}")

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            self._warnings[name] = text

    def _start_copy(self, device: "Device") -> None:
        import torch

        measured_device = device.torch_device
        other_device = next(
            (
                value.device
                for values in self._device_values.values()
                for value in values
                if value.device != measured_device
            ),
            None,
        )
        if other_device is not None:
            hint = f'stoker.measure(…, device="{other_device}") measures that device'
            self._warn_once(
                "other_device", f"losses are on {other_device}, but the measured device is {measured_device}: {hint}"
            )
        stacked = [
            torch.stack([value.float().to(measured_device) for value in values])
            for values in self._device_values.values()
        ]
        self._stream = self._stream or device.make_stream()  # only one: torch has few streams and reuses them
        copies, ready = self._stream.to_host(stacked)
        self._pending_copy = (list(self._device_values), copies, ready)
        self._device_values = {}

    def _read_copies(self, *, wait: bool) -> None:
        if self._pending_copy is None:
            return
        names, copies, ready = self._pending_copy
        if wait:
            ready.synchronize()
        if ready.done():
            self._pending_copy = None
            for name, values in zip(names, copies, strict=True):
                for value in values.tolist():
                    self._add_value(name, value)


def _is_on_device(value: Any) -> bool:
    kind = getattr(getattr(value, "device", None), "type", "cpu")
    return kind != "cpu" and hasattr(value, "detach")


def _not_a_number_error(name: str, value: Any) -> UsageError:
    return UsageError(f"m.log({name}=…) needs a number, or a tensor of one number; it is a {type(value).__name__}.")
