"""The commands before a training: `check`, what could stop or slow it; `plan`, what it needs and costs elsewhere."""

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from stoker.cli.quick_import import quick_imports
from stoker.cli.train import join_settings
from stoker.config.settings import Config
from stoker.planning import CheckRequest
from stoker_watch.cli import described
from stoker_watch.durations import parse_time_s
from stoker_watch.printable import print_json


@described
def check(
    data: str | None = None,
    /,
    *,
    request: Annotated[CheckRequest, Parameter(name="*")] = CheckRequest(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(show=False)] = None,
    steps: Annotated[int | None, Parameter(show=False)] = None,
    max_time: Annotated[str | None, Parameter(show=False)] = None,
    config_file: Annotated[Path | None, Parameter(name="--config")] = None,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json: bool = False,
) -> None:
    """Tests everything that could stop or slow a training, in less than a minute.

    The worst comes first, each finding with its fix: GPU, driver, container, host,
    data, memory, storage, network, cloud. All settings of `stoker train` are taken:
    --model, --device, --batch-size … With nothing but --dockerfile, --requirements,
    --script or --job, only these files are checked, as in the CI of an image.

    Exit code 3 if training would fail, or would run on the CPU without --device cpu.
    """
    from stoker_watch.errors import PreflightError

    with quick_imports():
        from stoker.config.settings import check_config
        from stoker.planning.check import run_checks
        from stoker.training.run_selection import with_absolute_paths
        from stoker_watch.report.findings_terminal import print_findings

    config = join_settings(request.config, config_file, data, epochs=epochs, steps=steps, max_time=max_time)
    check_config(config)
    request = dataclasses.replace(request, config=with_absolute_paths(config))
    shows_progress = sys.stderr.isatty() and not json
    rewrite = functools.partial(print, "\r\x1b[K", sep="", end="", file=sys.stderr, flush=True)
    report = run_checks(request, on_probe=(lambda name: rewrite(f"checking: {name} …")) if shows_progress else None)
    if shows_progress:
        rewrite()
    if json:
        findings = [
            {"id": found.id, "severity": found.severity, "title": found.title, "evidence": found.evidence_text,
             "fix": found.fix, "place": found.place}
            for found in report.findings
        ]  # fmt: skip
        print_json(
            {"blocked": report.blocked, "findings": findings, "probes": report.probes, "seconds": report.seconds}
        )
    else:
        print_findings(report.findings, seconds=report.seconds, show_all=all_)
    code = PreflightError.exit_code if report.blocked else 0
    if not all(probe.complete for probe in report.probes):
        sys.stdout.flush()
        os._exit(code)  # Python would wait for the threads of a probe that hangs
    if code:
        sys.exit(code)


_PLAN = Group("Plan", sort_key=0)
"""Before the settings of a training."""


@described
def plan(
    data: str,
    /,
    *,
    on: Annotated[tuple[str, ...], Parameter(group=_PLAN)] = (),
    gpus: Annotated[tuple[int, ...], Parameter(group=_PLAN)] = (),
    measure: Annotated[bool, Parameter(group=_PLAN, negative="")] = False,
    spot: Annotated[bool, Parameter(group=_PLAN, negative="")] = False,
    by: Annotated[str | None, Parameter(group=_PLAN)] = None,
    budget: Annotated[float | None, Parameter(group=_PLAN)] = None,
    prices: Annotated[Path | None, Parameter(group=_PLAN)] = None,
    json: Annotated[bool, Parameter(group=_PLAN, negative="")] = False,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(group="Run")] = None,
    steps: Annotated[int | None, Parameter(group="Run")] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group="Run")] = None,
) -> None:
    """Predicts memory, duration and cost of a training on named machines, and recommends one.

    Nothing is trained or rented. Where no step of a device was measured, its times are guesses, with wide bands.
    Settings are those of `stoker train`. Exit code 1 if no machine is recommended.
    """
    from stoker_watch.errors import ConfigError

    with quick_imports():
        from stoker.planning.plan import make_plan, to_dict
        from stoker.planning.recommend import Limits
        from stoker.planning.views import print_plan

    user_config = join_settings(config, config_file, data, epochs=epochs, steps=steps)
    if budget is not None and not 0 < budget < 1e9:
        raise ConfigError(f"--budget {budget:g}: wanted US dollars above 0.")
    limits = Limits(by_s=None if by is None else parse_time_s(by, "--by"), budget=budget)
    result = make_plan(user_config, on=on, gpus=gpus, spot=spot, limits=limits, prices=prices, measure=measure)
    if json:
        print_json(to_dict(result))
    else:
        print_plan(result)
    if result.recommendation.choice is None:
        sys.exit(1)
