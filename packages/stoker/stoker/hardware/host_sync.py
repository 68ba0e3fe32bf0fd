"""Where the host may wait for the device."""

import contextlib
import contextvars
from collections.abc import Iterator

_allowed: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("allowed_host_syncs", default=())


@contextlib.contextmanager
def allow_host_sync(name: str) -> Iterator[None]:
    """A block in which the host may wait for the device. `name` is the purpose of the sync. A step is fast when the
    host only issues work and never reads a result. `tests/host_sync.py` proves it: there every operator that needs a
    value on the host raises, except in such a block. Not needed for correctness."""
    token = _allowed.set((*_allowed.get(), name))
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed_host_syncs() -> tuple[str, ...]:
    """Names of the `allow_host_sync` contexts around the caller, the outermost first."""
    return _allowed.get()
