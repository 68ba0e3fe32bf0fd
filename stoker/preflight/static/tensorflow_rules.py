"""What a TensorFlow script does that wastes a GPU: its tf.data pipelines, strategies and switches.

Sources: tensorflow.org/guide/data_performance (parallel mapping, prefetching, vectorizing, caching),
tensorflow.org/tutorials/distribute/input (global batch), the API pages of the functions named. A map after `batch` is
what the guide advises for cheap, vectorized work; only work that is done for one image at a time is reported there. The
texts are in `knowledge/check_files.toml`.
"""

import ast
import bisect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.findings.finding import Finding
from stoker.preflight.catalog import describe_file
from stoker.preflight.static.names import SCRIPTS
from stoker.preflight.static.source import Source, argument, is_constant, keyword

MAX_STEPS = 100
"""Methods of one pipeline that are followed back to its source."""
_HEAVY = f"{SCRIPTS.one_image}|{SCRIPTS.heavy}"


@dataclass(frozen=True)
class Step:
    """One method of a pipeline, or what its source does by itself."""

    method: str
    call: ast.Call | None
    conditions: dict[ast.AST, bool]

    def follows_always(self, earlier: "Step") -> bool:
        """Whether at most one of both is conditional, so that they are known to be used together."""
        return not earlier.conditions or not self.conditions or earlier.conditions == self.conditions


@dataclass(frozen=True)
class Pipeline:
    steps: tuple[Step, ...]
    root: str
    """The dotted name of its source; empty if unknown."""


def check_tensorflow(source: Source) -> list[Finding]:
    """All findings of a script that imports TensorFlow or Keras."""
    if not source.imports("tensorflow", "keras", "tensorflow_datasets"):
        return []
    found = [finding for pipeline in _pipelines(source) for finding in _check_pipeline(source, pipeline)]
    found += [*_no_prefetch(source), *_replicas(source), *_switches(source)]
    first = {(finding.id, finding.place): finding for finding in reversed(found)}  # steps may be part of two pipelines
    return [finding for finding in found if first[finding.id, finding.place] is finding]


def _pipelines(source: Source) -> Iterator[Pipeline]:
    """Each longest chain of dataset methods, with the chains of the variables that it begins with."""
    seen: set[ast.AST | None] = set()
    for call in sorted(source.calls, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0), reverse=True):
        if isinstance(call.func, ast.Attribute) and call.func.attr in SCRIPTS.methods and call not in seen:
            pipeline = _pipeline(source, call)
            seen.update(step.call for step in pipeline.steps)
            methods = {step.method for step in pipeline.steps}
            if (
                pipeline.root
                or methods & SCRIPTS.only_dataset
                or any(_is_parallel(step.call) for step in pipeline.steps)
            ):
                yield pipeline


def _is_parallel(call: ast.Call | None) -> bool:
    return call is not None and any(value.arg == "num_parallel_calls" for value in call.keywords)


def _pipeline(source: Source, end: ast.expr) -> Pipeline:
    steps: list[Step] = []
    node: ast.AST = end
    seen: set[ast.AST] = set()
    root = ""
    while node not in seen and len(steps) < MAX_STEPS:
        seen.add(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SCRIPTS.methods:
            root = source.called(node)
            if re.fullmatch(SCRIPTS.dataset, root):
                break
            root = ""
            steps.append(Step(node.func.attr, node, source.conditions(node)))
            node = node.func.value
        elif isinstance(node, ast.Name):
            value = _definition(source, node)
            if value is None:
                if _is_annotated(source, node):
                    root = "tensorflow.data.Dataset"
                break
            node = value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            root = source.called(node)
            root = root if re.fullmatch(SCRIPTS.dataset, root) else ""
            break
    if (
        isinstance(node, ast.Call)
        and re.fullmatch(SCRIPTS.batched_dataset, root)
        and not is_constant(keyword(node, "batch_size"), None)
    ):
        steps.append(Step("batch", None, {}))
        if not is_constant(keyword(node, "shuffle"), False):
            steps.append(Step("shuffle", None, {}))
    return Pipeline(tuple(reversed(steps)), root)


def _definition(source: Source, name: ast.Name) -> ast.expr | None:
    """The value of the last assignment before a use, in the same function or, for a constant, in the module."""
    use = next((parent for parent, _ in source.ancestors(name) if isinstance(parent, ast.stmt)), name)
    assignments = source.assigned_in.get((name.id, source.scope(name)), [])
    uses = source.conditions(name)
    first = bisect.bisect_left(assignments, getattr(use, "lineno", 0), key=lambda pair: pair[0].lineno)
    for statement, value in reversed(assignments[max(0, first - MAX_STEPS) : first]):
        conditions = source.conditions(statement)
        if all(uses.get(condition, branch) == branch for condition, branch in conditions.items()):
            return value
    return None


def _is_annotated(source: Source, name: ast.Name) -> bool:
    scope = source.scope(name)
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    arguments = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
    return any(
        value.arg == name.id
        and value.annotation is not None
        and source.dotted(value.annotation).endswith("data.Dataset")
        for value in arguments
    )


def _work(source: Source, step: Step, pattern: str) -> str:
    """What the function of a map calls that matches; empty if nothing, or if the function is not in this script."""
    if step.call is None or step.method != "map":
        return ""
    mapped = argument(step.call, 0, "map_func")
    function = source.function(mapped)
    calls = source.reached_calls(function) if function is not None else []
    for call in calls:
        for name in (source.called(call), *_layers_of(source, call.func)):
            if name and re.fullmatch(pattern, name):
                return name.replace("tensorflow.", "tf.", 1).replace("tf.keras.layers.", "layers.")
    return next((name for name in _layers_of(source, mapped) if re.fullmatch(pattern, name)), "")


def _layers_of(source: Source, node: ast.AST | None) -> list[str]:
    """The layers that a variable like `augmentation = keras.Sequential([RandomFlip()])` is made of."""
    if not isinstance(node, ast.Name):
        return []
    found: list[str] = []
    for _statement, value in source.assigned.get(node.id, []):
        inner = source.function(value.func) if isinstance(value, ast.Call) else None
        for call in (*ast.walk(value), *(source.reached_calls(inner) if inner else [])):
            name = source.called(call).rpartition(".")[2]
            if re.fullmatch(r"Random[A-Z]\w*", name):
                found.append(f"layers.{name}")
    return found


def _check_pipeline(source: Source, pipeline: Pipeline) -> Iterator[Finding]:
    batched: Step | None = None
    random: tuple[Step, str] | None = None
    shuffled: Step | None = None
    for index, step in enumerate(pipeline.steps):
        place = f"{source.file}:{_method_line(step.call)}" if step.call else ""
        if step.method in SCRIPTS.batches:
            batched = step
        elif step.method == "unbatch":
            batched = None
        elif step.method == "shuffle":
            yield from _check_shuffle(source, step, batched, shuffled, place)
            shuffled, random = step, random or (step, "shuffle")
        elif step.method == "take":
            random = None  # a few elements that are cached are meant to be the same ones
        elif step.method == "cache" and random and step.follows_always(random[0]):
            what = _cached(random[1], pipeline.steps[index + 1 :])
            yield describe_file("cache_freezes_randomness", place, what=what)
        elif step.method == "map" and step.call is not None:
            yield from _check_map(source, step, step.call, batched, place)
            if name := _work(source, step, SCRIPTS.random):
                random = (step, name) if random is None or random[1] == "shuffle" else random


def _method_line(call: ast.Call) -> int:
    """The line of the method's name: a chain over several lines begins above it."""
    return (call.func.end_lineno or call.lineno) if isinstance(call.func, ast.Attribute) else call.lineno


def _check_map(source: Source, step: Step, call: ast.Call, batched: Step | None, place: str) -> Iterator[Finding]:
    if python := _work(source, step, SCRIPTS.python):
        yield describe_file("python_in_pipeline", place, name=python)
    heavy = _work(source, step, _HEAVY)
    starred = any(value.arg is None for value in call.keywords)
    if heavy and not python and len(call.args) < 2 and not _is_parallel(call) and not starred:
        yield describe_file("map_on_one_thread", place, name=heavy)
    if batched is None or batched.conditions:
        return
    if single := _work(source, step, SCRIPTS.one_image):
        yield describe_file("per_image_work_after_batch", place, name=single)
    if draw := _work(source, step, SCRIPTS.one_draw):
        yield describe_file("one_draw_per_batch", place, name=draw)


def _check_shuffle(
    source: Source, step: Step, batched: Step | None, shuffled: Step | None, place: str
) -> Iterator[Finding]:
    if step.call is None:
        return
    size = source.integer(argument(step.call, 0, "buffer_size"))
    if size in (0, 1):
        yield describe_file("shuffle_ineffective/buffer", place, size=size)
    elif batched is not None and shuffled is None and step.follows_always(batched):
        yield describe_file("shuffle_ineffective/batches", place)


def _cached(what: str, later: Sequence[Step]) -> str:
    if what != "shuffle":
        return f"{what} repeats the first epoch's random values"
    if any(step.method == "shuffle" for step in later):
        return "shuffle keeps the first epoch's order; only the later shuffle changes it"
    return "shuffle repeats the first epoch's order"


def _no_prefetch(source: Source) -> Iterator[Finding]:
    """A pipeline that is seen from its source to the `fit` that reads it, and is never prefetched."""
    if source.names & {"prefetch", "prefetch_to_device", "MirroredStrategy"} or source.imports("torch", "jax"):
        return
    for call in source.methods("fit"):
        data = argument(call, 0, "x")
        pipeline = _pipeline(source, data) if data is not None else None
        if pipeline is None or not pipeline.root.startswith("tensorflow"):
            continue
        maps = any(_work(source, step, _HEAVY) for step in pipeline.steps)
        if maps and any(step.method in SCRIPTS.batches for step in pipeline.steps):
            last = next((step.call for step in reversed(pipeline.steps) if step.call), call)
            yield describe_file("no_prefetch", source.place(last))


def _replicas(source: Source) -> Iterator[Finding]:
    """A constant global batch that is smaller than the number of devices of MirroredStrategy."""
    strategies = [call for call in source.calls if source.called(call).endswith("distribute.MirroredStrategy")]
    devices = argument(strategies[0], 0, "devices") if strategies else None
    count = len(devices.elts) if isinstance(devices, ast.List | ast.Tuple) else None
    if not strategies or count == 1:
        return
    for call in source.methods("fit", "experimental_distribute_dataset"):
        is_fit = isinstance(call.func, ast.Attribute) and call.func.attr == "fit"
        data = argument(call, 0, "x" if is_fit else "dataset")
        sizes = [(source.integer(keyword(call, "batch_size")), call)] if is_fit else []
        steps = _pipeline(source, data).steps if data is not None else ()
        batches = [step.call for step in steps if step.method in ("batch", "padded_batch") and step.call]
        sizes += [(source.integer(argument(batch, 0, "batch_size")), batch) for batch in batches]
        for size, at in sizes:
            if size is not None and 0 < size < (count or 2):
                replicas = f"{count} replicas" if count else "two or more GPUs"
                place = f"{source.file}:{_method_line(at)}"
                yield describe_file("batch_smaller_than_replicas", place, size=size, replicas=replicas)


def _switches(source: Source) -> Iterator[Finding]:
    for call in source.calls:
        if not source.runs_always(call):
            continue
        name, place = source.called(call), source.place(call)
        if name.endswith(("config.set_visible_devices", "config.experimental.set_visible_devices")):
            devices = argument(call, 0, "devices")
            is_gpu = source.text_of(argument(call, 1, "device_type")) == "GPU"
            if isinstance(devices, ast.List) and not devices.elts and is_gpu and not source.imports("torch", "jax"):
                yield describe_file("gpu_hidden/script", place, what='set_visible_devices([], "GPU")')
        elif name.endswith("ConfigProto") and isinstance(count := keyword(call, "device_count"), ast.Dict):
            pairs = zip(count.keys, count.values, strict=True)
            if any(source.text_of(key) == "GPU" and source.integer(value) == 0 for key, value in pairs):
                yield describe_file("gpu_hidden/script", place, what="device_count={'GPU': 0}")
        elif (name.endswith("run_functions_eagerly") and call.args and is_constant(call.args[0], True)) or (
            name.endswith(".compile") and is_constant(keyword(call, "run_eagerly"), True)
        ):
            yield describe_file("runs_eagerly", place)
