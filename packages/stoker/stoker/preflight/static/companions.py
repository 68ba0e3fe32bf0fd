"""Packages that need each other in certain releases, and what is compiled in `docker build`.

The facts are in `knowledge/companions.toml`. Of an open request only the newest release that pip could take counts.
"""

import re
from collections.abc import Iterator

from stoker.preflight.catalog import describe
from stoker.preflight.static.image import Image
from stoker.preflight.static.requirements import Package
from stoker.preflight.static.tables import COMPANIONS, PATTERNS, Companion, minor
from stoker_watch.findings.finding import Finding


def check_companions(image: Image) -> Iterator[Finding]:
    """A finding for each package whose companion has another release; one for all that do not work with NumPy 2."""
    told: set[str] = set()
    for row in COMPANIONS.companions:
        for package in filter(None, map(image.get, row.packages)):
            other = image.get(*row.other)
            have, own = _others(image, row, other), _releases(image, package.name, package, not row.declared)
            if not own or not have or not row.effect or any(row.fits(release, have) for release in own):
                continue
            asked = other if other and other.minor else None
            known = (*COMPANIONS.newest.get(package.name, {}), *(key for key in row.needs if key[-1].isdigit()))
            if row.id == "numpy_too_new" and row.id in told:
                continue
            told.add(row.id)
            yield describe(
                row.id,
                max((package, asked or package), key=image.packages.index).place,
                severity="warning" if row.brought_by and not asked else "blocker",
                package=package,
                release=own[0],
                other=other.name if other else row.other[0],
                needed=row.needed(own[0]),
                found=have[0].removesuffix(".99"),
                how=asked.text if asked else f"{other.text if other else 'no limit'}: pip takes the newest",
                row=row,
                fix=next((one for one in known if row.needed(one) and row.fits(one, have)), "another release"),
            )


def _others(image: Image, row: Companion, other: Package | None) -> list[str]:
    """The releases that the other package may have; empty where nothing is known. `.99`: any patch of a Python."""
    if row.other == ["python"]:
        return [f"{image.python}.99"] if image.python else []
    brought = [package for name in row.brought_by if (package := image.get(name)) and not package.options.no_deps]
    is_open = not row.declared and (not row.brought_by or _pip_chooses(image))
    return _releases(image, other.name if other else row.other[0], other, is_open) if other or brought else []


def _releases(image: Image, name: str, request: Package | None, is_open: bool) -> list[str]:
    """Those that a request names; is_open: else the newest that it, the Python and all known bounds allow."""
    if request and request.minor:
        patches = [f"{request.minor}.{patch}" for patch in range(10)]
        return [request.version] if request.version else list(filter(request.allows, patches))
    rows = [row for row in COMPANIONS.companions if row.declared and name in row.other]
    pinned = [(row, found.version) for row in rows for found in map(image.get, row.packages) if found and found.version]
    for release, python in COMPANIONS.newest.get(name, {}).items() if is_open else ():
        fits = (image.python or python) >= python and (request is None or request.allows(release))
        if fits and all(row.fits(version, [release]) for row, version in pinned):
            return [release]
    return []


def _pip_chooses(image: Image) -> bool:
    """Nothing brought the package before, as images with a framework do, and the Python has its newest releases."""
    first = {"torch": (2, 0), "tensorflow": (2, 12), "tensorflow-gpu": (2, 12)}  # without a wheel for Python 3.7
    old = [one for one in image.packages if one.name in first and one.minor and one.minor < first[one.name]]
    has_it = any(package.source in ("image", "conda") for package in image.packages)
    return not has_it and (image.python is not None or not (image.base or old))


def check_builds(image: Image) -> Iterator[Finding]:
    """What is compiled without a GPU: not for CUDA, not at all, or not for all GPUs."""
    own = "$" if re.search(PATTERNS["sets_architectures"], image.base) else ""
    lists = {place: given.get("TORCH_CUDA_ARCH_LIST") or own for _, place, given in image.builds}
    for project, place, given in image.builds:
        row = next((row for row in COMPANIONS.builds if re.search(row.pattern, project)), None)
        if row and not row.always and not {given.get(name, "") for name in row.forced_by} - {"", "0"}:
            yield describe("built_without_gpu/cpu", place, row=row)
        elif row and not lists[place]:
            yield describe("built_without_gpu/architectures", place, row=row)
    place, text = next(((place, text) for place, text in lists.items() if text), ("", ""))
    numbers = [minor(part) for part in re.findall(r"\d+\.\d+", text)] or [minor("99")]
    later = [(minor(key), f"{name} ({key})") for key, name in COMPANIONS.gpus.items() if minor(key) > min(numbers)]
    missing = [name for key, name in later if not any(one[0] == key[0] and one <= key for one in numbers)]
    related = [name for key, name in later if name not in missing and key not in numbers]
    if missing and "$" not in text and not re.search(PATTERNS["has_ptx"], text):
        word = image.environment.get("TORCH_CUDA_ARCH_LIST")
        texts = {"text": text, "missing": ", ".join(missing), "related": ", ".join(related) or "none"}
        yield describe("few_architectures", f"{image.file}:{word.line}" if word else place, **texts)
