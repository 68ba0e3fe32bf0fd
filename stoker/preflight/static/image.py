"""What a container image will have, read from its Dockerfile: base image, packages, CUDA, cuDNN, Python, variables.

Only the stage that is built last counts, and what it copies from others. The commands of RUN are recognized, not run:
apt, pip, uv, conda, CUDA's installer. What is not recognized is unknown, and no rule speaks of it.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from stoker.findings.finding import Finding
from stoker.preflight.catalog import describe_file
from stoker.preflight.static import requirements
from stoker.preflight.static.dockerfile import Stage, Word, read_stages
from stoker.preflight.static.names import IMAGES, PACKAGES
from stoker.preflight.static.requirements import Options, Package, read_package, read_text
from stoker.preflight.static.versions import TABLES, TENSORFLOW, UBUNTU, Minor, cuda_of_tag, minor

MAX_BYTES = 1 << 18
MAX_CONTEXT_LEVELS = 3
"""How far above the Dockerfile the folder may be that `docker build` is given."""
_UBUNTU_TAG = re.compile(r"ubuntu[:-]?(\d\d\.\d\d|" + "|".join(row.name for row in UBUNTU.values()) + r")")
_INDEX_OPTIONS = ("-i", "--index-url", "--default-index", "--extra-index-url", "-f", "--find-links", "--index")
"""The first three ask no other index."""
_CONDA_VERBS = ("install", "create", "update", "env")


@dataclass(frozen=True)
class Cuda:
    """A CUDA or cuDNN in the image."""

    version: Minor
    place: str
    text: str
    is_base: bool = False
    exact: bool = True
    """False: only the major version is known."""


@dataclass
class Image:
    """What is known."""

    base: str = ""
    place: str = ""
    """Of FROM."""
    file: str = ""
    without_cuda: bool = False
    """The base image is known to have none."""
    without_cudnn: bool = False
    """The base image is known to have CUDA and no cuDNN, and nothing installs it."""
    sets_library_path: bool = False
    cpu_only: str = ""
    """The base image has a framework without CUDA; which."""
    is_unpinned: bool = False
    driver_cuda: Minor | None = None
    python: Minor | None = None
    ubuntu: str = ""
    packages: list[Package] = field(default_factory=list)
    cudas: list[Cuda] = field(default_factory=list)
    cudnns: list[Cuda] = field(default_factory=list)
    drivers: list[tuple[str, str]] = field(default_factory=list)
    """apt packages with a driver: (name, place)."""
    extensions: list[tuple[str, str]] = field(default_factory=list)
    """Packages that are compiled with the image's nvcc: (name, place)."""
    environment: dict[str, Word] = field(default_factory=dict)
    stubs: list[tuple[str, str]] = field(default_factory=list)
    conda_forge: list[Package] = field(default_factory=list)
    """Frameworks that conda installs during the build, from a channel that has builds with and without CUDA."""
    findings: list[Finding] = field(default_factory=list)
    read_files: set[Path] = field(default_factory=set)

    def get(self, name: str) -> Package | None:
        """The request that decides the version of a package: the last one that the version before it does not meet."""
        current: Package | None = None
        for package in self.packages:
            if package.name == name and (current is None or not _keeps(current, package)):
                current = package
        return current

    def has(self, *names: str) -> Package | None:
        return next((found for name in names if (found := self.get(name))), None)

    def add(self, package: Package) -> None:
        """A package, and the CUDA or cuDNN that it is."""
        self.packages.append(package)
        name, number = package.name, package.minor
        if match := re.fullmatch(PACKAGES.pip_cuda, name):
            cuda = Cuda(number or minor(match[1]), package.place, package.text, exact=number is not None)
            self.cudas.append(cuda)
            self.without_cuda = False
        elif name in ("cudatoolkit", "cuda-toolkit", "cuda-version", "pytorch-cuda"):
            self.without_cuda = False
            if number is not None and name != "pytorch-cuda":
                self.cudas.append(Cuda(number, package.place, package.text))
        elif (package.source == "conda" and name == "cudnn") or re.fullmatch(PACKAGES.pip_cudnn, name):
            self.without_cuda = self.without_cudnn = False
            if number is not None:
                self.cudnns.append(Cuda(number, package.place, package.text))

    def add_missing(self, name: str, place: str, reason: str) -> None:
        """A file of requirements that could not be read."""
        self.findings.append(describe_file("requirements_not_found", place, name=name, reason=reason))


def _keeps(current: Package, later: Package) -> bool:
    """Whether pip leaves what is installed."""
    if later.options.upgrade:
        return False
    if current.version is not None:
        version = current.version + (f"+{current.local}" if current.local else "")
        return later.allows(version)
    return not later.specifier or (current.source == "image" and later.minor is None)


def read_image(path: Path, *, given: Path | None = None) -> Image:
    """The image of a Dockerfile. given: a requirements file that is passed besides, so that `-r` of this name is found.
    Raises OSError, ValueError."""
    stages = read_stages(read_text(path, MAX_BYTES))
    if not stages:
        raise ValueError("has no FROM: is it a Dockerfile?")
    return _Reader(path, stages, given).read()


def _arguments(words: Sequence[Word], with_value: frozenset[str]) -> Iterator[tuple[str, Word]]:
    """(option, its value) of each option of a command, and ("", argument) of the others. with_value: the options that
    take the next word."""
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

    def __init__(self, path: Path, stages: list[Stage], given: Path | None) -> None:
        self.path = path
        self.stages = stages
        self.stage = stages[-1]
        self.given = given
        self.image = Image(self.stage.image, f"{path}:{self.stage.line}", str(path), environment=self.stage.environment)
        self.python: list[tuple[int, Minor]] = []
        """(how surely it is the one that packages are installed for, version)."""

    def read(self) -> Image:
        image, environment = self.image, self.stage.environment
        _read_base(image)
        for origin, sources, _ in self.stage.copies:
            other = next((stage for stage in self.stages if stage is not self.stage and stage.name == origin), None)
            if other is None or not any(re.search(IMAGES.carried, source.rstrip("/") or "/") for source in sources):
                continue
            carried = _Reader(self.path, [*self.stages[: self.stages.index(other)], other], self.given).read()
            image.packages += carried.packages
            image.findings += carried.findings
            if any(source.rstrip("/") in ("/usr/local", "/usr/local/cuda", "/usr", "") for source in sources):
                image.cudas += carried.cudas
                image.cudnns += carried.cudnns
                image.without_cuda = image.without_cuda and not carried.cudas
        for command in self.stage.commands:
            self.command(command)
        words = [text for origin, sources, _ in self.stage.copies for text in (origin or "", *sources)]
        words += [word.text for command in self.stage.commands if command[0].text != "rm" for word in command]
        mentioned = " ".join(words).lower().replace("and-cuda", "")
        image.without_cuda = image.without_cuda and "cuda" not in mentioned
        image.without_cudnn = image.without_cudnn and "cudnn" not in mentioned
        image.sets_library_path = "LD_LIBRARY_PATH" in environment or any(
            word in mentioned for word in ("ld_library_path", "ldconfig")
        )
        if self.python:
            image.python = max(self.python)[1]
        return image

    def place(self, word: Word) -> str:
        return f"{self.path}:{word.line}"

    def command(self, words: tuple[Word, ...]) -> None:
        texts = [word.text for word in words]
        while texts and re.fullmatch(r"sudo|exec|time|then|do|if|-E|env|\w+=.*", texts[0], re.DOTALL):
            texts, words = texts[1:], words[1:]
        if not texts:
            return
        program = PurePosixPath(texts[0]).name
        for word in words if program in ("sh", "bash") else words[:1]:
            if match := re.search(PACKAGES.runfile, word.text):
                self.add_cuda(minor(match[1]), word, match[0])
        target = texts[-1].rpartition("/stubs/")
        if "stubs/libcuda.so" in " ".join(texts[1:-1]) and texts[-1].endswith("libcuda.so.1"):
            path = self.stage.environment.get("LD_LIBRARY_PATH")
            if not target[1] or (path is not None and "/stubs" in path.text):
                self.image.stubs.append((texts[-1], self.place(words[-1])))
        if re.fullmatch(r"python[\d.]*|pypy\d*", program) and texts[1:3] in (["-m", "pip"], ["-m", "uv"]):
            program, words = texts[2], words[2:]
        if program in ("apt-get", "apt", "aptitude", "yum", "dnf", "microdnf") and "install" in texts:
            self.apt(words[texts.index("install") + 1 :])
        elif program in ("conda", "mamba", "micromamba"):
            self.conda(words[1:])
        elif program == "uv":
            self.uv(words[1:])
        elif re.fullmatch(r"pip[\d.]*", program):
            self.pip(words[1:])

    def add_cuda(self, version: Minor, word: Word, text: str) -> None:
        self.image.cudas.append(Cuda(version, self.place(word), text))
        self.image.without_cuda = False

    def apt(self, words: tuple[Word, ...]) -> None:
        image = self.image
        ubuntu = UBUNTU.get(image.ubuntu)
        for word in words:
            text = word.text
            if match := re.fullmatch(PACKAGES.apt_cuda, text):
                self.add_cuda(minor(match[1]), word, text)
            elif text == "nvidia-cuda-toolkit" and ubuntu and ubuntu.cuda_toolkit:
                self.add_cuda(ubuntu.cuda_toolkit, word, text)
            elif match := re.fullmatch(PACKAGES.apt_cudnn, text):
                image.cudnns.append(Cuda(minor(match[2] or match[1]), self.place(word), text, exact=bool(match[2])))
            if re.fullmatch(PACKAGES.driver, text.partition("=")[0]):
                image.drivers.append((text, self.place(word)))
            if match := re.fullmatch(r"python(3\.\d+)(?:-\w+)?", text):
                self.python.append((1, minor(match[1])))
            elif re.fullmatch(r"python3(?:-pip|-dev|-venv)?|python-is-python3", text) and ubuntu:
                self.python.append((0, ubuntu.python))

    def conda(self, words: tuple[Word, ...]) -> None:
        if not any(word.text in _CONDA_VERBS for word in words):
            return
        arguments = list(_arguments(words, PACKAGES.conda_values))
        channels = {value.text for option, value in arguments if option in ("-c", "--channel")}
        for option, word in arguments:
            if option in ("-f", "--file") and word.text:
                self.requirements_file(word, Options())
            if option or word.text in _CONDA_VERBS:
                continue
            package = requirements.read_conda_package(word.text, place=self.place(word))
            if package is None:
                continue
            if package.name == "python" and package.minor:
                self.python.append((2, package.minor))
            self.image.add(package)
            if package.name in ("torch", "tensorflow") and "pytorch" not in channels:
                self.image.conda_forge.append(package)

    def uv(self, words: tuple[Word, ...]) -> None:
        texts = [word.text for word in words]
        if texts[:1] == ["pip"]:
            self.pip(words[1:])
        named = [value.text for option, value in _arguments(words, PACKAGES.pip_values) if option in ("--python", "-p")]
        if texts[:2] == ["python", "install"]:
            named += texts[2:]
        for text in named:
            if match := re.fullmatch(r"(?:python|cpython-?)?(3\.\d+)(?:\.\d+)?", text):
                self.python.append((3, minor(match[1])))

    def pip(self, words: tuple[Word, ...]) -> None:
        verb = next((word for word in words if not word.text.startswith("-")), None)
        if verb is None or verb.text not in ("install", "uninstall"):
            return
        rest = [word for word in words if word is not verb]
        if verb.text == "uninstall":
            gone = {word.text.lower().replace("_", "-") for word in rest}
            self.image.packages = [package for package in self.image.packages if package.name not in gone]
            return
        arguments = list(_arguments(rest, PACKAGES.pip_values))
        options, files = Options(), []
        for option, word in arguments:
            if option in ("-r", "--requirement"):
                files.append(word)
            elif option in _INDEX_OPTIONS and (index := requirements.wheel_index(word.text)):
                alone = option in _INDEX_OPTIONS[:3]
                options = dataclasses.replace(options, index=index, index_alone=alone, index_place=self.place(word))
            elif option == "--torch-backend" and word.text != "auto":
                options = dataclasses.replace(options, index=word.text, index_alone=True, index_place=self.place(word))
            elif option in ("-U", "--upgrade", "--force-reinstall"):
                options = dataclasses.replace(options, upgrade=True)
            elif option == "--no-deps":
                options = dataclasses.replace(options, no_deps=True)
            elif option.startswith("-r"):
                files.append(Word(option[2:], word.line))
        for word in files:
            self.requirements_file(word, options)
        names = [word for option, word in arguments if not option]
        for word in (*names, *(word for option, word in arguments if option in ("-e", "--editable"))):
            lowered = word.text.lower()
            if any(f"/{name}" in lowered or lowered.startswith(f"{name}_repo") for name in PACKAGES.extensions):
                self.image.extensions.append((word.text, self.place(word)))
        for word in names:
            if package := read_package(word.text, place=self.place(word), options=options):
                if package.name in ("apex", "flash-attn") and ".whl" not in word.text:
                    self.image.extensions.append((word.text, self.place(word)))
                self.image.add(package)
        if (
            options.index == "cpu"
            and not files
            and not any(word.text.startswith(("torch", "tensorflow")) for word in names)
        ):
            place = options.index_place
            self.image.packages.append(Package("torch", "", place, "torch", options=options))

    def requirements_file(self, word: Word, options: Options) -> None:
        """Reads the file of `-r`, if COPY takes it from the folder of the Dockerfile or the two above."""
        name = PurePosixPath(word.text)
        found = self.find_file(name)
        if found is None:
            if self.given is None or self.given.name != name.name:
                reason = "it is not in the folder of the Dockerfile, nor in the two above it"
                self.image.add_missing(word.text, self.place(word), reason)
            return
        if found.resolve() in self.image.read_files:
            return
        self.image.read_files.add(found.resolve())
        try:
            shown = os.path.normpath(self.path.parent / os.path.relpath(found, self.path.resolve().parent))
            requested = requirements.read_requested(found, options=options, name=shown)
        except (OSError, ValueError) as error:
            self.image.add_missing(word.text, self.place(word), requirements.reason_of(error))
            return
        for package in requested.packages:
            self.image.add(package)
        if requested.python and found.suffix in (".yml", ".yaml"):
            self.python.append((2, requested.python))
        for missing in requested.missing:
            self.image.add_missing(*missing)

    def find_file(self, name: PurePosixPath) -> Path | None:
        roots = list(self.path.resolve().parents)[:MAX_CONTEXT_LEVELS]
        names = [str(name).lstrip("/")]
        for origin, sources, target in self.stage.copies:
            for source in sources if origin is None else ():
                is_renamed = PurePosixPath(target).name == name.name and len(sources) == 1
                if PurePosixPath(source).name == name.name or is_renamed:
                    names.insert(0, source.lstrip("/"))
                if str(name).startswith(target.rstrip("/") + "/"):
                    names.append(f"{source}/{str(name)[len(target.rstrip('/')) + 1 :]}")
        candidates = ((root / candidate).resolve() for root in roots for candidate in names)
        return next(
            (path for path in candidates if path.is_file() and any(path.is_relative_to(root) for root in roots)), None
        )


def _read_base(image: Image) -> None:
    """What is known of the base image by its name."""
    name = image.base.partition("@")[0]
    tag = name.rpartition(":")[2] if ":" in name.rpartition("/")[2] else ""
    image.without_cuda = bool(re.match("|".join(IMAGES.without_cuda), name))
    if match := _UBUNTU_TAG.search(name):
        image.ubuntu = next((release for release, row in UBUNTU.items() if row.name == match[1]), match[1])
    if match := re.search(r"(?:^|/|uv:)python:?(3\.\d+)", name):
        image.python = minor(match[1])
    if match := re.search(IMAGES.cuda, name):
        image.cudas.append(Cuda(minor(match[1]), image.place, name, is_base=True))
        cudnn = re.search(r"-cudnn(\d*)", match[2])
        image.without_cudnn = cudnn is None
        if cudnn:
            image.cudnns.append(Cuda(minor(cudnn[1] or "9"), image.place, name, is_base=True, exact=False))
    elif match := re.search(IMAGES.tensorflow, name):
        image.is_unpinned = tag == "" or tag.startswith(("latest", "nightly", "devel"))
        number = re.match(r"(\d+\.\d+)(?:\.\d+)?(?:rc\d+)?", tag)
        _add_framework(image, "tensorflow", number[0] if number else "")
        if "gpu" not in tag and "$" not in tag:
            image.cpu_only = f"tensorflow/tensorflow:{tag or 'latest'}"
        elif number and (build := TENSORFLOW.get(minor(number[1]))):
            image.cudas.append(Cuda(build.cuda, image.place, image.base, is_base=True))
            image.cudnns.append(Cuda(build.cudnn, image.place, image.base, is_base=True))
    elif match := re.search(IMAGES.torch, name):
        image.driver_cuda = minor(match[2])
        image.cudas.append(Cuda(image.driver_cuda, image.place, name, is_base=True))
        _add_framework(image, "torch", match[1], index=f"cu{match[2].replace('.', '')}")
    elif match := re.search(IMAGES.ngc, name):
        released = minor(match[2])
        major = next((major for first, major in TABLES.ngc_cuda_major.items() if released >= minor(first)), None)
        image.driver_cuda = Minor((major, 0)) if major else None
        _add_framework(image, match[1], "")
    elif match := re.search(IMAGES.aws, name):
        image.python = Minor((int(match[4]), int(match[5])))
        _add_framework(image, match[1], match[2])
        _set_container(image, match[1], minor(match[2]), is_cpu=match[3] == "cpu")
        if cuda := cuda_of_tag(match[6] or ""):
            image.cudas.append(Cuda(cuda, image.place, name, is_base=True))
    elif match := re.search(IMAGES.google, name):
        framework = "pytorch" if match[1] == "pytorch" else "tensorflow"
        _add_framework(image, framework, f"{match[3]}.{match[4]}")
        _set_container(image, framework, minor(f"{match[3]}.{match[4]}"), is_cpu=match[2] == "cpu")
    elif re.search(r"(?:^|/)pytorch/pytorch(?::|$)", name):
        _add_framework(image, "torch", "")
        image.is_unpinned = tag in ("", "latest")


def _set_container(image: Image, framework: str, version: Minor, *, is_cpu: bool) -> None:
    """A deep-learning container of AWS or Google."""
    if is_cpu:
        image.cpu_only = image.base
    elif framework == "tensorflow" and version in TENSORFLOW:
        image.driver_cuda = TENSORFLOW[version].cuda


def _add_framework(image: Image, name: str, version: str, *, index: str = "") -> None:
    name = "torch" if name == "pytorch" else name
    specifier = f"=={version}" if version.count(".") > 1 else f"=={version}.*" if version else ""
    image.packages.append(Package(name, specifier, image.place, image.base, source="image", options=Options(index)))
