"""Where the time of what trains went: divided completely into costs, so that each second is in exactly one.

The clocks of a run say how long each phase of a rank took, the samples of its stacks in which lines of the job's own
code its training thread was. `divide_time` joins both: a cost is a place in a phase, and what no place has of a phase
is a cost as well. A wait for input is divided further, by what the loader's workers did meanwhile. Why a cost is there
is not said here: the rules in `causes/` explain costs, `engine.py` makes findings of them.
"""

import collections
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

import msgspec

from stoker_watch.diagnosis.causes.host import taken_by_children
from stoker_watch.diagnosis.causes.shared import wait_in_evaluations_s
from stoker_watch.diagnosis.places.grouping import (
    CALLS,
    MIN_REST,
    PlaceGroup,
    functions_with_steps,
    group_places,
    lines_of,
    what_it_does,
)
from stoker_watch.diagnosis.places.sampled import TAKES_CORES, Cost, PlaceTotal
from stoker_watch.diagnosis.places.totals import scale_to_leaves
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.runs.schemas import AFTER_STEP, LOOP_IN_STEP, WITHOUT_GRADIENTS
from stoker_watch.runs.totals import add_amounts

_PHASE_OF_KIND = {
    "input_wait": "input_wait", "decode": "input_wait", "compute": "compute", LOOP_IN_STEP: "compute", "comm": "comm",
    "sync": "sync", "checkpoint": "checkpoint", "compile": "compile", WITHOUT_GRADIENTS: "eval", AFTER_STEP: "eval",
}  # fmt: skip
"""Kind of a sample → the phase of the ledger that it is of, if that has room for it; of all others it is `host`."""
_UNNAMED = ("unattributed", "host")
"""Phases that say only that no clock knows more: costs in them are called by the kind of their samples."""
_ANYTHING = ("unattributed", "host", "eval", "compute")
"""Phases in which samples of any kind may be."""
_STEP_PHASES = ("compute", "eval")
"""Phases of samples that compute as steps do."""
_OTHERS = ("startup", "recovery", "idle")
"""Phases that the training thread does nothing of a loop in."""
_MAX_BY_CLOCK = {"input_wait": 2.0}
_MAX_BY_ANY_CLOCK = 1.25
"""Time of a phase, over that of the samples of its kinds, up to which these were too few, and its clock counts; a
loader may wait in calls that no stack names (heuristic)."""
_MIN_NAMED, _MIN_PYTHON = 0.2, 0.2
"""Fraction of the time in a function with the name of an evaluation from which it costs much, as one after each epoch
takes less; and of what a line calls that is in Python, from which it is no compiled step."""
_NEVER_STEPS = frozenset({"python", "gc", "compile", "checkpoint", "comm", "sync", "input_wait", "decode"})
"""Kinds of samples that are none of a step, though a clock counts them as one."""
_STEP_KINDS = frozenset({"compute", LOOP_IN_STEP})
_LOOP_KINDS = ("python", "gc", "other", "sync")
"""Kinds of samples that belong to a loop where its line is more often in steps."""


def divide_time(run: RunRecords) -> list[Cost]:
    """All costs of a run, the largest first; those of a rank add up to its device-seconds."""
    groups = {role: _waited_groups(run, role) for role in ("worker", "thread")}
    costs = [cost for rank in run.rank_phases for cost in _divide_rank(run, rank)]
    costs = [part for cost in costs for part in _divide_steps(run, cost, groups["worker"])]
    costs = [part for cost in costs for part in _divide_wait(run, cost, groups)]
    return sorted(costs, key=lambda cost: (-cost.seconds, cost.rank, cost.phase))


# What a rank did


def _divide_rank(run: RunRecords, rank: int) -> list[Cost]:
    phases = _with_stragglers(run, run.rank_phases[rank])
    steady = _with_stragglers(run, run.rank_steady_phases.get(rank, {}))
    groups, rest = _training_groups(run, rank)
    samples = [*(part for group in groups for part in group.parts), *rest]
    sampled_s = sum(place.seconds for place in samples)
    # without a clock of the steps, the samples stand for all of the time
    coverage = sum(steady.values()) / sampled_s if sampled_s > 0 and "compute" not in steady else 1.0
    shares = iter(_allocate([(place.kind, coverage * place.seconds) for place in samples], steady))
    costs: list[Cost] = []
    left = dict(steady)
    for group in groups:
        of_phase: dict[str, float] = {}
        for part in group.parts:
            for name, seconds in next(shares).items():
                left[name] -= seconds
                add_amounts(of_phase, {_name_phase(part.kind, name, steady): seconds})
        place_s = sum(of_phase.values())
        costs += [_make_cost(group, name, seconds, rank, place_s) for name, seconds in of_phase.items() if seconds > 0]
    seen = _name_rest(rest, shares, left, steady)
    outside = {name: max(0.0, phases[name] - steady.get(name, 0.0)) for name in phases}
    if rank == 0 and (waited_s := min(left.get("eval", 0.0), wait_in_evaluations_s(run))) > 0:
        left["eval"] -= waited_s
        add_amounts(outside, {"input_wait": waited_s})  # the clock of the training does not have it
    for name in outside.keys() | left.keys():
        steady_s = max(0.0, left.get(name, 0.0))
        seconds = steady_s + outside.get(name, 0.0)
        parts = sorted((group.whole for group in group_places(seen.get(name, ()))), key=lambda place: -place.seconds)
        if seconds > 0:
            costs.append(Cost(phase=name, seconds=seconds, steady_s=steady_s, rank=rank, parts=tuple(parts)))
    return costs


def _name_rest(
    rest: Sequence[PlaceTotal], shares: Iterator[dict[str, float]], left: dict[str, float], clock: Container[str]
) -> dict[str, list[PlaceTotal]]:
    """Moves what is left of phases without a name to the phases of the samples there. Their places by phase."""
    seen: dict[str, list[PlaceTotal]] = {}
    for place in rest:
        for name, seconds in next(shares).items():
            phase = _name_phase(place.kind, name, clock)
            if phase != name and (name in _UNNAMED or place.kind in _NEVER_STEPS):
                left[name] -= seconds
                add_amounts(left, {phase: seconds})
            if place.line:
                seen.setdefault(phase, []).append(place)
    return seen


def _with_stragglers(run: RunRecords, phases: dict[str, float]) -> dict[str, float]:
    """A rank's phases, with its part of what the comparison of ranks found to be waits for a slower one."""
    found = dict(phases)
    for name in ("comm", "compute"):
        recorded_s = sum(of_rank.get(name, 0.0) for of_rank in run.rank_phases.values())
        moved = 1 - run.totals.phases.get(name, 0.0) / recorded_s if recorded_s > 0 else 0.0
        if moved > 1e-9 and found.get(name):
            found["straggler"] = found.get("straggler", 0.0) + moved * found[name]
            found[name] *= 1 - moved
    return found


def _allocate(samples: Sequence[tuple[str, float]], phases: dict[str, float]) -> list[dict[str, float]]:
    """For each (kind of samples, their seconds) the seconds by phase of the clock. Samples fill the phase of their kind
    first, in proportion; what is too much for it goes to the phases of _ANYTHING that have room left, in proportion to
    that, then to others: what computes as steps do before what does not."""
    wanted: dict[str, float] = {}
    for kind, seconds in samples:
        add_amounts(wanted, {phase_of(kind): seconds})
    own = {phase: min(1.0, phases.get(phase, 0.0) / seconds) for phase, seconds in wanted.items() if seconds > 0}
    room = {name: phases[name] - own.get(name, 0.0) * wanted.get(name, 0.0) for name in phases}
    spread: dict[bool, dict[str, float]] = {}
    for as_steps in (True, False):
        surplus_s = sum((1 - own[p]) * wanted[p] for p in own if (p in _STEP_PHASES) == as_steps)
        taken = _spread(surplus_s, {name: room[name] for name in _ANYTHING if name in room})
        left_s = surplus_s - sum(taken.values())
        taken |= _spread(left_s, {name: free for name, free in room.items() if name not in (*_ANYTHING, *_OTHERS)})
        room = {name: free - taken.get(name, 0.0) for name, free in room.items()}
        # as fractions of what was too much
        spread[as_steps] = {name: over_s / surplus_s for name, over_s in taken.items()} if surplus_s > 0 else {}
    fits: dict[str, float] = {}
    for phase in own:  # what is left then is of the phase's own samples, which were too few
        ratio = own[phase] + max(0.0, room.get(phase, 0.0)) / wanted[phase]
        fits[phase] = ratio if ratio <= _MAX_BY_CLOCK.get(phase, _MAX_BY_ANY_CLOCK) else own[phase]
    found: list[dict[str, float]] = []
    for kind, seconds in samples:
        phase = phase_of(kind)
        share = {phase: fits[phase] * seconds} if seconds > 0 and phases.get(phase) else {}
        over_s = (1 - own[phase]) * seconds if seconds > 0 else 0.0
        for name, fraction in spread[phase in _STEP_PHASES].items() if over_s > 0 else ():
            share[name] = share.get(name, 0.0) + fraction * over_s
        found.append(share)
    return found


def _spread(seconds: float, room: dict[str, float]) -> dict[str, float]:
    """What phases take of some seconds, at most all, in proportion to their room."""
    room_s = sum(room.values())
    return {name: min(1.0, seconds / room_s) * of_name for name, of_name in room.items()} if room_s > 0 else {}


def phase_of(kind: str) -> str:
    """The phase that samples of a kind belong to."""
    return _PHASE_OF_KIND.get(kind, "host")


def _name_phase(kind: str, name: str, clock: Container[str]) -> str:
    """The phase of samples that the clock has in `name`: one without a name is called by the samples, and what is none
    of a step is none, unless the clock has its own phase. What no clock calls an evaluation is a part of the steps."""
    own = phase_of(kind)
    is_loading = own == "input_wait" and own in clock
    if name not in _UNNAMED and not (name == "compute" and kind in _NEVER_STEPS and not is_loading):
        return name
    return "compute" if own == "eval" else own


def _make_cost(
    group: PlaceGroup, phase: str, seconds: float, rank: int, place_s: float, role: str = "training"
) -> Cost:
    is_all = MIN_REST * group.place.seconds >= group.whole.seconds
    return Cost(
        phase=phase, seconds=seconds, steady_s=seconds, place_s=place_s, role=role, rank=rank, place=group.place,
        does=what_it_does(group.place) if phase == "input_wait" else "", whole=None if is_all else group.whole,
        parts=group.parts,
    )  # fmt: skip


def _training_groups(run: RunRecords, rank: int) -> tuple[list[PlaceGroup], list[PlaceTotal]]:
    """(the costs of a rank's training thread that have a place; its other samples)."""
    places = [place for place in run.places if place.role == "training" and place.rank == rank and not place.is_startup]
    in_steps: list[PlaceTotal] = []
    own: list[PlaceTotal] = []
    rest: list[PlaceTotal] = []
    have_steps = functions_with_steps(places)
    sees_compilations = "compilations of" in run.frameworks  # of JAX; not its steps
    beside = _lines_beside_steps(places) if sees_compilations else frozenset()
    for place in places:
        if not beside.isdisjoint(_calling_lines(place)):
            own.append(msgspec.structs.replace(place, kind="python"))
            continue
        steps, outside = _split(run, place, have_steps)
        if steps is not None:
            in_steps.append(steps)
        if outside is not None:
            (own if is_named(outside) else rest).append(outside)
    # a line that is more often in the steps than outside of them is that of the loop
    in_line = collections.Counter[tuple[str, str]]()
    for place in in_steps:
        in_line[place.line, place.call] += place.samples
    for place in own:
        in_line[place.line, place.call] -= place.samples
    of_loop = [place for place in own if in_line[place.line, place.call] > 0 and place.kind in _LOOP_KINDS]
    own = [place for place in own if not (in_line[place.line, place.call] > 0 and place.kind in _LOOP_KINDS)]
    step_lines: collections.Counter[str] = collections.Counter()
    for place in in_steps:
        step_lines.update(dict.fromkeys(lines_of(place), place.samples))
    # what a line of the loop encodes or decodes is no part of the loading, whose calls begin in the loader
    own = [
        msgspec.structs.replace(place, kind="python")
        if place.kind == "decode" and any(step_lines[line] for line in lines_of(place)[1:])
        else place
        for place in own
    ]
    as_steps = [msgspec.structs.replace(place, kind="compute") for place in (*in_steps, *of_loop)]
    return group_places(own, step_lines, have_steps), [*as_steps, *rest]


def _calling_lines(place: PlaceTotal) -> list[str]:
    """The lines that have called what a place does: its callers; after a step, its own line as well."""
    lines = lines_of(place)
    return lines if place.kind == AFTER_STEP else lines[1:]


def _lines_beside_steps(places: Sequence[PlaceTotal]) -> frozenset[str]:
    """Lines of a job whose steps no clock saw, as one of JAX, that call a function which draws samples or evaluates,
    though it computes as steps do. Such a function is _MIN_PYTHON or more in Python, or has the name of an evaluation
    and takes _MIN_NAMED of the time; the line that computes most is the training step."""
    own = [place for place in places if place.line]
    function_of = {place.line: place.function for place in own}
    counts: collections.Counter[str] = collections.Counter()
    named: collections.Counter[str] = collections.Counter()
    totals: collections.Counter[str] = collections.Counter()
    in_python: collections.Counter[str] = collections.Counter()
    for place in own:
        calls = {
            line for called, line in itertools.pairwise(lines_of(place))
            if CALLS["besides_training"].search(function_of.get(called, ""))
        }  # fmt: skip
        if place.kind == AFTER_STEP and CALLS["besides_training"].search(place.call.rpartition(".")[2]):
            calls.add(place.line)
        named.update(dict.fromkeys(calls, place.samples))
        if not calls and place.kind in ("compute", "sync", "compile", "comm", LOOP_IN_STEP, WITHOUT_GRADIENTS):
            counts[place.line] += place.samples
        for line in _calling_lines(place):
            totals[line] += place.samples
            in_python[line] += place.samples * (place.kind in ("python", "gc"))
    most = max(counts, key=lambda line: counts[line], default=None)
    of_step = {line for place in own if place.line == most for line in lines_of(place)}
    all_samples = sum(place.samples for place in own)
    return frozenset(
        line for line in totals.keys() - of_step
        if in_python[line] >= _MIN_PYTHON * totals[line] or named[line] >= _MIN_NAMED * all_samples
    )  # fmt: skip


def _split(
    run: RunRecords, place: PlaceTotal, have_steps: set[tuple[str, str]]
) -> tuple[PlaceTotal | None, PlaceTotal | None]:
    """(the part of a place that is in the training's own steps, the rest)."""
    if not place.line:
        return (place, None) if place.kind in _STEP_KINDS else (None, place)
    if place.kind == LOOP_IN_STEP and place.file_and_function not in have_steps:
        return None, place  # a function of the job with a loop, and no step
    if place.kind in _STEP_KINDS:
        return place, None
    # torch computes in the step itself on a CPU: nothing is waited for where a tensor is printed or made a list
    formats = run.computes_with_torch and "jax" not in run.frameworks
    if place.kind == "sync" and run.on_cpu and not formats:
        return place, None
    if place.kind in ("python", "gc") and not place.call and place.file_and_function in have_steps:
        return place, None  # what the interpreter takes in the loop
    leaves = {leaf: count for leaf, count in place.leaves.items() if CALLS["runs_step"].search(leaf)}
    if not leaves:
        return None, place
    steps = scale_to_leaves(place, leaves)
    outside = scale_to_leaves(place, {leaf: count for leaf, count in place.leaves.items() if leaf not in leaves})
    return steps, outside if outside.samples else None


def is_named(place: PlaceTotal) -> bool:
    """Whether a place of a training thread is one of the job's own code: no wait for a loader, no import, no call of
    the loop as a whole."""
    if not place.line or any(CALLS[name].search(place.call) for name in ("loader", "starts", "loop")):
        return False
    if place.kind == "idle":
        return bool(place.call) and not CALLS["iterates"].search(place.call)
    if place.kind == "input_wait":
        return not CALLS["iterates"].search(place.call)
    return place.kind != "comm" or not place.call.endswith("backward")


# Waits for others, and for cores


def _divide_wait(run: RunRecords, cost: Cost, groups: Mapping[str, list[PlaceGroup]]) -> list[Cost]:
    """A wait for input, or of a line for threads and processes of the job, by what these did meanwhile: the largest
    place first, which costs as much of the wait as one of them spends there, since it would deliver so much sooner
    without it; what is left of the wait is the next ones', and what blocks counts after what works. groups: what
    each role did."""
    by_role: list[list[tuple[str, PlaceGroup]]] = []
    if cost.phase == "input_wait" and cost.place is None:
        by_role = [[(role, group) for group in groups[role]] for role in ("worker", "thread")]
    elif cost.place is not None and cost.place.kind == "idle" and CALLS["awaits"].search(cost.place.call):
        by_role = [[(role, group) for role in ("thread", "worker") for group in groups[role]]]
    divided: list[Cost] = []
    left_s = cost.steady_s
    for role, group in sorted(next(filter(None, by_role), []), key=_suspicion):
        seconds = min(left_s, _part_of_process(run, group, role) * run.steady.wall_s)
        if seconds > 0:
            made = _make_cost(group, cost.phase, seconds, cost.rank, seconds, role)
            divided.append(msgspec.structs.replace(made, awaited_in=cost.place, does=what_it_does(group.place)))
            left_s -= seconds
    outside_s = cost.seconds - cost.steady_s
    if left_s + outside_s > 0:
        place_s = cost.place_s * left_s / cost.steady_s if cost.steady_s > 0 else cost.place_s
        divided.append(msgspec.structs.replace(cost, seconds=left_s + outside_s, steady_s=left_s, place_s=place_s))
    return divided


def _suspicion(of_role: tuple[str, PlaceGroup]) -> tuple[bool, bool, float]:
    """Sorts who may be waited for: what works first, then what blocks, and what sleeps, as a clock does, last."""
    place = of_role[1].place
    return place.kind == "idle", place.call == "time.sleep", -of_role[1].whole.seconds


def _part_of_process(run: RunRecords, group: PlaceGroup, role: str) -> float:
    """Fraction of the time of a worker, or of one of the threads, that was in some places."""
    sampled_s = sum(seconds for (of, _), seconds in run.place_totals.items() if of == role)
    return group.whole.seconds / sampled_s if sampled_s > 0 else 0.0


def _divide_steps(run: RunRecords, cost: Cost, groups: Sequence[PlaceGroup]) -> list[Cost]:
    """Steps on a CPU that loader workers slow, whose threads want the same cores: the part by which they do is a cost
    of what the workers do, in `groups`, apart from the steps."""
    taken = taken_by_children(run) if cost.phase == "compute" and cost.steady_s > 0 else 0.0
    if not taken:
        return [cost]
    worked_s = sum(group.whole.seconds for group in groups)
    divided: list[Cost] = []
    for group in groups:
        seconds = taken * cost.steady_s * group.whole.seconds / worked_s
        divided.append(_make_cost(group, TAKES_CORES, seconds, cost.rank, seconds, "worker"))
    left_s = sum(part.seconds for part in divided)
    return [*divided, msgspec.structs.replace(cost, seconds=cost.seconds - left_s, steady_s=cost.steady_s - left_s)]


def _waited_groups(run: RunRecords, role: str) -> list[PlaceGroup]:
    """What the workers of all ranks did, but for waits for a task; what reads or sleeps in own code is no such wait.
    What reads, decodes and works is divided, as these have different causes."""
    by_what: dict[str, list[PlaceTotal]] = {}
    for place in run.places:
        if place.role != role or place.is_startup or not place.line or CALLS["loader"].search(place.call):
            continue
        if (place.kind == "idle" and not place.call) or CALLS["starts"].search(place.call):
            continue
        by_what.setdefault(what_it_does(place), []).append(place)
    return [found for places in by_what.values() for found in group_places(places)]
