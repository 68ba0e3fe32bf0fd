"""The checks of files: the cases of others, each rule red and green, and files that are hostile."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.knowledge import read_toml
from stoker.preflight.static import check_sources
from stoker.preflight.static.image import read_instructions, read_stages
from stoker.preflight.static.requirements import read_conda_package, read_package
from stoker.preflight.static.tables import DRIVERS_BY_MAJOR, TENSORFLOW, TORCH, driver_for, library_family, minor
from stoker_watch.findings.finding import SEVERITIES, Finding
from tests.bounded import bounded
from tests.trainer.preflight.static_cases import DOCKERFILES, REQUIREMENTS, SCRIPTS, Case

CASES = (*DOCKERFILES, *REQUIREMENTS, *SCRIPTS)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "check.md"


def check_files(folder: Path, files: dict[str, str], given: tuple[str, ...] = ()) -> list[Finding]:
    for name, text in files.items():
        (folder / name).write_text(text)
    named = {name: folder / name for name in given or files}
    return check_sources(
        dockerfile=named.get("Dockerfile"),
        requirements=next((path for path in named.values() if path.suffix in (".txt", ".yml", ".toml")), None),
        script=named.get("train.py"),
    )


def ids(findings: list[Finding]) -> list[str]:
    return [finding.id for finding in findings if finding.id != "driver_minimum"]


def line_of(case: Case, piece: str) -> str:
    """The line number of a piece, in the first file that has it."""
    text = next(text for text in case.files.values() if piece in text)
    return str(text[: text.index(piece)].count("\n") + 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_of_others_give_what_was_expected_before(case: Case, tmp_path: Path):
    found = check_files(tmp_path, case.files, case.given)

    shown = sorted(
        (finding.id, finding.place.rpartition(":")[2]) for finding in found if finding.id != "driver_minimum"
    )
    assert shown == sorted((name, line_of(case, piece)) for name, piece in case.expected)


TRAINING = (
    "import torch\nfrom torch.utils.data import DataLoader\n\nmodel = torch.nn.Linear(1, 1).to('cuda')\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for batch in DataLoader(data, num_workers=2, pin_memory=True):\n    optimizer.zero_grad()\n"
    "    loss = model(batch.to('cuda')).sum()\n    loss.backward()\n    optimizer.step()\n"
)
FIT = "import tensorflow as tf\n\n\ndef load(p):\n    return tf.io.decode_jpeg(tf.io.read_file(p))\n\n\n"
DDP = (
    TRAINING.replace("optimizer = ", "model = torch.nn.parallel.DistributedDataParallel(model)\noptimizer = ")
    .replace("DataLoader(data, ", "DataLoader(data, sampler=sampler, ")
    .replace(
        "model = torch.nn.L",
        "sampler = torch.utils.data.distributed.DistributedSampler(data)\nsampler.set_epoch(0)\nmodel = torch.nn.L",
        1,
    )
)


WORKER_THREADS = (
    "import torch\nfrom torch.utils.data import DataLoader\n\n\n"
    "def start(_):\n    torch.set_num_threads({threads})\n\n\n"
    "loader = DataLoader(data, num_workers=4, worker_init_fn=start)\n"
)
RANK_THREADS = (
    "import torch\n\n\ndef train(rank):\n    torch.set_num_threads({threads})\n\n\n"
    "torch.multiprocessing.spawn(train, (), nprocs=2)\n"
)


@pytest.mark.parametrize(
    ("script", "threads"),
    [
        ("import torch\ntorch.set_num_threads(9)\n", 9),
        ("import torch\ntorch.set_num_threads(8)\n", None),
        ("import torch\nif debug:\n    torch.set_num_threads(9)\n", None),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '16'\nimport torch\n", 16),
        ("import os\nos.environ['OMP_NUM_THREADS'] = str(n)\nimport torch\n", None),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '16')\nimport torch\n", 16),
        (WORKER_THREADS.format(threads=3), 12),
        (WORKER_THREADS.format(threads=2), None),
        (RANK_THREADS.format(threads=5), 10),
        (RANK_THREADS.format(threads=4), None),
    ],
)
def test_threads_of_all_processes_are_counted_against_the_cores(
    script: str, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.preflight.static.script_rules.host_cores", lambda: 8)
    found = [finding for finding in check_files(tmp_path, {"train.py": script}) if finding.id == "too_many_threads"]
    assert [finding.title for finding in found] == ([f"{threads} threads for 8 cores"] if threads else [])


@pytest.mark.parametrize(
    ("name", "red", "green"),
    [
        (
            "cuda_mismatch",
            "FROM nvidia/cuda:12.2.2-cudnn8-runtime-ubuntu22.04\nRUN pip install tensorflow==2.13.1",
            "FROM nvidia/cuda:11.8.0-cudnn8-runtime-ubuntu22.04\nRUN pip install tensorflow==2.13.1",
        ),
        (
            "cuda_mismatch",
            "FROM nvidia/cuda:12.3.2-cudnn9-runtime-ubuntu22.04\nRUN pip install tensorflow==2.17.0",
            "FROM nvidia/cuda:12.3.2-cudnn9-runtime-ubuntu22.04\nRUN pip install tensorflow[and-cuda]==2.17.0",
        ),
        (
            "cuda_mismatch",
            "FROM ubuntu:20.04\nRUN wget http://x/cuda_12.1.0_530.30.02_linux.run && sh cuda_12.1.0_530.30.02_linux.run"
            " --silent\nRUN pip install tensorflow==2.11.0",
            "FROM ubuntu:20.04\nRUN wget http://x/cuda_11.2.2_460.32.03_linux.run && sh "
            "cuda_11.2.2_460.32.03_linux.run\n"
            "RUN pip install tensorflow==2.11.0 'numpy<2'",
        ),
        (
            "cuda_mismatch",
            "FROM nvidia/cuda:11.2.2-runtime-ubuntu20.04\nRUN apt-get install -y libcudnn8=8.0.5.39-1+cuda11.1\n"
            "RUN pip install tensorflow==2.6.5",
            "FROM nvidia/cuda:11.2.2-runtime-ubuntu20.04\nRUN apt-get install -y libcudnn8=8.1.1.33-1+cuda11.2\n"
            "RUN pip install tensorflow==2.6.5",
        ),
        (
            "tensorflow_without_cuda",
            "FROM python:3.11-slim\nRUN pip install tensorflow==2.19.0",
            "FROM python:3.11-slim\nRUN pip install 'tensorflow[and-cuda]==2.19.0'",
        ),
        (
            "tensorflow_without_cuda",
            "FROM nvidia/cuda:12.2.2-runtime-ubuntu22.04\nRUN pip install tensorflow==2.15.1",
            "FROM nvidia/cuda:12.2.2-runtime-ubuntu22.04\nRUN apt-get install -y libcudnn8\n"
            "RUN pip install tensorflow==2.15.1",
        ),
        (
            "tensorflow_without_cuda",
            "FROM ubuntu:22.04\nRUN rm -f /etc/apt/sources.list.d/cuda.list\nRUN pip install tensorflow==2.15.1",
            "FROM ubuntu:22.04\nCOPY --from=nvidia/cuda:12.2.2-cudnn8-runtime-ubuntu22.04 /usr/local/cuda /cuda\n"
            "RUN pip install tensorflow==2.15.1",
        ),
        (
            "bundled_cuda_not_found",
            "FROM python:3.11\nRUN pip install 'tensorflow[and-cuda]==2.16.1'",
            "FROM python:3.11\nRUN pip install 'tensorflow[and-cuda]==2.16.1'\nRUN ldconfig /opt/nvidia/cudnn/lib",
        ),
        (
            "extra_ignored",
            "FROM nvidia/cuda:11.8.0-cudnn8-runtime-ubuntu22.04\nRUN pip install 'tensorflow[and-cuda]==2.13.0'",
            "FROM nvidia/cuda:11.8.0-cudnn8-runtime-ubuntu22.04\nRUN pip install 'tensorflow[and-cuda]==2.14.0'",
        ),
        (
            "tensorflow_gpu_removed",
            "FROM ubuntu:22.04\nRUN pip install tensorflow-gpu",
            "FROM tensorflow/tensorflow:2.10.0-gpu\nRUN pip install 'tensorflow-gpu==2.10.0'",
        ),
        (
            "python_unsupported",
            "FROM python:3.13-slim\nRUN pip install torch==2.3.1 'numpy<2'",
            "FROM python:3.12-slim\nRUN pip install torch==2.3.1",
        ),
        (
            "python_unsupported",
            "FROM nvidia/cuda:12.4.1-runtime-ubuntu24.04\nRUN apt-get install -y python3-pip\n"
            "RUN pip install torch==2.1.2 'numpy<2'",
            "FROM nvidia/cuda:12.4.1-runtime-ubuntu24.04\nRUN apt-get install -y python3-pip python3.11\n"
            "RUN pip install torch==2.1.2 'numpy<2'",
        ),
        (
            "torchvision_mismatch",
            "FROM python:3.11\nRUN pip install torch==2.4.0 torchvision==0.18.1",
            "FROM python:3.11\nRUN pip install torch==2.4.0 torchvision==0.19.0",
        ),
        (
            "wheel_missing",
            "FROM python:3.11\nRUN pip install torch==2.0.1 'numpy<2' --index-url "
            "https://download.pytorch.org/whl/cu121",
            "FROM python:3.11\nRUN pip install torch==2.0.1 'numpy<2' --index-url "
            "https://download.pytorch.org/whl/cu118",
        ),
        (
            "numpy_too_new",
            "FROM python:3.10\nRUN pip install tensorflow[and-cuda]==2.16.2 numpy==2.0.1",
            "FROM python:3.10\nRUN pip install tensorflow[and-cuda]==2.18.0 numpy==2.0.1",
        ),
        (
            "keras_mismatch",
            "FROM tensorflow/tensorflow:2.10.0-gpu\nRUN pip install keras==2.11.0",
            "FROM tensorflow/tensorflow:2.10.0-gpu\nRUN pip install keras==2.10.0",
        ),
        (
            "conda_picks_cpu",
            "FROM condaforge/miniforge3\nRUN mamba install -y -c conda-forge pytorch=2.5.1",
            "FROM condaforge/miniforge3\nENV CONDA_OVERRIDE_CUDA=12.6\n"
            "RUN mamba install -y -c conda-forge pytorch=2.5.1",
        ),
        (
            "gpu_hidden",
            'FROM nvidia/cuda:12.4.1-base-ubuntu22.04\nENV A=1 CUDA_VISIBLE_DEVICES=""',
            "FROM nvidia/cuda:12.4.1-base-ubuntu22.04\nENV A=1 CUDA_VISIBLE_DEVICES=0",
        ),
        (
            "gpu_hidden",
            "FROM python:3.11\nENV NVIDIA_VISIBLE_DEVICES void",
            "FROM python:3.11\nENV NVIDIA_VISIBLE_DEVICES all",
        ),
        (
            "gpu_hidden",
            "FROM python:3.11\nENV NVIDIA_DRIVER_CAPABILITIES=utility,graphics",
            "FROM python:3.11\nENV NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
        (
            "stub_driver",
            "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\nENV LD_LIBRARY_PATH=/usr/local/cuda/lib64/stubs:$PATH\n"
            "RUN cd / && ln -s /usr/local/cuda/lib64/stubs/libcuda.so /usr/local/cuda/lib64/stubs/libcuda.so.1",
            "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\nENV LD_LIBRARY_PATH=/usr/local/cuda/lib64/stubs:$PATH",
        ),
        (
            "driver_in_image",
            "FROM ubuntu:22.04\nRUN apt-get install -y nvidia-driver-535",
            "FROM ubuntu:22.04\nRUN apt-get install -y cuda-toolkit-12-4",
        ),
        (
            "version_unknown",
            "FROM python:3.13\nRUN pip install torch==2.99.0",
            "FROM python:3.13\nRUN pip install torch==2.14.0",
        ),
        (
            "cpu_only_build",
            "FROM 763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-cpu-py310",
            "FROM 763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.0.0-gpu-py310-cu118-ubuntu20.04",
        ),
        (
            "cpu_only_build",
            "FROM gcr.io/deeplearning-platform-release/tf2-cpu.2-10",
            "FROM gcr.io/deeplearning-platform-release/tf2-gpu.2-10",
        ),
    ],
)
def test_a_dockerfile_rule_is_red_and_green(tmp_path: Path, name: str, red: str, green: str):
    assert ids(check_files(tmp_path, {"Dockerfile": red})) == [name]
    assert ids(check_files(tmp_path, {"Dockerfile": green})) == []


@pytest.mark.parametrize(
    ("name", "red", "green"),
    [
        (
            "trains_on_cpu",
            TRAINING.replace(".to('cuda')", ".to(device)").replace(
                "\n\nmodel", "\n\ndevice = torch.device('cpu')\nmodel"
            ),
            TRAINING,
        ),
        ("gradients_not_zeroed", TRAINING.replace("    optimizer.zero_grad()\n", ""), TRAINING),
        (
            "host_sync_each_step",
            TRAINING + "    print(float(loss))\n",
            TRAINING + "    if step % 50 == 0:\n        print(float(loss))\n",
        ),
        (
            "host_sync_each_step",
            TRAINING + "    n += loss.tolist()\n",
            TRAINING + "    n += float(loss.shape[0]) + loss.size(0)\n",
        ),
        (
            "gpu_hidden",
            "import os\n\n\ndef main():\n    os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n",
            "import os, torch\n\n\ndef on_cpu():\n    os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n",
        ),
        (
            "host_sync_each_step",
            TRAINING + "    if loss.item() > 9:\n        break\n",
            TRAINING + "print(loss.item())\n",
        ),
        (
            "loader_without_workers",
            TRAINING.replace("num_workers=2", "num_workers=0"),
            TRAINING.replace("num_workers=2", "num_workers=n"),
        ),
        (
            "loader_without_workers",
            TRAINING.replace("num_workers=2, ", ""),
            TRAINING.replace("num_workers=2, ", "batch_size=None, "),
        ),
        (
            "loader_without_workers",
            TRAINING.replace("num_workers=2, ", ""),
            TRAINING.replace("num_workers=2, ", "").replace(
                "DataLoader(data", "DataLoader(torch.utils.data.TensorDataset(x)"
            ),
        ),
        (
            "sampler_missing",
            DDP.replace("sampler=sampler, ", "").replace(
                "sampler = torch.utils.data.distributed.DistributedSampler(data)\nsampler.set_epoch(0)\n", ""
            ),
            DDP,
        ),
        ("sampler_epoch_missing", DDP.replace("sampler.set_epoch(0)\n", ""), DDP),
        (
            "cudnn_disabled",
            TRAINING + "torch.backends.cudnn.enabled = False\n",
            TRAINING + "torch.backends.cudnn.benchmark = True\n",
        ),
        (
            "anomaly_detection",
            TRAINING + "torch.autograd.set_detect_anomaly(True)\n",
            TRAINING + "if args.debug:\n    torch.autograd.set_detect_anomaly(True)\n",
        ),
        (
            "gpu_hidden",
            "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n",
            "import os, torch\nif args.cpu:\n    os.environ['CUDA_VISIBLE_DEVICES'] = ''\n",
        ),
        (
            "gpu_hidden",
            "import tensorflow as tf\ntf.config.set_visible_devices([], 'GPU')\n",
            "import tensorflow as tf\ntf.config.set_visible_devices([], 'TPU')\n",
        ),
        (
            "gpu_hidden",
            "import tensorflow as tf\nc = tf.compat.v1.ConfigProto(device_count={'GPU': 0})\n",
            "import tensorflow as tf\nc = tf.compat.v1.ConfigProto(device_count={'GPU': 1})\n",
        ),
        (
            "runs_eagerly",
            "import tensorflow as tf\ntf.config.run_functions_eagerly(True)\n",
            "import tensorflow as tf\ntf.config.run_functions_eagerly(False)\n",
        ),
        (
            "no_prefetch",
            FIT
            + "ds = tf.data.Dataset.list_files('*')\nds = ds.map(load, num_parallel_calls=8).batch(8)\nmodel.fit(ds)\n",
            FIT + "ds = tf.data.Dataset.list_files('*')\nds = ds.map(load, num_parallel_calls=8).batch(8)\n"
            "ds = ds.prefetch(2)\nmodel.fit(ds)\n",
        ),
        (
            "map_on_one_thread",
            FIT + "ds = tf.data.Dataset.list_files('*').map(load).batch(8).prefetch(1)\n",
            FIT + "ds = tf.data.Dataset.list_files('*').map(load, -1).batch(8).prefetch(1)\n",
        ),
        (
            "per_image_work_after_batch",
            FIT + "ds = tf.data.Dataset.list_files('*').batch(8).map(\n"
            "    lambda p: tf.map_fn(load, p), num_parallel_calls=4).prefetch(1)\n",
            FIT
            + "ds = tf.data.Dataset.list_files('*').batch(8).unbatch().map(load, num_parallel_calls=4).prefetch(1)\n",
        ),
        (
            "shuffle_ineffective",
            FIT + "ds = tf.data.Dataset.list_files('*').shuffle(1)\n",
            FIT + "ds = tf.data.Dataset.list_files('*').shuffle(99)\n",
        ),
        (
            "cache_freezes_randomness",
            FIT + "ds = tf.data.Dataset.range(9).map(lambda x: tf.random.uniform([3])).cache()\n",
            FIT + "ds = tf.data.Dataset.range(9)\nif train:\n    ds = ds.map(lambda x: tf.random.uniform([3]))\n"
            "if not train:\n    ds = ds.cache()\n",
        ),
        (
            "batch_smaller_than_replicas",
            FIT + "s = tf.distribute.MirroredStrategy(['GPU:0', 'GPU:1', 'GPU:2'])\nB = 2\n"
            "d = s.experimental_distribute_dataset(x.batch(B))\n",
            FIT + "s = tf.distribute.MirroredStrategy(['GPU:0', 'GPU:1', 'GPU:2'])\nB = 2\n"
            "d = s.experimental_distribute_dataset(x.batch(B * s.num_replicas_in_sync))\nv = x.batch(1)\n",
        ),
    ],
)
def test_a_script_rule_is_red_and_green(tmp_path: Path, name: str, red: str, green: str):
    assert ids(check_files(tmp_path, {"train.py": red})) == [name]
    assert ids(check_files(tmp_path, {"train.py": green})) == []


def test_a_script_without_a_framework_is_not_called_checked(tmp_path: Path) -> None:
    (found,) = check_files(tmp_path, {"train.py": "import lightning\nlightning.Trainer().fit(model)\n"})
    assert (found.id, found.severity) == ("source_unreadable", "unknown")
    assert "neither torch nor TensorFlow" in found.title


def test_the_mismatch_of_the_report_names_both_versions_and_the_line(tmp_path: Path):
    image = "FROM tensorflow/tensorflow:2.10.0-gpu\n"
    text = image + "RUN apt-get update \\\n && apt-get install -y \\\n    cuda-toolkit-11-8\n"
    finding = check_files(tmp_path, {"Dockerfile": text})[0]

    assert finding.place == f"{tmp_path / 'Dockerfile'}:4"
    assert finding.title == "TensorFlow 2.10 wants CUDA 11.2 and cuDNN 8.1; this line installs CUDA 11.8"
    assert finding.fix == "remove cuda-toolkit-11-8; if nvcc is needed: apt-get install cuda-nvcc-11-2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "ARG V=2.13.0\nFROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nARG V\nRUN pip install tensorflow==${V}",
            ["cuda_mismatch"],
            id="global_arg",
        ),
        pytest.param(
            "FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nARG V\nRUN pip install tensorflow==${V:-2.13.0}",
            ["cuda_mismatch"],
            id="default_in_use",
        ),
        pytest.param(
            "FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nARG V\nRUN pip install tensorflow==$V", [], id="unknown"
        ),
        pytest.param(
            "FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nRUN <<EOF\nset -e\npip install tensorflow==2.13.0\nEOF",
            ["cuda_mismatch"],
            id="heredoc",
        ),
        pytest.param(
            "FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nRUN cat <<EOF > notes\n"
            "pip install tensorflow==2.13.0\nEOF",
            [],
            id="heredoc_of_another_program",
        ),
        pytest.param(
            'FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nRUN ["pip", "install", "tensorflow==2.13.0"]',
            ["cuda_mismatch"],
            id="exec_form",
        ),
        pytest.param(
            "FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04\nRUN pip install \\\n# a comment\n\n  tensorflow==2.13.0",
            ["cuda_mismatch"],
            id="comment_in_continuation",
        ),
        pytest.param(
            "FROM nvidia/cuda:12.1.1-cudnn8-devel-ubuntu22.04 AS a\nRUN pip install tensorflow==2.13.0\n"
            "FROM python:3.11\n"
            "COPY --from=a /notes /notes",
            [],
            id="other_stage",
        ),
        pytest.param(
            "FROM python:3.11 AS a\nRUN pip install torch==2.1.0+cpu\nFROM a AS b\n"
            "FROM nvidia/cuda:12.1.1-base-ubuntu22.04\n"
            "COPY --from=b /opt/venv /opt/venv",
            ["cpu_only_build"],
            id="copied_stage",
        ),
        pytest.param(
            "FROM python:3.11 AS base\nRUN pip install torch==2.1.0+cpu\nFROM base",
            ["cpu_only_build"],
            id="stage_of_stage",
        ),
        pytest.param(
            "from python:3.11\nrun python3 -m pip install --no-cache-dir -U 'torch==2.1.0+cpu' && echo done",
            ["cpu_only_build"],
            id="lower_case",
        ),
        pytest.param(
            'FROM python:3.11\nRUN PIP="python -m pip install -U" && \\\n    $PIP \\\n    torch==2.1.0+cpu',
            ["cpu_only_build"],
            id="shell_variable",
        ),
        pytest.param(
            "FROM python:3.11\nRUN pip install tensorflow==2.19.0 torch==2.6.0",
            [],
            id="torch_brings_cuda_for_tensorflow",
        ),
        pytest.param(
            "FROM python:3.11\nRUN pip install tor\\\nch==2.1.0+cpu", ["cpu_only_build"], id="word_on_two_lines"
        ),
        pytest.param(
            "FROM python:3.11\nRUN uv pip install --system torch==2.6.0 --torch-backend=cpu",
            ["cpu_only_build"],
            id="uv",
        ),
        pytest.param(
            "FROM python:3.11\nRUN pip install opencv-python opencv-python-headless && pip uninstall -y opencv-python",
            [],
            id="uninstall",
        ),
        pytest.param(
            "FROM python:3.11\nRUN pip install 'torch==2.1.0+cpu; sys_platform == \"darwin\"'", [], id="marker"
        ),
        pytest.param(
            "FROM python:3.11\nRUN pip install "
            "https://download.pytorch.org/whl/cpu/torch-2.1.0%2Bcpu-cp311-cp311-linux_x86_64.whl",
            ["cpu_only_build"],
            id="wheel_address",
        ),
    ],
)
def test_dockerfiles_are_read_as_docker_reads_them(tmp_path: Path, text: str, expected: list[str]):
    assert ids(check_files(tmp_path, {"Dockerfile": text})) == expected


def test_requirements_of_a_dockerfile_are_found_in_its_folder_or_the_two_above_and_nowhere_else(tmp_path: Path):
    (tmp_path / "outside.txt").write_text("torch==2.1.0+cpu\n")
    folder = tmp_path / "sources" / "project" / "docker"
    folder.mkdir(parents=True)
    (folder.parent / "reqs").mkdir()
    (folder.parent / "reqs" / "gpu.txt").write_text("# two files\n-r more.txt\n-r gpu.txt\n")
    (folder.parent / "reqs" / "more.txt").write_text("torch==2.1.0+cpu \\\n  --hash=sha256:00\n")

    text = "FROM python:3.11\nWORKDIR /app\nCOPY reqs/gpu.txt ./wanted.txt\nRUN pip install -r /app/wanted.txt\n"
    (found,) = check_files(folder, {"Dockerfile": text})
    assert (found.id, found.place) == ("cpu_only_build", f"{folder.parent / 'reqs' / 'more.txt'}:1")

    for name in ("../../../outside.txt", "/etc/passwd", "/app/none.txt"):
        (found,) = check_files(folder, {"Dockerfile": f"FROM python:3.11\nCOPY . /app\nRUN pip install -r {name}\n"})
        assert (found.id, found.severity) == ("requirements_not_found", "unknown")


def test_places_are_relative_where_the_dockerfile_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "docker").mkdir()
    (tmp_path / "requirements.txt").write_text("torch==2.1.0+cpu\n")
    (tmp_path / "docker" / "Dockerfile").write_text("FROM python:3.11\nRUN pip install -r requirements.txt\n")
    monkeypatch.chdir(tmp_path)

    (found,) = check_sources(dockerfile=Path("docker/Dockerfile"), requirements=None, script=None)
    assert found.place == "requirements.txt:1"


def test_a_file_that_cannot_be_read_or_understood_is_a_finding_with_the_reason(tmp_path: Path):
    fifo = tmp_path / "Dockerfile"
    os.mkfifo(fifo)
    (tmp_path / "environment.yml").write_text("dependencies: [a\n b: ]")
    (tmp_path / "train.py").write_text("import torch\nprint 'hello'\n")
    found = check_sources(dockerfile=fifo, requirements=tmp_path / "environment.yml", script=tmp_path / "train.py")

    assert [finding.severity for finding in found] == ["blocker", "unknown", "unknown"]
    assert "FIFO" in found[0].evidence_text
    assert "line 2" in found[1].evidence_text
    assert "line 2" in found[2].evidence_text


NASTY = {
    "deep_parentheses": "x = " + "(" * 100_000,
    "deep_attributes": "x = a" + ".b" * 20_000,
    "deep_operators": "import torch\nx = f(" + "-" * 2_000 + "1)\nfor a in b:\n    l.backward()\n    l.item()\n",
    "deep_chain": "import tensorflow as tf\nds = tf.data.Dataset.range(1)" + ".map(f)" * 3_000 + "\nmodel.fit(ds)\n",
    "many_assignments": "import tensorflow as tf\nds = tf.data.Dataset.range(1)\n"
    + "ds = ds.map(f)\n" * 2_000
    + "model.fit(ds)\n",
    "long_line": "import torch\nx = '" + "a" * 900_000 + "'\n",
    "nulls": "import torch\0\n",
    "dockerfile_spaces": "FROM python\nRUN " + " " * 500_000 + "\\\n" * 1000,
    "dockerfile_quotes": "FROM python\nRUN " + "\"'" * 200_000,
    "dockerfile_heredocs": "FROM python\nRUN " + "<<A " * 50_000 + "\nA\n" * 50_000,
    "dockerfile_variables": "FROM ${A:-" * 30_000,
    "requirements_hashes": "torch==1 " + "--hash=x " * 50_000,
    "requirements_equals": "=" * 500_000 + "\n" + "a[" * 200_000,
    "slashes": "/a-1-" * 150_000 + ".whl",
    "yaml_aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\ndependencies: *c\n",
    "yaml_deep": "[" * 50_000,
    "toml_deep": "a = " + "[" * 50_000,
}


@pytest.mark.parametrize("name", NASTY)
def test_hostile_files_end_in_bounded_time_and_memory_without_an_exception(tmp_path: Path, name: str):
    for file in ("Dockerfile", "requirements.txt", "environment.yml", "pyproject.toml", "train.py"):
        (tmp_path / file).write_text(NASTY[name])
    with bounded(seconds=60, megabytes=1024):
        found = check_sources(
            dockerfile=tmp_path / "Dockerfile", requirements=tmp_path / "requirements.txt", script=tmp_path / "train.py"
        )
        for file in ("environment.yml", "pyproject.toml"):
            found += check_sources(dockerfile=None, requirements=tmp_path / file, script=None)
    assert all(finding.severity in SEVERITIES for finding in found)


PIECES = st.sampled_from(
    [
        "FROM ",
        "RUN ",
        "ARG ",
        "ENV ",
        "COPY ",
        "python:3.11 ",
        "pip install ",
        "torch==2.1.0 ",
        "-r ",
        "\n",
        "\\\n",
        "<<EOF\n",
        "EOF\n",
        "'",
        '"',
        "$",
        "${A:-",
        "}",
        "&& ",
        "# ",
        "--index-url ",
        "conda install ",
        "pytorch=2.1 ",
        "apt-get install ",
        "cuda-toolkit-11-8 ",
        "uv pip ",
        "[",
        "]",
        "=",
        "import torch\n",
        "def f():\n ",
        "x.map(f)",
        "tf.data.Dataset.range(3)",
        ".batch(2)",
        "(",
        ")",
        "é",
        "\t",
    ]
)


@settings(max_examples=40)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_checked_without_an_exception(tmp_path_factory: pytest.TempPathFactory, text: str):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    for file in ("requirements.txt", "environment.yml", "pyproject.toml"):
        for finding in check_files(
            folder, {"Dockerfile": text, file: text, "train.py": text}, ("Dockerfile", file, "train.py")
        ):
            line = finding.place.rpartition(":")[2]
            assert finding.id == "source_unreadable" or 1 <= int(line) <= text.count("\n") + 1


@settings(max_examples=60)
@given(st.lists(st.text("ab #\t", max_size=8), max_size=12))
def test_each_word_of_a_dockerfile_has_the_line_it_begins_in(lines: list[str]):
    text = " \\\n".join(["FROM x\nRUN one", *lines])
    written = text.split("\n")
    for command in read_stages(text)[0].commands:
        for word in command:
            assert not word.text.strip() or word.text.strip()[0] in written[word.line - 1]
    assert [instruction.line for instruction in read_instructions(text)][:2] == [1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pytorch=2.1.2", "==2.1.2.*"),
        ("pytorch==2.1", "==2.1"),
        ("conda-forge::pytorch>=2.1,<3", ">=2.1,<3"),
        ("pytorch", ""),
        ("pytorch 2.1.*", "==2.1.*"),
        ("pytorch=2.1=*cuda*", "==2.1.*"),
        ("pytorch =2.1", "==2.1.*"),
    ],
)
def test_conda_specifications(text: str, expected: str):
    package = read_conda_package(text, place="f:1")
    assert package is not None
    assert (package.name, set(package.specifier.split(","))) == ("torch", set(expected.split(",")))


@pytest.mark.parametrize(
    ("driver", "expected"), [(None, "unknown"), ("535", "blocker"), ("580", "ok"), ("580.65", "ok")]
)
def test_the_driver_of_the_machine_that_will_run_the_image(driver: str | None, expected: str, tmp_path: Path):
    """CUDA 13 needs 580, also where `stoker check` runs on a laptop."""
    (tmp_path / "Dockerfile").write_text(
        "FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04\nRUN pip install torch==2.11.0\n"
    )
    found = check_sources(dockerfile=tmp_path / "Dockerfile", requirements=None, script=None, driver=driver)
    assert [finding.severity for finding in found if finding.id == "driver_minimum"] == [expected]


def test_which_release_an_open_specifier_gives():
    def newest(text: str) -> tuple[int, int] | None:
        package = read_package(text, place="f:1")
        assert package is not None
        return package.newest(TENSORFLOW)

    assert newest("tensorflow<2.11") == (2, 10)
    assert newest("tensorflow~=2.9.1") == (2, 9)
    assert newest("tensorflow>=2.9") is None
    assert newest("tensorflow==2.8.*") == (2, 8)
    assert newest("tensorflow") is None


def test_the_tables_agree_with_themselves():
    assert all(build.python[0] < build.python[1] and driver_for(build.cuda) for build in TENSORFLOW.values())
    for build in TORCH.values():
        tag = f"cu{build.index_cuda[0]}{build.index_cuda[1]}"
        assert tag in build.cuda_tags
        assert driver_for(build.index_cuda)
    assert [library_family(minor(cuda)) for cuda in ("11.2", "11.8", "11.0")] == ["11", "11", "11.0"]
    assert DRIVERS_BY_MAJOR == {11: "450.80.02", 12: "525.60.13", 13: "580"}


def test_the_page_names_every_finding():
    names = {name.partition("/")[0] for name in read_toml("check_files.toml")}
    page = PAGE.read_text().partition("\n## Files before anything runs\n")[2]
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert {name for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)} == names


BASE = "FROM nvidia/cuda:12.4.1-cudnn-runtime-ubuntu22.04\nRUN apt-get update && apt-get install -y python3-pip\n"
CPU_WHEEL = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("command", "blocker"),
    [
        (f"pip install torch==2.3.1 --index-url {CPU_WHEEL}", "cpu_only_build"),
        (f'if [ "$DEVICE" = cpu ]; then pip install torch==2.3.1 --index-url {CPU_WHEEL}; else '
         "pip install torch==2.3.1; fi", None),
        ('if [ -n "$CPU_ONLY" ]; then pip install torch==1.13.1+cpu; fi', None),
        (f"python3 -m uv pip install --system torch==2.3.1 --index-url {CPU_WHEEL}", "cpu_only_build"),
        ("conda run -n env pip install torch==2.3.1", None),
        ("conda run --no-capture-output -n env pip install torch==2.3.1+cpu", "cpu_only_build"),
        ("conda install -y pytorch==2.1.0", None),
        ("conda config --add channels pytorch && conda install -y pytorch==2.1.0", None),
    ],
)  # fmt: skip
def test_what_installs_torch(command: str, blocker: str | None, tmp_path: Path) -> None:
    found = check_files(tmp_path, {"Dockerfile": f"{BASE}RUN {command}\n"})
    blockers = [finding.id for finding in found if finding.severity == "blocker"]
    picks_cpu = command == "conda install -y pytorch==2.1.0"
    assert blockers == (["conda_picks_cpu"] if picks_cpu else [blocker] if blocker else [])


@pytest.mark.parametrize("loss", ["F.nll_loss(output, target)", "nn.CrossEntropyLoss()(output, target)"])
@pytest.mark.parametrize("model", ["model", "self.model"])
def test_waits_of_common_loops_are_seen(model: str, loss: str, tmp_path: Path) -> None:
    """As in PyTorch's MNIST example, and in a class that trains."""
    text = TRAINING.partition("for batch")[0] + (
        "import torch.nn.functional as F\nfrom torch import nn\ntotal = 0.0\n"
        "for data, target in DataLoader(data, num_workers=2, pin_memory=True):\n"
        "    data, target = data.to('cuda'), target.to('cuda')\n    optimizer.zero_grad()\n"
        f"    output = {model}(data)\n    loss = {loss}\n    loss.backward()\n    optimizer.step()\n"
        "    total += loss.item()\n"
    )
    found = check_files(tmp_path, {"train.py": text})
    (wait,) = [finding for finding in found if finding.id == "host_sync_each_step"]
    assert text.splitlines()[int(wait.place.rpartition(":")[2]) - 1].strip() == "total += loss.item()"


@pytest.mark.parametrize(
    "steps",
    [
        "image_dataset_from_directory('a', subset='training', seed=1).cache().shuffle(1000).prefetch(1)",
        "Dataset.list_files('a', shuffle=False).shuffle(9, reshuffle_each_iteration=False).map(f).cache().shuffle(9)",
    ],
)
def test_a_cache_after_an_order_that_does_not_change(steps: str, tmp_path: Path) -> None:
    """TensorFlow's tutorials "Image classification" and "Load and preprocess images"."""
    text = (
        "import tensorflow as tf\nfrom tensorflow.data import Dataset\n"
        "from tensorflow.keras.utils import image_dataset_from_directory\ndef f(x):\n    return x\n"
        f"data = {steps}\nmodel = tf.keras.Sequential()\nmodel.fit(data, epochs=3)\n"
    )
    assert "cache_freezes_randomness" not in ids(check_files(tmp_path, {"train.py": text}))


def test_each_file_of_requirements_has_limits_of_its_own(tmp_path: Path) -> None:
    many = "".join(f"package{number}==1.0\n" for number in range(1500))
    docker = "FROM python:3.11\nCOPY a.txt b.txt ./\nRUN pip install -r a.txt\nRUN pip install -r b.txt\n"
    files = {"Dockerfile": docker, "a.txt": many, "b.txt": many + "torch==2.1.0\ntorchvision==0.10\n"}
    assert "torchvision_mismatch" in ids(check_files(tmp_path, files, ("Dockerfile",)))


def test_a_file_that_two_others_include_counts_in_both(tmp_path: Path) -> None:
    docker = "FROM python:3.11\nCOPY . ./\nRUN pip install -r one.txt\n"
    docker += "RUN pip install torch==2.2.0\nRUN pip install -r two.txt\n"
    common = "torch==2.1.0\ntorchvision==0.16.0\n"
    files = {"Dockerfile": docker, "one.txt": "-r common.txt\n", "two.txt": "-r common.txt\n", "common.txt": common}
    assert "torchvision_mismatch" not in ids(check_files(tmp_path, files, ("Dockerfile",)))
