"""Fails when modules of a package import each other in a circle, including imports inside functions.

usage: python scripts/check_cycles.py     Prints each circle; exit 1 if there is one.
"""

import sys
from collections.abc import Mapping, Set

import grimp


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


def package_imports(*packages: str) -> dict[str, Set[str]]:
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def main() -> int:
    imports = package_imports("stoker_watch", "stoker")
    cycles = find_cycles(imports)
    for cycle in cycles:
        print("import cycle: " + " ↔ ".join(cycle))
    print(f"{len(cycles)} import cycles in {len(imports)} modules")
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
