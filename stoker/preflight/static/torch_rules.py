"""What a PyTorch script does that wastes a GPU: its loaders, its training loop, its devices and switches.

Sources: PyTorch's performance tuning guide (pytorch.org/tutorials/recipes/recipes/tuning_guide.html), the API pages of
DataLoader, DataParallel and DistributedSampler. A rule that needs the whole program speaks only of a script that
imports nothing but known libraries. The texts are in `knowledge/check_files.toml`.
"""

import ast
from collections.abc import Iterator

from stoker.findings.finding import Finding
from stoker.preflight.catalog import describe_file
from stoker.preflight.static.names import SCRIPTS
from stoker.preflight.static.source import Source, is_constant, keyword

_SYNCS = frozenset(("item", "cpu", "numpy", "tolist"))
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BUILT_IN = frozenset(("list", "tuple", "dict", "len", "enumerate", "zip", "map"))
_SHAPES = frozenset(("shape", "ndim", "size", "numel", "dim", "dtype"))
"""Attributes that are known without the GPU."""


def check_torch(source: Source) -> list[Finding]:
    """All findings of a script that imports torch."""
    found = list(_visible_devices(source))
    if source.imports("torch"):
        for rule in (_on_cpu, _loaders, _host_syncs, _gradients, _parallel, _switches):
            found += rule(source)
    return found


def _visible_devices(source: Source) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES, for every framework."""
    settings: list[tuple[ast.AST, ast.AST]] = []
    for node in source.nodes:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Subscript) and source.dotted(target.value).endswith("environ"):
                settings.append((target.slice, node.value))
        elif isinstance(node, ast.Call) and source.called(node) in ("os.environ.setdefault", "os.putenv"):
            settings += zip(node.args[:1], node.args[1:2], strict=False)
    chosen = [(key, value) for key, value in settings if source.text_of(key) == "CUDA_VISIBLE_DEVICES"]
    if len(chosen) == 1:
        key, value = chosen[0]
        text = source.text_of(value)
        if text is not None and text.strip() in ("", "-1") and source.runs_always(key):
            yield describe_file("gpu_hidden/environ", source.place(key), value=text)


def _backwards(source: Source) -> list[ast.Call]:
    return source.methods("backward")


def _on_cpu(source: Source) -> Iterator[Finding]:
    """A training that is seen whole and never names a device, or names the CPU only."""
    backwards = _backwards(source)
    if not backwards or not source.is_self_contained or source.names & SCRIPTS.managed:
        return
    if any("cuda" in text.lower() or text in ("mps", "xpu", "auto") for text in (*source.strings, *source.names)):
        return
    moves = [call for call in source.methods("to", "to_empty") if call.args or call.keywords]
    for name in sorted({node.id for call in moves for node in ast.walk(call) if isinstance(node, ast.Name)}):
        values = source.assigned.get(name, [])
        if len(values) == 1 and _is_cpu(source, values[0][1]) and not source.conditions(values[0][0]):
            yield describe_file("trains_on_cpu/device", source.place(values[0][0]), name=name)
            return
    if not moves and not any("device" in name.lower() or name == "gpu" for name in source.names):
        yield describe_file("trains_on_cpu/never_moved", source.place(backwards[0]))


def _is_cpu(source: Source, value: ast.expr) -> bool:
    if source.called(value) == "torch.device" and isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    return (source.text_of(value) or "").startswith("cpu")


def _loaders(source: Source) -> Iterator[Finding]:
    alone, unpinned = [], []
    for call in source.calls:
        if source.called(call) != "torch.utils.data.DataLoader" or not _is_plain(source, call):
            continue
        workers, pinned = keyword(call, "num_workers"), keyword(call, "pin_memory")
        if len(call.args) < 6 and (workers is None or source.integer(workers) == 0):
            alone.append(call)
        elif len(call.args) < 8 and (pinned is None or is_constant(pinned, False)):
            unpinned.append(call)
    if alone:
        yield describe_file("loader_without_workers", source.place(alone[0]), lines=_lines(alone, "DataLoader"))
    if unpinned and _backwards(source) and any("cuda" in text for text in (*source.strings, *source.names)):
        lines = _lines(unpinned, "DataLoader")
        yield describe_file("loader_without_pinned_memory", source.place(unpinned[0]), lines=lines)


def _is_plain(source: Source, call: ast.Call) -> bool:
    """Whether the loader makes batches of samples that are read one by one. Not so: a TensorDataset, which is in
    memory; `batch_size=None`, where the data set hands out whole batches; arguments that are not seen (`**kwargs`)."""
    if any(value.arg is None for value in call.keywords) or is_constant(keyword(call, "batch_size"), None):
        return False
    node: ast.AST | None = call.args[0] if call.args else keyword(call, "dataset")
    if isinstance(node, ast.Name):
        node = next((value for _, value in source.assigned.get(node.id, [])), None)
    maker = source.function(node.func) if isinstance(node, ast.Call) else None
    calls = [*(source.reached_calls(maker) if maker else []), *([] if node is None else ast.walk(node))]
    return not any(source.called(inner).rpartition(".")[2] == "TensorDataset" for inner in calls)


def _lines(calls: list[ast.Call], what: str) -> str:
    lines = sorted({call.lineno for call in calls})
    return f"{what} in line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:10]))}"


def _host_syncs(source: Source) -> Iterator[Finding]:
    """Calls in a training loop, on every step, that wait until the GPU has computed a value."""
    loops: dict[ast.AST, list[ast.Call]] = {}
    for call in _backwards(source):
        if (loop := _loop_of(source, call)) is not None:
            loops.setdefault(loop, []).append(call)
    for loop, backwards in loops.items():
        results = _results(source, loop, backwards)
        found = [
            call
            for call in ast.walk(loop)
            if isinstance(call, ast.Call)
            and _waits_for(call, results)
            and _loop_of(source, call) is loop
            and not source.conditions(call, within=loop)
        ]
        if found:
            first = min(found, key=lambda call: (call.lineno, call.col_offset))
            text = ast.unparse(first)
            text = text if len(text) < 60 else text[:57] + "…"
            yield describe_file("host_sync_each_step", source.place(first), call=text, lines=_lines(found, "waits"))


def _loop_of(source: Source, node: ast.AST) -> ast.AST | None:
    """The innermost loop of the same function."""
    for parent, _ in source.ancestors(node):
        if isinstance(parent, _LOOPS):
            return parent
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return None
    return None


def _results(source: Source, loop: ast.AST, backwards: list[ast.Call]) -> set[str]:
    """Names in a loop for what the model computed: those that the loss is made of, and what is made of them."""
    assigned = [node for node in ast.walk(loop) if isinstance(node, ast.Assign | ast.AugAssign)]
    modules = {
        node.func.id for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    inputs = _names(loop.target) if isinstance(loop, ast.For) else set()
    for node in assigned:
        if _names(node.value) & inputs and not any(map(_calls_model, ast.walk(node.value))):
            inputs |= _targets(node)
    others = inputs | modules | set(source.aliases) | {"scaler", "accelerator"}
    losses = {name for call in backwards for name in _names(call)} - others
    results, size = set(losses), 0
    while size != len(results):
        size = len(results)
        for node in assigned:
            targets = _targets(node) - others
            if targets & losses:
                losses |= _names(node.value) - others
            if targets & losses or (_names(node.value) & results and not _is_synced(node.value)):
                results |= targets | losses
    return results


def _calls_model(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _BUILT_IN


def _is_synced(value: ast.AST) -> bool:
    """Whether a value is a Python number already."""
    return isinstance(value, ast.Call) and (
        (isinstance(value.func, ast.Attribute) and value.func.attr in _SYNCS)
        or (isinstance(value.func, ast.Name) and value.func.id in ("float", "int"))
    )


def _targets(node: ast.Assign | ast.AugAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name for target in targets for name in _names(target)}


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _waits_for(call: ast.Call, results: set[str]) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr in _SYNCS and not call.args:
        value: ast.AST = call.func.value
    elif isinstance(call.func, ast.Name) and call.func.id == "float" and len(call.args) == 1:
        value = call.args[0]
    else:
        return False
    if any(isinstance(inner, ast.Call) and _is_synced(inner) for inner in ast.walk(value)):
        return False
    return bool(_names_of_values(value) & results)


def _names_of_values(node: ast.AST) -> set[str]:
    """The names in an expression, except those of which only the shape is asked: it is known without the GPU."""
    found: set[str] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        is_shape = isinstance(node, ast.Attribute) and node.attr in _SHAPES
        is_length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
        if not is_shape and not is_length:
            pending += ast.iter_child_nodes(node)
    return found


def _gradients(source: Source) -> Iterator[Finding]:
    optimizers = {
        name
        for name, values in source.assigned.items()
        if any(
            source.called(value).startswith("torch.optim.") and "lr_scheduler" not in source.called(value)
            for _, value in values
        )
    }
    steps = [
        call
        for call in source.methods("step")
        if isinstance(call.func, ast.Attribute) and source.dotted(call.func.value) in optimizers
    ]
    is_zeroed = source.names & {"zero_grad", "grad"}
    if _backwards(source) and steps and not is_zeroed and source.is_self_contained:
        yield describe_file("gradients_not_zeroed", source.place(steps[0]))


def _parallel(source: Source) -> Iterator[Finding]:
    names = {source.called(call): call for call in reversed(source.calls)}
    if call := names.get("torch.nn.DataParallel") or names.get("torch.nn.parallel.DataParallel"):
        yield describe_file("data_parallel", source.place(call))
    if "torch.nn.parallel.DistributedDataParallel" not in names or not source.is_self_contained:
        return
    texts = " ".join((*source.names, *source.aliases.values())).lower()
    loader = names.get("torch.utils.data.DataLoader")
    hidden = loader is None or any(value.arg is None for value in loader.keywords)
    if loader and not hidden and not any(word in texts for word in SCRIPTS.divided):
        yield describe_file("sampler_missing", source.place(loader))
    sampler = names.get("torch.utils.data.distributed.DistributedSampler") or names.get(
        "torch.utils.data.DistributedSampler"
    )
    shuffles = sampler is not None and not is_constant(keyword(sampler, "shuffle"), False)
    if sampler and shuffles and "set_epoch" not in source.names and _backwards(source):
        yield describe_file("sampler_epoch_missing", source.place(sampler))


def _switches(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.Assign):
            is_off = is_constant(node.value, False)
            if (
                is_off
                and source.dotted(node.targets[0]).endswith("backends.cudnn.enabled")
                and source.runs_always(node)
            ):
                yield describe_file("cudnn_disabled", source.place(node))
        elif source.called(node) == "torch.autograd.set_detect_anomaly" and isinstance(node, ast.Call):
            is_on = bool(node.args) and is_constant(node.args[0], True)
            if is_on and source.runs_always(node):
                yield describe_file("anomaly_detection", source.place(node))
