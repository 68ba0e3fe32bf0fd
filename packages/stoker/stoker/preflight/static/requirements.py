"""Reads what is to be installed: requirements.txt, environment.yml of conda, pyproject.toml.

Each package has its version specifier and the line that asks for it. Nothing is resolved or downloaded. Which versions
belong together is in `tables.py`, what follows from it in `version_rules.py`.
"""

import dataclasses
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from stoker.preflight.static.tables import Minor, minor
from stoker_watch import regular_files

Value = TypeVar("Value")
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
_EXACT = re.compile(r"===?\s*v?(\d+(?:\.\d+)*(?:\.post\d+)?)[^,]*")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the options of pip or of a requirements file say about all its packages."""

    index: str = ""
    """cpu, cu118, …: which wheels the only, or an additional, index of PyTorch has; empty: the package index."""
    index_alone: bool = False
    """No other index is asked."""
    index_place: str = ""
    upgrade: bool = False
    no_deps: bool = False


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
    extras: frozenset[str] = frozenset()
    source: str = "pip"
    """pip, conda, or image: it was there before."""
    build: str = ""
    options: Options = Options()

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

    def allows_minor(self, number: tuple[int, int]) -> bool:
        return any(self.allows(f"{number[0]}.{number[1]}.{patch}") for patch in range(10))

    def newest(self, known: Collection[Minor]) -> Minor | None:
        """The newest of the known minor releases that it allows; None where a newer one may exist, or none fits."""
        if self.minor is not None:
            return self.minor
        last = max(known)
        if self.allows_minor((last[0], last[1] + 1)) or self.allows_minor((last[0] + 1, 0)):
            return None
        return max((number for number in known if self.allows_minor(number)), default=None)


@dataclasses.dataclass
class Requested:
    """What files of requirements ask for."""

    packages: list[Package] = dataclasses.field(default_factory=list)
    python: Minor | None = None
    missing: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    """Files that could not be read: (name, place that names it, reason)."""
    read_files: set[Path] = dataclasses.field(default_factory=set)

    def add(self, package: Package) -> None:
        self.packages.append(package)

    def read(self, path: Path, name: str, options: Options) -> None:
        """Adds what a file asks for. name: how its places call it. Raises OSError, and ValueError with the reason."""
        self.read_files.add(path.resolve())
        if path.suffix.lower() in (".yml", ".yaml"):
            self._read_environment(path, name)
        elif path.suffix.lower() == ".toml":
            self._read_project(path, name)
        else:
            self._read_lines(path, name, options)

    def _read_lines(self, path: Path, name: str, options: Options) -> None:
        lines = [(f"{name}:{number}", line) for number, line in _logical_lines(read_text(path, MAX_BYTES))]
        self._add_lines(lines, path, name, options)

    def _add_lines(self, lines: Sequence[tuple[str, str]], path: Path, name: str, options: Options) -> None:
        """lines: (place, line of pip's format), of the file `path`. An index counts for all lines."""
        for place, line in lines:
            match = re.match(r"(-i|--index-url|--pypi-url|--extra-index-url|-f|--find-links)(?:\s+|=)(\S+)", line)
            if match and (index := wheel_index(match[2])):
                alone = match[1] in ("-i", "--index-url", "--pypi-url")
                options = dataclasses.replace(options, index=index, index_alone=alone, index_place=place)
        for place, line in lines:
            if match := re.match(r"(?:--requirement[\s=]|-r)\s*(.+)", line):
                other = path.parent / match[1]
                if other.resolve() in self.read_files or len(self.read_files) >= MAX_FILES:
                    continue
                try:
                    self.read_files.add(other.resolve())
                    self._read_lines(other, str(Path(name).parent / match[1]), options)
                except (OSError, ValueError) as error:
                    self.missing.append((match[1], place, reason_of(error)))
            elif not line.startswith("-"):
                bare = re.split(r"\s--(?:hash|config-settings|global-option)", line)[0]
                if package := read_package(bare, place=place, options=options):
                    self.add(package)
                if len(self.packages) > MAX_PACKAGES:
                    raise ValueError(f"asks for more than {MAX_PACKAGES} packages")

    def _read_environment(self, path: Path, name: str) -> None:
        """environment.yml. Only the list `dependencies`, and `pip` in it, is looked at."""
        text = read_text(path, MAX_YAML_BYTES)
        if text.count("[") + text.count("{") > MAX_YAML_BRACKETS:
            raise ValueError(f"has more than {MAX_YAML_BRACKETS} brackets: is it an environment of conda?")
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            raise ValueError(f"line {mark.line + 1}: {error}" if mark else "is nested too deeply") from error
        for item in _items(root, "dependencies"):
            for place, text in _scalars([item], name):
                package = read_conda_package(text, place=place)
                if package and package.name == "python":
                    self.python = self.python or package.minor
                if package:
                    self.add(package)
            self._add_lines(_scalars(_items(item, "pip"), name), path, name, Options())

    def _read_project(self, path: Path, name: str) -> None:
        """pyproject.toml: [project] dependencies, and the indices of uv."""
        text = read_text(path, MAX_BYTES)
        try:
            tables = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(str(error) or "is nested too deeply") from error
        lines = text.split("\n")
        dependencies = [row for row in _at(tables, "project.dependencies", list) if isinstance(row, str)]
        if not dependencies:
            raise ValueError("has no dependencies in [project]; Poetry's own tables are not read")
        self.python = self.python or _only_python(_at(tables, "project.requires-python", str))
        rows = _at(tables, "tool.uv.index", list)
        indices = {_at(row, "name", str): wheel_index(_at(row, "url", str)) for row in rows}
        for requirement in dependencies[:MAX_PACKAGES]:
            number = next((number for number, line in enumerate(lines, start=1) if requirement in line), 1)
            if package := read_package(requirement, place=f"{name}:{number}"):
                sources = _at(tables, "tool.uv.sources", dict).get(package.name)
                named = [_at(row, "index", str) for row in (sources if isinstance(sources, list) else [sources])]
                index = next((indices[name] for name in named if indices.get(name)), "")
                options = Options(index=index, index_alone=bool(index), index_place=package.place)
                self.add(dataclasses.replace(package, options=options))


def wheel_index(url: str) -> str:
    """cpu or cu118 of an address on download.pytorch.org; empty for another one."""
    match = _WHEEL_INDEX.search(url)
    return match[1] if match else ""


def read_package(text: str, *, place: str, options: Options = Options()) -> Package | None:
    """A requirement of pip; None for what is none, for a path, and for another platform than Linux on x86-64."""
    text = text.strip()
    if len(text) > MAX_REQUIREMENT:
        return None
    extras: frozenset[str] = frozenset()
    if match := _WHEEL_FILE.search(text.replace("%2B", "+").replace("%2b", "+")):
        name, specifier = match[1], f"=={match[2]}"
    else:
        try:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({**_LINUX, "extra": ""}):
                return None
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            return None
        name, extras = requirement.name, frozenset(requirement.extras)
        specifier = str(requirement.specifier)  # empty for one with an address
    return Package(canonicalize_name(name), specifier, place, text, extras, options=options)


def read_conda_package(text: str, *, place: str) -> Package | None:
    """A match specification of conda: `pytorch=2.1.2`, `conda-forge::numpy>=1.20`, `pytorch 2.1 py3.10_cuda11.8*`."""
    match = _CONDA_SPEC.fullmatch(text.strip())
    if match is None:
        return None
    name, version, build = match[1].lower(), match[2].strip() or match[4] or "", match[3] or ""
    if plain := re.fullmatch(r"(=?)(\d[\w.]*)(\.\*|\*)?", version):
        version = f"=={plain[2].rstrip('.')}.*"
    try:
        SpecifierSet(version)
    except InvalidSpecifier:  # also `=*`: any version
        version = ""
    return Package(_CONDA_NAMES.get(name, canonicalize_name(name)), version, place, text, source="conda", build=build)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a requirements file without comments, with continuations joined, and the number of the first."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.split("\n"), start=1):
        line = re.sub(r"(^|\s)#.*$", "", line.rstrip("\r"))
        first = first if parts else number
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield first, "".join(parts).strip()
            parts = []


def _items(node: yaml.Node | None, key: str) -> list[yaml.Node]:
    """The list that a mapping has under a key."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    lists = [value for name, value in pairs if name.value == key and isinstance(value, yaml.SequenceNode)]
    return [item for value in lists for item in value.value]


def _scalars(nodes: Sequence[yaml.Node], name: str) -> list[tuple[str, str]]:
    """(place, text) of the nodes that are plain values."""
    plain = [node for node in nodes if isinstance(node, yaml.ScalarNode)]
    return [(f"{name}:{node.start_mark.line + 1}", str(node.value)) for node in plain]


def _at(table: Any, path: str, kind: type[Value]) -> Value:
    """The value at a dotted path of nested tables; an empty one where there is none of this kind."""
    for key in path.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, kind) else kind()


def _only_python(specifier: str) -> Minor | None:
    """(3, 8) of `>=3.8,<3.9`; None where several are allowed."""
    try:
        allowed = SpecifierSet(specifier)
    except InvalidSpecifier:
        return None
    found = [Minor((3, number)) for number in range(5, 20) if allowed.contains(f"3.{number}.5")]
    return found[0] if len(found) == 1 else None


def read_text(path: Path, max_bytes: int) -> str:
    """Raises OSError, and ValueError for what is not text."""
    text = regular_files.read_text(path, encoding="utf-8-sig", errors="replace", max_bytes=max_bytes)
    if "\0" in text:
        raise ValueError("is not a text file")
    return text


def reason_of(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
