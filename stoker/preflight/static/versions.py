"""Which versions belong together: TensorFlow, PyTorch, CUDA, cuDNN, Python, drivers. Facts, no rules.

The tables are in `knowledge/versions.toml`, with their sources; here are single releases from which on something is
different. A release that is newer than the tables is reported as unknown, never as wrong.
"""

import re
from dataclasses import dataclass

import msgspec

from stoker.knowledge import read_toml

Minor = tuple[int, int]
"""(2, 10) for 2.10.1."""


@dataclass(frozen=True)
class TensorFlowBuild:
    """What one minor release was built with."""

    python: tuple[Minor, Minor]
    """Oldest and newest that has a wheel."""
    cuda: Minor
    cudnn: Minor


def minor(text: str) -> Minor:
    """(11, 8) of "11.8.0", "11.8" or "11-8"; (9, 0) of "9"."""
    parts = re.findall(r"\d+", text)[:2]
    return int(parts[0]), int(parts[1]) if len(parts) > 1 else 0


def dotted(version: Minor) -> str:
    return f"{version[0]}.{version[1]}"


class _TensorFlowRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    python: tuple[str, str]
    cuda: str
    cudnn: str


class _TorchRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torchvision: str
    python: tuple[str, str]
    index_cuda: str
    cuda_tags: frozenset[str]


class _UbuntuRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    python: str
    cuda_toolkit: str = ""


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    as_of: str
    tensorflow: dict[str, _TensorFlowRow]
    torch: dict[str, _TorchRow]
    drivers: dict[str, str]
    ngc_cuda_major: dict[str, int]
    ubuntu: dict[str, _UbuntuRow]


_TABLES = msgspec.convert(read_toml("versions.toml"), _Tables)
AS_OF = _TABLES.as_of
"""When the tables were looked up."""

TENSORFLOW = {
    minor(name): TensorFlowBuild((minor(row.python[0]), minor(row.python[1])), minor(row.cuda), minor(row.cudnn))
    for name, row in _TABLES.tensorflow.items()
}

TF_GPU_REMOVED: Minor = (2, 12)
"""The package tensorflow-gpu: from 2.12 on it only prints an error. Source: its page on the package index."""
TF_AND_CUDA: Minor = (2, 14)
"""First release with the extra `and-cuda`; pip ignores it, with a warning, in older ones. Source:
tensorflow.org/install/source."""
TF_AND_CUDA_BROKEN = "2.16.1"
"""Does not find the libraries that the extra installs, unless LD_LIBRARY_PATH names their folders. Source:
github.com/tensorflow/tensorflow/issues/63362."""
TF_KERAS_3: Minor = (2, 16)
"""First release whose tf.keras is Keras 3. Source: its release notes."""
TF_NUMPY_2: Minor = (2, 18)
"""First release that works with NumPy 2. Source: its release notes."""
TF_NUMPY_OPEN: tuple[Minor, Minor] = ((2, 7), (2, 11))
"""First and last release that does not itself exclude NumPy 2, although it does not work with it. Source: its
dependencies."""
TF_PROTOBUF_CAPPED = {(2, 6): 5, (2, 7): 3, (2, 8): 2, (2, 9): 1}
"""Minor → first patch release that excludes protobuf 4, with which it cannot be imported ("Descriptors cannot be
created directly"). Older minors never exclude it; 2.10 and later do. Source: their release notes."""


@dataclass(frozen=True)
class TorchBuild:
    """What one minor release of PyTorch has on download.pytorch.org and on the package index."""

    torchvision: Minor
    python: tuple[Minor, Minor]
    index_cuda: Minor
    """CUDA of the wheels on the package index for Linux x86-64."""
    cuda_tags: frozenset[str]
    """cu118, cu121, …: the indices that have it."""


TORCH = {
    minor(name): TorchBuild(
        torchvision=minor(row.torchvision),
        python=(minor(row.python[0]), minor(row.python[1])),
        index_cuda=minor(row.index_cuda),
        cuda_tags=row.cuda_tags,
    )
    for name, row in _TABLES.torch.items()
}

TORCHVISION_FREE: Minor = (0, 29)
"""From here on torchvision accepts every later torch (`torch>=2.14`). Source: its README.md."""
TORCH_NUMPY_2: Minor = (2, 3)
"""First release that works with NumPy 2: in an older one `tensor.numpy()` raises "Numpy is not available".
Source: github.com/pytorch/pytorch/issues/107302."""

DRIVERS_BY_MAJOR = {int(cuda): driver for cuda, driver in _TABLES.drivers.items() if "." not in cuda}
"""Major version of CUDA → oldest NVIDIA driver on Linux."""


def driver_for(cuda: Minor) -> str | None:
    """The oldest NVIDIA driver on Linux."""
    return DRIVERS_BY_MAJOR.get(cuda[0]) or _TABLES.drivers.get(dotted(cuda))


def library_family(cuda: Minor) -> str:
    """CUDA versions whose libraries have the same file names, so that a program built for one opens those of another:
    all of 12.x, all of 13.x, 11.1 … 11.8 (11.0 has libcusolver.so.10), and each version before 11 by itself."""
    return str(cuda[0]) if cuda[0] >= 12 or (cuda[0] == 11 and cuda[1] >= 1) else dotted(cuda)


NGC_CUDA_MAJOR = tuple((minor(release), major) for release, major in _TABLES.ngc_cuda_major.items())
"""First release of NVIDIA's framework containers (year, month) → major version of its CUDA, newest first."""

UBUNTU = {row.name: release for release, row in _TABLES.ubuntu.items()}
UBUNTU_PYTHON = {release: minor(row.python) for release, row in _TABLES.ubuntu.items()}
UBUNTU_CUDA_TOOLKIT = {release: minor(row.cuda_toolkit) for release, row in _TABLES.ubuntu.items() if row.cuda_toolkit}
"""What `apt-get install nvidia-cuda-toolkit` gives."""
