"""What a container image will have, read from its Dockerfile: base image, packages, CUDA, cuDNN, Python, variables.

A Dockerfile is read into stages and the commands of their shells, each word with its line: continuations, comments
between them, heredocs, the exec form and the values of ARG and ENV are understood, in linear time. Only the stage that
is built last counts, and what it copies from others. The commands of RUN are recognized, not run: apt, pip, uv, conda,
CUDA's installer. What is not recognized is unknown, and no rule speaks of it.
"""

import bisect
import copy
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from stoker.preflight.static import requirements
from stoker.preflight.static.requirements import MAX_REQUIREMENT, Options, Package, Requested, read_package, read_text
from stoker.preflight.static.tables import (
    COMPANIONS,
    LISTS,
    NAMES,
    PATTERNS,
    TENSORFLOW,
    UBUNTU,
    KnownImage,
    Minor,
    cuda_of_tag,
    minor,
)

MAX_BYTES = 1 << 18
MAX_CONTEXT_LEVELS = 3
"""How far above the Dockerfile the folder may be that `docker build` is given."""
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s*")
_FLAG = re.compile(r"--[a-z-]+(?:=\S*)?\s+")
HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
_SHELL_HEREDOC = re.compile(r"\s*(?:--\S+\s+)*(?:(?:/bin/)?(?:ba)?sh\b[^<]*)?<<")
"""A heredoc that a shell runs; every other one is the input of another program."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?::?-([^{}$]*))?\}|(\w+))")
_QUOTED = r"""'[^']*+'?|"(?:\\.|[^"\\])*+"?|\\."""
_WORD = re.compile(rf"(?P<word>(?:{_QUOTED}|[^\s'\"])++)", re.DOTALL)
_SHELL_TOKEN = re.compile(
    r"(?P<end>[;&|\n()])|(?P<redirection>\d*[<>][<>&-]*[ \t]*[^\s;&|()]*)|(?P<comment>\#[^\n]*)"
    rf"|(?P<word>(?:{_QUOTED}|\$\(|[^\s'\";&|()<>])++)",
    re.DOTALL,
)
"""Words, and what is between them: ends of commands, redirections with their target, comments."""
_QUOTES = re.compile(r"""'([^']*)'?|"((?:\\.|[^"\\])*)"?|\\(.)""", re.DOTALL)
_UBUNTU_TAG = re.compile(r"ubuntu[:-]?(\d\d\.\d\d|" + "|".join(row.name for row in UBUNTU.values()) + r")")
_INDEX_OPTIONS = ("-i", "--index-url", "--default-index", "--extra-index-url", "-f", "--find-links", "--index")
"""The first three ask no other index."""
_INSTALLERS = re.compile(r"(?:\S*/)?(?:pip|python|uv|conda|mamba)[\d.]*")
"""What `conda run` may run that installs."""
_PREFIX = re.compile(r"sudo|exec|time|then|do|if|-E|env|\w+=.*", re.DOTALL)
"""What stands before a command."""
_PROGRAMS = {
    r"apt-get|apt|aptitude|yum|dnf|microdnf": "apt",
    r"conda|mamba|micromamba": "conda",
    r"uv": "uv",
    r"pip[\d.]*|mim": "pip",
    r"cd|cp|mv|git": "folders",
    r"python[\d.]*|pypy\d*|(?:ba)?sh|make\.sh": "compiled",
}
"""Pattern of a program → the method of `_Reader` that reads its arguments."""
_CONDA_VERBS = ("install", "create", "update", "env")


class Word(NamedTuple):
    text: str
    line: int


class Copy(NamedTuple):
    """A COPY or ADD."""

    origin: str | None
    """The name in `--from`."""
    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Instruction:
    name: str
    """FROM, RUN, … in capitals; SHELL for a script."""
    text: str
    """Its arguments as one line, without continuations; heredocs follow it, line by line."""
    starts: tuple[int, ...]
    """Offsets in `text` at which a line of the file begins."""
    lines: tuple[int, ...]

    @property
    def line(self) -> int:
        return self.lines[0]

    def words(self, *, shell: bool = False) -> list[Word]:
        """The words of the first line, or of the exec form `["pip", "install"]`, without their quotes. shell: those
        that a shell sees, also in its heredocs, without comments and redirections, with "\n" after each command."""
        head, _, body = self.text.partition("\n")
        is_script = self.name == "SHELL" or (body and _SHELL_HEREDOC.match(head))
        end = len(self.text if shell and is_script else head)
        pattern = _SHELL_TOKEN if shell else _WORD
        found = self.exec_form()
        if found:
            return found
        for match in pattern.finditer(self.text, 0, end):
            line = self.lines[max(0, bisect.bisect_right(self.starts, match.start()) - 1)]
            if match.lastgroup == "word":
                found.append(Word(_QUOTES.sub(lambda part: part[1] or part[2] or part[3] or "", match[0]), line))
            elif match.lastgroup == "end":
                found.append(Word("\n", line))
        return found

    def exec_form(self) -> list[Word]:
        """The words of the exec form; empty for every other form."""
        try:
            words = json.loads(self.text) if self.text.lstrip().startswith("[") else []
        except (ValueError, RecursionError):
            return []
        return [Word(word, self.line) for word in words] if all(isinstance(word, str) for word in words) else []


@dataclass
class BuildStage:
    """What one FROM begins."""

    image: str
    """As it is after substitution; it still has a `$` where a value is unknown."""
    name: str
    line: int
    variables: dict[str, str] = field(default_factory=dict)
    """ARG and ENV of the stage, as far as they are known at its end."""
    environment: dict[str, Word] = field(default_factory=dict)
    """ENV alone, with lines."""
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    """The simple commands of RUN, in order: words without operators and redirections."""
    copies: list[Copy] = field(default_factory=list)
    arguments: set[str] = field(default_factory=set)
    folder: str = "/"
    folders: dict[int, str] = field(default_factory=dict)
    """Index of the first command of each RUN → the folder it begins in."""


def read_instructions(text: str) -> Iterator[Instruction]:
    """Raises nothing: what is no instruction is left out."""
    lines = [line.rstrip() for line in text.removeprefix("\ufeff").split("\n")]
    last_line_of = {line.strip(): index for index, line in enumerate(lines)}
    index = 0
    while index < len(lines):
        head: list[str] = []
        numbers: list[int] = []
        continued = True
        while continued and index < len(lines):
            line = lines[index]
            index += 1
            if line and not line.lstrip().startswith("#"):
                continued = line.endswith("\\")
                head.append(line.removesuffix("\\"))
                numbers.append(index)
            elif not head:
                break
        match = _INSTRUCTION.match(head[0]) if head else None
        if match is None:
            continue
        name, head[0] = match[1].upper(), head[0][match.end() :]
        words = "".join(head)
        body: list[str] = []
        for heredoc in HEREDOC.finditer(words) if name in ("RUN", "COPY", "ADD") else ():
            while last_line_of.get(heredoc[2], -1) >= index:
                index += 1
                if lines[index - 1].strip() == heredoc[2]:
                    break
                body.append(lines[index - 1])
                numbers.append(index)
        lengths = [*map(len, head[:-1]), len(head[-1]) + 1, *(len(line) + 1 for line in body)]
        starts = itertools.accumulate(lengths[:-1], initial=0)
        yield Instruction(name, "\n".join([words, *body]), tuple(starts), tuple(numbers))


def read_stages(text: str) -> list[BuildStage]:
    """The stages of a Dockerfile. One that begins with another has that one's variables, commands and copies first."""
    stages: list[BuildStage] = []
    before: dict[str, str] = {}
    for instruction in read_instructions(text):
        name = instruction.name
        if name == "FROM":
            stages.append(_stage(instruction, before, stages))
        elif not stages:
            if name == "ARG":
                before |= {key: word.text for key, word in _assignments(instruction, before)}
        elif name == "ARG":
            for key, word in _assignments(instruction, stages[-1].variables):
                stages[-1].arguments.add(key)
                if word.text or key in before:
                    stages[-1].variables.setdefault(key, word.text or before[key])
        elif name == "ENV":
            stages[-1].environment |= dict(_assignments(instruction, stages[-1].variables))
            stages[-1].variables |= {key: word.text for key, word in stages[-1].environment.items()}
        elif name == "WORKDIR":
            folder = substitute(instruction.text.strip(" \t\"'"), stages[-1].variables)
            stages[-1].folder = os.path.join(stages[-1].folder, folder)[:MAX_REQUIREMENT]
        elif name == "RUN":
            stages[-1].folders[len(stages[-1].commands)] = stages[-1].folder
            stages[-1].commands += run_commands(instruction, stages[-1].variables)
        elif name in ("COPY", "ADD"):
            words = [substitute(word.text, stages[-1].variables) for word in instruction.words()]
            origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
            *sources, target = [word for word in words if not word.startswith("--")] or [""]
            stages[-1].copies.append(Copy(origin, tuple(sources), target))
    return stages


def _stage(instruction: Instruction, before: dict[str, str], stages: list[BuildStage]) -> BuildStage:
    words = substitute(_FLAG.sub("", instruction.text), before).split()
    image = words[0] if words else ""
    name = words[2] if len(words) > 2 and words[1].lower() == "as" else str(len(stages))
    base = next((stage for stage in stages if stage.name.lower() == image.lower()), None)
    if base is None:
        return BuildStage(image, name, instruction.line)
    return dataclasses.replace(copy.deepcopy(base), name=name)


def _assignments(instruction: Instruction, variables: dict[str, str]) -> list[tuple[str, Word]]:
    """The names and values of ARG, empty where it has none, and of ENV, also in its old form `ENV NAME a value`."""
    words = instruction.words()
    if instruction.name == "ENV" and words and "=" not in words[0].text:
        value = " ".join(instruction.text.split(maxsplit=1)[1:]).strip().strip("\"'")
        return [(words[0].text, Word(substitute(value, variables), words[0].line))]
    pairs = ((word.text.partition("="), word.line) for word in words)
    return [(key, Word(substitute(value, variables), line)) for (key, _, value), line in pairs]


MAX_EXPANDED_CHARS = 1 << 16


def substitute(text: str, variables: dict[str, str]) -> str:
    """The text with $NAME, ${NAME} and ${NAME:-default} replaced. What is unknown stays as it is, and what would make
    the text longer than MAX_EXPANDED_CHARS: a few lines that double a value fill any memory."""
    length = 0

    def value(match: re.Match[str]) -> str:
        nonlocal length
        name = match[1] or match[3]
        found = variables.get(name) or match[2] or variables.get(name, match[0])
        length += len(found)
        return found if length <= MAX_EXPANDED_CHARS else match[0]

    return _VARIABLE.sub(value, text)


def run_commands(instruction: Instruction, variables: dict[str, str]) -> list[tuple[Word, ...]]:
    """The simple commands of a RUN, with the values of ARG, ENV and the shell's own variables. Words in quotes stay
    whole, a variable alone is split into its words."""
    if words := instruction.exec_form():
        return [tuple(Word(substitute(word.text, variables), word.line) for word in words)]
    commands: list[tuple[Word, ...]] = []
    current: list[Word] = []
    known = dict(variables)
    for word in (*instruction.words(shell=True), Word("\n", 0)):
        if word.text == "\n":
            if all(_ASSIGNMENT.match(part.text) or part.text == "export" for part in current):
                known |= dict(part.text.split("=", 1) for part in current if "=" in part.text)
            commands.append(tuple(current))
            current = []
        elif current or not word.text.startswith(("--mount=", "--network=", "--security=")):
            text = substitute(word.text, known)
            whole = re.fullmatch(r"\$(?:\w+|\{\w+\})", word.text) and text != word.text
            current += [Word(part, word.line) for part in (text.split() if whole else [text])]
    return [command for command in commands if command]


@dataclass(frozen=True)
class Cuda:
    """A CUDA or cuDNN in the image."""

    version: Minor
    place: str
    text: str
    is_base: bool = False
    exact: bool = True
    """False: only the major version is known."""

    def __str__(self) -> str:
        return str(self.version if self.exact else self.version[0])


@dataclass
class Image(Requested):
    """A container image, or what would be installed without one."""

    base: str = ""
    place: str = ""
    """FILE:LINE of FROM."""
    file: str = ""
    without_cuda: bool = False
    """The base image is known to have none."""
    without_cudnn: bool = False
    """The base image is known to have CUDA and no cuDNN, and nothing installs it."""
    sets_library_path: bool = False
    cpu_only: bool = False
    """The base image has a framework without CUDA."""
    is_unpinned: bool = False
    ubuntu: str = ""
    cudas: list[Cuda] = field(default_factory=list)
    cudnns: list[Cuda] = field(default_factory=list)
    drivers: list[tuple[str, str]] = field(default_factory=list)
    """apt packages with a driver: (name, place)."""
    driver: str | None = None
    """The machine's, as the user says."""
    has_gl: bool = False
    """An apt package brings libGL."""
    builds: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """What is built from source code: (address or folder, place, variables); a folder begins with its repository."""
    environment: dict[str, Word] = field(default_factory=dict)
    stubs: list[tuple[str, str]] = field(default_factory=list)
    conda_forge: list[Package] = field(default_factory=list)
    """Frameworks that conda installs during the build, from a channel that has builds with and without CUDA."""

    def get(self, *names: str) -> Package | None:
        """The last request for the first of these packages that is there, where the version before does not meet it."""
        for name in names:
            current: Package | None = None
            for package in self.packages:
                if package.name == name and (current is None or not _keeps(current, package)):
                    current = package
            if current is not None:
                return current
        return None

    def add(self, package: Package) -> None:
        """A package, and the CUDA or cuDNN that it is."""
        self.packages.append(package)
        name, number = package.name, package.minor
        if match := re.fullmatch(PATTERNS["pip_cuda"], name):
            cuda = Cuda(number or minor(match[1]), package.place, package.text, exact=number is not None)
            self.cudas.append(cuda)
            self.without_cuda = False
        elif name in ("cudatoolkit", "cuda-toolkit", "cuda-version", "pytorch-cuda"):
            self.without_cuda = False
            if number is not None and name != "pytorch-cuda":
                self.cudas.append(Cuda(number, package.place, package.text))
        elif (package.source == "conda" and name == "cudnn") or re.fullmatch(PATTERNS["pip_cudnn"], name):
            self.without_cuda = self.without_cudnn = False
            if number is not None:
                self.cudnns.append(Cuda(number, package.place, package.text))

    def read(self, path: Path, name: str, options: Options) -> None:
        """A file counts as a whole or, if it is refused, not at all: the limits are those of each file."""
        self.read_files.add(path.resolve())
        asked = Requested()
        asked.read(path, name, options)
        for package in asked.packages:
            self.add(package)
        self.python = self.python or asked.python
        self.missing += asked.missing


def _keeps(current: Package, later: Package) -> bool:
    """Whether pip leaves what is installed."""
    if later.options.upgrade:
        return False
    if current.version is not None:
        version = current.version + (f"+{current.local}" if current.local else "")
        return later.allows(version)
    return not later.specifier or (current.source == "image" and later.minor is None)


def read_image(path: Path, *, given: Path | None = None) -> Image:
    """The image of a Dockerfile. given: a requirements file that `-r` of its name means. Raises OSError, ValueError."""
    stages = read_stages(read_text(path, MAX_BYTES))
    if not stages:
        raise ValueError("has no FROM: is it a Dockerfile?")
    return _Reader(path, stages, given).read()


def _arguments(words: Sequence[Word], with_value: Sequence[str]) -> Iterator[tuple[str, Word]]:
    """(option, value) of each option of a command, ("", argument) of the others. with_value: those that take a word."""
    rest = iter(words)
    for word in rest:
        option, equals, value = word.text.partition("=") if word.text.startswith("--") else (word.text, "", "")
        if not word.text.startswith("-"):
            yield "", word
        elif equals or option not in with_value:
            yield option, Word(value, word.line)
        else:
            yield option, next(rest, Word("", word.line))


class _Reader:
    """Reads the commands of the last stage into an Image."""

    def __init__(self, path: Path, stages: list[BuildStage], given: Path | None) -> None:
        self.path = path
        self.stages = stages
        self.stage = stages[-1]
        self.given = given
        place = f"{path}:{self.stage.line}"
        self.image = Image(base=self.stage.image, place=place, file=str(path), environment=self.stage.environment)
        self.channels: set[str] = set()
        """Channels of conda's configuration."""
        self.folder, self.assigned = "/", dict[str, str]()
        self.clones: dict[str, tuple[str, str]] = {}
        """Folder → (repository, tag or branch)."""

    def read(self) -> Image:
        image = self.image
        _read_base(image)
        for origin, sources, _ in self.stage.copies:
            other = next((stage for stage in self.stages if stage is not self.stage and stage.name == origin), None)
            if other is None or not any(
                re.search(PATTERNS["carried"], source.rstrip("/") or "/") for source in sources
            ):
                continue
            carried = _Reader(self.path, [*self.stages[: self.stages.index(other)], other], self.given).read()
            image.packages += carried.packages
            image.missing += carried.missing
            image.builds += carried.builds
            image.without_cuda = image.without_cuda and not carried.cudas
        depth = 0
        for index, command in enumerate(self.stage.commands):
            if index in self.stage.folders:
                self.folder, self.assigned = os.path.normpath(self.stage.folders[index]), {}
            depth += (command[0].text in ("if", "case")) - (command[0].text in ("fi", "esac"))
            if not depth:  # what happens under a condition is not known
                self.command(command)
        words = [text for origin, sources, _ in self.stage.copies for text in (origin or "", *sources)]
        words += [word.text for command in self.stage.commands if command[0].text != "rm" for word in command]
        mentioned = " ".join(words).lower().replace("and-cuda", "")
        image.without_cuda = image.without_cuda and "cuda" not in mentioned
        image.without_cudnn = image.without_cudnn and "cudnn" not in mentioned
        sets_path = re.search("ld_library_path|ldconfig", mentioned) is not None
        image.sets_library_path = sets_path or "LD_LIBRARY_PATH" in image.environment
        return image

    def place(self, word: Word) -> str:
        return f"{self.path}:{word.line}"

    def command(self, words: tuple[Word, ...]) -> None:
        while words and (_PREFIX.fullmatch(words[0].text) or words[0].text == "export"):
            self.assigned |= dict([words[0].text.split("=", 1)]) if "=" in words[0].text else {}
            words = words[1:]
        if not words:
            return
        texts = [word.text for word in words]
        program = PurePosixPath(texts[0]).name
        for word in words if program in ("sh", "bash") else words[:1]:
            if match := re.search(PATTERNS["runfile"], word.text):
                self.add_cuda(minor(match[1]), word, match[0])
        self.stub(texts, words[-1])
        if re.fullmatch(r"python[\d.]*|pypy\d*", program) and texts[1:3] in (["-m", "pip"], ["-m", "uv"]):
            program, words = texts[2], words[2:]
        elif program == "mim":  # it looks for a wheel with the CUDA of torch
            words = (*words, Word("--find-links", 0), Word("mim", 0))
        for pattern, read in _PROGRAMS.items():
            if re.fullmatch(pattern, program):
                getattr(self, read)(words if read in ("folders", "compiled") else words[1:])

    def stub(self, texts: list[str], last: Word) -> None:
        """A link to the stub of the driver's library, where the loader finds it."""
        if "stubs/libcuda.so" in " ".join(texts[1:-1]) and texts[-1].endswith("libcuda.so.1"):
            path = self.stage.environment.get("LD_LIBRARY_PATH")
            if "/stubs/" not in texts[-1] or (path is not None and "/stubs" in path.text):
                self.image.stubs.append((texts[-1], self.place(last)))

    def folders(self, words: tuple[Word, ...]) -> None:
        """cd, git clone and checkout, and a setup.py that is copied into the current folder."""
        arguments = list(_arguments(words[1:], LISTS["git_values"]))
        verb, *rest = [word.text for option, word in arguments if not option] or [""]
        if words[0].text == "cd":
            self.folder = self.absolute(verb)
        elif verb == "clone" and rest:
            name = PurePosixPath(rest[0]).name.removesuffix(".git")
            branch = "".join(word.text for option, word in arguments if option in ("-b", "--branch"))
            self.clones[self.absolute(rest[1] if len(rest) > 1 else name)] = name, branch
        elif verb == "checkout" and rest:
            self.clones[self.folder] = self.project("")[0], rest[0]
        elif verb.endswith("/setup.py") and rest and self.absolute(rest[-1].removesuffix("setup.py")) == self.folder:
            self.clones[self.folder] = self.project(os.path.dirname(verb))

    def absolute(self, folder: str) -> str:
        return os.path.normpath(os.path.join(self.folder, folder))[:MAX_REQUIREMENT]

    def project(self, target: str) -> tuple[str, str]:
        """The address or folder of something to be installed, and the tag or branch of its clone; `?`: not known."""
        path = target if "://" in target else self.absolute(target)
        folder = max((one for one in self.clones if f"{path}/".startswith(f"{one}/")), key=len, default=None)
        return (self.clones[folder][0] + path[len(folder) :], self.clones[folder][1]) if folder else (path, "?")

    def compiled(self, words: tuple[Word, ...]) -> None:
        scripts = ("make.sh", "setup.py") if {word.text for word in words} & set(LISTS["setup_verbs"]) else "make.sh"
        for word in words:
            if word.text.endswith(scripts):
                self.build(os.path.dirname(word.text), word, Options())

    def build(self, target: str, word: Word, options: Options) -> None:
        """Something that is built from source code, and the package that it is or requires."""
        project, revision = self.project(target)
        variables: dict[str, str] = {}
        for name in LISTS["build_variables"]:
            is_set = self.stage.environment.get(name, Word("", word.line + 1)).line <= word.line
            if is_set or name in self.assigned or name in self.stage.arguments:
                variables[name] = self.assigned.get(name) or self.stage.variables.get(name, "$")
        self.image.builds.append((project, self.place(word), variables))
        tag = re.fullmatch(r"v?(\d+(?:\.\d+)+(?:rc\d+)?)|main|", revision)
        for pattern, name in (COMPANIONS.sources | COMPANIONS.requires).items():
            if not options.no_deps and re.search(pattern, project) and (tag or pattern in COMPANIONS.requires):
                specifier = f"=={tag[1]}" if tag and tag[1] and pattern in COMPANIONS.sources else ""
                self.image.add(Package(name, specifier, self.place(word), f"{project} {specifier}".strip()))

    def uv(self, words: tuple[Word, ...]) -> None:
        if words and words[0].text == "pip":
            self.pip(words[1:])

    def add_cuda(self, version: Minor, word: Word, text: str) -> None:
        self.image.cudas.append(Cuda(version, self.place(word), text))
        self.image.without_cuda = False

    def apt(self, words: tuple[Word, ...]) -> None:
        image = self.image
        ubuntu = UBUNTU.get(image.ubuntu)
        for word in itertools.dropwhile(lambda word: word.text != "install", words):
            text = word.text
            if match := re.fullmatch(PATTERNS["apt_cuda"], text):
                self.add_cuda(minor(match[1]), word, text)
            elif text == "nvidia-cuda-toolkit" and ubuntu and ubuntu.cuda_toolkit:
                self.add_cuda(ubuntu.cuda_toolkit, word, text)
            elif match := re.fullmatch(PATTERNS["apt_cudnn"], text):
                image.cudnns.append(Cuda(minor(match[2] or match[1]), self.place(word), text, exact=bool(match[2])))
            image.has_gl = image.has_gl or re.search(PATTERNS["apt_gl"], text) is not None
            if re.fullmatch(PATTERNS["driver"], text.partition("=")[0]):
                image.drivers.append((text, self.place(word)))
            if match := re.fullmatch(r"python(3\.\d+)(?:-\w+)?", text):
                image.python = minor(match[1])
            elif re.fullmatch(r"python3(?:-pip|-dev|-venv)?|python-is-python3", text) and ubuntu:
                image.python = image.python or ubuntu.python

    def conda(self, words: tuple[Word, ...]) -> None:
        texts = [word.text for word in words]
        if texts[:1] == ["run"]:
            self.command(tuple(itertools.dropwhile(lambda word: not _INSTALLERS.fullmatch(word.text), words[1:])))
            return
        if texts[:1] == ["config"] and texts[2:3] == ["channels"] and texts[1] in ("--add", "--append", "--prepend"):
            self.channels.update(texts[3:])
        if not any(word.text in _CONDA_VERBS for word in words):
            return
        arguments = list(_arguments(words, LISTS["conda_values"]))
        channels = self.channels | {value.text for option, value in arguments if option in ("-c", "--channel")}
        for option, word in arguments:
            if option in ("-f", "--file") and word.text:
                self.requirements_file(word, Options())
            if option or word.text in _CONDA_VERBS:
                continue
            package = requirements.read_conda_package(word.text, place=self.place(word))
            if package is None:
                continue
            if package.name == "python" and package.minor:
                self.image.python = package.minor
            self.image.add(package)
            if package.name in ("torch", "tensorflow") and "pytorch" not in channels:
                self.image.conda_forge.append(package)

    def pip(self, words: tuple[Word, ...]) -> None:
        verb = next((word for word in words if not word.text.startswith("-")), None)
        rest = [word for word in words if word is not verb]
        if verb is not None and verb.text == "uninstall":
            gone = {word.text.lower().replace("_", "-") for word in rest}
            self.image.packages = [package for package in self.image.packages if package.name not in gone]
        if verb is None or verb.text != "install":
            return
        options, files, names = self.pip_arguments(rest)
        for word in files:
            self.requirements_file(word, options)
        has_wheels = any(word.text in ("-f", "--find-links") for word in rest)
        for word in names:
            if ".whl" not in word.text and (not has_wheels or re.search(r"^\.|/|_repo$", word.text)):
                self.build(word.text, word, options)
            if package := read_package(word.text, place=self.place(word), options=options):
                self.image.add(package)
        is_framework_named = files or any(word.text.startswith(("torch", "tensorflow")) for word in names)
        if options.index == "cpu" and not is_framework_named:  # it is a dependency of what is installed
            self.image.packages.append(Package("torch", "", options.index_place, "torch", options=options))

    def pip_arguments(self, words: Sequence[Word]) -> tuple[Options, list[Word], list[Word]]:
        """(options, files of requirements, requirements) of `pip install`."""
        options, files, names = Options(), [], []
        for option, word in _arguments(words, LISTS["pip_values"]):
            index = requirements.wheel_index(word.text) if option in _INDEX_OPTIONS else ""
            if option == "--torch-backend" and word.text != "auto":
                index = word.text
            if option.startswith("-r") or option == "--requirement":
                files.append(word if word.text else Word(option[2:], word.line))
            elif index:
                alone = option in (*_INDEX_OPTIONS[:3], "--torch-backend")
                options = dataclasses.replace(options, index=index, index_alone=alone, index_place=self.place(word))
            elif option in ("-U", "--upgrade", "--force-reinstall"):
                options = dataclasses.replace(options, upgrade=True)
            elif option == "--no-deps":
                options = dataclasses.replace(options, no_deps=True)
            elif option in ("", "-e", "--editable"):
                names.append(word)
        return options, files, names

    def requirements_file(self, word: Word, options: Options) -> None:
        """Reads the file of `-r`, if COPY takes it from the folder of the Dockerfile or the two above."""
        name = PurePosixPath(word.text)
        found = self.find_file(name)
        if found is None:
            if self.given is None or self.given.name != name.name:
                reason = "it is not in the folder of the Dockerfile, nor in the two above it"
                self.image.missing.append((word.text, self.place(word), reason))
        elif found.resolve() not in self.image.read_files:
            shown = os.path.normpath(self.path.parent / os.path.relpath(found, self.path.resolve().parent))
            try:
                self.image.read(found, shown, options)
            except (OSError, ValueError) as error:
                self.image.missing.append((word.text, self.place(word), requirements.reason_of(error)))

    def find_file(self, name: PurePosixPath) -> Path | None:
        """The file, by its own path without the folders of the image, or by that of the COPY which makes it."""
        parts = name.parts[1:] if name.is_absolute() else name.parts
        names = [
            source.lstrip("/")
            for origin, sources, target in self.stage.copies
            for source in (sources if origin is None else ())
            if name.name in (PurePosixPath(source).name, PurePosixPath(target).name if len(sources) == 1 else "")
        ]
        names += ["/".join(parts[first:]) for first in range(len(parts))]
        roots = list(self.path.resolve().parents)[:MAX_CONTEXT_LEVELS]
        candidates = ((root / candidate).resolve() for root in roots for candidate in names)
        found = (path for path in candidates if path.is_file() and any(path.is_relative_to(root) for root in roots))
        return next(found, None)


def _read_base(image: Image) -> None:
    """What is known of the base image by its name."""
    name = image.base.partition("@")[0]
    image.without_cuda = bool(re.match(PATTERNS["without_cuda"], name))
    if match := _UBUNTU_TAG.search(name):
        image.ubuntu = next((release for release, row in UBUNTU.items() if row.name == match[1]), match[1])
    if match := re.search(r"(?:^|/|uv:)python:?(3\.\d+)", name):
        image.python = minor(match[1])
    for pattern, python in COMPANIONS.image_pythons.items():
        image.python = python if re.search(pattern, name) else image.python
    for row in NAMES.images:
        if match := re.search(row.pattern, name):
            _read_known(image, name, row, match.groupdict())
            return


def _read_known(image: Image, name: str, row: KnownImage, found: dict[str, str | None]) -> None:
    """What the name of an image with CUDA or a framework says. found: the groups of the row's pattern."""
    framework, version, flavor, python, cuda_text = (
        found.get(part) or "" for part in ("framework", "version", "flavor", "python", "cuda")
    )
    framework = {"tf": "tensorflow", "pytorch": "torch"}.get(framework or row.framework, framework or row.framework)
    version, cudnn = version.replace("-", "."), found.get("cudnn")
    tag = name.rpartition(":")[2] if ":" in name.rpartition("/")[2] else ""
    image.is_unpinned = bool(row.floating_tag and re.match(row.floating_tag, tag))
    image.cpu_only = flavor == "cpu" or (row.plain_is_cpu and not flavor)
    image.without_cudnn = "cudnn" in found and cudnn is None
    if python:
        image.python = Minor((int(python[0]), int(python[1:])))
    cuda = cuda_of_tag(cuda_text) or (None if not cuda_text else minor(cuda_text))
    if row.plain_is_cpu and flavor and version and (build := TENSORFLOW.get(minor(version))):
        cuda = build.cuda
        image.cudnns.append(Cuda(build.cudnn, image.place, image.base, is_base=True))
    if cuda is not None:
        image.cudas.append(Cuda(cuda, image.place, name, is_base=True))
    if cudnn is not None:
        image.cudnns.append(Cuda(minor(cudnn or "9"), image.place, name, is_base=True, exact=False))
    if framework:
        specifier = f"=={version}" if version.count(".") > 1 else f"=={version}.*" if version else ""
        options = Options(index=f"cu{cuda[0]}{cuda[1]}" if cuda and framework == "torch" else "")
        image.packages.append(Package(framework, specifier, image.place, image.base, source="image", options=options))
