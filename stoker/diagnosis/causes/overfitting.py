"""The model overfits: validation AP falls while the training loss falls."""

import math

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

OVERFITTING = find_cause("overfitting")


def overfitting(run: RunRecords) -> Finding | None:
    cause, learning = OVERFITTING, run.learning
    if learning.best is None or learning.newest_ap is None or learning.best[1] <= 0:
        return None
    best_t, best_ap, _ = learning.best
    ap_drop = best_ap - learning.newest_ap
    if ap_drop < cause.threshold("min_ap_drop") or learning.evals_since_best < cause.threshold("evaluations"):
        return None
    if learning.num_gt_boxes:
        mean_ap = best_ap - ap_drop / 2
        standard_error = math.sqrt(mean_ap * (1 - mean_ap) / learning.num_gt_boxes)
        if ap_drop < cause.threshold("sigmas") * standard_error:
            return None
    before = [value for t, value in learning.loss.points if t <= best_t]
    after = [value for t, value in learning.loss.points if t > best_t]
    if not before or not after or after[-1] >= before[-1]:
        return None
    evidence = [
        make_evidence(f"AP was {best_ap:.3f} and is {learning.newest_ap:.3f}", -ap_drop, "events.jsonl: evaluated"),
        make_evidence(
            f"the training loss fell from {before[-1]:.3g} to {after[-1]:.3g}", after[-1], "steps.jsonl: losses"
        ),
    ]
    return make_finding(
        run,
        cause,
        ap_drop / best_ap,
        evidence,
        lost_s=learning.device_s_since_best,
        estimate_basis="all since the best evaluation",
    )
