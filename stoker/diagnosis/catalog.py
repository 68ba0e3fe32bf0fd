"""All causes and their rules, in one list. What ended a job is in `endings.py`.

Each file of `causes/` has rules, `knowledge/causes.toml` their rows; here they are collected, without a registry.
"""

import hashlib
from collections.abc import Callable

import msgspec

from stoker.diagnosis.causes import (
    anchors_miss_boxes,
    augmentation_heavy,
    bad_images,
    batch_too_small,
    communication,
    costly_restarts,
    cpu,
    divergence,
    exposed_h2d_copies,
    fd_limit_near,
    gpu_clocks_low,
    gpu_errors,
    gpu_memory,
    gpu_shared,
    host_bound_steps,
    host_memory,
    hung,
    idle_gpus,
    input_bound,
    learning_rate,
    overfitting,
    overhead,
    pcie_degraded,
    python_bound,
    shared_memory_small,
    slow_decode,
    slow_storage,
    storage,
    tensor_cores_unused,
    training_from_scratch,
)
from stoker.diagnosis.causes.cause import COMMON_THRESHOLDS, Cause
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

Rule = Callable[[RunRecords], Finding | None]
"""A pure function: a run's records in, a finding out. None: the cause is not there, or a record it needs is missing."""

RULES: tuple[tuple[Cause, Rule], ...] = (
    # data loading
    (input_bound.INPUT_BOUND, input_bound.input_bound),
    (slow_storage.SLOW_STORAGE, slow_storage.slow_storage),
    (slow_decode.SLOW_DECODE, slow_decode.slow_decode),
    (slow_decode.TOO_FEW_CORES, slow_decode.too_few_cores),
    (slow_decode.TOO_FEW_WORKERS, slow_decode.too_few_workers),
    (exposed_h2d_copies.EXPOSED_H2D_COPIES, exposed_h2d_copies.exposed_h2d_copies),
    # GPU under-utilized
    (python_bound.PYTHON_BOUND, python_bound.python_bound),
    (python_bound.HOST_DEVICE_SYNCS, python_bound.host_device_syncs),
    (host_bound_steps.LAUNCH_BOUND, host_bound_steps.launch_bound),
    (host_bound_steps.HOST_BOUND_STEPS, host_bound_steps.host_bound_steps),
    (batch_too_small.BATCH_TOO_SMALL, batch_too_small.batch_too_small),
    (batch_too_small.GPU_OVERSIZED, batch_too_small.gpu_oversized),
    (python_bound.RECOMPILES, python_bound.recompiles),
    # architecture and hyper-parameters, divergence
    (overhead.EVALUATION_HEAVY, overhead.evaluation_heavy),
    (learning_rate.LR_TOO_HIGH, learning_rate.lr_too_high),
    (learning_rate.LR_TOO_LOW, learning_rate.lr_too_low),
    (overfitting.OVERFITTING, overfitting.overfitting),
    (augmentation_heavy.AUGMENTATION_HEAVY, augmentation_heavy.augmentation_heavy),
    (anchors_miss_boxes.ANCHORS_MISS_BOXES, anchors_miss_boxes.anchors_miss_boxes),
    (training_from_scratch.TRAINING_FROM_SCRATCH, training_from_scratch.training_from_scratch),
    (tensor_cores_unused.TENSOR_CORES_UNUSED, tensor_cores_unused.tensor_cores_unused),
    (divergence.NON_FINITE_LOSS, divergence.non_finite_loss),
    (divergence.UNSTABLE_TRAINING, divergence.unstable_training),
    # memory and other limits
    (gpu_memory.GPU_MEMORY_NEAR_LIMIT, gpu_memory.gpu_memory_near_limit),
    (gpu_memory.GPU_MEMORY_LEAK, gpu_memory.gpu_memory_leak),
    (host_memory.HOST_MEMORY_NEAR_LIMIT, host_memory.host_memory_near_limit),
    (host_memory.HOST_MEMORY_LEAK, host_memory.host_memory_leak),
    (shared_memory_small.SHARED_MEMORY_SMALL, shared_memory_small.shared_memory_small),
    (fd_limit_near.FD_LIMIT_NEAR, fd_limit_near.fd_limit_near),
    # communication
    (communication.STRAGGLER, communication.straggler),
    (communication.COMMUNICATION_BOUND, communication.communication_bound),
    (pcie_degraded.PCIE_DEGRADED, pcie_degraded.pcie_degraded),
    # allocation and scheduling
    (overhead.STARTUP_HEAVY, overhead.startup_heavy),
    (overhead.CHECKPOINT_HEAVY, overhead.checkpoint_heavy),
    (cpu.CPU_QUOTA, cpu.cpu_quota),
    (cpu.CPU_CONTENTION, cpu.cpu_contention),
    (cpu.THREADS_OVERSUBSCRIBED, cpu.threads_oversubscribed),
    (costly_restarts.COSTLY_RESTARTS, costly_restarts.costly_restarts),
    # GPUs
    (gpu_clocks_low.GPU_CLOCKS_LOW, gpu_clocks_low.gpu_clocks_low),
    (gpu_shared.GPU_SHARED, gpu_shared.gpu_shared),
    (idle_gpus.IDLE_GPUS, idle_gpus.idle_gpus),
    (idle_gpus.GPU_NOT_USED, idle_gpus.gpu_not_used),
    (gpu_errors.GPU_ERRORS, gpu_errors.gpu_errors),
    # about to fail
    (hung.HUNG, hung.hung),
    (hung.EMPTY_INPUT, hung.empty_input),
    (storage.STORAGE_ERRORS, storage.storage_errors),
    (storage.DISK_NEARLY_FULL, storage.disk_nearly_full),
    (bad_images.BAD_IMAGES, bad_images.bad_images),
)

CATALOG: dict[str, Cause] = {cause.id: cause for cause, _ in RULES}


def catalog_hash() -> str:
    """12 hex digits of the SHA-256 of all causes and common thresholds: equal hashes mean equal thresholds."""
    data = {"causes": sorted(CATALOG.values(), key=lambda cause: cause.id), "common": COMMON_THRESHOLDS}
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:12]
