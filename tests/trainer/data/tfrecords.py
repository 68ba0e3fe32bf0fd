"""TFRecord files for tests, written and read from the two format descriptions, without any code of stoker."""

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from PIL import Image


def crc32c(data: bytes) -> int:
    """RFC 3720, bit by bit: polynomial 0x1EDC6F41, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def unframe(content: bytes) -> Iterator[bytes]:
    """The data of each record; every checksum must be correct."""
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert content[8:12] == masked(content[:8])
        data, content = content[12 : 12 + length], content[12 + length :]
        assert content[:4] == masked(data)
        yield data
        content = content[4:]


def varint(value: int) -> bytes:
    value %= 2**64
    low, rest = value % 128, value // 128
    return bytes([low]) if not rest else bytes([low | 128]) + varint(rest)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(values: Sequence[object], *, packed: bool = True) -> bytes:
    if all(isinstance(value, bytes) for value in values):
        return field(1, b"".join(field(1, value) for value in values))  # type: ignore[arg-type]
    if all(isinstance(value, float) for value in values):
        pieces = [struct.pack("<f", value) for value in values]
        return field(2, field(1, b"".join(pieces)) if packed else b"".join(b"\x0d" + piece for piece in pieces))
    pieces = [varint(value) for value in values]  # type: ignore[arg-type]
    return field(3, field(1, b"".join(pieces)) if packed else b"".join(b"\x08" + piece for piece in pieces))


def example(features: Mapping[str, Sequence[object]], *, packed: bool = True) -> bytes:
    entries = (field(1, key.encode()) + field(2, feature(values, packed=packed)) for key, values in features.items())
    return field(1, b"".join(field(1, entry) for entry in entries))


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of a message that has length-delimited fields only."""
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= byte % 128 << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        tag, length = number(), number()
        assert tag % 8 == 2
        yield tag // 8, message[position : position + length]
        position += length


def features_of(record: bytes) -> dict[str, list[object]]:
    """The features of an Example as stoker writes them, packed."""
    features: dict[str, list[object]] = {}
    ((_, inside),) = fields(record)
    for _, entry in fields(inside):
        (_, key), (_, value) = fields(entry)
        ((kind, content),) = fields(value)
        items = [item for _, item in fields(content)]
        if kind == 1:
            features[key.decode()] = list(items)
        elif kind == 2:
            features[key.decode()] = list(struct.unpack(f"<{len(items[0]) // 4}f", items[0]))
        else:
            numbers, value_ = [], 0
            shift = 0
            for byte in items[0]:
                value_ |= byte % 128 << shift
                shift += 7
                if byte < 128:
                    numbers.append(value_)
                    value_ = shift = 0
            features[key.decode()] = list(numbers)
    return features


def jpeg(width: int = 8, height: int = 8, shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 128, 255 - shade)).save(file, "JPEG")
    return file.getvalue()


Box = tuple[str | None, int | None, float, float, float, float]
"""Text, label, xmin, ymin, xmax, ymax, normalized."""


def image_features(
    name: str | None, boxes: Sequence[Box] = (), *, size: tuple[int, int] | None = (100, 200), **more: Sequence[object]
) -> dict[str, Sequence[object]]:
    """The features of an image of `size` (height, width); more: other features, `/` written as two underscores."""
    features: dict[str, Sequence[object]] = {"image/encoded": [jpeg(200, 100)], "image/format": [b"jpeg"]}
    if size is not None:
        features |= {"image/height": [size[0]], "image/width": [size[1]]}
    if name is not None:
        features["image/filename"] = [name.encode()]
    for column, key in enumerate(("xmin", "ymin", "xmax", "ymax"), 2):
        features[f"image/object/bbox/{key}"] = [float(box[column]) for box in boxes]  # type: ignore[arg-type]
    if boxes and boxes[0][0] is not None:
        features["image/object/class/text"] = [(box[0] or "").encode() for box in boxes]
    if boxes and boxes[0][1] is not None:
        features["image/object/class/label"] = [box[1] for box in boxes]
    return features | {key.replace("__", "/"): values for key, values in more.items()}


def write(path: Path, *images: Mapping[str, Sequence[object]] | bytes) -> Path:
    """A shard of images; bytes are the data of a record as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(frame(item if isinstance(item, bytes) else example(item)) for item in images))
    return path


def label_map(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"item {{ id: {n} name: '{name}' }}\n" for n, name in enumerate(names, 1)))
    return path
