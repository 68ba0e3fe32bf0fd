"""What a training script does that wastes a GPU: tf.data pipelines, PyTorch's loaders and loops, devices, switches.

Sources: tensorflow.org/guide/data_performance (parallel mapping, prefetching, vectorizing, caching),
tensorflow.org/tutorials/distribute/input (global batch), PyTorch's performance tuning guide
(pytorch.org/tutorials/recipes/recipes/tuning_guide.html), the API pages of the functions named. A map after `batch` is
what TensorFlow's guide advises for cheap, vectorized work; only work that is done for one image at a time is reported
there. A rule that needs the whole program speaks only of a script that imports nothing but known libraries. The script
is never imported or executed: `Source` is its syntax tree, with what the rules ask of it. All walks are iterative, so a
script that is nested too deeply for the parser is an error and one that is not costs linear time. The texts are in
`knowledge/check_files.toml`, names and switches in `knowledge/source_names.toml`.
"""

import ast
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stoker.preflight.catalog import describe
from stoker.preflight.static.requirements import read_text
from stoker.preflight.static.tables import LISTS, NAMES, PATTERNS, THREAD_VARIABLES
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware.cgroup import host_cores

MAX_BYTES = 1 << 20
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
MAX_STEPS = 100
"""Methods of one pipeline that are followed back to its source."""
_HEAVY = f"{PATTERNS['one_image']}|{PATTERNS['heavy']}"
_TENSORFLOW = frozenset(("tensorflow", "keras", "tensorflow_datasets"))
_SYNCS = frozenset(("item", "cpu", "numpy", "tolist"))
_Loop = ast.For | ast.AsyncFor | ast.While
_BUILT_IN = frozenset(("list", "tuple", "dict", "len", "enumerate", "zip", "map"))
_SHAPES = frozenset(("shape", "ndim", "size", "numel", "dim", "dtype"))
"""Attributes that are known without the GPU."""


class Assignment(NamedTuple):
    statement: ast.stmt
    value: ast.expr
    """That of a tuple target is the one of the tuple."""
    scope: ast.AST
    """The function, class or module that it is in."""


class Source:
    """The tree of a script."""

    def __init__(self, text: str, place: str) -> None:
        """place: how places call the file. Raises ValueError with line and reason for what is not Python."""
        self.file = place
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.msg}") from error
        except (RecursionError, MemoryError) as error:
            raise ValueError("is nested too deeply") from error
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.aliases: dict[str, str] = {}
        self.modules: set[str] = set()
        """Top-level modules that are imported; `.` for one of the same package."""
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.functions: dict[str, list[Function]] = {}
        self.assigned: dict[str, list[Assignment]] = {}
        """Name → its assignments, in the order of the lines."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                self._assign(node, node.value)
        imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        for imported in sorted(imports, key=lambda node: node.lineno):
            self._import(imported)
        for assignments in self.assigned.values():
            assignments.sort(key=lambda assignment: assignment.statement.lineno)
        self.parameters = {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        self.names = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        self.names |= {node.attr for node in self.nodes if isinstance(node, ast.Attribute)}
        self.strings = [
            node.value for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            path = alias.name
            if isinstance(node, ast.ImportFrom):
                path = "." if node.level or not node.module else f"{node.module}.{alias.name}"
            top = path.partition(".")[0] or "."
            self.modules.add(top)
            if isinstance(node, ast.ImportFrom) or alias.asname:
                self.aliases[alias.asname or alias.name] = path if top != "." else alias.name
            else:
                self.aliases[top] = top

    def _assign(self, node: ast.Assign | ast.AnnAssign, value: ast.expr) -> None:
        scope = self.scope(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    self.assigned.setdefault(part.id, []).append(Assignment(node, value, scope))

    def place(self, node: ast.AST) -> str:
        """FILE:LINE. Of a method that is called in a chain over several lines, the line of its name."""
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            line = node.func.end_lineno
        return f"{self.file}:{line}"

    @property
    def is_self_contained(self) -> bool:
        """Whether it imports only known libraries: no code of its own project, none that may take over the training."""
        return self.modules <= sys.stdlib_module_names | {*LISTS["known_modules"]}

    def dotted(self, node: ast.AST) -> str:
        """`tensorflow.io.decode_jpeg` of `tf.io.decode_jpeg`; empty for what is no name with attributes."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.aliases.get(node.id, node.id), *reversed(parts)])

    def methods(self, *names: str) -> list[ast.Call]:
        """The calls of methods of these names, on whatever."""
        return [call for call in self.calls if isinstance(call.func, ast.Attribute) and call.func.attr in names]

    def called(self, node: ast.AST) -> str:
        return self.dotted(node.func) if isinstance(node, ast.Call) else ""

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """(ancestor, its child on the way), from the inside out."""
        while (parent := self.parents.get(node)) is not None:
            yield parent, node
            node = parent

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module that a node is in."""
        scopes = (parent for parent, _ in self.ancestors(node) if isinstance(parent, (Function, ast.ClassDef)))
        return next(scopes, self.tree)

    def conditions(self, node: ast.AST, *, within: ast.AST | None = None) -> dict[ast.AST, bool]:
        """The `if`s, inside the function (or `within`), on which a node depends: node of the `if` → whether it is in
        its body. `if __name__ == "__main__"` is none."""
        found: dict[ast.AST, bool] = {}
        for parent, child in self.ancestors(node):
            if parent is within or isinstance(parent, Function):
                break
            if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
                if not (isinstance(parent, ast.If) and _is_main(parent.test)):
                    found[parent] = child in parent.body if isinstance(parent, ast.If) else child is parent.body
            elif isinstance(parent, ast.ExceptHandler):
                found[parent] = True
        return found

    def runs_always(self, node: ast.AST) -> bool:
        """Whether every run executes a statement: under no `if`, in the module or a function that every run calls."""
        scope = self.scope(node)
        called = isinstance(scope, ast.Module) or getattr(scope, "name", "") in ("main", "train", "run")
        return called and not self.conditions(node)

    def only_value(self, node: ast.AST | None) -> ast.AST | None:
        """The value of a name that is assigned once and is no parameter; every other expression itself."""
        if not isinstance(node, ast.Name):
            return node
        values = self.assigned.get(node.id, [])
        return values[0].value if len(values) == 1 and node.id not in self.parameters else None

    def integer(self, node: ast.AST | None) -> int | None:
        """The value of a literal, or of a name that stands for one."""
        value = getattr(self.only_value(node), "value", None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def function(self, node: ast.AST | None) -> Function | None:
        """The function that an expression names, if this script defines exactly one of that name."""
        if isinstance(node, ast.Lambda):
            return node
        if isinstance(node, ast.Call) and self.called(node).endswith("partial") and node.args:
            node = node.args[0]
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        found = self.functions.get(name, [])
        return found[0] if len(found) == 1 else None

    def reached_calls(self, *roots: ast.AST) -> list[ast.Call]:
        """The calls in functions or expressions, and in the functions of this script that they call."""
        found: list[ast.Call] = []
        seen: set[ast.AST] = set()
        pending = list(roots)
        while pending:
            current = pending.pop()
            if current not in seen:
                seen.add(current)
                calls = [node for node in ast.walk(current) if isinstance(node, ast.Call)]
                found += calls
                pending += filter(None, (self.function(call.func) for call in calls))
        return found


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((argument.value for argument in call.keywords if argument.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument by its position or name."""
    if len(call.args) > position and not any(isinstance(value, ast.Starred) for value in call.args[: position + 1]):
        return call.args[position]
    return keyword(call, name)


def _text(node: ast.AST) -> str:
    """The source of a node; … for one that is nested too deeply."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def check_script(path: Path) -> list[Finding]:
    """All findings of a script. Raises OSError, ValueError."""
    source = Source(read_text(path, MAX_BYTES), str(path))
    found = list(_switches(source))
    if not found and not source.modules & (_TENSORFLOW | {"torch"}):
        found.append(describe("source_unreadable/no_framework", str(path), name=path.name))
    if source.modules & _TENSORFLOW:
        found += [finding for steps in _pipelines(source) for finding in _check_pipeline(source, steps)]
        found += [*_no_prefetch(source), *_replicas(source)]
    if "torch" in source.modules:
        found += [finding for rule in _TORCH_RULES for finding in rule(source)]
    first = {(finding.id, finding.place): finding for finding in reversed(found)}  # steps may be part of two pipelines
    return [finding for finding in found if first[finding.id, finding.place] is finding]


def _switches(source: Source) -> Iterator[Finding]:
    """A call or an assignment that hides the GPU or is for debugging, on every run."""
    statements: list[tuple[ast.AST, str, str]] = []
    for node in source.nodes:
        if isinstance(node, ast.Call) and (name := source.called(node)):
            arguments = ", ".join(_text(part) for part in (*node.args, *node.keywords))
            statements.append((node, "", f"{name}({arguments})"))
        elif isinstance(node, ast.Assign):
            target = source.dotted(node.targets[0]) or _text(node.targets[0])
            statements.append((node, target, f"{target} = {_text(node.value)}"))
    times = Counter(target for _, target, _ in statements)
    for node, target, text in statements:
        for row in NAMES.switches:
            is_meant = source.runs_always(node) and (not target or times[target] == 1)  # else it may be undone
            if re.match(row.pattern, text) and not source.modules & row.unless and is_meant:
                yield describe(row.id, source.place(node), text=text)


# tf.data


@dataclass(frozen=True)
class PipelineStep:
    """One method of a pipeline, or what its source does by itself."""

    method: str
    call: ast.Call | None
    conditions: dict[ast.AST, bool]

    def follows_always(self, earlier: "PipelineStep") -> bool:
        """Whether at most one of both is conditional, so that they are known to be used together."""
        return not earlier.conditions or not self.conditions or earlier.conditions == self.conditions


def _pipelines(source: Source) -> Iterator[list[PipelineStep]]:
    """Each longest chain of dataset methods, with the chains of the variables that it begins with."""
    seen: set[ast.AST | None] = set()
    for call in sorted(source.calls, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0), reverse=True):
        if isinstance(call.func, ast.Attribute) and call.func.attr in LISTS["methods"] and call not in seen:
            root, steps = _pipeline(source, call)
            seen.update(step.call for step in steps)
            if root or any(step.method in LISTS["only_dataset"] or _is_parallel(step.call) for step in steps):
                yield steps


def _is_parallel(call: ast.Call | None) -> bool:
    return call is not None and keyword(call, "num_parallel_calls") is not None


def _pipeline(source: Source, end: ast.AST | None) -> tuple[str, list[PipelineStep]]:
    """(dotted name of the source, empty if unknown; the steps from there) of a chain."""
    steps: list[PipelineStep] = []
    node, seen, root = end, set[ast.AST](), ""
    while node is not None and node not in seen and len(steps) < MAX_STEPS and not root:
        seen.add(node)
        if re.fullmatch(PATTERNS["dataset"], name := source.called(node)):
            root = name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LISTS["methods"]:
            steps.append(PipelineStep(node.func.attr, node, source.conditions(node)))
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            node = _definition(source, node) if isinstance(node, ast.Name) else None
    is_batched = isinstance(node, ast.Call) and not is_constant(keyword(node, "batch_size"), None)
    if is_batched and re.fullmatch(PATTERNS["batched_dataset"], root):
        steps += [PipelineStep("batch", None, {}), PipelineStep("shuffle", None, {})]
    return root, steps[::-1]


def _definition(source: Source, name: ast.Name) -> ast.expr | None:
    """The value of the last assignment before a use, in the same function or, for a constant, in the module."""
    line = next((parent.lineno for parent, _ in source.ancestors(name) if isinstance(parent, ast.stmt)), 0)
    scope, uses = source.scope(name), source.conditions(name)
    rows = [row for row in source.assigned.get(name.id, []) if row.scope is scope and row.statement.lineno < line]
    for row in rows[: -MAX_STEPS - 1 : -1]:
        if all(uses.get(test, branch) == branch for test, branch in source.conditions(row.statement).items()):
            return row.value
    return None


def _work(source: Source, step: PipelineStep, pattern: str) -> str:
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


def _check_pipeline(source: Source, steps: list[PipelineStep]) -> Iterator[Finding]:
    batched: PipelineStep | None = None
    random: tuple[PipelineStep, str] | None = None
    is_shuffled = False
    for step in steps:
        place = source.place(step.call) if step.call else ""
        if step.method in LISTS["batches"]:
            batched = step
        elif step.method == "unbatch":
            batched = None
        elif step.method == "shuffle":
            size = source.integer(argument(step.call, 0, "buffer_size")) if step.call else None
            if size in (0, 1):
                yield describe("shuffle_ineffective/buffer", place, size=size)
            elif step.call and batched is not None and not is_shuffled and step.follows_always(batched):
                yield describe("shuffle_ineffective/batches", place)
            is_shuffled = True
            if step.call and not is_constant(keyword(step.call, "reshuffle_each_iteration"), False):
                random = random or (step, "shuffle")
        elif step.method == "take":
            random = None  # a few elements that are cached are meant to be the same ones
        elif step.method == "cache" and random and step.follows_always(random[0]):
            yield describe("cache_freezes_randomness", place, what=random[1])
        elif step.method == "map" and step.call is not None:
            yield from _check_map(source, step, step.call, batched, place)
            if name := _work(source, step, PATTERNS["random"]):
                random = (step, name)


def _check_map(
    source: Source, step: PipelineStep, call: ast.Call, batched: PipelineStep | None, place: str
) -> Iterator[Finding]:
    if python := _work(source, step, PATTERNS["python"]):
        yield describe("python_in_pipeline", place, name=python)
    heavy = _work(source, step, _HEAVY)
    starred = any(value.arg is None for value in call.keywords)
    if heavy and not python and len(call.args) < 2 and not _is_parallel(call) and not starred:
        yield describe("map_on_one_thread", place, name=heavy)
    if batched is None or batched.conditions:
        return
    if single := _work(source, step, PATTERNS["one_image"]):
        yield describe("per_image_work_after_batch", place, name=single)
    if draw := _work(source, step, PATTERNS["one_draw"]):
        yield describe("one_draw_per_batch", place, name=draw)


def _no_prefetch(source: Source) -> Iterator[Finding]:
    """A pipeline that is seen from its source to the `fit` that reads it, and is never prefetched."""
    if source.names & {"prefetch", "prefetch_to_device", "MirroredStrategy"} or source.modules & {"torch", "jax"}:
        return
    for call in source.methods("fit"):
        root, steps = _pipeline(source, argument(call, 0, "x"))
        maps = any(_work(source, step, _HEAVY) for step in steps)
        if maps and root and any(step.method in LISTS["batches"] for step in steps):
            last = next((step.call for step in reversed(steps) if step.call), call)
            yield describe("no_prefetch", source.place(last))


def _replicas(source: Source) -> Iterator[Finding]:
    """A constant global batch that is smaller than the number of devices of MirroredStrategy."""
    strategies = [call for call in source.calls if source.called(call).endswith("distribute.MirroredStrategy")]
    devices = argument(strategies[0], 0, "devices") if strategies else None
    count = len(devices.elts) if isinstance(devices, ast.List | ast.Tuple) else 2
    for call in source.methods("fit", "experimental_distribute_dataset") if strategies and count > 1 else ():
        _, steps = _pipeline(source, argument(call, 0, "x") or keyword(call, "dataset"))
        batches = [step.call for step in steps if step.method in ("batch", "padded_batch") and step.call]
        sizes = [(argument(batch, 0, "batch_size"), batch) for batch in batches]
        for node, at in (*sizes, (keyword(call, "batch_size"), call)):
            size = source.integer(node)
            if size is not None and 0 < size < count:
                yield describe("batch_smaller_than_replicas", source.place(at), size=size, count=count)


# PyTorch


def _on_cpu(source: Source) -> Iterator[Finding]:
    """A training that is seen whole and never names a device, or names the CPU only."""
    backwards = source.methods("backward")
    if not backwards or not source.is_self_contained or source.names & {*LISTS["managed"]}:
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
                yield describe("trains_on_cpu/device", source.place(at), name=name)
                return
    if not moves and not any("device" in name.lower() or name == "gpu" for name in source.names):
        yield describe("trains_on_cpu/never_moved", source.place(backwards[0]))


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
        yield describe("loader_without_workers", source.place(alone[0]), lines=_lines(alone, "DataLoader"))
    if unpinned and source.methods("backward") and any("cuda" in text for text in (*source.strings, *source.names)):
        lines = _lines(unpinned, "DataLoader")
        yield describe("loader_without_pinned_memory", source.place(unpinned[0]), lines=lines)


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
            text = _text(first)[:60]
            yield describe("host_sync_each_step", source.place(first), call=text, lines=_lines(found, "waits"))


def _loop_of(source: Source, node: ast.AST) -> ast.AST | None:
    """The innermost loop around a node, in the same function."""
    parent = next((parent for parent, _ in source.ancestors(node) if isinstance(parent, (_Loop, Function))), None)
    return parent if isinstance(parent, _Loop) else None


def _results(source: Source, loop: ast.AST, backwards: list[ast.Call]) -> set[str]:
    """Names in a loop for what the model computed: those that the loss is made of, and what is made of them."""
    nodes = list(ast.walk(loop))
    assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign)]
    inputs = _names(loop.target) if isinstance(loop, ast.For) else set()
    for node in assigned:
        if _names(node.value) & inputs and not any(map(_calls_model, ast.walk(node.value))):
            inputs |= _targets(node)
    inputs -= {name for call in backwards for name in _names(call)}  # a loss by `F.nll_loss(output, target)`
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
    """The names in expressions, except of values that are on the host already, and where only the shape is asked."""
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
        yield describe("gradients_not_zeroed", source.place(steps[0]))


def _parallel(source: Source) -> Iterator[Finding]:
    names = {source.called(call).rpartition(".")[2]: call for call in reversed(source.calls)}
    if call := names.get("DataParallel"):
        yield describe("data_parallel", source.place(call))
    if "DistributedDataParallel" not in names or not source.is_self_contained:
        return
    texts = " ".join((*source.names, *source.aliases.values())).lower()
    loader, sampler = names.get("DataLoader"), names.get("DistributedSampler")
    is_seen = loader is not None and all(value.arg is not None for value in loader.keywords)
    if loader and is_seen and not any(word in texts for word in LISTS["divided"]):
        yield describe("sampler_missing", source.place(loader))
    shuffles = sampler is not None and not is_constant(keyword(sampler, "shuffle"), False)
    if sampler and shuffles and "set_epoch" not in source.names and source.methods("backward"):
        yield describe("sampler_epoch_missing", source.place(sampler))


def _threads(source: Source) -> Iterator[Finding]:
    """Threads that the script asks for by itself, times the processes that it starts with them, against the cores of
    this machine. A loader worker has one thread of torch, unless its `worker_init_fn` asks for more."""
    cores = host_cores()
    in_workers: dict[ast.AST, int] = {}
    for call in source.calls:
        init = source.function(keyword(call, "worker_init_fn"))
        workers = source.integer(keyword(call, "num_workers"))
        if source.called(call) == "torch.utils.data.DataLoader" and init is not None and workers:
            in_workers |= dict.fromkeys(source.reached_calls(init), workers)
    spawned = [call for call in source.calls if source.called(call).endswith("multiprocessing.spawn")]
    ranks = max((source.integer(argument(call, 2, "nprocs")) or 1 for call in spawned), default=1)
    for node, asked in _thread_settings(source):
        workers = in_workers.get(node, 0)
        times = f"{workers} loader workers × " if workers else f"{ranks} ranks × " if ranks > 1 else ""
        if asked > 0 and asked * (workers or ranks) > cores and not source.conditions(node):
            good = max(1, cores // (workers or ranks))
            threads, times, text = asked * (workers or ranks), f"{times}{asked}", _text(node)[:60]
            at = source.place(node)
            yield describe("too_many_threads", at, threads=threads, cores=cores, times=times, text=text, good=good)


def _thread_settings(source: Source) -> Iterator[tuple[ast.AST, int]]:
    """(call or assignment, number of threads), where the script has the number."""
    for call in source.calls:
        name = source.called(call)
        if name in ("torch.set_num_threads", "cv2.setNumThreads") and call.args:
            yield call, source.integer(call.args[0]) or 0
        elif name in ("os.environ.setdefault", "os.putenv") and len(call.args) == 2 and _names_threads(call.args[0]):
            yield call, _number(call.args[1])
    for node in source.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=mapping, slice=key), *_], value=value):
                if source.dotted(mapping) == "os.environ" and _names_threads(key):
                    yield node, _number(value)


def _names_threads(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in THREAD_VARIABLES


def _number(node: ast.AST) -> int:
    text = node.value if isinstance(node, ast.Constant) else ""
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 6 else 0


_TORCH_RULES = (_on_cpu, _loaders, _host_syncs, _gradients, _parallel, _threads)
