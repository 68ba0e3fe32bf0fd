"""Which versions belong together, and by which names images, packages and calls are recognized. Facts, no rules.

Versions are in `knowledge/versions.toml`, with their sources; a release that is newer than these tables is reported as
unknown, never as wrong. Names are in `knowledge/source_names.toml`.
"""

import re

import msgspec

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

    torchvision: Minor
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
    tensorflow_numpy_open: tuple[Minor, Minor]
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
