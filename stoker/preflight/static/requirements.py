"""Reads what is to be installed: requirements.txt, environment.yml of conda, pyproject.toml.

Each package has its version specifier and the line that asks for it. Nothing is resolved or downloaded. Which versions
belong together is in `versions.py`, what follows from it in `version_rules.py`.
"""

import dataclasses
import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from stoker import regular_files
from stoker.preflight.static.versions import Minor, minor

MAX_BYTES = 1 << 20
MAX_YAML_BYTES = 1 << 18
"""PyYAML reads about 100 KB a second."""
MAX_YAML_BRACKETS = 2000
"""PyYAML's time grows with the square of the nesting."""
MAX_FILES = 20
"""Requirements files that name each other."""
MAX_REQUIREMENT = 2000
"""Characters of one requirement."""
MAX_PACKAGES = 2000
_LINUX = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
_CONDA_NAMES = {"pytorch": "torch", "pytorch-gpu": "torch", "pytorch-cpu": "torch"}
_CONDA_SPEC = re.compile(r"(?:[^\s:]+::)?([A-Za-z0-9_.-]+)\s*((?:[=<>!~]=?)?[^=\s]*)(?:=(\S*)|\s+(\S+))?")
_WHEEL_INDEX = re.compile(r"download\.pytorch\.org/(?:whl/)?(?:nightly/|test/)?(cpu|cu\d{2,3})(?:/|$)")
_WHEEL_FILE = re.compile(r"/([A-Za-z0-9_]+)-(\d[^-/]*)-[^/]*\.whl(?:$|[#?])")
_EXACT = re.compile(r"===?\s*v?(\d+(?:\.\d+)*)[^,]*")


@dataclasses.dataclass(frozen=True)
class Package:
    """One request for a package."""

    name: str
    """Canonical, lower case: opencv-python; `torch` also for conda's pytorch."""
    specifier: str
    """`==2.10.0`; empty: any version."""
    place: str
    """FILE:LINE."""
    text: str
    """As it is written."""
    extras: frozenset[str] = frozenset()
    source: str = "pip"
    """pip, conda, or image: it was there before."""
    index: str = ""
    """cpu, cu118, …: which wheels the only, or an additional, index of PyTorch has; empty: the package index."""
    index_alone: bool = False
    """No other index is asked."""
    index_place: str = ""
    upgrade: bool = False
    no_deps: bool = False
    build: str = ""
    """Conda's build string."""

    @property
    def minor(self) -> Minor | None:
        """(2, 10) of `==2.10.0`, `==2.10.*` and `~=2.10.1`; None where other versions are allowed."""
        match = _EXACT.fullmatch(self.specifier) or re.fullmatch(r"~=\s*(\d+\.\d+\.\d+)", self.specifier)
        return minor(match[1]) if match and ("." in match[1] or self.specifier.startswith("===")) else None

    @property
    def version(self) -> str | None:
        """2.10.0 of `==2.10.0` and `==2.10.0+cpu`."""
        match = _EXACT.fullmatch(self.specifier)
        return None if match is None or "*" in self.specifier else match[1]

    @property
    def local(self) -> str:
        """cu118 of `==2.1.0+cu118`."""
        return self.specifier.partition("+")[2].strip(" ,") if self.minor else ""

    def allows(self, version: str) -> bool:
        return SpecifierSet(self.specifier).contains(version, prereleases=True)

    def allows_minor(self, number: Minor) -> bool:
        return any(self.allows(f"{number[0]}.{number[1]}.{patch}") for patch in range(10))

    def newest(self, known: Collection[Minor]) -> Minor | None:
        """The newest of the known minor releases that it allows; None where a newer one may exist, or none fits."""
        if self.minor is not None:
            return self.minor
        last = max(known)
        if self.allows_minor((last[0], last[1] + 1)) or self.allows_minor((last[0] + 1, 0)):
            return None
        return max((number for number in known if self.allows_minor(number)), default=None)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the options of pip or of a requirements file say about all its packages."""

    index: str = ""
    index_alone: bool = False
    index_place: str = ""
    upgrade: bool = False
    no_deps: bool = False


@dataclasses.dataclass
class Requested:
    """What a file asks for."""

    packages: list[Package] = dataclasses.field(default_factory=list)
    python: Minor | None = None
    python_place: str = ""
    missing: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    """Files that could not be read: (name, place that names it, reason)."""


def wheel_index(url: str) -> str:
    """cpu or cu118 of an address on download.pytorch.org; empty for another one."""
    match = _WHEEL_INDEX.search(url)
    return match[1] if match else ""


def read_package(text: str, *, place: str, options: Options | None = None) -> Package | None:
    """A requirement of pip; None for what is none, for a path, and for another platform than Linux on x86-64."""
    options = options or Options()
    text = text.strip()
    if len(text) > MAX_REQUIREMENT:
        return None
    if match := _WHEEL_FILE.search(text.replace("%2B", "+").replace("%2b", "+")):
        name, specifier, extras = match[1], f"=={match[2]}", frozenset[str]()
    else:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            return None
        if requirement.url is not None:
            name, specifier, extras = requirement.name, "", frozenset(requirement.extras)
        else:
            name, specifier, extras = requirement.name, str(requirement.specifier), frozenset(requirement.extras)
        try:
            if requirement.marker is not None and not requirement.marker.evaluate({**_LINUX, "extra": ""}):
                return None
        except (UndefinedComparison, UndefinedEnvironmentName):
            return None
    return Package(
        canonicalize_name(name),
        specifier,
        place,
        text,
        extras,
        index=options.index,
        index_alone=options.index_alone,
        index_place=options.index_place,
        upgrade=options.upgrade,
        no_deps=options.no_deps,
    )


def read_conda_package(text: str, *, place: str) -> Package | None:
    """A match specification of conda: `pytorch=2.1.2`, `conda-forge::numpy>=1.20`, `pytorch 2.1 py3.10_cuda11.8*`."""
    match = _CONDA_SPEC.fullmatch(text.strip())
    if match is None:
        return None
    name, version, build = match[1].lower(), match[2].strip(), match[3] or ""
    if not version and match[4]:
        version = f"={match[4]}"
    if match := re.fullmatch(r"(=?)(\d[\w.]*)(\.\*|\*)?", version):
        version = f"=={match[2].rstrip('.')}.*"
    elif version in ("=", "=*", "*"):
        version = ""
    try:
        SpecifierSet(version)
    except InvalidSpecifier:
        version = ""
    return Package(_CONDA_NAMES.get(name, canonicalize_name(name)), version, place, text, source="conda", build=build)


def read_requested(path: Path, *, options: Options | None = None, name: str | None = None) -> Requested:
    """What a file asks for. Raises OSError, and ValueError with line and reason for one that cannot be understood.
    name: how its places call it."""
    name = name or str(path)
    if path.suffix.lower() in (".yml", ".yaml"):
        return _read_environment(path, name)
    if path.suffix.lower() == ".toml":
        return _read_project(path, name)
    requested = Requested()
    _read_lines(path, name, options or Options(), requested, set())
    return requested


def _read_lines(path: Path, name: str, options: Options, requested: Requested, seen: set[Path]) -> None:
    seen.add(path.resolve())
    text = _read(path, MAX_BYTES)
    lines = list(_logical_lines(text))
    for number, line in lines:
        options = _option(line, f"{name}:{number}", options)
    for number, line in lines:
        place = f"{name}:{number}"
        option, _, value = line.replace("=", " ", 1).partition(" ") if line.startswith("--") else line.partition(" ")
        if option.startswith("-r") and option != "-r" and not option.startswith("--"):
            option, value = "-r", option[2:]
        if option in ("-r", "--requirement"):
            other = path.parent / value.strip()
            if other.resolve() in seen or len(seen) >= MAX_FILES:
                continue
            try:
                _read_lines(other, str(Path(name).parent / value.strip()), options, requested, seen)
            except (OSError, ValueError) as error:
                requested.missing.append((value.strip(), place, reason_of(error)))
        elif not line.startswith("-"):
            bare = re.split(r"\s--(?:hash|config-settings|global-option)", line)[0]
            if package := read_package(bare, place=place, options=options):
                requested.packages.append(package)
            if len(requested.packages) > MAX_PACKAGES:
                raise ValueError(f"asks for more than {MAX_PACKAGES} packages")


def _option(line: str, place: str, options: Options) -> Options:
    match = re.match(r"(-i|--index-url|--pypi-url|--extra-index-url|-f|--find-links)(?:\s+|=)(\S+)", line)
    if match is None or not (index := wheel_index(match[2])):
        return options
    alone = match[1] in ("-i", "--index-url", "--pypi-url")
    return dataclasses.replace(options, index=index, index_alone=alone, index_place=place)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a requirements file without comments, with continuations joined, and the number of the first."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.split("\n"), start=1):
        line = re.sub(r"(^|\s)#.*$", "", line.rstrip("\r"))
        first = first if parts else number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        whole = "".join([*parts, line]).strip()
        parts = []
        if whole:
            yield first, whole


def _read_environment(path: Path, name: str) -> Requested:
    """environment.yml. Only the list `dependencies`, and `pip` in it, is looked at."""
    text = _read(path, MAX_YAML_BYTES)
    if text.count("[") + text.count("{") > MAX_YAML_BRACKETS:
        raise ValueError(f"has more than {MAX_YAML_BRACKETS} brackets: is it an environment of conda?")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{getattr(error, 'problem', None) or 'is nested too deeply'}") from error
    requested = Requested()
    for key, value in _pairs(root):
        if key != "dependencies" or not isinstance(value, yaml.SequenceNode):
            continue
        for item in value.value:
            place = f"{name}:{item.start_mark.line + 1}"
            if isinstance(item, yaml.ScalarNode):
                _add_conda(str(item.value), place, requested)
            for inner, values in _pairs(item):
                if inner == "pip" and isinstance(values, yaml.SequenceNode):
                    _add_pip_section(values, path, name, requested)
    return requested


def _add_conda(text: str, place: str, requested: Requested) -> None:
    package = read_conda_package(text, place=place)
    if package is None:
        return
    if package.name == "python":
        requested.python, requested.python_place = package.minor, place
    requested.packages.append(package)


def _add_pip_section(values: yaml.SequenceNode, path: Path, name: str, requested: Requested) -> None:
    lines = [
        (f"{name}:{item.start_mark.line + 1}", str(item.value))
        for item in values.value
        if isinstance(item, yaml.ScalarNode)
    ]
    options = Options()
    for place, text in lines:
        options = _option(text, place, options)
    for place, text in lines:
        if match := re.match(r"(?:-r|--requirement)[\s=]+(\S+)", text):
            try:
                _read_lines(path.parent / match[1], match[1], options, requested, set())
            except (OSError, ValueError) as error:
                requested.missing.append((match[1], place, reason_of(error)))
        elif package := read_package(text, place=place, options=options):
            requested.packages.append(package)


def _pairs(node: yaml.Node | None) -> list[tuple[str, yaml.Node]]:
    return [(str(key.value), value) for key, value in node.value] if isinstance(node, yaml.MappingNode) else []


def _read_project(path: Path, name: str) -> Requested:
    """pyproject.toml: [project] dependencies, [tool.poetry.dependencies], and the indices of uv."""
    text = _read(path, MAX_BYTES)
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(str(error) or "is nested too deeply") from error
    lines = text.split("\n")
    requested = Requested()
    project = _table(tables, "project")
    uv = _table(tables, "tool", "uv")
    indices = {str(row.get("name")): wheel_index(str(row.get("url"))) for row in _rows(uv.get("index"))}
    sources = _table(uv, "sources")
    for text in _strings(project.get("dependencies"))[:MAX_PACKAGES]:
        package = read_package(text, place=f"{name}:{_line_of(text, lines)}")
        if package is None:
            continue
        index = next((indices.get(str(row.get("index")), "") for row in _rows(sources.get(package.name))), "")
        if index:
            package = dataclasses.replace(package, index=index, index_alone=True, index_place=package.place)
        requested.packages.append(package)
    if isinstance(python := project.get("requires-python"), str):
        requested.python, requested.python_place = _only_python(python), f"{name}:{_line_of(python, lines)}"
    for key, value in _table(tables, "tool", "poetry", "dependencies").items():
        version = value.get("version", "") if isinstance(value, dict) else value
        if not isinstance(version, str):
            continue
        place = f"{name}:{_line_of(key, lines)}"
        if key == "python":
            requested.python, requested.python_place = _only_python(_from_poetry(version)), place
        elif package := read_package(f"{key}{_from_poetry(version)}", place=place):
            requested.packages.append(package)
    return requested


def _only_python(specifier: str) -> Minor | None:
    """(3, 8) of `>=3.8,<3.9`; None where several are allowed."""
    try:
        allowed = SpecifierSet(specifier)
    except InvalidSpecifier:
        return None
    found = [(3, number) for number in range(5, 20) if allowed.contains(f"3.{number}.5")]
    return found[0] if len(found) == 1 else None


def _from_poetry(version: str) -> str:
    """`>=2.10,<3` of `^2.10`, `==2.10` of `2.10`."""
    version = version.strip()
    if match := re.fullmatch(r"([\^~])\s*(\d+)(?:\.(\d+))?(?:\.\d+)*", version):
        major, second = int(match[2]), int(match[3] or 0)
        by_major = (match[1] == "^" and major > 0) or match[3] is None
        return f">={version[1:].strip()},<{major + 1}" if by_major else f">={version[1:].strip()},<{major}.{second + 1}"
    if version == "*":
        return ""
    return f"=={version}" if version[:1].isdigit() else version


def _line_of(text: str, lines: list[str]) -> int:
    return next((number for number, line in enumerate(lines, start=1) if text in line), 1)


def _table(value: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> list[dict[str, Any]]:
    values = value if isinstance(value, list) else [value]
    return [row for row in values if isinstance(row, dict)]


def _strings(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _read(path: Path, max_bytes: int) -> str:
    text = regular_files.read_text(path, encoding="utf-8-sig", errors="replace", max_bytes=max_bytes)
    if "\0" in text:
        raise ValueError("is not a text file")
    return text


def reason_of(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
