"""All causes and their rules, in one list. What ended a job is in `endings.py`.

Each file of `causes/` has rules, `knowledge/causes.toml` their rows; here they are collected, without a registry.
"""

import hashlib
from collections.abc import Callable

import msgspec

from stoker.diagnosis.causes import (
    batch_too_small,
    communication,
    cpu,
    gpu,
    host_bound_steps,
    hung,
    input_bound,
    learning,
    memory,
    overhead,
    python_bound,
    recipe,
    slow_input,
    storage,
)
from stoker.diagnosis.causes.cause import COMMON_THRESHOLDS, Cause, find_cause
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Finding

Rule = Callable[[RunRecords], Finding | None]
"""A pure function: a run's records in, a finding out. None: the cause is not there, or a record it needs is missing."""

_RULES: tuple[Rule, ...] = (
    # data loading
    input_bound.input_bound,
    slow_input.slow_storage,
    slow_input.slow_decode,
    slow_input.too_few_cores,
    slow_input.too_few_workers,
    slow_input.exposed_h2d_copies,
    # GPU under-utilized
    python_bound.python_bound,
    python_bound.host_device_syncs,
    host_bound_steps.launch_bound,
    host_bound_steps.host_bound_steps,
    batch_too_small.batch_too_small,
    batch_too_small.gpu_oversized,
    python_bound.recompiles,
    # architecture and hyper-parameters, divergence
    overhead.evaluation_heavy,
    learning.lr_too_high,
    learning.lr_too_low,
    learning.overfitting,
    recipe.augmentation_heavy,
    recipe.anchors_miss_boxes,
    recipe.training_from_scratch,
    gpu.tensor_cores_unused,
    learning.non_finite_loss,
    learning.unstable_training,
    # memory and other limits
    memory.gpu_memory_near_limit,
    memory.gpu_memory_leak,
    memory.host_memory_near_limit,
    memory.host_memory_leak,
    memory.shared_memory_small,
    memory.fd_limit_near,
    # communication
    communication.straggler,
    communication.communication_bound,
    gpu.pcie_degraded,
    # allocation and scheduling
    overhead.startup_heavy,
    overhead.checkpoint_heavy,
    cpu.cpu_quota,
    cpu.cpu_contention,
    cpu.threads_oversubscribed,
    overhead.costly_restarts,
    # GPUs
    gpu.gpu_clocks_low,
    gpu.gpu_shared,
    gpu.idle_gpus,
    gpu.gpu_not_used,
    gpu.gpu_errors,
    # about to fail
    hung.hung,
    hung.empty_input,
    storage.storage_errors,
    storage.disk_nearly_full,
    recipe.bad_images,
)
RULES = tuple((find_cause(rule.__name__), rule) for rule in _RULES)

CATALOG: dict[str, Cause] = {cause.id: cause for cause, _ in RULES}


def catalog_hash() -> str:
    """12 hex digits of the SHA-256 of all causes and common thresholds: equal hashes mean equal thresholds."""
    data = {"causes": sorted(CATALOG.values(), key=lambda cause: cause.id), "common": COMMON_THRESHOLDS}
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:12]
