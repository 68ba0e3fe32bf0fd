"""The commands that look at runs: `why` and `report`. As in `app.py`, each imports what it needs when it runs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

if TYPE_CHECKING:
    from stoker.report.runs_summary import Fleet


def why(
    run: str | None = None,
    /,
    *,
    compare: str | None = None,
    all_: Annotated[str | None, Parameter(name="--all")] = None,
    price: float | None = None,
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
        _print_fleet(_survey(all_, price), json=json)
    elif compare is not None:
        _compare(str(run), compare, price, json=json)
    elif Path(str(run)).is_file():
        _explain_log(Path(str(run)), json=json)
    else:
        if probe:
            from stoker.report.probing import probe as experiment

            experiment(str(run), lambda text: print(text, file=sys.stderr))
        _why(str(run), price, json=json)


def _why(run: str, price: float | None, *, json: bool) -> None:
    from stoker.report.explain import gather, why_as_dict
    from stoker.report.explain_terminal import print_why

    found = gather(run, price)
    if json:
        print(msgspec.json.encode(why_as_dict(found)).decode())
    else:
        print_why(found)


def _compare(first: str, second: str, price: float | None, *, json: bool) -> None:
    from stoker.report.compare import compare
    from stoker.report.compare_terminal import print_comparison

    found = compare(first, second, price)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        print_comparison(found)


def _explain_log(log: Path, *, json: bool) -> None:
    from stoker.report.foreign_log import explain_log, print_log_why

    found = explain_log(log)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        print_log_why(found)


def _survey(folder: str, price: float | None) -> "Fleet":
    from stoker.report.runs_summary import survey

    said = sys.stderr.isatty()
    found = survey(folder, price, (lambda n: print(f"\r{n:,} runs", end="", file=sys.stderr)) if said else None)
    if said:
        print("\r\x1b[K", end="", file=sys.stderr)
    return found


def _print_fleet(found: "Fleet", *, json: bool) -> None:
    from stoker.report.runs_summary_terminal import print_fleet

    if json:
        print(msgspec.json.encode(found).decode())
    else:
        print_fleet(found)


def report(
    run: str | None = None,
    /,
    *,
    all_: Annotated[str | None, Parameter(name="--all")] = None,
    out: Path | None = None,
    price: float | None = None,
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
    from stoker.report.html import report_as_json, write_fleet, write_report

    if (run is None) == (all_ is None):
        raise UsageError("Which run?", choices=["stoker report RUN", "stoker report --all FOLDER"])
    if json and out is not None:
        asked = run if all_ is None else f"--all {all_}"
        raise UsageError("--json prints, and --out is of the page.", fix=f"stoker report {asked} --json > FILE")
    if all_ is not None:
        found = _survey(all_, price)
        if json:
            _print_fleet(found, json=True)
        else:
            print(write_fleet(found, out))
    elif json:
        from stoker.report.run_report import collect

        print(report_as_json(collect(str(run), price)))
    else:
        print(write_report(str(run), out, price=price))
