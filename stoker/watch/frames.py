"""What a Python stack says that a training job's main thread is doing: pure functions over py-spy's frames.

The table `ROWS` knows the frameworks' own functions by file and name; what it does not know is the job's own code. A
stack of Python frames does not show C functions, so the line of the job's own file in which the thread is decides where
it calls one that waits for the device or decodes a picture. Who reads the stacks is `stacks.py`.
"""

import linecache
import re
from collections.abc import Sequence
from typing import NamedTuple

KINDS = (
    "input_wait", "decode", "compute", "sync", "comm", "checkpoint", "compile", "python", "other", "idle",
)  # fmt: skip
"""What the main thread can be in; docs/run-folder.md describes them."""

HELPER = "helper"
"""Of a process that does not train: a loader's worker, a launcher. No kind: such stacks are left out."""


class Frame(NamedTuple):
    """A frame as py-spy tells it, the innermost first in a stack. function: may have its class in front."""

    function: str
    file: str
    line: int


class FrameRule(NamedTuple):
    """kind: one of KINDS, or HELPER. whole: everything below such a frame is of its kind, whatever it calls."""

    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    covers_callees: bool


def _rule(kind: str, file: str, function: str = ".+", *, covers_callees: bool = False) -> FrameRule:
    return FrameRule(kind, re.compile(rf"(^|/)(?:{file})"), re.compile(rf"(?:{function})$"), covers_callees)


WORKER_RULES = (
    _rule(HELPER, r"torch/utils/data/_utils/worker\.py", "_worker_loop"),
    _rule(HELPER, r"multiprocessing/(pool|forkserver|resource_tracker)\.py", "worker|main"),
    _rule(HELPER, r"concurrent/futures/process\.py", "_process_worker"),
    _rule(HELPER, r"joblib/externals/loky/|torch/_inductor/compile_worker/|billiard/pool\.py"),
)
"""Workers. A forked one has the stack of its parent below its own, so these are asked first."""

FRAME_RULES = (
    _rule("checkpoint", r"torch/serialization\.py", "save|_save|_legacy_save", covers_callees=True),
    _rule("checkpoint", r"torch/distributed/checkpoint/", covers_callees=True),
    _rule(
        "checkpoint", r"safetensors/(torch|numpy|flax|tensorflow)\.py", "save|save_file|save_model", covers_callees=True
    ),
    _rule("checkpoint", r"keras/(src/)?(saving|legacy/saving)/", r"save\w*|_save\w*", covers_callees=True),
    _rule(
        "checkpoint",
        r"keras/(src/)?callbacks/(model_checkpoint|backup_and_restore)\.py",
        r"_?save\w*",
        covers_callees=True,
    ),
    _rule(
        "checkpoint",
        r"tensorflow/python/(checkpoint/|training/saver|saved_model/save)",
        r"_?save\w*|write",
        covers_callees=True,
    ),
    _rule(
        "checkpoint",
        r"(pytorch_lightning|lightning/pytorch)/callbacks/model_checkpoint\.py",
        r"_save\w*",
        covers_callees=True,
    ),
    _rule("checkpoint", r"transformers/trainer\.py", "_save_checkpoint|save_model", covers_callees=True),
    _rule("checkpoint", r"ultralytics/engine/trainer\.py", "save_model", covers_callees=True),
    _rule("checkpoint", r"orbax/checkpoint/", covers_callees=True),
    _rule("compile", r"torch/_dynamo/convert_frame\.py", covers_callees=True),
    _rule(
        "compile",
        r"torch/_inductor/(compile_fx|graph|async_compile)\.py",
        r"\w*(compile|codegen)\w*|wait",
        covers_callees=True,
    ),
    _rule(
        "compile",
        r"torch/jit/_(trace|script)\.py",
        "trace|trace_module|script|create_script_module",
        covers_callees=True,
    ),
    _rule(
        "compile",
        r"tensorflow/python/(framework/func_graph|eager/polymorphic_function/(tracing_compilation|"
        r"concrete_function))\.py",
        r"func_graph_from_py_func|trace_function|_?create_concrete_function",
        covers_callees=True,
    ),
    _rule(
        "compile",
        r"jax/_src/(compiler|interpreters/partial_eval)\.py",
        r"\w*compile\w*|trace_to_jaxpr\w*",
        covers_callees=True,
    ),
    _rule("input_wait", r"torch/utils/data/(dataloader\.py|_utils/fetch\.py)", covers_callees=True),
    _rule(
        "input_wait",
        r"(torchdata|webdataset|litdata|streaming|nvidia/dali|ffcv)/",
        r"__next__|next|__iter__",
        covers_callees=True,
    ),
    _rule("input_wait", r"(pytorch_lightning|lightning/pytorch)/loops/fetchers\.py", covers_callees=True),
    _rule("input_wait", r"accelerate/data_loader\.py", "__iter__|__next__|_fetch_batches", covers_callees=True),
    _rule("input_wait", r"keras/(src/)?trainers/(epoch_iterator|data_adapters/\w+)\.py", covers_callees=True),
    _rule(
        "input_wait",
        r"keras/(src/)?(engine/data_adapter|utils/data_utils)\.py",
        r"get|__next__|__iter__|steps",
        covers_callees=True,
    ),
    _rule(
        "input_wait",
        r"tensorflow/python/data/ops/(iterator_ops|multi_device_iterator_ops|dataset_ops)\.py",
        r"__next__|_next_internal|get_next\w*|next|__iter__",
        covers_callees=True,
    ),
    _rule("input_wait", r"tensorflow/python/distribute/input_lib\.py", r"get_next\w*|__next__", covers_callees=True),
    _rule("input_wait", r"tensorflow_datasets/core/dataset_utils\.py", covers_callees=True),
    _rule(
        "input_wait",
        r"detectron2/data/|mmdet/datasets/|ultralytics/data/",
        r"__next__|__iter__|__getitem__",
        covers_callees=True,
    ),
    _rule("input_wait", r"stoker/data/loading/loader\.py", "__next__|next", covers_callees=True),
    _rule(HELPER, r"torch/distributed/(run|launcher|elastic)\b", covers_callees=True),
    _rule(HELPER, r"torch/multiprocessing/spawn\.py", "join|start_processes|spawn", covers_callees=True),
    _rule(
        HELPER,
        r"(subprocess|multiprocessing/process|multiprocessing/popen_\w+)\.py",
        r"wait|_wait|join|communicate|poll|call|run|_try_wait",
    ),
    _rule("decode", r"PIL/|imageio(/|\.py)|skimage/io/|cv2/|tifffile/|simplejpeg/|turbojpeg\.py|pydicom/|rasterio/"),
    _rule("decode", r"torchvision/(io|transforms|datasets)/|albumentations/|imgaug/|kornia_rs/"),
    _rule(
        "input_wait",
        r"(s3fs|gcsfs|fsspec|botocore|boto3|obstore|smart_open|google/cloud/storage|h5py|lmdb|zipfile)(/|\.py)",
    ),
    _rule("comm", r"torch/distributed/(distributed_c10d|_functional_collectives|rendezvous|algorithms/\w+)\b"),
    _rule("comm", r"torch/nn/parallel/distributed\.py", r"_sync\w*|_verify\w*|_all\w*|_ddp_init_helper"),
    _rule("comm", r"horovod/|mpi4py/|jax/experimental/multihost_utils\.py|tensorflow/python/distribute/cross_device"),
    _rule("sync", r"torch/(cuda|accelerator|xpu|mps|hip|_C)/", "synchronize|wait|wait_event|query|empty_cache"),
    _rule("sync", r"torch/amp/grad_scaler\.py", "_maybe_opt_step"),
    _rule("sync", r"torch/_tensor\.py", r"__array__|tolist|__format__|__repr__|__iter__|__contains__"),
    _rule("sync", r"torch/_tensor_str\.py"),
    _rule("sync", r"tensorflow/python/framework/ops\.py", r"_?numpy|__array__|__float__|__int__|__bool__"),
    _rule("sync", r"jax/_src/(array|api)\.py", r"_value|__array__|__float__|item|tolist|block_until_ready"),
    _rule("other", r"tensorflow/python/eager/(execute|context)\.py", "quick_execute|call_function|execute"),
    _rule(
        "compute", r"torch/(autograd|optim|amp|nn|func|_functorch|_refs|_decomp|sparse|fft|linalg|utils/checkpoint)\b"
    ),
    _rule(
        "compute",
        r"torch/(_tensor|functional|_ops|_compile|_dynamo/eval_frame|_inductor/(output_code|compile_fx|utils))\.py",
    ),
    _rule("compute", r"torch/_inductor/runtime/|torchinductor_\w+/|torchvision/(models|ops)/|timm/"),
    _rule("compute", r"keras/(src/)?(layers|ops|models|optimizers|losses|backend/(torch|jax|numpy|common))/"),
    _rule("compute", r"jax/_src/(pjit|core|lax|numpy|interpreters)\b|optax/|flax/"),
    _rule("other", r"<frozen importlib|importlib/"),
)
"""The first row that knows a frame decides for it. A TensorFlow function runs a step and waits for its input in one
call that no Python frame divides: `other`, never guessed."""

_SYNC_LINE = re.compile(
    r"\.(item|cpu|tolist|numpy|nonzero|block_until_ready)\(|\.synchronize\(|\.to\(\s*(device\s*=\s*)?['\"]cpu"
)
_DECODE_LINE = re.compile(
    r"\b(cv2|Image|imageio|simplejpeg|jpeg|turbojpeg)\w*\.(im)?(read|decode|open|resize)\w*\(|decode_(jpeg|png|image)\("
)
_COMPUTE_LINE = re.compile(r"\.(backward|matmul|mm|bmm|conv2d|sgd|step)\(|\s@\s")
_LINE_PATTERNS = (("sync", _SYNC_LINE), ("decode", _DECODE_LINE), ("compute", _COMPUTE_LINE))
"""Of a line of the job's own in which the innermost frame is: what the C function does that it calls."""

_NOT_JOB_CODE = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<|/torchinductor_|/watch/hook/")


def is_job_code(frame: Frame) -> bool:
    """Whether it is of the job's own files: not installed, not of Python itself, not generated."""
    return bool(frame.file) and _NOT_JOB_CODE.search(frame.file) is None


def classify(stack: Sequence[Frame], *, active: bool) -> str:
    """What a thread is in: one of KINDS or HELPER. stack: the innermost frame first; active: it runs, or wants to."""
    if any(_matches(rule, frame) for rule in WORKER_RULES for frame in stack):
        return HELPER
    if _is_importing(stack):
        return "other"
    rules = [_find_rule(frame) for frame in stack]
    kinds = [rule.kind for rule in rules if rule is not None]
    covering_kind = next((rule.kind for rule in reversed(rules) if rule is not None and rule.covers_callees), None)
    if (
        covering_kind == "input_wait"
        and kinds
        and (kinds[0] == "decode" or _kind_from_source_line(stack[0]) == "decode")
    ):
        return "decode"  # the loader has no workers: the training thread does it
    if covering_kind is not None:
        return covering_kind
    if stack and (line_kind := _kind_from_source_line(stack[0])) is not None:
        return line_kind
    if kinds:
        return kinds[0]
    if not active:
        return "idle"
    return "python" if any(is_job_code(frame) for frame in stack) else "other"


def innermost_job_frame(stack: Sequence[Frame], cwd: str = "") -> str | None:
    """`function (file:line)` of the innermost frame of the job's own files; folder: in which it runs, left out."""
    for frame in stack:
        if is_job_code(frame):
            name = frame.function.rpartition("<locals>.")[2]
            file = frame.file
            if cwd and file.startswith(cwd.rstrip("/") + "/"):
                file = file[len(cwd.rstrip("/")) + 1 :]
            elif file.count("/") > 2:
                file = "/".join(file.split("/")[-3:])
            return f"{name} ({file}:{frame.line})"
    return None


def _is_importing(stack: Sequence[Frame]) -> bool:
    """Whether a module that is not the job's own is being imported."""
    for frame in stack:
        if is_job_code(frame):
            return False
        if _base_name(frame.function) == "_find_and_load":
            return True
    return False


def _find_rule(frame: Frame) -> FrameRule | None:
    if frame.function == "<module>" and "importlib" not in frame.file:  # what an import runs says nothing of training
        return None
    return next((rule for rule in FRAME_RULES if _matches(rule, frame)), None)


def _matches(rule: FrameRule, frame: Frame) -> bool:
    return rule.file.search(frame.file) is not None and rule.function.match(_base_name(frame.function)) is not None


def _base_name(function: str) -> str:
    """The function's own name, without class and surrounding functions."""
    return function.rpartition(".")[2]


def _kind_from_source_line(frame: Frame) -> str | None:
    """By the text of its line where it is the job's own."""
    if not is_job_code(frame) or not frame.file.startswith("/") or not frame.file.isprintable():
        return None
    text = linecache.getline(frame.file, frame.line)
    return next((kind for kind, pattern in _LINE_PATTERNS if pattern.search(text)), None)
