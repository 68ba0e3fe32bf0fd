"""Which places cost time: lines, functions and what a line calls, outside of the training steps and of waits."""

import collections
import itertools
import re
from collections.abc import Container, Iterable, Sequence

import msgspec

from stoker_watch.diagnosis.places.totals import MIN_SHARE, NEVER_A_STEP, merge_by, merge_places, scale_to_leaves
from stoker_watch.diagnosis.run_data import PlaceTotal, RunRecords
from stoker_watch.runs.schemas import AFTER_STEP, LOOP_IN_STEP, WITHOUT_GRADIENTS, Place

_Line = tuple[str, int, str]
"""Role, rank, and FILE:LINE."""
TRAINING_STEP = "training step"
"""Row of frames.toml."""
_STEP_KINDS = frozenset({"compute", "sync", "idle", "comm", LOOP_IN_STEP})
LOADER_CALL = re.compile(
    r"^(torch\.utils\.data(?!\.dataset\.)|multiprocessing|threading|queue|concurrent\.futures|accelerate\.data_loader"
    r"|tensorflow\.python\.(data|distribute\.input_lib)|(tf_)?keras\.(src\.)?(trainers|engine\.data_adapter|utils\.data_utils)"
    r"|(pytorch_lightning|lightning)\.\w+\.(loops|utilities))\."
)
"""Calls in which a thread waits for what a loader prepares elsewhere: the place is there."""
_ITERATES = re.compile(r"^(enumerate|iter|next|zip)$")
"""Calls in which a thread that does nothing waits for an iterator without Python frames, as a framework's."""
LOOP_CALL = re.compile(r"^(?!subprocess\.|asyncio\.)(.*\.)?(fit|fit_generator|train|learn|main|run|launch)$")
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
"""Calls that are in a training loop: a backward pass, an update of the weights. `recording/calls.py` finds these in
source code, which records do not have."""
_RUNS_STEP = re.compile(r"^(quick_execute|call_function|execute) \((eager/)?(execute|context)\.py\)")
"""Frames in which TensorFlow runs a step as a whole."""
IMPORT = r"^import |^importlib\."
"""Calls that import a module."""
STARTS = rf"{IMPORT}|^multiprocessing\.(spawn|forkserver)|^runpy\."
"""Calls of a process that spawn or forkserver has started: it runs the job's file and its imports again."""
MAIN_FRACTION = 0.8
"""Fraction of a function's time in one line and call from which that is the place."""
_KINDS_WITH_CAUSES = frozenset({"input_wait", "checkpoint", "compile"})
"""Kinds of places that have causes of their own, and are in no sum of what a line calls."""
MIN_REST = 1.1
"""How many times a place's time its caller takes with the rest that it calls, from which that is told."""
MOST = 0.5
"""Fraction of what a line calls, in one function, from which that is the place: what else it calls costs less."""
MIN_OWN = 0.3
"""Fraction of what a line calls or a function does, in places of its own, below which it only decodes or writes:
`slow_decode`, `checkpoint_heavy`."""
MAX_LINE_GAP = 10
"""Lines from one call to the next of the same module, up to which they are one place of a training loop."""
MAX_STATEMENT_GAP = 5
"""Lines from one line outside of steps to the next, up to which they may be statements of one block."""
MAX_ONCE_S = 15.0
"""Time of a window up to which what was seen in one only was done once."""
STARTS_WORKERS = r"data\.dataloader\.__iter__$|data_loader\.__iter__$|^DataLoader$|^iter$"
"""Calls in which a training thread starts loader workers."""
MIN_STEPS = 0.1
"""Fraction of the samples of a function in the training step from which it is one with steps in it."""
MIN_PYTHON = 0.2
"""Fraction of what a line calls in JAX that is in Python, from which it is no compiled step."""
BESIDES_TRAINING = re.compile(
    r"(?i)^(?!.*(train|fit|learn|main|loop))(.*_)?(eval|val|test|sampl|generat|predict|infer|plot|draw)[a-z]*(_|$)"
)
"""Names of functions of a job that evaluate, or draw samples."""
MIN_NAMED = 0.2
"""Fraction of the time in such a function from which it costs much; an evaluation after each epoch takes less."""
MIN_LOOP = 0.1
"""Fraction of the time of a training thread from which a Python loop inside of its steps is a place."""
ROLE_NAMES = {"training": "in the training thread", "thread": "in another thread", "worker": "in each loader worker"}
IN_STEP = frozenset({"comm", "compute", "sync", LOOP_IN_STEP, WITHOUT_GRADIENTS})


def list_places(run: RunRecords) -> list[PlaceTotal]:
    """Places after the start outside of forward, backward and optimizer step, the most costly first; kinds of a line
    and call are one. A training thread that waits in a call of its own code is there; of a worker, which may wait for
    its next batch, only one that sleeps or reads. A line with more samples in the steps than outside of them is that of
    the loop (`model.fit`), and no place."""
    # torch computes in the step itself on a CPU: nothing is waited for where a tensor is printed or made a list
    formats_tensors = run.on_cpu and run.computes_with_torch and "jax" not in run.frameworks
    listed: list[PlaceTotal] = []
    in_steps: collections.Counter[tuple[tuple[str, int], str, str]] = collections.Counter()
    for total in _with_loops(run):
        if total.is_startup or not total.line:
            continue
        key = _line_and_call(total)
        is_of_loader = LOADER_CALL.search(total.call) or _ITERATES.search(total.call)
        is_own_call = total.role == "training" and total.call and not is_of_loader
        reads = total.role == "worker" and (total.call == "time.sleep" or READS.search(total.call))
        waits = total.kind == "idle" and (is_own_call or reads)
        formats = total.kind == "sync" and formats_tensors
        if total.kind in _STEP_KINDS and total.role != "thread" and not waits and not formats:
            in_steps[key] += total.samples * (total.kind != "idle")
            continue
        outside = _without_graph_steps(total)
        in_steps[key] += total.samples - outside.samples
        if outside.samples:
            listed.append(outside)
    merged = merge_by(listed, _line_and_call).items()
    return _sort_by_cost(
        run, [place for key, place in merged if place.role != "training" or in_steps[key] <= place.samples]
    )


def _line_and_call(place: PlaceTotal) -> tuple[tuple[str, int], str, str]:
    return place.thread, place.line, place.call


def _with_loops(run: RunRecords) -> list[PlaceTotal]:
    """The places; a Python loop inside of the training step is Python work where its function is none with steps."""
    if all(total.kind != LOOP_IN_STEP for total in run.places):
        return run.places
    have_steps = functions_with_steps(run)
    return [
        msgspec.structs.replace(total, kind="python")
        if total.kind == LOOP_IN_STEP and total.file_and_function not in have_steps
        else total
        for total in run.places
    ]


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
    return scale_to_leaves(total, {leaf: count for leaf, count in total.leaves.items() if not _RUNS_STEP.search(leaf)})


def list_parts(run: RunRecords) -> list[PlaceTotal]:
    """The parts of stoker in which the training thread of a training of stoker's own was after the start, but for the
    training step, and the functions of the threads that load, the largest first."""

    def part_of(place: PlaceTotal) -> tuple[tuple[str, int], str, str]:
        return place.thread, place.part, "" if place.role == "training" else place.function.partition(" ")[0]

    parts = (place for place in run.places if place.part and not place.line and not place.is_startup)
    working = (
        place for place in parts if (place.part != TRAINING_STEP if place.role == "training" else place.kind != "idle")
    )
    return sorted(merge_by(working, part_of).values(), key=lambda place: -place.seconds)


def list_loops(run: RunRecords) -> list[PlaceTotal]:
    """Functions with a Python loop inside of the training step, of at least MIN_LOOP of the time at the low end of
    their interval, the largest first, with their most costly line; those that are places (`list_places`) are not
    among them."""
    in_loops = [total for total in _with_loops(run) if total.kind == LOOP_IN_STEP and not total.is_startup]
    lines = merge_by(in_loops, lambda total: (total.rank, total.line, total.function)).values()
    loops: list[PlaceTotal] = []
    for (rank, function), loop in merge_by(in_loops, lambda total: (total.rank, total.file_and_function)).items():
        if loop.low_s >= MIN_LOOP * run.place_totals["training", rank]:
            own = (line for line in lines if (line.rank, line.file_and_function) == (rank, function))
            first = max(own, key=lambda line: line.seconds)
            loops.append(msgspec.structs.replace(loop, line=first.line, call=first.call))
    return sorted(loops, key=lambda loop: -loop.seconds)


def heavy_places(run: RunRecords, min_fraction: float) -> list[PlaceTotal]:
    """Functions of the job that took at least this fraction of the time, at the low end of their interval, outside of
    steps; of functions with steps in them, their lines with a call, neighbors with calls of the same module as one.
    Without waits for a loader, imports, and what other causes explain: compiling; checkpoints, but for those of a
    function that does much else; decoders, but for those of a training thread whose loader has workers. A function of
    which one line is most of it is that line, else the place has no call."""
    have_steps = functions_with_steps(run)
    functions: dict[tuple[str, int, tuple[str, str]], list[PlaceTotal]] = {}
    lines: dict[_Line, list[PlaceTotal]] = {}
    decoders: list[PlaceTotal] = []
    writes: dict[tuple[str, int, tuple[str, str]], list[PlaceTotal]] = {}
    in_loop = {key for total in run.places if total.kind in IN_STEP for key in _lines_of(total)[1:]}
    loads_elsewhere = has_workers(run)
    for place in list_places(run):
        is_own = (
            place.role == "thread"
            or place.kind in ("python", "gc", "other", "idle", "input_wait", "sync")
            or (place.kind == "decode" and not _is_decoder(" ".join((place.call, *place.leaves))))
            or (place.kind == "decode" and place.role == "training" and loads_elsewhere)
        )
        is_loop = place.role == "training" and LOOP_CALL.search(place.call)
        is_known = is_loop or LOADER_CALL.search(place.call) or re.search(STARTS, place.call)
        function = (place.role, place.rank, place.file_and_function)
        has_step = place.role == "training" and place.file_and_function in have_steps
        if is_own and not is_known and (place.call or not has_step):
            if has_step:
                lines.setdefault((place.role, place.rank, place.line), []).append(place)
            else:
                functions.setdefault(function, []).append(place)
        elif place.role == "training" and place.kind == "decode" and not in_loop.isdisjoint(_lines_of(place)[1:]):
            decoders.append(place)  # that the training thread calls itself, and no loader
        elif place.kind == "checkpoint":
            writes.setdefault(function, []).append(place)
    merged = [_merge_lines(_with_writes(group, writes.get(key, [])), "") for key, group in functions.items()]
    for group in _join_neighbors(lines.values()):
        calls = {place.call for place in group}
        module = module_of(group[0].call)  # "torch" of `torch.histc` says nothing
        merged.append(_merge_lines(group, calls.pop() if len(calls) == 1 else module if "." in module else ""))
    merged = _join_calls(merged)
    parts = [place for group in (*functions.values(), *lines.values()) for place in group]
    beside, besides_step = _lines_beside_jax_step(run)
    for caller in _join_callees(run, parts, decoders + beside, besides_step):
        if all(place.seconds < MOST * caller.seconds for place in merged if place.thread == caller.thread):
            merged.append(caller)
    heavy = [place for place in merged if place.low_s >= min_fraction * run.observed_s(place)]
    return sorted(heavy, key=lambda place: -place.seconds)


def _with_writes(own: list[PlaceTotal], writes: list[PlaceTotal]) -> list[PlaceTotal]:
    """The places of a function, with those in which a framework writes a checkpoint for it if the function does much
    else: `checkpoint_heavy` names one that only writes."""
    own_s = sum(place.seconds for place in own)
    return [*own, *writes] if own_s >= MIN_OWN * (own_s + sum(place.seconds for place in writes)) else own


def has_workers(run: RunRecords) -> bool:
    """Whether processes of a loader, or threads, prepare the batches."""
    return bool(run.facts.get("workers")) or any(place.role == "worker" for place in run.places)


def _lines_beside_jax_step(run: RunRecords) -> tuple[list[PlaceTotal], set[_Line]]:
    """Lines of a job in JAX that call a function which draws samples or evaluates, after the places in which it
    computes or compiles. Such a function is MIN_PYTHON or more in Python, or has the name of an evaluation and takes
    MIN_NAMED of the time; the line that computes most is the training step. Nothing if a clock saw the steps."""
    if "jax" not in run.frameworks or run.clock_saw_steps:
        return [], set()
    own = [place for place in run.places if place.role == "training" and place.line and not place.is_startup]
    computing_kinds = IN_STEP | {"compile"}
    counts: collections.Counter[_Line] = collections.Counter()
    function_of = {_lines_of(place)[0]: place.function for place in own}
    named: collections.Counter[_Line] = collections.Counter()
    for place in own:
        calls = {
            line for called, line in itertools.pairwise(_lines_of(place))
            if BESIDES_TRAINING.search(function_of.get(called, ""))
        }  # fmt: skip
        if place.kind == AFTER_STEP and BESIDES_TRAINING.search(place.call.rpartition(".")[2]):
            calls.add(_lines_of(place)[0])
        named.update(dict.fromkeys(calls, place.samples))
        if not calls and place.kind in computing_kinds:
            counts[_lines_of(place)[0]] += place.samples
    most = max(counts, key=lambda line: counts[line], default=None)
    of_step = {line for place in own if _lines_of(place)[0] == most for line in _lines_of(place)}
    totals: collections.Counter[_Line] = collections.Counter()
    in_python: collections.Counter[_Line] = collections.Counter()
    for place in own:
        for line in _calling_lines(place):
            totals[line] += place.samples
            in_python[line] += place.samples * (place.kind in ("python", "gc"))
    all_samples = sum(place.samples for place in own)
    beside = {
        line for line in totals.keys() - of_step
        if in_python[line] >= MIN_PYTHON * totals[line] or named[line] >= MIN_NAMED * all_samples
    }  # fmt: skip
    computing = [place for place in own if place.kind in computing_kinds | {AFTER_STEP}]
    return [place for place in computing if not beside.isdisjoint(_calling_lines(place))], beside


def _calling_lines(place: PlaceTotal) -> list[_Line]:
    """The lines that have called what a place does: its callers; after a step, its own line as well."""
    lines = _lines_of(place)
    return lines if place.kind == AFTER_STEP else lines[1:]


def _join_callees(
    run: RunRecords, places: list[PlaceTotal], others: Sequence[PlaceTotal] = (), besides_step: Container[_Line] = ()
) -> list[PlaceTotal]:
    """What a line of the job calls as one place, where it is in several lines: without a function and a call. Of lines
    that call each other, the innermost one with most of what the outermost one takes; none in which steps are, but for
    `besides_step`, lines that are known to run no step. others: places that count only as a part of such a line."""
    in_steps: collections.Counter[_Line] = collections.Counter()
    for place in run.places:
        if place.kind in IN_STEP and not place.is_startup:
            in_steps.update(dict.fromkeys(_lines_of(place), place.samples))
    groups: dict[_Line, dict[int, PlaceTotal]] = {}
    for number, part in enumerate((*places, *others)):
        for key in _lines_of(part):
            groups.setdefault(key, {})[number] = part
    sums: dict[_Line, PlaceTotal] = {}
    for key, group in groups.items():
        least_s = MIN_SHARE * max(map(run.observed_s, group.values()))
        if sum(part.seconds for part in group.values()) >= least_s:
            total = merge_places(group.values())
            if total is not None and (key in besides_step or in_steps[key] < MIN_STEPS * total.samples):
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
        own = [part.seconds for number, part in groups[key].items() if number < len(places)]
        is_several = len({part.line for part in parts}) > 1 and sum(own) >= MIN_OWN * sums[key].seconds
        if key in besides_step or (is_several and max(own) < MOST * sums[key].seconds):
            line = key[2]
            callers = next((callers for part in parts if (callers := _callers_of(part, line))), "")
            found.append(msgspec.structs.replace(sums[key], line=line, function="", call="", callers=callers))
        for key in inner:
            del sums[key]
    return found


def _lines_of(place: PlaceTotal) -> list[_Line]:
    """(role, rank, line) of a place and of its callers, the innermost first."""
    lines = [place.line, *filter(None, place.callers.split(" < "))]
    return [(*place.thread, line) for line in dict.fromkeys(lines)]


def _callers_of(place: PlaceTotal, line: str) -> str:
    """Its callers beyond this one."""
    return f" < {place.callers}".partition(f" < {line} < ")[2]


def is_callees(place: PlaceTotal | Place) -> bool:
    """Whether it is all that a line calls, as `_join_callees` and `_common_place` make it."""
    return not place.function and not place.call


def called_places(run: RunRecords, place: PlaceTotal) -> list[PlaceTotal]:
    """The places that a place of `_join_callees` has called, the largest first."""
    key = (*place.thread, place.line)
    return [other for other in list_places(run) if other.kind not in _KINDS_WITH_CAUSES and key in _lines_of(other)]


def functions_with_steps(run: RunRecords) -> set[tuple[str, str]]:
    """(file, function) of those that call a backward pass or an optimizer's step, or spend at least MIN_STEPS in the
    training step: one that ends with `torch.from_numpy(…)` is none. Where all of that is a Python loop, MOST of the
    function has to be: a loop over pixels with some operations on tensors in it is none either."""
    in_steps: collections.Counter[tuple[str, str]] = collections.Counter()
    totals: collections.Counter[tuple[str, str]] = collections.Counter()
    loops: collections.Counter[tuple[str, str]] = collections.Counter()
    updates: set[tuple[str, str]] = set()
    for total in run.places:
        if total.role == "training" and not total.is_startup:
            key = total.file_and_function
            totals[key] += total.samples
            if total.kind in IN_STEP - {WITHOUT_GRADIENTS} or any(map(_RUNS_STEP.search, total.leaves)):
                in_steps[key] += total.samples
                loops[key] += total.samples * (total.kind == LOOP_IN_STEP)
                if _UPDATES.search(total.call):
                    updates.add(key)
    return updates | {
        key for key, count in in_steps.items()
        if count >= MIN_STEPS * totals[key] and (count > loops[key] or count >= MOST * totals[key])
    }  # fmt: skip


def join_lines(run: RunRecords, places: list[PlaceTotal]) -> list[PlaceTotal]:
    """The places, of which those are one that a line of the training thread calls, those that a line has in calls of
    one class or module of a package, as of a loader that starts and ends in it, and those of neighboring lines of a
    function that make the same call. The most costly first."""
    of_modules: list[PlaceTotal] = []
    own = [place for place in places if place.role == "training" and place.kind not in _KINDS_WITH_CAUSES]
    joined = _join_callees(run, own)
    callers = {_lines_of(caller)[0] for caller in joined}
    for place in places:
        is_own = place.role == "training" and place.kind not in _KINDS_WITH_CAUSES
        if is_own and not callers.isdisjoint(_lines_of(place)):
            continue
        (of_modules if "." in module_of(place.call) else joined).append(place)
    joined += merge_by(of_modules, lambda place: (place.thread, place.line, place.kind, module_of(place.call))).values()
    calls: dict[tuple[str, str], list[list[PlaceTotal]]] = {}
    for place in joined:
        if place.call:
            calls.setdefault((place.kind, place.call), []).append([place])
    joined = [place for place in joined if not place.call]
    for (_, call), lines in calls.items():
        joined += [_merge_lines(group, call) for group in _join_neighbors(lines)]
    return _sort_by_cost(run, joined)


def find_caller(run: RunRecords, place: PlaceTotal) -> PlaceTotal | None:
    """All that a line calls, as one place, if `place` is most of it, and not nearly all: a loop over all anchors, and
    the function that it calls for each. Of several such lines the outermost, none in which steps are."""
    others = _KINDS_WITH_CAUSES - {place.kind}
    of_thread = [one for one in list_places(run) if one.thread == place.thread and one.kind not in others]
    in_steps = [one for one in run.places if one.kind in IN_STEP and not one.is_startup]
    for line in reversed(place.callers.split(" < ")):
        key = (*place.thread, line)
        whole = merge_places(one for one in of_thread if key in _lines_of(one))
        steps = sum(one.samples for one in in_steps if key in _lines_of(one))
        if whole is None or steps >= MIN_STEPS * whole.samples:
            continue
        if MIN_REST * place.seconds <= whole.seconds <= place.seconds / MOST:
            return msgspec.structs.replace(whole, line=line, function="", call="", callers=_callers_of(place, line))
    return None


def find_neighbors(run: RunRecords, place: PlaceTotal) -> PlaceTotal | None:
    """A place with the statements before and after it that are outside of steps too, in a function that runs the steps,
    as one place without a call: a figure is drawn by several lines. From one to the next there are at most
    MAX_STATEMENT_GAP lines, none of which is in a step. None if they take no more than the place alone."""
    file, at = _position(place)
    if is_callees(place) or (file, place.function) not in functions_with_steps(run):
        return None
    lines: dict[int, list[PlaceTotal]] = {}
    for one in list_places(run):
        is_here = one.thread == place.thread and (_position(one)[0], one.function) == (file, place.function)
        if is_here and one.kind not in _KINDS_WITH_CAUSES:
            lines.setdefault(_position(one)[1], []).append(one)
    steps: collections.Counter[int] = collections.Counter()
    for one in run.places:
        if one.kind in IN_STEP | _KINDS_WITH_CAUSES and one.thread == place.thread and _position(one)[0] == file:
            steps[_position(one)[1]] += one.samples
    in_steps = {line for line, count in steps.items() if count > sum(one.samples for one in lines.get(line, ()))}
    around = [at]
    for direction in (1, -1):
        for line in sorted((line for line in lines if direction * (line - at) > 0), reverse=direction < 0):
            nearest = max(around) if direction > 0 else min(around)
            between = range(min(line, nearest), max(line, nearest) + 1)
            if abs(line - nearest) > MAX_STATEMENT_GAP or not in_steps.isdisjoint(between):
                break
            around.append(line)
    whole = merge_places(one for line in around for one in lines.get(line, ()))
    if whole is None or whole.seconds < MIN_REST * place.seconds:
        return None
    return msgspec.structs.replace(whole, line=f"{file}:{min(around)}-{max(around)}", call="")


def name_cost(place: PlaceTotal, caller: PlaceTotal | None) -> str:
    """`15 s in iou at targets.py:18, of 23 s in what train.py:68 calls`. caller: of `find_caller`, `find_neighbors`."""
    text = f"{place.seconds:,.0f} s in {describe_place(place)}"
    return text if caller is None else f"{text}, of {caller.seconds:,.0f} s in {describe_place(caller)}"


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
            joined.append(list(group))
        previous, previous_line = key, line
    return joined


def _join_calls(places: list[PlaceTotal]) -> list[PlaceTotal]:
    """Merges places of one thread that call the same function of the standard library or of a package that computes on
    the host alone, such as `copy.deepcopy` in two functions of the job."""
    on_host = [place for place in places if NEVER_A_STEP.match(place.call)]
    others = [place for place in places if not NEVER_A_STEP.match(place.call)]
    return [*others, *merge_by(on_host, lambda place: (place.thread, place.call)).values()]


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
    return total if largest >= MAIN_FRACTION * total.seconds else msgspec.structs.replace(total, call=call)


def _is_decoder(text: str) -> bool:
    """Whether a call and its frames decode or transform images as a whole, not pixel by pixel."""
    return _DECODES.search(text) is not None and _PER_PIXEL.search(text) is None


def describe_place(place: PlaceTotal) -> str:
    """`copy.deepcopy, called at train.py:53`; of a package also the method, as it may have many with such a call."""
    if is_callees(place):
        return f"what {place.line} calls"
    if not place.call:
        return f"{place.function} at {place.line}"
    method = f" ({place.function})" if "." in place.function else ""  # of an installed package
    return f"{place.call}, called at {place.line}{method}"


def frequency(run: RunRecords, place: PlaceTotal) -> str:
    """How often it was called, as far as lines and steps show it; else empty."""
    windows = place.windows / place.window_fraction if place.window_fraction else 0.0
    events = run.learning.num_evaluations + run.num_checkpoints
    window_s = run.place_totals.get((place.role, place.rank), 0.0) / max(1.0, windows)
    if place.windows == 1 and windows >= 3 and window_s <= MAX_ONCE_S:
        return "once"
    if place.role == "training" and place.windows >= 3 and place.window_fraction >= 0.9:
        return "throughout" if run.steady.steps >= windows and events < windows / 2 else ""
    if 2 <= place.bursts == run.learning.num_evaluations:
        return "once per epoch"
    return ""
