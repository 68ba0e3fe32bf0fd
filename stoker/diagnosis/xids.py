"""NVIDIA's Xid errors, from `knowledge/xids.toml`: what a number means, where it mostly comes from, what to do."""

import functools
from typing import Literal

import msgspec

from stoker.knowledge import read_toml


class Xid(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """origin: where the error mostly comes from."""

    meaning: str
    origin: Literal["program", "machine", "either"]
    fix: str


@functools.cache
def _table() -> dict[str, Xid]:
    return msgspec.convert(read_toml("xids.toml"), dict[str, Xid])


def find_xid(number: int) -> Xid:
    """What is known of the number; of one that is not in the file, where to look."""
    return _table().get(str(number), _table()["unknown"])
