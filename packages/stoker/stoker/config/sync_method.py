"""How several devices keep one model: the values of `--sync`. What they do: `training/ddp.py`; what they cost:
`hardware/exchange_cost.py`."""

import dataclasses
import re
from typing import Literal

from stoker_watch.errors import ConfigError

Kind = Literal["plain", "bf16", "every", "auto"]

DEFAULT_BUCKET_MIB, DEFAULT_EVERY = 25, 8
"""MiB as DistributedDataParallel has them; steps between two averages."""
CHOICES = ("plain", "bf16", "every:8", "auto")
_NUMBERS: dict[str, tuple[int, int, int]] = {
    "plain": (DEFAULT_BUCKET_MIB, 1, 4096),
    "bf16": (DEFAULT_BUCKET_MIB, 1, 4096),
    "every": (DEFAULT_EVERY, 2, 10_000),
}
"""Kind → (default, lowest, highest) of its number."""


@dataclasses.dataclass(frozen=True)
class SyncMethod:
    """A parsed value of `--sync`."""

    kind: Kind
    number: int = 0
    """plain, bf16: MiB of a bucket of gradients. every: steps. Otherwise 0."""

    def __str__(self) -> str:
        default = _NUMBERS.get(self.kind, (0,))[0]
        is_default = self.number == default and self.kind != "every"
        return self.kind if is_default else f"{self.kind}:{self.number}"

    @property
    def is_local(self) -> bool:
        """Whether ranks update their own weights and average those, so that they differ between two averages."""
        return self.kind == "every"


PLAIN = SyncMethod("plain", DEFAULT_BUCKET_MIB)


def parse_sync(text: str) -> SyncMethod:
    """`every:8` → method and number. Raises ConfigError, which names the valid forms."""
    match = re.fullmatch(r"\s*([a-z0-9]+)(?::(\d+))?\s*", text)
    kind = "" if match is None else match[1]
    if match is None or kind not in ("auto", *_NUMBERS):
        raise ConfigError(f"--sync {text!r} is not a method of exchange.", choices=CHOICES)
    if kind == "auto":
        if match[2] is not None:
            raise ConfigError(f"--sync {text!r}: auto has no number.", choices=("auto",))
        return SyncMethod("auto")
    default, low, high = _NUMBERS[kind]
    number = default if match[2] is None else int(match[2])
    if not low <= number <= high:
        raise ConfigError(f"--sync {text!r}: the number is out of range.", choices=(f"{kind}:{low} … {kind}:{high}",))
    return SyncMethod(kind, number)  # type: ignore[arg-type]
