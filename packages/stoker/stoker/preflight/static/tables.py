"""Which versions belong together, and by which names images, packages and calls are recognized. Facts, no rules.

Versions are in `knowledge/versions.toml`, with their sources; a release that is newer than these tables is reported as
unknown, never as wrong. Names are in `knowledge/source_names.toml`, packages that need each other and what is compiled
in `knowledge/companions.toml`.
"""

import re

import msgspec
from packaging.specifiers import SpecifierSet

from stoker.knowledge import read_toml


class Minor(tuple[int, int]):
    """A version up to its second number: (2, 10) for 2.10.1."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self[0]}.{self[1]}"


def minor(text: str) -> Minor:
    """11.8 of "11.8.0", "11.8" or "11-8"; 9.0 of "9"."""
    parts = [int(part) for part in re.findall(r"\d+", text)[:2]]
    return Minor((*parts, 0)[:2])


class TensorFlowBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one minor release was built with."""

    python: tuple[Minor, Minor]
    """Oldest and newest that has a wheel."""
    cuda: Minor
    cudnn: Minor


class TorchBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one minor release of PyTorch has on download.pytorch.org and on the package index."""

    python: tuple[Minor, Minor]
    index_cuda: Minor
    """CUDA of the wheels on the package index for Linux x86-64."""
    cuda_tags: frozenset[str]
    """cu118, cu121, …: the indices that have it."""


class UbuntuRelease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    python: Minor
    cuda_toolkit: Minor | None = None
    """What `apt-get install nvidia-cuda-toolkit` gives."""


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    as_of: str
    since: dict[str, Minor]
    """Releases from which on something is different."""
    tensorflow_without_own_cuda: str
    tensorflow_protobuf_capped: dict[str, int]
    tensorflow: dict[str, TensorFlowBuild]
    torch: dict[str, TorchBuild]
    drivers: dict[str, str]
    ubuntu: dict[str, UbuntuRelease]


TABLES = msgspec.convert(read_toml("versions.toml"), _Tables, dec_hook=lambda _, text: minor(text))
SINCE, UBUNTU = TABLES.since, TABLES.ubuntu
TENSORFLOW = {minor(name): build for name, build in TABLES.tensorflow.items()}
TORCH = {minor(name): build for name, build in TABLES.torch.items()}
DRIVERS_BY_MAJOR = {int(cuda): driver for cuda, driver in TABLES.drivers.items() if "." not in cuda}
"""Major version of CUDA → oldest NVIDIA driver on Linux."""


class KnownImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Images that have CUDA or a framework."""

    pattern: str
    """Its groups say what the name has: framework, version, flavor (cpu, gpu), python, cuda, cudnn."""
    framework: str = ""
    """Where there is no such group."""
    plain_is_cpu: bool = False
    """Without a flavor it has no CUDA."""
    floating_tag: str = ""
    """Pattern of tags that are another image next month."""


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call or an assignment, as text."""

    id: str
    pattern: str
    unless: frozenset[str] = frozenset()
    """Modules of another framework, which keeps the GPU."""


class _Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`source_names.toml`, which says what each pattern and each list is."""

    patterns: dict[str, str]
    names: dict[str, list[str]]
    images: list[KnownImage]
    switches: list[Switch]


NAMES = msgspec.convert(read_toml("source_names.toml"), _Names)
PATTERNS, LISTS = NAMES.patterns, NAMES.names


class Companion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Packages that need certain releases of another one, or of the image's Python; `companions.toml` explains it."""

    packages: list[str]
    other: list[str]
    needs: dict[str, str]
    source: str
    id: str = "companion_mismatch"
    declared: bool = False
    brought_by: list[str] = []
    effect: str = ""

    def needed(self, release: str) -> str | None:
        return next((self.needs[key] for key in self.needs if _contains(key, release)), None)

    def fits(self, release: str, others: list[str]) -> bool:
        needed = self.needed(release)
        return needed is None or any(_contains(needed, other) for other in others)


def _contains(releases: str, release: str) -> bool:
    return SpecifierSet(f"=={releases}" if releases[0].isdigit() else releases).contains(release, prereleases=True)


class Compiled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Source code that is compiled with CUDA, and the variables that compile it where no GPU is seen."""

    name: str
    pattern: str
    source: str
    forced_by: list[str] = []
    always: bool = False
    effect: str = ""
    fix: str = ""


class _Companions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    newest: dict[str, dict[str, Minor]]
    companions: list[Companion]
    builds: list[Compiled]
    sources: dict[str, str]
    requires: dict[str, str]
    gpus: dict[str, str]
    image_pythons: dict[str, Minor]


COMPANIONS = msgspec.convert(read_toml("companions.toml"), _Companions, dec_hook=lambda _, text: minor(text))


def driver_for(cuda: Minor) -> str | None:
    """The oldest NVIDIA driver on Linux."""
    return DRIVERS_BY_MAJOR.get(cuda[0]) or TABLES.drivers.get(str(cuda))


def library_family(cuda: Minor) -> str:
    """CUDA versions whose libraries have the same file names, so that a program built for one opens those of another:
    all of 12.x, all of 13.x, 11.1 … 11.8 (11.0 has libcusolver.so.10), and each version before 11 by itself."""
    return str(cuda[0]) if cuda[0] >= 12 or (cuda[0] == 11 and cuda[1] >= 1) else str(cuda)


def cuda_of_tag(tag: str) -> Minor | None:
    """11.8 of cu118; None for a tag without CUDA."""
    return Minor((int(tag[2:-1]), int(tag[-1]))) if re.fullmatch(r"cu\d{2,3}", tag) else None


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
