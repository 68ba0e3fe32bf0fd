"""A Python script as a syntax tree, with what the rules ask of it. The script is never imported or executed.

All walks are iterative, so a script that is nested too deeply for the parser is an error and one that is not costs
linear time. The rules are in `tensorflow_rules.py` and `torch_rules.py`.
"""

import ast
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from stoker.preflight.static.names import SCRIPTS
from stoker.preflight.static.requirements import read_text

MAX_BYTES = 1 << 20
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_IFS = (ast.If, ast.IfExp)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)


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
        self._scopes: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        pending: list[ast.AST] = [self.tree]
        while pending:
            node = pending.pop()
            self.nodes.append(node)
            children = list(ast.iter_child_nodes(node))
            for child in children:
                self.parents.setdefault(child, node)
                self._scopes.setdefault(child, node if isinstance(node, _SCOPES) else self._scopes.get(node, self.tree))
            pending += reversed(children)
        self.aliases = dict(self._imports())
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions: dict[str, list[Function]] = {}
        self.assigned: dict[str, list[tuple[ast.stmt, ast.expr]]] = {}
        """Name → (statement, value) of all its assignments; the value of a tuple target is that of the tuple."""
        self.assigned_in: dict[tuple[str, ast.AST], list[tuple[ast.stmt, ast.expr]]] = {}
        """The same for each function, class or module, in the order of the lines."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node, node.value)
        for statements in self.assigned_in.values():
            statements.sort(key=lambda pair: pair[0].lineno)
        self.names = frozenset(node.id for node in self.nodes if isinstance(node, ast.Name)) | frozenset(
            node.attr for node in self.nodes if isinstance(node, ast.Attribute)
        )
        self.strings = tuple(
            node.value for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (top, top)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    def _assign(self, target: ast.expr, statement: ast.stmt, value: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.assigned.setdefault(node.id, []).append((statement, value))
                self.assigned_in.setdefault((node.id, self.scope(statement)), []).append((statement, value))

    def place(self, node: ast.AST) -> str:
        return f"{self.file}:{getattr(node, 'lineno', 1)}"

    def imports(self, *modules: str) -> bool:
        """Whether one of these top-level modules is imported."""
        return any(path.partition(".")[0] in modules for path in self.aliases.values())

    @property
    def is_self_contained(self) -> bool:
        """Whether it imports only known libraries: no code of its own project, and none that may take over
        the training."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and (node.level or not _is_known(node.module or "")):
                return False
            if isinstance(node, ast.Import) and not all(_is_known(alias.name) for alias in node.names):
                return False
        return True

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
        return self._scopes.get(node, self.tree)

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
            elif isinstance(parent, ast.ExceptHandler | ast.match_case) or (
                isinstance(parent, ast.BoolOp) and child is not parent.values[0]
            ):
                found[parent] = True
        return found

    def runs_always(self, node: ast.AST) -> bool:
        """Whether a statement is part of every run: under no `if`, and in the module or a function that every
        run calls."""
        scope = self.scope(node)
        called = isinstance(scope, ast.Module) or getattr(scope, "name", "") in ("main", "train", "run")
        return called and not self.conditions(node)

    def integer(self, node: ast.AST | None) -> int | None:
        """The value of a literal, or of a name that is assigned once, to a literal."""
        if isinstance(node, ast.Name):
            values = self.assigned.get(node.id, [])
            parameters = any(node.id in _parameters(f) for fs in self.functions.values() for f in fs)
            node = values[0][1] if len(values) == 1 and not parameters else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.integer(node.operand)
            return None if inner is None else -inner
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
            return node.value
        return None

    def text_of(self, node: ast.AST | None) -> str | None:
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    def function(self, node: ast.AST | None) -> Function | None:
        """The function that an expression names, if this script defines exactly one of that name."""
        if isinstance(node, ast.Lambda):
            return node
        if isinstance(node, ast.Call) and self.called(node).endswith("partial") and node.args:
            return self.function(node.args[0])
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        found = self.functions.get(name, [])
        return found[0] if len(found) == 1 else None

    def reached_calls(self, function: Function) -> list[ast.Call]:
        """The calls of a function, and of the functions of this script that it calls."""
        found: list[ast.Call] = []
        seen: set[ast.AST] = set()
        pending: list[ast.AST] = [function]
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            for node in ast.walk(current):
                if isinstance(node, ast.Call):
                    found.append(node)
                    if (inner := self.function(node.func)) is not None:
                        pending.append(inner)
        return found


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _is_known(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in SCRIPTS.known_modules


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
