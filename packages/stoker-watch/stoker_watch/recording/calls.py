"""What a line of a job's source calls, by its text: a stack shows neither C functions nor how a module is imported.

Of several calls of a line it is the one that ends where the running instruction does; before Python 3.11, whose stacks
have no columns, the outermost one. The file is parsed, never run.
"""

import ast
import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from stoker_watch import regular_files
from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import Amount, Count, Number

MAX_SOURCE_BYTES = 2_000_000
"""Larger files are generated; they are not parsed."""

WRAPPER = "wrapper"
_TABLE = read_toml("calls.toml")
_WRAPPERS, _UPDATES, _GROWING = (frozenset(_TABLE[name]) for name in ("wrappers", "updates", "growing"))
_PATTERNS = {name: re.compile(pattern) for name, pattern in _TABLE["patterns"].items()}

_COMPREHENSIONS = {
    "<listcomp>": ast.ListComp, "<setcomp>": ast.SetComp, "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp, "<lambda>": ast.Lambda,
}  # fmt: skip
"""Functions without a statement of their own (before Python 3.12) → the expression that they are."""


class _Source(NamedTuple):
    path: Path
    tree: ast.Module
    imports: dict[str, str]
    """Name → what it can be imported as."""
    own: frozenset[str]
    """Functions and classes that the file defines."""
    step_functions: frozenset[str]
    """Functions of it that take a step of an optimizer, outside of loops: a training loop calls them."""


def is_wrapper(function: str, file: str) -> bool:
    """Whether a function stands for another one, that it calls. function: without its class."""
    return function in _WRAPPERS or _PATTERNS["wrapper_file"].search(file) is not None


@functools.lru_cache(maxsize=4096)
def find_call(file: str, line: int, function: str, callee: str = "", end: tuple[int, int] | None = None) -> str:
    """What a line calls, as it can be imported (`pandas.read_csv` for `pd.read_csv(...)`), else as it is written.
    Empty: it is not known, or nothing is called.

    function: that the line is in; callee: the Python function that it called, without its class; empty: a C function
    ran. A callee whose name is not in the line is only found if it is a wrapper. end: line and column in bytes of UTF-8
    at which the expression ends that the line runs; None: not known.
    """
    source = _read_source(file)
    if source is None:
        return ""
    if callee in ("_find_and_load", "_handle_fromlist") and (modules := _imports_of_line(source.tree, line)):
        return modules
    if callee in ("", "__enter__") and (entered := _entered_in_line(source.tree, line)):
        return entered
    calls = _calls_of_line(source.tree, line, function)
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset) != end)
    names = [name for call in calls if (name := _call_name(call, source))]
    if callee and callee not in _WRAPPERS:
        return next((name for name in names if name.rpartition(".")[2] == callee), "")
    names.sort(key=lambda name: bool(_PATTERNS["clock"].match(name)))  # others take the time
    return next((name for name in names if callee or name not in source.own), "")


_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NO_SCOPE = ast.Module([], [])
_REPEATS = (*_LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class LoopLine(NamedTuple):
    has_step: bool
    """The function runs the training step: a backward pass or a step of an optimizer."""
    in_step: bool
    """So does the line: it is in the training loop, or the function has none."""
    in_loop: bool
    """The line is in a loop that is not the training loop, nor one around it."""
    without_grad: bool = False
    """Gradients are off in the line (`with torch.no_grad()`, `@torch.inference_mode()`)."""
    is_after_step: bool = False
    """Of the loops around the line, the innermost one that takes a step of an optimizer does so in a line before."""


@functools.lru_cache(maxsize=4096)
def find_loop(file: str, line: int, function: str) -> LoopLine:
    if function in _COMPREHENSIONS and function != "<lambda>":
        return LoopLine(has_step=False, in_step=False, in_loop=True)
    source = _read_source(file)
    scope = _find_scope(source, line, function)
    steps = _step_lines(source, scope, with_backward=True)
    loops = [node for node in _nodes(scope) if isinstance(node, _REPEATS)]
    around = [loop for loop in loops if _covers(loop, line)]
    training = [of_step[-1] for step in steps if (of_step := [loop for loop in loops if _covers(loop, step)])]
    in_step = bool(steps) and (not training or any(loop in training for loop in around))
    is_inner = any(not any(_covers(loop, step) for step in steps) for loop in around)
    entered = [item.context_expr for node in _nodes(scope) if isinstance(node, ast.With) and _covers(node, line)
               for item in node.items]  # fmt: skip
    entered += scope.decorator_list if isinstance(scope, ast.FunctionDef) else []
    without_grad = any(_PATTERNS["without_grad"].search(ast.unparse(each)) for each in entered)
    in_loop = is_inner and (in_step or not steps)
    own_steps = (_step_lines(source, loop) for loop in reversed(around) if isinstance(loop, _LOOPS))
    is_after_step = line > max(next(filter(None, own_steps), [line]))
    return LoopLine(bool(steps), in_step, in_loop, without_grad, is_after_step)


def _find_scope(source: _Source | None, line: int, function: str) -> ast.AST:
    """The function of that name around a line; an empty one: there is none, or the file cannot be read."""
    if source is None:
        return _NO_SCOPE
    if function == "<module>":
        return source.tree
    functions = [node for node in _around(source.tree, line) if isinstance(node, _FUNCTIONS) and node.name == function]
    return functions[-1] if functions else _NO_SCOPE


def _around(tree: ast.Module, line: int) -> Iterator[ast.AST]:
    """The nodes that a line is in, outer ones first, and those that have no lines of their own."""
    queue: list[ast.AST] = [tree]
    for node in queue:  # grows during the loop
        yield node
        queue += [child for child in ast.iter_child_nodes(node) if not hasattr(child, "lineno") or _covers(child, line)]


@functools.lru_cache(maxsize=512)
def _nodes(scope: ast.AST) -> Sequence[ast.AST]:
    """The nodes of a scope, outer ones first, without those of functions and classes in it."""
    nodes = [scope]
    for node in nodes:  # grows during the loop
        if node is scope or not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            nodes += ast.iter_child_nodes(node)
    return nodes


def _step_lines(source: _Source | None, scope: ast.AST, *, with_backward: bool = False) -> list[int]:
    """Lines with a step of an optimizer, or with a call of a function of this file, or method, that takes one; where
    there is none, those that call such a function or method of a file that this one imports (`agent.update(batch)`)."""
    step_functions = source.step_functions if source is not None else frozenset()
    calls = [node for node in _nodes(scope) if isinstance(node, ast.Call)]
    lines = [
        node.lineno for node in calls
        if _is_step(node, with_backward=with_backward) or _own_name(node.func) in step_functions
    ]  # fmt: skip
    if lines or not calls or source is None:
        return lines
    imported = _imported_step_functions(source.path)
    return [node.lineno for node in calls if _called_name(node.func) in imported]


def _own_name(node: ast.expr) -> str:
    """`f` of `f` and `self.f`; empty for others."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _called_name(node: ast.expr) -> str:
    """`update` of `update` and `agent.update`; empty for a method of an object that is no model, as a progress bar."""
    if isinstance(node, ast.Attribute):
        return "" if _PATTERNS["no_model"].search(ast.unparse(node.value)) else node.attr
    return node.id if isinstance(node, ast.Name) else ""


@functools.lru_cache(maxsize=64)
def _imported_step_functions(path: Path) -> frozenset[str]:
    """Functions and methods that take a step of an optimizer in the job's own files that one imports by name."""
    source, found = _read_source(str(path)), set[str]()
    for other in {file for name in source.imports.values() if (file := _find_module(path, name))} if source else ():
        with contextlib.suppress(OSError):  # it may not be read
            if _MAY_UPDATE.search(regular_files.read_bytes(other, max_bytes=MAX_SOURCE_BYTES)):
                imported = _read_source(str(other))
                found |= imported.step_functions if imported is not None else set()
    return frozenset(found)


def _find_module(path: Path, name: str) -> Path | None:
    """The file in the folder of `path`, or in the two above, that a name is imported from; None: it is installed."""
    parts = name.lstrip(".").split(".")
    level = len(name) - len(name.lstrip("."))
    folders = path.parents[max(0, level - 2) : level] if level else path.parents[:3]  # "..x" of `from . import x`
    for folder in folders:
        for length in (len(parts), len(parts) - 1):
            module = folder.joinpath(*parts[:length])
            candidates = (module.with_suffix(".py"), module / "__init__.py") if length else ()
            if (file := next((one for one in candidates if one != path and one.is_file()), None)) is not None:
                return file
    return None


_MAY_UPDATE = re.compile(rb"\.\s*step\s*\(|apply_(gradients|updates)\s*\(")
"""An update of weights by its text: to look at files with one, and at the functions of its lines alone, saves most of
the time."""


def _is_step(node: ast.Call, *, with_backward: bool = False) -> bool:
    """Whether it is `optimizer.step(…)` or another update of weights, no schedule. with_backward: also a backward."""
    if not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr != "step":
        return node.func.attr in _UPDATES or (with_backward and node.func.attr in _TABLE["backwards"])
    return _PATTERNS["no_optimizer"].search(ast.unparse(node.func.value)) is None


def _takes_step(function: ast.AST) -> bool:
    """Whether it takes a step of an optimizer, and none in a loop."""
    steps = _step_lines(None, function)
    loops = [node for node in _nodes(function) if isinstance(node, _LOOPS)]
    return bool(steps) and not any(_covers(loop, step) for loop in loops for step in steps)


@functools.lru_cache(maxsize=64)
def find_growing_line(file: str, name: str) -> int:
    """The first line that adds to a container, by the last part of its name (`cache` of `self.cache`); 0: not known."""
    try:
        source, wanted = _read_source(file), _last_name(ast.parse(name, mode="eval").body)
    except SyntaxError:  # the attribute has a name that only `setattr` can give
        return 0
    nodes = ast.walk(source.tree) if source is not None else ()
    lines = (node.lineno for node in nodes for holder in _extended(node) if _last_name(holder) == wanted)  # type: ignore[attr-defined]
    return min(lines, default=0)


def _extended(node: ast.AST) -> list[ast.expr]:
    """The containers that a node adds to."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWING:
        return [node.func.value]
    if isinstance(node, ast.Assign):
        return [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    return [node.target] if isinstance(node, ast.AugAssign) else []


class GrowingHolder(TypedDict):
    """What the hook writes of a container that grows (`stoker_hook/growth.py`)."""

    file: str
    name: str
    type: str
    items: str
    before: Count
    after: Count
    seconds: Amount
    bytes: Number
    graph: bool
    grown: Number


def describe_growth(holders: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the hook found, as `schemas.Holder`: with the line that adds to it, `losses in train.py:41`."""
    described = []
    for holder in holders:
        line = find_growing_line(holder["file"], holder["name"])
        place = Path(holder["file"]).name + (f":{line}" if line else "")
        items = f" of {holder['items']}" if holder["items"] else ""
        text = (
            f"`{holder['name']}` in {place}: a {holder['type']}, {holder['after']:,} entries{items}, "
            f"{holder['after'] - holder['before']:,} more in {holder['seconds']:,.0f} s"
        )
        kept = {"bytes": holder["bytes"], "graph": holder["graph"], "grown": holder["grown"]}
        described.append({"text": text, "place": place, "name": holder["name"], **kept})
    return described


def _last_name(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.lru_cache(maxsize=64)
def read_source_lines(file: str) -> list[str]:
    """Reads a regular file of bounded size; else no lines: the process that is sampled may have forged the name."""
    try:
        return regular_files.read_text(file, errors="replace", max_bytes=MAX_SOURCE_BYTES).splitlines()
    except (OSError, ValueError):
        return []


@functools.lru_cache(maxsize=64)
def _read_source(file: str) -> _Source | None:
    try:
        text = regular_files.read_bytes(file, max_bytes=MAX_SOURCE_BYTES)
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # it may not be Python at all
        return None
    imports: dict[str, str] = {}
    own: set[str] = set()
    step_functions: set[str] = set()
    updates = [number for number, line in enumerate(text.splitlines(), 1) if _MAY_UPDATE.search(line)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                imports[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imports |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            own.add(node.name)
            may_step = not isinstance(node, ast.ClassDef) and any(_covers(node, line) for line in updates)
            if may_step and _takes_step(node):
                step_functions.add(node.name)
    return _Source(Path(file), tree, imports, frozenset(own), frozenset(step_functions))


def _imports_of_line(tree: ast.Module, line: int) -> str:
    """`import NAME` of an import; empty: the line is none."""
    for node in _around(tree, line):
        if isinstance(node, ast.Import):
            return f"import {', '.join(alias.name for alias in node.names)}"
        if isinstance(node, ast.ImportFrom):
            return f"import {node.module or '.'}"
    return ""


def _entered_in_line(tree: ast.Module, line: int) -> str:
    """`with NAME` of a line that enters a lock or another object by its name; empty: it does not."""
    items = [item.context_expr for node in _around(tree, line) if isinstance(node, ast.With) for item in node.items]
    names = (item for item in items if isinstance(item, ast.Name | ast.Attribute) and item.lineno == line)
    return next((f"with {ast.unparse(name)}" for name in names), "")


def _calls_of_line(tree: ast.Module, line: int, function: str) -> list[ast.Call]:
    """The calls that a line may run, the outermost first; those that begin in it, if any do."""
    statements = [node for node in _around(tree, line) if isinstance(node, ast.stmt)]
    if not statements:
        return []
    newest = max(node.lineno for node in statements)  # several statements may be in one line
    nodes = list(_expressions([node for node in statements if node.lineno == newest]))
    if (kind := _COMPREHENSIONS.get(function)) is not None:
        bodies = [node for node in nodes if isinstance(node, kind) and _covers(node, line)]
        nodes = list(_expressions(bodies[-1:]))
    else:
        hidden = [node for node in nodes if isinstance(node, ast.Lambda)]
        inside = {id(node) for node in _expressions(hidden)}
        nodes = [node for node in nodes if id(node) not in inside]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _covers(node, line)]
    return [call for call in calls if line in (call.lineno, call.func.end_lineno)] or calls


def _expressions(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes and the expressions below them, outer ones first; not the statements of a body."""
    queue = list(nodes)
    for node in queue:  # grows during the loop
        yield node
        queue += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _covers(node: ast.AST, line: int) -> bool:
    end_line = getattr(node, "end_lineno", None)
    return end_line is not None and node.lineno <= line <= end_line  # type: ignore[attr-defined]


def _call_name(call: ast.Call, source: _Source) -> str:
    parts: list[str] = []
    node: ast.expr = call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([source.imports.get(node.id, node.id), *reversed(parts)])
    return parts[0] if parts else ""
