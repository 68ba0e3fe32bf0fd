"""Whether an installed TensorFlow sees the GPU, for jobs that use it. stoker itself does not."""

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from stoker.preflight.catalog import describe
from stoker.preflight.findings import CheckFinding, Severity
from stoker.preflight.programs import run_program
from stoker.report import format as fmt

TIMEOUT_S = 20.0
PROGRAM = (
    "import json, tensorflow as tf; info = tf.sysconfig.get_build_info(); "
    "print(json.dumps([tf.__version__, bool(tf.test.is_built_with_cuda()), len(tf.config.list_physical_devices('GPU')),"
    " str(info.get('cuda_version')), str(info.get('cudnn_version'))]))"
)


def check_tensorflow(
    *,
    needed: bool,
    gpu_is_there: bool,
    command: Sequence[str] = (sys.executable, "-c", PROGRAM),
    timeout_s: float = TIMEOUT_S,
) -> list[CheckFinding]:
    """Whether TensorFlow sees the GPU, for jobs that use it. needed: such a job is to run, so it is a blocker."""
    try:
        ended = run_program(command, timeout_s)
        version, with_cuda, num_gpus, cuda, cudnn = msgspec.json.decode(
            ended.last_line, type=tuple[str, bool, int, str, str]
        )
    except subprocess.TimeoutExpired:
        return [describe("tensorflow/slow", seconds=timeout_s)]
    except msgspec.DecodeError:
        return [describe("tensorflow/fails", reason=ended.reason)]
    if num_gpus or not gpu_is_there:
        return [describe("tensorflow", version=version, gpus=fmt.plural(num_gpus, "GPU"), cuda=cuda)]
    id = "tensorflow_no_gpu/cuda" if with_cuda else "tensorflow_no_gpu/cpu"
    severity: Severity = "blocker" if needed else "warning"
    return [describe(id, severity=severity, version=version, cuda=cuda, cudnn=cudnn)]
