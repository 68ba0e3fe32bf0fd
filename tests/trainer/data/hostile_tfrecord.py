"""A TFRecord data set with defects, written from the specification: see `hostile.py`."""

import struct
import zlib
from pathlib import Path
from typing import Any

import google_crc32c

from tests.trainer.data.hostile import HEALTHY, HEIGHT, WIDTH, Planted, encoded


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def example(**features: list[Any]) -> bytes:
    """A tf.train.Example; `__` in a name is a slash."""
    entries = b""
    for name, values in features.items():
        if values and isinstance(values[0], float):
            feature = _field(2, _field(1, struct.pack(f"<{len(values)}f", *values)))
        elif values and isinstance(values[0], int):
            feature = _field(3, _field(1, b"".join(_varint(value) for value in values)))
        else:
            feature = _field(1, b"".join(_field(1, value) for value in values))
        entries += _field(1, _field(1, name.replace("__", "/").encode()) + _field(2, feature))
    return _field(1, entries)


def frame(payload: bytes) -> bytes:
    """A record of a TFRecord file, with its checksums."""

    def crc(content: bytes) -> bytes:
        value = google_crc32c.value(content)
        return struct.pack("<I", (value >> 15 | value << 17) + 0xA282EAD8 & 0xFFFFFFFF)

    length = struct.pack("<Q", len(payload))
    return length + crc(length) + payload + crc(payload)


def tfrecord(root: Path) -> Planted:
    """Shards of a training and a validation split, with a label map."""
    root.mkdir(parents=True)
    (root / "label_map.pbtxt").write_text("item { id: 1 name: 'cat' }\nitem { id: 2 name: 'dog' }\n")
    planted: Planted = []

    def record(name: str, content: bytes | None = None, **changes: list[Any]) -> bytes:
        features: dict[str, list[Any]] = {
            "image__encoded": [encoded(zlib.crc32(name.encode())) if content is None else content],
            "image__filename": [name.encode()],
            "image__height": [HEIGHT],
            "image__width": [WIDTH],
            "image__object__bbox__xmin": [0.1, 0.2],
            "image__object__bbox__xmax": [0.5, 0.9],
            "image__object__bbox__ymin": [0.1, 0.2],
            "image__object__bbox__ymax": [0.5, 0.9],
            "image__object__class__label": [1, 2],
            "image__object__class__text": [b"cat", b"dog"],
        }
        return example(**(features | changes))

    def shard(name: str, *frames: bytes) -> None:
        (root / name).write_bytes(b"".join(frames))

    good = [frame(record(f"good{n}.jpg")) for n in range(HEALTHY)]
    flipped = bytearray(frame(record("flipped.jpg")))
    flipped[-40] ^= 1
    odd = {
        "damaged-record": bytes(flipped),
        "not-an-example": frame(b"\xff" * 50),
        "record-without-image": frame(record("x.jpg", image__encoded=[])),
        "unequal-lists": frame(record("unequal.jpg", image__object__bbox__xmin=[0.1])),
        "label-disagrees": frame(record("two words.jpg", image__object__class__label=[2, 1])),
        "unknown-class": frame(record("third.jpg", image__object__class__label=[1, 3], image__object__class__text=[])),
        "outside": frame(
            record("outside.jpg", image__object__bbox__xmin=[1.5, 0.2], image__object__bbox__xmax=[1.9, 0.9])
        ),
        "zero-size": frame(record("zero-size.jpg", image__object__bbox__xmax=[0.1, 0.9])),
        "damaged-image": frame(record("cut.jpg", content=encoded(50)[:700])),
    }
    shard("train.record-00000-of-00006", *good[:8], *odd.values())
    planted += [(kind, "cut.jpg" if kind == "damaged-image" else "train.record-00000-of-00006") for kind in odd]
    broken = bytearray(good[9])
    broken[3] ^= 1
    shard("train.record-00001-of-00006", good[8], bytes(broken), good[9])
    shard("train.record-00002-of-00006", good[9], good[10][:-30])
    shard("train.record-00003-of-00006")
    shard("train.record-00005-of-00006", *good[10:])
    planted += [("damaged-shard", "train.record-00001"), ("truncated-shard", "train.record-00002")]
    planted += [("empty-shard", "train.record-00003"), ("missing-shard", "00004")]
    shard("val.record", *(frame(record(f"val{n}.jpg")) for n in range(6)))
    return planted
