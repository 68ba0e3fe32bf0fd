"""How long the steps of a TensorFlow job waited for input, by a trace of its profiler (`tensorflow_trace.pbtxt`).

The hook asks for the traces (`hook/stoker_hook/tensorflow_loop.py`). protobuf is that of the environment: from 3.19 on,
which TensorFlow 2.10 has."""

import functools
import re
from importlib import resources
from typing import Any

_INPUT_WAIT_OP = re.compile(rb"^(?:MultiDevice)?Iterator\w{0,60}GetNext\w{0,60}Op::(?:DoCompute|ComputeAsync)")
"""The fetch of a batch by a step of TensorFlow; prefetching by the input pipeline has other names."""


@functools.cache
def _trace_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format  # takes 0.1 s

    text = (resources.files("stoker_watch.watch") / "tensorflow_trace.pbtxt").read_text(encoding="utf-8")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    descriptor = pool.FindMessageTypeByName("stoker.ProfilerTrace")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    return message_factory.MessageFactory(pool).GetPrototype(descriptor)  # before protobuf 4.22


def input_wait_s(trace: bytes) -> float:
    """Seconds in which a step fetched a batch, by a trace of TensorFlow's profiler; overlapping ones count once. Raises
    ValueError if the bytes are not a trace."""
    from google.protobuf.message import DecodeError

    try:
        events = _trace_class().FromString(trace).trace_events
    except DecodeError as error:
        raise ValueError("these bytes are not a Trace") from error
    waits = (event for event in events if _INPUT_WAIT_OP.match(event.name))
    total_ps = end_ps = 0
    for start_ps, duration_ps in sorted((event.timestamp_ps, event.duration_ps) for event in waits):
        total_ps += max(0, start_ps + duration_ps - max(start_ps, end_ps))
        end_ps = max(end_ps, start_ps + duration_ps)
    return total_ps / 1e12
