"""The protobuf messages of `messages.pbtxt`, which need no compiler. Not here: what reads and writes them."""

import functools
from importlib import resources
from typing import Any


@functools.cache
def message_class(name: str) -> Any:
    """Returns the class of a message of `messages.pbtxt`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format  # takes 0.1 s

    text = (resources.files("stoker.data.formats") / "messages.pbtxt").read_text(encoding="utf-8")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"stoker.{name}"))
