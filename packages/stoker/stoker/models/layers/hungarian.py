"""Bipartite matching of boxes and queries with the least total cost (Hungarian matching), without stalling the device.

`assign` is one operator, `stoker::assign`, so it is one name in a trace and one node of a compiled graph. It finds the
exact optimum by shortest augmenting paths (Jonker and Volgenant 1987): one path per box, and a path visits each column
at most once, so M boxes take at most M · (M + 1) / 2 scans of a row, whatever the costs are. On CUDA it is a kernel
with one program per problem (`hungarian_kernel.py`): its loops end on the device and the host waits for nothing. On a
CPU, where there is nothing to wait for, it is NumPy. Where Triton is missing, the costs are copied to the host, which
waits, as "assign".
"""

import importlib.util

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.hardware.host_sync import allow_host_sync

UNASSIGNED = -1


def assign(cost: Tensor, valid: Tensor) -> Tensor:
    """Query of each box, or `UNASSIGNED`: int64 [K, M]. The sum of the costs of the pairs is the least possible.

    cost: floating point [K, Q, M] of K problems with Q queries and M boxes, any strides; it is computed in float64.
    valid: bool [K, M]; boxes that are not valid are padding and get `UNASSIGNED`. No query is given to two boxes. With
    more valid boxes than queries, Q boxes get one, and the others `UNASSIGNED`. A pair with a cost that is not finite
    is taken only where no assignment avoids it. No gradient flows through it.
    """
    return torch.ops.stoker.assign(cost.detach(), valid)


def _assign(cost: Tensor, valid: Tensor) -> Tensor:
    if cost.device.type == "cuda" and importlib.util.find_spec("triton"):
        from stoker.models.layers import hungarian_kernel

        return hungarian_kernel.assign(cost, valid)
    with allow_host_sync("assign"):
        both = torch.cat((cost, valid[:, None].to(cost.dtype)), 1).cpu().double().numpy()  # one wait, one XLA program
        costs, is_box = both[:, :-1], both[:, -1] > 0
        assigned = np.full(is_box.shape, UNASSIGNED, np.int64)
        for problem, boxes in enumerate(is_box):
            if boxes.any():
                assigned[problem, boxes] = _assign_one(np.ascontiguousarray(costs[problem][:, boxes].T))
        return torch.from_numpy(assigned).to(cost.device)


def _assign_one(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Column of each row, or `UNASSIGNED`, with the least total cost [rows, columns]."""
    finite = np.isfinite(cost)
    if not finite.all():  # one such pair costs more than any assignment without
        low, high = cost.min(where=finite, initial=0.0), cost.max(where=finite, initial=0.0)
        cost = np.where(finite, cost, high + (high - low + 1) * (min(cost.shape) + 1))
    if len(cost) > cost.shape[1]:
        row_of = _assign_one(np.ascontiguousarray(cost.T))
        assigned = np.full(len(cost), UNASSIGNED, np.int64)
        assigned[row_of] = np.arange(len(row_of))
        return assigned
    num_rows, num_columns = cost.shape
    column_of, row_of_column = [UNASSIGNED] * num_rows, [UNASSIGNED] * num_columns
    # The first row that has its least cost in a column gets the column: with prices of 0, that is optimal for them.
    for row, column in enumerate(cost.argmin(1).tolist()):
        if row_of_column[column] < 0:
            column_of[row], row_of_column[column] = column, row
    price = np.zeros(num_columns)
    reduced, is_shorter = np.empty(num_columns), np.empty(num_columns, np.bool_)
    for first in [row for row, column in enumerate(column_of) if column < 0]:
        # Shortest paths from the row over reduced costs, to the nearest column that no row has.
        distance, open_price = cost[first] - price, price.copy()
        previous = np.full(num_columns, first)
        scanned: list[int] = []
        lengths: list[float] = []
        while row_of_column[column := int(distance.argmin())] >= 0:
            row, length = row_of_column[column], distance[column]
            scanned.append(column)
            lengths.append(length)
            distance[column], open_price[column] = np.inf, -np.inf  # it gets no shorter path
            np.subtract(cost[row], open_price, out=reduced)
            reduced += length - (cost[row, column] - price[column])
            np.less(reduced, distance, out=is_shorter)
            np.copyto(distance, reduced, where=is_shorter)
            np.copyto(previous, row, where=is_shorter)
        price[scanned] += np.array(lengths) - distance[column]
        while column >= 0:  # the rows of the path move on by one column
            row = int(previous[column])
            row_of_column[column] = row
            column_of[row], column = column, column_of[row]
    return np.array(column_of, np.int64)


_library = torch.library.Library("stoker", "FRAGMENT")
_library.define("assign(Tensor cost, Tensor valid) -> Tensor")
_library.impl("assign", _assign, "CompositeExplicitAutograd")
torch.library.register_fake(
    "stoker::assign", lambda cost, valid: torch.empty(valid.shape, dtype=torch.int64, device=cost.device), lib=_library
)
