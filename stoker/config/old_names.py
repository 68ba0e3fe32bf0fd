"""Names that stoker wrote before 0.2 (settings, record fields, checkpoint keys), and what they are called now.

Runs, checkpoints, model files and `config.toml` of older versions stay readable for one release: their readers pass
what they read through this module. Only new names are written. Flags that users of other tools type are not here:
`stoker/cli/flag_names.py`.
"""

import re
from typing import Any, TypeVar

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)

SETTINGS = {
    "max_bad": "max_bad_fraction",
    "canvas": "image_size",
    "flip": "hflip",
    "crop": "scale_jitter_prob",
    "zoom": "scale_range",
    "overlap": "min_object_covered",
    "norm": "backbone_norm",
    "trainable_stages": "trainable_backbone_layers",
    "anchor_ratios": "aspect_ratios",
    "foreground_iou": "fg_iou_thresh",
    "background_iou": "bg_iou_thresh",
    "tail": "reduced_tail",
    "checkpoint_activations": "activation_checkpointing",
    "rate": "lr",
    "backbone_rate": "backbone_lr_mult",
    "schedule": "lr_scheduler",
    "warmup": "warmup_steps",
    "clip": "clip_grad_norm",
    "ema": "ema_decay",
    "accumulate": "grad_accum_steps",
    "max_skipped": "max_skipped_steps",
    "for": "max_duration",
    "for_": "max_duration",
    "batch": "batch_size",
    "fit": "auto_batch",
    "eager": "compile",
    "threads": "workers",
    "decoder": "jpeg_decoder",
    "price": "price_per_device_hour",
}
"""Setting → its name now."""

ADDED_SETTINGS: dict[str, tuple[Any, str]] = {
    "allow_outside": (True, "the run was started by a version that read such files"),
    "cuda_graph": (False, "the run was started by a version without this setting"),
    "shard": (False, "the run was started by a version without this setting"),
    "stages": (1, "the run was started by a version without this setting"),
    "sync": ("plain", "the run was started by a version without this setting"),
    "worker_processes": ("auto", "the run was started by a version without this setting; it changes no result"),
    "shuffle_buffer": (0, "the run was started by a version that had the random order only"),
    "split_method": ("hash", "the run was started by a version that drew the validation images so"),
    "max_bad_boxes": (1.0, "the run was started by a version without this limit"),
}
"""Setting that a run of an older version lacks → the value that it trained with, and the reason to record."""

_VALUES: dict[str, dict[Any, Any]] = {
    "augment": {"recipe": "default"},
    "norm": {"frozen": "frozen_bn", "train": "bn", "sync": "sync_bn"},
    "schedule": {"step": "multistep"},
    "tail": {"half": True, "full": False},
    "eager": {True: False, False: True},
    "threads": {0: "auto"},
    "cache": {"memory": "ram"},
    "decoder": {"host": "cpu"},
}
"""Setting by its old name → old value → value now; values that are not listed stay."""

_STEP_WINDOW = {
    "pictures": "num_images",
    "rate": "lr",
    "skipped": "skipped_steps",
    "starved": "host_bound_steps",
    "cpu": "thread_cpu_s",
    "input": "input_wait_stages",
    "steps": "window_steps",
}
_GPU_SAMPLE = {"utilisation": "utilization", "memory_utilisation": "memory_utilization"}
_DEVICE_SAMPLE = {
    "handles": "open_fds",
    "handles_limit": "max_fds",
    "cores": "cpu_limit_cores",
    "cpu": "cpu_core_utilization",
}
_FINDING = {"lost_money": "lost_cost", "verified": "probe_result", "patch": "config_patch"}
_IMAGE_EVALUATION = {
    "row": "image_index",
    "span": "byte_range",
    "right": "tp",
    "wrong": "fp",
    "not_found": "fn",
    "true_boxes": "gt_boxes",
    "found_boxes": "detections",
    "left_out": "truncated_boxes",
}

FIELDS: dict[str, dict[str, str]] = {
    "StepWindow": _STEP_WINDOW,
    "TraceWindow": {"tensor_core_share": "tensor_core_fraction", "steps": "window_steps"},
    "Gap": {"took_s": "duration_s", "host": "host_op"},
    "StackWindow": {"main": "main_thread"},
    "Probe": {"what": "probe"},
    "GpuSample": _GPU_SAMPLE,
    "DeviceSample": _DEVICE_SAMPLE,
    "Quarantined": {"row": "image_index", "position": "sample_position"},
    "Evidence": {"place": "source"},
    "Finding": _FINDING,
    "ClassEvaluation": {
        "right": "tp",
        "mistakes": "error_types",
        "right_scores": "tp_scores",
        "wrong_scores": "fp_scores",
    },
    "ConfusionPair": {"true": "gt_label", "found": "pred_label"},
    "GroundTruthBox": {"found": "detected"},
    "DetectionBox": {"mistake": "error_type"},
    "ImageEvaluation": _IMAGE_EVALUATION,
    "LeaseHolder": {
        "who": "user",
        "started": "process_start",
        "renewed_s": "renew_time",
        "valid_s": "lease_duration_s",
    },
    "Manifest": {"sound": "healthy", "slowed": "rollbacks"},
    "ModelMetadata": {"canvas": "image_size"},
    "Metrics": {"pictures": "num_images"},
}
"""Record struct → field → its name now."""

_NESTED: dict[str, dict[str, str]] = {
    "DeviceSample": {"gpus": "GpuSample"},
    "TraceWindow": {"gaps": "Gap"},
    "Finding": {"evidence": "Evidence"},
    "Evaluation": {
        "metrics": "Metrics",
        "classes": "ClassEvaluation",
        "confusions": "ConfusionPair",
        "worst": "ImageEvaluation",
        "best": "ImageEvaluation",
    },
    "ImageEvaluation": {"gt_boxes": "GroundTruthBox", "detections": "DetectionBox"},
}
"""Record struct → field (by its name now) → its struct, or that of the items of a list."""

MEASURE_ARGUMENTS = {"price": "price_per_device_hour", "pictures": "num_images", "images": "num_images"}
"""Argument of `stoker.measure` and `m.step` → its name now."""
MEASURE_METHODS = {
    "part_of_step": "micro_step",
    "count_step": "count_steps",
    "see": "count_batch",
    "took": "batch_ready",
    "charge": "attribute",
    "picture_count": "image_count",
}
"""Method or attribute of the object of `stoker.measure` → its name now."""

EVENT_KINDS = {
    "note": "info",
    "checkpoint": "checkpoint_saved",
    "slowed": "rolled_back",
    "rate_too_high": "lr_too_high",
    "rate_too_low": "lr_too_low",
}
_EVENT_DATA = {
    "usual": "baseline",
    "try": "suggested_lr",
    "back_to": "rollback_step",
    "rate": "lr",
    "watched": "coverage",
    "price": "price_per_device_hour",
    "pictures": "num_images",
    "pixels_median": "median_pixels",
    "began": "start_ticks",
    "of_alert": "alert_delivery",
    "elsewhere": "other_device",
}
"""Key of an event's `data`, or of a table in it → its name now."""

PROBES = {
    "twice_the_batch": "double_batch",
    "no_exchange": "no_allreduce",
    "fewer_threads": "fewer_workers",
    "more_threads": "more_workers",
}
CAUSES = {
    "witnesses_disagree": "telemetry_mismatch",
    "rate_too_high": "lr_too_high",
    "rate_too_low": "lr_too_low",
    "rate_lowered": "unstable_training",
    "pictures_too_large": "slow_decode",
    "copies_exposed": "exposed_h2d_copies",
    "host_waits": "host_device_syncs",
    "starved_inside_steps": "host_bound_steps",
    "too_few_threads": "too_few_workers",
    "scratch_on_few_pictures": "training_from_scratch",
    "quarantined_pictures": "bad_images",
    "loss_not_finite": "non_finite_loss",
    "handles_run_out": "fd_limit_near",
    "gpu_memory_grows": "gpu_memory_leak",
    "job_says_no_steps": "no_step_output",
    "idle_by_intent": "intentional_idle",
    "weights_unsuitable": "training_from_scratch",
    "gpu_underfilled": "gpu_oversized",
    "network_saturated": "slow_storage",
    "gpu_memory_unused": "gpu_oversized",
    "gpu_memory_fragmented": "gpu_memory_near_limit",
    "memory_pressure": "host_memory_near_limit",
    "processes_killed_for_memory": "host_memory_near_limit",
    "steps_skipped": "unstable_training",
    "loss_spikes": "unstable_training",
    "checkpoint_disk_slow": "checkpoint_heavy",
    "work_lost_to_restarts": "costly_restarts",
    "frequent_restarts": "costly_restarts",
    "gpu_hot": "gpu_clocks_low",
    "gpu_power_capped": "gpu_clocks_low",
    "gpu_clock_low": "gpu_clocks_low",
    "gpu_memory_errors": "gpu_errors",
    "checkpoints_failed": "storage_errors",
    "end_not_told": "exit_code_unknown",
    "no_last_word": "ended_without_record",
    "bucket_refused": "bucket_access_denied",
    "gpu_taken": "gpu_memory_in_use",
    "host_memory_killed": "oom_killed",
    "host_memory_exhausted": "host_out_of_memory",
    "path_wrong": "path_not_found",
    "config_typo": "unknown_config_key",
}
CACHE_FOLDER = "pictures"
"""Folder of the decoded images in the cache folder."""
ERROR_TYPES = {"localisation": "localization"}
ENVIRONMENT = {"handles_limit": "max_fds", "board": "system_vendor"}

ALERT_QUANTITIES = {
    "silence": "seconds_since_step",
    "rate": "lr",
    "skipped": "skipped_steps",
    "gpu_utilisation": "gpu_utilization",
    "cpu_withheld": "cpu_throttled",
    "handles": "open_fds",
}
"""Quantity of an alert rule → its name now."""

_CHECKPOINT_STATE = {
    "stepper": "optimizer_step",
    "stale": "evals_since_best",
    "unscored": "pending_eval",
    "streak": "skipped_streak",
    "slowed": "rollbacks",
}
_FINGERPRINT = {"pictures": "num_images", "slots": "max_boxes"}
_DETECTIONS = {"row": "image_index", "pictures": "image_indices"}

_OLD_KEYS = {
    name: re.compile(rb'"(?:' + b"|".join(sorted(key.encode() for key in keys)) + rb')":')
    for name, keys in FIELDS.items()
}


def setting(name: str, value: Any) -> tuple[str, Any]:
    """A setting's name and value as they are now, from those of any version."""
    values = _VALUES.get(name, {})
    if not isinstance(value, (str, bool, int)) or isinstance(value, bool) != any(isinstance(v, bool) for v in values):
        values = {}
    return SETTINGS.get(name, name), values.get(value, value) if values else value


def settings(table: dict[str, Any]) -> dict[str, Any]:
    """A table of config.toml, or the settings in a model file's header, with the names and values of now."""
    return dict(setting(name, value) for name, value in table.items())


def has_old_fields(struct: str, line: bytes) -> bool:
    """Whether a JSON text of a record may have a field by an old name. Fast: most lines have none."""
    if struct == "Event":
        return True
    names = [struct, *_NESTED.get(struct, {}).values()]
    return any(pattern.search(line) is not None for name in names if (pattern := _OLD_KEYS.get(name)) is not None)


def decode(data: bytes, kind: type[Struct]) -> Struct:
    """A record from its JSON, whichever version wrote it.

    Raises msgspec.DecodeError (not JSON) or its subclass ValidationError (not a `kind`).
    """
    if not has_old_fields(kind.__name__, data):
        return msgspec.json.decode(data, type=kind)
    return msgspec.convert(record(kind.__name__, msgspec.json.decode(data)), kind)


def record(struct: str, value: Any) -> Any:
    """A decoded record (a dict by field) with the field names of now, in nested records as well."""
    if not isinstance(value, dict):
        return value
    fields = FIELDS.get(struct, {})
    renamed = {fields.get(key, key) if fields.get(key) not in value else key: item for key, item in value.items()}
    for key, inner in _NESTED.get(struct, {}).items():
        if isinstance(renamed.get(key), list):
            renamed[key] = [record(inner, item) for item in renamed[key]]
        elif isinstance(renamed.get(key), dict):
            renamed[key] = record(inner, renamed[key])
    if struct == "Event":
        renamed["kind"] = EVENT_KINDS.get(renamed.get("kind", ""), renamed.get("kind"))
        if isinstance(renamed.get("data"), dict):
            renamed["data"] = _event_data(renamed["data"])
    elif struct == "Probe":
        renamed["probe"] = PROBES.get(renamed.get("probe", ""), renamed.get("probe"))
    elif struct == "Finding":
        renamed["cause"] = CAUSES.get(renamed.get("cause", ""), renamed.get("cause"))
        if isinstance(renamed.get("config_patch"), dict):
            renamed["config_patch"] = settings(renamed["config_patch"])
    elif struct == "ClassEvaluation" and isinstance(renamed.get("error_types"), dict):
        renamed["error_types"] = {ERROR_TYPES.get(key, key): n for key, n in renamed["error_types"].items()}
    elif struct == "DetectionBox":
        renamed["error_type"] = ERROR_TYPES.get(renamed.get("error_type", ""), renamed.get("error_type"))
    elif struct == "ModelMetadata" and isinstance(renamed.get("settings"), dict):
        renamed["settings"] = settings(renamed["settings"])
    return renamed


def _event_data(data: dict[str, Any]) -> dict[str, Any]:
    renamed = {_EVENT_DATA.get(key, key): value for key, value in data.items()}
    for key in ("facts", "job", "metrics"):
        if isinstance(renamed.get(key), dict):
            renamed[key] = _event_data(renamed[key])
    return renamed


def environment(table: dict[str, Any]) -> dict[str, Any]:
    """environment.json with the keys of now."""
    return {ENVIRONMENT.get(key, key): value for key, value in table.items()}


def checkpoint_state(state: dict[str, Any]) -> dict[str, Any]:
    """The tree of a checkpoint's state.pt with the keys of now."""
    renamed = {_CHECKPOINT_STATE.get(key, key): value for key, value in state.items()}
    if isinstance(renamed.get("data"), dict):
        renamed["data"] = {_FINGERPRINT.get(key, key): value for key, value in renamed["data"].items()}
    pending = renamed.get("pending_eval")
    if isinstance(pending, dict) and "found" in pending:
        columns = {_DETECTIONS.get(key, key): value for key, value in pending["found"].items()}
        renamed["pending_eval"] = {"step": pending["step"], "detections": columns, "weights": pending["weights"]}
    return renamed
