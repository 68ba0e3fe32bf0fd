"""What a PyTorch script does that wastes a GPU: its loaders, its training loop, its devices and switches.

Sources: PyTorch's performance tuning guide (pytorch.org/tutorials/recipes/recipes/tuning_guide.html), the API pages of
DataLoader, DataParallel and DistributedSampler. A rule that needs the whole program speaks only of a script that
imports nothing but known libraries.
"""

import ast
from collections.abc import Iterator

from stoker.preflight.findings import CheckFinding, make_finding
from stoker.preflight.static.source import Source, is_constant, keyword

_SYNCS = frozenset(("item", "cpu", "numpy", "tolist"))
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_MANAGED = frozenset(("Trainer", "Accelerator", "Fabric", "LightningModule", "deepspeed", "xm", "ray"))
"""Libraries that move the model themselves."""


def check_torch(source: Source) -> list[CheckFinding]:
    """All findings of a script that imports torch."""
    found = list(_visible_devices(source))
    if source.imports("torch"):
        for rule in (_on_cpu, _loaders, _host_syncs, _gradients, _parallel, _switches):
            found += rule(source)
    return found


def _visible_devices(source: Source) -> Iterator[CheckFinding]:
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
    if len(chosen) != 1:
        return
    key, value = chosen[0]
    text = source.text_of(value)
    if text is not None and text.strip() in ("", "-1") and source.runs_always(key):
        yield make_finding(
            id="gpu_hidden",
            severity="blocker",
            title=f'CUDA_VISIBLE_DEVICES="{text}" hides all GPUs',
            evidence="the script sets it on every run",
            fix="remove the line",
            place=source.place(key),
        )


def _backwards(source: Source) -> list[ast.Call]:
    return [call for call in source.calls if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"]


def _on_cpu(source: Source) -> Iterator[CheckFinding]:
    """A training that is seen whole and never names a device, or names the CPU only."""
    backwards = _backwards(source)
    if not backwards or not source.is_self_contained or source.names & _MANAGED:
        return
    mentions = any(
        "cuda" in text.lower() or text in ("mps", "xpu", "auto") for text in (*source.strings, *source.names)
    )
    moves = [
        call
        for call in source.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("to", "to_empty")
        and (call.args or call.keywords)
    ]
    if mentions or "accelerator" in source.names:
        return
    devices = {node.id for call in moves for node in ast.walk(call) if isinstance(node, ast.Name)}
    for name in sorted(devices):
        values = source.assigned.get(name, [])
        if len(values) == 1 and _is_cpu(source, values[0][1]) and not source.conditions(values[0][0]):
            yield make_finding(
                id="trains_on_cpu",
                severity="blocker",
                title="The model is put on the CPU",
                place=source.place(values[0][0]),
                evidence=f"{name} is always the CPU, and the script names no other device",
                fix=f'{name} = torch.device("cuda")',
            )
            return
    has_device = any("device" in name.lower() or name == "gpu" for name in source.names)
    if not moves and not has_device:
        yield make_finding(
            id="trains_on_cpu",
            severity="blocker",
            title="The model is never moved to a GPU: it trains on the CPU",
            evidence="the script has a training loop, and neither .to(…) nor .cuda() nor a default device",
            fix='device = torch.device("cuda"); model.to(device), and each batch too',
            place=source.place(backwards[0]),
        )


def _is_cpu(source: Source, value: ast.expr) -> bool:
    if source.called(value) == "torch.device" and isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    return (source.text_of(value) or "").startswith("cpu")


def _loaders(source: Source) -> Iterator[CheckFinding]:
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
        yield make_finding(
            id="loader_without_workers",
            severity="warning",
            title="num_workers is 0: the process that feeds the GPU also loads and decodes the samples",
            evidence=_lines(alone, "DataLoader"),
            place=source.place(alone[0]),
            fix="num_workers=4 (about the cores for each GPU), pin_memory=True, persistent_workers=True",
        )
    if unpinned and _backwards(source) and any("cuda" in text for text in (*source.strings, *source.names)):
        yield make_finding(
            id="loader_without_pinned_memory",
            severity="warning",
            title="Batches are copied to the GPU from pageable memory, so the copy cannot overlap with computing",
            evidence=_lines(unpinned, "DataLoader"),
            place=source.place(unpinned[0]),
            fix="pin_memory=True, and batch.to(device, non_blocking=True)",
        )


def _is_plain(source: Source, call: ast.Call) -> bool:
    """Whether the loader makes batches of samples that are read one by one. Not so: a TensorDataset, which is in
    memory; `batch_size=None`, where the data set hands out whole batches; arguments that are not seen (`**kwargs`)."""
    if any(value.arg is None for value in call.keywords) or is_constant(keyword(call, "batch_size"), None):
        return False
    node: ast.AST | None = call.args[0] if call.args else keyword(call, "dataset")
    if isinstance(node, ast.Name):
        node = next((value for _, value in source.assigned.get(node.id, [])), None)
    maker = source.function(node.func) if isinstance(node, ast.Call) else None
    calls = [*(source.reached_calls(maker) if maker else []), *([] if node is None else _calls(node))]
    return not any(source.called(inner).rpartition(".")[2] == "TensorDataset" for inner in calls)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _lines(calls: list[ast.Call], what: str) -> str:
    lines = sorted({call.lineno for call in calls})
    return f"{what} in line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:10]))}"


def _host_syncs(source: Source) -> Iterator[CheckFinding]:
    """Calls in a training loop, on every step, that wait until the GPU has computed a value."""
    loops: dict[ast.AST, list[ast.Call]] = {}
    for call in _backwards(source):
        loop = _loop_of(source, call)
        if loop is not None:
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
            how = ast.unparse(first)
            yield make_finding(
                id="host_sync_each_step",
                severity="warning",
                title=f"{how if len(how) < 60 else how[:57] + '…'} waits for the GPU in every step",
                evidence=f"the next step is not queued until the value is there; {_lines(found, 'waits')}",
                fix="total += loss.detach() in the loop, and .item() every 50 steps or after the epoch",
                place=source.place(first),
            )


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
    assigned = [
        node for node in ast.walk(loop) if isinstance(node, ast.Assign | ast.AugAssign) and node.value is not None
    ]
    inputs = _names(loop.target) if isinstance(loop, ast.For) else set()
    modules = {
        root.id for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(root := node.func, ast.Name)
    }
    losses = {name for call in backwards for name in _names(call)} - {"scaler", "accelerator"}
    results = set(losses)
    moved = set(inputs)
    for node in assigned:
        if (
            not any(isinstance(part, ast.Call) and _calls_model(part) for part in ast.walk(node.value))
            and _names(node.value) & moved
        ):
            moved |= _targets(node)
    for _ in range(8):
        before = len(results)
        for node in assigned:
            targets = _targets(node)
            if targets & losses:
                losses |= _names(node.value) - moved - modules - set(source.aliases)
            if targets & losses or (_names(node.value) & results and not _is_synced(node.value)):
                results |= targets - moved
        results |= losses - moved
        if len(results) == before:
            break
    return results - moved - modules - set(source.aliases)


def _calls_model(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id not in (
        "list",
        "tuple",
        "dict",
        "len",
        "enumerate",
        "zip",
        "map",
    )


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
        is_shape = isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim", "size", "numel", "dim", "dtype")
        is_length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
        if not is_shape and not is_length:
            pending += ast.iter_child_nodes(node)
    return found


def _gradients(source: Source) -> Iterator[CheckFinding]:
    backwards = _backwards(source)
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
        for call in source.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and source.dotted(call.func.value) in optimizers
    ]
    if (
        backwards
        and steps
        and "zero_grad" not in source.names
        and "grad" not in source.names
        and source.is_self_contained
    ):
        yield make_finding(
            id="gradients_not_zeroed",
            severity="blocker",
            title="Gradients are never set to zero: each step adds to all before it",
            evidence="the script calls backward() and step(), and zero_grad() nowhere",
            fix="optimizer.zero_grad(set_to_none=True) before backward()",
            place=source.place(steps[0]),
        )


def _parallel(source: Source) -> Iterator[CheckFinding]:
    names = {source.called(call): call for call in reversed(source.calls)}
    if call := names.get("torch.nn.DataParallel") or names.get("torch.nn.parallel.DataParallel"):
        yield make_finding(
            id="data_parallel",
            severity="warning",
            title="DataParallel drives all GPUs from one Python process and copies the model in every step",
            evidence="PyTorch recommends DistributedDataParallel, also on one machine",
            fix="torch.nn.parallel.DistributedDataParallel, started with torchrun --nproc-per-node=gpu",
            place=source.place(call),
        )
    if "torch.nn.parallel.DistributedDataParallel" not in names:
        return
    texts = " ".join((*source.names, *source.aliases.values())).lower()
    loader = names.get("torch.utils.data.DataLoader")
    divided = any(word in texts for word in ("sampler", "shard", "split_", "iterable", "subset", "webdataset", "dali"))
    hidden = loader is None or any(value.arg is None for value in loader.keywords) or not source.is_self_contained
    if loader and not divided and not hidden:
        yield make_finding(
            id="sampler_missing",
            severity="blocker",
            title="Every rank trains on the same samples",
            evidence="DistributedDataParallel with a DataLoader that has no DistributedSampler",
            place=source.place(loader),
            fix="sampler=torch.utils.data.distributed.DistributedSampler(dataset), and sampler.set_epoch(epoch)",
        )
    sampler = names.get("torch.utils.data.distributed.DistributedSampler") or names.get(
        "torch.utils.data.DistributedSampler"
    )
    shuffles = sampler is not None and not is_constant(keyword(sampler, "shuffle"), False)
    if sampler and shuffles and "set_epoch" not in source.names and source.is_self_contained and _backwards(source):
        yield make_finding(
            id="sampler_epoch_missing",
            severity="warning",
            title="Every epoch has the same order",
            evidence="DistributedSampler shuffles by the epoch that set_epoch tells it",
            place=source.place(sampler),
            fix="sampler.set_epoch(epoch) at the start of each epoch",
        )


def _switches(source: Source) -> Iterator[CheckFinding]:
    for node in source.nodes:
        if isinstance(node, ast.Assign):
            off = is_constant(node.value, False) and source.dotted(node.targets[0]).endswith("backends.cudnn.enabled")
            if off and source.runs_always(node):
                yield make_finding(
                    id="cudnn_disabled",
                    severity="warning",
                    title="cuDNN is switched off: convolutions are several times slower",
                    evidence="torch.backends.cudnn.enabled = False",
                    fix="remove the line",
                    place=source.place(node),
                )
        elif source.called(node) == "torch.autograd.set_detect_anomaly" and isinstance(node, ast.Call):
            on = bool(node.args) and is_constant(node.args[0], True)
            if on and source.runs_always(node):
                yield make_finding(
                    id="anomaly_detection",
                    severity="warning",
                    title="Anomaly detection is on: each operation records a stack trace",
                    evidence="torch.autograd.set_detect_anomaly(True) is for debugging",
                    fix="remove the line",
                    place=source.place(node),
                )
