"""All causes and their rules, in one list. What ended a job is in `endings.py`.

Each file of `causes/` has rules, `knowledge/causes.toml` their rows; here they are collected, without a registry.
"""

import hashlib
from collections.abc import Callable

import msgspec

from stoker.diagnosis.causes import communication, gpu, host, input, learning, overhead, steps
from stoker.diagnosis.causes.cause import COMMON_THRESHOLDS, Cause, find_cause
from stoker.diagnosis.run_data import RunRecords
from stoker.findings.finding import Finding

Rule = Callable[[RunRecords, Cause], Finding | None]
"""A pure function: a run's records and the row of the cause in, a finding out. None: the cause is not there, or a
record that the rule needs is missing."""

_RULES: tuple[Rule, ...] = (
    # data loading
    input.input_bound,
    input.slow_storage,
    input.slow_decode,
    input.too_few_cores,
    input.too_few_workers,
    input.exposed_h2d_copies,
    # GPU under-utilized
    steps.python_bound,
    steps.host_device_syncs,
    steps.launch_bound,
    steps.host_bound_steps,
    steps.batch_too_small,
    steps.gpu_oversized,
    steps.recompiles,
    # architecture and hyper-parameters, divergence
    overhead.evaluation_heavy,
    learning.lr_too_high,
    learning.lr_too_low,
    learning.overfitting,
    learning.augmentation_heavy,
    learning.anchors_miss_boxes,
    learning.training_from_scratch,
    gpu.tensor_cores_unused,
    learning.non_finite_loss,
    learning.unstable_training,
    # memory and other limits
    host.gpu_memory_near_limit,
    host.gpu_memory_leak,
    host.host_memory_near_limit,
    host.host_memory_leak,
    host.shared_memory_small,
    host.fd_limit_near,
    # communication
    communication.straggler,
    communication.communication_bound,
    gpu.pcie_degraded,
    # allocation and scheduling
    overhead.startup_heavy,
    overhead.checkpoint_heavy,
    host.cpu_quota,
    host.cpu_contention,
    host.threads_oversubscribed,
    overhead.costly_restarts,
    # GPUs
    gpu.gpu_clocks_low,
    gpu.gpu_shared,
    gpu.idle_gpus,
    gpu.gpu_not_used,
    gpu.gpu_errors,
    # about to fail
    host.hung,
    host.empty_input,
    host.storage_errors,
    host.disk_nearly_full,
    learning.bad_images,
)
RULES = tuple((find_cause(rule.__name__), rule) for rule in _RULES)

CATALOG: dict[str, Cause] = {cause.id: cause for cause, _ in RULES}


def catalog_hash() -> str:
    """12 hex digits of the SHA-256 of all causes and common thresholds: equal hashes mean equal thresholds."""
    data = {"causes": sorted(CATALOG.values(), key=lambda cause: cause.id), "common": COMMON_THRESHOLDS}
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:12]
