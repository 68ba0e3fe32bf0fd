"""What a training script does that wastes a GPU: tf.data pipelines, PyTorch's loaders and loops, devices, switches.

Sources: tensorflow.org/guide/data_performance (parallel mapping, prefetching, vectorizing, caching),
tensorflow.org/tutorials/distribute/input (global batch), PyTorch's performance tuning guide
(pytorch.org/tutorials/recipes/recipes/tuning_guide.html), the API pages of the functions named. A map after `batch` is
what TensorFlow's guide advises for cheap, vectorized work; only work that is done for one image at a time is reported
there. A rule that needs the whole program speaks only of a script that imports nothing but known libraries. The texts
are in `knowledge/check_files.toml`, names and switches in `knowledge/source_names.toml`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.findings.finding import Finding
from stoker.preflight.catalog import describe_file
from stoker.preflight.static.source import Source, argument, is_constant, keyword
from stoker.preflight.static.tables import SCRIPTS

MAX_STEPS = 100
"""Methods of one pipeline that are followed back to its source."""
_HEAVY = f"{SCRIPTS.one_image}|{SCRIPTS.heavy}"
_SYNCS = frozenset(("item", "cpu", "numpy", "tolist"))
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BUILT_IN = frozenset(("list", "tuple", "dict", "len", "enumerate", "zip", "map"))
_SHAPES = frozenset(("shape", "ndim", "size", "numel", "dim", "dtype"))
"""Attributes that are known without the GPU."""


def check_script(source: Source) -> list[Finding]:
    """All findings of a script."""
    found = list(_switches(source))
    if source.modules & {"tensorflow", "keras", "tensorflow_datasets"}:
        found += [finding for pipeline in _pipelines(source) for finding in _check_pipeline(source, pipeline)]
        found += [*_no_prefetch(source), *_replicas(source)]
    if "torch" in source.modules:
        found += [finding for rule in _TORCH_RULES for finding in rule(source)]
    first = {(finding.id, finding.place): finding for finding in reversed(found)}  # steps may be part of two pipelines
    return [finding for finding in found if first[finding.id, finding.place] is finding]


def _switches(source: Source) -> Iterator[Finding]:
    """A call or an assignment that hides the GPU or is for debugging, on every run."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            arguments = [ast.unparse(part) for part in (*node.args, *node.keywords)] if source.called(node) else []
            text = f"{source.called(node)}({', '.join(arguments)})"
        elif isinstance(node, ast.Assign):
            target = source.dotted(node.targets[0]) or ast.unparse(node.targets[0])
            text = f"{target} = {ast.unparse(node.value)}"
        else:
            continue
        for row in SCRIPTS.switches:
            if re.match(row.pattern, text) and not source.modules & row.unless and source.runs_always(node):
                is_set_again = isinstance(node, ast.Assign) and _times_set(source, node.targets[0]) > 1
                if not is_set_again:
                    yield describe_file(row.id, source.place(node), text=text)


def _times_set(source: Source, target: ast.expr) -> int:
    text = ast.unparse(target)
    return sum(isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == text for node in source.nodes)


# tf.data


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


def _pipelines(source: Source) -> Iterator[Pipeline]:
    """Each longest chain of dataset methods, with the chains of the variables that it begins with."""
    seen: set[ast.AST | None] = set()
    for call in sorted(source.calls, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0), reverse=True):
        if isinstance(call.func, ast.Attribute) and call.func.attr in SCRIPTS.methods and call not in seen:
            pipeline = _pipeline(source, call)
            seen.update(step.call for step in pipeline.steps)
            is_dataset = any(step.method in SCRIPTS.only_dataset or _is_parallel(step.call) for step in pipeline.steps)
            if pipeline.root or is_dataset:
                yield pipeline


def _is_parallel(call: ast.Call | None) -> bool:
    return call is not None and keyword(call, "num_parallel_calls") is not None


def _pipeline(source: Source, end: ast.expr) -> Pipeline:
    steps: list[Step] = []
    node: ast.AST | None = end
    seen: set[ast.AST] = set()
    while node is not None and node not in seen and len(steps) < MAX_STEPS:
        seen.add(node)
        if re.fullmatch(SCRIPTS.dataset, source.called(node)):
            break
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SCRIPTS.methods:
            steps.append(Step(node.func.attr, node, source.conditions(node)))
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            node = _definition(source, node) if isinstance(node, ast.Name) else None
    root = source.called(node) if node is not None else ""
    root = root if re.fullmatch(SCRIPTS.dataset, root) else ""
    is_batched = re.fullmatch(SCRIPTS.batched_dataset, root) and isinstance(node, ast.Call)
    if is_batched and isinstance(node, ast.Call) and not is_constant(keyword(node, "batch_size"), None):
        steps += [Step("batch", None, {}), Step("shuffle", None, {})]
    return Pipeline(tuple(reversed(steps)), root)


def _definition(source: Source, name: ast.Name) -> ast.expr | None:
    """The value of the last assignment before a use, in the same function or, for a constant, in the module."""
    use = next((parent for parent, _ in source.ancestors(name) if isinstance(parent, ast.stmt)), None)
    scope, uses, steps = source.scope(name), source.conditions(name), 0
    for assignment in reversed(source.assigned.get(name.id, [])):
        if use is None or assignment.scope is not scope or assignment.statement.lineno >= use.lineno:
            continue
        conditions = source.conditions(assignment.statement)
        if all(uses.get(condition, branch) == branch for condition, branch in conditions.items()):
            return assignment.value
        steps += 1
        if steps >= MAX_STEPS:
            break
    return None


def _work(source: Source, step: Step, pattern: str) -> str:
    """What the function of a map calls that matches; empty if nothing, or if the function is not in this script."""
    if step.call is None or step.method != "map":
        return ""
    mapped = argument(step.call, 0, "map_func")
    function = source.function(mapped)
    calls = source.reached_calls(function) if function is not None else []
    names = [name for call in calls for name in (source.called(call), *_layers_of(source, call.func))]
    name = next((name for name in (*names, *_layers_of(source, mapped)) if re.fullmatch(pattern, name)), "")
    return name.replace("tensorflow.", "tf.", 1)


def _layers_of(source: Source, node: ast.AST | None) -> list[str]:
    """The layers that a variable like `augmentation = keras.Sequential([RandomFlip()])` is made of."""
    assignments = source.assigned.get(node.id, []) if isinstance(node, ast.Name) else []
    calls = source.reached_calls(*(assignment.value for assignment in assignments))
    names = [source.called(call).rpartition(".")[2] for call in calls]
    return [f"layers.{name}" for name in names if re.fullmatch(r"Random[A-Z]\w*", name)]


def _check_pipeline(source: Source, pipeline: Pipeline) -> Iterator[Finding]:
    batched: Step | None = None
    random: tuple[Step, str] | None = None
    is_shuffled = False
    for step in pipeline.steps:
        place = source.place(step.call) if step.call else ""
        if step.method in SCRIPTS.batches:
            batched = step
        elif step.method == "unbatch":
            batched = None
        elif step.method == "shuffle":
            size = source.integer(argument(step.call, 0, "buffer_size")) if step.call else None
            if size in (0, 1):
                yield describe_file("shuffle_ineffective/buffer", place, size=size)
            elif step.call and batched is not None and not is_shuffled and step.follows_always(batched):
                yield describe_file("shuffle_ineffective/batches", place)
            is_shuffled, random = True, random or (step, "shuffle")
        elif step.method == "take":
            random = None  # a few elements that are cached are meant to be the same ones
        elif step.method == "cache" and random and step.follows_always(random[0]):
            yield describe_file("cache_freezes_randomness", place, what=random[1])
        elif step.method == "map" and step.call is not None:
            yield from _check_map(source, step, step.call, batched, place)
            if name := _work(source, step, SCRIPTS.random):
                random = (step, name)


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


def _no_prefetch(source: Source) -> Iterator[Finding]:
    """A pipeline that is seen from its source to the `fit` that reads it, and is never prefetched."""
    if source.names & {"prefetch", "prefetch_to_device", "MirroredStrategy"} or source.modules & {"torch", "jax"}:
        return
    for call in source.methods("fit"):
        data = argument(call, 0, "x")
        pipeline = _pipeline(source, data) if data is not None else Pipeline((), "")
        maps = any(_work(source, step, _HEAVY) for step in pipeline.steps)
        last = next((step.call for step in reversed(pipeline.steps) if step.call), call)
        if maps and pipeline.root and any(step.method in SCRIPTS.batches for step in pipeline.steps):
            yield describe_file("no_prefetch", source.place(last))


def _replicas(source: Source) -> Iterator[Finding]:
    """A constant global batch that is smaller than the number of devices of MirroredStrategy."""
    strategies = [call for call in source.calls if source.called(call).endswith("distribute.MirroredStrategy")]
    devices = argument(strategies[0], 0, "devices") if strategies else None
    count = len(devices.elts) if isinstance(devices, ast.List | ast.Tuple) else 2
    for call in source.methods("fit", "experimental_distribute_dataset") if strategies and count > 1 else ():
        data = argument(call, 0, "x") or keyword(call, "dataset")
        steps = _pipeline(source, data).steps if data is not None else ()
        batches = [step.call for step in steps if step.method in ("batch", "padded_batch") and step.call]
        sizes = [(argument(batch, 0, "batch_size"), batch) for batch in batches]
        for node, at in (*sizes, (keyword(call, "batch_size"), call)):
            size = source.integer(node)
            if size is not None and 0 < size < count:
                yield describe_file("batch_smaller_than_replicas", source.place(at), size=size, count=count)


# PyTorch


def _on_cpu(source: Source) -> Iterator[Finding]:
    """A training that is seen whole and never names a device, or names the CPU only."""
    backwards = source.methods("backward")
    if not backwards or not source.is_self_contained or source.names & SCRIPTS.managed:
        return
    if any("cuda" in text.lower() or text in ("mps", "xpu", "auto") for text in (*source.strings, *source.names)):
        return
    moves = [call for call in source.methods("to", "to_empty") if call.args or call.keywords]
    for name in sorted({node.id for call in moves for node in ast.walk(call) if isinstance(node, ast.Name)}):
        value = source.only_value(ast.Name(name))
        if isinstance(value, ast.Call) and source.called(value) == "torch.device" and value.args:
            value = value.args[0]
        if isinstance(value, ast.Constant) and str(value.value).startswith("cpu"):
            at = source.assigned[name][0].statement
            if not source.conditions(at):
                yield describe_file("trains_on_cpu/device", source.place(at), name=name)
                return
    if not moves and not any("device" in name.lower() or name == "gpu" for name in source.names):
        yield describe_file("trains_on_cpu/never_moved", source.place(backwards[0]))


def _loaders(source: Source) -> Iterator[Finding]:
    """Loaders that read samples one by one. Not so: a TensorDataset, which is in memory; `batch_size=None`, where the
    data set hands out whole batches; arguments that are not seen (`**kwargs`)."""
    alone, unpinned = [], []
    for call in source.calls if "TensorDataset" not in source.names else ():
        is_hidden = any(value.arg is None for value in call.keywords) or is_constant(keyword(call, "batch_size"), None)
        if source.called(call) != "torch.utils.data.DataLoader" or is_hidden:
            continue
        workers, pinned = keyword(call, "num_workers"), keyword(call, "pin_memory")
        if len(call.args) < 6 and (workers is None or source.integer(workers) == 0):
            alone.append(call)
        elif len(call.args) < 8 and (pinned is None or is_constant(pinned, False)):
            unpinned.append(call)
    if alone:
        yield describe_file("loader_without_workers", source.place(alone[0]), lines=_lines(alone, "DataLoader"))
    if unpinned and source.methods("backward") and any("cuda" in text for text in (*source.strings, *source.names)):
        lines = _lines(unpinned, "DataLoader")
        yield describe_file("loader_without_pinned_memory", source.place(unpinned[0]), lines=lines)


def _lines(calls: list[ast.Call], what: str) -> str:
    return f"{what} in line {', '.join(map(str, sorted({call.lineno for call in calls})[:10]))}"


def _host_syncs(source: Source) -> Iterator[Finding]:
    """Calls in a training loop, on every step, that wait until the GPU has computed a value."""
    loops: dict[ast.AST, list[ast.Call]] = {}
    for call in source.methods("backward"):
        if (loop := _loop_of(source, call)) is not None:
            loops.setdefault(loop, []).append(call)
    for loop, backwards in loops.items():
        results = _results(source, loop, backwards)
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and _is_sync(node)]
        found = [
            call
            for call in calls
            if _values(*call.args, call.func) & results
            and _loop_of(source, call) is loop
            and not source.conditions(call, within=loop)
        ]
        if found:
            first = min(found, key=lambda call: (call.lineno, call.col_offset))
            text = ast.unparse(first)[:60]
            yield describe_file("host_sync_each_step", source.place(first), call=text, lines=_lines(found, "waits"))


def _loop_of(source: Source, node: ast.AST) -> ast.AST | None:
    """The innermost loop of the same function."""
    stops = (*_LOOPS, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    parent = next((parent for parent, _ in source.ancestors(node) if isinstance(parent, stops)), None)
    return parent if isinstance(parent, _LOOPS) else None


def _results(source: Source, loop: ast.AST, backwards: list[ast.Call]) -> set[str]:
    """Names in a loop for what the model computed: those that the loss is made of, and what is made of them."""
    nodes = list(ast.walk(loop))
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign)]
    inputs = _names(loop.target) if isinstance(loop, ast.For) else set()
    for node in assigned:
        if _names(node.value) & inputs and not any(map(_calls_model, ast.walk(node.value))):
            inputs |= _targets(node)
    modules = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    others = inputs | modules | source.aliases.keys() | {"scaler", "accelerator"}
    losses = {name for call in backwards for name in _names(call)} - others
    results, size = set(losses), 0
    while size != len(results):
        size = len(results)
        for node in assigned:
            if _targets(node) & losses:
                losses |= _names(node.value) - others
            if _targets(node) & losses or _values(node.value) & results:
                results |= losses | (_targets(node) - others)
    return results


def _calls_model(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _BUILT_IN


def _targets(node: ast.Assign | ast.AugAssign) -> set[str]:
    return _names(*(node.targets if isinstance(node, ast.Assign) else [node.target]))


def _names(*nodes: ast.AST) -> set[str]:
    return {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _is_sync(call: ast.Call) -> bool:
    """Whether a call gives a Python number or an array of the host."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _SYNCS and not call.args
    return isinstance(call.func, ast.Name) and call.func.id == "float" and len(call.args) == 1


def _values(*nodes: ast.AST) -> set[str]:
    """The names in expressions, except those that are on the host already, and of which only the shape is asked, which
    is known without the GPU."""
    found: set[str] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        is_shape = isinstance(node, ast.Attribute) and node.attr in _SHAPES
        is_number = isinstance(node, ast.Call) and (_is_sync(node) or "len" in _names(node.func))
        if not is_shape and not is_number:
            pending += ast.iter_child_nodes(node)
    return found


def _gradients(source: Source) -> Iterator[Finding]:
    optimizers = {
        name
        for name, assignments in source.assigned.items()
        if any(re.match(r"torch\.optim\.(?!lr_scheduler)", source.called(row.value)) for row in assignments)
    }
    steps = [call for call in source.methods("step") if _names(call.func) & optimizers]
    is_zeroed = source.names & {"zero_grad", "grad"}
    if source.methods("backward") and steps and not is_zeroed and source.is_self_contained:
        yield describe_file("gradients_not_zeroed", source.place(steps[0]))


def _parallel(source: Source) -> Iterator[Finding]:
    names = {source.called(call).rpartition(".")[2]: call for call in reversed(source.calls)}
    if call := names.get("DataParallel"):
        yield describe_file("data_parallel", source.place(call))
    if "DistributedDataParallel" not in names or not source.is_self_contained:
        return
    texts = " ".join((*source.names, *source.aliases.values())).lower()
    loader, sampler = names.get("DataLoader"), names.get("DistributedSampler")
    is_seen = loader is not None and all(value.arg is not None for value in loader.keywords)
    if loader and is_seen and not any(word in texts for word in SCRIPTS.divided):
        yield describe_file("sampler_missing", source.place(loader))
    shuffles = sampler is not None and not is_constant(keyword(sampler, "shuffle"), False)
    if sampler and shuffles and "set_epoch" not in source.names and source.methods("backward"):
        yield describe_file("sampler_epoch_missing", source.place(sampler))


_TORCH_RULES = (_on_cpu, _loaders, _host_syncs, _gradients, _parallel)
