"""What is learnt from torch while somebody else's loop runs: its device's clock, compiling, saving, waits for ranks.

torch is never imported here: a loop that does without is measured by the host's clock alone. Everything is looked for
again with each step, since a script may import torch, choose its GPU and join its process group whenever it likes.
Nothing here touches a GPU that the loop does not use already: that would take its memory.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

from stoker.profiling.collectives import OnEnd, patch_collectives
from stoker.profiling.ledger import Ledger
from stoker.profiling.patching import OnCall, Patch, time_calls

if TYPE_CHECKING:
    from stoker.hardware.device import Device

MIN_WAIT_S = 20e-6
"""Shorter waits for other ranks are not charged: the data was there, and charging costs as much."""


class LazyDeviceClock:
    """The host's clock (`marks.Clock`) until an accelerator is in use, then that one's."""

    def __init__(self) -> None:
        self._device: Any = None

    @property
    def on_host(self) -> bool:
        return self._device is None

    def use_device(self, device: "Device") -> None:
        """From now on there are marks, on the device. Waits for it once."""
        self._device = device.make_clock()

    def record_event(self) -> Any:
        return self._device.record_event()

    def resolve(self, event: Any) -> float | None:
        time_s: float | None = self._device.resolve(event)
        return time_s

    def drop(self, event: Any) -> None:
        self._device.drop(event)


class TorchHooks:
    """Tells the ledger what torch does. Made in the thread that trains; `look` and `tell` are called there.

    asked: the device that the loop uses, by its name in torch; None: the accelerator, as soon as it is in use.
    """

    def __init__(self, ledger: Ledger, clock: LazyDeviceClock, device_name: str | None) -> None:
        self.device: Device | None = None
        self._ledger = ledger
        self._clock = clock
        self._device_name = device_name
        self._thread = threading.get_ident()
        self._device_pending = True
        self._torch_device: Any = None
        self._is_device_initialized: Callable[[], bool] | None = None
        self._patches: list[Patch] = []
        self._save_patched = self._collectives_patched = False
        self._compile_callbacks: Any = None
        self._compile_start_s: float | None = None
        self._pending_intervals: deque[tuple[str, float, float]] = deque()
        self._is_active = True

    def poll(self) -> None:
        """Finds what has come since the last time. A microsecond where nothing has."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "accelerator"):  # none, an old one, or one that is just being imported
            return
        if self._device_pending:
            self._find_device(torch)
        if not self._save_patched:
            self._save_patched = True
            self._patches.append(time_calls(torch, "save", self._make_on_call("checkpoint")))
        if self._compile_callbacks is None:
            self._hook_compiler()
        if not self._collectives_patched:
            dist = sys.modules.get("torch.distributed")
            if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._collectives_patched = True
                self._patches += patch_collectives(self._on_collective_begin, self._is_training_thread)

    def flush(self) -> None:
        """Charges what was learnt since the last time; before a window is asked for."""
        while self._pending_intervals:
            self._ledger.attribute(*self._pending_intervals.popleft())

    def wait(self) -> None:
        """Until the device has done everything. Raises RuntimeError when it failed."""
        if self.device is not None:
            self.device.synchronize()

    def peak_bytes(self) -> int:
        """The most memory of the device that was allocated so far; without one, of the host that this process has."""
        return psutil.Process().memory_info().rss if self.device is None else self.device.memory().peak

    def close(self) -> None:
        """Puts everything back."""
        self._is_active = False
        for patch in reversed(self._patches):
            patch.restore()
        self._patches.clear()
        if self._compile_callbacks is not None:
            for callbacks, callback in ((self._compile_callbacks.start_callbacks, self._on_compile_start),
                                    (self._compile_callbacks.end_callbacks, self._on_compile_end)):  # fmt: skip
                if callback in callbacks:  # torch._dynamo.reset() has dropped it else
                    callbacks.remove(callback)
            self._compile_callbacks = None

    def abandon(self) -> None:
        """In a process that was forked off: says nothing any more."""
        self._is_active = False

    def _is_training_thread(self) -> bool:
        """Another thread's waits hold up nobody; a process that was forked off records nothing."""
        return self._is_active and threading.get_ident() == self._thread

    def _make_on_call(self, phase: str) -> OnCall:
        def on_call(start_s: float, end_s: float) -> None:
            if self._is_training_thread():
                self._pending_intervals.append((phase, start_s, end_s))

        return on_call

    def _on_collective_begin(self) -> OnEnd:
        """On a host what was waited is charged when it is known; of a device, its own marks say how long it waited."""
        if self.device is not None:
            stack = contextlib.ExitStack()
            stack.enter_context(self._ledger.phase("comm"))
            return stack.close
        start_s = time.perf_counter()

        def on_end() -> None:
            end_s = time.perf_counter()
            if end_s - start_s >= MIN_WAIT_S:
                self._pending_intervals.append(("comm", start_s, end_s))

        return on_end

    def _find_device(self, torch: Any) -> None:
        if self._is_device_initialized is None:
            device = (
                torch.accelerator.current_accelerator()
                if self._device_name is None
                else torch.device(self._device_name)
            )
            if device is None or device.type == "cpu":
                self._device_pending = False
                return
            module = torch.get_device_module(device.type)
            self._torch_device, self._is_device_initialized = (
                device,
                getattr(module, "is_initialized", torch.accelerator.is_available),
            )
        if (
            not self._is_device_initialized()
        ):  # whether there is one is not asked: CUDA would then refuse to work in forked children
            return
        device = self._torch_device
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        from stoker.hardware.device import Device

        self._device_pending = False
        self.device = Device(device)
        self._clock.use_device(self.device)

    def _hook_compiler(self) -> None:
        """The handler of torch._dynamo, which torch.compile loads. Any thread may compile: a backward pass does it in
        one of autograd's, and the thread that trains waits for it."""
        module = sys.modules.get("torch._dynamo.callback")
        self._compile_callbacks = getattr(module, "callback_handler", None)
        if self._compile_callbacks is not None:
            self._compile_callbacks.register_start_callback(self._on_compile_start)
            self._compile_callbacks.register_end_callback(self._on_compile_end)

    def _on_compile_start(self, *_: Any) -> None:
        self._compile_start_s = time.perf_counter()

    def _on_compile_end(self, *_: Any) -> None:
        if self._compile_start_s is not None and self._is_active:
            self._pending_intervals.append(("compile", self._compile_start_s, time.perf_counter()))
        self._compile_start_s = None
