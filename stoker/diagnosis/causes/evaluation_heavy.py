"""Evaluation takes a large part of the run."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_repeated_phase_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

EVALUATION_HEAVY = Cause(
    id="evaluation_heavy",
    title="Evaluation takes a large part of the run",
    reason="architecture and hyper-parameters",
    symptom="training pauses for long and often",
    required_records=("steps.jsonl: phases",),
    warning_threshold=0.10,
    critical_threshold=0.35,
    metric="eval, fraction of the device time after the start; only the evaluations before the last one, if their "
    "number is known",
    source="heuristic: the defaults (training/defaults/derive.py) aim at less than a tenth",
    thresholds={"min_duration_s": Threshold(1.0, "seconds of evaluation below which there is no finding (heuristic)")},
    confidence=0.9,
    fix="Evaluate less often, or on fewer images",
    command="--eval-every",
    config_patch={"eval_every": "2ep"},
)


def evaluation_heavy(run: RunRecords) -> Finding | None:
    count = run.learning.num_evaluations
    count_evidence = make_evidence(f"{count} evaluations", count, "events.jsonl: evaluated")
    return make_repeated_phase_finding(run, EVALUATION_HEAVY, "eval", count, count_evidence)
