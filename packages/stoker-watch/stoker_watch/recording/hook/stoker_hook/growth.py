"""Which lists, dictionaries, sets and deques of the job's own code grow while its memory does.

The clock calls `GrowthFinder.check` after a step, in the training thread. Every CHECK_S it reads the memory of the
process; only if that has grown in most of the last windows, by a line and not at once, it looks at the globals of the
job's own modules, the locals of the functions that run, attributes of objects there, and values of these dictionaries.
A look stops after MAX_LOOK_S of CPU time, and the time between looks doubles up to MAX_GAP_S. Lengths are compared with
those of the look before. No code of the job is called, no reference is kept, and no failure reaches the job.
"""

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from time import thread_time
from typing import Any

CHECK_S, MAX_CHECK_S, WINDOWS = 5.0, 600.0, 4
"""Time between reads of the memory, a twentieth of that since the first one in these bounds; how many make a trend."""
MIN_GROWTH_BYTES = 16 << 20
"""Growth of the memory over the windows; less is not looked for."""
FIRST_GAP_S, MAX_GAP_S = 10.0, 300.0
MAX_LOOK_S, MAX_CONTAINERS, MAX_FRAMES, MAX_VALUES, MAX_HOLDERS = 0.005, 4000, 40, 64, 3
"""Bounds of a look: CPU-seconds, containers, frames, values of a dictionary or attributes; then what is reported."""
MIN_SHARE = 0.1
"""Fraction of the growth of the process from which a container is reported; one that keeps graphs always is."""
SAMPLED_ITEMS = 4

NOT_OWN = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<|torchinductor_|[/\\]stoker_watch[/\\]recording"
)
FRAME_REFERENCES = 3
"""To the copy of a frame's locals, of this module: the frame, a variable, an argument."""
_OPTIMIZED = 0x1
"""CO_OPTIMIZED: the frame of a function, whose `f_locals` is a copy."""
_SKIPPED_TYPES = (type, type(sys), type(NOT_OWN.search), type(len), type(lambda: 0), str, bytes, int, float)


class GrowthFinder:
    """report: called with a list of holders (`_describe`), the largest first. memory_bytes: a function, for tests."""

    def __init__(self, report: "Callable[[list[dict[str, Any]]], None]", memory_bytes: "Any" = None) -> None:
        self._start_s = self.next_s = 0.0
        """Monotonic time of the next read of the memory."""
        self._report = report
        self._memory_bytes = memory_bytes or read_memory_bytes
        self._memory: deque[tuple[float, int]] = deque(maxlen=WINDOWS + 1)
        self._lengths: dict[str, int] = {}
        self._look_s, self._look_bytes, self._gap_s = 0.0, 0, FIRST_GAP_S
        self._own_modules: dict[str, str] = {}
        """Name of a module that was seen → its file; empty: not the job's own."""

    def check(self, now_s: float) -> None:
        """Never raises. Called in the training thread, by its own code or by a library that this calls."""
        self._start_s = self._start_s or now_s
        self.next_s = now_s + min(MAX_CHECK_S, max(CHECK_S, (now_s - self._start_s) / 20))
        try:
            used = self._memory_bytes()
            self._memory.append((now_s, used))
            if not self._is_growing() or now_s - self._look_s < self._gap_s or sys.gettrace() is not None:
                return
            lengths, grown = self._look()
            before = self._lengths
            growth, self._look_bytes = used - self._look_bytes, used
            if before and growth > 0:
                self._gap_s = min(MAX_GAP_S, 2 * self._gap_s)
                holders = [dict(holder, seconds=now_s - self._look_s, grown=growth) for holder in grown
                           if holder["graph"] or holder["bytes"] >= MIN_SHARE * growth]  # fmt: skip
                holders.sort(key=lambda holder: (holder["graph"], holder["bytes"]), reverse=True)
                if holders:
                    self._report(holders[:MAX_HOLDERS])
            self._lengths, self._look_s = lengths, now_s
        except Exception:  # noqa: BLE001 (an object of the job of which nothing is known: this look fails)
            self._gap_s = MAX_GAP_S
            self._look_s = now_s

    def _is_growing(self) -> bool:
        """More in nearly each of the last windows, and not most of it in one of them."""
        if len(self._memory) <= WINDOWS:
            return False
        used = [value for _, value in self._memory]
        rises = [after - before for before, after in zip(used, used[1:])]  # noqa: B905, RUF007 (Python 3.8)
        growth, num_rises = used[-1] - used[0], sum(rise > 0 for rise in rises)
        return growth >= MIN_GROWTH_BYTES and num_rises >= WINDOWS - 1 and max(rises) < 0.8 * growth

    def _look(self) -> "tuple[dict[str, int], list[dict[str, Any]]]":
        """(key of a container → its length, those that grew since the last look)."""
        lengths: dict[str, int] = {}
        grown: list[dict[str, Any]] = []
        seen: set[int] = set()
        end_s = thread_time() + MAX_LOOK_S
        for where, namespace in self._namespaces():
            for name, container in _containers(namespace):
                if id(container) in seen:  # by another name
                    continue
                seen.add(id(container))
                key = "%s %s" % (where, name)  # noqa: UP031 (as the rest of the hook)
                lengths[key] = length = _length(container)
                before = self._lengths.get(key)
                if before is not None and length > before:
                    grown.append(_describe(where, name, container, before, length))
                if len(lengths) >= MAX_CONTAINERS or (len(lengths) % 32 == 0 and thread_time() > end_s):
                    return lengths, grown
        return lengths, grown

    def _namespaces(self) -> "Iterator[tuple[str, dict[str, Any]]]":
        """(file and function, names) of the frames of own code, then (file, globals) of own modules."""
        frame: Any = sys._getframe()
        for _ in range(MAX_FRAMES):
            frame = frame.f_back
            if frame is None:
                break
            code = frame.f_code
            if code.co_flags & _OPTIMIZED and not NOT_OWN.search(code.co_filename):
                names = frame.f_locals
                try:
                    yield "%s:%s" % (code.co_filename, code.co_name), dict(names)  # noqa: UP031
                finally:
                    # before Python 3.13 the frame keeps this copy; not to be emptied if the job has asked for it, too
                    if isinstance(names, dict) and sys.getrefcount(names) <= FRAME_REFERENCES:
                        names.clear()
        del frame
        for name, module in list(sys.modules.items()):
            if name not in self._own_modules:
                self._own_modules[name] = _own_file(name, module)
            if self._own_modules[name]:
                yield self._own_modules[name] + ":", module.__dict__


def _own_file(name: str, module: "Any") -> str:
    file = getattr(module, "__file__", None) if type(module) is type(sys) else None
    path = os.path.abspath(file) if isinstance(file, str) else "<stdin>" if name == "__main__" else ""
    is_own = name.partition(".")[0] not in ("stoker", "stoker_watch") and (
        name == "__main__" or not NOT_OWN.search(path)
    )
    return path if is_own and not re.search(r"[/\\](site|dist)-packages[/\\]", path) else ""


def _containers(namespace: "dict[str, Any]") -> "Iterator[tuple[str, Any]]":
    """(name as the source has it, container)."""
    for name, value in list(namespace.items()):
        kind = type(value)
        if name.startswith("__") or kind in _SKIPPED_TYPES:
            continue
        if _is_container(kind):
            yield from _with_values(name, value)
            continue
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            continue
        if type(attributes) is dict:
            for attribute, item in list(attributes.items())[:MAX_VALUES]:
                if _is_container(type(item)):
                    yield from _with_values("%s.%s" % (name, attribute), item)  # noqa: UP031


def _with_values(name: str, container: "Any") -> "Iterator[tuple[str, Any]]":
    """A container and, of a dictionary, the containers that are its values."""
    yield name, container
    if issubclass(type(container), dict) and dict.__len__(container) <= MAX_VALUES:
        for key, item in list(dict.items(container)):
            if _is_container(type(item)) and type(key) in (str, int):
                yield "%s[%r]" % (name, key), item  # noqa: UP031


def _is_container(kind: type) -> bool:
    return issubclass(kind, (list, dict, set, deque))


def _length(container: "Any") -> int:
    """By the built-in type: a class of the job may have a `__len__` of its own."""
    base: Any = next(base for base in (list, dict, set, deque) if issubclass(type(container), base))
    return int(base.__len__(container))


def _describe(where: str, name: str, container: "Any", before: int, after: int) -> "dict[str, Any]":
    """file, function (empty: a global), name, type; length before and after; bytes: estimate of what was added, by the
    newest items; items: what they are; graph: they are tensors that keep the graph of their step."""
    file, _, function = where.rpartition(":")
    items = _newest(container)
    sizes = [_size(item, 2) for item in items]
    parts = (part for item in items for part in (item if type(item) in (tuple, list) else (item,)))
    return {
        "file": file, "function": function, "name": name, "type": type(container).__name__, "before": before,
        "after": after, "bytes": int(sum(sizes) / max(1, len(sizes)) * (after - before)),
        "items": type(items[-1]).__name__ if items else "",
        "graph": any(_is_tensor(part) and part.grad_fn is not None for part in parts),
    }  # fmt: skip


def _newest(container: "Any") -> "list[Any]":
    kind = type(container)
    if issubclass(kind, list):
        return list(list.__getitem__(container, slice(-SAMPLED_ITEMS, None)))
    if issubclass(kind, deque):
        return [deque.__getitem__(container, -1 - n) for n in range(min(SAMPLED_ITEMS, _length(container)))]
    if issubclass(kind, dict):
        return [dict.__getitem__(container, key) for key in islice(dict.__reversed__(container), SAMPLED_ITEMS)]
    return list(islice(set.__iter__(container), SAMPLED_ITEMS))


def _is_tensor(item: "Any") -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(item), torch.Tensor)


def _size(item: "Any", depth: int) -> float:
    """Bytes, of tensors and arrays without what their graph keeps."""
    kind = type(item)
    if _is_tensor(item):
        return float(item.element_size() * item.nelement())
    if kind.__module__ == "numpy" and hasattr(kind, "nbytes"):
        return float(item.nbytes)
    if kind in (list, tuple, dict) and depth and item:
        some = list(islice(item.values() if kind is dict else item, SAMPLED_ITEMS))
        own, each = (64, 100) if kind is dict else (56, 8)
        return own + len(item) * (each + sum(_size(one, depth - 1) for one in some) / len(some))
    return float(sys.getsizeof(item)) if kind in (str, bytes, bytearray, int, float, list, tuple, dict) else 64.0


def read_memory_bytes() -> int:
    """Resident memory without files and shared memory, and what torch has allocated on a device."""
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    used = (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return used + (int(cuda.memory_allocated()) if cuda is not None and cuda.is_initialized() else 0)
