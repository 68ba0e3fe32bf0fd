"""What the Python stacks of a job say: the kind of work, the role of a process, and the line of its own code it was in.

Pure functions over frames. `knowledge/frames.toml` has functions of frameworks by file and name; other frames
are the job's own code, and `find_place` says in which of its lines the thread was. `calls.py` reads what such a line
calls. Who samples: `stacks.py`, and of this process `own_stacks.py`.
"""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from stoker_watch.knowledge import read_toml
from stoker_watch.recording.calls import WRAPPER, LoopLine, find_call, find_loop, is_wrapper, read_source_lines
from stoker_watch.runs.schemas import AFTER_STEP, LOOP_IN_STEP, WITHOUT_GRADIENTS, Place, StackWindow

MAX_FRAMES = 5
MAX_CALLERS = 6
MAX_PLACES, MAX_LEAVES = 40, 25
"""Places of a line; of these, those with their innermost frame: a figure that is drawn has hundreds. The rest is one
sum."""

KINDS = (
    "input_wait", "decode", "compute", "sync", "comm", "checkpoint", "compile", "gc", "python", "other", "idle",
)  # fmt: skip
"""Kinds of work of the main thread; docs/run-folder.md describes them."""

MIN_TRAINING = 0.1
"""Samples of training for each one of a helper from which a process trains: a launcher sleeps (heuristic)."""
HELPER = "helper"
"""A process that does not train: a loader worker, a launcher. Not one of KINDS."""


class Frame(NamedTuple):
    """A frame; a stack has the innermost frame first. function: may include its class; end: line and column, in bytes
    of UTF-8, at which the expression ends that it runs; None: not known, or no code of the job."""

    function: str
    file: str
    line: int
    end: tuple[int, int] | None = None


class FrameRule(NamedTuple):
    """A row of frames.toml, which explains the fields."""

    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    covers_callees: bool


def _rule(kind: str, file: str, function: str = ".+", covers_callees: bool = False) -> FrameRule:
    return FrameRule(kind, re.compile(f"(^|/)(?:{file})"), re.compile(f"(?:{function})$"), covers_callees)


_TABLE = read_toml("frames.toml")
RULES = {name: [_rule(**row) for row in _TABLE[name]] for name in ("worker", "frame", "idle", "part")}
_LINE_PATTERNS = [(row["kind"], re.compile(row["pattern"])) for row in _TABLE["line"]]

PACKAGE_ROOT = "/site-packages/stoker/"
"""How the files of a training of stoker's own begin (`own_stacks.py`)."""

_FILES, _CALLS = ({name: re.compile(text) for name, text in _TABLE[table].items()} for table in ("files", "calls"))
_LOADER_THREADS = {name: re.compile(text) for name, text in _TABLE["loader_threads"].items()}
_FILES["host"] = re.compile(rf"/(site|dist)-packages/({'|'.join(_TABLE['host_packages'])})/")
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(\w+)")


Stack = list[Frame]
Samples = list[tuple[Stack, int]]
"""Stacks of a main thread, each with its number of samples."""


def find_role(samples: Samples) -> str:
    """The role of a process by its stacks: "training", "worker", HELPER; empty: they tell nothing, as an import."""
    counts: collections.Counter[str] = collections.Counter()
    for stack, count in samples:
        rule = _find_worker_rule(stack)
        kind = rule.kind if rule is not None else classify(stack, active=False)
        if rule is not None or kind == HELPER:
            counts["worker" if kind == "worker" else HELPER] += count
        elif kind not in ("other", "idle"):  # a launcher imports the framework, too
            counts["training"] += count
    # also one that was a fork a moment ago, or starts processes; imports of a launcher have a few such samples
    if counts["training"] and counts["training"] >= MIN_TRAINING * counts[HELPER]:
        return "training" if counts["training"] >= counts["worker"] else "worker"
    return next((role for role in ("worker", HELPER) if counts[role]), "")


CompiledCalls = set[tuple[str, str]]
"""(line, call) in which JAX has compiled a function of the job, whose runs have no Python frame of their own."""


def make_window(
    samples: Samples,
    *,
    role: str,
    cwd: str = "",
    runnable: float | None = None,
    compiled: CompiledCalls | None = None,
    **fields: Any,
) -> StackWindow | None:
    """The line of some samples; None without any. runnable: fraction of the time in which the thread could run;
    compiled: of earlier lines of the process, to be extended; fields: further ones of `StackWindow`."""
    total = sum(count for _, count in samples)
    if not total:
        return None
    compiled = set() if compiled is None else compiled
    places: collections.Counter[Place] = collections.Counter()
    callers: dict[Place, collections.Counter[str]] = {}
    main_thread: collections.Counter[str] = collections.Counter()
    frames: collections.Counter[str] = collections.Counter()
    for stack, count, kind in _classify_samples(samples, role, runnable, compiled):
        resolved, place, called_by = _describe_sample(stack, kind, role, cwd, compiled)
        main_thread[resolved] += count
        places[place] += count
        callers.setdefault(place, collections.Counter())[called_by] += count
        if (job_frame := innermost_job_frame(stack, cwd)) is not None:
            frames[job_frame] += count
    return StackWindow(
        samples=total,
        main_thread={kind: count / total for kind, count in main_thread.most_common()},
        frames={name: count / total for name, count in frames.most_common(MAX_FRAMES)},
        role=role,
        places=_list_places(places, callers, total),
        **fields,
    )


def _classify_samples(
    samples: Samples, role: str, runnable: float | None, compiled: CompiledCalls
) -> list[tuple[Stack, int, str]]:
    """Each stack, of a worker inside of its loop, with its samples and the kind of work. Extends `compiled`."""
    found: list[tuple[Stack, int, str]] = []
    for stack, count in samples:
        inner = _inside_worker(stack) if role == "worker" else stack
        kind = classify(inner, active=False)
        found.append((inner, count, "idle" if kind == HELPER else kind))
    # Frames that no rule knows may wait: the CPU time that is left for them does.
    unknown = sum(count for stack, count, kind in found if stack and kind == "idle" and not _is_waiting(stack))
    busy = sum(count for _, count, kind in found if kind in ("compute", "decode", "compile"))
    active = runnable is None or runnable * sum(count for _, count in samples) - busy >= unknown / 2
    compiled.update(at for stack, _, kind in found if kind == "compile" and (at := _find_compiled(stack)))
    return [(stack, count, _resolve_kind(stack, kind, compiled, active=active)) for stack, count, kind in found]


def _resolve_kind(stack: Stack, kind: str, compiled: CompiledCalls, *, active: bool) -> str:
    """The kind of work, with what the other stacks of the window say. active: a thread whose frames no rule knows
    works."""
    if kind == "idle":
        kind = classify(stack, active=active and not _is_waiting(stack))
    if compiled and kind in ("python", "idle") and _line_and_call(stack) in compiled:
        kind = "compute"
    if kind == "compute" and _any_in("host", _called_by_job(stack)):
        return "python"  # as a figure, whose package computes on the host alone
    if kind == "compile" and _CALLS["export"].match(_line_and_call(stack)[1]):
        return "python"  # a model is traced to be written to a file, which no step needs
    return "idle" if kind == HELPER else kind


def _describe_sample(stack: Stack, kind: str, role: str, cwd: str, compiled: CompiledCalls) -> tuple[str, Place, str]:
    """(kind of work, place, its callers) of a stack."""
    part = find_part(stack)
    is_users = not part or any(map(is_job_code, stack))
    of_place, own = kind, None
    if role == "training" and kind in ("compute", "sync") and is_users:
        kind, of_place, own = _place_of_training(stack, kind, compiled)
    line, function, call, leaf = find_place(stack, cwd if is_users else PACKAGE_ROOT, own)
    if not is_users:
        line, function = "", f"{function} ({line})"
        kind = of_place = "python" if kind == "other" and not _is_importing(stack) else kind
    place = Place(line=line, function=function, call=call, leaf=leaf, kind=of_place, part=part, samples=0)
    return kind, place, find_callers(stack, cwd, own) if line else ""


def _list_places(
    places: collections.Counter[Place], callers: dict[Place, collections.Counter[str]], total: int
) -> list[Place]:
    """The places with the most samples, only MAX_LEAVES of them with their innermost frame, and the rest as one."""
    for key, _ in places.most_common()[MAX_LEAVES:]:
        if key.leaf:
            whole = msgspec.structs.replace(key, leaf="")
            places[whole] += places.pop(key)
            callers.setdefault(whole, collections.Counter()).update(callers.pop(key))
    listed = [
        msgspec.structs.replace(key, samples=count, callers=callers[key].most_common(1)[0][0])
        for key, count in places.most_common(MAX_PLACES)
    ]
    if rest := total - sum(place.samples for place in listed):
        listed.append(Place(kind="other", samples=rest))
    return listed


def _place_of_training(stack: Stack, kind: str, compiled: CompiledCalls) -> tuple[str, str, Frame | None]:
    """(kind of work, kind of its place, frame of that) of a training thread that computes or waits for the device. No
    frame: the innermost one of own code."""
    after_step = _line_after_step(stack)
    if after_step is None and _line_in_loop(stack, without_grad=True) is not None:
        return "python", "python", None  # it selects boxes or pairs one by one, and is no part of the model
    if kind != "compute":
        return kind, kind, None
    if after_step is not None:
        return kind, AFTER_STEP, after_step
    if (frame := _line_in_loop(stack)) is not None:
        return kind, LOOP_IN_STEP, frame
    if _runs_operations_of_jax(stack, compiled) or _is_gradient_hook(stack):
        return "python", "python", None  # it is no part of the step
    frame = _line_without_gradients(stack)
    return (kind, kind, None) if frame is None else (kind, WITHOUT_GRADIENTS, frame)


def _find_compiled(stack: Stack) -> tuple[str, str] | None:
    """(line, call) of a stack in which JAX compiles a function of the job; None: none, or one of its own."""
    found = _line_and_call(stack)
    if not _any_in("jax", stack) or not all(found):
        return None
    return None if any(map(_CALLS["jax"].match, (found[1], find_place(stack)[2]))) else found


def _runs_operations_of_jax(stack: Stack, compiled: CompiledCalls) -> bool:
    """Whether a line of the job calls a function of JAX that is in no compiled step: its operations run one by one."""
    if not _any_in("jax", stack) or _line_and_call(stack) in compiled:
        return False
    return _CALLS["jax"].match(find_place(stack)[2]) is not None


def _is_gradient_hook(stack: Stack) -> bool:
    """Whether a backward pass of torch has called own code that is no part of it, as what is done to each gradient."""
    inner = list(itertools.takewhile(lambda frame: not is_file_of("backward", frame.file), stack))
    return len(inner) < len(stack) and not _any_in("part_of_backward", inner) and any(map(is_job_code, inner))


def _line_and_call(stack: Stack) -> tuple[str, str]:
    """The innermost line of the job's own code, and what it calls by its text; empty: not known."""
    own = next(filter(is_job_code, stack), None)
    if own is None:
        return "", ""
    return f"{own.file}:{own.line}", find_call(own.file, own.line, _base_name(own.function), WRAPPER)


def find_trainer(samples: Samples, others: Mapping[int, Samples], known: int | None = None) -> int | None:
    """The thread that trains while the main one only waits for it: that computes gradients, or computes most of the
    time. None: the main one may train. samples, others: those of the main thread, and of the others.
    known: the one that did before."""
    if any(classify(stack, active=False) not in ("idle", "other") for stack, _ in samples):
        return None
    if known in others:
        return known
    computing = {
        thread: sum(count for stack, count in own if classify(stack, active=False) == "compute")
        for thread, own in others.items()
    }
    thread = max(computing, key=lambda thread: computing[thread], default=None)
    if thread is None or not computing[thread]:
        return None
    has_gradients = any(is_file_of("backward", frame.file) for stack, _ in others[thread] for frame in stack)
    is_most = 2 * computing[thread] >= sum(count for _, count in others[thread])
    return thread if has_gradients or is_most else None


def working_threads(
    others: Mapping[int, Samples], total: int, find_runnable: Callable[[int], float | None]
) -> list[tuple[str, Samples, float]]:
    """(role, samples of threads besides the main one in the job's own code, filled up to `total`, those of the main
    thread; fraction of them in which the thread could run): "worker", what a loader calls in its threads, also where
    it waits; "thread", other work, and apart from it what blocks, but for waits for work. find_runnable: fraction of
    the time in which a thread could run, None if it ended; where that is much less, it blocks."""
    loads, works, blocks = _ThreadSamples("worker"), _ThreadSamples("thread"), _ThreadSamples("thread")
    for thread, samples in others.items():
        runnable = find_runnable(thread)
        of_loader, active, idle = list[tuple[Stack, int]](), list[tuple[Stack, int]](), list[tuple[Stack, int]]()
        for stack, count in samples:
            inner = _inside_loader(stack)
            if any(map(is_job_code, inner)):
                of_loader.append((inner, count))
            elif any(map(is_job_code, stack)) and not _waits_for_work(stack):
                # of one that has ended, only what a rule knows
                is_active = classify(stack, active=runnable is not None) != "idle"
                (active if is_active else idle).append((stack, count))
        num_loads, num_active = (sum(count for _, count in of_kind) for of_kind in (of_loader, active))
        loads.add(of_loader, num_loads if runnable is None else min(runnable * total, num_loads))
        if runnable is None or runnable * total >= num_active / 2:
            works.add(active, num_active)
        else:
            idle = [*active, *idle]
        if runnable is not None:
            blocks.add(idle, 0.0)
    return [(of_role.role, *of_role.filled(total)) for of_role in (loads, works, blocks) if of_role.samples]


class _ThreadSamples:
    def __init__(self, role: str) -> None:
        self.role = role
        self.samples: Samples = []
        self._runnable = 0.0

    def add(self, samples: Samples, runnable: float) -> None:
        """runnable: number of the samples in which the thread could run."""
        self.samples += samples
        self._runnable += runnable

    def filled(self, total: int) -> tuple[Samples, float]:
        num_own = sum(count for _, count in self.samples)
        filler: Samples = [([], total - num_own)] if num_own < total else []
        return [*self.samples, *filler], self._runnable / max(total, num_own)


def _waits_for_work(stack: Sequence[Frame]) -> bool:
    """Whether a thread waits for another one: for a task, for room in a queue, for a result."""
    return bool(stack) and is_file_of("waits_for_work", stack[0].file)


def _inside_loader(stack: Sequence[Frame]) -> Stack:
    """The frames inside of the innermost one of a loader; empty: no loader has called them."""
    index = next((index for index, frame in enumerate(stack) if is_file_of("loader_thread", frame.file)), 0)
    return list(stack[:index])


def find_loader(threads: Iterable[Samples]) -> str:
    """Row of `loader_threads` of what runs the job's code in most samples of a process; empty: none of them."""
    names: collections.Counter[str] = collections.Counter()
    for stack, count in itertools.chain.from_iterable(threads):
        if any(map(is_job_code, _inside_loader(stack))):
            around = (name for name, file in _LOADER_THREADS.items() if any(file.search(frame.file) for frame in stack))
            names[next(around, "")] += count
    return max(names, key=lambda name: names[name], default="")


def _find_worker_rule(stack: Sequence[Frame]) -> FrameRule | None:
    rules = (_find_rule("worker", frame.function, frame.file) for frame in stack)
    return next((rule for rule in rules if rule is not None), None)


def _inside_worker(stack: Sequence[Frame]) -> Stack:
    """What a loader worker does: the frames inside of its loop, without those of the loader itself."""
    inner = list(itertools.takewhile(lambda frame: _find_worker_rule([frame]) is None, stack))
    while inner and is_file_of("loader", inner[-1].file):
        inner.pop()
    return inner


def find_place(stack: Sequence[Frame], cwd: str = "", at: Frame | None = None) -> tuple[str, str, str, str]:
    """(line, function, call, leaf) of a stack, as in `Place`. A program that is installed as a whole has the frames of
    its own package as its own code. at: the frame of the line, if it is not the innermost one of own code."""
    stack = [frame for frame in stack if not is_file_of("around", frame.file)]
    own_index = _find_own(stack)
    if own_index is None:
        return "", "", "", _describe_leaf(stack[0]) if stack else ""
    index = own_index if at is None else stack.index(at)
    own = stack[index]
    callee = stack[index - 1] if index else None
    meant = next((frame for frame in reversed(stack[:index]) if not _is_wrapper(frame)), callee)
    for frame in dict.fromkeys((meant, callee)):
        function = "" if frame is None else WRAPPER if _is_wrapper(frame) else _base_name(frame.function)
        if name := find_call(own.file, own.line, _base_name(own.function), function, own.end):
            break
    if meant is not None and not name:
        name = _module_path(meant)
    # imports have thousands of innermost frames
    leaf = _describe_leaf(stack[0]) if index > 1 and not name.startswith("import ") else ""
    line = f"{_relative_file(own.file, cwd)}:{own.line}"
    if not is_job_code(own):  # its class says which of many transforms it is
        return line, own.function.rpartition("<locals>.")[2], name, leaf
    outer = (_base_name(frame.function) for frame in stack[index:] if frame.file == own.file)
    function = next((text for text in outer if not text.endswith(("comp>", "genexpr>", "lambda>"))), "")
    return line, function or _base_name(own.function), name, leaf


def _find_own(stack: Sequence[Frame]) -> int | None:
    """The position of the innermost frame of own code; None: there is none."""
    is_own = [is_job_code(frame) and not is_file_of("console_script", frame.file) for frame in stack]
    if True not in is_own:
        packages = [found[1] if (found := _PACKAGE.search(frame.file)) else "" for frame in stack]
        package = next((name for name in reversed(packages) if name), None)
        is_own = [name == package for name in packages]
    return is_own.index(True) if True in is_own else None


def find_callers(stack: Sequence[Frame], cwd: str = "", at: Frame | None = None) -> str:
    """`Place.callers` of a stack, up to what a loader has called. at: as of `find_place`."""
    if at is None and any(map(is_job_code, inside := _inside_loader(stack))):
        stack = inside
    own = [frame for frame in stack if is_job_code(frame) and not is_file_of("console_script", frame.file)]
    if at is not None:
        own = own[own.index(at) :]
    outer = [frame for inner, frame in itertools.pairwise(own) if frame[:2] != inner[:2] and frame[1:3] != inner[1:3]]
    return " < ".join(f"{_relative_file(frame.file, cwd)}:{frame.line}" for frame in outer[:MAX_CALLERS])


def _line_after_step(stack: Sequence[Frame]) -> Frame | None:
    """The frame of the training loop, if it is in a line after the step; None: it is not."""
    for index, frame in reversed([*enumerate(stack)]):
        if is_job_code(frame) and _loop_line(frame).is_after_step:
            # a function of the line itself, as a lambda, says more than the line
            while index and stack[index - 1][1:3] == frame[1:3]:
                index -= 1
            return stack[index]
    return None


def _line_in_loop(stack: Sequence[Frame], *, without_grad: bool = False) -> Frame | None:
    """The innermost frame of own code in a Python loop inside of the training step; None: none, or one over layers.
    without_grad: of the loops with gradients off alone, in a step of the job's own."""
    found: Frame | None = None
    called = _called_by_job(stack)
    for frame in stack[len(called) :] if _any_in("loss", called) else stack:  # without a loss, called as a module
        if found is None and is_file_of("layer", frame.file):
            return None
        if not is_job_code(frame):
            if found is not None and not without_grad and is_file_of("trainer", frame.file):
                return found
            continue
        at = _loop_line(frame)
        if found is None and at.in_loop and (at.without_grad or not without_grad):
            found = frame
        if at.has_step:
            return found if at.in_step else None
    return None


def _line_without_gradients(stack: Sequence[Frame]) -> Frame | None:
    """The outermost frame of own code in a line with gradients off, of a stack that runs layers; None: none."""
    own = reversed([frame for frame in stack if is_job_code(frame)]) if _any_in("layer", stack) else ()
    return next((frame for frame in own if _loop_line(frame).without_grad), None)


def _loop_line(frame: Frame) -> LoopLine:
    return find_loop(frame.file, frame.line, _base_name(frame.function))


def find_part(stack: Sequence[Frame]) -> str:
    """The part of stoker that a stack of its own training is in, by its outermost frame in frames.toml; else empty."""
    if not stack or not stack[-1].file.startswith(PACKAGE_ROOT):
        return ""
    rules = (_find_rule("part", frame.function, frame.file) for frame in reversed(stack))
    return next((rule.kind for rule in rules if rule is not None), "training loop")


def _is_wrapper(frame: Frame) -> bool:
    return is_wrapper(_base_name(frame.function), frame.file)


def _describe_leaf(frame: Frame) -> str:
    return f"{_base_name(frame.function)} ({'/'.join(frame.file.split('/')[-2:])})"


def _module_path(frame: Frame) -> str:
    """How the function of an installed module is imported."""
    module = re.sub(
        r".*/(?:site|dist)-packages/|.*/lib/python[\d.]+t?/|^<frozen |>$|(/__init__)?\.pyc?$", "", frame.file
    )
    return f"{module.replace('/', '.')}.{_base_name(frame.function)}"


def is_job_code(frame: Frame) -> bool:
    """Whether the frame is in a file of the job: not installed, not of Python itself, not generated."""
    return is_job_file(frame.file)


def is_job_file(file: str) -> bool:
    """As `is_job_code`, by the path."""
    return bool(file) and not is_file_of("installed", file)


@functools.lru_cache(maxsize=32768)
def is_file_of(kind: str, file: str) -> bool:
    """kind: a row of `files` in frames.toml."""
    return _FILES[kind].search(file) is not None


def _any_in(kind: str, stack: Sequence[Frame]) -> bool:
    return any(is_file_of(kind, frame.file) for frame in stack)


def _called_by_job(stack: Sequence[Frame]) -> Sequence[Frame]:
    """The frames inside of the innermost one of the job's own code."""
    return list(itertools.takewhile(lambda frame: not is_job_code(frame), stack))


def classify(stack: Sequence[Frame], *, active: bool) -> str:
    """The kind of work of a thread: one of KINDS or HELPER. stack: innermost frame first; active: it is runnable."""
    if _find_worker_rule(stack) is not None:
        return HELPER
    if _is_importing(stack):
        return "other"
    # code of an import is not training
    rules = [_find_rule("frame", frame.function, frame.file) for frame in stack
             if frame.function != "<module>" or "importlib" in frame.file]  # fmt: skip
    kinds = [rule.kind for rule in rules if rule is not None]
    covering_kind = next((rule.kind for rule in reversed(rules) if rule is not None and rule.covers_callees), None)
    line_kind = _kind_from_source_line(stack[0]) if stack else None
    if covering_kind == "input_wait" and "decode" in (kinds[0], line_kind):
        return "decode"  # a loader without workers: the training thread decodes
    if kind := covering_kind or line_kind or next(iter(kinds), None):
        return kind
    if not active or _is_waiting(stack):
        return "idle"
    return "python" if any(is_job_code(frame) for frame in stack) else "other"


def innermost_job_frame(stack: Sequence[Frame], cwd: str = "") -> str | None:
    """`function (file:line)` of the innermost frame in a file of the job, relative to its working directory `cwd`."""
    frame = next(filter(is_job_code, stack), None)
    if frame is None:
        return None
    return f"{frame.function.rpartition('<locals>.')[2]} ({_relative_file(frame.file, cwd)}:{frame.line})"


def _relative_file(file: str, cwd: str) -> str:
    """Relative to the working directory, or its last parts."""
    if cwd and file.startswith(cwd.rstrip("/") + "/"):
        return file[len(cwd.rstrip("/")) + 1 :]
    return "/".join(file.split("/")[-3:]) if file.count("/") > 2 else file


def _is_waiting(stack: Sequence[Frame]) -> bool:
    """Whether the innermost function is known to wait without a core."""
    if not stack:
        return False
    return _find_rule("idle", *stack[0][:2]) is not None or _kind_from_source_line(stack[0]) == "idle"


def _is_importing(stack: Sequence[Frame]) -> bool:
    return any(_base_name(frame.function) == "_find_and_load" for frame in _called_by_job(stack))


@functools.lru_cache(maxsize=32768)
def _find_rule(table: str, function: str, file: str) -> FrameRule | None:
    """The first row of a table of frames.toml that matches a frame."""
    name = _base_name(function)
    return next((rule for rule in RULES[table] if rule.file.search(file) and rule.function.match(name)), None)


def _base_name(function: str) -> str:
    """The function's name without its class and enclosing functions."""
    return function.rpartition(".")[2]


def _kind_from_source_line(frame: Frame) -> str | None:
    """The kind by the text of the source line, if the frame is in a file of the job."""
    if not is_job_code(frame) or not frame.file.startswith("/") or not frame.file.isprintable():
        return None
    text = "".join(read_source_lines(frame.file)[frame.line - 1 : frame.line])
    return next((kind for kind, pattern in _LINE_PATTERNS if pattern.search(text)), None)
