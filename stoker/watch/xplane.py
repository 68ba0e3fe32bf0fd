"""How long the steps of a TensorFlow job waited for their input, out of a trace of TensorFlow's profiler.

A trace is an XSpace (tsl/profiler/protobuf/xplane.proto), of which a few fields are read here: planes (1), their lines
(3) and names of events (4), the events of a line (4: name 1, begin in ps 2, length in ps 3), a line's begin in ns (3).
"""

import re
from collections.abc import Iterator

_WAITS = re.compile(r"^(?:MultiDevice)?Iterator\w*GetNext\w*Op::(?:DoCompute|ComputeAsync)|^Iterator(?:V2)?::GetNext$")
"""A step's own fetching of a batch; what the pipeline does meanwhile, ahead of it, has other names."""


def waited_s(trace: bytes) -> float:
    """Seconds in which a step fetched a batch; of several at once they count once. Raises ValueError when the bytes are
    no trace."""
    try:
        return _union_s(sorted(_waits(memoryview(trace))))
    except (IndexError, KeyError) as error:
        raise ValueError("these bytes are no XSpace") from error


def _waits(trace: memoryview) -> Iterator[tuple[float, float]]:
    """(begin, end) in seconds."""
    for field, _, plane in _fields(trace):
        if field != 1:
            continue
        names: set[int] = set()
        for number, _, entry in _fields(plane):
            if number == 4:
                values = {of: (value, data) for of, value, data in _fields(entry)}
                name = next((text for of, _, text in _fields(values[2][1]) if of == 2), memoryview(b""))
                if _WAITS.match(bytes(name).decode(errors="replace")):
                    names.add(values.get(1, (0, name))[0])
        for number, _, line in _fields(plane):
            if number == 3 and names:
                yield from _of_line(line, names)


def _of_line(line: memoryview, names: set[int]) -> Iterator[tuple[float, float]]:
    begin_s = sum(value for number, value, _ in _fields(line) if number == 3) / 1e9
    for number, _, data in _fields(line):
        if number == 4:
            event = {of: value for of, value, _ in _fields(data)}
            if event.get(1, 0) in names:
                start_s = begin_s + event.get(2, 0) / 1e12
                yield start_s, start_s + event.get(3, 0) / 1e12


def _union_s(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Of a protobuf message: number, and value or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value, data[:0]
        else:
            length, place = _varint(data, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
            if place + length > len(data):
                raise IndexError("cut off")
            yield key >> 3, 0, data[place : place + length]
            place += length


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
