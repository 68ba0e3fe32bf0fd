"""The commands that record and read runs: `watch`, `why`, `compare`, `report`. Each imports its code when it runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stoker_watch.cli import described, show, trainer
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.printable import print_json, print_text

if TYPE_CHECKING:
    from stoker_watch.report.runs_summary import RunsSummary


@described
def watch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    pid: Annotated[int | None, Parameter(group="Run")] = None,
    run_dir: Annotated[str | None, Parameter(group="Run")] = None,
    hook: Annotated[bool, Parameter(group="Run", negative="--no-hook")] = True,
    monitor: Annotated[MonitoringOptions, Parameter(name="*", group="Monitoring")] = MonitoringOptions(),  # noqa: B008  # frozen
) -> None:
    """Runs any training job unchanged and records it, for `stoker why` and `stoker report`.

    Its output, exit code, terminal and signals stay as they are, and it goes on if
    `stoker watch` is killed. It records system telemetry once a second, and the steps,
    losses and learning rates that the job prints: TF Object Detection API, Keras,
    torchvision, Ultralytics, Lightning, Hugging Face Trainer, and plain `loss=` or
    `loss:`. Python processes that use torch or Keras are timed from the inside through
    `PYTHONPATH`; stacks of all are sampled from outside. With `--pid` it attaches to a
    running process; Ctrl-C ends the watching, not the job. Linux only.
    """
    from stoker_watch.errors import UsageError
    from stoker_watch.watch.watch import attach
    from stoker_watch.watch.watch import watch as watch_job

    if pid is not None and command:
        raise UsageError("--pid attaches to a running process; `-- CMD` starts a new one.", fix="give only one")
    if pid is not None:
        sys.exit(attach(pid, run_dir, monitor))
    sys.exit(watch_job(list(command), run_dir, hook=hook, monitor=monitor))


@described
def why(
    run: str | None = None,
    /,
    *,
    compare: str | None = None,
    all_: Annotated[str | None, Parameter(name="--all")] = None,
    price_per_device_hour: float | None = None,
    probe: bool = False,
    explain: str | None = None,
    json: bool = False,
) -> None:
    """Shows where the time of a run went, live or finished, the largest loss first, and what to change."""
    from stoker_watch.errors import UsageError

    if explain is not None:
        from stoker_watch.diagnosis.reference import explain_id
        from stoker_watch.report.findings_terminal import print_entries

        show(explain_id(explain), print_entries, json=json)
        return
    if (run is None) == (all_ is None) or (all_ is not None and compare is not None):
        raise UsageError(
            "Which run?", choices=["stoker why RUN", "stoker why RUN --compare RUN2", "stoker why --all FOLDER"]
        )
    if probe and (all_ is not None or compare is not None):
        raise UsageError("--probe takes exactly one run.", fix="stoker why RUN --probe")
    from stoker_watch.report import compare as comparing
    from stoker_watch.report import explain as explaining
    from stoker_watch.report.runs_summary import print_runs_summary

    if all_ is not None:
        show(_summarize_runs(all_, price_per_device_hour), print_runs_summary, json=json)
    elif compare is not None:
        comparison = comparing.compare(str(run), compare, price_per_device_hour)
        show(comparison, comparing.print_comparison, json=json)
    elif Path(str(run)).is_file():
        show(explaining.explain_log(Path(str(run))), explaining.print_log_explanation, json=json)
    else:
        if probe:
            trainer.require("stoker why --probe")
            explaining.run_probes(str(run), lambda text: print_text(text, file=sys.stderr))
        show(explaining.explain_run(str(run), price_per_device_hour), explaining.print_explanation, json=json)


def _summarize_runs(runs_dir: str, price_per_device_hour: float | None) -> "RunsSummary":
    from stoker_watch.report.console import progress_bar
    from stoker_watch.report.runs_summary import summarize_runs

    with progress_bar("reading runs") as progress:
        return summarize_runs(runs_dir, price_per_device_hour, lambda count: progress(count, None))


@described
def compare(before: str, after: str, /, *, threshold: float = 0.05, json: bool = False) -> None:
    """Compares the images per second of two runs; exit code 1 if the second is slower by more than the threshold.

    For CI: the 95 % interval of the ratio must be below 1 - threshold as a whole. What
    differs between the runs is printed as by `stoker why --compare`.
    """
    from stoker_watch.report import compare as comparing

    speed = comparing.check_speed(before, after, threshold)
    comparison = comparing.compare(before, after)
    comparison.speed = speed
    show(comparison, comparing.print_comparison, json=json)
    if speed.is_regression:
        sys.exit(1)


@described
def report(
    run: str | None = None,
    /,
    *,
    all_: Annotated[str | None, Parameter(name="--all")] = None,
    out: Path | None = None,
    price_per_device_hour: float | None = None,
    json: bool = False,
) -> None:
    """Makes one HTML page of a run or a search, live or finished: metrics, images, curves, time, findings, settings."""
    from stoker_watch.errors import UsageError
    from stoker_watch.report.html import write_report, write_runs_summary

    if (run is None) == (all_ is None):
        raise UsageError("Which run?", choices=["stoker report RUN", "stoker report --all FOLDER"])
    if json and out is not None:
        subject = run if all_ is None else f"--all {all_}"
        raise UsageError("--json prints to stdout; --out names a page.", fix=f"stoker report {subject} --json > FILE")
    if all_ is not None:
        summary = _summarize_runs(all_, price_per_device_hour)
        show(summary, lambda runs: print_text(write_runs_summary(runs, out)), json=json)
    elif (Path(str(run)) / "study.json").exists():
        page = trainer.require("The report of a search", "stoker.search.page")
        study = page.Study(Path(str(run)))
        if json:
            print_json(page.study_json(study))
        else:
            print_text(page.write_study(study, out))
    elif json:
        from stoker_watch.report.run_report import collect

        print_json(collect(str(run), price_per_device_hour))
    else:
        print_text(write_report(str(run), out, price_per_device_hour=price_per_device_hour))
