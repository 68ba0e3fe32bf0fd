"""Classifies Python stacks of a training job's main thread: pure functions over py-spy's frames.

The table `FRAME_RULES` knows functions of frameworks by file and name; other frames are the job's own code. A Python
stack does not show C functions, so the source line of the job's innermost frame decides whether it calls one that waits
for the device or decodes an image. `stacks.py` samples the stacks.
"""

import linecache
import re
from collections.abc import Sequence
from typing import NamedTuple

KINDS = (
    "input_wait", "decode", "compute", "sync", "comm", "checkpoint", "compile", "python", "other", "idle",
)  # fmt: skip
"""Kinds of work of the main thread; docs/run-folder.md describes them."""

HELPER = "helper"
"""A process that does not train: a loader worker, a launcher. Not one of KINDS: such stacks do not count."""


class Frame(NamedTuple):
    """A frame from py-spy; a stack has the innermost frame first. function: may include its class."""

    function: str
    file: str
    line: int


class FrameRule(NamedTuple):
    """kind: one of KINDS, or HELPER. covers_callees: everything that the frame calls has its kind too."""

    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    covers_callees: bool


def _rule(kind: str, file: str, function: str = ".+") -> FrameRule:
    return FrameRule(kind, re.compile(rf"(^|/)(?:{file})"), re.compile(rf"(?:{function})$"), covers_callees=False)


def _subtree(kind: str, file: str, function: str = ".+") -> FrameRule:
    return _rule(kind, file, function)._replace(covers_callees=True)


WORKER_RULES = (
    _rule(HELPER, r"torch/utils/data/_utils/worker\.py", "_worker_loop"),
    _rule(HELPER, r"multiprocessing/(pool|forkserver|resource_tracker)\.py", "worker|main"),
    _rule(HELPER, r"concurrent/futures/process\.py", "_process_worker"),
    _rule(HELPER, r"joblib/externals/loky/|torch/_inductor/compile_worker/|billiard/pool\.py"),
)
"""Workers. The stack of a forked one contains that of its parent, so these rules are checked first."""

FRAME_RULES = (
    _subtree("checkpoint", r"torch/serialization\.py", "save|_save|_legacy_save"),
    _subtree("checkpoint", r"torch/distributed/checkpoint/"),
    _subtree("checkpoint", r"safetensors/(torch|numpy|flax|tensorflow)\.py", "save|save_file|save_model"),
    _subtree("checkpoint", r"keras/(src/)?(saving|legacy/saving)/", r"save\w*|_save\w*"),
    _subtree("checkpoint", r"keras/(src/)?callbacks/(model_checkpoint|backup_and_restore)\.py", r"_?save\w*"),
    _subtree("checkpoint", r"tensorflow/python/(checkpoint/|training/saver|saved_model/save)", r"_?save\w*|write"),
    _subtree("checkpoint", r"(pytorch_lightning|lightning/pytorch)/callbacks/model_checkpoint\.py", r"_save\w*"),
    _subtree("checkpoint", r"transformers/trainer\.py", "_save_checkpoint|save_model"),
    _subtree("checkpoint", r"ultralytics/engine/trainer\.py", "save_model"),
    _subtree("checkpoint", r"orbax/checkpoint/"),
    _subtree("compile", r"torch/_dynamo/convert_frame\.py"),
    _subtree("compile", r"torch/_inductor/(compile_fx|graph|async_compile)\.py", r"\w*(compile|codegen)\w*|wait"),
    _subtree("compile", r"torch/jit/_(trace|script)\.py", "trace|trace_module|script|create_script_module"),
    _subtree(
        "compile",
        r"tensorflow/python/(framework/func_graph|eager/polymorphic_function/(tracing_compilation|"
        r"concrete_function))\.py",
        r"func_graph_from_py_func|trace_function|_?create_concrete_function",
    ),
    _subtree("compile", r"jax/_src/(compiler|interpreters/partial_eval)\.py", r"\w*compile\w*|trace_to_jaxpr\w*"),
    _subtree("input_wait", r"torch/utils/data/(dataloader\.py|_utils/fetch\.py)"),
    _subtree("input_wait", r"(torchdata|webdataset|litdata|streaming|nvidia/dali|ffcv)/", r"__next__|next|__iter__"),
    _subtree("input_wait", r"(pytorch_lightning|lightning/pytorch)/loops/fetchers\.py"),
    _subtree("input_wait", r"accelerate/data_loader\.py", "__iter__|__next__|_fetch_batches"),
    _subtree("input_wait", r"keras/(src/)?trainers/(epoch_iterator|data_adapters/\w+)\.py"),
    _subtree("input_wait", r"keras/(src/)?(engine/data_adapter|utils/data_utils)\.py", r"get|__next__|__iter__|steps"),
    _subtree(
        "input_wait",
        r"tensorflow/python/data/ops/(iterator_ops|multi_device_iterator_ops|dataset_ops)\.py",
        r"__next__|_next_internal|get_next\w*|next|__iter__",
    ),
    _subtree("input_wait", r"tensorflow/python/distribute/input_lib\.py", r"get_next\w*|__next__"),
    _subtree("input_wait", r"tensorflow_datasets/core/dataset_utils\.py"),
    _subtree("input_wait", r"detectron2/data/|mmdet/datasets/|ultralytics/data/", r"__next__|__iter__|__getitem__"),
    _subtree("input_wait", r"stoker/data/loading/loader\.py", "__next__|next"),
    _subtree(HELPER, r"torch/distributed/(run|launcher|elastic)\b"),
    _subtree(HELPER, r"torch/multiprocessing/spawn\.py", "join|start_processes|spawn"),
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
"""The first rule that matches a frame applies. A TensorFlow function runs a step and waits for its input in one call,
so its frame is `other`."""

_SYNC_LINE = re.compile(
    r"\.(item|cpu|tolist|numpy|nonzero|block_until_ready)\(|\.synchronize\(|\.to\(\s*(device\s*=\s*)?['\"]cpu"
)
_DECODE_LINE = re.compile(
    r"\b(cv2|Image|imageio|simplejpeg|jpeg|turbojpeg)\w*\.(im)?(read|decode|open|resize)\w*\(|decode_(jpeg|png|image)\("
)
_COMPUTE_LINE = re.compile(r"\.(backward|matmul|mm|bmm|conv2d|sgd|step)\(|\s@\s")
_LINE_PATTERNS = (("sync", _SYNC_LINE), ("decode", _DECODE_LINE), ("compute", _COMPUTE_LINE))
"""Kind → pattern of a source line of the job that calls a C function of that kind."""

_NOT_JOB_CODE = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<|/torchinductor_|/watch/hook/")


def is_job_code(frame: Frame) -> bool:
    """Whether the frame is in a file of the job: not installed, not of Python itself, not generated."""
    return bool(frame.file) and _NOT_JOB_CODE.search(frame.file) is None


def classify(stack: Sequence[Frame], *, active: bool) -> str:
    """The kind of work of a thread: one of KINDS or HELPER. stack: innermost frame first; active: it is runnable."""
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
        return "decode"  # a loader without workers: the training thread decodes
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
    """`function (file:line)` of the innermost frame in a file of the job, relative to its working directory `cwd`."""
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
    """Whether an installed module is being imported."""
    for frame in stack:
        if is_job_code(frame):
            return False
        if _base_name(frame.function) == "_find_and_load":
            return True
    return False


def _find_rule(frame: Frame) -> FrameRule | None:
    if frame.function == "<module>" and "importlib" not in frame.file:  # code of an import is not training
        return None
    return next((rule for rule in FRAME_RULES if _matches(rule, frame)), None)


def _matches(rule: FrameRule, frame: Frame) -> bool:
    return rule.file.search(frame.file) is not None and rule.function.match(_base_name(frame.function)) is not None


def _base_name(function: str) -> str:
    """The function's name without its class and enclosing functions."""
    return function.rpartition(".")[2]


def _kind_from_source_line(frame: Frame) -> str | None:
    """The kind by the text of the source line, if the frame is in a file of the job."""
    if not is_job_code(frame) or not frame.file.startswith("/") or not frame.file.isprintable():
        return None
    text = linecache.getline(frame.file, frame.line)
    return next((kind for kind, pattern in _LINE_PATTERNS if pattern.search(text)), None)
