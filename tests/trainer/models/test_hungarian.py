"""`layers/hungarian.py` against SciPy: equal costs in random and degenerate problems, on the CPU and, in Triton's
interpreter, by the kernel of CUDA, which also compiles for an H200 without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from stoker.models.layers.hungarian import assign
from tests.host_sync import ForbidHostSync

ROOT = Path(__file__).resolve().parents[3]


def costs(kind: str, shape: tuple[int, int, int], draw: torch.Generator) -> Tensor:
    """Costs [K, Q, M] of a kind that is easy to get wrong."""
    cost = torch.rand(shape, generator=draw, dtype=torch.float64)
    match kind:
        case "ties":
            return (cost * 3).floor()
        case "near ties":
            return 1 + 1e-9 * (cost * 4).floor()
        case "equal":
            return torch.ones_like(cost)
        case "huge":
            return (cost - 0.5) * 1e30
        case "tiny":
            return (cost - 0.5) * 1e-30
        case "any scale":
            return torch.where(cost < 0.5, -1.0, 1.0) * 10 ** (60 * torch.rand(shape, generator=draw) - 30)
        case "float32":
            return (10 * cost - 8).float()
        case "geometric":  # L1 distances of crowded points: long augmenting paths
            points, boxes = (torch.rand(shape[0], count, 2, generator=draw) for count in shape[1:])
            return (points[:, :, None] - boxes[:, None]).abs().sum(-1).double()
        case "product":  # the worst case of shortest augmenting paths: each takes all columns
            rows, columns = (torch.arange(1, count + 1, dtype=torch.float64) for count in shape[1:])
            return (rows[:, None] * columns).expand(shape)
    return cost - 0.5


KINDS = ("any", "ties", "near ties", "equal", "huge", "tiny", "any scale", "float32", "geometric", "product")


def check(cost: Tensor, valid: Tensor, found: Tensor) -> None:
    """found is a matching of all boxes (of all queries, if they are fewer) with the cost of SciPy's."""
    assert found.shape == valid.shape
    assert found.dtype == torch.int64
    assert (found[~valid] == -1).all()
    for problem in range(len(cost)):
        boxes = valid[problem].nonzero()[:, 0]
        queries = found[problem, boxes]
        matched = queries >= 0
        num_matched = min(cost.shape[1], len(boxes))
        assert matched.sum() == len(queries[matched].unique()) == num_matched
        pairs = cost[problem].double()[:, boxes]
        best = pairs.numpy()[linear_sum_assignment(pairs.numpy())]
        taken = pairs[queries[matched], matched.nonzero()[:, 0]].numpy()
        assert abs(taken.sum() - best.sum()) <= 1e-6 * min(1.0, np.abs(best).max(initial=1e-300)) or abs(
            taken.sum() - best.sum()
        ) <= 1e-9 * np.abs(best).max(initial=0)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_equal_those_of_scipy(kind: str) -> None:
    """2,000 problems in all ten kinds: 200 each of up to 40 queries and boxes, padded, of which any number is valid."""
    draw = torch.Generator().manual_seed(KINDS.index(kind))
    for _ in range(20):
        queries, boxes = (int(torch.randint(1, high, (), generator=draw)) for high in (40, 40))
        cost = costs(kind, (10, queries, boxes), draw)
        valid = torch.rand(10, boxes, generator=draw) < torch.rand(10, 1, generator=draw)
        valid[0], valid[1] = False, True
        with ForbidHostSync():
            found = assign(cost, valid)
        check(cost, valid, found)


@pytest.mark.parametrize("queries", [300, 500, 1000])
def test_costs_of_500_boxes_equal_those_of_scipy(queries: int) -> None:
    draw = torch.Generator().manual_seed(queries)
    cost = costs("geometric", (1, queries, 500), draw)
    valid = torch.ones(1, 500, dtype=torch.bool)
    check(cost, valid, assign(cost, valid))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_costs_that_are_not_finite_are_taken_last(bad: float) -> None:
    draw = torch.Generator().manual_seed(0)
    cost = costs("any", (40, 12, 8), draw)
    is_bad = torch.rand(cost.shape, generator=draw) < torch.linspace(0, 1, 40)[:, None, None]
    valid = torch.ones(40, 8, dtype=torch.bool)
    found = assign(torch.where(is_bad, bad, cost), valid)
    check(torch.where(is_bad, 1e3, cost), valid, found)
    assert (assign(torch.full((1, 5, 3), bad), valid[:1, :3]).sort().values == torch.arange(5)[:3]).all()


def test_it_is_one_operator_of_a_graph() -> None:
    draw = torch.Generator().manual_seed(0)
    cost, valid = costs("any", (3, 20, 6), draw).requires_grad_(), torch.rand(3, 6, generator=draw) < 0.6
    found = torch.compile(assign, fullgraph=True, backend="eager")(cost, valid)
    assert torch.equal(found, assign(cost, valid))
    assert not found.requires_grad
    torch.library.opcheck(torch.ops.stoker.assign.default, (cost.detach(), valid))


def interpreted_problems() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    problems = []
    for kind in KINDS:
        for queries, boxes in ((9, 5), (5, 9), (6, 6), (1, 3), (140, 12)):
            cost = costs(kind, (2, queries, boxes), draw)
            valid = torch.rand(2, boxes, generator=draw) < 0.8
            problems.append((cost.mT.contiguous().mT, valid))
    cost = costs("any", (4, 9, 6), draw)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])[:, None, None]
    problems.append((torch.where(cost < 0.3, bad, cost), torch.ones(4, 6, dtype=torch.bool)))
    return problems


@pytest.mark.slow
def test_the_kernel_equals_scipy_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with the CUDA build of torch")
    program = (
        "import json, torch\nfrom stoker.models.layers import hungarian_kernel\n"
        "from tests.trainer.models.test_hungarian import interpreted_problems\n"
        "print(json.dumps([hungarian_kernel.assign(*problem).tolist() for problem in interpreted_problems()]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *usual, not_finite = list(zip(interpreted_problems(), json.loads(done.stdout.splitlines()[-1]), strict=True))
    for (cost, valid), found in usual:
        check(cost, valid, torch.tensor(found))
    (cost, valid), found = not_finite
    check(torch.where(cost.isfinite(), cost, 1e3), valid, torch.tensor(found))


@pytest.mark.slow  # 15 s
def test_the_kernel_compiles_for_an_h200_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton comes with the CUDA build of torch")
    from stoker.models.layers import hungarian_kernel
    from tests.trainer.models.test_triton_kernels import compile_for

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"cost": "*fp32", "valid": "*i1", "assigned": "*i64"}
    _, usage = compile_for(90, hungarian_kernel.assign_kernel, types, {"BLOCK": 1024, "num_warps": 4}, tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
