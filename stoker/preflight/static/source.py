"""A Python script as a syntax tree, with what the rules ask of it. The script is never imported or executed.

All walks are iterative, so a script that is nested too deeply for the parser is an error and one that is not costs
linear time. The rules are in `script_rules.py`.
"""

import ast
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stoker.preflight.static.requirements import read_text
from stoker.preflight.static.tables import SCRIPTS

MAX_BYTES = 1 << 20
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_IFS = (ast.If, ast.IfExp)


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
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        pending: list[ast.AST] = [self.tree]
        while pending:
            node = pending.pop()
            self.nodes.append(node)
            children = list(ast.iter_child_nodes(node))
            for child in children:
                self.parents.setdefault(child, node)
            pending += reversed(children)
        self.aliases: dict[str, str] = {}
        self.modules: set[str] = set()
        """Top-level modules that are imported; `.` for one of the same package."""
        self.calls: list[ast.Call] = []
        self.functions: dict[str, list[Function]] = {}
        self.assigned: dict[str, list[Assignment]] = {}
        """Name → its assignments, in the order of the lines."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                self._assign(node, node.value)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
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
        """Whether it imports only known libraries: no code of its own project, and none that may take over
        the training."""
        return self.modules <= sys.stdlib_module_names | SCRIPTS.known_modules

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
        scopes = (*_FUNCTIONS, ast.ClassDef)
        return next((parent for parent, _ in self.ancestors(node) if isinstance(parent, scopes)), self.tree)

    def conditions(self, node: ast.AST, *, within: ast.AST | None = None) -> dict[ast.AST, bool]:
        """The `if`s, inside the function (or `within`), on which a node depends: node of the `if` → whether it is in
        its body. `if __name__ == "__main__"` is none."""
        found: dict[ast.AST, bool] = {}
        for parent, child in self.ancestors(node):
            if parent is within or isinstance(parent, _FUNCTIONS):
                break
            if isinstance(parent, _IFS) and child is not parent.test:
                if not (isinstance(parent, ast.If) and _is_main(parent.test)):
                    found[parent] = child in parent.body if isinstance(parent, ast.If) else child is parent.body
            elif isinstance(parent, ast.ExceptHandler):
                found[parent] = True
        return found

    def runs_always(self, node: ast.AST) -> bool:
        """Whether a statement is part of every run: under no `if`, and in the module or a function that every
        run calls."""
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


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def read_source(path: Path) -> Source:
    """Raises OSError, ValueError."""
    return Source(read_text(path, MAX_BYTES), str(path))
