"""`hungarian.assign` as a Triton kernel: one program per problem, the columns of a row in its registers.

The algorithm is that of `hungarian._assign_one`. Costs are read as float64, so the result does not depend on the number
of threads. Imported only where Triton is installed; TRITON_INTERPRET=1 runs it on CPU tensors.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (kernels have no types of Python)

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _at(values, columns, column):
    """The value of a column, as a scalar."""
    return tl.sum(tl.where(columns == column, values, tl.zeros_like(values)), axis=0)


@triton.jit
def _row(cost, row, row_stride, columns, column_stride, is_column, worst):
    """float64 costs of a row; `worst` for those that are not finite, infinity where there is no column."""
    values = tl.load(cost + row * row_stride + columns * column_stride, mask=is_column, other=0.0).to(tl.float64)
    values = tl.where(tl.abs(values) < float("inf"), values, worst)
    return tl.where(is_column, values, float("inf"))


@triton.jit
def assign_kernel(
    cost, valid, assigned, num_queries, num_boxes, problem_stride, query_stride, box_stride, BLOCK: tl.constexpr
):
    problem = tl.program_id(0).to(tl.int64)
    cost += problem * problem_stride
    columns = tl.arange(0, BLOCK)
    is_box = tl.load(valid + problem * num_boxes + columns, mask=columns < num_boxes, other=0) != 0
    num_valid = tl.sum(is_box.to(tl.int32), axis=0)
    # Rows are boxes, and columns are queries; with more boxes than queries, the other way round.
    swapped = num_valid > num_queries
    num_rows = tl.where(swapped, num_queries, num_boxes)
    row_stride, column_stride = tl.where(swapped, query_stride, box_stride), tl.where(swapped, box_stride, query_stride)
    is_column = tl.where(swapped, is_box, columns < num_queries) != 0

    low, high = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for row in range(0, num_rows):
        if swapped | (_at(is_box.to(tl.int32), columns, row) > 0):
            values = _row(cost, row, row_stride, columns, column_stride, is_column, 0.0)
            values = tl.where(is_column, values, 0.0)
            low, high = tl.minimum(low, values), tl.maximum(high, values)
    least, largest = tl.min(low, axis=0), tl.max(high, axis=0)
    worst = largest + (largest - least + 1.0) * (tl.minimum(num_valid, num_queries) + 1)

    price = tl.zeros((BLOCK,), tl.float64)
    row_of_column = tl.full((BLOCK,), -1, tl.int32)
    for first in range(0, num_rows):
        if swapped | (_at(is_box.to(tl.int32), columns, first) > 0):
            values = _row(cost, first, row_stride, columns, column_stride, is_column, worst)
            distance = values - price
            length_of = tl.zeros((BLOCK,), tl.float64)  # of the path to a scanned column
            is_open = is_column
            previous = tl.zeros((BLOCK,), tl.int32) + first
            column = tl.argmin(distance, axis=0)
            row = _at(row_of_column, columns, column)
            while row >= 0:
                here = columns == column
                length = _at(distance, columns, column)
                length_of = tl.where(here, length, length_of)
                is_open = is_open & (columns != column)
                reduced = _row(cost, row, row_stride, columns, column_stride, is_column, worst) - price
                reduced = tl.where(is_column, reduced, 0.0)
                reduced = reduced + (length - _at(reduced, columns, column))
                is_shorter = is_open & (reduced < distance)
                distance = tl.where(is_shorter, reduced, distance)
                previous = tl.where(is_shorter, row, previous)
                distance = tl.where(here, float("inf"), distance)
                column = tl.argmin(distance, axis=0)
                row = _at(row_of_column, columns, column)
            final = _at(tl.where(is_open, distance, 0.0), columns, column)
            price = tl.where(is_column, tl.where(is_open, price, price + length_of - final), price)
            moving = column
            row = first - 1
            while row != first:  # the rows of the path move on by one column
                row = _at(previous, columns, moving)
                left = tl.max(tl.where(row_of_column == row, columns, -1), axis=0)
                row_of_column = tl.where(columns == moving, row, row_of_column)
                moving = left
    out = assigned + problem * num_boxes
    if swapped:
        tl.store(out + columns, row_of_column.to(tl.int64), mask=columns < num_boxes)
    else:
        tl.store(out + row_of_column, columns.to(tl.int64), mask=row_of_column >= 0)


def assign(cost: Tensor, valid: Tensor) -> Tensor:
    assigned = torch.full(valid.shape, -1, dtype=torch.int64, device=cost.device)
    num_problems, num_queries, num_boxes = cost.shape
    if num_problems and num_queries and num_boxes:
        block = max(128, triton.next_power_of_2(max(num_queries, num_boxes)))
        assign_kernel[(num_problems,)](
            cost, valid.contiguous(), assigned, num_queries, num_boxes, *cost.stride(), BLOCK=block, num_warps=4
        )
    return assigned
