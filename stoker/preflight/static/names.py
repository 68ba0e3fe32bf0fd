"""Names by which images, packages and calls are recognized: `knowledge/source_names.toml`. Facts, no rules."""

import msgspec

from stoker.knowledge import read_toml


class _Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    without_cuda: list[str]
    cuda: str
    tensorflow: str
    torch: str
    ngc: str
    aws: str
    google: str
    carried: str


class _Packages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    apt_cuda: str
    apt_cudnn: str
    runfile: str
    pip_cuda: str
    pip_cudnn: str
    driver: str
    extensions: list[str]
    pip_values: frozenset[str]
    conda_values: frozenset[str]
    tensorflow: list[str]
    tensorflow_cpu: list[str]
    opencv: list[str]
    needs_numpy: list[str]


class _Scripts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    known_modules: frozenset[str]
    managed: frozenset[str]
    divided: list[str]
    dataset: str
    batched_dataset: str
    methods: frozenset[str]
    only_dataset: frozenset[str]
    batches: frozenset[str]
    one_image: str
    heavy: str
    random: str
    one_draw: str
    python: str


class _Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    images: _Images
    packages: _Packages
    scripts: _Scripts


_NAMES = msgspec.convert(read_toml("source_names.toml"), _Names)
IMAGES, PACKAGES, SCRIPTS = _NAMES.images, _NAMES.packages, _NAMES.scripts
