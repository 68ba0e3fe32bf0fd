"""What a TensorFlow script does that wastes a GPU: its tf.data pipelines, strategies and switches.

Sources: tensorflow.org/guide/data_performance (parallel mapping, prefetching, vectorizing, caching),
tensorflow.org/tutorials/distribute/input (global batch), the API pages of the functions named. A map after `batch` is
what the guide advises for cheap, vectorized work; only work that is done for one image at a time is reported there.
"""

import ast
import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.preflight.findings import CheckFinding, make_finding
from stoker.preflight.static.source import Source, argument, is_constant, keyword

MAX_STEPS = 100
"""Methods of one pipeline that are followed back to its source."""
_ROOT = re.compile(
    r"(?:tensorflow(?:\.compat\.v[12])?\.data\.\w+(?:\.\w+)*|tensorflow_datasets\.load|"
    r"(?:tensorflow\.)?keras(?:\.preprocessing)?(?:\.utils)?\.(?:image|text|timeseries|audio)_dataset_from_\w+|"
    r".*\.utils\.image_dataset_from_directory)"
)
_BATCHED_ROOT = re.compile(r".*_dataset_from_directory")
_ONLY_TF_DATA = frozenset(("prefetch", "padded_batch", "interleave", "ragged_batch", "unbatch", "group_by_window"))
"""Methods by which a value is known to be a tf.data.Dataset."""
_METHODS = frozenset((
    "map", "batch", "padded_batch", "ragged_batch", "unbatch", "shuffle", "cache", "prefetch", "repeat", "take",
    "skip", "filter", "interleave", "flat_map", "apply", "zip", "with_options", "shard", "concatenate", "enumerate",
    "window", "take_while", "snapshot", "rejection_resample", "bucket_by_sequence_length",
))  # fmt: skip
_BATCHES = frozenset(("batch", "padded_batch", "ragged_batch", "bucket_by_sequence_length"))
_ONE_IMAGE = re.compile(
    r"tensorflow\.(?:(?:io|image)\.decode_(?:jpeg|png|image|bmp|gif|and_crop_jpeg)|io\.read_file|io\.parse_single_example|map_fn)"
)
"""Functions that take one image, file or example; map_fn calls one for each."""
_HEAVY = re.compile(
    _ONE_IMAGE.pattern + r"|tensorflow\.image\.(?:resize\w*|random_\w+|stateless_random_\w+|rot90|adjust_\w+)"
    r"|tensorflow\.io\.(?:parse_\w+|decode_\w+)"
    r"|(?:tensorflow\.)?(?:keras\.)?(?:.*\.)?layers\.(?:\w+\.)*Random\w+|tensorflow\.(?:py_function|numpy_function)"
)
_RANDOM = re.compile(
    r"tensorflow\.(?:image\.(?:random_|stateless_random_)\w+|random\.(?!set_seed|Generator)\w+)|(?:numpy\.)?random\.\w+"
    r"|(?:.*\.)?layers\.(?:\w+\.)*Random\w+"
)
_ONE_DRAW = re.compile(r"tensorflow\.image\.random_(?:brightness|contrast|hue|saturation|crop)")
"""These draw one number, whether they get one image or a batch."""
_PYTHON = re.compile(r"tensorflow\.(?:py_function|numpy_function|compat\.v1\.py_func|py_func)")


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
    end: ast.AST
    """The expression that it is the value of."""

    def index(self, *methods: str) -> int | None:
        return next((i for i, step in enumerate(self.steps) if step.method in methods), None)


def check_tensorflow(source: Source) -> list[CheckFinding]:
    """All findings of a script that imports TensorFlow or Keras."""
    if not source.imports("tensorflow", "keras", "tensorflow_datasets"):
        return []
    pipelines = list(_pipelines(source))
    found: list[CheckFinding] = []
    seen: set[tuple[str, str]] = set()
    for finding in (
        *(finding for pipeline in pipelines for finding in _check_pipeline(source, pipeline)),
        *_no_prefetch(source),
        *_replicas(source),
        *_switches(source),
    ):
        if (finding.id, finding.place) not in seen:
            seen.add((finding.id, finding.place))
            found.append(finding)
    return found


def _pipelines(source: Source) -> Iterator[Pipeline]:
    """Each longest chain of dataset methods, with the chains of the variables that it begins with."""
    seen: set[ast.AST | None] = set()
    for call in sorted(source.calls, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0), reverse=True):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS and call not in seen:
            pipeline = _pipeline(source, call)
            seen.update(step.call for step in pipeline.steps)
            methods = {step.method for step in pipeline.steps}
            if pipeline.root or methods & _ONLY_TF_DATA or any(_is_parallel(step.call) for step in pipeline.steps):
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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            root = source.called(node)
            if _ROOT.fullmatch(root):
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
            root = root if _ROOT.fullmatch(root) else ""
            break
    if (
        isinstance(node, ast.Call)
        and _BATCHED_ROOT.fullmatch(root)
        and not is_constant(keyword(node, "batch_size"), None)
    ):
        steps.append(Step("batch", None, {}))
        if not is_constant(keyword(node, "shuffle"), False):
            steps.append(Step("shuffle", None, {}))
    return Pipeline(tuple(reversed(steps)), root, end)


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


def _work(source: Source, step: Step, pattern: re.Pattern[str]) -> str:
    """What the function of a map calls that matches; empty if nothing, or if the function is not in this script."""
    if step.call is None or step.method != "map":
        return ""
    mapped = argument(step.call, 0, "map_func")
    function = source.function(mapped)
    calls = source.reached_calls(function) if function is not None else []
    for call in calls:
        for name in (source.called(call), *_layers_behind(source, call)):
            if name and pattern.fullmatch(name):
                return name.replace("tensorflow.", "tf.", 1).replace("tf.keras.layers.", "layers.")
    for name in _layers_of(source, mapped):
        if pattern.fullmatch(name):
            return name
    return ""


def _layers_behind(source: Source, call: ast.Call) -> list[str]:
    return _layers_of(source, call.func)


def _layers_of(source: Source, node: ast.AST | None) -> list[str]:
    """The layers that a variable like `augmentation = keras.Sequential([RandomFlip()])` is made of."""
    if not isinstance(node, ast.Name):
        return []
    found: list[str] = []
    for _statement, value in source.assigned.get(node.id, []):
        inner = source.function(value.func) if isinstance(value, ast.Call) else None
        for call in [
            *(n for n in ast.walk(value) if isinstance(n, ast.Call)),
            *(source.reached_calls(inner) if inner else []),
        ]:
            name = source.called(call)
            if re.fullmatch(r"Random[A-Z]\w*", name.rpartition(".")[2]):
                found.append(f"layers.{name.rpartition('.')[2]}")
    return found


def _check_pipeline(source: Source, pipeline: Pipeline) -> Iterator[CheckFinding]:
    batched: Step | None = None
    random: tuple[Step, str] | None = None
    shuffled: Step | None = None
    for index, step in enumerate(pipeline.steps):
        place = source.place(step.call.func) if step.call else ""
        if step.call is not None:
            place = f"{source.file}:{_method_line(step.call)}"
        if step.method in _BATCHES:
            batched = step
        elif step.method == "unbatch":
            batched = None
        elif step.method == "shuffle":
            yield from _check_shuffle(source, step, batched, shuffled, place)
            shuffled, random = step, random or (step, "shuffle")
        elif step.method == "take":
            random = None  # a few elements that are cached are meant to be the same ones
        elif step.method == "cache" and random and step.follows_always(random[0]):
            yield _cache_finding(random[1], place, pipeline, index)
        elif step.method == "map" and step.call is not None:
            yield from _check_map(source, step, batched, place)
            if name := _work(source, step, _RANDOM):
                random = (step, name) if random is None or random[1] == "shuffle" else random


def _method_line(call: ast.Call) -> int:
    """The line of the method's name: a chain over several lines begins above it."""
    return (call.func.end_lineno or call.lineno) if isinstance(call.func, ast.Attribute) else call.lineno


def _check_map(source: Source, step: Step, batched: Step | None, place: str) -> Iterator[CheckFinding]:
    call = step.call
    if call is None:
        return
    if python := _work(source, step, _PYTHON):
        yield make_finding(
            id="python_in_pipeline",
            severity="warning",
            title=f"{python} runs Python in the input pipeline",
            evidence="it holds Python's global lock, so num_parallel_calls does not make it faster",
            fix="write the function with tf operations (tf.io.read_file, tf.io.decode_jpeg, tf.image)",
            place=place,
        )
    heavy = _work(source, step, _HEAVY)
    starred = any(value.arg is None for value in call.keywords)
    if heavy and not python and len(call.args) < 2 and not _is_parallel(call) and not starred:
        yield make_finding(
            id="map_on_one_thread",
            severity="warning",
            title="This map runs on one thread",
            evidence=f"its function calls {heavy}, and num_parallel_calls is not given",
            fix=".map(f, num_parallel_calls=tf.data.AUTOTUNE)",
            place=place,
        )
    if batched is None or batched.conditions:
        return
    if single := _work(source, step, _ONE_IMAGE):
        yield make_finding(
            id="per_image_work_after_batch",
            severity="warning",
            title=f"{single} works on one image at a time, but this map gets whole batches",
            evidence="a batch is then one unit of work: its images are not spread over num_parallel_calls threads, "
            "or the operation refuses the batch. A map after batch pays for vectorized work only",
            fix="move this map in front of .batch(…), with num_parallel_calls=tf.data.AUTOTUNE",
            place=place,
        )
    if draw := _work(source, step, _ONE_DRAW):
        yield make_finding(
            id="one_draw_per_batch",
            severity="warning",
            title=f"{draw} after batch draws once for the whole batch",
            evidence="all images of a batch get the same change",
            fix="move this map in front of .batch(…) (image_dataset_from_directory: batch_size=None, then .batch), "
            "or use keras.layers.Random…",
            place=place,
        )


def _check_shuffle(
    source: Source, step: Step, batched: Step | None, shuffled: Step | None, place: str
) -> Iterator[CheckFinding]:
    if step.call is None:
        return
    size = source.integer(argument(step.call, 0, "buffer_size"))
    if size is not None and 0 <= size <= 1:
        yield make_finding(
            id="shuffle_ineffective",
            severity="warning",
            title=f"shuffle({size}) does not change the order",
            evidence="the next element is drawn from a buffer of this size",
            fix="a buffer of at least a few thousand samples, or of the whole set",
            place=place,
        )
    elif batched is not None and shuffled is None and step.follows_always(batched):
        yield make_finding(
            id="shuffle_ineffective",
            severity="warning",
            title="shuffle after batch changes the order of batches only",
            evidence="each batch has the same samples in every epoch, and the buffer holds whole batches in memory",
            fix="move .shuffle(…) in front of .batch(…)",
            place=place,
        )


def _cache_finding(what: str, place: str, pipeline: Pipeline, index: int) -> CheckFinding:
    is_order = what == "shuffle"
    again = any(step.method == "shuffle" for step in pipeline.steps[index + 1 :])
    if is_order and not again:
        title = "cache after shuffle repeats the first epoch's order"
    elif is_order:
        title = "cache after shuffle keeps the first epoch's order; only the later shuffle changes it"
    else:
        title = f"cache after {what} repeats the first epoch's random values"
    return make_finding(
        id="cache_freezes_randomness",
        severity="warning",
        title=title,
        evidence="what stands in front of cache is computed once, in the first epoch",
        fix="move .cache() in front of the random step: decode, cache, shuffle, augment, batch, prefetch",
        place=place,
    )


def _no_prefetch(source: Source) -> Iterator[CheckFinding]:
    """A pipeline that is seen from its source to the loop or `fit` that reads it, and is never prefetched."""
    if "prefetch" in source.names or "prefetch_to_device" in source.names or "MirroredStrategy" in source.names:
        return
    if source.imports("torch", "jax"):
        return
    for call in source.calls:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "fit"):
            continue
        data = argument(call, 0, "x")
        if data is None:
            continue
        pipeline = _pipeline(source, data)
        maps = any(_work(source, step, _HEAVY) for step in pipeline.steps)
        if pipeline.root.startswith("tensorflow") and maps and pipeline.index(*_BATCHES) is not None:
            yield make_finding(
                id="no_prefetch",
                severity="warning",
                title="The pipeline is not prefetched: the GPU waits while a batch is made",
                evidence="no .prefetch between the source and fit",
                fix="end it with .prefetch(tf.data.AUTOTUNE)",
                place=source.place(next((step.call for step in reversed(pipeline.steps) if step.call), call)),
            )


def _replicas(source: Source) -> Iterator[CheckFinding]:
    """A constant global batch that is smaller than the number of devices of MirroredStrategy."""
    strategy = next(
        (call for call in source.calls if source.called(call).endswith("distribute.MirroredStrategy")), None
    )
    if strategy is None:
        return
    devices = argument(strategy, 0, "devices")
    count = len(devices.elts) if isinstance(devices, ast.List | ast.Tuple) else None
    if count == 1:
        return
    for call in source.calls:
        if not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "fit":
            sizes = [(source.integer(keyword(call, "batch_size")), call)]
            data = argument(call, 0, "x")
        elif call.func.attr == "experimental_distribute_dataset":
            sizes, data = [], argument(call, 0, "dataset")
        else:
            continue
        if data is not None:
            steps = [
                step for step in _pipeline(source, data).steps if step.method in ("batch", "padded_batch") and step.call
            ]
            sizes += [(source.integer(argument(step.call, 0, "batch_size")), step.call) for step in steps if step.call]
        for size, at in sizes:
            if size is not None and 0 < size < (count or 2):
                replicas = f"{count} replicas" if count else "two or more GPUs"
                yield make_finding(
                    id="batch_smaller_than_replicas",
                    severity="warning",
                    title=f"A batch of {size} is divided between {replicas}: some get nothing",
                    evidence="with MirroredStrategy the batch size is that of all replicas together"
                    + (f"; devices: {source.place(strategy)}" if count else ""),
                    fix="batch_size = PER_GPU * strategy.num_replicas_in_sync",
                    place=f"{source.file}:{_method_line(at)}",
                )


def _switches(source: Source) -> Iterator[CheckFinding]:
    for call in source.calls:
        name = source.called(call)
        if not source.runs_always(call):
            continue
        if name.endswith(("config.set_visible_devices", "config.experimental.set_visible_devices")):
            devices = argument(call, 0, "devices")
            kind = source.text_of(argument(call, 1, "device_type"))
            if (
                isinstance(devices, ast.List)
                and not devices.elts
                and kind == "GPU"
                and not source.imports("torch", "jax")
            ):
                yield _hidden(source, call, 'set_visible_devices([], "GPU")')
        elif name.endswith("ConfigProto") and isinstance(count := keyword(call, "device_count"), ast.Dict):
            if any(
                source.text_of(k) == "GPU" and source.integer(v) == 0
                for k, v in zip(count.keys, count.values, strict=True)
            ):
                yield _hidden(source, call, "device_count={'GPU': 0}")
        elif (name.endswith("run_functions_eagerly") and call.args and is_constant(call.args[0], True)) or (
            name.endswith(".compile") and is_constant(keyword(call, "run_eagerly"), True)
        ):
            yield make_finding(
                id="runs_eagerly",
                severity="warning",
                title="Every operation is started from Python: tf.function is switched off",
                evidence="run_functions_eagerly and run_eagerly are for debugging",
                fix="remove it",
                place=source.place(call),
            )


def _hidden(source: Source, node: ast.AST, what: str) -> CheckFinding:
    return make_finding(
        id="gpu_hidden",
        severity="blocker",
        title=f"{what} hides all GPUs: the script trains on the CPU",
        evidence="it is set on every run",
        fix="remove the line",
        place=source.place(node),
    )
