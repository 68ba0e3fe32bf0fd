"""Fails when modules of `stoker` import each other in a circle, imports inside functions included.

usage: python scripts/check_cycles.py     Prints each circle; exit 1 when there is any.
"""

import sys

import grimp


def find_cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Strongly connected components with more than one module (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
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

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return cycles


def main() -> int:
    graph = grimp.build_graph("stoker", cache_dir=None)
    cycles = find_cycles(graph)
    for cycle in cycles:
        print("import cycle: " + " ↔ ".join(cycle))
    print(f"{len(cycles)} import cycles in {len(graph.modules)} modules")
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
