"""The commands that look at runs: `why` and `report`. As in `app.py`, each imports what it needs when it runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

if TYPE_CHECKING:
    from stoker.report.runs_summary import RunsSummary


def why(
    run: str | None = None,
    /,
    *,
    compare: str | None = None,
    all_: Annotated[str | None, Parameter(name="--all")] = None,
    price_per_device_hour: float | None = None,
    probe: bool = False,
    json: bool = False,
) -> None:
    """Says where the time of a run went, live or finished, largest loss first; of two, what changed; of many, the sums.

    Parameters
    ----------
    run
        Folder of the run; or a file: the output of any job, which is read for what ended it.
    compare
        Another run: says what changed from RUN to it, in settings, machine, time, findings and AP.
    all_
        Folder of many runs, at any depth, or gs://…, s3://…: device time and money by cause, month and host.
    price
        Money per device-hour; 0: none is shown. Default: the price that the run was given, else the list price of its
        machine on GCP or AWS.
    probe
        First repeats steps of a run that has ended with one thing changed at a time (its pictures ready, twice the
        batch, compiled, a loader thread more or fewer) and measures the speed: some minutes, on this machine.
    json
        Print everything as JSON.
    """
    from stoker.errors import UsageError

    if (run is None) == (all_ is None) or (all_ is not None and compare is not None):
        raise UsageError(
            "Which run?", choices=["stoker why RUN", "stoker why RUN --compare RUN2", "stoker why --all FOLDER"]
        )
    if probe and (all_ is not None or compare is not None):
        raise UsageError("Experiments are with one run.", fix="stoker why RUN --probe")
    if all_ is not None:
        _print_summary(_summarize_runs(all_, price_per_device_hour), json=json)
    elif compare is not None:
        _compare_runs(str(run), compare, price_per_device_hour, json=json)
    elif Path(str(run)).is_file():
        _explain_log(Path(str(run)), json=json)
    else:
        if probe:
            from stoker.report.probing import run_probes as experiment

            experiment(str(run), lambda text: print(text, file=sys.stderr))
        _explain_run(str(run), price_per_device_hour, json=json)


def _explain_run(run: str, price_per_device_hour: float | None, *, json: bool) -> None:
    from stoker.report.explain import explain_run, explanation_as_dict
    from stoker.report.explain_terminal import print_explanation

    explanation = explain_run(run, price_per_device_hour)
    if json:
        print(msgspec.json.encode(explanation_as_dict(explanation)).decode())
    else:
        print_explanation(explanation)


def _compare_runs(first: str, second: str, price_per_device_hour: float | None, *, json: bool) -> None:
    from stoker.report.compare import compare
    from stoker.report.compare_terminal import print_comparison

    comparison = compare(first, second, price_per_device_hour)
    if json:
        print(msgspec.json.encode(comparison).decode())
    else:
        print_comparison(comparison)


def _explain_log(log: Path, *, json: bool) -> None:
    from stoker.report.foreign_log import explain_log, print_log_explanation

    explanation = explain_log(log)
    if json:
        print(msgspec.json.encode(explanation).decode())
    else:
        print_log_explanation(explanation)


def _summarize_runs(runs_dir: str, price_per_device_hour: float | None) -> "RunsSummary":
    from stoker.report.runs_summary import summarize_runs

    is_tty = sys.stderr.isatty()
    summary = summarize_runs(
        runs_dir, price_per_device_hour, (lambda n: print(f"\r{n:,} runs", end="", file=sys.stderr)) if is_tty else None
    )
    if is_tty:
        print("\r\x1b[K", end="", file=sys.stderr)
    return summary


def _print_summary(summary: "RunsSummary", *, json: bool) -> None:
    from stoker.report.runs_summary_terminal import print_runs_summary

    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        print_runs_summary(summary)


def report(
    run: str | None = None,
    /,
    *,
    all_: Annotated[str | None, Parameter(name="--all")] = None,
    out: Path | None = None,
    price_per_device_hour: float | None = None,
    json: bool = False,
) -> None:
    """Makes one HTML page of a run, live or finished: scores, pictures, curves, time, findings, settings.

    Parameters
    ----------
    run
        Folder of the run.
    all_
        Folder of many runs, at any depth: one page about all of them, as `stoker why --all`.
    out
        File of the page; default: report.html in the run; of a run in a bucket, NAME-report.html in this folder; with
        --all, runs-report.html in that folder.
    price
        Money per device-hour; 0: none is shown. Default: the price that the run was given, else the list price of its
        machine on GCP or AWS.
    json
        Print everything as JSON instead.
    """
    from stoker.errors import UsageError
    from stoker.report.html import report_as_json, write_report, write_runs_summary

    if (run is None) == (all_ is None):
        raise UsageError("Which run?", choices=["stoker report RUN", "stoker report --all FOLDER"])
    if json and out is not None:
        target = run if all_ is None else f"--all {all_}"
        raise UsageError("--json prints, and --out is of the page.", fix=f"stoker report {target} --json > FILE")
    if all_ is not None:
        summary = _summarize_runs(all_, price_per_device_hour)
        if json:
            _print_summary(summary, json=True)
        else:
            print(write_runs_summary(summary, out))
    elif json:
        from stoker.report.run_report import collect

        print(report_as_json(collect(str(run), price_per_device_hour)))
    else:
        print(write_report(str(run), out, price_per_device_hour=price_per_device_hour))
