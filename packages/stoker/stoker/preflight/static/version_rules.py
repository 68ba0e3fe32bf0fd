"""What does not belong together in an image or a list of requirements, from the versions of `tables.py`.

A rule speaks only when both sides are known: an unpinned package, an unknown base image or a release that is newer than
the tables makes it silent, or the finding `unknown`. The texts are in `knowledge/check_files.toml`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from stoker.preflight.catalog import describe
from stoker.preflight.static.companions import check_builds, check_companions
from stoker.preflight.static.image import Cuda, Image
from stoker.preflight.static.requirements import Package
from stoker.preflight.static.tables import (
    LISTS,
    PATTERNS,
    SINCE,
    TABLES,
    TENSORFLOW,
    TORCH,
    Minor,
    TensorFlowBuild,
    TorchBuild,
    cuda_of_tag,
    driver_for,
    library_family,
)
from stoker_watch.findings.finding import Finding

_HIDING = {"CUDA_VISIBLE_DEVICES": ("", "-1", "none"), "NVIDIA_VISIBLE_DEVICES": ("", "void", "none")}
"""Variable → its values that hide all GPUs."""


class _Framework(NamedTuple):
    """TensorFlow or torch, of which the release is known."""

    name: str
    package: Package
    number: Minor
    table: Mapping[Minor, TensorFlowBuild | TorchBuild]

    @property
    def build(self) -> TensorFlowBuild | TorchBuild | None:
        return self.table.get(self.number)


def check_image(image: Image) -> list[Finding]:
    """All findings of an image, or of requirements without one; with the driver of its machine, where that is known."""
    return [finding for rule in _RULES for finding in rule(image)]


def _tensorflow(image: Image) -> _Framework | None:
    package = image.get(*LISTS["tensorflow"])
    number = package.newest(TENSORFLOW) if package else None
    return _Framework("TensorFlow", package, number, TENSORFLOW) if package and number else None


def _torch(image: Image) -> _Framework | None:
    package = image.get("torch")
    number = package.newest(TORCH) if package else None
    return _Framework("torch", package, number, TORCH) if package and number else None


def _torch_cuda(torch: _Framework) -> Minor | None:
    """The CUDA that a torch was built with."""
    built = cuda_of_tag(torch.package.local or torch.package.options.index)
    on_index = torch.package.source == "pip" and torch.number in TORCH
    return built or (TORCH[torch.number].index_cuda if on_index else None)


def _missing(image: Image) -> Iterator[Finding]:
    for name, place, reason in image.missing:
        yield describe("requirements_not_found", place, name=name, reason=reason)


def _cpu_only(image: Image) -> Iterator[Finding]:
    torch, cpuonly, tensorflow = image.get("torch"), image.get("cpuonly"), image.get("tensorflow")
    named, gpu_package = image.get(*LISTS["tensorflow_cpu"]), image.get("tensorflow-gpu")
    if image.cpu_only and (tensorflow is None or tensorflow.source == "image") and not gpu_package:
        yield describe("cpu_only_build/image", image.place, image=image.base)
    elif torch and (torch.local == "cpu" or torch.build.startswith("cpu") or "pytorch-cpu" in torch.text):
        yield describe("cpu_only_build/torch", torch.place, text=torch.text, wanted=torch.text.replace("+cpu", ""))
    elif cpuonly:
        yield describe("cpu_only_build/cpuonly", cpuonly.place)
    elif torch and torch.options.index == "cpu" and not torch.local.startswith("cu"):
        yield describe("cpu_only_build/index", torch.options.index_place)
    elif named and not gpu_package:
        yield describe("cpu_only_build/package", named.place, name=named.name)
    elif tensorflow and _is_old_cpu_build(tensorflow) and not gpu_package:
        wanted = tensorflow.text.replace("tensorflow", "tensorflow-gpu", 1)
        yield describe("cpu_only_build/old", tensorflow.place, text=tensorflow.text, wanted=wanted)


def _is_old_cpu_build(tensorflow: Package) -> bool:
    """The package tensorflow has CUDA from 2.1 on, and in 1.15. Source: its release notes."""
    number = tensorflow.minor
    return tensorflow.source == "pip" and number is not None and number <= (2, 0) and number != (1, 15)


def _tensorflow_cuda(image: Image) -> Iterator[Finding]:
    package = image.get(*LISTS["tensorflow"])
    if package is None or package.source == "conda" or any(_tensorflow_gpu(image)):
        return
    text, place, number = package.text, package.place, package.newest(TENSORFLOW)
    is_asked = "and-cuda" in package.extras
    if is_asked and number is not None and number < SINCE["tensorflow_and_cuda"]:
        yield describe("extra_ignored", place, number=number, text=text, since=SINCE["tensorflow_and_cuda"])
    elif is_asked:
        broken = TABLES.tensorflow_without_own_cuda
        if package.version == broken and not image.sets_library_path:
            level = "blocker" if image.base else "warning"
            yield describe("bundled_cuda_not_found", place, severity=level, version=broken)
        return
    torch = image.get("torch")
    by_torch = torch is not None and "cpu" not in (torch.local, torch.options.index)  # its CUDA may be found
    if image.base and image.without_cuda and not by_torch and not _is_old_cpu_build(package):
        fix = 'pip install "tensorflow[and-cuda]"'
        if number and number < SINCE["tensorflow_and_cuda"]:
            fix = f"FROM {_gpu_image(package, number)}"
        yield describe("tensorflow_without_cuda/cuda", place, text=text, base=image.base, fix=fix)
    build = TENSORFLOW.get(number) if number else None
    if image.without_cudnn and not _is_old_cpu_build(package):
        wanted = f" {build.cudnn}" if build else ""
        yield describe("tensorflow_without_cuda/cudnn", place, text=text, base=image.base, wanted=wanted)
    if number and build:
        yield from _cuda_mismatch(image, package, number, build)


def _cuda_mismatch(image: Image, package: Package, number: Minor, build: TensorFlowBuild) -> Iterator[Finding]:
    """One finding for each CUDA that TensorFlow was not built with, or one for its cuDNN."""
    cuda, cudnn = build.cuda, build.cudnn
    missing = not any(library_family(found.version) == library_family(cuda) for found in image.cudas)
    too_old = _too_old_cudnn(image, cudnn)
    wrong = [found for found in image.cudas if found.version != cuda and (found.exact or found.version[0] != cuda[0])]
    effects = [
        "its libraries have other names, so TensorFlow cannot open them and trains on the CPU"
        if missing
        else "it loads these libraries, but was not tested with them, and XLA takes ptxas from /usr/local/cuda"
    ]
    if too_old:
        effects.append(f"convolutions fail with cuDNN {too_old}")
    fix = f"FROM {_gpu_image(package, number)} (CUDA {cuda}, cuDNN {cudnn})"
    if number >= SINCE["tensorflow_and_cuda"] and package.source != "image":
        fix = f'pip install "tensorflow[and-cuda]=={package.version or f"{number}.*"}", which brings its own CUDA'
    values = {"number": number, "cuda": cuda, "cudnn": cudnn}
    for found in wrong:
        is_extra = not found.is_base and any(other.version == cuda for other in image.cudas)
        remove = f"remove {found.text}; if nvcc is needed: apt-get install cuda-nvcc-{cuda[0]}-{cuda[1]}"
        yield describe(
            "cuda_mismatch/cuda",
            package.place if found.is_base and package.source != "image" else found.place,
            severity="blocker" if missing or too_old else "warning",
            **values,
            who="the image has" if found.is_base else "this line installs",
            found=found.version,
            effect="; ".join(effects),
            fix=remove if is_extra else fix,
        )
    if too_old and not wrong:
        yield describe("cuda_mismatch/cudnn", too_old.place, **values, effect=effects[1])


def _gpu_image(package: Package, number: Minor) -> str:
    return f"tensorflow/tensorflow:{package.version or f'{number}.0'}-gpu"


def _too_old_cudnn(image: Image, wanted: Minor) -> Cuda | None:
    """The cuDNN of an image where none has the same major version and at least the same minor one."""
    for found in image.cudnns:
        if found.version[0] == wanted[0] and (not found.exact or found.version >= wanted):
            return None
    return next(iter(image.cudnns), None)


def _replaced(image: Image) -> Iterator[Finding]:
    """pip would take the framework out of the image that was chosen for it."""
    for name, names in (("tensorflow", LISTS["tensorflow"]), ("torch", ["torch"])):
        base = next((package for package in image.packages if package.name == name and package.source == "image"), None)
        if base is None or image.cpu_only:
            continue
        later = next((found for other in names if (found := image.get(other)) and found.source != "image"), None)
        has = f"{name} {base.specifier.lstrip('=').removesuffix('.*')}".strip()
        if later and (later.minor != base.minor or later.minor is None):
            yield describe("framework_replaced/package", later.place, later=later.text, has=has, base=image.base)
        models = image.get("tf-models-official") if name == "tensorflow" else None
        if models and models.minor != base.minor and not models.options.no_deps:
            texts = {"has": has, "text": models.text, "base": image.base, "version": f"{base.minor or 'X.Y'}.0"}
            level = "blocker" if base.minor and not models.specifier else "warning"
            yield describe("framework_replaced/models", models.place, severity=level, **texts)


def _tensorflow_gpu(image: Image) -> Iterator[Finding]:
    package, removed = image.get("tensorflow-gpu"), SINCE["tensorflow_gpu_removed"]
    if package is None or package.source == "conda":
        return
    if package.allows_minor(removed) or (package.minor and package.minor >= removed):
        yield describe("tensorflow_gpu_removed", package.place, text=package.text, since=removed)


def _python(image: Image) -> Iterator[Finding]:
    for found in filter(None, (_tensorflow(image), _torch(image))):
        package, build = found.package, found.build
        if image.python is None or build is None or package.source != "pip" or ".whl" in package.text:
            continue
        if not build.python[0] <= image.python <= build.python[1]:
            yield describe("python_unsupported", package.place, found=found, python=image.python)


def _builds(image: Image) -> Iterator[Finding]:
    torch = image.get("torch")
    for package in filter(None, map(image.get, ("torchvision", "torchaudio"))):
        if len({(cuda_of_tag(found.local) or (0,))[0] for found in (torch, package) if found and found.local}) > 1:
            yield describe("companion_mismatch/build", package.place, torch=torch, text=package.text)
    if not any(_cpu_only(image)) and not any(_extensions(image)):
        yield from check_builds(image)


def _wheel_index(image: Image) -> Iterator[Finding]:
    torch = image.get("torch")
    if torch is None or torch.minor not in TORCH or torch.source == "image":
        return
    tags = sorted(TORCH[torch.minor].cuda_tags, key=lambda tag: (len(tag), tag))
    tag = torch.local or (torch.options.index if torch.options.index_alone else "")
    if tag.startswith("cu") and tag not in tags:
        yield describe("wheel_missing", torch.place, torch=torch, tag=tag, tags=", ".join(tags), newest=tags[-1])


def _protobuf(image: Image) -> Iterator[Finding]:
    found, protobuf = _tensorflow(image), image.get("protobuf")
    has_none = image.python is not None and image.python < (3, 7)  # protobuf 4 has no release for it
    if found is None or found.package.source != "pip" or has_none or not (1, 15) <= found.number <= (2, 9):
        return
    package, number = found.package, found.number
    patch = (package.version or "").split(".")[2:]
    capped = TABLES.tensorflow_protobuf_capped.get(str(number))
    if protobuf is None and capped is not None and (not patch or int(patch[0]) >= capped):
        return
    if protobuf is not None and not any(protobuf.allows_minor((major, 21)) for major in (4, 5, 6)):
        return
    if "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" not in image.environment:
        text = f"{protobuf.text} allows it" if protobuf else f"{package.text} does not limit it"
        yield describe("protobuf_too_new", (protobuf or package).place, number=number, text=text)


def _extensions(image: Image) -> Iterator[Finding]:
    torch = _torch(image)
    built = _torch_cuda(torch) if torch else None
    nvcc = next((cuda.version for cuda in image.cudas if "devel" in cuda.text or not cuda.is_base), None)
    compiled = [build for build in image.builds if re.search(PATTERNS["extension"], build[0].lower())]
    for name, place, _ in compiled[:1] if built is not None and nvcc is not None and nvcc[0] != built[0] else ():
        yield describe("extension_cuda_mismatch", place, name=name.lstrip("/"), nvcc=nvcc, built=built)


def _conda(image: Image) -> Iterator[Finding]:
    chosen = image.get("cuda-version", "pytorch-cuda", "cudatoolkit", "pytorch-gpu")
    if chosen or "CONDA_OVERRIDE_CUDA" in image.environment:
        return
    for package in image.conda_forge[:1]:
        if "gpu" not in package.text and "cuda" not in package.text:
            yield describe("conda_picks_cpu", package.place, text=package.text)


def _same_modules(image: Image) -> Iterator[Finding]:
    """Packages that install the same module, so that the last one remains."""
    for kind in ("opencv", "onnxruntime", "mmcv"):
        found = [package for name in LISTS[kind] if (package := image.get(name))]
        if len(found) > 1:
            names = " and ".join(sorted(package.name for package in found))
            yield describe(f"two_{kind}s", max(found, key=image.packages.index).place, names=names)


def _opencv(image: Image) -> Iterator[Finding]:
    gui = image.get(*LISTS["opencv_gui"])
    is_headless = image.get("opencv-python-headless", "opencv-contrib-python-headless") is not None
    lacks_gl = not (is_headless or image.has_gl) and re.search(PATTERNS["without_gl"], image.base)
    if gui and gui.source != "conda" and lacks_gl:
        yield describe("opencv_without_gl", gui.place, name=gui.name, base=image.base)


def _unpinned(image: Image) -> Iterator[Finding]:
    if image.is_unpinned:
        yield describe("unpinned_framework/image", image.place, base=image.base)
    for package in filter(None, map(image.get, ("torch", "tensorflow", "tensorflow-cpu"))):
        if not package.specifier and package.source != "image" and package.options.index != "cpu":
            yield describe("unpinned_framework/package", package.place, text=package.text, name=package.name)
            return


def _variables(image: Image) -> Iterator[Finding]:
    for name, hidden in _HIDING.items():
        word = image.environment.get(name)
        if word and word.text.strip().lower() in hidden:
            yield describe("gpu_hidden/variable", f"{image.file}:{word.line}", name=name, value=word.text)
    for name, word in image.environment.items():
        if re.fullmatch(PATTERNS["machine_variable"], name) and not re.match(r"\^|.*\$", word.text):
            yield describe("variable_of_machine", f"{image.file}:{word.line}", name=name, value=word.text)
    word = image.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if word and not {"compute", "all"} & set(re.split(r"[,\s]+", word.text)) and "$" not in word.text:
        yield describe("gpu_hidden/capabilities", f"{image.file}:{word.line}", value=word.text)


def _drivers(image: Image) -> Iterator[Finding]:
    for text, place in image.stubs[:1]:
        yield describe("stub_driver", place, text=text)
    for text, place in image.drivers[:1]:
        id = "driver_in_image/cuda" if text.startswith("cuda") else "driver_in_image/driver"
        yield describe(id, place, text=text)


def _newer_than_tables(image: Image) -> Iterator[Finding]:
    for found in filter(None, (_tensorflow(image), _torch(image))):
        if found.number > (newest := max(found.table)):
            yield describe("version_unknown", found.package.place, found=found, as_of=TABLES.as_of, newest=newest)


def _driver_minimum(image: Image) -> Iterator[Finding]:
    tensorflow, torch = _tensorflow(image), _torch(image)
    cuda, place = None, ""
    if tensorflow and tensorflow.number in TENSORFLOW:
        cuda, place = TENSORFLOW[tensorflow.number].cuda, tensorflow.package.place
    elif torch:
        cuda, place = _torch_cuda(torch), torch.package.place
    driver = driver_for(cuda) if cuda else None
    if cuda and driver and not any(_cpu_only(image)):
        id = "driver_minimum"
        if image.driver is not None:
            have, needed = ([int(part) for part in text.split(".")] for text in (image.driver, driver))
            id += "/too_old" if have < needed[: len(have)] else "/met"
        yield describe(id, place, driver=driver, cuda=cuda[0] if cuda[0] >= 11 else cuda, have=image.driver)


_RULES: tuple[Callable[[Image], Iterator[Finding]], ...] = (
    _missing, _cpu_only, _tensorflow_cuda, _replaced, _tensorflow_gpu, _python, _wheel_index,
    check_companions, _protobuf, _extensions, _builds, _conda, _opencv, _same_modules, _unpinned, _variables,
    _drivers, _newer_than_tables, _driver_minimum,
)  # fmt: skip
