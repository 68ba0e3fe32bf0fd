"""What a Dockerfile, a list of requirements and a training script say about a job before it starts: `stoker check
--dockerfile --requirements --script`. Files are read, never run; nothing is installed or downloaded.

Dockerfiles are read by `image.py`, requirements by `requirements.py`, and judged by `version_rules.py`; scripts by
`script_rules.py`. Versions and names are in `tables.py`. All rules are listed in docs/check.md.
"""

from collections.abc import Callable
from pathlib import Path

from stoker.preflight.catalog import describe
from stoker.preflight.static.image import Image, read_image
from stoker.preflight.static.requirements import Options, reason_of
from stoker.preflight.static.script_rules import check_script
from stoker.preflight.static.version_rules import check_image
from stoker_watch.findings.finding import Finding, worst_first


def check_sources(
    *, dockerfile: Path | None, requirements: Path | None, script: Path | None, driver: str | None = None
) -> list[Finding]:
    """Findings of the files given, worst first, each with FILE:LINE. requirements: requirements.txt, environment.yml or
    pyproject.toml; driver: version of the NVIDIA driver of the machine that will run them, 535 or 535.104.05. A file
    that cannot be read or understood is a finding; nothing is raised."""
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
    return worst_first(found)
