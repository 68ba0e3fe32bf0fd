"""Dockerfiles, requirements and training scripts of others, and what `stoker check` should say about each.

The cases were collected from public repositories and questions, and their expectations written down, before the rules
were. Each is reduced to the lines that matter; where a file of the case was not at hand (the requirements next to a
Dockerfile), it is completed, and a few are variations. `expected` has the id of each finding and a piece of the line
that it points at; nothing else may be found (the minimum driver, which is a fact and not a fault, is left out).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    name: str
    source: str
    """Where it was seen."""
    files: dict[str, str]
    """Dockerfile, requirements.txt, environment.yml, pyproject.toml or train.py → content."""
    expected: tuple[tuple[str, str], ...] = ()
    given: tuple[str, ...] = ()
    """The files named on the command line; empty: all of them."""


def docker(text: str) -> dict[str, str]:
    return {"Dockerfile": text}


def script(text: str) -> dict[str, str]:
    return {"train.py": text}


DOCKERFILES = (
    Case(
        "cuda_toolkit_on_tf_image",
        "the report that led to this check",
        docker(
            "FROM tensorflow/tensorflow:2.10.0-gpu\nRUN apt-get update && \\\n"
            "    apt-get install -y cuda-toolkit-11-8\n"
        ),
        (("cuda_mismatch", "cuda-toolkit-11-8"),),
    ),
    Case(
        "od_api_tf2",
        "tensorflow/models research/object_detection/dockerfiles/tf2",
        docker(
            "FROM tensorflow/tensorflow:2.2.0-gpu\nARG DEBIAN_FRONTEND=noninteractive\n"
            "RUN apt-get update && apt-get install -y \\\n    git \\\n    protobuf-compiler \\\n    python3-pil\n"
            "RUN (cd /models/research/ && protoc object_detection/protos/*.proto --python_out=.)\n"
            'ENV PATH="/home/tensorflow/.local/bin:${PATH}"\nRUN python -m pip install -U pip\n'
            "RUN python -m pip install .\nENV TF_CPP_MIN_LOG_LEVEL 3\n"
        ),
    ),
    Case(
        "od_api_tf1",
        "tensorflow/models research/object_detection/dockerfiles/tf1",
        docker(
            "FROM tensorflow/tensorflow:1.15.2-gpu-py3\nRUN pip3 install --user contextlib2\n"
            "RUN pip3 install --user pycocotools\nRUN pip3 install --user tf-slim\n"
        ),
    ),
    Case(
        "od_api_pip_on_tf_image",
        "questions about the Object Detection API losing its GPU after installation",
        docker(
            "FROM tensorflow/tensorflow:2.10.0-gpu\nRUN pip install lvis tf-slim\nRUN pip install tf-models-official\n"
        ),
        (("framework_replaced", "tf-models-official"),),
    ),
    Case(
        "ultralytics",
        "ultralytics/ultralytics docker/Dockerfile",
        docker(
            "FROM pytorch/pytorch:latest\nENV DEBIAN_FRONTEND noninteractive\nRUN apt update\n"
            "RUN apt install --no-install-recommends -y gcc git libgl1-mesa-glx libglib2.0-0\n"
            "RUN git clone https://github.com/ultralytics/ultralytics /usr/src/ultralytics\nCOPY requirements.txt .\n"
            "RUN pip install --no-cache ultralytics albumentations \\\n    onnx openvino-dev>=2022.3\n"
            "    # tensorflow tensorflowjs \\\n\nENV OMP_NUM_THREADS=1\n"
        ),
        (("unpinned_framework", "FROM pytorch/pytorch:latest"),),
    ),
    Case(
        "ultralytics_cpu",
        "ultralytics/ultralytics docker/Dockerfile-cpu",
        docker(
            "FROM ubuntu:rolling\nRUN apt install --no-install-recommends -y python3-pip libgl1-mesa-glx\n"
            "RUN pip install --no-cache . albumentations \\\n"
            "        --extra-index-url https://download.pytorch.org/whl/cpu\n"
        ),
        (("cpu_only_build", "--extra-index-url"),),
    ),
    Case(
        "detectron2",
        "facebookresearch/detectron2 docker/Dockerfile",
        docker(
            "FROM nvidia/cuda:11.1.1-cudnn8-devel-ubuntu18.04\nRUN apt-get update && apt-get install -y \\\n"
            "    python3.7 python3.7-dev \\\n    python3-opencv ca-certificates git\n"
            "RUN pip install --user numpy==1.20.3\n"
            "RUN pip install --user tensorboard cmake   # cmake from apt is too old\n"
            "RUN pip install --user torch==1.10 torchvision==0.11.1"
            " -f https://download.pytorch.org/whl/cu111/torch_stable.html\n"
            "RUN pip install --user 'git+https://github.com/facebookresearch/fvcore'\n"
            'RUN git clone https://github.com/facebookresearch/detectron2 detectron2_repo\nENV FORCE_CUDA="1"\n'
            'ARG TORCH_CUDA_ARCH_LIST="Kepler;Kepler+Tesla;Maxwell;Maxwell+Tegra;Pascal;Volta;Turing"\n'
            'ENV TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST}"\n'
            "RUN pip install --user -e detectron2_repo\n"
        ),
    ),
    Case(
        "detectron2_other_cuda",
        "questions about 'The detected CUDA version mismatches the version that was used to compile PyTorch'",
        docker(
            "FROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04\n"
            "RUN apt-get update && apt-get install -y python3-pip git\n"
            "RUN pip install torch==2.2.2 torchvision==0.17.2 'numpy<2'\n"
            "RUN pip install 'git+https://github.com/facebookresearch/detectron2.git'\n"
        ),
        (("extension_cuda_mismatch", "detectron2.git"),),
    ),
    Case(
        "mmdetection",
        "open-mmlab/mmdetection docker/Dockerfile",
        docker(
            'ARG PYTORCH="1.6.0"\nARG CUDA="10.1"\nARG CUDNN="7"\n\n'
            "FROM pytorch/pytorch:${PYTORCH}-cuda${CUDA}-cudnn${CUDNN}-devel\n"
            'ENV CMAKE_PREFIX_PATH="$(dirname $(which conda))/../"\n'
            "RUN apt-get update && apt-get install -y ffmpeg libsm6\n"
            "RUN pip install mmcv-full==1.3.8 -f https://download.openmmlab.com/mmcv/dist/cu101/torch1.6.0/index.html\n"
            "RUN git clone https://github.com/open-mmlab/mmdetection.git /mmdetection\nWORKDIR /mmdetection\n"
            "RUN pip install -r requirements/build.txt\nRUN pip install --no-cache-dir -e .\n"
        ),
        # Its default branch is mmdet 3 by now, which refuses mmcv-full 1.3.8.
        (
            ("requirements_not_found", "requirements/build.txt"),
            ("companion_mismatch", "pip install --no-cache-dir -e ."),
        ),
    ),
    Case(
        "nvidia_ssd",
        "NVIDIA/DeepLearningExamples PyTorch/Detection/SSD",
        {
            "Dockerfile": "ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:22.10-py3\nFROM ${FROM_IMAGE_NAME}\n"
            "WORKDIR /workspace/ssd\nCOPY . .\nRUN pip install --no-cache-dir -r requirements.txt\n",
            "requirements.txt": "Cython>=0.28.4\nscikit-image>=0.15.0\nujson>=4.0.2\n",
        },
        given=("Dockerfile",),
    ),
    Case(
        "yolov5",
        "ultralytics/yolov5 utils/docker/Dockerfile",
        {
            "Dockerfile": "FROM nvcr.io/nvidia/pytorch:22.04-py3\n"
            "RUN apt update && apt install -y zip htop libgl1-mesa-glx\n"
            "COPY requirements.txt .\nRUN pip uninstall -y torchtext\n"
            "RUN pip install --no-cache -r requirements.txt albumentations wandb Pillow>=9.1.0\n"
            "    # torch torchvision --extra-index-url https://download.pytorch.org/whl/cu113\n",
            "requirements.txt": "# Base\nmatplotlib>=3.2.2\nnumpy>=1.18.5\nopencv-python>=4.1.1\ntorch>=1.7.0\n"
            "torchvision>=0.8.1\n# tensorflow>=2.4.1  # TFLite export\n",
        },
        given=("Dockerfile",),
    ),
    Case(
        "serving_image_without_gpu_tag",
        "a student's API image (tensorflow/tensorflow:2.10.0)",
        {
            "Dockerfile": "# The same Python version of your virtual env\n# FROM python:3.10.6-buster\n\n"
            "FROM tensorflow/tensorflow:2.10.0\nCOPY requirements.txt /requirements.txt\n"
            "RUN pip install -r requirements.txt\n",
            "requirements.txt": "fastapi\npytz\nuvicorn\n",
        },
        (("cpu_only_build", "FROM tensorflow/tensorflow:2.10.0"),),
        given=("Dockerfile",),
    ),
    Case(
        "requirements_replace_the_images_tensorflow",
        "a classifier on tensorflow:2.10.0-gpu with its own requirements",
        {
            "Dockerfile": "FROM tensorflow/tensorflow:2.10.0-gpu\nWORKDIR /app\nCOPY . /app\n"
            "RUN apt-get update && apt install ffmpeg libsm6 libxext6 -y # Warning: some endpoints are broken\n"
            "RUN pip install --upgrade pip && pip install -r requirements.txt\n",
            "requirements.txt": "wandb\ntensorflow==2.12.0\n",
        },
        (("framework_replaced", "tensorflow==2.12.0"), ("cuda_mismatch", "tensorflow==2.12.0")),
        given=("Dockerfile",),
    ),
    Case(
        "tf_models_pinned",
        "nvidia/cuda:11.8 with TensorFlow 2.12 and tf-models-official 2.12",
        docker(
            "# python 3.10 + tensorflow 2.12.0\nFROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04\n"
            "RUN apt-get update &&\\\n    apt-get install -y \\\n    curl unzip git \\\n"
            "    python3 python3-pip python3-dev\n"
            "RUN update-alternatives --install /usr/bin/python python /usr/bin/python3.10 1\n"
            "RUN pip3 install tensorflow==2.12.0\nRUN pip3 install tf-models-official==2.12.0\n"
        ),
    ),
    Case(
        "jetson_builder_then_python",
        "face recognition: l4t-tensorflow as builder, python:3.9 as the image",
        docker(
            "FROM nvcr.io/nvidia/l4t-tensorflow:r32.7.1-tf2.7-py3 as builder\n\nFROM python:3.9\n"
            "COPY --from=builder . /builder\nRUN pip3 install tensorflow==2.12\nRUN pip3 install numpy==1.26.2\n"
            "RUN pip3 install opencv-python-headless\n"
        ),
        (("tensorflow_without_cuda", "tensorflow==2.12"),),
    ),
    Case(
        "opencv_on_slim",
        "opencv-python issue 386 and many questions: libGL.so.1: cannot open shared object file",
        docker(
            "FROM python:3.12-slim\nRUN apt-get update && apt-get install -y git libglib2.0-0\n"
            "RUN pip install torch==2.11.0 opencv-python==4.12.0.88\n"
        ),
        (("opencv_without_gl", "opencv-python==4.12.0.88"),),
    ),
    Case(
        "opencv_on_slim_with_gl",
        "the answer to it",
        docker(
            "FROM python:3.12-slim\nRUN apt-get update && apt-get install -y libgl1 libglib2.0-0\n"
            "RUN pip install torch==2.11.0 ultralytics==8.3.0\n"
        ),
    ),
    Case(
        "headless_opencv_on_slim",
        "the other answer",
        docker("FROM python:3.12-slim\nRUN pip install torch==2.11.0 opencv-python-headless==4.12.0.88\n"),
    ),
    Case(
        "unknown_base",
        "horovod on bitnami/spark",
        docker(
            "FROM bitnami/spark:3.4.0\nUSER root\nRUN pip3 install --upgrade pip && \\\n"
            "    pip3 install tensorflow==2.12.0\n"
        ),
    ),
    Case(
        "python_too_new",
        "a student's image: python:3.12 with an older TensorFlow",
        {
            "Dockerfile": "FROM python:3.12.9-buster\nCOPY requirements.txt requirements.txt\n"
            "RUN pip install -r requirements.txt\n",
            "requirements.txt": "fastapi\ntensorflow==2.15.0\n",
        },
        (("python_unsupported", "tensorflow==2.15.0"), ("tensorflow_without_cuda", "tensorflow==2.15.0")),
        given=("Dockerfile",),
    ),
    Case(
        "and_cuda_on_slim",
        "python:3.11-slim with tensorflow[and-cuda] 2.21 and ldconfig",
        docker(
            "FROM python:3.11-slim\nRUN pip install --no-cache-dir --upgrade pip && \\\n"
            '    pip install --no-cache-dir "tensorflow[and-cuda]==2.21.0" jupyterlab\n'
            "RUN find /usr/local/lib/python3.11/site-packages/nvidia \\\n        -type d -name lib -print"
            " > /etc/ld.so.conf.d/nvidia.conf && \\\n    ldconfig\n"
        ),
    ),
    Case(
        "and_cuda_with_tf_keras",
        "deepface service: tensorflow[and-cuda] and tf-keras of the same version",
        docker(
            "FROM python:3.12-slim\nRUN pip3 install --no-cache-dir \\\n      --constraint req-constraints.txt \\\n"
            '      --upgrade \\\n      "tensorflow[and-cuda]==2.21.0" tf-keras==2.21.0\n'
        ),
    ),
    Case(
        "stub_driver",
        "nvidia/cuda:11.8 image that links the stub of libcuda",
        docker(
            "FROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04\n\n"
            "ENV LD_LIBRARY_PATH=/usr/local/cuda/lib64:/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH}\n"
            "RUN ln -s /usr/local/cuda/lib64/stubs/libcuda.so /usr/local/cuda/lib64/libcuda.so.1\n"
        ),
        (("stub_driver", "stubs/libcuda.so"),),
    ),
    Case(
        "torch_2_1_with_new_numpy",
        "an LLM image: torch 2.1 with transformers on Ubuntu 22.04, numpy not pinned",
        docker(
            "FROM nvidia/cuda:12.1.0-cudnn8-devel-ubuntu22.04\nWORKDIR /app\n"
            "RUN apt-get update && apt-get install -y python3 python3-pip git\n"
            "RUN pip3 install torch==2.1.0 transformers==4.36.0 accelerate\n"
        ),
        (("numpy_too_new", "torch==2.1.0"),),
    ),
    Case(
        "cuda_metapackage",
        "a development image: apt-get install cuda-toolkit-11-8 cuda",
        docker(
            "FROM  nvidia/cuda:11.7.0-base-ubuntu22.04\nRUN apt-get update\nRUN apt-get install -y tzdata\n"
            "RUN apt-get install -y cuda-toolkit-11-8 cuda\n#RUN pip install python3-wheel\nEXPOSE 22/tcp\n"
        ),
        (("driver_in_image", "cuda-toolkit-11-8 cuda"),),
    ),
    Case(
        "torch_cpu_on_slim",
        "sentence-transformers service: python:3.8-slim with +cpu wheels",
        docker(
            "FROM python:3.8-slim-buster AS base\nWORKDIR /app\n"
            "#RUN pip3 install torch torchvision --extra-index-url https://download.pytorch.org/whl/cpu\n\n"
            "RUN pip3 install torch==1.9.0+cpu -f https://download.pytorch.org/whl/torch_stable.html\n"
            "RUN pip3 install torchvision==0.10.0+cpu -f https://download.pytorch.org/whl/torch_stable.html\n"
            'FROM base as test\nCOPY . .\nCMD [ "python3", "-m", "pytest" ]\n'
        ),
        (("cpu_only_build", "torch==1.9.0+cpu"),),
    ),
    Case(
        "torch_cpu_with_detectron2",
        "detectron2 on python:3.8 with +cpu wheels",
        docker(
            "FROM python:3.8\nRUN apt-get update\nRUN apt-get install ffmpeg libsm6 libxext6 libgl1 -y\n"
            "RUN pip install numpy==1.19.4\nRUN pip install opencv-python==4.5.1.48\n"
            "RUN pip install --no-cache-dir torch==1.9.0+cpu -f https://download.pytorch.org/whl/torch_stable.html\n"
            "RUN pip install --no-cache-dir torchvision==0.10.0+cpu -f "
            "https://download.pytorch.org/whl/torch_stable.html\n"
            "RUN git clone https://github.com/facebookresearch/detectron2.git\n"
        ),
        (("cpu_only_build", "torch==1.9.0+cpu"),),
    ),
    Case(
        "plain_torch_on_slim",
        "PyTorch's own advice: the wheels bring CUDA",
        docker("FROM python:3.12-slim\nRUN pip install torch==2.8.0 torchvision==0.23.0\n"),
    ),
)

REQUIREMENTS = (
    Case(
        "mask_rcnn",
        "a fork of matterport/Mask_RCNN",
        {
            "requirements.txt": "numpy<1.17\nscipy\nPillow\ntensorflow==1.5\nkeras==2.1.0\nopencv-python\nh5py\n"
            "IPython[all]\n"
        },
        (("cpu_only_build", "tensorflow==1.5"),),
    ),
    Case(
        "two_opencvs",
        "a video classifier's requirements",
        {"requirements.txt": "tensorflow\nopencv-python==4.5.2.52\nopencv-python-headless==4.5.2.52\nwandb\nnumpy\n"},
        (("unpinned_framework", "tensorflow"), ("two_opencvs", "opencv-python-headless")),
    ),
    Case(
        "two_onnxruntimes",
        "a detector's requirements",
        {"requirements.txt": "torch==2.6.0\nonnxruntime==1.20.1\nonnx\nonnxruntime-gpu==1.20.1\n"},
        (("two_onnxruntimes", "onnxruntime-gpu"),),
    ),
    Case(
        "od_api_notebook",
        "an Object Detection API notebook: tensorflow and tensorflow-gpu 2.4.1",
        {"requirements.txt": "tensorflow==2.4.1\ntensorflow-gpu==2.4.1\n"},
        (("protobuf_too_new", "tensorflow==2.4.1"),),
    ),
    Case(
        "tf_2_6_pinned_well",
        "a layout model: tensorflow-gpu 2.6 with all companions pinned",
        {
            "requirements.txt": "tensorflow-gpu==2.6.0\nkeras==2.6.0\ntensorflow-estimator==2.6.0\nnumpy==1.19.5\n"
            "protobuf==3.20.3\nopencv-python-headless==4.5.5.64\n"
        },
    ),
    Case(
        "tf_2_3",
        "a malware classifier's requirements",
        {"requirements.txt": "tensorflow-gpu==2.3\nnumpy==1.18.5\nmatplotlib==3.3.2\n"},
        (("protobuf_too_new", "tensorflow-gpu==2.3"),),
    ),
    Case(
        "text_recognition",
        "a text recognition repository: torch 1.12 for CUDA 11.3 and two OpenCVs",
        {
            "requirements.txt": "--extra-index-url https://download.pytorch.org/whl/cu113\ntorch==1.12.1+cu113\n"
            "torchvision==0.13.1+cu113\nopencv-python==4.4.0.46\nPillow==7.2.0\nopencv-python-headless==4.5.1.48\n"
        },
        (("two_opencvs", "opencv-python-headless"),),
    ),
    Case(
        "sound_classifier",
        "a sound classifier's requirements",
        {"requirements.txt": "matplotlib==3.5.2\npandas==1.4.3\nopencv-python-headless==4.5.5.64\ntensorflow==2.9.1\n"},
    ),
    Case(
        "conda_torch",
        "the conda line of many papers",
        {
            "environment.yml": "name: paper\nchannels:\n  - pytorch\ndependencies:\n  - python=3.8\n"
            "  - pytorch==1.12.1\n  - torchvision==0.13.1\n  - cudatoolkit=11.3\n  - pip:\n    - einops\n"
        },
    ),
    Case(
        "conda_pair",
        "made up: the same with a torchvision of another release",
        {
            "environment.yml": "channels: [pytorch, nvidia]\ndependencies:\n  - pytorch=2.1.2\n  - torchvision=0.15.2\n"
            "  - pytorch-cuda=11.8\n"
        },
        (("torchvision_mismatch", "torchvision=0.15.2"),),
    ),
    Case(
        "conda_cpuonly",
        "PyTorch's former instructions for a CPU",
        {
            "environment.yml": "channels: [pytorch]\ndependencies:\n  - pytorch=2.0.1\n  - torchvision=0.15.2\n"
            "  - cpuonly\n"
        },
        (("cpu_only_build", "cpuonly"),),
    ),
    Case(
        "tf_2_4_project",
        "a project that pins the companions of TensorFlow 2.4",
        {
            "pyproject.toml": '[project]\nname = "speech"\nrequires-python = ">=3.8,<3.9"\ndependencies = [\n'
            '  "tensorflow==2.4.0",\n  "h5py==2.10.0",\n  "numpy==1.19.5",\n  "opencv-python-headless==4.5.1.48",\n]\n'
        },
        (("protobuf_too_new", "tensorflow==2.4.0"),),
    ),
)

SCRIPTS = (
    Case(
        "pytorch_mnist",
        "pytorch/examples mnist/main.py",
        script(
            "import argparse\nimport torch\nimport torch.nn.functional as F\nimport torch.optim as optim\n"
            "from torchvision import datasets\n\n\ndef train(args, model, device, train_loader, optimizer):\n"
            "    model.train()\n    for batch_idx, (data, target) in enumerate(train_loader):\n"
            "        data, target = data.to(device), target.to(device)\n        optimizer.zero_grad()\n"
            "        output = model(data)\n        loss = F.nll_loss(output, target)\n        loss.backward()\n"
            "        optimizer.step()\n        if batch_idx % args.log_interval == 0:\n"
            "            print(loss.item())\n\n\n"
            "def test(model, device, test_loader):\n    with torch.no_grad():\n"
            "        for data, target in test_loader:\n"
            "            output = model(data.to(device))\n"
            "            print(F.nll_loss(output, target, reduction='sum').item())\n\n\n"
            "def main(args):\n    use_cuda = not args.no_cuda and torch.cuda.is_available()\n    if use_cuda:\n"
            '        device = torch.device("cuda")\n    else:\n        device = torch.device("cpu")\n'
            "    train_kwargs = {'batch_size': args.batch_size}\n    if use_cuda:\n"
            "        train_kwargs.update({'num_workers': 1, 'pin_memory': True})\n"
            "    loader = torch.utils.data.DataLoader(datasets.MNIST('../data'), **train_kwargs)\n"
            "    model = torch.nn.Linear(1, 1).to(device)\n"
            "    train(args, model, device, loader, optim.Adadelta(model.parameters()))\n"
        ),
    ),
    Case(
        "torchvision_engine",
        "pytorch/vision references/detection/engine.py",
        script(
            "import math\nimport sys\nimport torch\nimport utils\n\n\n"
            "def train_one_epoch(model, optimizer, data_loader, device, scaler=None):\n    model.train()\n"
            "    for images, targets in utils.log_every(data_loader):\n"
            "        images = list(image.to(device) for image in images)\n"
            "        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]\n"
            "        loss_dict = model(images, targets)\n        losses = sum(loss for loss in loss_dict.values())\n"
            "        loss_dict_reduced = utils.reduce_dict(loss_dict)\n"
            "        losses_reduced = sum(loss for loss in loss_dict_reduced.values())\n"
            "        loss_value = losses_reduced.item()\n        if not math.isfinite(loss_value):\n"
            "            sys.exit(1)\n"
            "        optimizer.zero_grad()\n        if scaler is not None:\n"
            "            scaler.scale(losses).backward()\n"
            "            scaler.step(optimizer)\n        else:\n            losses.backward()\n"
            "            optimizer.step()\n\n\n"
            'def evaluate(model, data_loader, device):\n    cpu_device = torch.device("cpu")\n'
            "    for images, targets in data_loader:\n        torch.cuda.synchronize()\n"
            "        outputs = [{k: v.to(cpu_device) for k, v in t.items()} for t in model(images)]\n"
            '        print({t["image_id"].item(): o for t, o in zip(targets, outputs)})\n'
        ),
        (("host_sync_each_step", "loss_value = losses_reduced.item()"),),
    ),
    Case(
        "detr_engine",
        "facebookresearch/detr engine.py",
        script(
            "import torch\nimport util.misc as utils\n\n\n"
            "def train_one_epoch(model, criterion, loader, optimizer, device):\n"
            "    for samples, targets in loader:\n        samples = samples.to(device)\n"
            "        outputs = model(samples)\n"
            "        loss_dict = criterion(outputs, targets)\n        weights = criterion.weight_dict\n"
            "        losses = sum(loss_dict[k] * weights[k] for k in loss_dict.keys() if k in weights)\n"
            "        reduced = utils.reduce_dict(loss_dict)\n"
            "        loss_value = sum(reduced.values()).item()\n"
            "        optimizer.zero_grad()\n        losses.backward()\n        optimizer.step()\n"
        ),
        (("host_sync_each_step", "loss_value ="),),
    ),
    Case(
        "wheat_detector",
        "a wheat detector: torchvision Faster R-CNN that never leaves the CPU",
        script(
            "import os\nimport pandas as pd\nimport torch\nimport torchvision\nfrom PIL import Image\n"
            "from torch.utils.data import DataLoader, Dataset\nfrom torchvision import transforms\n\n\n"
            "class WheatDataset(Dataset):\n    def __len__(self):\n        return 1\n\n\ndataset = WheatDataset()\n"
            "model = torchvision.models.detection.fasterrcnn_resnet50_fpn(pretrained=True)\n"
            "dataloader = DataLoader(dataset, batch_size=4, shuffle=True)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.005)\nfor epoch in range(10):\n"
            "    for images, targets in dataloader:\n        optimizer.zero_grad()\n"
            "        loss_dict = model(images, targets)\n        losses = sum(loss for loss in loss_dict.values())\n"
            "        losses.backward()\n        optimizer.step()\n        print(f'Loss: {losses.item()}')\n"
        ),
        (
            ("trains_on_cpu", "losses.backward()"),
            ("loader_without_workers", "DataLoader(dataset"),
            ("host_sync_each_step", "losses.item()"),
        ),
    ),
    Case(
        "two_loaders",
        "a Faster R-CNN trainer with two loaders, one of them without workers",
        script(
            "import torch\nfrom torch.utils.data import DataLoader\n\n\n"
            "def train(train_ds, batch_size, seed_worker, g):\n"
            "    first = DataLoader(train_ds, batch_size=batch_size, shuffle=True, collate_fn=lambda x: "
            "tuple(zip(*x)))\n"
            "    second = DataLoader(train_ds, batch_size=batch_size, num_workers=4, worker_init_fn=seed_worker, "
            "generator=g)\n"
            "    return first, second\n"
        ),
        (("loader_without_workers", "first = DataLoader"),),
    ),
    Case(
        "imported_engine",
        "a detector that leaves the training to torchvision's engine",
        script(
            "import torch\nimport torchvision\nfrom engine import train_one_epoch\n\n"
            "model = torchvision.models.detection.fasterrcnn_resnet50_fpn(pretrained=True)\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.005)\n"
            "train_one_epoch(model, optimizer)\n"
        ),
    ),
    Case(
        "cifar_tutorial",
        "PyTorch's CIFAR-10 tutorial",
        script(
            "import torch\nimport torch.nn as nn\nimport torch.optim as optim\nimport torchvision\n\n"
            "trainset = torchvision.datasets.CIFAR10(root='./data')\n"
            "trainloader = torch.utils.data.DataLoader(trainset, batch_size=4, shuffle=True, num_workers=2)\n"
            "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\nnet = nn.Linear(1, 1)\n"
            "net.to(device)\ncriterion = nn.CrossEntropyLoss()\n"
            "optimizer = optim.SGD(net.parameters(), lr=0.001)\nfor epoch in range(2):\n    running_loss = 0.0\n"
            "    for i, data in enumerate(trainloader, 0):\n"
            "        inputs, labels = data[0].to(device), data[1].to(device)\n        optimizer.zero_grad()\n"
            "        outputs = net(inputs)\n        loss = criterion(outputs, labels)\n        loss.backward()\n"
            "        optimizer.step()\n        running_loss += loss.item()\n        if i % 2000 == 1999:\n"
            "            print(running_loss / 2000)\n"
        ),
        (("host_sync_each_step", "running_loss += loss.item()"), ("loader_without_pinned_memory", "trainloader =")),
    ),
    Case(
        "imagenet_example",
        "pytorch/examples imagenet/main.py",
        script(
            "import torch\nimport torch.nn as nn\nimport torch.utils.data.distributed\n\n\n"
            "def main_worker(args, model, dataset):\n"
            "    if args.distributed:\n        model.cuda(args.gpu)\n"
            "        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])\n"
            "    else:\n        model = torch.nn.DataParallel(model).cuda()\n    if args.distributed:\n"
            "        sampler = torch.utils.data.distributed.DistributedSampler(dataset)\n    else:\n"
            "        sampler = None\n"
            "    loader = torch.utils.data.DataLoader(\n"
            "        dataset, batch_size=args.batch_size, shuffle=(sampler is None),\n"
            "        num_workers=args.workers, pin_memory=True, sampler=sampler)\n"
            "    for epoch in range(args.epochs):\n        if args.distributed:\n            sampler.set_epoch(epoch)\n"
            "        train(loader, model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), epoch, "
            "args)\n\n\n"
            "def train(train_loader, model, criterion, optimizer, epoch, args):\n"
            "    for i, (images, target) in enumerate(train_loader):\n"
            "        images = images.to(args.device, non_blocking=True)\n        output = model(images)\n"
            "        loss = criterion(output, target)\n        losses.update(loss.item(), images.size(0))\n"
            "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
        ),
        (("data_parallel", "torch.nn.DataParallel(model)"), ("host_sync_each_step", "losses.update(loss.item()")),
    ),
    Case(
        "emnist",
        "a letter classifier: augmentation in front of the cache",
        script(
            "import tensorflow as tf\nimport tensorflow_datasets as tfds\n\n"
            "(ds_train, ds_test), info = tfds.load('emnist/letters', split=['train', 'test'], with_info=True)\n\n\n"
            "def normalize_img(image, label):\n    image = tf.cast(image, tf.float32) / 255.0\n"
            "    return image, label - 1\n\n\n"
            "ds_train = ds_train.map(normalize_img)\nds_test = ds_test.map(normalize_img)\n"
            "data_augmentation = tf.keras.Sequential([\n    tf.keras.layers.RandomRotation(0.1),\n"
            "    tf.keras.layers.RandomZoom(0.1),\n])\n\n\ndef augment(image, label):\n"
            "    return data_augmentation(image), label\n\n\n"
            "ds_train = ds_train.map(augment).cache().shuffle(10000).batch(128).prefetch(tf.data.AUTOTUNE)\n"
            "ds_test = ds_test.batch(128).prefetch(tf.data.AUTOTUNE)\n"
        ),
        (
            ("map_on_one_thread", "ds_train = ds_train.map(augment)"),
            ("cache_freezes_randomness", "ds_train = ds_train.map(augment)"),
        ),
    ),
    Case(
        "face_recognition",
        "a face classifier: image_dataset_from_directory, augmentation, cache",
        script(
            "import tensorflow as tf\n\nAUTOTUNE = tf.data.AUTOTUNE\n\n\ndef make(path, class_names):\n"
            "    train_ds = tf.keras.utils.image_dataset_from_directory(path, batch_size=32)\n\n"
            "    def one_hot_encode(image, label):\n        return image, tf.one_hot(label, len(class_names))\n\n"
            "    def augment(image, label):\n        image = tf.image.random_flip_left_right(image)\n"
            "        image = tf.image.random_brightness(image, max_delta=0.2)\n        return image, label\n\n"
            "    train_ds = train_ds.map(one_hot_encode).map(augment).cache().prefetch(buffer_size=AUTOTUNE)\n"
            "    return train_ds\n"
        ),
        (
            ("map_on_one_thread", "train_ds = train_ds.map(one_hot_encode)"),
            ("one_draw_per_batch", "train_ds = train_ds.map(one_hot_encode)"),
            ("cache_freezes_randomness", "train_ds = train_ds.map(one_hot_encode)"),
        ),
    ),
    Case(
        "augmentation_layer_after_batch",
        "an InceptionV3 classifier with a well-built pipeline",
        script(
            "import tensorflow as tf\nfrom tensorflow.keras import layers\n\n\ndef load(path, label):\n"
            "    return tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(path)), (299, 299)), label\n\n\n"
            "dataset = tf.data.Dataset.from_tensor_slices((['a.jpg'], [0]))\n"
            "dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)\n"
            "dataset = dataset.shuffle(buffer_size=1000, reshuffle_each_iteration=False)\n"
            "data_augmentation = tf.keras.Sequential([layers.RandomFlip('horizontal')])\n"
            "train_ds = dataset.take(800)\ntrain_ds = train_ds.batch(16).map(\n"
            "    lambda x, y: (data_augmentation(x, training=True), y),\n    num_parallel_calls=tf.data.AUTOTUNE\n"
            ").prefetch(tf.data.AUTOTUNE)\n"
        ),
    ),
    Case(
        "parse_example_after_batch",
        "a TFRecord reader that parses whole batches, as the guide advises",
        script(
            "import tensorflow as tf\n\n\ndef make(ds, batch_size, n_parallel_calls, shuffle_buffer):\n"
            "    def _parse_fn(batch):\n        return tf.io.parse_example(batch, {})\n\n    ds = ds.interleave(\n"
            "        lambda f: tf.data.TFRecordDataset(f),\n        num_parallel_calls=n_parallel_calls,\n    )\n"
            "    if shuffle_buffer is not None:\n        ds = ds.shuffle(shuffle_buffer)\n"
            "    ds = ds.batch(batch_size).map(\n        _parse_fn, num_parallel_calls=n_parallel_calls\n    )\n"
            "    return ds\n"
        ),
    ),
    Case(
        "cache_before_augmentation",
        "an EfficientNet trainer with a well-built pipeline",
        script(
            "import tensorflow as tf\n\n\ndef build_augmentation():\n"
            "    return tf.keras.Sequential([tf.keras.layers.RandomFlip()])\n\n\n"
            "def _load(path, label):\n    return tf.io.decode_jpeg(tf.io.read_file(path)), label\n\n\n"
            "def make(df, training, cache, batch_size):\n"
            "    ds = tf.data.Dataset.from_tensor_slices((df.path.to_numpy(), df.label.to_numpy()))\n"
            "    ds = ds.map(_load, num_parallel_calls=tf.data.AUTOTUNE)\n    if cache:\n        ds = ds.cache()\n"
            "    if training:\n        ds = ds.shuffle(1024, seed=1, reshuffle_each_iteration=True)\n"
            "    ds = ds.batch(batch_size).map(lambda x, y: (tf.cast(x, tf.float32), y))\n    if training:\n"
            "        aug = build_augmentation()\n"
            "        ds = ds.map(lambda x, y: (aug(x, training=True), y), num_parallel_calls=tf.data.AUTOTUNE)\n"
            "    return ds.prefetch(tf.data.AUTOTUNE)\n"
        ),
    ),
    Case(
        "translator",
        "a translator: batch, shuffle, prefetch, cache in this order",
        script(
            "import tensorflow as tf\n\n\ndef format_pair(inp, out):\n"
            "    return input_vectorizer(inp), output_vectorizer(out)\n\n\n"
            "def make_dataset(pairs, batch_size: int) -> tf.data.Dataset:\n    inputs, outputs = zip(*pairs)\n"
            "    ds = tf.data.Dataset.from_tensor_slices((list(inputs), list(outputs)))\n"
            "    ds = ds.batch(batch_size).map(format_pair)\n"
            "    return ds.shuffle(2048).prefetch(tf.data.AUTOTUNE).cache()\n"
        ),
        (("shuffle_ineffective", "return ds.shuffle(2048)"), ("cache_freezes_randomness", "return ds.shuffle(2048)")),
    ),
    Case(
        "svhn",
        "a binary network: a cheap map on whole batches",
        script(
            "import tensorflow as tf\nimport svhn_data\n\n\ndef preprocess(x, y):\n    x = 2 * (x / 255) - 1\n"
            "    y = 2 * tf.one_hot(y, 10) - 1\n    return x, y\n\n\n"
            "train_ds, val_ds, test_ds = svhn_data.make_data()\n"
            "train_ds = train_ds.shuffle(1024).batch(50).map(preprocess) \\\n"
            "                   .prefetch(tf.data.experimental.AUTOTUNE)\n"
        ),
    ),
    Case(
        "two_towers",
        "a retrieval model: the dataset is a parameter, the map a model",
        script(
            "import tensorflow as tf\nimport tensorflow_recommenders as tfrs\n\n\nclass TwoTower(tf.keras.Model):\n"
            "    def __init__(self, item_model, item_ds: tf.data.Dataset, batch_size: int):\n"
            "        super().__init__()\n"
            "        self.item_model = item_model\n        self.task = tfrs.metrics.FactorizedTopK(\n"
            "            candidates=item_ds.batch(batch_size).map(self.item_model)\n        )\n"
        ),
    ),
    Case(
        "numpy_function",
        "an action classifier that reads its frames in Python",
        script(
            "import numpy as np\nimport tensorflow as tf\n\n\n"
            "def make(all_sequences, parse_indices, batch_size=8, shuffle=True):\n"
            "    def tf_parse_fn(batch_indices):\n        imgs, lbls = tf.numpy_function(\n"
            "            lambda idxs: parse_indices(idxs, all_sequences), [batch_indices], [tf.float32, tf.float32])\n"
            "        return imgs, lbls\n\n    ds = tf.data.Dataset.from_tensor_slices(np.arange(len(all_sequences)))\n"
            "    if shuffle:\n        ds = ds.shuffle(1000, reshuffle_each_iteration=True)\n"
            "    ds = ds.batch(batch_size).map(tf_parse_fn, "
            "num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)\n"
            "    return ds\n"
        ),
        (("python_in_pipeline", "ds = ds.batch(batch_size).map(tf_parse_fn"),),
    ),
    Case(
        "parse_unbatch_decode",
        "an ImageNet reader in JAX: parses batches, decodes images",
        script(
            "import jax\nimport tensorflow as tf\n\n\ndef _deserialize_sample(serialized):\n"
            "    return tf.io.parse_example(serialized, {})\n\n\ndef _decode_jpeg(sample):\n"
            "    return dict(label=sample['label'], image=tf.io.decode_jpeg(sample['image']))\n\n\n"
            "def make(ds, batch_size):\n    return ds.batch(batch_size).map(\n"
            "        _deserialize_sample,\n        num_parallel_calls=tf.data.experimental.AUTOTUNE).unbatch().map(\n"
            "            _decode_jpeg, num_parallel_calls=tf.data.experimental.AUTOTUNE)\n"
        ),
    ),
    Case(
        "keras_retinanet",
        "keras-team/keras-io examples/vision/retinanet.py",
        script(
            "import tensorflow as tf\nimport tensorflow_datasets as tfds\n\n\ndef preprocess_data(sample):\n"
            "    image = sample['image']\n    if tf.random.uniform(()) > 0.5:\n"
            "        image = tf.image.flip_left_right(image)\n    return tf.image.resize(image, (800, 800))\n\n\n"
            "(train_dataset, val_dataset), dataset_info = tfds.load('coco/2017', split=['train', 'validation'])\n"
            "autotune = tf.data.AUTOTUNE\n"
            "train_dataset = train_dataset.map(preprocess_data, num_parallel_calls=autotune)\n"
            "train_dataset = train_dataset.shuffle(8 * 2)\n"
            "train_dataset = train_dataset.padded_batch(batch_size=2, drop_remainder=True)\n"
            "train_dataset = train_dataset.map(label_encoder.encode_batch, num_parallel_calls=autotune)\n"
            "train_dataset = train_dataset.apply(tf.data.experimental.ignore_errors())\n"
            "train_dataset = train_dataset.prefetch(autotune)\nmodel.fit(train_dataset.take(100), epochs=1)\n"
        ),
    ),
    Case(
        "hidden_gpu_for_reproducibility",
        "a cross-validation script that switches the GPU off",
        script(
            "import os\n\nos.environ['PYTHONHASHSEED'] = '0'\nos.environ[\"CUDA_VISIBLE_DEVICES\"] = \"-1\"\n\n"
            "import tensorflow as tf\n\nmodel = tf.keras.Sequential()\nmodel.fit([1], [2], batch_size=8)\n"
        ),
        (("gpu_hidden", "CUDA_VISIBLE_DEVICES"),),
    ),
    Case(
        "hidden_gpu_for_preprocessing",
        "a ByT5 task file that hides the GPU from TensorFlow and restores it",
        script(
            'import os\ncuda_devices = os.environ["CUDA_VISIBLE_DEVICES"]\nos.environ["CUDA_VISIBLE_DEVICES"] = "-1"\n'
            "import tensorflow.compat.v1 as tf\ngpus = tf.config.experimental.list_physical_devices('GPU')\n"
            'os.environ["CUDA_VISIBLE_DEVICES"] = cuda_devices\n'
        ),
    ),
    Case(
        "tensorflow_next_to_torch",
        "a Kaggle notebook: TensorFlow on the CPU, torch on the GPU",
        script(
            'import tensorflow as tf\nimport torch\n\ntry:\n    tf.config.set_visible_devices([], "GPU")\n'
            "except Exception:\n    pass\n"
        ),
    ),
    Case(
        "six_gpus_batch_ten",
        "a 3-D convolution on six GPUs",
        script(
            "import tensorflow as tf\n\nstrategy = tf.distribute.MirroredStrategy(\n"
            '    devices=["/GPU:0", "/GPU:1", "/GPU:2", "/GPU:3", "/GPU:4", "/GPU:5"])\n'
            "with strategy.scope():\n    model = tf.keras.Sequential()\nmodel.fit([1], [2], batch_size=10, epochs=10)\n"
        ),
    ),
    Case(
        "six_gpus_batch_four",
        "made up: the same with a smaller batch",
        script(
            "import tensorflow as tf\n\nstrategy = tf.distribute.MirroredStrategy(\n"
            '    devices=["/GPU:0", "/GPU:1", "/GPU:2", "/GPU:3", "/GPU:4", "/GPU:5"])\n'
            "with strategy.scope():\n    model = tf.keras.Sequential()\nmodel.fit([1], [2], batch_size=4, epochs=10)\n"
        ),
        (("batch_smaller_than_replicas", "model.fit"),),
    ),
    Case(
        "global_batch",
        "a text classifier on three GPUs: batch per replica × replicas",
        script(
            "import tensorflow as tf\n\n"
            "strategy = tf.distribute.MirroredStrategy(devices=['GPU:0', 'GPU:1', 'GPU:2'])\n\n\n"
            "def test(configs, test_set):\n    global_batch_size = configs.batch_size * strategy.num_replicas_in_sync\n"
            "    test_dataset = test_set.batch(global_batch_size).prefetch(global_batch_size * 2)\n"
            "    return strategy.experimental_distribute_dataset(test_dataset)\n"
        ),
    ),
)
