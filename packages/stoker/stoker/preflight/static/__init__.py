"""What a Dockerfile, a list of requirements, a training script and a job file say about a job before it starts: `stoker
check --dockerfile --requirements --script --job`. Files are read, never run; nothing is installed or downloaded.

Dockerfiles are read by `image.py`, requirements by `requirements.py`, and judged by `version_rules.py`; scripts by
`script_rules.py`; jobs of Slurm by `batch_script.py` and of Kubernetes by `manifest.py`, judged by the rows of
`knowledge/job_rules.toml`. Versions and names are in `tables.py`. All rules are listed in docs/check.md.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from stoker.preflight.catalog import describe
from stoker.preflight.static.batch_script import check_batch_script
from stoker.preflight.static.image import Image, read_image
from stoker.preflight.static.manifest import check_manifest
from stoker.preflight.static.requirements import MAX_YAML_BYTES, Options, read_text, reason_of
from stoker.preflight.static.script_rules import check_script
from stoker.preflight.static.version_rules import check_image
from stoker_watch.findings.finding import Finding, worst_first

_File = Path | None


def check_sources(
    *, dockerfile: _File, requirements: _File, script: _File, job: _File = None, driver: str | None = None
) -> list[Finding]:
    """Findings of the files given, worst first, each with FILE:LINE. requirements: requirements.txt, environment.yml or
    pyproject.toml; job: a batch script of Slurm, or a manifest of Kubernetes; driver: version of the machine's NVIDIA
    driver, 535 or 535.104.05. A file that cannot be read or understood is a finding; nothing is raised."""
    found: list[Finding] = []

    def attempt(path: Path, read: Callable[[Path], None]) -> None:
        try:
            read(path)
        except (OSError, ValueError) as error:
            # A file that was named and is not there stops a check in CI; one that is not understood does not.
            level = "blocker" if isinstance(error, OSError) else "unknown"
            texts = {"name": path.name, "reason": reason_of(error)}
            found.append(describe("source_unreadable", str(path), severity=level, **texts))

    images: list[Image] = []
    if dockerfile is not None:
        attempt(dockerfile, lambda path: images.append(read_image(path, given=requirements)))
    image = images[0] if images else Image()
    if requirements is not None and requirements.resolve() not in image.read_files:
        attempt(requirements, lambda path: image.read(path, str(path), Options()))
    image.driver = driver
    found += check_image(image)
    if script is not None:
        attempt(script, lambda path: found.extend(check_script(path)))
    if job is not None:
        attempt(job, lambda path: found.extend(_check_job(path, script)))
    return worst_first(found)


def _check_job(path: Path, script: Path | None) -> Iterator[Finding]:
    text = read_text(path, MAX_YAML_BYTES)
    if re.search(r"^#!|^#SBATCH\b", text, re.MULTILINE):
        return check_batch_script(text, str(path), "" if script is None else read_text(script, MAX_YAML_BYTES))
    return check_manifest(text, str(path))
