"""Snapshots of a training on the host: the EMA weights, and for a checkpoint the state to continue from.

The copies are made on a stream of their own while the training goes on; only the next update of the weights has to wait
for them (`wait_before_update`).
"""

from typing import Any

import msgspec

from stoker.hardware.device import ReadyEvent
from stoker.hardware.host_arena import HostArenas
from stoker.training.attempt import Attempt
from stoker.training.checkpoint import HostSnapshot


class Snapshots:
    """Takes the snapshots of a training."""

    def __init__(self, attempt: Attempt) -> None:
        self._setup, self._parallel = attempt.setup, attempt.parallel
        self._stream = attempt.setup.device.make_stream()
        self._arenas: HostArenas | None = None
        self._newest_copy: ReadyEvent | None = None

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocates memory for copies of the weights and a state like this one, so that no save does."""
        self._arenas = self._parallel.reserve_arenas(self._setup.optimizer.ema_model.state_dict(), state)

    def take(self, state: dict[str, Any], *, ap: float | None) -> HostSnapshot | None:
        """The EMA weights with their metadata, and a state (empty for a file of weights alone). Called by all processes
        that take part in it; None where there is nothing to write."""
        setup, step = self._setup, self._setup.state.step
        snapshot = self._parallel.snapshot(
            self._stream,
            step=step,
            metadata=msgspec.structs.replace(setup.metadata, step=step, ap=ap).header(),
            weights=setup.optimizer.ema_model.state_dict(),
            state=state,
            arenas=self._arenas,
        )
        if snapshot is not None:
            self._newest_copy = snapshot.ready
        return snapshot

    def wait_before_update(self) -> None:
        """Makes the device wait until all copies are made: the weights may change only then."""
        if self._newest_copy is not None:
            self._newest_copy.block_main_stream()
            self._newest_copy = None
