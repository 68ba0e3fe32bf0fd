"""What a container image will have, read from its Dockerfile: base image, packages, CUDA, cuDNN, Python, variables.

Only the stage that is built last counts, and what it copies from others. The commands of RUN are recognized, not run:
apt, pip, uv, conda, CUDA's installer. What is not recognized is unknown, and no rule speaks of it.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from stoker import regular_files
from stoker.preflight.findings import CheckFinding, make_finding
from stoker.preflight.static import requirements
from stoker.preflight.static.dockerfile import Stage, Word, read_stages
from stoker.preflight.static.requirements import Options, Package, read_package
from stoker.preflight.static.versions import (
    NGC_CUDA_MAJOR,
    TENSORFLOW,
    UBUNTU,
    UBUNTU_CUDA_TOOLKIT,
    UBUNTU_PYTHON,
    Minor,
    minor,
)

MAX_BYTES = 1 << 18
MAX_CONTEXT_LEVELS = 3
"""How far above the Dockerfile the folder may be that `docker build` is given."""
_NO_CUDA = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?:python|ubuntu|debian|alpine|buildpack-deps|fedora|centos|rockylinux|almalinux)(?::|@|$)"
    r"|(?:docker\.io/)?(?:continuumio/(?:mini|ana)conda3|condaforge/\S+|mambaorg/micromamba)(?::|@|$)"
    r"|ghcr\.io/astral-sh/uv:python|(?:public\.ecr\.aws/)?(?:docker/library/)?python:"
)
"""Images that are known to come without CUDA."""
_CUDA_IMAGE = re.compile(r"(?:^|/)nvidia/cuda(?:-\w+)?:(\d+\.\d+)(?:\.\d+)?((?:-[\w.]+)*)")
_TF_IMAGE = re.compile(r"(?:^|/)tensorflow/tensorflow(?::([\w.-]+))?$")
_TORCH_IMAGE = re.compile(r"(?:^|/)pytorch/pytorch:(\d+\.\d+(?:\.\d+)?)-cuda(\d+\.\d+)-cudnn(\d+)")
_NGC_IMAGE = re.compile(r"nvcr\.io/nvidia/(pytorch|tensorflow):(\d\d)\.(\d\d)(?:-tf(\d))?")
_AWS_IMAGE = re.compile(
    r"(?:^|/)(tensorflow|pytorch)-training:(\d+\.\d+(?:\.\d+)?)-(gpu|cpu)-py(\d)(\d+)(?:-cu(\d\d)(\d))?"
)
_GOOGLE_IMAGE = re.compile(r"(?:^|/)(tf2?|pytorch)-(gpu|cpu|cu\d+)\.(\d)-(\d+)")
_UBUNTU_TAG = re.compile(r"ubuntu[:-]?(\d\d\.\d\d|" + "|".join(UBUNTU) + r")")
_APT_CUDA = re.compile(r"cuda(-toolkit|-runtime|-libraries|-cudart|-libraries-dev|-demo-suite)?-(\d+)-(\d+)(?:=.*)?")
_APT_CUDNN = re.compile(r"(?:libcudnn|cudnn)(\d+)(?:-dev|-cuda-\d+|-dev-cuda-\d+)?(?:=(\d+\.\d+).*)?")
_RUNFILE = re.compile(r"cuda_(\d+\.\d+)(?:\.\d+)?_(?:[\d.]+_)?linux(?:\.run|-run)?")
_PIP_CUDA = re.compile(r"nvidia-cuda-runtime-cu(\d+)")
_PIP_CUDNN = re.compile(r"nvidia-cudnn-cu\d+")
_DRIVER = re.compile(
    r"(?:nvidia-driver-\d+\S*|nvidia-\d{3}\S*|nvidia-utils-\d+\S*|cuda-drivers\S*|libnvidia-compute-\d+\S*|cuda)"
)
"""apt packages that bring a driver. `cuda`, unlike `cuda-toolkit`, depends on it."""
_EXTENSIONS = ("detectron2", "apex", "flash-attn", "pytorch3d", "mmcv-full", "deformable", "xformers", "torch-scatter")
_PIP_VALUES = frozenset((
    "-c", "--constraint", "--cache-dir", "--timeout", "--retries", "--prefix", "--root", "--target", "-t",
    "--trusted-host", "--progress-bar", "--python", "--python-version", "--platform", "--no-binary", "--only-binary",
    "--src", "--log", "--proxy", "--config-settings", "-C", "--upgrade-strategy", "--exists-action",
    "--index-strategy", "--keyring-provider", "-p", "--report",
))  # fmt: skip
_CARRIED = re.compile(
    r"site-packages|dist-packages|venv|virtualenv|conda|/usr/local/?$|/usr/?$|/opt/?$|/\.local|/install|^/$"
)
"""Folders whose copy from another stage brings its Python packages."""


@dataclass(frozen=True)
class Cuda:
    """A CUDA or cuDNN in the image."""

    version: Minor
    place: str
    text: str
    is_base: bool
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
    bundles_framework: bool = False
    """NVIDIA's own build of a framework."""
    driver_cuda: Minor | None = None
    python: Minor | None = None
    ubuntu: str = ""
    packages: list[Package] = field(default_factory=list)
    cudas: list[Cuda] = field(default_factory=list)
    cudnns: list[Cuda] = field(default_factory=list)
    apt: dict[str, str] = field(default_factory=dict)
    drivers: list[tuple[str, str]] = field(default_factory=list)
    extensions: list[tuple[str, str]] = field(default_factory=list)
    """Packages that are compiled with the image's nvcc: (name, place)."""
    environment: dict[str, Word] = field(default_factory=dict)
    stubs: list[tuple[str, str]] = field(default_factory=list)
    conda_forge: list[Package] = field(default_factory=list)
    """Frameworks that conda installs during the build, from a channel that has builds with and without CUDA."""
    findings: list[CheckFinding] = field(default_factory=list)
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


def _keeps(current: Package, later: Package) -> bool:
    """Whether pip leaves what is installed."""
    if later.upgrade:
        return False
    if current.version is not None:
        version = current.version + (f"+{current.local}" if current.local else "")
        return later.allows(version)
    return not later.specifier or (current.source == "image" and later.minor is None)


def read_image(path: Path, *, given: Path | None = None) -> Image:
    """The image of a Dockerfile. given: a requirements file that is passed besides, so that `-r` of this name is found.
    Raises OSError, ValueError."""
    text = regular_files.read_text(path, encoding="utf-8-sig", errors="replace", max_bytes=MAX_BYTES)
    if "\0" in text:
        raise ValueError("is not a text file")
    stages = read_stages(text)
    if not stages:
        raise ValueError("has no FROM: is it a Dockerfile?")
    return _Reader(path, stages, given).read()


class _Reader:
    """Reads the commands of the last stage into an Image."""

    def __init__(self, path: Path, stages: list[Stage], given: Path | None) -> None:
        self.path = path
        self.stages = stages
        self.stage = stages[-1]
        self.given = given
        self.image = Image(self.stage.image, f"{path}:{self.stage.line}", str(path))
        self.python: list[tuple[int, Minor]] = []
        self.channels: set[str] = set()

    def read(self) -> Image:
        image = self.image
        read_base(image)
        image.environment = self.stage.environment
        for origin, sources, _target, _line in self.stage.copies:
            other = next((stage for stage in self.stages if stage is not self.stage and stage.name == origin), None)
            if other is not None and any(_CARRIED.search(source.rstrip("/") or "/") for source in sources):
                carried = _Reader(self.path, [*self.stages[: self.stages.index(other)], other], self.given).read()
                image.packages += carried.packages
                image.findings += carried.findings
                if any(source.rstrip("/") in ("/usr/local", "/usr/local/cuda", "/usr", "") for source in sources):
                    image.cudas += carried.cudas
                    image.cudnns += carried.cudnns
                    image.without_cuda = image.without_cuda and not carried.cudas
        for command in self.stage.commands:
            self.command(command)
        origins = [text for origin, sources, _target, _line in self.stage.copies for text in (origin or "", *sources)]
        words = [word.text for command in self.stage.commands if command[0].text != "rm" for word in command]
        mentioned = " ".join((*origins, *words)).lower().replace("and-cuda", "")
        image.without_cuda = image.without_cuda and "cuda" not in mentioned
        image.without_cudnn = image.without_cudnn and "cudnn" not in mentioned
        image.sets_library_path = "LD_LIBRARY_PATH" in image.environment or "ld_library_path" in mentioned
        image.sets_library_path = image.sets_library_path or "ldconfig" in mentioned
        if self.python:
            image.python = max(self.python)[1]
        return image

    def place(self, word: Word) -> str:
        return f"{self.path}:{word.line}"

    def command(self, words: tuple[Word, ...]) -> None:
        texts = [word.text for word in words]
        while texts and (
            texts[0] in ("sudo", "exec", "time", "then", "do", "if", "-E", "env") or re.match(r"\w+=", texts[0])
        ):
            texts, words = texts[1:], words[1:]
        if not texts:
            return
        for word in words:
            is_run = PurePosixPath(texts[0]).name in ("sh", "bash") or word is words[0]
            if is_run and (match := _RUNFILE.search(word.text)):
                self.add_cuda(minor(match[1]), word, match[0])
        target = texts[-1].rpartition("/stubs/")
        if "stubs/libcuda.so" in " ".join(texts[1:-1]) and texts[-1].endswith("libcuda.so.1"):
            path = self.stage.environment.get("LD_LIBRARY_PATH")
            if not target[1] or (path is not None and "/stubs" in path.text):
                self.image.stubs.append((texts[-1], self.place(words[-1])))
        program = PurePosixPath(texts[0]).name
        if program in ("apt-get", "apt", "aptitude", "yum", "dnf", "microdnf") and "install" in texts:
            self.apt(words[texts.index("install") + 1 :])
        elif program in ("conda", "mamba", "micromamba"):
            self.conda(words[1:], texts[1:])
        elif program == "uv":
            self.uv(words[1:], texts[1:])
        elif re.fullmatch(r"pip[\d.]*", program):
            self.pip(words[1:], texts[1:])
        elif re.fullmatch(r"python[\d.]*|pypy\d*", program) and texts[1:3] in (["-m", "pip"], ["-m", "uv"]):
            rest = words[3:]
            if texts[2] == "uv":
                self.uv(rest, texts[3:])
            else:
                self.pip(rest, texts[3:])

    def add_cuda(self, version: Minor, word: Word, text: str) -> None:
        self.image.cudas.append(Cuda(version, self.place(word), text, False))
        self.image.without_cuda = False

    def apt(self, words: tuple[Word, ...]) -> None:
        image = self.image
        for word in words:
            text = word.text
            if text.startswith("-"):
                continue
            image.apt[text.partition("=")[0]] = self.place(word)
            if match := _APT_CUDA.fullmatch(text):
                self.add_cuda((int(match[2]), int(match[3])), word, text)
            elif text == "nvidia-cuda-toolkit" and image.ubuntu in UBUNTU_CUDA_TOOLKIT:
                self.add_cuda(UBUNTU_CUDA_TOOLKIT[image.ubuntu], word, text)
            elif match := _APT_CUDNN.fullmatch(text):
                version = minor(match[2]) if match[2] else (int(match[1]), 0)
                image.cudnns.append(Cuda(version, self.place(word), text, False, exact=bool(match[2])))
            if _DRIVER.fullmatch(text.partition("=")[0]) or re.fullmatch(r"cuda-\d+-\d+", text.partition("=")[0]):
                image.drivers.append((text, self.place(word)))
            if match := re.fullmatch(r"python(3\.\d+)(?:-\w+)?", text):
                self.python.append((1, minor(match[1])))
            elif re.fullmatch(r"python3(?:-pip|-dev|-venv)?|python-is-python3", text) and image.ubuntu in UBUNTU_PYTHON:
                self.python.append((0, UBUNTU_PYTHON[image.ubuntu]))

    def conda(self, words: tuple[Word, ...], texts: list[str]) -> None:
        if not any(verb in texts for verb in ("install", "create", "update", "env")):
            return
        channels = {texts[i + 1] for i, text in enumerate(texts[:-1]) if text in ("-c", "--channel")} or {"defaults"}
        skip = False
        for word in words:
            text = word.text
            if skip:
                skip = False
                continue
            if text in ("-f", "--file"):
                skip = True
                target = words[list(words).index(word) + 1 : list(words).index(word) + 2]
                if target:
                    self.requirements_file(target[0], Options())
                continue
            if text in ("-c", "--channel", "-n", "--name", "-p", "--prefix"):
                skip = True
                continue
            if text.startswith("-") or text in ("install", "create", "update", "env"):
                continue
            package = requirements.read_conda_package(text, place=self.place(word))
            if package is None:
                continue
            if package.name == "python" and package.minor:
                self.python.append((2, package.minor))
            self.add(package, channels=channels)

    def uv(self, words: tuple[Word, ...], texts: list[str]) -> None:
        if texts[:1] == ["pip"]:
            self.pip(words[1:], texts[1:])
        for index, text in enumerate(texts[:-1]):
            if text in ("--python", "-p") and re.fullmatch(r"(?:python|cpython-?)?3\.\d+(?:\.\d+)?", texts[index + 1]):
                self.python.append((3, minor(texts[index + 1])))
        if texts[:2] == ["python", "install"]:
            self.python += [(3, minor(text)) for text in texts[2:] if re.fullmatch(r"3\.\d+(?:\.\d+)?", text)]

    def pip(self, words: tuple[Word, ...], texts: list[str]) -> None:
        verb = next((text for text in texts if not text.startswith("-")), "")
        rest = [word for word in words if word.text != verb]
        if verb == "uninstall":
            gone = {word.text.lower().replace("_", "-") for word in rest}
            self.image.packages = [package for package in self.image.packages if package.name not in gone]
        if verb != "install":
            return
        options, names, files, editable = self.pip_options(rest)
        for word in files:
            self.requirements_file(word, options)
        for word in (*names, *editable):
            lowered = word.text.lower()
            if any(f"/{name}" in lowered or lowered.startswith(f"{name}_repo") for name in _EXTENSIONS):
                self.image.extensions.append((word.text, self.place(word)))
        for word in names:
            if package := read_package(word.text, place=self.place(word), options=options):
                if package.name in _EXTENSIONS and package.name in ("apex", "flash-attn") and ".whl" not in word.text:
                    self.image.extensions.append((word.text, self.place(word)))
                self.add(package)
        if (
            options.index == "cpu"
            and not any(word.text.startswith(("torch", "tensorflow")) for word in names)
            and not files
        ):
            self.image.packages.append(
                Package("torch", "", options.index_place, "torch", index="cpu", index_place=options.index_place)
            )

    def pip_options(self, words: list[Word]) -> tuple[Options, list[Word], list[Word], list[Word]]:
        options = Options()
        names: list[Word] = []
        files: list[Word] = []
        editable: list[Word] = []
        index = 0
        while index < len(words):
            word = words[index]
            option, equals, value = word.text.partition("=") if word.text.startswith("--") else (word.text, "", "")
            takes_value = not equals and index + 1 < len(words)
            following = words[index + 1] if takes_value else Word(value, word.line)
            if option in ("-r", "--requirement"):
                files.append(following)
            elif option in ("-e", "--editable"):
                editable.append(following)
            elif option in (
                "-i",
                "--index-url",
                "--extra-index-url",
                "-f",
                "--find-links",
                "--default-index",
                "--index",
            ):
                if found := requirements.wheel_index(following.text):
                    alone = option in ("-i", "--index-url", "--default-index")
                    options = Options(found, alone, self.place(word), options.upgrade, options.no_deps)
            elif option == "--torch-backend" and following.text != "auto":
                options = Options(following.text, True, self.place(word), options.upgrade, options.no_deps)
            elif option not in _PIP_VALUES:
                takes_value = False
                if option in ("-U", "--upgrade", "--force-reinstall"):
                    options = Options(options.index, options.index_alone, options.index_place, True, options.no_deps)
                elif option == "--no-deps":
                    options = Options(options.index, options.index_alone, options.index_place, options.upgrade, True)
                elif option.startswith("-r") and len(option) > 2 and not option.startswith("--"):
                    files.append(Word(option[2:], word.line))
                elif not option.startswith("-"):
                    names.append(word)
            index += 2 if takes_value and word.text.startswith("-") else 1
        return options, names, files, editable

    def add(self, package: Package, *, channels: set[str] | None = None) -> None:
        add_package(self.image, package)
        if channels is not None and package.name in ("torch", "tensorflow") and "pytorch" not in channels:
            self.image.conda_forge.append(package)

    def requirements_file(self, word: Word, options: Options) -> None:
        """Reads the file of `-r`, if COPY takes it from the folder of the Dockerfile or the two above."""
        name = PurePosixPath(word.text)
        found = self.find_file(name)
        if found is None:
            if self.given is None or self.given.name != name.name:
                self.unknown_file(word, "it is not in the folder of the Dockerfile, nor in the two above it")
            return
        if found.resolve() in self.image.read_files:
            return
        self.image.read_files.add(found.resolve())
        try:
            shown = os.path.normpath(self.path.parent / os.path.relpath(found, self.path.resolve().parent))
            requested = requirements.read_requested(found, options=options, name=shown)
        except (OSError, ValueError) as error:
            self.unknown_file(word, requirements.reason_of(error))
            return
        for package in requested.packages:
            self.add(package)
        if requested.python and found.suffix in (".yml", ".yaml"):
            self.python.append((2, requested.python))
        for missing, place, reason in requested.missing:
            self.image.findings.append(missing_file(missing, place, reason))

    def find_file(self, name: PurePosixPath) -> Path | None:
        roots = list(self.path.resolve().parents)[:MAX_CONTEXT_LEVELS]
        names = [str(name).lstrip("/")]
        for origin, sources, target, _line in self.stage.copies:
            if origin is not None:
                continue
            for source in sources:
                if PurePosixPath(source).name == name.name or (
                    PurePosixPath(target).name == name.name and len(sources) == 1
                ):
                    names.insert(0, source.lstrip("/"))
                if str(name).startswith(target.rstrip("/") + "/"):
                    names.append(f"{source}/{str(name)[len(target.rstrip('/')) + 1 :]}")
        for root in roots:
            for candidate in names:
                path = (root / candidate).resolve()
                if path.is_file() and any(path.is_relative_to(base) for base in roots):
                    return path
        return None

    def unknown_file(self, word: Word, reason: str) -> None:
        self.image.findings.append(missing_file(word.text, self.place(word), reason))


def missing_file(name: str, place: str, reason: str) -> CheckFinding:
    return make_finding(
        id="requirements_not_found",
        severity="unknown",
        title=f"{name} could not be read, so its packages were not checked",
        evidence=reason,
        fix="name it on the command line: stoker check --requirements FILE",
        place=place,
    )


def add_package(image: Image, package: Package) -> None:
    """A package, and the CUDA or cuDNN that it is."""
    image.packages.append(package)
    target = image.cudas if package.name in ("cudatoolkit", "cuda-toolkit", "cuda-version", "pytorch-cuda") else None
    if (package.source == "conda" and package.name == "cudnn") or _PIP_CUDNN.fullmatch(package.name):
        target = image.cudnns
    if target is not None:
        image.without_cuda = False
        image.without_cudnn = image.without_cudnn and target is not image.cudnns
    if target is not None and package.minor is not None and package.name != "pytorch-cuda":
        target.append(Cuda(package.minor, package.place, package.text, False))
    elif match := _PIP_CUDA.fullmatch(package.name):
        number = package.minor or minor(match[1])
        image.cudas.append(Cuda(number, package.place, package.text, False, exact=package.minor is not None))
        image.without_cuda = False


def read_base(image: Image) -> None:
    """What is known of the base image by its name."""
    name = image.base.partition("@")[0]
    if match := _UBUNTU_TAG.search(name):
        image.ubuntu = UBUNTU.get(match[1], match[1])
    image.without_cuda = bool(_NO_CUDA.match(name)) or name.startswith("ubuntu")
    tag = name.rpartition(":")[2] if ":" in name.rpartition("/")[2] else ""
    if match := re.match(r"(?:.*/)?python:(3\.\d+)", name) or re.search(r"uv:python(3\.\d+)", name):
        image.python = minor(match[1])
    if match := _CUDA_IMAGE.search(name):
        image.cudas.append(Cuda(minor(match[1]), image.place, name, True))
        found = re.search(r"-cudnn(\d*)", match[2])
        image.without_cudnn = found is None
        if found:
            image.cudnns.append(Cuda((int(found[1] or 9), 0), image.place, name, True, exact=False))
    elif match := _TF_IMAGE.search(name):
        _tensorflow_image(image, tag)
    elif match := _TORCH_IMAGE.search(name):
        image.packages.append(_of_image("torch", match[1], image, index=f"cu{match[2].replace('.', '')}"))
        image.cudas.append(Cuda(minor(match[2]), image.place, name, True))
        image.driver_cuda = minor(match[2])
    elif match := _NGC_IMAGE.search(name):
        image.bundles_framework = True
        released = (int(match[2]), int(match[3]))
        major = next((major for first, major in NGC_CUDA_MAJOR if released >= first), None)
        image.driver_cuda = (major, 0) if major else None
        image.packages.append(_of_image("torch" if match[1] == "pytorch" else "tensorflow", "", image))
    elif match := _AWS_IMAGE.search(name):
        image.python = (int(match[4]), int(match[5]))
        _container(image, match[1], match[2], is_cpu=match[3] == "cpu")
        if match[6]:
            image.cudas.append(Cuda((int(match[6]), int(match[7])), image.place, name, True))
    elif match := _GOOGLE_IMAGE.search(name):
        framework = "pytorch" if match[1] == "pytorch" else "tensorflow"
        _container(image, framework, f"{match[3]}.{match[4]}", is_cpu=match[2] == "cpu")
    elif re.search(r"(?:^|/)pytorch/pytorch(?::|$)", name):
        image.packages.append(_of_image("torch", "", image))
        image.is_unpinned = tag in ("", "latest")


def _tensorflow_image(image: Image, tag: str) -> None:
    image.is_unpinned = tag == "" or tag.startswith(("latest", "nightly", "devel"))
    match = re.match(r"(\d+\.\d+)(?:\.\d+)?(?:rc\d+)?", tag)
    version = match[0] if match else ""
    image.packages.append(_of_image("tensorflow", version, image))
    if "gpu" not in tag and "$" not in tag:
        image.cpu_only = f"tensorflow/tensorflow:{tag or 'latest'}"
    elif match and (build := TENSORFLOW.get(minor(match[1]))):
        image.cudas.append(Cuda(build.cuda, image.place, image.base, True))
        image.cudnns.append(Cuda(build.cudnn, image.place, image.base, True))


def _container(image: Image, framework: str, version: str, *, is_cpu: bool) -> None:
    image.packages.append(_of_image("torch" if framework == "pytorch" else framework, version, image))
    if is_cpu:
        image.cpu_only = image.base
    if not is_cpu and framework == "tensorflow" and (build := TENSORFLOW.get(minor(version))):
        image.driver_cuda = build.cuda


def _of_image(name: str, version: str, image: Image, index: str = "") -> Package:
    specifier = f"=={version}" if version.count(".") > 1 else f"=={version}.*" if version else ""
    return Package(name, specifier, image.place, image.base, source="image", index=index)
