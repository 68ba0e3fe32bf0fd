"""Fails when modules of `stoker` import each other in a circle, including imports inside functions.

The hook of `stoker watch` (`stoker/watch/hook/stoker_hook/`) is not a package of `stoker`: its relative imports are
checked in the same way.

usage: python scripts/check_cycles.py     Prints each circle; exit 1 if there is one.
"""

import ast
import sys
from collections.abc import Mapping, Set
from pathlib import Path

import grimp

HOOK = Path(__file__).resolve().parent.parent / "stoker/watch/hook/stoker_hook"


def find_cycles(imports: Mapping[str, Set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan 1972), each sorted. imports: by module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in imports[module]:
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            component = []
            while not component or component[-1] != module:
                component.append(stack.pop())
            if len(component) > 1:
                cycles.append(sorted(component))

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return cycles


def package_imports(package: str) -> dict[str, Set[str]]:
    graph = grimp.build_graph(package, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def relative_imports(folder: Path) -> dict[str, Set[str]]:
    """The relative imports among the modules of one folder; the folder's `__init__` has the name of the folder."""
    names = {path.stem: folder.name if path.stem == "__init__" else path.stem for path in folder.glob("*.py")}
    imports: dict[str, Set[str]] = {}
    for stem, module in names.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse((folder / f"{stem}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                found |= {node.module} if node.module else {names.get(one.name, folder.name) for one in node.names}
        imports[module] = found
    return imports


def main() -> int:
    graphs = (package_imports("stoker"), relative_imports(HOOK))
    cycles = [cycle for imports in graphs for cycle in find_cycles(imports)]
    for cycle in cycles:
        print("import cycle: " + " ↔ ".join(cycle))
    print(f"{len(cycles)} import cycles in {sum(map(len, graphs))} modules")
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
