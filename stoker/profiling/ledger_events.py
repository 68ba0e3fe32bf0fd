"""What the ledger (`ledger.py`) is given and keeps: whose clock it asks, who listens, and changes on its two lines.

Data and contracts only; what is done with them is the ledger's, how a device is marked is
`stoker/hardware/device.py`'s.
"""

from typing import Any, Protocol

import msgspec


class Clock(Protocol):
    """Marks on the device's time line; `device.DeviceClock`."""

    @property
    def on_host(self) -> bool:
        """Whether the thread that issues the work does it too (a CPU): nothing is marked then."""

    def mark(self) -> Any:
        """The moment at which the device will have done everything issued so far."""

    def resolve(self, mark: Any) -> float | None:
        """That moment in seconds of the host's clock, or None while it is not reached. Called in the order of marks;
        a mark that is resolved is not asked for again."""

    def drop(self, mark: Any) -> None:
        """The mark will never be asked for."""


class Ranges(Protocol):
    """Who else wants to know what the thread says; `device.Ranges`."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


class Said(msgspec.Struct, frozen=True, gc=False):  # a seventh of a NamedTuple's price, eight times a step
    """What the thread is in from at_s on; stage: of `input_wait`."""

    at_s: float
    label: str
    stage: str


class Done(msgspec.Struct, frozen=True, gc=False):
    """What the device does from at_s on (None: nothing that was said); steps: that end there."""

    at_s: float
    label: str | None
    steps: int


class Pending(msgspec.Struct, frozen=True):
    """A mark whose moment is not known yet, and what `Done` will say of it."""

    mark: Any
    issued_s: float
    label: str | None
    steps: int
