"""Adds up the places of stack samples (`schemas.Place`) over a run: lines of the job's own code, and what they called.

`profiling/stacks.py` records them, `RunRecords.places` has the sums, rules look them up by `find_places`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

import msgspec

from stoker.diagnosis.run_data import PlaceTotal, RunRecords
from stoker.runs.schemas import LOOP_IN_STEP, Place, StackWindow

__all__ = ["PlaceCounter", "PlaceTotal", "find_places"]  # the rest is for the rules and `why`

MAX_PLACES = 2000
"""Places of a process that are counted; a job has some hundred."""

MAX_TREES, MAX_NODES, MIN_SHARE = 8, 12, 0.005
"""Trees of a run, nodes below a node, and the fraction of the samples of a tree below which a node is left out."""
TRAINING_STEP = "training step"
"""Row of frames.toml."""

_Z = 1.96
"""Standard errors of a 95 % interval."""


class _Group(NamedTuple):
    """What the samples of a place are a fraction of."""

    role: str
    rank: int
    is_startup: bool


class _Key(NamedTuple):
    group: _Group
    kind: str
    line: str
    function: str
    call: str
    part: str


@dataclasses.dataclass
class _Count:
    samples: int = 0
    seconds: float = 0.0
    windows: int = 0
    bursts: int = 0
    leaves: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    callers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: "_Count") -> None:
        for name in ("samples", "seconds", "windows", "bursts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.leaves.update(other.leaves)
        self.callers.update(other.callers)


@dataclasses.dataclass
class _Process:
    kinds: set[str] = dataclasses.field(default_factory=set)
    groups: dict[_Group, _Count] = dataclasses.field(default_factory=dict)
    places: dict[_Key, _Count] = dataclasses.field(default_factory=dict)
    newest: dict[str, set[_Key]] = dataclasses.field(default_factory=dict)
    """Role → places of its newest line."""


class PlaceCounter:
    """Counts the places of all processes."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, int], _Process] = {}

    def add(self, rank: int, window: StackWindow, *, is_startup: bool) -> None:
        if not window.places or not window.samples:
            return
        process = self._processes.setdefault((window.attempt, window.pid), _Process())
        if window.role != "thread":
            process.kinds.update(window.main_thread if window.role == "training" else [window.role])
        group = _Group(window.role, rank, is_startup)
        process.groups.setdefault(group, _Count()).add(_Count(window.samples, window.wall_s, 1))
        seen: set[_Key] = set()
        for place in window.places:
            # copy.deepcopy of a model ends in torch's frames, so its samples are recorded as compute.
            kind = (
                "python" if place.kind in ("compute", LOOP_IN_STEP) and _NEVER_A_STEP.match(place.call) else place.kind
            )
            key = _Key(group, kind, place.line, place.function, place.call, place.part)
            if key not in process.places and len(process.places) >= MAX_PLACES:
                continue
            is_new = key not in seen
            count = _Count(
                samples=place.samples,
                seconds=window.wall_s * place.samples / window.samples,
                windows=int(is_new),
                bursts=int(is_new and key not in process.newest.get(window.role, ())),
                leaves=collections.Counter({place.leaf: place.samples}),
                callers=collections.Counter({place.callers: place.samples}),
            )
            process.places.setdefault(key, _Count()).add(count)
            seen.add(key)
        process.newest[window.role] = seen

    def totals(self, launcher_kinds: Set[str]) -> tuple[list[PlaceTotal], dict[tuple[str, int], float]]:
        """(the places, the largest first; (role, rank) → seconds after the start that the samples cover), without
        processes that were seen in `launcher_kinds` only, unless all were."""
        known = [process for process in self._processes.values() if process.kinds - launcher_kinds]
        groups: dict[_Group, _Count] = {}
        places: dict[_Key, _Count] = {}
        for process in known or self._processes.values():
            for group, count in process.groups.items():
                groups.setdefault(group, _Count()).add(count)
            for key, count in process.places.items():
                places.setdefault(key, _Count()).add(count)
        totals = [_make_total(key, count, groups[key.group]) for key, count in places.items()]
        seconds: dict[tuple[str, int], float] = {}
        for group, count in groups.items():
            if group.is_startup:
                continue
            seconds[group.role, group.rank] = seconds.get((group.role, group.rank), 0.0) + count.seconds
        for role, rank in seconds:
            if role == "thread":  # its windows are only those in which it worked
                seconds[role, rank] = max(seconds[role, rank], seconds.get(("training", rank), 0.0))
        return sorted(totals, key=lambda total: -total.seconds), seconds


def find_places(
    run: RunRecords,
    role: str = "training",
    *,
    rank: int | None = None,
    kind: str = "",
    line: str = "",
    call: str = "",
    leaf: str = "",
    include_startup: bool = False,
) -> PlaceTotal | None:
    """The sum of all places of a role that match; None without any. Its texts are those of the largest of them.

    rank: None means all; kind, line, call, leaf: patterns that match anywhere in the text.
    """
    found: list[PlaceTotal] = []
    for total in run.places:
        if (
            total.role != role
            or (total.part and not total.line)
            or (rank is not None and total.rank != rank)
            or (total.is_startup and not include_startup)
        ):
            continue
        if not all(re.search(*pair) for pair in ((kind, total.kind), (line, total.line), (call, total.call))):
            continue
        leaves = {name: count for name, count in total.leaves.items() if re.search(leaf, name)}
        if leaves:
            found.append(_scale(total, leaves))
    return merge_places(found)


def merge_places(found: Iterable[PlaceTotal]) -> PlaceTotal | None:
    """Their sum, with the texts of the largest; None without any."""
    ordered = sorted(found, key=lambda total: -total.seconds)
    if not ordered:
        return None
    leaves: collections.Counter[str] = collections.Counter()
    for total in ordered:
        leaves.update(total.leaves)
    error_s = math.hypot(*(total.high_s - total.low_s for total in ordered)) / 2
    seconds = sum(total.seconds for total in ordered)
    return dataclasses.replace(
        ordered[0],
        leaves=dict(leaves),
        samples=sum(total.samples for total in ordered),
        seconds=seconds,
        low_s=max(0.0, seconds - error_s),
        high_s=seconds + error_s,
        windows=max(total.windows for total in ordered),
        window_fraction=max(total.window_fraction for total in ordered),
        bursts=max(total.bursts for total in ordered),
    )


def _make_total(key: _Key, count: _Count, group: _Count) -> PlaceTotal:
    low, high = _wilson(count.seconds / group.seconds if group.seconds > 0 else 0.0, group.samples)
    return PlaceTotal(
        **key.group._asdict(),
        kind=key.kind,
        line=key.line,
        function=key.function,
        call=key.call,
        part=key.part,
        leaves=dict(count.leaves),
        callers=count.callers.most_common(1)[0][0],
        samples=count.samples,
        seconds=count.seconds,
        low_s=low * group.seconds,
        high_s=high * group.seconds,
        windows=count.windows,
        window_fraction=count.windows / group.windows,
        bursts=count.bursts,
    )


def _scale(total: PlaceTotal, leaves: dict[str, int]) -> PlaceTotal:
    """The part of a place that is in these innermost frames."""
    samples = sum(leaves.values())
    ratio = samples / total.samples if total.samples else 0.0
    if ratio == 1:
        return total
    scaled = {name: getattr(total, name) * ratio for name in ("seconds", "low_s", "high_s")}
    return dataclasses.replace(total, leaves=leaves, samples=samples, **scaled)


def _wilson(fraction: float, count: int) -> tuple[float, float]:
    """95 % interval of a fraction of `count` samples; more than all, which only broken records say, is all."""
    fraction = min(1.0, fraction)
    center = fraction + _Z**2 / (2 * count)
    error = _Z * math.sqrt(fraction * (1 - fraction) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (center - error) / scale), min(1.0, (center + error) / scale)


_NEVER_A_STEP = re.compile(
    r"(<class ')?(copy|pickle|json|shutil|hashlib|subprocess|zipfile|tarfile|csv|urllib|requests|yaml|xml|sqlite3"
    r"|numpy|scipy|sklearn|skimage|pandas|cv2|PIL|matplotlib|networkx|nltk|librosa|shapely|h5py)\."
)
"""Calls that no forward pass, backward pass or optimizer step needs: of the standard library, and of packages that
compute on the host alone."""
_STEP_KINDS = frozenset({"compute", "sync", "idle", "comm", LOOP_IN_STEP})
_LOADER_CALL = re.compile(
    r"^(torch\.utils\.data|multiprocessing|threading|queue|concurrent\.futures|accelerate\.data_loader"
    r"|tensorflow\.python\.(data|distribute\.input_lib)|(tf_)?keras\.(src\.)?(trainers|engine\.data_adapter|utils\.data_utils)"
    r"|(pytorch_lightning|lightning)\.\w+\.(loops|utilities))\."
)
"""Calls in which a thread waits for what a loader prepares elsewhere: the place is there."""
_ITERATES = re.compile(r"^(enumerate|iter|next|zip)$")
"""Calls in which a thread that does nothing waits for an iterator without Python frames, as a framework's."""
_LOOP_CALL = re.compile(r"^(?!subprocess\.|asyncio\.)(.*\.)?(fit|fit_generator|train|learn|main|run|launch)$")
"""Calls of a training loop as a whole: what takes the time is inside of it."""
READS = re.compile(
    r"(^|[._])(read|readinto|readlines?|read_bytes|read_text|fromfile|open|recv\w*|urlopen|request|get|stat|scandir"
    r"|listdir|download\w*|imread\w*|(read|load)_(image|img)\w*)( \(|$)|^load \(PIL/"
)
"""Calls and frames that read, some of which decode as well."""
_DECODES = re.compile(r"(?i)cv2|PIL|Image|decode|read|jpe?g|png|torchvision|albumentations|skimage|transforms")
"""Calls and frames of libraries that decode or transform images."""
_PER_PIXEL = re.compile(r"\b(put|get)(pixel|data)\b")
_UPDATES = re.compile(r"(^|[._])(backward|\w*step|apply_gradients|apply_updates|minimize)$")
"""Calls that are in a training loop: a backward pass, an update of the weights. `profiling/calls.py` finds these in
source code, which records do not have."""
_RUNS_STEP = re.compile(r"^(quick_execute|call_function|execute) \((eager/)?(execute|context)\.py\)")
"""Frames in which TensorFlow runs a step as a whole."""
IMPORT = r"^import |^importlib\."
"""Calls that import a module."""
STARTS = rf"{IMPORT}|^multiprocessing\.(spawn|forkserver)|^runpy\."
"""Calls of a process that spawn or forkserver has started: it runs the job's file and its imports again."""
MAIN_FRACTION = 0.8
"""Of a function's time, in one line and call, from which that is the place."""
_KINDS_WITH_CAUSES = frozenset({"input_wait", "checkpoint", "compile"})
"""Kinds of places that have causes of their own, and are in no sum of what a line calls."""
MOST = 0.5
"""Of the time of what a line calls, in one function, from which that is the place: what else it calls costs less."""
COMMON_FRACTION = 0.98
"""Of the samples of a process that is stuck, in what a line calls, from which it is stuck there."""
MAX_LINE_GAP = 10
"""Lines from one call to the next of the same module, up to which they are one place of a training loop."""
MAX_ONCE_S = 15.0
"""Time of a window up to which what was seen in one only was done once."""
STARTS_WORKERS = r"data\.dataloader\.__iter__$|data_loader\.__iter__$|^DataLoader$|^iter$"
"""Calls in which a training thread starts loader workers."""
MIN_STEPS = 0.1
"""Fraction of the samples of a function in the training step from which it is one with steps in it."""
MIN_LOOP = 0.1
"""Fraction of the time of a training thread from which a Python loop inside of its steps is a place."""
MIN_LOADER_SAMPLES = 10
"""Samples of who loads the data from which their fractions are used; fewer, if the interval is clear."""


def list_places(run: RunRecords) -> list[PlaceTotal]:
    """Places after the start outside of forward, backward and optimizer step, the most costly first; kinds of a line
    and call are one. A training thread that waits in a call of its own code is there; of a worker, which may wait for
    its next batch, only one that sleeps or reads. A line with more samples in the steps than outside of them is that of
    the loop (`model.fit`), and no place."""
    # torch computes in the step itself on a CPU: nothing is waited for where a tensor is printed or made a list
    formats_tensors = run.on_cpu and run.computes_with_torch and "jax" not in run.frameworks
    groups: dict[tuple[str, int, str, str], list[PlaceTotal]] = {}
    in_steps: collections.Counter[tuple[str, int, str, str]] = collections.Counter()
    for total in run.places:
        if total.is_startup or not total.line:
            continue
        key = (total.role, total.rank if total.role == "training" else 0, total.line, total.call)
        waits = total.kind == "idle" and (
            (
                total.role == "training"
                and total.call
                and not _LOADER_CALL.search(total.call)
                and not _ITERATES.search(total.call)
            )
            or (total.role == "worker" and (total.call == "time.sleep" or READS.search(total.call)))
        )
        formats = total.kind == "sync" and formats_tensors
        if total.kind in _STEP_KINDS and total.role != "thread" and not waits and not formats:
            in_steps[key] += total.samples * (total.kind != "idle")
            continue
        outside = _without_graph_steps(total)
        in_steps[key] += total.samples - outside.samples
        if outside.samples:
            groups.setdefault(key, []).append(outside)
    merged = [
        place for key, group in groups.items()
        if (place := merge_places(group)) is not None and (key[0] != "training" or in_steps[key] <= place.samples)
    ]  # fmt: skip
    return _sort_by_cost(run, merged)


def _sort_by_cost(run: RunRecords, places: list[PlaceTotal]) -> list[PlaceTotal]:
    """The most costly first: what workers do costs only the time in which the training waits."""
    phases = run.steady.phases
    waited = phases.get("input_wait", 0.0) / sum(phases.values()) if any(phases.values()) else 1.0
    costs = {"worker": waited, "thread": waited}
    return sorted(places, key=lambda place: -place.seconds * costs.get(place.role, 1.0))


def _without_graph_steps(total: PlaceTotal) -> PlaceTotal:
    """Without the samples in which TensorFlow ran a step as a whole, of the training thread."""
    if total.role != "training":
        return total
    return _scale(total, {leaf: count for leaf, count in total.leaves.items() if not _RUNS_STEP.search(leaf)})


def list_parts(run: RunRecords) -> list[PlaceTotal]:
    """Of a training of stoker's own, after the start: the parts of stoker that the training thread was in, but for the
    training step, and the functions of the threads that load, the largest first."""
    groups: dict[tuple[str, int, str, str], list[PlaceTotal]] = {}
    for total in run.places:
        works = total.part != TRAINING_STEP if total.role == "training" else total.kind != "idle"
        if total.part and not total.line and not total.is_startup and works:
            rank, function = (total.rank, "") if total.role == "training" else (0, total.function.partition(" ")[0])
            groups.setdefault((total.role, rank, total.part, function), []).append(total)
    merged = [place for group in groups.values() if (place := merge_places(group)) is not None]
    return sorted(merged, key=lambda place: -place.seconds)


def list_loops(run: RunRecords) -> list[PlaceTotal]:
    """Functions with a Python loop inside of the training step, of at least MIN_LOOP of the time at the low end of
    their interval, the largest first, with their most costly line."""
    groups: dict[tuple[int, str, str], list[PlaceTotal]] = {}
    for total in run.places:
        if total.kind == LOOP_IN_STEP and not total.is_startup:
            groups.setdefault((total.rank, total.line.rpartition(":")[0], total.function), []).append(total)
    loops: list[PlaceTotal] = []
    for group in groups.values():
        lines: dict[str, list[PlaceTotal]] = {}
        for total in group:
            lines.setdefault(total.line, []).append(total)
        ordered = sorted(lines.values(), key=lambda line: -sum(total.seconds for total in line))
        loop, first = merge_places(group), merge_places(ordered[0])
        assert loop is not None
        assert first is not None
        if loop.low_s >= MIN_LOOP * run.place_totals["training", loop.rank]:
            loops.append(dataclasses.replace(loop, line=first.line, call=first.call))
    return sorted(loops, key=lambda loop: -loop.seconds)


class PlaceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the tree of places: all samples of a role, or those of them with the same first names."""

    name: str
    """A line with its function, a call, an innermost frame; in a training of stoker's own first a part of stoker. Of
    the root: whose samples they are."""
    kind: str
    """Of most of its samples."""
    samples: int
    seconds: float
    low_s: float
    """95 % interval, of the fraction of the samples below the root."""
    high_s: float
    nodes: list["PlaceNode"] = []
    """The largest first; the time of the node that is in none of them is its own."""


def place_trees(run: RunRecords) -> list[PlaceNode]:
    """A tree for each role and rank, before and after the first steps, of the MAX_TREES that were sampled most."""
    groups: dict[tuple[str, int, bool], list[PlaceTotal]] = {}
    for total in run.places:
        groups.setdefault((total.role, total.rank, total.is_startup), []).append(total)
    largest = sorted(groups, key=lambda key: -sum(total.samples for total in groups[key]))[:MAX_TREES]
    trees: list[PlaceNode] = []
    names = {"training": "training thread", "thread": "other threads", "worker": "each loader worker"}
    for role, rank, is_startup in sorted(largest, key=lambda key: (key[0] != "training", key[1], key[2])):
        name = names[role]
        name += f" of rank {rank}" if run.num_ranks > 1 else ""
        sampled = [
            _Sampled((*_path(total), *filter(None, [leaf])), total.kind, _scale(total, {leaf: count}).seconds, count)
            for total in groups[role, rank, is_startup]
            for leaf, count in total.leaves.items()
        ]
        trees.append(_make_node(f"{name}{', start' * is_startup}", sampled, 0, sampled))
    return trees


class _Sampled(NamedTuple):
    path: tuple[str, ...]
    kind: str
    seconds: float
    samples: int


def _path(total: PlaceTotal) -> tuple[str, ...]:
    if total.kind == "idle" and total.role == "worker" and not total.line:
        return ("waits for work",)
    where = f"{total.function} ({total.line})" if total.line else total.function or total.kind
    return tuple(filter(None, (total.part, where, total.call)))


def _make_node(name: str, sampled: list[_Sampled], depth: int, root: list[_Sampled]) -> PlaceNode:
    """depth: of the node, 0 for the root; root: all of the tree."""
    kinds: dict[str, float] = {}
    below: dict[str, list[_Sampled]] = {}
    for item in sampled:
        kinds[item.kind] = kinds.get(item.kind, 0.0) + item.seconds
        if len(item.path) > depth:
            below.setdefault(item.path[depth], []).append(item)
    seconds, root_s = sum(kinds.values()), sum(item.seconds for item in root)
    low, high = _wilson(seconds / root_s if root_s > 0 else 0.0, sum(item.samples for item in root))
    nodes = [_make_node(child, items, depth + 1, root) for child, items in below.items()]
    return PlaceNode(
        name=name,
        kind=max(kinds, key=kinds.__getitem__),
        samples=sum(item.samples for item in sampled),
        seconds=seconds,
        low_s=low * root_s,
        high_s=high * root_s,
        nodes=sorted((n for n in nodes if n.seconds >= MIN_SHARE * root_s), key=lambda n: -n.seconds)[:MAX_NODES],
    )


def heavy_places(run: RunRecords, min_fraction: float) -> list[PlaceTotal]:
    """Functions of the job that took at least this fraction of the time, at the low end of their interval, outside of
    steps; of functions with steps in them, their lines with a call, neighbors with calls of the same module as one.
    Without waits for a loader, imports, and what other causes explain: compiling, checkpoints, decoders. A function of
    which one line is most of it is that line, else the place has no call."""
    have_steps = functions_with_steps(run)
    functions: dict[tuple[str, int, str, str], list[PlaceTotal]] = {}
    lines: dict[tuple[str, int, str], list[PlaceTotal]] = {}
    decoders: list[PlaceTotal] = []
    in_loop = {key for total in run.places if total.kind in _IN_STEP for key in _lines_of(total)[1:]}
    for place in list_places(run):
        is_own = (
            place.role == "thread"
            or place.kind in ("python", "gc", "other", "idle", "input_wait", "sync")
            or (place.kind == "decode" and not _is_decoder(" ".join((place.call, *place.leaves))))
        )
        is_loop = place.role == "training" and _LOOP_CALL.search(place.call)
        is_known = is_loop or _LOADER_CALL.search(place.call) or re.search(STARTS, place.call)
        file = place.line.rpartition(":")[0]
        has_step = place.role == "training" and (file, place.function) in have_steps
        if is_own and not is_known and (place.call or not has_step):
            if has_step:
                lines.setdefault((place.role, place.rank, place.line), []).append(place)
            else:
                functions.setdefault((place.role, place.rank, file, place.function), []).append(place)
        elif place.role == "training" and place.kind == "decode" and not in_loop.isdisjoint(_lines_of(place)[1:]):
            decoders.append(place)  # that the training thread calls itself, and no loader
    merged = [_merge_lines(group, "") for group in functions.values()]
    for group in _join_neighbors(lines.values()):
        calls = {place.call for place in group}
        merged.append(_merge_lines(group, calls.pop() if len(calls) == 1 else module_of(group[0].call)))
    parts = [place for group in (*functions.values(), *lines.values()) for place in group]
    for caller in _join_callees(run, parts + decoders):
        if all(place.seconds < MOST * caller.seconds for place in merged if _thread(place) == _thread(caller)):
            merged.append(caller)
    heavy = [place for place in merged if place.low_s >= min_fraction * run.place_totals[place.role, place.rank]]
    return sorted(heavy, key=lambda place: -place.seconds)


def _join_callees(run: RunRecords, places: list[PlaceTotal]) -> list[PlaceTotal]:
    """What a line of the job calls as one place, where it is in several lines: without a function and a call. Of lines
    that call each other, the innermost one with most of what the outermost one takes; none in which steps are."""
    in_steps: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for place in run.places:
        if place.kind in _IN_STEP and not place.is_startup:
            in_steps.update(dict.fromkeys(_lines_of(place), place.samples))
    groups: dict[tuple[str, int, str], dict[int, PlaceTotal]] = {}
    for number, part in enumerate(places):
        for key in _lines_of(part):
            groups.setdefault(key, {})[number] = part
    sums: dict[tuple[str, int, str], PlaceTotal] = {}
    for key, group in groups.items():
        least_s = MIN_SHARE * max(run.place_totals[part.role, part.rank] for part in group.values())
        if sum(part.seconds for part in group.values()) >= least_s:
            total = merge_places(group.values())
            if total is not None and in_steps[key] < MIN_STEPS * total.samples:
                sums[key] = total
    found: list[PlaceTotal] = []
    while sums:
        outermost = max(sums, key=lambda key: sums[key].seconds)
        inner = [key for key in sums if groups[key].keys() <= groups[outermost].keys()]
        most = [key for key in inner if sums[key].seconds >= MAIN_FRACTION * sums[outermost].seconds]
        depth = {
            key: sum(_lines_of(part).index(key) for part in groups[key].values()) / len(groups[key]) for key in most
        }
        key = min(most, key=lambda key: depth[key])
        parts = list(groups[key].values())
        largest = max(part.seconds for part in parts)
        if len({part.line for part in parts}) > 1 and largest < MOST * sums[key].seconds:
            line = key[2]
            callers = next((callers for part in parts if (callers := _callers_of(part, line))), "")
            found.append(dataclasses.replace(sums[key], line=line, function="", call="", callers=callers))
        for key in inner:
            del sums[key]
    return found


def _lines_of(place: PlaceTotal) -> list[tuple[str, int, str]]:
    """(role, rank, line) of a place and of its callers, the innermost first."""
    lines = [place.line, *filter(None, place.callers.split(" < "))]
    return [(*_thread(place), line) for line in dict.fromkeys(lines)]


def _thread(place: PlaceTotal) -> tuple[str, int]:
    """Role and rank; the workers of all ranks do the same."""
    return place.role, place.rank if place.role == "training" else 0


def _callers_of(place: PlaceTotal, line: str) -> str:
    """Its callers beyond this one."""
    return f" < {place.callers}".partition(f" < {line} < ")[2]


def is_callees(place: PlaceTotal | Place) -> bool:
    """Whether it is all that a line calls, as `_join_callees` and `_common_place` make it."""
    return not place.function and not place.call


def called_places(run: RunRecords, place: PlaceTotal) -> list[PlaceTotal]:
    """Of a place of `_join_callees`: the places that it has called, the largest first."""
    key = (*_thread(place), place.line)
    return [other for other in list_places(run) if other.kind not in _KINDS_WITH_CAUSES and key in _lines_of(other)]


def functions_with_steps(run: RunRecords) -> set[tuple[str, str]]:
    """(file, function) of those that call a backward pass or an optimizer's step, or spend at least MIN_STEPS in the
    training step: one that ends with `torch.from_numpy(…)` is none."""
    in_steps: collections.Counter[tuple[str, str]] = collections.Counter()
    totals: collections.Counter[tuple[str, str]] = collections.Counter()
    updates: set[tuple[str, str]] = set()
    for total in run.places:
        if total.role == "training" and not total.is_startup:
            key = (total.line.rpartition(":")[0], total.function)
            totals[key] += total.samples
            if total.kind in _IN_STEP or any(map(_RUNS_STEP.search, total.leaves)):
                in_steps[key] += total.samples
                if _UPDATES.search(total.call):
                    updates.add(key)
    return updates | {key for key, count in in_steps.items() if count >= MIN_STEPS * totals[key]}


def join_lines(run: RunRecords, places: list[PlaceTotal]) -> list[PlaceTotal]:
    """The places, of which those are one that a line of the training thread calls, those that a line has in calls of
    one class or module of a package, as of a loader that starts and ends in it, and those of neighboring lines of a
    function that make the same call. The most costly first."""
    of_lines: dict[tuple[str, int, str, str, str], list[PlaceTotal]] = {}
    own = [place for place in places if place.role == "training" and place.kind not in _KINDS_WITH_CAUSES]
    joined = _join_callees(run, own)
    callers = {_lines_of(caller)[0] for caller in joined}
    for place in places:
        if (
            place.role == "training"
            and place.kind not in _KINDS_WITH_CAUSES
            and not callers.isdisjoint(_lines_of(place))
        ):
            continue
        module = module_of(place.call)
        if "." in module:
            of_lines.setdefault((*_thread(place), place.line, place.kind, module), []).append(place)
        else:
            joined.append(place)
    joined += [total for group in of_lines.values() if (total := merge_places(group)) is not None]
    calls: dict[tuple[str, str], list[list[PlaceTotal]]] = {}
    for place in joined:
        if place.call:
            calls.setdefault((place.kind, place.call), []).append([place])
    joined = [place for place in joined if not place.call]
    for (_, call), lines in calls.items():
        joined += [_merge_lines(group, call) for group in _join_neighbors(lines)]
    return _sort_by_cost(run, joined)


def _join_neighbors(lines: Iterable[list[PlaceTotal]]) -> list[list[PlaceTotal]]:
    """Lines of one function that are near each other and call the same module as one group, as metrics do that are
    computed or written one after the other."""
    joined: list[list[PlaceTotal]] = []
    previous: tuple[str, ...] = ()
    previous_line = 0
    for group in sorted(lines, key=lambda group: (module_of(group[0].call), *_position(group[0]))):
        first = group[0]
        file, line = _position(first)
        key = (first.role, str(first.rank), file, first.function, module_of(first.call))
        if key == previous and line - previous_line <= MAX_LINE_GAP:
            joined[-1].extend(group)
        else:
            joined.append(group)
        previous, previous_line = key, line
    return joined


def _position(place: PlaceTotal) -> tuple[str, int]:
    """File and line; 0 in broken records."""
    file, _, line = place.line.rpartition(":")
    return file, int(line) if line.isdecimal() and len(line) < 10 else 0


def module_of(call: str) -> str:
    """`sklearn.metrics` of `sklearn.metrics.f1_score`; all of a name without a dot."""
    return call.rpartition(".")[0] or call


def _merge_lines(group: list[PlaceTotal], call: str) -> PlaceTotal:
    """Their sum; with this call if no line and call is most of it."""
    total = merge_places(group)
    assert total is not None
    largest = max(place.seconds for place in group)
    return total if largest >= MAIN_FRACTION * total.seconds else dataclasses.replace(total, call=call)


ROLE_NAMES = {"training": "in the training thread", "thread": "in another thread", "worker": "in each loader worker"}


def _is_decoder(text: str) -> bool:
    """Whether a call and its frames decode or transform images as a whole, not pixel by pixel."""
    return _DECODES.search(text) is not None and _PER_PIXEL.search(text) is None


def describe_place(place: PlaceTotal) -> str:
    """`copy.deepcopy, called at train.py:53`."""
    if is_callees(place):
        return f"what {place.line} calls"
    return f"{place.call}, called at {place.line}" if place.call else f"{place.function} at {place.line}"


def _loading(run: RunRecords) -> list[PlaceTotal]:
    """Places of who loads the data (workers, else the training thread), without waits for its loader."""
    role = "worker" if any(place.role == "worker" for place in run.places) else "training"
    return [
        place
        for place in run.places
        if place.role == role and not place.is_startup and place.line and not _LOADER_CALL.search(place.call)
        if role == "worker" or place.kind in ("input_wait", "decode")
    ]


def loading_places(run: RunRecords) -> list[PlaceTotal]:
    """Lines and calls of who loads the data, and of other threads, the most costly first."""
    found = [*_loading(run), *(place for place in run.places if place.role == "thread" and place.line)]
    groups: dict[tuple[str, str], list[PlaceTotal]] = {}
    for place in found:
        if place.kind != "idle" or place.call:
            groups.setdefault((place.line, place.call), []).append(place)
    merged = [total for group in groups.values() if (total := merge_places(group)) is not None]
    return sorted(merged, key=lambda total: -total.seconds)


def loading_fraction(run: RunRecords, count: Callable[[PlaceTotal], int], minimum: float) -> float | None:
    """Fraction of the samples of who loads the data, without waits for its loader, that `count` counts in a place;
    None: too few to tell whether it is the minimum."""
    loading = _loading(run)
    samples, counted = sum(place.samples for place in loading), sum(map(count, loading))
    if not samples:
        return None
    low, high = _wilson(counted / samples, samples)
    return counted / samples if samples >= MIN_LOADER_SAMPLES or not low < minimum <= high else None


def count_blocked(place: PlaceTotal) -> int:
    """Samples in a call that reads, or blocked in another one; a sleep is not blocked by a storage."""
    if place.call == "time.sleep":
        return 0
    if place.kind == "idle" or READS.search(place.call):
        return place.samples
    return sum(count for leaf, count in place.leaves.items() if READS.search(leaf))


def count_decoding(place: PlaceTotal) -> int:
    return place.samples if place.kind == "decode" else 0


def count_working(place: PlaceTotal) -> int:
    return place.samples if place.kind in ("decode", "python", "compute") else 0


LAUNCHES = re.compile(r"spawn|start_processes|elastic|^subprocess\.|\.join$|\.communicate$")
"""Calls in which a launcher waits for the processes that it has started."""
_IN_STEP = frozenset({"comm", "compute", "sync", LOOP_IN_STEP})


def stuck_places(run: RunRecords) -> tuple[list[tuple[str, Place]], list[tuple[str, Place]]]:
    """Of a job in which nothing computes, by the newest stacks: (who is in a call of its own, with its place; who only
    waits for others: in a collective, also one inside of the backward pass, or for its loader)."""
    stuck: list[tuple[str, Place]] = []
    waiting: list[tuple[str, Place]] = []
    for (rank, pid), window in sorted(run.newest_stacks.items()):
        place = _common_place(window.places)
        has_loader = any(other.role == "worker" for (of, _), other in run.newest_stacks.items() if of == rank)
        if not place.line or LAUNCHES.search(place.call):
            continue  # a worker without a task, or a launcher
        who = f"rank {rank}" if run.num_ranks > 1 else "the training thread"
        if window.role == "worker":
            stuck.append((f"a loader worker{f' of {who}' if run.num_ranks > 1 else ''} (process {pid})", place))
        elif place.kind in _IN_STEP or (place.kind == "input_wait" and has_loader):
            waiting.append((who, place))
        else:
            stuck.append((who, place))
    return stuck, waiting


def describe_stuck(who: str, place: Place) -> str:
    """`rank 1 is stuck in conn.recv at train.py:12`."""
    if place.call.startswith("with "):
        return f"{who} waits for the lock of `{place.call}` at {place.line}"
    if is_callees(place):
        return f"{who} is stuck in what {place.line} calls"
    return f"{who} is stuck in {place.call or place.function} at {place.line}"


def _common_place(places: list[Place]) -> Place:
    """The largest, if it has most of the samples, else the innermost line that all have in common, without a function
    and a call; else the largest."""
    largest = max(places, key=lambda place: place.samples, default=Place(kind="other", samples=0))
    num_samples = sum(place.samples for place in places)
    if largest.samples >= MAIN_FRACTION * num_samples or not largest.line:
        return largest
    lines = [[place.line, *place.callers.split(" < ")] for place in places]
    for line in filter(None, lines[places.index(largest)]):
        inside = [place for place, chain in zip(places, lines, strict=True) if line in chain]
        if sum(place.samples for place in inside) >= COMMON_FRACTION * num_samples:
            return msgspec.structs.replace(largest, line=line, function="", call="")
    return largest


def frequency(run: RunRecords, place: PlaceTotal) -> str:
    """How often it was called, as far as lines and steps show it; else empty."""
    windows = place.windows / place.window_fraction if place.window_fraction else 0.0
    events = run.learning.num_evaluations + run.num_checkpoints
    window_s = run.place_totals.get((place.role, place.rank), 0.0) / max(1.0, windows)
    if place.windows == 1 and windows >= 3 and window_s <= MAX_ONCE_S:
        return "once"
    if place.role == "training" and place.windows >= 3 and place.window_fraction >= 0.9:
        return "each step" if run.steady.steps >= windows and events < windows / 2 else ""
    if 2 <= place.bursts == run.learning.num_evaluations:
        return "once per epoch"
    return ""
