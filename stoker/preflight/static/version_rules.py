"""What does not belong together in an image or a list of requirements, from the tables of `versions.py`.

A rule speaks only when both sides are known: an unpinned package, an unknown base image or a release that is newer than
the tables makes it silent, or the finding `unknown`. The texts are in `knowledge/check_files.toml`.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from stoker.findings.finding import Finding, Severity
from stoker.preflight.catalog import describe_file
from stoker.preflight.static.image import Cuda, Image
from stoker.preflight.static.names import PACKAGES
from stoker.preflight.static.requirements import Package
from stoker.preflight.static.versions import (
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

_HIDING = {"CUDA_VISIBLE_DEVICES": ("", "-1", "none"), "NVIDIA_VISIBLE_DEVICES": ("", "void", "none")}
"""Variable → its values that hide all GPUs."""


def check_image(image: Image) -> list[Finding]:
    """All findings of an image, or of requirements without one."""
    return [*image.findings, *(finding for rule in _RULES for finding in rule(image))]


def _tensorflow(image: Image) -> tuple[Package, Minor] | None:
    package = image.has(*PACKAGES.tensorflow)
    number = package.newest(TENSORFLOW) if package else None
    return (package, number) if package and number else None


def _torch(image: Image) -> tuple[Package, Minor] | None:
    package = image.get("torch")
    number = package.newest(TORCH) if package else None
    return (package, number) if package and number else None


def _torch_cuda(package: Package, number: Minor) -> Minor | None:
    """The CUDA that a torch from pip was built with."""
    built = cuda_of_tag(package.local or package.options.index)
    return built or (TORCH[number].index_cuda if number in TORCH else None)


def _cpu_only(image: Image) -> Iterator[Finding]:
    torch, cpuonly, tensorflow = image.get("torch"), image.get("cpuonly"), image.get("tensorflow")
    named, gpu_package = image.has(*PACKAGES.tensorflow_cpu), image.get("tensorflow-gpu")
    if image.cpu_only and (tensorflow is None or tensorflow.source == "image") and not gpu_package:
        has_tag = ":" in image.base and "-cpu" not in image.base.rpartition(":")[2]
        fix = f"FROM {image.base}-gpu" if has_tag else "take the -gpu tag of this image"
        yield describe_file("cpu_only_build/image", image.place, image=image.cpu_only, fix=fix)
    elif torch and (torch.local == "cpu" or torch.build.startswith("cpu") or "pytorch-cpu" in torch.text):
        wanted = torch.text.replace("+cpu", "")
        yield describe_file("cpu_only_build/torch", torch.place, text=torch.text, wanted=wanted)
    elif cpuonly:
        yield describe_file("cpu_only_build/cpuonly", cpuonly.place)
    elif torch and torch.options.index == "cpu" and not torch.local.startswith("cu"):
        yield describe_file("cpu_only_build/index", torch.options.index_place)
    elif named and not gpu_package:
        yield describe_file("cpu_only_build/package", named.place, name=named.name)
    elif tensorflow and _is_old_cpu_build(tensorflow) and not gpu_package:
        wanted = tensorflow.text.replace("tensorflow", "tensorflow-gpu", 1)
        yield describe_file("cpu_only_build/old", tensorflow.place, text=tensorflow.text, wanted=wanted)


def _is_old_cpu_build(tensorflow: Package) -> bool:
    """The package tensorflow has CUDA from 2.1 on, and in 1.15. Source: its release notes."""
    number = tensorflow.minor
    return tensorflow.source == "pip" and number is not None and number <= (2, 0) and number != (1, 15)


def _tensorflow_cuda(image: Image) -> Iterator[Finding]:
    package = image.has(*PACKAGES.tensorflow)
    if package is None or package.source == "conda" or any(_tensorflow_gpu(image)):
        return
    text, place, number = package.text, package.place, package.newest(TENSORFLOW)
    bundled = "and-cuda" in package.extras and (number is None or number >= SINCE.tensorflow_and_cuda)
    if "and-cuda" in package.extras and not bundled:
        yield describe_file("extra_ignored", place, number=number, text=text, since=SINCE.tensorflow_and_cuda)
    broken = TABLES.tensorflow_without_own_cuda
    if bundled and package.version == broken and not image.sets_library_path:
        severity: Severity = "blocker" if image.base else "warning"
        yield describe_file("bundled_cuda_not_found", place, severity=severity, version=broken)
    torch = image.get("torch")
    by_torch = torch is not None and "cpu" not in (torch.local, torch.options.index)  # its CUDA may be found
    if bundled:
        return
    if image.base and image.without_cuda and not by_torch and not _is_old_cpu_build(package):
        fix = 'pip install "tensorflow[and-cuda]"'
        if number and number < SINCE.tensorflow_and_cuda:
            fix = f"FROM tensorflow/tensorflow:{package.version or f'{number}.0'}-gpu"
        elif number:
            fix = f'pip install "tensorflow[and-cuda]=={package.version or f"{number}.*"}"'
        yield describe_file("tensorflow_without_cuda/cuda", place, text=text, base=image.base, fix=fix)
    build = TENSORFLOW.get(number) if number else None
    if image.without_cudnn and not _is_old_cpu_build(package):
        wanted = f" {build.cudnn}" if build else ""
        yield describe_file("tensorflow_without_cuda/cudnn", place, text=text, base=image.base, wanted=wanted)
    if number and build:
        yield from _cuda_mismatch(image, package, number, build)


def _cuda_mismatch(image: Image, package: Package, number: Minor, build: TensorFlowBuild) -> Iterator[Finding]:
    """One finding for each CUDA that TensorFlow was not built with, or one for its cuDNN."""
    cuda, cudnn = build.cuda, build.cudnn
    text = f"TensorFlow {package.version or number}"
    has = f"; CUDA {cuda} is there as well" if any(found.version == cuda for found in image.cudas) else ""
    missing = not any(library_family(found.version) == library_family(cuda) for found in image.cudas)
    too_old = None if any(_cudnn_fits(found, cudnn) for found in image.cudnns) else next(iter(image.cudnns), None)
    wrong = [found for found in image.cudas if found.version != cuda and (found.exact or found.version[0] != cuda[0])]
    effect = (
        "it loads these libraries, but was not tested with them, and XLA takes ptxas and libdevice from /usr/local/cuda"
    )
    if missing:
        effect = (
            f"its libraries have other names than those of CUDA {cuda}, so TensorFlow cannot open them and trains on "
            "the CPU"
        )
    for found in wrong:
        more = f". {_cudnn_effect(too_old, cudnn)}" if too_old and found.is_base == too_old.is_base else ""
        yield describe_file(
            "cuda_mismatch/cuda",
            package.place if found.is_base and package.source != "image" else found.place,
            severity="blocker" if missing or too_old else "warning",
            number=number,
            cuda=cuda,
            cudnn=cudnn,
            who="the image has" if found.is_base else "this line installs",
            found=found.version,
            text=text,
            has=has,
            effect=effect + more,
            fix=_cuda_fix(image, package, number, build, found),
        )
    if too_old and not wrong:
        effect = _cudnn_effect(too_old, cudnn)
        yield describe_file(
            "cuda_mismatch/cudnn", too_old.place, number=number, cuda=cuda, cudnn=cudnn, text=text, effect=effect
        )


def _cudnn_fits(found: Cuda, wanted: Minor) -> bool:
    """cuDNN must have the same major version and at least the same minor one."""
    return found.version[0] == wanted[0] and (not found.exact or found.version >= wanted)


def _cudnn_effect(found: Cuda, wanted: Minor) -> str:
    if found.version[0] != wanted[0]:
        version = found.version if found.exact else found.version[0]
        return f"cuDNN {version} cannot be loaded in place of cuDNN {wanted[0]}"
    return f"cuDNN {found.version} is older than the {wanted} that it was built with: convolutions fail"


def _cuda_fix(image: Image, package: Package, number: Minor, build: TensorFlowBuild, found: Cuda) -> str:
    cuda = build.cuda
    if not found.is_base and any(other.version == cuda for other in image.cudas):
        return f"remove {found.text}; if nvcc is needed: apt-get install cuda-nvcc-{cuda[0]}-{cuda[1]}"
    if number >= SINCE.tensorflow_and_cuda and package.source != "image":
        return f'pip install "tensorflow[and-cuda]=={package.version or f"{number}.*"}", which brings its own CUDA'
    newer = [other for other, its in TENSORFLOW.items() if its.cuda == found.version]
    instead = f", or TensorFlow {max(newer)}, which was built with CUDA {found.version}" if newer else ""
    tag = f"{package.version or f'{number}.0'}-gpu"
    return f"FROM tensorflow/tensorflow:{tag} (CUDA {cuda}, cuDNN {build.cudnn}){instead}"


def _replaced(image: Image) -> Iterator[Finding]:
    """pip would take the framework out of the image that was chosen for it."""
    for name, names in (("tensorflow", PACKAGES.tensorflow), ("torch", ("torch",))):
        base = next((package for package in image.packages if package.name == name and package.source == "image"), None)
        if base is None or image.cpu_only:
            continue
        later = next((found for other in names if (found := image.get(other)) and found.source != "image"), None)
        has = f"{name} {base.specifier.lstrip('=').removesuffix('.*')}".strip()
        if later and (later.minor != base.minor or later.minor is None):
            yield describe_file("framework_replaced/package", later.place, later=later.text, has=has, base=image.base)
        models = image.get("tf-models-official") if name == "tensorflow" else None
        if models and models.minor != base.minor and not models.options.no_deps:
            version = f"{base.minor}.0" if base.minor else "VERSION of the image's TensorFlow"
            yield describe_file(
                "framework_replaced/models",
                models.place,
                severity="blocker" if base.minor and not models.specifier else "warning",
                has=has,
                text=models.text,
                base=image.base,
                version=version,
            )


def _tensorflow_gpu(image: Image) -> Iterator[Finding]:
    package, removed = image.get("tensorflow-gpu"), SINCE.tensorflow_gpu_removed
    if package is None or package.source == "conda":
        return
    if package.allows_minor(removed) or (package.minor and package.minor >= removed):
        yield describe_file("tensorflow_gpu_removed", package.place, text=package.text, since=removed)


def _python(image: Image) -> Iterator[Finding]:
    for name, found, table in (("TensorFlow", _tensorflow(image), TENSORFLOW), ("torch", _torch(image), TORCH)):
        if image.python is None or found is None or found[1] not in table:
            continue
        package, number = found
        oldest, newest = table[number].python
        if package.source == "pip" and ".whl" not in package.text and not oldest <= image.python <= newest:
            yield describe_file(
                "python_unsupported",
                package.place,
                name=name,
                number=number,
                python=image.python,
                oldest=oldest,
                newest=newest,
                releases=_releases_for(table, image.python),
            )


def _releases_for(table: Mapping[Minor, TensorFlowBuild | TorchBuild], python: Minor) -> str:
    fitting = [number for number, build in table.items() if build.python[0] <= python <= build.python[1]]
    return f" ({min(fitting)} … {max(fitting)})" if fitting else ""


def _torchvision(image: Image) -> Iterator[Finding]:
    torch, vision = image.get("torch"), image.get("torchvision")
    if torch is None or vision is None or torch.minor not in TORCH or vision.minor is None:
        return
    wanted, found = TORCH[torch.minor].torchvision, vision.minor
    if found == wanted or min(found, wanted) >= SINCE.torchvision_free:
        return
    pair = next((number for number, build in TORCH.items() if build.torchvision == found), None)
    text = f"torchvision {found} belongs to torch {pair}" if pair else vision.text
    yield describe_file("torchvision_mismatch", vision.place, number=torch.minor, wanted=wanted, found=found, text=text)


def _wheel_index(image: Image) -> Iterator[Finding]:
    torch = image.get("torch")
    if torch is None or torch.minor not in TORCH or torch.source == "image":
        return
    tags = sorted(TORCH[torch.minor].cuda_tags, key=lambda tag: (len(tag), tag))
    tag = torch.local or (torch.options.index if torch.options.index_alone else "")
    if tag.startswith("cu") and tag not in tags:
        yield describe_file(
            "wheel_missing", torch.place, number=torch.minor, tag=tag, tags=", ".join(tags), newest=tags[-1]
        )


def _numpy(image: Image) -> Iterator[Finding]:
    numpy = image.get("numpy")
    if numpy and not numpy.allows_minor((2, 0)) and not numpy.allows_minor((2, 2)):
        return
    asked = numpy is not None and not any(numpy.allows_minor((1, number)) for number in range(9, 27))
    tensorflow, torch = _tensorflow(image), _torch(image)
    if tensorflow and tensorflow[1] < SINCE.tensorflow_numpy_2 and tensorflow[0].source != "conda":
        first, last = TABLES.tensorflow_numpy_open
        is_open = numpy is not None and first <= tensorflow[1] <= last and _may_get_numpy_2(image, tensorflow[0])
        if asked or is_open:
            yield _numpy_finding("TensorFlow", *tensorflow, numpy if asked else None, "import fails")
    if torch and torch[1] < SINCE.torch_numpy_2 and torch[0].source != "conda":
        is_needed = numpy is not None or image.has(*PACKAGES.needs_numpy) is not None
        is_open = is_needed and _may_get_numpy_2(image, torch[0])
        if asked or is_open:
            effect = 'tensor.numpy() raises "Numpy is not available"'
            yield _numpy_finding("torch", *torch, numpy if asked else None, effect)


def _may_get_numpy_2(image: Image, package: Package) -> bool:
    return package.source != "image" and image.python is not None and image.python >= (3, 9)


def _numpy_finding(name: str, package: Package, number: Minor, numpy: Package | None, effect: str) -> Finding:
    if numpy is None:
        return describe_file("numpy_too_new/open", package.place, name=name, number=number, effect=effect)
    return describe_file("numpy_too_new/asked", numpy.place, name=name, number=number, effect=effect, text=numpy.text)


def _protobuf(image: Image) -> Iterator[Finding]:
    found, protobuf = _tensorflow(image), image.get("protobuf")
    if found is None or found[0].source != "pip" or not (1, 15) <= found[1] <= (2, 9):
        return
    package, number = found
    patch = (package.version or "").split(".")[2:]
    capped = TABLES.tensorflow_protobuf_capped.get(str(number))
    if protobuf is None and capped is not None and (not patch or int(patch[0]) >= capped):
        return
    if protobuf is not None and not any(protobuf.allows_minor((major, 21)) for major in (4, 5, 6)):
        return
    too_old = image.python is not None and image.python < (3, 7)  # protobuf 4 needs 3.7
    if too_old or "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION" in image.environment:
        return
    text = f"{protobuf.text} allows it" if protobuf else f"{package.text} does not limit it, so pip takes the newest"
    yield describe_file("protobuf_too_new", (protobuf or package).place, number=number, text=text)


def _keras(image: Image) -> Iterator[Finding]:
    found, keras = _tensorflow(image), image.get("keras")
    if found is None or keras is None or keras.minor is None or found[1] < (2, 6):
        return
    (package, number), since = found, SINCE.tensorflow_keras_3
    text = f"{keras.text} with {package.text}"
    if number < since and keras.minor != number and keras.minor >= (2, 6):
        yield describe_file("keras_mismatch/own", keras.place, number=number, keras=keras.minor, text=text, since=since)
    elif number >= since and keras.minor < (3, 0):
        yield describe_file("keras_mismatch/three", keras.place, number=number, keras=keras.minor, text=text)


def _extensions(image: Image) -> Iterator[Finding]:
    torch = _torch(image)
    if torch is None or not image.extensions or torch[0].source == "conda":
        return
    built = _torch_cuda(*torch)
    nvcc = next((cuda.version for cuda in image.cudas if "devel" in cuda.text or not cuda.is_base), None)
    if built is None or nvcc is None or nvcc[0] == built[0]:
        return
    name, place = image.extensions[0]
    tags = [tag for tag in TORCH[torch[1]].cuda_tags if tag[2:-1] == str(nvcc[0])] if torch[1] in TORCH else []
    tag = max(tags, default=f"cu{nvcc[0]}{nvcc[1]}")
    yield describe_file("extension_cuda_mismatch", place, name=name, nvcc=nvcc, built=built, tag=tag)


def _conda(image: Image) -> Iterator[Finding]:
    chosen = image.has("cuda-version", "pytorch-cuda", "cudatoolkit", "pytorch-gpu")
    if chosen or "CONDA_OVERRIDE_CUDA" in image.environment:
        return
    for package in image.conda_forge[:1]:
        if "gpu" not in package.text and "cuda" not in package.text:
            yield describe_file("conda_picks_cpu", package.place, text=package.text)


def _opencv(image: Image) -> Iterator[Finding]:
    found = [package for name in PACKAGES.opencv if (package := image.get(name))]
    if len(found) > 1:
        names = " and ".join(sorted(package.name for package in found))
        yield describe_file("two_opencvs", max(found, key=image.packages.index).place, names=names)


def _unpinned(image: Image) -> Iterator[Finding]:
    if image.is_unpinned:
        yield describe_file("unpinned_framework/image", image.place, base=image.base)
    packages = [
        package
        for name in ("torch", "tensorflow", "tensorflow-cpu")
        if (package := image.get(name))
        and not package.specifier
        and package.source != "image"
        and package.options.index != "cpu"
    ]
    if packages:
        texts = " and ".join(package.text for package in packages)
        yield describe_file("unpinned_framework/package", packages[0].place, texts=texts, name=packages[0].name)


def _variables(image: Image) -> Iterator[Finding]:
    for name, hidden in _HIDING.items():
        word = image.environment.get(name)
        if word and word.text.strip().lower() in hidden:
            more = ", or ENV NVIDIA_VISIBLE_DEVICES=all" if name.startswith("NV") else ""
            place = f"{image.file}:{word.line}"
            yield describe_file("gpu_hidden/variable", place, name=name, value=word.text, more=more)
    word = image.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    if word and not {"compute", "all"} & set(re.split(r"[,\s]+", word.text)) and "$" not in word.text:
        yield describe_file("gpu_hidden/capabilities", f"{image.file}:{word.line}", value=word.text)
    for text, place in image.stubs[:1]:
        yield describe_file("stub_driver", place, text=text)


def _drivers(image: Image) -> Iterator[Finding]:
    for text, place in image.drivers[:1]:
        is_cuda = text.startswith("cuda")
        yield describe_file("driver_in_image/cuda" if is_cuda else "driver_in_image/driver", place, text=text)


def _newer_than_tables(image: Image) -> Iterator[Finding]:
    for name, names, newest in (
        ("TensorFlow", PACKAGES.tensorflow, max(TENSORFLOW)),
        ("torch", ("torch",), max(TORCH)),
    ):
        package = image.has(*names)
        if package and package.minor and package.minor > newest:
            yield describe_file(
                "version_unknown", package.place, name=name, number=package.minor, as_of=TABLES.as_of, newest=newest
            )


def _driver_minimum(image: Image) -> Iterator[Finding]:
    cuda, place = image.driver_cuda, image.place
    tensorflow, torch = _tensorflow(image), _torch(image)
    if tensorflow and tensorflow[1] in TENSORFLOW:
        cuda, place = TENSORFLOW[tensorflow[1]].cuda, tensorflow[0].place
    elif torch and torch[1] in TORCH and torch[0].source == "pip":
        cuda, place = _torch_cuda(*torch), torch[0].place
    driver = driver_for(cuda) if cuda else None
    if cuda and driver and not any(_cpu_only(image)):
        version = cuda[0] if cuda[0] >= 11 else cuda
        yield describe_file("driver_minimum", place, driver=driver, cuda=version)


_RULES: tuple[Callable[[Image], Iterator[Finding]], ...] = (
    _cpu_only, _tensorflow_cuda, _replaced, _tensorflow_gpu, _python, _torchvision, _wheel_index, _numpy, _protobuf,
    _keras, _extensions, _conda, _opencv, _unpinned, _variables, _drivers, _newer_than_tables, _driver_minimum,
)  # fmt: skip
