"""The time that steps of a TensorFlow job waited for their input, from a trace of TensorFlow's profiler.

The bytes of a profiler session are a Trace (tsl/profiler/protobuf/trace_events.proto). Only its events (4) are read:
their name (3), start (9) and duration (10) in picoseconds.
"""

import re
from collections.abc import Iterator

_INPUT_WAIT_OP = re.compile(rb"^(?:MultiDevice)?Iterator\w{0,60}GetNext\w{0,60}Op::(?:DoCompute|ComputeAsync)")
"""The fetch of a batch by a step; prefetching by the input pipeline has other names."""


def input_wait_s(trace: bytes) -> float:
    """Seconds in which a step fetched a batch; overlapping ones count once. Raises ValueError if the bytes are not a
    trace."""
    try:
        return _union_s(sorted(_iter_waits(memoryview(trace))))
    except (IndexError, KeyError) as error:
        raise ValueError("these bytes are not a Trace") from error


def _iter_waits(trace: memoryview) -> Iterator[tuple[float, float]]:
    """(start, end) in seconds."""
    for field, _, data in _iter_fields(trace):
        if field == 4:
            event = {number: (value, text) for number, value, text in _iter_fields(data)}
            if 3 in event and _INPUT_WAIT_OP.match(event[3][1]):
                start_s, duration_s = (event[number][0] / 1e12 if number in event else 0.0 for number in (9, 10))
                yield start_s, start_s + duration_s


def _union_s(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _iter_fields(data: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Fields of a protobuf message: number, varint value, bytes."""
    offset = 0
    while offset < len(data):
        key, offset = _read_varint(data, offset)
        wire_type = key & 7
        if wire_type == 0:
            value, offset = _read_varint(data, offset)
            yield key >> 3, value, data[:0]
        else:
            length, offset = _read_varint(data, offset) if wire_type == 2 else ({1: 8, 5: 4}[wire_type], offset)
            if offset + length > len(data):
                raise IndexError("cut off")
            yield key >> 3, 0, data[offset : offset + length]
            offset += length


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, offset
