"""What the ledger (`ledger.py`) is given and keeps: whose clock it asks, who listens, and changes on its two lines.

Data and contracts only; what is done with them is the ledger's, how a device is marked is
`stoker/hardware/device.py`'s.
"""

from typing import Any, Protocol

import msgspec


class EventClock(Protocol):
    """Marks on the device's time line; `device.DeviceClock`."""

    @property
    def on_host(self) -> bool:
        """Whether the thread that issues the work does it too (a CPU): nothing is marked then."""

    def record_event(self) -> Any:
        """The moment at which the device will have done everything issued so far."""

    def resolve(self, event: Any) -> float | None:
        """That moment in seconds of the host's clock, or None while it is not reached. Called in the order of marks;
        a mark that is resolved is not asked for again."""

    def drop(self, event: Any) -> None:
        """The mark will never be asked for."""


class ProfilerRanges(Protocol):
    """Who else wants to know what the thread says; `device.Ranges`."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


class HostInterval(msgspec.Struct, frozen=True, gc=False):  # a seventh of a NamedTuple's price, eight times a step
    """What the thread is in from at_s on; stage: of `input_wait`."""

    start_s: float
    label: str
    stage: str


class DeviceInterval(msgspec.Struct, frozen=True, gc=False):
    """What the device does from at_s on (None: nothing that was said); steps: that end there."""

    start_s: float
    label: str | None
    steps: int


class UnresolvedEvent(msgspec.Struct, frozen=True):
    """A mark whose moment is not known yet, and what `Done` will say of it."""

    event: Any
    issued_s: float
    label: str | None
    steps: int
