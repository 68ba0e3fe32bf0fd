"""The short form of `stoker check` in `stoker train`: what costs milliseconds, before the first step.

On a GPU it asks the driver, for at most two seconds, and uses the CUDA context that training has: no process is
started (`gpu.py`, which a training on a CPU does not import). Nothing is measured; `stoker check` does that.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from stoker.hardware.cuda_trial import gpu_evidence
from stoker.hardware.device import Device
from stoker.preflight import host
from stoker.preflight.variables import batch_shell
from stoker_watch.errors import PreflightError
from stoker_watch.findings.finding import Finding, worst_first

QUICK_HOST_RULES = (host.cores, host.cpu_quota, host.threads, host.memory, host.file_handles, host.disk)


def require_meant_device(
    device: Device, requested: str | None, *, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> None:
    """Raises PreflightError where training would run on the CPU although the machine has a GPU, or should have one.
    requested: the setting `--device`; None leaves the choice to stoker."""
    if requested is not None or not device.is_cpu or not gpu_evidence(env, root):
        return
    from stoker.preflight.gpu import find_reason

    reason = find_reason(env, root)
    if reason is not None:
        raise as_error(reason)


def as_error(finding: Finding) -> PreflightError:
    what = finding.title[:1].upper() + finding.title[1:] + "."
    return PreflightError(what, location=finding.place or None, cause=finding.evidence_text, fix=finding.fix or None)


def quick_findings(
    device: Device,
    run_dir: Path,
    checkpoint_bytes: int | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> list[Finding]:
    """What could stop or slow this training: blockers and warnings only. run_dir: a local folder. checkpoint_bytes:
    size of one checkpoint; None: not known."""
    machine = host.Host(
        run_dir=run_dir, num_gpus=0 if device.is_cpu else 1, checkpoint_bytes=checkpoint_bytes, env=env, root=root,
        write_bytes=0,
    )  # fmt: skip
    findings = [*batch_shell(env), *(finding for rule in QUICK_HOST_RULES for finding in rule(machine))]
    if device.kind == "cuda":
        from stoker.preflight.gpu import quick_gpu_findings

        findings += quick_gpu_findings(device, env, root)
    return worst_first(finding for finding in findings if finding.severity in ("blocker", "warning"))
