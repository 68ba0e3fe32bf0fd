"""The page of a study, in the frame of `stoker report`: trials, importance, and AP against the second objective."""

import shlex
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial as Trial
from optuna.trial import TrialState

from stoker.search.study import PAGE, Study, StudySpec, best_trials, importances
from stoker_watch.report import format as fmt
from stoker_watch.report.html import render_template, write_page
from stoker_watch.report.page import charts as draw
from stoker_watch.report.page.markup import Child

TITLES = {"ap": "AP", "latency_ms": "latency, ms", "step_s": "step, s", "memory_gib": "memory, GiB"}


def write_study(study: Study, out: Path | None = None) -> Path:
    """Writes the page to the study or to `out`; returns its path. Raises StorageError."""
    return write_page(render_study(study), out or study.folder / PAGE, private=True)


def render_study(study: Study) -> str:
    """The page of a study, also of one that runs."""
    spec, trials, charts = study.spec, study.trials(), draw.Charts()
    best = best_trials(spec, trials)
    values = {
        "spec": spec,
        "totals": _totals(spec, trials, best),
        "heads": ["trial", "state", *map(TITLES.get, _metrics(spec)), "steps", *sorted(spec.space.settings), ""],
        "rows": [_row(spec, trial, best) for trial in trials],
        "front": _front(charts, spec, trials, best),
        "importance": _importance(charts, spec, trials),
    }
    folder = str(study.folder)
    template, command = Path(__file__).with_name("study.html"), f"stoker report {shlex.quote(folder)} --json"
    return render_template(template, folder, command, charts=charts, **values)


def study_json(study: Study) -> dict[str, Any]:
    spec, trials = study.spec, study.trials()
    return {
        "study": spec,
        "trials": [
            {"number": trial.number, "state": trial.state.name.lower(), "params": trial.params, **trial.user_attrs}
            for trial in trials
        ],
        "best": [trial.number for trial in best_trials(spec, trials)],
        "importances": importances(spec, trials),
    }


def _metrics(spec: StudySpec) -> list[str]:
    return list(dict.fromkeys([*spec.objectives, *spec.space.limits]))


def _metric(trial: Trial, name: str) -> str:
    value = trial.user_attrs.get("metrics", {}).get(name)
    return fmt.metric(value) if name == "ap" else fmt.number(value)


def _totals(spec: StudySpec, trials: list[Trial], best: list[Trial]) -> list[list[Child]]:
    counts = ", ".join(
        f"{sum(trial.state == state for trial in trials)} {word}"
        for state, word in (
            (TrialState.COMPLETE, "complete"), (TrialState.PRUNED, "pruned"), (TrialState.FAIL, "failed"),
            (TrialState.RUNNING, "running"),
        )
    )  # fmt: skip
    winners = ", ".join(f"trial {trial.number}" for trial in best) or "none yet"
    if [trial.number for trial in best] == [0]:
        winners = "the defaults (trial 0)"
    space: list[list[Child]] = [["space" if n == 0 else "", line] for n, line in enumerate(spec.space.lines())]
    return [
        ["data", spec.data],
        ["trials", f"{len(trials)} of {spec.trials}: {counts}"],
        ["objectives", ", ".join(TITLES[name] for name in spec.objectives)],
        ["best", winners],
        *space,
        ["pruner, seed, trials of a round", f"{spec.pruner}, {spec.seed}, {spec.round}"],
    ]


def _row(spec: StudySpec, trial: Trial, best: list[Trial]) -> list[Child]:
    notes = ["the defaults"] if trial.number == 0 else []
    notes += ["best"] if trial in best else []
    notes += [f"{name} above the limit" for name, value in trial.constraints.items() if value > 0]
    notes += [trial.user_attrs["failure"].partition("\n")[0]] if "failure" in trial.user_attrs else []
    params = [fmt.setting(trial.params[n]) if n in trial.params else fmt.MISSING for n in sorted(spec.space.settings)]
    steps = fmt.count(trial.user_attrs.get("steps"))
    cells: list[Child] = [str(trial.number), trial.state.name.lower(), *(_metric(trial, n) for n in _metrics(spec))]
    return [*cells, steps, *params, ", ".join(notes)]


def _front(charts: draw.Charts, spec: StudySpec, trials: list[Trial], best: list[Trial]) -> Any:
    """AP against the second objective, with the front; with one objective AP by trial, with the best so far."""
    known = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not known:
        return None
    if len(spec.objectives) == 2:
        ordered = sorted(best, key=lambda trial: trial.values[1])
        traces = [
            draw.curve(name, *_places(shown), k, mode=mode, text=_names(shown))
            for name, shown, k, mode in (("trials", known, 1, "markers"), ("front", ordered, 0, "lines+markers"))
        ]
        description = f"{fmt.plural(len(best), 'trial')} that no other one beats in both"
        return charts.add("Pareto front", description, traces, x=TITLES[spec.objectives[1]], y="AP")
    so_far = [max(other.values[0] for other in known if other.number <= trial.number) for trial in known]
    x = [trial.number for trial in known]
    traces = [
        draw.curve("AP", x, [trial.values[0] for trial in known], 1, mode="markers", text=_names(known)),
        draw.curve("best so far", x, so_far, 0),
    ]
    return charts.add("AP by trial", "those that trained to their end", traces, x="trial", y="AP")


def _names(trials: list[Trial]) -> list[str]:
    return [f"trial {trial.number}" for trial in trials]


def _places(trials: list[Trial]) -> tuple[list[float], list[float]]:
    """(second objectives, AP)."""
    return [trial.values[1] for trial in trials], [trial.values[0] for trial in trials]


def _importance(charts: draw.Charts, spec: StudySpec, trials: list[Trial]) -> Any:
    found = importances(spec, trials)
    traces = [draw.bars("importance", list(found), [round(value, 4) for value in found.values()], draw.color(0))]
    description = "part of the differences of AP that a setting explains (PED-ANOVA)"
    return charts.add("Importance", description, traces if found else [], yaxis=draw.FROM_ZERO)
