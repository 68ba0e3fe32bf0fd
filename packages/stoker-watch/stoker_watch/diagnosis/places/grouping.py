"""Groups the samples of a thread by place: one algorithm for all programs.

Samples in the steps (forward, backward, optimizer) are those of the training itself; all others are divided by the
outermost line of the job's own code that calls nothing of a step. The place of a group is where most of it is: one
call, one line, a function, else what a line calls. What calls of libraries are is in `knowledge/frames.toml`.
"""

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from stoker_watch.diagnosis.places.sampled import PlaceTotal
from stoker_watch.diagnosis.places.totals import merge_places
from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import AFTER_STEP, LOOP_IN_STEP, WITHOUT_GRADIENTS
from stoker_watch.runs.totals import add_amounts

CALLS, FIXES, RECOMPILED_BY = (
    {name: re.compile(pattern) for name, pattern in read_toml("frames.toml")[table].items()}
    for table in ("place_calls", "place_fixes", "recompiled_by")
)
"""Patterns of calls of places, and of their innermost frames, by what they are, and by what can be done about them; and
of what frameworks say of repeated compilations."""
MIN_STEPS = 0.1
"""Samples in steps, over those outside of them, from which a line or a function is a part of the training loop."""
MOST, NEARLY_ALL = 0.5, 0.8
"""Fractions of a group from which a call, line or function in it is its place; and from which a line that calls it, or
a call with a cause of its own (a decoder, a checkpoint), stands for it."""
MIN_REST = 1.1
"""How many times a place's time the whole takes with the rest, from which that is told."""
MAX_STATEMENT_GAP = 5
"""Lines from one line outside of steps to the next up to which they are statements of one block."""
_IN_STEPS = frozenset({"comm", "compute", "sync", LOOP_IN_STEP})
_WITH_CAUSES = frozenset({"checkpoint", "compile", AFTER_STEP, WITHOUT_GRADIENTS})
"""Kinds of places that have causes of their own."""


class PlaceGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one place. whole: all of them; place: where most of them are; parts: the largest first."""

    whole: PlaceTotal
    place: PlaceTotal
    parts: tuple[PlaceTotal, ...]


def group_places(
    places: Iterable[PlaceTotal],
    step_lines: Mapping[str, int] | None = None,
    have_steps: Iterable[tuple[str, str]] = (),
) -> list[PlaceGroup]:
    """Groups places by the outermost line or function that calls nothing of a step. step_lines: lines that steps are in
    or are called by → samples of these; have_steps: functions with steps, as (file, function)."""
    step_lines, have_steps = step_lines or {}, set(have_steps)
    places = list(places)
    outside: collections.Counter[str] = collections.Counter()
    for place in places:
        outside.update(dict.fromkeys(lines_of(place), place.samples))
    groups: dict[_GroupKey, list[PlaceTotal]] = {}
    for place in places:
        lines = lines_of(place)[::-1]
        first = next((line for line in lines if step_lines.get(line, 0) < MIN_STEPS * outside[line]), "")
        key = _GroupKey(first) if first else _GroupKey(place.line, call=place.call)
        if place.function and place.file_and_function not in have_steps and first in ("", place.line):
            key = _GroupKey(*place.file_and_function)
        groups.setdefault(key, []).append(place)
    of_functions = {key: groups.pop(key) for key in [key for key in groups if key.function]}
    for key, group in of_functions.items():
        groups |= _split_function(key, group)
    return [_make_group(key, group) for key, group in _join_statements(groups, step_lines).items()]


class _GroupKey(NamedTuple):
    """What the places of a group have in common. where: a line, or some of a block; of a function, its file."""

    where: str
    function: str = ""
    call: str = ""


def _split_function(key: _GroupKey, group: list[PlaceTotal]) -> dict[_GroupKey, list[PlaceTotal]]:
    """The places of a function: those of a call that has NEARLY_ALL of it apart from its other statements."""
    calls: dict[str, list[PlaceTotal]] = {}
    for place in group:
        calls.setdefault(place.call, []).append(place)
    seconds = {call: sum(place.seconds for place in places) for call, places in calls.items() if call}
    most = max(seconds, key=lambda call: seconds[call], default="")
    if len(calls) < 2 or not most or seconds[most] < NEARLY_ALL * sum(place.seconds for place in group):
        return {key: group}
    return {key: [place for place in group if place.call != most], key._replace(call=most): calls[most]}


def _join_statements(
    groups: dict[_GroupKey, list[PlaceTotal]], step_lines: Mapping[str, int]
) -> dict[_GroupKey, list[PlaceTotal]]:
    """Lines of one block as one group: from one to the next there are at most MAX_STATEMENT_GAP lines, none of which is
    in a step."""
    steps = {position(line) for line, count in step_lines.items() if count}
    joined = {key: group for key, group in groups.items() if key.function}
    block: list[_GroupKey] = []

    def end_block() -> None:
        if block:
            file, first = position(block[0].where)
            last = position(block[-1].where)[1]
            lines = block[0].where if first == last else f"{file}:{first}-{last}"
            joined[_GroupKey(lines)] = [place for key in block for place in groups[key]]
            block.clear()

    for key in sorted((key for key in groups if not key.function), key=lambda key: position(key.where)):
        file, line = position(key.where)
        if block:
            of_file, last = position(block[-1].where)
            is_near = of_file == file and line - last <= MAX_STATEMENT_GAP
            if not is_near or any((file, at) in steps for at in range(last + (line > last), line + (line > last))):
                end_block()
        block.append(key)
    end_block()
    return joined


def _make_group(key: _GroupKey, group: list[PlaceTotal]) -> PlaceGroup:
    whole = merge_places(group)
    assert whole is not None
    parts = tuple(sorted(group, key=lambda place: -place.seconds))
    whole = msgspec.structs.replace(whole, kind=_main_kind(parts))
    if not key.function and "-" in key.where:  # statements of a block
        functions = {part.function for part in parts if position(part.line)[0] == position(key.where)[0]}
        function = functions.pop() if len(functions) == 1 else ""
        whole = msgspec.structs.replace(whole, line=key.where, function=function, call="")
    elif not key.function and len({(part.line, part.call) for part in parts}) > 1:
        line = _innermost_line(parts, whole.seconds) or key.where
        whole = msgspec.structs.replace(whole, line=line, function="", call="")
    return PlaceGroup(whole=whole, place=_find_place(parts, whole), parts=parts)


def _main_kind(parts: Sequence[PlaceTotal]) -> str:
    """The kind of NEARLY_ALL of some places, or the largest of kinds with causes of their own, if these are it; without
    one it is Python that calls things of several kinds."""
    seconds: dict[str, float] = {}
    for part in parts:
        add_amounts(seconds, {part.kind: part.seconds})
    kind, total_s = max(seconds, key=lambda name: seconds[name]), sum(seconds.values())
    known_s = sum(seconds.get(name, 0.0) for name in _WITH_CAUSES)
    return kind if max(seconds[kind], known_s * (kind in _WITH_CAUSES)) >= NEARLY_ALL * total_s else "python"


def _innermost_line(parts: Sequence[PlaceTotal], total_s: float) -> str:
    """The innermost line that has called NEARLY_ALL of some places; empty: none has."""
    callers: dict[str, list[PlaceTotal]] = {}
    for part in parts:
        for line in lines_of(part):
            callers.setdefault(line, []).append(part)
    most = [line for line, called in callers.items() if sum(part.seconds for part in called) >= NEARLY_ALL * total_s]
    depth = {line: sum(lines_of(part).index(line) for part in callers[line]) / len(callers[line]) for line in most}
    return min(most, key=lambda line: depth[line], default="")


def _find_place(parts: Sequence[PlaceTotal], whole: PlaceTotal) -> PlaceTotal:
    """Where MOST of some places is: of the calls, modules, lines and functions the most exact that has it; else all."""
    for name, key_of in _LEVELS:
        groups: dict[object, list[PlaceTotal]] = {}
        for part in parts:
            groups.setdefault(key_of(part), []).append(part)
        group = max(groups.values(), key=lambda group: sum(part.seconds for part in group))
        total = merge_places(group)
        if total is None or (name == "function" and "-" in whole.line):
            continue
        total = msgspec.structs.replace(total, kind=_main_kind(group))
        is_known = total.kind in _WITH_CAUSES or is_decoder(total)
        if total.seconds >= (NEARLY_ALL if is_known else MOST) * whole.seconds:
            call = total.call if name == "call" else module_of(total.call) if name == "module" else ""
            if name != "module" or "." in call:
                return msgspec.structs.replace(total, call=call)
    return whole


def module_of(call: str) -> str:
    """`sklearn.metrics` of `sklearn.metrics.f1_score`; all of a name without a dot."""
    return call.rpartition(".")[0] or call


_LEVELS: tuple[tuple[str, Callable[[PlaceTotal], object]], ...] = (
    ("call", lambda part: (part.file_and_function, part.call)),
    ("module", lambda part: (part.file_and_function, module_of(part.call))),
    ("line", lambda part: part.line),
    ("function", lambda part: part.file_and_function),
)


def lines_of(place: PlaceTotal) -> list[str]:
    """The lines of a place and of its callers, the innermost first."""
    return list(dict.fromkeys([place.line, *filter(None, place.callers.split(" < "))]))


def position(line: str) -> tuple[str, int]:
    """File and line; 0 in broken records."""
    file, _, number = line.rpartition(":")
    return file, int(number) if number.isdecimal() and len(number) < 10 else 0


def functions_with_steps(places: Iterable[PlaceTotal]) -> set[tuple[str, str]]:
    """(file, function) of those that call a backward pass or an optimizer's step, or spend at least MIN_STEPS in the
    training step: one that ends with `torch.from_numpy(…)` is none. Where all of that is a Python loop, MOST of the
    function has to be: a loop over pixels with some operations on tensors in it is none either."""
    in_steps: collections.Counter[tuple[str, str]] = collections.Counter()
    totals: collections.Counter[tuple[str, str]] = collections.Counter()
    loops: collections.Counter[tuple[str, str]] = collections.Counter()
    updates: set[tuple[str, str]] = set()
    for total in places:
        key = total.file_and_function
        totals[key] += total.samples
        if total.kind in _IN_STEPS or any(map(CALLS["runs_step"].search, total.leaves)):
            in_steps[key] += total.samples
            loops[key] += total.samples * (total.kind == LOOP_IN_STEP)
            if CALLS["updates"].search(total.call):
                updates.add(key)
    return updates | {
        key for key, count in in_steps.items()
        if count >= MIN_STEPS * totals[key] and (count > loops[key] or count >= MOST * totals[key])
    }  # fmt: skip


def what_it_does(place: PlaceTotal) -> str:
    """What a place is of the loading of data: it waits for bytes, decodes or transforms by a library, or works."""
    waits = place.kind == "idle" and place.call != "time.sleep"
    reads = sum(count for leaf, count in place.leaves.items() if CALLS["reads"].search(leaf))
    if waits or CALLS["reads"].search(place.call) or 2 * reads > place.samples:
        return "read"
    return "decode" if place.kind == "decode" else "work"


def is_decoder(place: PlaceTotal) -> bool:
    """Whether a call and its frames decode or transform images as a whole, not pixel by pixel."""
    text = " ".join((place.call, *place.leaves))
    return place.kind == "decode" and CALLS["decodes"].search(text) is not None and not CALLS["per_pixel"].search(text)
