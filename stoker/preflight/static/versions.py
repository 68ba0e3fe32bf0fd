"""Which versions belong together: TensorFlow, PyTorch, CUDA, cuDNN, Python, drivers. Facts with sources, no rules.

Looked up on AS_OF. A release that is newer than the tables is reported as unknown, never as wrong. Sources, by key:

tf      tensorflow.org/install/source, "Tested build configurations"; from 2.19 on the extra `and-cuda` of the package
torch   github.com/pytorch/pytorch RELEASE.md, "Release Compatibility Matrix"; pytorch.org, previous versions; the
        dependencies of the wheels on the package index
vision  github.com/pytorch/vision README.md; the dependencies of its wheels
driver  docs.nvidia.com/deploy/cuda-compatibility (minor version compatibility); CUDA release notes before CUDA 11
ngc     docs.nvidia.com/deeplearning/frameworks/support-matrix
ubuntu  packages.ubuntu.com: python3, nvidia-cuda-toolkit
"""

import re
from dataclasses import dataclass

AS_OF = "2026-11-22"
Minor = tuple[int, int]
"""(2, 10) for 2.10.1."""


@dataclass(frozen=True)
class TensorFlowBuild:
    """What one minor release was built with."""

    python: tuple[Minor, Minor]
    """Oldest and newest that has a wheel."""
    cuda: Minor
    cudnn: Minor


def _tensorflow(rows: str) -> dict[Minor, TensorFlowBuild]:
    table = {}
    for row in rows.split("\n"):
        name, oldest, newest, cuda, cudnn = row.split()
        table[minor(name)] = TensorFlowBuild((minor(oldest), minor(newest)), minor(cuda), minor(cudnn))
    return table


def minor(text: str) -> Minor:
    """(11, 8) of "11.8.0", "11.8" or "11-8"; (9, 0) of "9"."""
    parts = re.findall(r"\d+", text)[:2]
    return int(parts[0]), int(parts[1]) if len(parts) > 1 else 0


def dotted(version: Minor) -> str:
    return f"{version[0]}.{version[1]}"


TENSORFLOW = _tensorflow("""1.13 3.3 3.7 10.0 7.4
1.14 3.3 3.7 10.0 7.4
1.15 3.3 3.7 10.0 7.4
2.0 3.3 3.7 10.0 7.4
2.1 3.5 3.7 10.1 7.6
2.2 3.5 3.8 10.1 7.6
2.3 3.5 3.8 10.1 7.6
2.4 3.6 3.8 11.0 8.0
2.5 3.6 3.9 11.2 8.1
2.6 3.6 3.9 11.2 8.1
2.7 3.7 3.10 11.2 8.1
2.8 3.7 3.10 11.2 8.1
2.9 3.7 3.10 11.2 8.1
2.10 3.7 3.10 11.2 8.1
2.11 3.7 3.10 11.2 8.1
2.12 3.8 3.11 11.8 8.6
2.13 3.8 3.11 11.8 8.6
2.14 3.9 3.11 11.8 8.7
2.15 3.9 3.11 12.2 8.9
2.16 3.9 3.12 12.3 8.9
2.17 3.9 3.12 12.3 8.9
2.18 3.9 3.12 12.5 9.3
2.19 3.9 3.12 12.5 9.3
2.20 3.9 3.13 12.5 9.3
2.21 3.10 3.13 12.5 9.3""")
"""Source: tf."""

TF_GPU_REMOVED: Minor = (2, 12)
"""The package tensorflow-gpu: from 2.12 on it only prints an error. Source: its page on the package index."""
TF_AND_CUDA: Minor = (2, 14)
"""First release with the extra `and-cuda`; pip ignores it, with a warning, in older ones. Source: tf."""
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


def _torch(rows: str) -> dict[Minor, TorchBuild]:
    table = {}
    for row in rows.split("\n"):
        name, vision, oldest, newest, cuda, *tags = row.split()
        pythons = (minor(oldest), minor(newest))
        table[minor(name)] = TorchBuild(minor(vision), pythons, minor(cuda), frozenset(f"cu{tag}" for tag in tags))
    return table


TORCH = _torch("""1.5 0.6 3.5 3.8 10.2 92 101 102
1.6 0.7 3.6 3.8 10.2 92 101 102
1.7 0.8 3.6 3.9 10.2 92 101 102 110
1.8 0.9 3.6 3.9 10.2 101 102 111
1.9 0.10 3.6 3.9 10.2 102 111
1.10 0.11 3.6 3.9 10.2 102 111 113
1.11 0.12 3.7 3.10 10.2 102 113 115
1.12 0.13 3.7 3.10 10.2 102 113 116
1.13 0.14 3.7 3.11 11.7 116 117
2.0 0.15 3.8 3.11 11.7 117 118
2.1 0.16 3.8 3.11 12.1 118 121
2.2 0.17 3.8 3.12 12.1 118 121
2.3 0.18 3.8 3.12 12.1 118 121
2.4 0.19 3.8 3.12 12.1 118 121 124
2.5 0.20 3.9 3.13 12.4 118 121 124
2.6 0.21 3.9 3.13 12.4 118 124 126
2.7 0.22 3.9 3.13 12.6 118 126 128
2.8 0.23 3.9 3.13 12.8 126 128 129
2.9 0.24 3.10 3.14 12.8 126 128 129 130
2.10 0.25 3.10 3.14 12.8 126 128 129 130
2.11 0.26 3.10 3.14 13.0 126 128 129 130
2.12 0.27 3.10 3.14 13.0 126 129 130 132
2.13 0.28 3.10 3.14 13.0 126 129 130 132
2.14 0.29 3.10 3.14 13.0 126 129 130 132
2.15 0.29 3.11 3.15 13.2 126 129 130 132""")
"""Sources: torch, vision. CUDA of the index and Pythons were checked by resolving `torch==X` for x86-64. For 2.9 and
later, the indices from cu126 on are all that exist: which of them have which release was not found out."""

TORCHVISION_FREE: Minor = (0, 29)
"""From here on torchvision accepts every later torch (`torch>=2.14`). Source: vision."""
TORCH_NUMPY_2: Minor = (2, 3)
"""First release that works with NumPy 2: in an older one `tensor.numpy()` raises "Numpy is not available".
Source: github.com/pytorch/pytorch/issues/107302."""

DRIVERS = {(9, 0): "384.81", (9, 2): "396.26", (10, 0): "410.48", (10, 1): "418.39", (10, 2): "440.33"}
DRIVERS_BY_MAJOR = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""CUDA → oldest NVIDIA driver on Linux. Source: driver."""


def driver_for(cuda: Minor) -> str | None:
    return DRIVERS_BY_MAJOR.get(cuda[0]) or DRIVERS.get(cuda)


def library_family(cuda: Minor) -> str:
    """CUDA versions whose libraries have the same file names, so that a program built for one opens those of another:
    all of 12.x, all of 13.x, 11.1 … 11.8 (11.0 has libcusolver.so.10), and each version before 11 by itself."""
    return str(cuda[0]) if cuda[0] >= 12 or (cuda[0] == 11 and cuda[1] >= 1) else dotted(cuda)


NGC_CUDA_MAJOR = (((25, 8), 13), ((23, 1), 12), ((20, 6), 11), ((18, 9), 10))
"""First release of NVIDIA's framework containers (year, month) → major version of its CUDA, newest first.
Source: ngc."""

UBUNTU = {"focal": "20.04", "bionic": "18.04", "jammy": "22.04", "noble": "24.04", "xenial": "16.04"}
UBUNTU_PYTHON: dict[str, Minor] = {
    "16.04": (3, 5),
    "18.04": (3, 6),
    "20.04": (3, 8),
    "22.04": (3, 10),
    "24.04": (3, 12),
}
"""Source: ubuntu."""
UBUNTU_CUDA_TOOLKIT: dict[str, Minor] = {"18.04": (9, 1), "20.04": (10, 1), "22.04": (11, 5), "24.04": (12, 0)}
"""What `apt-get install nvidia-cuda-toolkit` gives. Source: ubuntu."""
