"""A worker of a search whose trainings are a formula, in a process of its own; it ends itself with SIGKILL where it is
told to: `python -m tests.trainer.search.fake_worker STUDY [PLACE FIRST_TRIAL]`, PLACE one of begin, evaluation, end."""

import math
import os
import signal
import sys
from pathlib import Path

from stoker.search.study import Claim, Outcome, Study
from stoker.search.worker import work

EVALUATIONS = 9


def ap_of(params: dict[str, object], evaluation: int) -> float:
    lr = float(params.get("lr", 1e-3))
    bonus = 0.05 if params.get("precision") == "bf16" else 0.0
    return round((0.9 - abs(math.log10(lr) + 2.5) / 4 + bonus) * evaluation / EVALUATIONS, 9)


def objective(study: Study, claim: Claim, place: str = "", first: int = 0) -> Outcome:
    def die(here: str) -> None:
        if here == place and claim.number >= first:
            os.kill(os.getpid(), signal.SIGKILL)

    trial = study.trials()[claim.number]
    run = study.run_dir(claim.number)
    run.mkdir(exist_ok=True)
    die("begin")
    steps = run / "steps"  # a resumed run goes on from what it has
    history = [ap_of(trial.params, n + 1) for n in range(int(steps.read_text()) if steps.exists() else 0)]
    pruned = study.is_pruned(claim.number, history)
    while len(history) < EVALUATIONS and not pruned:
        history.append(ap_of(trial.params, len(history) + 1))
        steps.write_text(str(len(history)))
        die("evaluation")
        pruned = study.is_pruned(claim.number, history)
    die("end")
    metrics = {"ap": max(history), "latency_ms": 1000 * float(trial.params.get("lr", 1e-3)), "step_s": 0.1}
    return Outcome(metrics, history, 10 * len(history), pruned=pruned)


if __name__ == "__main__":
    place, first = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else ("", 0)
    work(Path(sys.argv[1]), lambda study, claim: objective(study, claim, place, first), poll_s=0.01)
