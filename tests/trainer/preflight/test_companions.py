"""Packages that need each other, and what is compiled without a GPU: inputs drawn from the tables, red and green."""

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from stoker.preflight.static import check_sources
from stoker.preflight.static.tables import COMPANIONS, minor
from stoker_watch.findings.finding import Finding

DEVEL = "FROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04\nRUN apt-get install -y python3-pip git\n"
TORCH = "RUN pip install torch==2.1.0+cu118 --index-url https://download.pytorch.org/whl/cu118\n"
LIST = 'ENV TORCH_CUDA_ARCH_LIST="7.5;8.6+PTX"\n'


def check(folder: Path, *, dockerfile: str = "", requirements: str = "") -> dict[str, Finding]:
    """Findings by id."""
    files = {"Dockerfile": dockerfile, "requirements.txt": requirements}
    for name, text in files.items():
        (folder / name).write_text(text)
    paths = {name: folder / name for name, text in files.items() if text}
    found = check_sources(dockerfile=paths.get("Dockerfile"), requirements=paths.get("requirements.txt"), script=None)
    return {finding.id: finding for finding in found if finding.id != "driver_minimum"}


PAIRS = [
    (row.id, package, release, needed)
    for row in COMPANIONS.companions
    if row.declared and row.other == ["torch"]
    for package in row.packages
    for release, needed in row.needs.items()
    if "*" not in release
]


@pytest.mark.parametrize(("id", "package", "release", "torch"), PAIRS[::6])
def test_a_release_fits_the_torch_that_its_metadata_names_and_no_other(
    id: str, package: str, release: str, torch: str, tmp_path: Path
):
    fitting = check(tmp_path, requirements=f"torch=={torch}\n{package}=={release}\nnumpy<2\n")
    other = check(tmp_path, requirements=f"torch==1.9.1\n{package}=={release}\nnumpy<2\n")
    assert id not in fitting
    assert (other[id].severity, other[id].place.rpartition(":")[2]) == ("blocker", "2")
    assert torch in other[id].title


def test_every_row_reads_as_specifiers_and_has_a_source():
    for row in COMPANIONS.companions:
        assert row.source
        for key, needed in row.needs.items():
            for text in (key, needed):
                SpecifierSet(f"=={text}" if text[0].isdigit() else text)
    assert all(build.source and (build.always or build.effect) for build in COMPANIONS.builds)
    for name, releases in COMPANIONS.newest.items():
        assert list(releases) == sorted(releases, key=lambda text: [*map(int, text.split("."))], reverse=True), name


@pytest.mark.parametrize(
    ("mmdet", "mmcv", "refused"),
    [
        ("mmdet==3.3.0", "mmcv", True),  # the newest is 2.2.0
        ("mmdet==3.3.0", "mmcv>=2,<2.2", False),
        ("mmdet", "mmcv==2.1.0", False),
        ("mmdet==2.28.2", "mmcv-full==1.7.1", False),
        ("mmdet==2.28.2", "mmcv-full", False),
        ("mmdet==2.28.2", "mmcv==2.0.1", True),
        ("mmdet==2.15.1", "mmcv-full>=1.4.1", True),
        ("mmdet==3.1.0", "mmcv==2.0.0", False),  # a release that was not looked at
    ],
)
def test_mmdet_refuses_an_mmcv_outside_its_bounds(mmdet: str, mmcv: str, refused: bool, tmp_path: Path):
    assert ("companion_mismatch" in check(tmp_path, requirements=f"{mmcv}\n{mmdet}\n")) == refused


@pytest.mark.parametrize(
    ("clone", "release"),
    [
        ("git clone -b v2.28.2 https://github.com/open-mmlab/mmdetection.git /src && cd /src", "2.28.2"),
        ("git clone https://github.com/open-mmlab/mmdetection && cd mmdetection && git checkout v2.28.2", "2.28.2"),
        ("git clone --depth 1 https://github.com/open-mmlab/mmdetection /src && cd /src", "3.3.0"),
        ("git clone https://github.com/open-mmlab/mmdetection /src && cd /src && git checkout 5ee5ab4", None),
        ("git clone https://github.com/open-mmlab/mmdetection /src && cd /", None),
    ],
)
def test_a_clone_is_the_release_that_is_checked_out(clone: str, release: str | None, tmp_path: Path):
    mmcv = "mim install mmcv==2.2.0" if release != "3.3.0" else "mim install mmcv-full==1.7.2"
    found = check(tmp_path, dockerfile=f"{DEVEL}{TORCH}RUN {mmcv}\nRUN {clone} && pip install -e .\n")
    titles = [finding.title for id, finding in found.items() if id == "companion_mismatch"]
    assert [title.split()[1] for title in titles] == ([release] if release else [])


@pytest.mark.parametrize(
    ("image", "packages", "is_new"),
    [
        ("python:3.11", "opencv-python==4.7.0.72", True),
        ("python:3.11", "opencv-python==4.7.0.72 'numpy<2'", False),
        ("python:3.11", "opencv-python==4.7.0.72 scipy==1.10.1", False),  # its metadata has the bound
        ("python:3.11", "opencv-python==4.10.0.84", False),
        ("python:3.8", "opencv-python==4.7.0.72", False),  # NumPy 2 needs Python 3.9
        ("python:3.10", "pandas==2.0.1", True),
        ("python:3.10", "pandas==2.1.4", False),
        ("python:3.10", "torch==2.1.2 torchvision==0.16.2", True),
        ("python:3.10", "torch==2.1.2", False),  # nothing brings NumPy
        ("pytorch/pytorch:1.11.0-cuda11.3-cudnn8-runtime", "opencv-python==4.7.0.72", False),  # it has NumPy 1
    ],
)
def test_numpy_2_comes_only_where_nothing_limits_it(image: str, packages: str, is_new: bool, tmp_path: Path):
    text = f"FROM {image}\nRUN apt-get install -y libgl1\nRUN pip install {packages}\n"
    assert ("numpy_too_new" in check(tmp_path, dockerfile=text)) == is_new


@pytest.mark.parametrize(
    ("image", "package", "python"),
    [
        ("python:3.6-slim", "protobuf==4.22.3", "3.6"),
        ("tensorflow/tensorflow:2.3.1-gpu", "protobuf==3.20.1", None),
        ("tensorflow/tensorflow:2.3.1-gpu", "numpy==1.23.4", "3.6"),
        ("python:3.12", "numpy==1.23.4", "3.12"),
        ("python:3.10", "numpy==1.23.4", None),
        ("pytorch/pytorch:1.12.1-cuda11.3-cudnn8-devel", "ultralytics==8.2.0", "3.7"),
    ],
)
def test_the_python_of_the_image_allows_the_package(image: str, package: str, python: str | None, tmp_path: Path):
    found = check(tmp_path, dockerfile=f"FROM {image}\nRUN apt-get install -y libgl1\nRUN pip install {package}\n")
    finding = found.get("python_unsupported")
    assert (finding is not None) == (python is not None)
    if finding:
        assert finding.title.endswith(f"cannot be installed on Python {python}")
        assert package.replace("==", " ") not in finding.fix


def test_python_3_6_gets_no_protobuf_4_by_itself(tmp_path: Path):
    install = "FROM nvidia/cuda:11.0.3-cudnn8-runtime-ubuntu{}\nRUN apt-get install -y python3-pip\n"
    install += "RUN pip3 install tensorflow==2.4.0\n"
    assert "protobuf_too_new" not in check(tmp_path, dockerfile=install.format("18.04"))
    assert "protobuf_too_new" in check(tmp_path, dockerfile=install.format("20.04"))


@pytest.mark.parametrize(
    ("steps", "variant"),
    [
        ("RUN pip install 'git+https://github.com/facebookresearch/detectron2.git'", "FORCE_CUDA"),
        ("RUN FORCE_CUDA=1 pip install 'git+https://github.com/facebookresearch/detectron2.git'", "ARCH_LIST"),
        (LIST + "RUN export FORCE_CUDA=1 && pip install git+https://github.com/facebookresearch/detectron2", None),
        (LIST + "RUN pip install mmcv==2.1.0\nENV FORCE_CUDA=1", "FORCE_CUDA"),  # too late
        (LIST + "RUN pip install mmcv==2.1.0 -f https://download.openmmlab.com/mmcv/dist/cu118/index.html", None),
        (LIST + "RUN pip install openmim && mim install mmcv==2.1.0", None),
        ("RUN pip install 'mmcv>=2.0.0,<2.2'", "FORCE_CUDA"),
        ("RUN pip install mmcv==1.7.1", None),  # it has no operators
        ("ARG FORCE_CUDA=1\nARG TORCH_CUDA_ARCH_LIST\nRUN git clone https://x/mmcv /m && pip install /m", None),
        ("WORKDIR /w\nRUN git clone https://x/Deformable-DETR d\nWORKDIR d/models/ops\nRUN bash make.sh", "starts"),
        ("COPY . /app\nRUN cd /app/src/models/ops && python setup.py build install", "FORCE_CUDA"),
        ("COPY . /app\nWORKDIR /app\nRUN pip install -e .", None),  # nothing is known of it
        (LIST + "RUN git clone https://x/GroundingDINO && cd GroundingDINO && pip install .", None),
    ],
)  # fmt: skip
def test_what_docker_build_compiles_without_a_gpu(steps: str, variant: str | None, tmp_path: Path):
    finding = check(tmp_path, dockerfile=f"{DEVEL}{TORCH}{steps}\n").get("built_without_gpu")
    assert (finding is not None) == (variant is not None)
    if finding and variant:
        assert variant in finding.fix
    assert "built_without_gpu" not in check(
        tmp_path, dockerfile=f"FROM python:3.11\nRUN pip install torch==2.1.0+cpu\n{steps}\n"
    )


@pytest.mark.parametrize(
    ("architectures", "missing"),
    [
        ("7.5;8.0", ["9.0", "10.0", "12.0"]),
        ("8.6", ["9.0", "10.0", "12.0"]),
        ("5.2 6.1", ["6.0", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]),
        ("7.5;8.0+PTX", []),
        ("Pascal;Volta", []),
        ("${LIST}", []),
    ],
)
def test_the_gpus_that_an_architecture_list_leaves_out(architectures: str, missing: list[str], tmp_path: Path):
    text = f'{DEVEL}{TORCH}ENV FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST="{architectures}"\nCOPY . /a\nRUN pip install /a\n'
    finding = check(tmp_path, dockerfile=text).get("few_architectures")
    expected = [key for key in COMPANIONS.gpus if key in missing and minor(key)]
    assert [key for key in COMPANIONS.gpus if finding and f"({key})" in finding.title] == expected
    assert finding is None or (finding.severity, finding.place.rpartition(":")[2]) == ("unknown", "4")


@pytest.mark.parametrize(
    ("variable", "reported"),
    [
        ("NCCL_SOCKET_IFNAME=ens5", True),
        ("NCCL_SOCKET_IFNAME=^lo,docker", False),
        ("NCCL_SOCKET_IFNAME=${IFNAME}", False),
        ("NCCL_IB_HCA=mlx5_0", True),
        ("NCCL_DEBUG=INFO", False),
    ],
)
def test_variables_of_a_machine_do_not_belong_into_an_image(variable: str, reported: bool, tmp_path: Path):
    found = check(tmp_path, dockerfile=f"FROM python:3.11\nENV {variable}\n")
    assert ("variable_of_machine" in found) == reported


@pytest.mark.parametrize(
    ("copied", "image", "replaced"),
    [
        ("cp object_detection/packages/tf2/setup.py .", "tensorflow/tensorflow:2.8.0-gpu", True),
        ("cp object_detection/packages/tf1/setup.py .", "tensorflow/tensorflow:2.8.0-gpu", False),
        ("cp object_detection/packages/tf2/setup.py /elsewhere/", "tensorflow/tensorflow:2.8.0-gpu", False),
        ("pip install tf-models-official==2.8.0 && cp object_detection/packages/tf2/setup.py .",
         "tensorflow/tensorflow:2.8.0-gpu", False),
        ("cp object_detection/packages/tf2/setup.py .", "python:3.9", False),
    ],
)  # fmt: skip
def test_the_object_detection_api_replaces_tensorflow(copied: str, image: str, replaced: bool, tmp_path: Path):
    text = f"FROM {image}\nCOPY models /m\nWORKDIR /m/research\nRUN {copied}\nRUN python3 -m pip install .\n"
    assert ("framework_replaced" in check(tmp_path, dockerfile=text)) == replaced


def test_torch_and_torchvision_for_different_cudas(tmp_path: Path):
    pair = "torch==2.1.0+{}\ntorchvision==0.16.0+{}\nnumpy<2\n"
    assert "companion_mismatch" in check(tmp_path, requirements=pair.format("cu118", "cu121"))
    assert "companion_mismatch" not in check(tmp_path, requirements=pair.format("cu121", "cu121"))


def test_two_mmcvs(tmp_path: Path):
    assert "two_mmcvs" in check(tmp_path, requirements="mmcv==1.6.0\nmmcv-full==1.6.0\n")
    assert check(tmp_path, requirements="mmcv-full==1.6.0\n") == {}
