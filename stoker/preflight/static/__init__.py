"""What a Dockerfile, a list of requirements and a training script say about a job before it starts: `stoker check
--dockerfile --requirements --script`. Files are read, never run; nothing is installed or downloaded.

Dockerfiles are read by `dockerfile.py` and `image.py`, requirements by `requirements.py`, scripts by `source.py`.
Versions and their sources are in `versions.py`, the rules in `version_rules.py`, `tensorflow_rules.py` and
`torch_rules.py`. All of them are listed in docs/check-static.md.
"""

from pathlib import Path

from stoker.findings.finding import Finding, Severity, worst_first
from stoker.preflight.catalog import describe_file
from stoker.preflight.static.image import Image, read_image
from stoker.preflight.static.requirements import read_requested, reason_of
from stoker.preflight.static.source import read_source
from stoker.preflight.static.tensorflow_rules import check_tensorflow
from stoker.preflight.static.torch_rules import check_torch
from stoker.preflight.static.version_rules import check_image


def check_sources(*, dockerfile: Path | None, requirements: Path | None, script: Path | None) -> list[Finding]:
    """Findings of the files given, worst first, each with FILE:LINE. requirements: requirements.txt, environment.yml or
    pyproject.toml. A file that cannot be read or understood is a finding; nothing is raised."""
    found: list[Finding] = []
    if dockerfile is not None or requirements is not None:
        found += _check_packages(dockerfile, requirements)
    if script is not None:
        try:
            source = read_source(script)
        except (OSError, ValueError) as error:
            found.append(_unreadable(script, error))
        else:
            found += [*check_tensorflow(source), *check_torch(source)]
    return worst_first(found)


def _check_packages(dockerfile: Path | None, given: Path | None) -> list[Finding]:
    image = Image()
    found: list[Finding] = []
    if dockerfile is not None:
        try:
            image = read_image(dockerfile, given=given)
        except (OSError, ValueError) as error:
            found.append(_unreadable(dockerfile, error))
    if given is not None and given.resolve() not in image.read_files:
        try:
            requested = read_requested(given)
        except (OSError, ValueError) as error:
            found.append(_unreadable(given, error))
        else:
            for package in requested.packages:
                image.add(package)
            image.python = image.python or requested.python
            for missing in requested.missing:
                image.add_missing(*missing)
    return [*found, *check_image(image)]


def _unreadable(path: Path, error: OSError | ValueError) -> Finding:
    """A file that was named and is not there stops a check in CI; one that is not understood does not."""
    severity: Severity = "blocker" if isinstance(error, OSError) else "unknown"
    return describe_file("source_unreadable", str(path), severity=severity, name=path.name, reason=reason_of(error))
