"""Box sides as refined distributions (D-FINE, Peng et al. 2024, arXiv 2410.13842): FDR, and its losses.

A side of a box is the side of a reference box moved by the mean of a distribution over NUM_BINS distances W(n), which
are dense around 0 and sparse far from it. Layers of a decoder add to each other's logits. FGL is a cross-entropy of the
two bins around the true distance, DDF distils the last layer into the others. The caller switches autocast off.
"""

import torch
from torch import Tensor

MAX_BIN = 32
NUM_BINS = MAX_BIN + 1
REG_SCALE, UPPER = 4.0, 0.5
"""Section 4.1: c and a of W(n): the last but one distance is a · c, in units of size / c. D-FINE-X has c = 8."""
TEMPERATURE = 5.0
"""DDF compares distributions of this temperature."""


def bin_distances(reg_scale: float = REG_SCALE) -> Tensor:
    """W(n), equation 5: float64 [NUM_BINS], in units of the reference box's size / reg_scale."""
    bound = UPPER * reg_scale
    step = (bound + 1) ** (2 / (MAX_BIN - 2))
    positive = [step**n - 1 for n in range(1, MAX_BIN // 2)] + [2 * bound]
    return torch.tensor([-value for value in reversed(positive)] + [0.0, *positive], dtype=torch.float64)


def decode_sides(side_logits: Tensor, reference: Tensor, distances: Tensor, reg_scale: float = REG_SCALE) -> Tensor:
    """Boxes [..., 4], center and size, from `side_logits` [..., 4 · NUM_BINS] and reference boxes [..., 4]; distances:
    `bin_distances(reg_scale)` in the dtype of the logits. A size may be below 0."""
    moved = 0.5 * reg_scale + side_logits.unflatten(-1, (4, NUM_BINS)).softmax(-1) @ distances
    center, size = reference.split(2, dim=-1)
    low_distance, high_distance = (moved * (size / reg_scale).repeat(*[1] * (size.dim() - 1), 2)).split(2, dim=-1)
    return torch.cat((center + (high_distance - low_distance) / 2, low_distance + high_distance), dim=-1)


def side_targets(
    reference: Tensor, boxes: Tensor, distances: Tensor, reg_scale: float = REG_SCALE
) -> tuple[Tensor, Tensor]:
    """(bin, weight of the bin after it), each [..., 4]: where the sides of `boxes` [..., 4] xyxy lie around reference
    boxes [..., 4] (center and size)."""
    center, size = reference.split(2, dim=-1)
    unit = size / reg_scale + 1e-16
    wanted = torch.cat(((center - boxes[..., :2]) / unit, (boxes[..., 2:] - center) / unit), dim=-1) - 0.5 * reg_scale
    lower = ((wanted[..., None] >= distances).sum(-1) - 1).clamp(0, MAX_BIN - 1)  # XLA has no `bucketize`
    below, above = distances[lower], distances[lower + 1]
    return lower, ((wanted - below) / (above - below)).clamp(0, 1)


def fgl_terms(side_logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Fine-grained localization loss (equation 6) without its weight, summed over the sides: [...].
    side_logits: [..., 4 · NUM_BINS]; target: from `side_targets`."""
    lower, upper_weight = target
    log_probs = side_logits.unflatten(-1, (4, NUM_BINS)).log_softmax(-1)
    of_lower, of_upper = log_probs.gather(-1, torch.stack((lower, lower + 1), -1)).unbind(-1)
    return -torch.lerp(of_lower, of_upper, upper_weight).sum(-1)


def ddf_loss(student: Tensor, teacher: Tensor, weight: Tensor, positive: Tensor) -> Tensor:
    """Decoupled distillation focal loss (equation 7) of each of K layers: [K].

    student: [K, B, Q, 4 · NUM_BINS]; teacher: [B, Q, 4 · NUM_BINS], without its gradient; weight: [K, B, Q], IoU of a
    query with a box, the teacher's score of one without; positive: bool [K, B, Q], whether the query has a box. The
    means over queries with and without boxes are weighted by the roots of their numbers.
    """
    teacher_log = (teacher.detach() / TEMPERATURE).unflatten(-1, (4, NUM_BINS)).log_softmax(-1)
    student_log = (student / TEMPERATURE).unflatten(-1, (4, NUM_BINS)).log_softmax(-1)
    divergence = teacher_log.exp() * (teacher_log - student_log)  # XLA has no gradient of `kl_div`
    by_query = weight * TEMPERATURE**2 * divergence.sum((-2, -1)) / 4
    sums, counts = [], []
    for mask in (positive, ~positive):
        counts.append(mask.sum((1, 2)).to(weight.dtype))
        sums.append(torch.where(mask, by_query, 0.0).sum((1, 2)))
    roots = [count.sqrt() for count in counts]
    means = [total / count.clamp(min=1) for total, count in zip(sums, counts, strict=True)]
    return (means[0] * roots[0] + means[1] * roots[1]) / (roots[0] + roots[1])
