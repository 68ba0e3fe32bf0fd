"""`stoker check`: what could stop or slow a training, before it starts."""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stoker.cli.train import join_settings
from stoker.config.settings import Config
from stoker.printable import print_json


def check(
    data: str | None = None,
    /,
    *,
    config: Annotated[Config, Parameter(name="*", show=False)] = Config(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(show=False)] = None,
    steps: Annotated[int | None, Parameter(show=False)] = None,
    max_time: Annotated[str | None, Parameter(show=False)] = None,
    devices: int = 1,
    run_dir: str | None = None,
    config_file: Annotated[Path | None, Parameter(name="--config")] = None,
    dockerfile: Path | None = None,
    requirements: Path | None = None,
    script: Path | None = None,
    deep: bool = False,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json: bool = False,
) -> None:
    """Tests everything that could stop or slow a training, in less than a minute.

    The worst comes first, each finding with its fix: GPU, driver, container, host,
    data, memory, storage, network, cloud. All settings of `stoker train` are taken:
    --model, --device, --batch-size … With nothing but --dockerfile, --requirements
    or --script, only these files are checked, as in the CI of an image.

    Exit code 3 if training would fail, or would run on the CPU without --device cpu.

    Parameters
    ----------
    data
        Data set, as for `stoker train`; without it, only the machine is checked.
    devices
        GPUs of this machine that train, as for `stoker train`.
    run_dir
        Folder of the run, as for `stoker train`, also in a bucket.
    config_file
        Settings from a config.toml; flags override them.
    dockerfile
        Versions of TensorFlow, PyTorch, CUDA, cuDNN and driver that do not fit together, line by line.
    requirements
        The same in a requirements.txt.
    script
        What makes a training script slow: its input pipeline, its strategy.
    deep
        Take minutes: larger measurements, longer time limits.
    all_
        Also print what is in order, with its evidence.
    json
        Print everything as JSON.
    """
    from stoker.cli.quick_import import quick_imports
    from stoker.errors import PreflightError

    with quick_imports():
        from stoker.config.settings import check as check_settings
        from stoker.planning.check import CheckRequest
        from stoker.planning.check import check as run_checks
        from stoker.report.findings_terminal import print_findings
        from stoker.training.run_selection import with_absolute_paths

    config = join_settings(config, config_file, data, epochs=epochs, steps=steps, max_time=max_time)
    check_settings(config)
    request = CheckRequest(
        config=with_absolute_paths(config),
        run_dir=run_dir,
        devices=devices,
        deep=deep,
        dockerfile=dockerfile,
        requirements=requirements,
        script=script,
    )
    shows_progress = sys.stderr.isatty() and not json

    def show_probe(name: str) -> None:
        print(f"\r\x1b[Kchecking: {name} …", end="", file=sys.stderr, flush=True)

    report = run_checks(request, on_probe=show_probe if shows_progress else None)
    if shows_progress:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
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
