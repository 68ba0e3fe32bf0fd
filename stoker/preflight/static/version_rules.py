"""What does not belong together in an image or a list of requirements, from the tables of `versions.py`.

A rule speaks only when both sides are known: an unpinned package, an unknown base image or a release that is newer than
the tables makes it silent, or the finding `unknown`.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from stoker.preflight.findings import CheckFinding, make_finding
from stoker.preflight.static.image import Cuda, Image
from stoker.preflight.static.requirements import Package
from stoker.preflight.static.versions import (
    AS_OF,
    TENSORFLOW,
    TF_AND_CUDA,
    TF_AND_CUDA_BROKEN,
    TF_GPU_REMOVED,
    TF_KERAS_3,
    TF_NUMPY_2,
    TF_NUMPY_OPEN,
    TF_PROTOBUF_CAPPED,
    TORCH,
    TORCH_NUMPY_2,
    TORCHVISION_FREE,
    Minor,
    TensorFlowBuild,
    TorchBuild,
    dotted,
    driver_for,
    library_family,
    minor,
)

_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-gpu")
_CPU_NAMES = ("tensorflow-cpu", "intel-tensorflow", "tensorflow-intel")
_OPENCVS = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
_NEEDS_NUMPY = (
    "torchvision",
    "transformers",
    "accelerate",
    "ultralytics",
    "opencv-python",
    "opencv-python-headless",
    "scikit-image",
    "albumentations",
    "pycocotools",
    "timm",
)
"""Packages that install the newest NumPy which they allow, and allow 2."""


def check_image(image: Image) -> list[CheckFinding]:
    """All findings of an image, or of requirements without one."""
    return [*image.findings, *(finding for rule in _RULES for finding in rule(image))]


def _tensorflow(image: Image) -> tuple[Package, Minor] | None:
    package = image.has(*_TENSORFLOW_NAMES)
    number = package.newest(TENSORFLOW) if package else None
    return (package, number) if package and number else None


def _torch(image: Image) -> tuple[Package, Minor] | None:
    package = image.get("torch")
    number = package.newest(TORCH) if package else None
    return (package, number) if package and number else None


def _cpu_only(image: Image) -> Iterator[CheckFinding]:
    reason = place = fix = ""
    torch, cpuonly = image.get("torch"), image.get("cpuonly")
    tensorflow = image.get("tensorflow")
    named = image.has(*_CPU_NAMES)
    if image.cpu_only and (tensorflow is None or tensorflow.source == "image") and not image.get("tensorflow-gpu"):
        reason, place = f"the image {image.cpu_only} has no CUDA", image.place
        tag = image.base.rpartition(":")[2]
        fix = f"FROM {image.base}-gpu" if ":" in image.base and "-cpu" not in tag else "take the -gpu tag of this image"
    elif torch and (torch.local == "cpu" or torch.build.startswith("cpu") or "pytorch-cpu" in torch.text):
        reason, place = f"{torch.text} is a build without CUDA", torch.place
        fix = f"remove +cpu: {re.sub(r'[+]cpu', '', torch.text)}"
    elif cpuonly:
        reason, place = "the package cpuonly selects the build without CUDA", cpuonly.place
        fix = "replace cpuonly by pytorch-cuda=12.1 and the channel nvidia, or install torch with pip"
    elif torch and torch.index == "cpu" and not torch.local.startswith("cu"):
        reason, place = "the index whl/cpu has only wheels without CUDA", torch.index_place
        if not torch.index_alone:
            reason += "; pip prefers 2.1.0+cpu to 2.1.0, also from an additional index"
        fix = "remove the index, or name the one of a CUDA version: https://download.pytorch.org/whl/cu126"
    elif named and not image.has("tensorflow-gpu"):
        reason, place, fix = f"{named.name} is a build without CUDA", named.place, "install tensorflow[and-cuda]"
    elif tensorflow and _is_old_cpu_build(tensorflow) and not image.get("tensorflow-gpu"):
        reason, place = f"{tensorflow.text}: this release has its GPU build in another package", tensorflow.place
        fix = re.sub("tensorflow", "tensorflow-gpu", tensorflow.text, count=1)
    if reason:
        yield make_finding(
            id="cpu_only_build",
            severity="blocker",
            title="The framework has no CUDA and would train on the CPU",
            evidence=reason,
            fix=fix,
            place=place,
        )


def _is_old_cpu_build(tensorflow: Package) -> bool:
    """The package tensorflow has CUDA from 2.1 on, and in 1.15. Source: its release notes."""
    number = tensorflow.minor
    return tensorflow.source == "pip" and number is not None and number <= (2, 0) and number != (1, 15)


def _tensorflow_cuda(image: Image) -> Iterator[CheckFinding]:
    package = image.has(*_TENSORFLOW_NAMES)
    if package is None or package.source == "conda" or any(_tensorflow_gpu(image)):
        return
    number = package.newest(TENSORFLOW)
    bundled = "and-cuda" in package.extras and (number is None or number >= TF_AND_CUDA)
    if "and-cuda" in package.extras and not bundled and number:
        yield make_finding(
            id="extra_ignored",
            severity="warning",
            title=f"TensorFlow {dotted(number)} has no extra and-cuda: pip ignores it",
            evidence=f"{package.text}; the extra exists from {dotted(TF_AND_CUDA)} on",
            fix="install CUDA in the image, or a newer TensorFlow",
            place=package.place,
        )
    if bundled and package.version == TF_AND_CUDA_BROKEN and not image.sets_library_path:
        yield make_finding(
            id="bundled_cuda_not_found",
            severity="blocker" if image.base else "warning",
            title=f"TensorFlow {TF_AND_CUDA_BROKEN} does not find the CUDA that its extra and-cuda installs",
            evidence="an error of this release: it looks in LD_LIBRARY_PATH only, and trains on the CPU",
            fix='pip install "tensorflow[and-cuda]==2.17.1"',
            place=package.place,
        )
    torch = image.get("torch")
    by_torch = torch is not None and torch.local != "cpu" and torch.index != "cpu"  # brings CUDA, which may be found
    if (
        image.base
        and image.without_cuda
        and not bundled
        and not by_torch
        and not (number and number < (2, 1) and number != (1, 15))
    ):
        advice = (
            f'pip install "tensorflow[and-cuda]=={package.version or dotted(number) + ".*"}"'
            if number
            else ('pip install "tensorflow[and-cuda]"')
        )
        if number and number < TF_AND_CUDA:
            advice = f"FROM tensorflow/tensorflow:{package.version or dotted(number) + '.0'}-gpu"
        yield make_finding(
            id="tensorflow_without_cuda",
            severity="blocker",
            title="TensorFlow finds no CUDA in this image and would train on the CPU",
            evidence=f"{package.text} brings no CUDA libraries, and {image.base} has none",
            fix=advice,
            place=package.place,
        )
    if image.without_cudnn and not bundled and not _is_old_cpu_build(package):
        wanted = f" {dotted(TENSORFLOW[number].cudnn)}" if number in TENSORFLOW else ""
        yield make_finding(
            id="tensorflow_without_cuda",
            severity="blocker",
            title="TensorFlow finds no cuDNN in this image and would train on the CPU",
            evidence=f"{package.text} needs cuDNN{wanted}; the tag of {image.base} has none, and nothing installs it",
            fix="take the -cudnn tag of this image, or install tensorflow[and-cuda]",
            place=package.place,
        )
    if number is None or bundled:
        return
    build = TENSORFLOW.get(number)
    if build:
        yield from _cuda_mismatch(image, package, number, build.cuda, build.cudnn)


def _cuda_mismatch(image: Image, package: Package, number: Minor, cuda: Minor, cudnn: Minor) -> Iterator[CheckFinding]:
    """One finding for each CUDA that TensorFlow was not built with, or one for its cuDNN."""
    wants = (
        f"TensorFlow {package.version or dotted(number)} was built with CUDA {dotted(cuda)} and cuDNN {dotted(cudnn)}"
    )
    fitting = any(found.version == cuda for found in image.cudas)
    same_family = any(library_family(found.version) == library_family(cuda) for found in image.cudas)
    too_old = None if any(_cudnn_fits(found, cudnn) for found in image.cudnns) else next(iter(image.cudnns), None)
    reported = False
    for found in image.cudas:
        if found.version == cuda or (not found.exact and found.version[0] == cuda[0]):
            continue
        missing = not same_family
        effect = (
            f"its libraries have other names than those of CUDA {dotted(cuda)}, so TensorFlow cannot open them and "
            "trains on the CPU"
            if missing
            else "it loads these libraries, but was not tested with them, and XLA takes ptxas and libdevice from "
            "/usr/local/cuda"
        )
        has = f"; CUDA {dotted(cuda)} is there as well" if fitting else ""
        if too_old and found.is_base == too_old.is_base:
            effect += f". {_cudnn_effect(too_old, cudnn)}"
        own_line = not found.is_base or package.source == "image"
        reported = True
        yield make_finding(
            id="cuda_mismatch",
            severity="blocker" if missing or too_old else "warning",
            title=f"TensorFlow {dotted(number)} wants CUDA {dotted(cuda)} and cuDNN {dotted(cudnn)}; "
            f"{'this line installs' if not found.is_base else 'the image has'} CUDA {dotted(found.version)}",
            evidence=f"{wants}{has}. With CUDA {dotted(found.version)}: {effect}",
            fix=_cuda_fix(image, package, number, cuda, cudnn, found),
            place=found.place if own_line else package.place,
        )
    if too_old and not reported:
        yield make_finding(
            id="cuda_mismatch",
            severity="blocker",
            title=f"TensorFlow {dotted(number)} wants cuDNN {dotted(cudnn)}",
            evidence=f"{wants}. {_cudnn_effect(too_old, cudnn)}",
            fix=f"install cuDNN {dotted(cudnn)} or a later {cudnn[0]}.x",
            place=too_old.place,
        )


def _cudnn_fits(found: Cuda, wanted: Minor) -> bool:
    """cuDNN must have the same major version and at least the same minor one."""
    return found.version[0] == wanted[0] and (not found.exact or found.version >= wanted)


def _cudnn_effect(found: Cuda, wanted: Minor) -> str:
    version = dotted(found.version) if found.exact else str(found.version[0])
    if found.version[0] != wanted[0]:
        return f"cuDNN {version} cannot be loaded in place of cuDNN {wanted[0]}"
    return f"cuDNN {version} is older than the {dotted(wanted)} that it was built with: convolutions fail"


def _cuda_fix(image: Image, package: Package, number: Minor, cuda: Minor, cudnn: Minor, found: Cuda) -> str:
    if not found.is_base and any(other.version == cuda for other in image.cudas):
        return f"remove {found.text}; if nvcc is needed: apt-get install cuda-nvcc-{cuda[0]}-{cuda[1]}"
    if number >= TF_AND_CUDA and package.source != "image":
        return (
            f'pip install "tensorflow[and-cuda]=={package.version or dotted(number) + ".*"}", which brings its own CUDA'
        )
    newer = [other for other, build in TENSORFLOW.items() if build.cuda == found.version]
    other = f", or TensorFlow {dotted(max(newer))}, which was built with CUDA {dotted(found.version)}" if newer else ""
    tag = f"{package.version or dotted(number) + '.0'}-gpu"
    return f"FROM tensorflow/tensorflow:{tag} (CUDA {dotted(cuda)}, cuDNN {dotted(cudnn)}){other}"


def _replaced(image: Image) -> Iterator[CheckFinding]:
    """pip would take the framework out of the image that was chosen for it."""
    for name in ("tensorflow", "torch"):
        base = next((package for package in image.packages if package.name == name and package.source == "image"), None)
        if base is None or image.cpu_only:
            continue
        names = _TENSORFLOW_NAMES if name == "tensorflow" else (name,)
        later = next((found for other in names if (found := image.get(other)) and found.source != "image"), None)
        has = f"{name} {base.specifier.lstrip('=').removesuffix('.*')}".strip()
        if later and (later.minor != base.minor or later.minor is None):
            yield make_finding(
                id="framework_replaced",
                severity="warning",
                title=f"{later.text} replaces the {has} of the image, which fits its CUDA",
                evidence=f"the base image is {image.base}",
                fix=f"remove {later.text}, or take an image that has this version",
                place=later.place,
            )
        models = image.get("tf-models-official") if name == "tensorflow" else None
        if models and models.minor != base.minor and not models.no_deps:
            version = f"{base.minor[0]}.{base.minor[1]}.0" if base.minor else "VERSION of the image's TensorFlow"
            yield make_finding(
                id="framework_replaced",
                severity="blocker" if base.minor and not models.specifier else "warning",
                title=f"tf-models-official replaces the {has} of the image by its own version's TensorFlow",
                evidence=f"{models.text}; each release requires the TensorFlow of its number; image: {image.base}",
                fix=f"pip install tf-models-official=={version}",
                place=models.place,
            )


def _tensorflow_gpu(image: Image) -> Iterator[CheckFinding]:
    package = image.get("tensorflow-gpu")
    if package is None or package.source == "conda":
        return
    if package.allows_minor(TF_GPU_REMOVED) or (package.minor and package.minor >= TF_GPU_REMOVED):
        yield make_finding(
            id="tensorflow_gpu_removed",
            severity="blocker",
            title="tensorflow-gpu can no longer be installed",
            evidence=f"{package.text}: from {dotted(TF_GPU_REMOVED)} on, the package only prints an error",
            fix="pip install tensorflow[and-cuda]",
            place=package.place,
        )


def _python(image: Image) -> Iterator[CheckFinding]:
    if image.python is None:
        return
    for name, found, table in (("TensorFlow", _tensorflow(image), TENSORFLOW), ("torch", _torch(image), TORCH)):
        if found is None or found[0].source != "pip" or found[1] not in table or ".whl" in found[0].text:
            continue
        package, number = found
        oldest, newest = table[number].python
        if not oldest <= image.python <= newest:
            yield make_finding(
                id="python_unsupported",
                severity="blocker",
                title=f"{name} {dotted(number)} has no wheel for Python {dotted(image.python)}: it cannot be installed",
                evidence=f"wheels exist for Python {dotted(oldest)} … {dotted(newest)}",
                fix=f"Python {dotted(newest)}, or a release of {name} for Python {dotted(image.python)}"
                + _releases_for(table, image.python),
                place=package.place,
            )


def _releases_for(table: Mapping[Minor, TensorFlowBuild | TorchBuild], python: Minor) -> str:
    fitting = [number for number, build in table.items() if build.python[0] <= python <= build.python[1]]
    return f" ({dotted(min(fitting))} … {dotted(max(fitting))})" if fitting else ""


def _torchvision(image: Image) -> Iterator[CheckFinding]:
    torch, vision = image.get("torch"), image.get("torchvision")
    if torch is None or vision is None or torch.minor not in TORCH or vision.minor is None:
        return
    wanted = TORCH[torch.minor].torchvision
    if vision.minor == wanted or min(vision.minor, wanted) >= TORCHVISION_FREE:
        return
    pair = next((number for number, build in TORCH.items() if build.torchvision == vision.minor), None)
    belongs = f"torchvision {dotted(vision.minor)} belongs to torch {dotted(pair)}" if pair else ""
    yield make_finding(
        id="torchvision_mismatch",
        severity="blocker",
        title=f"torch {dotted(torch.minor)} needs torchvision {dotted(wanted)}, not {dotted(vision.minor)}",
        evidence=f"{belongs or vision.text}; the installer refuses the pair, or `torchvision::nms` is missing",
        fix=f"torchvision=={dotted(wanted)}.*",
        place=vision.place,
    )


def _wheel_index(image: Image) -> Iterator[CheckFinding]:
    torch = image.get("torch")
    if torch is None or torch.minor not in TORCH or torch.source == "image":
        return
    tags = TORCH[torch.minor].cuda_tags
    wanted = torch.local or (torch.index if torch.index_alone else "")
    if wanted.startswith("cu") and wanted not in tags:
        choices = ", ".join(sorted(tags, key=lambda tag: (len(tag), tag)))
        yield make_finding(
            id="wheel_missing",
            severity="blocker",
            title=f"torch {dotted(torch.minor)} has no wheel for {wanted}: pip finds no matching distribution",
            evidence=f"wheels exist for {choices}",
            place=torch.place,
            fix=f"--index-url https://download.pytorch.org/whl/{max(tags, key=lambda tag: (len(tag), tag))}",
        )


def _numpy(image: Image) -> Iterator[CheckFinding]:
    numpy = image.get("numpy")
    if numpy and not numpy.allows_minor((2, 0)) and not numpy.allows_minor((2, 2)):
        return
    explicit = numpy is not None and not any(numpy.allows_minor((1, number)) for number in range(9, 27))
    for name, found, first in (("TensorFlow", _tensorflow(image), TF_NUMPY_2), ("torch", _torch(image), TORCH_NUMPY_2)):
        if found is None or found[1] >= first or found[0].source == "conda":
            continue
        package, number = found
        if not explicit and (
            package.source == "image"
            or image.python is None
            or image.python < (3, 9)
            or (numpy is None and (name == "TensorFlow" or not image.has(*_NEEDS_NUMPY)))
            or (name == "TensorFlow" and not TF_NUMPY_OPEN[0] <= number <= TF_NUMPY_OPEN[1])
        ):
            continue
        effect = "import fails" if name == "TensorFlow" else 'tensor.numpy() raises "Numpy is not available"'
        yield make_finding(
            id="numpy_too_new",
            severity="blocker" if explicit else "warning",
            title=f"{name} {dotted(number)} does not work with NumPy 2: {effect}",
            evidence=f"{numpy.text} asks for it"
            if explicit and numpy
            else "NumPy is not limited, so pip takes the newest",
            fix='add "numpy<2"',
            place=numpy.place if explicit and numpy else package.place,
        )


def _protobuf(image: Image) -> Iterator[CheckFinding]:
    found = _tensorflow(image)
    if found is None or found[0].source != "pip" or not (1, 15) <= found[1] <= (2, 9):
        return
    package, number = found
    protobuf = image.get("protobuf")
    patch = package.version.split(".")[2:] if package.version else []
    capped = TF_PROTOBUF_CAPPED.get(number)
    if protobuf is None and capped is not None and (not patch or not patch[0].isdigit() or int(patch[0]) >= capped):
        return
    if image.python and image.python < (3, 7):
        return
    if protobuf is not None and not any(protobuf.allows_minor((major, 21)) for major in (4, 5, 6)):
        return
    if "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" in image.environment:
        return
    yield make_finding(
        id="protobuf_too_new",
        severity="blocker",
        title=f"TensorFlow {dotted(number)} cannot be imported with protobuf 4 or later",
        evidence='"Descriptors cannot be created directly"; '
        + (f"{protobuf.text} allows it" if protobuf else f"{package.text} does not limit it, so pip takes the newest"),
        fix='add "protobuf<3.21"',
        place=protobuf.place if protobuf else package.place,
    )


def _keras(image: Image) -> Iterator[CheckFinding]:
    found, keras = _tensorflow(image), image.get("keras")
    if found is None or keras is None or keras.minor is None or found[1] < (2, 6):
        return
    package, number = found
    if number < TF_KERAS_3 and keras.minor != number and keras.minor >= (2, 6):
        yield make_finding(
            id="keras_mismatch",
            severity="blocker",
            title=f"TensorFlow {dotted(number)} needs keras {dotted(number)}, not {dotted(keras.minor)}",
            evidence=f"{keras.text} with {package.text}; before {dotted(TF_KERAS_3)} each requires its own",
            fix=f"keras=={dotted(number)}.*",
            place=keras.place,
        )
    elif number >= TF_KERAS_3 and keras.minor < (3, 0):
        yield make_finding(
            id="keras_mismatch",
            severity="blocker",
            title=f"TensorFlow {dotted(number)} needs Keras 3, not {dotted(keras.minor)}",
            evidence=f"{keras.text} with {package.text}",
            fix=f'for Keras 2: "tf_keras=={dotted(number)}.*" and TF_USE_LEGACY_KERAS=1',
            place=keras.place,
        )


def _extensions(image: Image) -> Iterator[CheckFinding]:
    torch = _torch(image)
    if torch is None or not image.extensions or torch[0].source == "conda":
        return
    package, number = torch
    tag = package.local or package.index
    built = (
        minor(f"{tag[2:-1]}.{tag[-1]}")
        if tag.startswith("cu")
        else TORCH[number].index_cuda
        if number in TORCH
        else None
    )
    nvcc = next((cuda for cuda in image.cudas if "devel" in cuda.text or not cuda.is_base), None)
    if built is None or nvcc is None or nvcc.version[0] == built[0]:
        return
    name, place = image.extensions[0]
    yield make_finding(
        id="extension_cuda_mismatch",
        severity="blocker",
        title=f"{name} cannot be compiled: nvcc is of CUDA {dotted(nvcc.version)}, torch of CUDA {dotted(built)}",
        evidence='torch.utils.cpp_extension refuses another major version ("The detected CUDA version mismatches")',
        fix=f"--index-url https://download.pytorch.org/whl/{_tag_for(number, nvcc.version)}, "
        f"or a base image with CUDA {dotted(built)}",
        place=place,
    )


def _tag_for(number: Minor, cuda: Minor) -> str:
    tags = [tag for tag in TORCH[number].cuda_tags if tag[2:-1] == str(cuda[0])] if number in TORCH else []
    return max(tags, default=f"cu{cuda[0]}{cuda[1]}")


def _conda(image: Image) -> Iterator[CheckFinding]:
    if "CONDA_OVERRIDE_CUDA" in image.environment or image.has(
        "cuda-version", "pytorch-cuda", "cudatoolkit", "pytorch-gpu"
    ):
        return
    for package in image.conda_forge[:1]:
        if "gpu" in package.text or "cuda" in package.text:
            continue
        yield make_finding(
            id="conda_picks_cpu",
            severity="blocker",
            title=f"conda sees no GPU during docker build and takes the build of {package.text} without CUDA",
            evidence="its virtual package __cuda is absent there",
            place=package.place,
            fix="ENV CONDA_OVERRIDE_CUDA=12.6 before this line, or install with pip",
        )


def _opencv(image: Image) -> Iterator[CheckFinding]:
    found = [package for name in _OPENCVS if (package := image.get(name))]
    if len(found) > 1:
        last = max(found, key=lambda package: image.packages.index(package))
        names = " and ".join(sorted(package.name for package in found))
        yield make_finding(
            id="two_opencvs",
            severity="warning",
            title=f"{names} overwrite each other's cv2",
            evidence="all OpenCV packages install the same module; which one remains depends on the order",
            fix="keep opencv-python-headless alone: training needs no windows",
            place=last.place,
        )


def _unpinned(image: Image) -> Iterator[CheckFinding]:
    if image.is_unpinned:
        yield make_finding(
            id="unpinned_framework",
            severity="warning",
            title=f"FROM {image.base} is another image next month",
            evidence="neither framework nor CUDA is fixed by this tag",
            fix="name a version",
            place=image.place,
        )
    names = []
    for name in ("torch", "tensorflow", "tensorflow-cpu"):
        package = image.get(name)
        if package and not package.specifier and package.source != "image" and package.index != "cpu":
            names.append(package)
    if names:
        which = " and ".join(package.text for package in names)
        yield make_finding(
            id="unpinned_framework",
            severity="warning",
            title=f"{which}: the next build may get another version",
            evidence="no version is given, and CUDA, driver and companions depend on it",
            fix=f"{names[0].name}==VERSION, as `pip freeze` shows it where it works",
            place=names[0].place,
        )


def _variables(image: Image) -> Iterator[CheckFinding]:
    file = image.file
    for name, hidden in (
        ("CUDA_VISIBLE_DEVICES", ("", "-1", "none")),
        ("NVIDIA_VISIBLE_DEVICES", ("", "void", "none")),
    ):
        word = image.environment.get(name)
        if word and word.text.strip().lower() in hidden:
            yield make_finding(
                id="gpu_hidden",
                severity="blocker",
                title=f'{name}="{word.text}" hides all GPUs',
                evidence="ENV of the image; every process in it has it",
                fix=f"remove it{', or ENV NVIDIA_VISIBLE_DEVICES=all' if name.startswith('NV') else ''}",
                place=f"{file}:{word.line}",
            )
    word = image.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if word and not {"compute", "all"} & set(re.split(r"[,\s]+", word.text)) and "$" not in word.text:
        yield make_finding(
            id="gpu_hidden",
            severity="blocker",
            title="NVIDIA_DRIVER_CAPABILITIES lacks compute: libcuda is not mounted",
            evidence=f"ENV NVIDIA_DRIVER_CAPABILITIES={word.text}",
            fix="ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            place=f"{file}:{word.line}",
        )
    for text, place in image.stubs[:1]:
        yield make_finding(
            id="stub_driver",
            severity="blocker",
            title="The stub of libcuda hides the driver: CUDA finds no device",
            evidence=f"{text} is what programs open as the driver; the stub is for linking only",
            place=place,
            fix="use it only in the command that links: LIBRARY_PATH=/usr/local/cuda/lib64/stubs",
        )


def _drivers(image: Image) -> Iterator[CheckFinding]:
    for text, place in image.drivers[:1]:
        toolkit = text.startswith("cuda")
        yield make_finding(
            id="driver_in_image",
            severity="warning",
            title=f"{text} installs an NVIDIA driver in the image",
            evidence="the driver comes from the machine; another one in the image gives "
            '"Driver/library version mismatch"'
            + (" (the packages cuda and cuda-X-Y depend on it, cuda-toolkit-X-Y does not)" if toolkit else ""),
            fix="install cuda-toolkit-X-Y" if toolkit else f"remove {text}",
            place=place,
        )


def _newer_than_tables(image: Image) -> Iterator[CheckFinding]:
    for name, names, table in (("TensorFlow", _TENSORFLOW_NAMES, TENSORFLOW), ("torch", ("torch",), TORCH)):
        package = image.has(*names)
        if package and package.minor and package.minor > max(table):
            yield make_finding(
                id="version_unknown",
                severity="unknown",
                place=package.place,
                title=f"{name} {dotted(package.minor)} is newer than the tables of stoker ({AS_OF})",
                evidence=f"the newest known is {dotted(max(table))}; its CUDA and companions were not checked",
                fix="update stoker",
            )


def _driver_minimum(image: Image) -> Iterator[CheckFinding]:
    cuda = image.driver_cuda
    place = image.place
    tensorflow, torch = _tensorflow(image), _torch(image)
    if tensorflow and tensorflow[1] in TENSORFLOW:
        cuda, place = TENSORFLOW[tensorflow[1]].cuda, tensorflow[0].place
    elif torch and torch[1] in TORCH and torch[0].source == "pip":
        tag = torch[0].local or torch[0].index
        cuda = minor(f"{tag[2:-1]}.{tag[-1]}") if tag.startswith("cu") else TORCH[torch[1]].index_cuda
        place = torch[0].place
    driver = driver_for(cuda) if cuda else None
    if cuda is None or driver is None or any(_cpu_only(image)):
        return
    version = str(cuda[0]) if cuda[0] >= 11 else dotted(cuda)
    yield make_finding(
        id="driver_minimum",
        severity="unknown",
        title=f"Needs an NVIDIA driver ≥ {driver} on the machine (CUDA {version})",
        evidence="the driver is the machine's and cannot be seen in these files",
        fix="nvidia-smi on that machine, or `stoker check` there",
        place=place,
    )


_RULES: tuple[Callable[[Image], Iterator[CheckFinding]], ...] = (
    _cpu_only,
    _tensorflow_cuda,
    _replaced,
    _tensorflow_gpu,
    _python,
    _torchvision,
    _wheel_index,
    _numpy,
    _protobuf,
    _keras,
    _extensions,
    _conda,
    _opencv,
    _unpinned,
    _variables,
    _drivers,
    _newer_than_tables,
    _driver_minimum,
)
