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

from stoker.profiling.collectives import Ends, watch_collectives
from stoker.profiling.ledger import Ledger
from stoker.profiling.patching import Replaced, Told, timed

if TYPE_CHECKING:
    from stoker.hardware.device import Device

LEAST_WAIT_S = 20e-6
"""Shorter waits for other ranks are not charged: the data was there, and charging costs as much."""


class LateClock:
    """The host's clock (`marks.Clock`) until an accelerator is in use, then that one's."""

    def __init__(self) -> None:
        self._device: Any = None

    @property
    def on_host(self) -> bool:
        return self._device is None

    def follow(self, device: "Device") -> None:
        """From now on there are marks, on the device. Waits for it once."""
        self._device = device.make_clock()

    def mark(self) -> Any:
        return self._device.mark()

    def resolve(self, mark: Any) -> float | None:
        at_s: float | None = self._device.resolve(mark)
        return at_s

    def drop(self, mark: Any) -> None:
        self._device.drop(mark)


class Inside:
    """Tells the ledger what torch does. Made in the thread that trains; `look` and `tell` are called there.

    asked: the device that the loop uses, by its name in torch; None: the accelerator, as soon as it is in use.
    """

    def __init__(self, ledger: Ledger, clock: LateClock, asked: str | None) -> None:
        self.device: Device | None = None
        self._ledger = ledger
        self._clock = clock
        self._asked = asked
        self._thread = threading.get_ident()
        self._seek_device = True
        self._found: Any = None
        self._is_used: Callable[[], bool] | None = None
        self._replaced: list[Replaced] = []
        self._saving = self._exchanging = False
        self._handler: Any = None
        self._compile_began_s: float | None = None
        self._later: deque[tuple[str, float, float]] = deque()
        self._open = True

    def look(self) -> None:
        """Finds what has come since the last time. A microsecond where nothing has."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "accelerator"):  # none, an old one, or one that is just being imported
            return
        if self._seek_device:
            self._find_device(torch)
        if not self._saving:
            self._saving = True
            self._replaced.append(timed(torch, "save", self._told("checkpoint")))
        if self._handler is None:
            self._find_compiler()
        if not self._exchanging:
            dist = sys.modules.get("torch.distributed")
            if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                self._exchanging = True
                self._replaced += watch_collectives(self._exchange_begins, self._is_ours)

    def tell(self) -> None:
        """Charges what was learnt since the last time; before a window is asked for."""
        while self._later:
            self._ledger.charge(*self._later.popleft())

    def wait(self) -> None:
        """Until the device has done everything. Raises RuntimeError when it failed."""
        if self.device is not None:
            self.device.wait()

    def peak_bytes(self) -> int:
        """The most memory of the device that was allocated so far; without one, of the host that this process has."""
        return psutil.Process().memory_info().rss if self.device is None else self.device.memory().peak

    def close(self) -> None:
        """Puts everything back."""
        self._open = False
        for one in reversed(self._replaced):
            one.put_back()
        self._replaced.clear()
        if self._handler is not None:
            for callbacks, ours in ((self._handler.start_callbacks, self._compile_begins),
                                    (self._handler.end_callbacks, self._compile_ends)):  # fmt: skip
                if ours in callbacks:  # torch._dynamo.reset() has dropped it else
                    callbacks.remove(ours)
            self._handler = None

    def abandon(self) -> None:
        """In a process that was forked off: says nothing any more."""
        self._open = False

    def _is_ours(self) -> bool:
        """Another thread's waits hold up nobody; a process that was forked off records nothing."""
        return self._open and threading.get_ident() == self._thread

    def _told(self, phase: str) -> Told:
        def told(begin_s: float, end_s: float) -> None:
            if self._is_ours():
                self._later.append((phase, begin_s, end_s))

        return told

    def _exchange_begins(self) -> Ends:
        """On a host what was waited is charged when it is known; of a device, its own marks say how long it waited."""
        if self.device is not None:
            stack = contextlib.ExitStack()
            stack.enter_context(self._ledger.phase("comm"))
            return stack.close
        begin_s = time.perf_counter()

        def ends() -> None:
            end_s = time.perf_counter()
            if end_s - begin_s >= LEAST_WAIT_S:
                self._later.append(("comm", begin_s, end_s))

        return ends

    def _find_device(self, torch: Any) -> None:
        if self._is_used is None:
            found = torch.accelerator.current_accelerator() if self._asked is None else torch.device(self._asked)
            if found is None or found.type == "cpu":
                self._seek_device = False
                return
            module = torch.get_device_module(found.type)
            self._found, self._is_used = found, getattr(module, "is_initialized", torch.accelerator.is_available)
        if not self._is_used():  # whether there is one is not asked: CUDA would then refuse to work in forked children
            return
        found = self._found
        if found.index is None:
            found = torch.device(found.type, torch.accelerator.current_device_index())
        from stoker.hardware.device import Device

        self._seek_device = False
        self.device = Device(found)
        self._clock.follow(self.device)

    def _find_compiler(self) -> None:
        """The handler of torch._dynamo, which torch.compile loads. Any thread may compile: a backward pass does it in
        one of autograd's, and the thread that trains waits for it."""
        module = sys.modules.get("torch._dynamo.callback")
        self._handler = getattr(module, "callback_handler", None)
        if self._handler is not None:
            self._handler.register_start_callback(self._compile_begins)
            self._handler.register_end_callback(self._compile_ends)

    def _compile_begins(self, *_: Any) -> None:
        self._compile_began_s = time.perf_counter()

    def _compile_ends(self, *_: Any) -> None:
        if self._compile_began_s is not None and self._open:
            self._later.append(("compile", self._compile_began_s, time.perf_counter()))
        self._compile_began_s = None
