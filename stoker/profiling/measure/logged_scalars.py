"""Losses, rates and counts that a loop tells, without a wait for the device.

Numbers and tensors of the host are added up at once. Of tensors of a device a copy is made on the device, so that the
loop may go on to change them; a window's copies are brought to the host together beside the device's work, and read
when the next window closes. So a loss that lies on a GPU stands in the line after the window it belongs to.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.hardware.device import Device, Ready, SideStream

RATE, NORM = "rate", "grad_norm"
_NAMES = {"loss": "total"}
"""What records call what a loop calls so."""


class Reading(NamedTuple):
    """losses: means over the finite values; rate: the newest; odd: what a person should know, once, by a name of it:
    `not_finite`, the first loss that was not; `elsewhere`, losses of a device that is not the one that is measured."""

    losses: dict[str, float]
    rate: float | None
    grad_norm: float | None
    odd: dict[str, str]


class Logged:
    """What `Measure.log` was given since the last window."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._rate: float | None = None
        self._odd: dict[str, str] = {}
        self._said: set[str] = set()
        self._stream: SideStream | None = None
        self._held: dict[str, list[Any]] = {}
        self._coming: tuple[list[str], list[Any], Ready] | None = None

    def add(self, values: Mapping[str, Any]) -> None:
        """Raises UsageError for what is no number and no tensor of one."""
        for given, value in values.items():
            name = _NAMES.get(given, given)
            if value is None:
                continue
            if _is_on_device(value):
                if value.numel() != 1:
                    raise _no_number(given, value)
                self._held.setdefault(name, []).append(value.detach().reshape(()).clone())
                continue
            try:
                self._count(name, float(value.detach() if hasattr(value, "detach") else value))
            except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several numbers
                raise _no_number(given, value) from error

    def take(self, device: "Device | None", *, wait: bool = False) -> Reading:
        """All that is known by now; begins to copy the rest. wait: for the copies."""
        self._read(wait=wait)
        if device is None:  # not known yet, or none that torch can be asked about: the newest are enough
            self._held = {name: values[-1:] for name, values in self._held.items()}
        elif self._held and self._coming is None:
            self._copy(device)
            if wait:
                self._read(wait=True)
        norm = self._sums.pop(NORM, None)
        losses = {name: total / count for name, (total, count) in self._sums.items()}
        reading = Reading(losses, self._rate, norm[0] / norm[1] if norm else None, self._odd)
        self._sums, self._rate, self._odd = {}, None, {}
        return reading

    def _count(self, name: str, value: float) -> None:
        if name == RATE:
            self._rate = value
        elif math.isfinite(value):
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)
        elif name != NORM:  # under a loss scaler, a gradient may be infinite now and then
            self._say("not_finite", f"{'loss' if name == 'total' else name} is {value}")

    def _say(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._odd[name] = text

    def _copy(self, device: "Device") -> None:
        import torch

        here = device.torch_device
        there = next((one.device for values in self._held.values() for one in values if one.device != here), None)
        if there is not None:
            how = f'stoker.measure(…, device="{there}") measures that one'
            self._say("elsewhere", f"losses lie on {there}, and the time is that of {here}: {how}")
        stacked = [torch.stack([one.float().to(here) for one in values]) for values in self._held.values()]
        self._stream = self._stream or device.make_stream()  # one: torch has few, and lends them again
        copies, ready = self._stream.to_host(stacked)
        self._coming = (list(self._held), copies, ready)
        self._held = {}

    def _read(self, *, wait: bool) -> None:
        if self._coming is None:
            return
        names, copies, ready = self._coming
        if wait:
            ready.wait()
        if ready.done():
            self._coming = None
            for name, values in zip(names, copies, strict=True):
                for value in values.tolist():
                    self._count(name, value)


def _is_on_device(value: Any) -> bool:
    kind = getattr(getattr(value, "device", None), "type", "cpu")
    return kind != "cpu" and hasattr(value, "detach")


def _no_number(name: str, value: Any) -> UsageError:
    return UsageError(f"m.log({name}=…) needs a number, or a tensor of one number; it is a {type(value).__name__}.")


def count_pictures(batch: Any) -> int | None:
    """How many samples a batch has: the length of its first tensor, array or list. None where none is found.

    A tuple or a list may be columns (pictures, targets), or a list of samples: it is samples where its first entry is
    itself a tuple or a mapping.
    """
    if isinstance(batch, (tuple, list)):
        if batch and isinstance(batch[0], (tuple, Mapping)):
            return len(batch)
        return next((count for value in batch if (count := _length(value)) is not None), None)
    if isinstance(batch, Mapping):
        return next((count for value in batch.values() if (count := _length(value)) is not None), None)
    return _length(batch)


def _length(value: Any) -> int | None:
    if (shape := getattr(value, "shape", None)) is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, (list, tuple)) else None
