"""How long the steps of a TensorFlow job waited for their input, out of a trace of TensorFlow's profiler.

What a session of it returns is a Trace (tsl/profiler/protobuf/trace_events.proto), of which only the events (4) are
read here: their name (3), begin (9) and length (10) in picoseconds.
"""

import re
from collections.abc import Iterator

_WAITS = re.compile(rb"^(?:MultiDevice)?Iterator\w*GetNext\w*Op::(?:DoCompute|ComputeAsync)")
"""A step's own fetching of a batch; what the pipeline does meanwhile, ahead of it, has other names."""


def waited_s(trace: bytes) -> float:
    """Seconds in which a step fetched a batch; of several at once they count once. Raises ValueError when the bytes are
    no trace."""
    try:
        return _union_s(sorted(_waits(memoryview(trace))))
    except (IndexError, KeyError) as error:
        raise ValueError("these bytes are no Trace") from error


def _waits(trace: memoryview) -> Iterator[tuple[float, float]]:
    """(begin, end) in seconds."""
    for field, _, data in _fields(trace):
        if field == 4:
            event = {number: (value, text) for number, value, text in _fields(data)}
            if 3 in event and _WAITS.match(event[3][1]):
                begin_s, took_s = (event[number][0] / 1e12 if number in event else 0.0 for number in (9, 10))
                yield begin_s, begin_s + took_s


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
