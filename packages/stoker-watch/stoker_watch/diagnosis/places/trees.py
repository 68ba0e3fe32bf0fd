"""The places of a run as trees, for the icicle chart of the report."""

from typing import NamedTuple

import msgspec

from stoker_watch.diagnosis.places.describe import name_role
from stoker_watch.diagnosis.places.sampled import PlaceTotal
from stoker_watch.diagnosis.places.totals import MIN_SHARE, wilson
from stoker_watch.diagnosis.run_data import RunRecords

MAX_TREES, MAX_NODES = 8, 12
"""Trees of a run, and nodes below a node."""


class PlaceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the tree of places: all samples of a role, or those of them with the same first names."""

    name: str
    """A line with its function, a call, an innermost frame; in a training of stoker's own first a part of stoker. Of
    the root: whose samples they are."""
    kind: str
    """That of most of its samples."""
    samples: int
    seconds: float
    low_s: float
    """95 % interval, of the fraction of the samples below the root."""
    high_s: float
    nodes: "list[PlaceNode]" = []
    """The largest first; the time of the node that is in none of them is its own."""


def place_trees(run: RunRecords) -> list[PlaceNode]:
    """A tree for each role and rank, before and after the first steps, of the MAX_TREES that were sampled most."""
    groups: dict[tuple[str, int, bool], list[PlaceTotal]] = {}
    for total in run.places:
        groups.setdefault((total.role, total.rank, total.is_startup), []).append(total)
    largest = sorted(groups, key=lambda key: -sum(total.samples for total in groups[key]))[:MAX_TREES]
    trees: list[PlaceNode] = []
    names = {"training": "training thread", "thread": "other threads", "worker": name_role(run, "worker")}
    for role, rank, is_startup in sorted(largest, key=lambda key: (key[0] != "training", key[1], key[2])):
        name = names[role]
        name += f" of rank {rank}" if run.num_ranks > 1 else ""
        sampled = [
            _Sampled((*_path(total), *filter(None, [leaf])), total.kind, total.seconds * count / total.samples, count)
            for total in groups[role, rank, is_startup]
            if total.samples
            for leaf, count in total.leaves.items()
        ]
        if sampled:
            trees.append(_make_node(f"{name}{', start' * is_startup}", sampled, 0, sampled))
    return trees


class _Sampled(NamedTuple):
    path: tuple[str, ...]
    kind: str
    seconds: float
    samples: int


def _path(total: PlaceTotal) -> tuple[str, ...]:
    if total.kind == "idle" and total.role == "worker" and not total.line:
        return ("waits for work",)
    where = f"{total.function} ({total.line})" if total.line else total.function or total.kind
    return tuple(filter(None, (total.part, where, total.call)))


def _make_node(name: str, sampled: list[_Sampled], depth: int, root: list[_Sampled]) -> PlaceNode:
    """depth: of the node, 0 for the root; root: all of the tree."""
    kinds: dict[str, float] = {}
    below: dict[str, list[_Sampled]] = {}
    for item in sampled:
        kinds[item.kind] = kinds.get(item.kind, 0.0) + item.seconds
        if len(item.path) > depth:
            below.setdefault(item.path[depth], []).append(item)
    seconds, root_s = sum(kinds.values()), sum(item.seconds for item in root)
    low, high = wilson(seconds / root_s if root_s > 0 else 0.0, sum(item.samples for item in root))
    nodes = [_make_node(child, items, depth + 1, root) for child, items in below.items()]
    return PlaceNode(
        name=name,
        kind=max(kinds, key=kinds.__getitem__),
        samples=sum(item.samples for item in sampled),
        seconds=seconds,
        low_s=low * root_s,
        high_s=high * root_s,
        nodes=sorted((n for n in nodes if n.seconds >= MIN_SHARE * root_s), key=lambda n: -n.seconds)[:MAX_NODES],
    )
