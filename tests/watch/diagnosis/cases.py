"""For each cause of the catalog and each note: a run that has it, and a similar run that does not."""

from typing import Any

from stoker_watch.runs.schemas import Place
from tests.watch.diagnosis.built import FACTS, GIB, MIB, NATIVE_CONFIG, T0

Case = dict[str, Any]

DECODING = {"decode": 0.9, "queue": 0.1}
FETCHING = {"fetch": 0.9, "queue": 0.1}


def _host(**fields: Any) -> Case:
    return {"host": lambda _: fields}


def _gpu(**fields: Any) -> Case:
    return {"gpus": 1, "gpu": lambda *_: fields}


def _growing(name: str, first: float, per_s: float) -> Case:
    return {"host": lambda second: {name: int(first + per_s * second)}}


def _flattening(name: str, first: float, most: float) -> Case:
    return {"host": lambda second: {name: int(first + most * (1 - 0.9**second))}}


def _wait(fraction: float, stages: dict[str, float] | None = None, **more: Any) -> Case:
    return {"fractions": {"input_wait": fraction}, "stages": stages} | more


def _external(**more: Any) -> Case:
    return {"external": True, "config": None, "fractions": {"unattributed": 1.0}, "num_images": 0} | more


def _measured(**more: Any) -> Case:
    return {"config": None} | more


def _event(kind: str, times: int = 1, **data: Any) -> Case:
    return {"events": [(kind, f"event {kind}", data)] * times}


def _evaluated(*aps: float, t: float = T0) -> Case:
    """One every 5 s, from t on."""
    return {
        "events": [("evaluated", "", {"metrics": {"ap": ap}}) for ap in aps],
        "event_t": lambda n: t + 10 + 5 * n,
    }


def _config(old: str, new: str) -> Case:
    assert old in NATIVE_CONFIG
    return {"config": NATIVE_CONFIG.replace(old, new)}


def _places(call: str, samples: int, role: str = "training") -> list[dict[str, Any]]:
    """Of 100 samples of each ten seconds those in one call; in every other line for a worker."""
    kind = "other" if role == "worker" else "python"
    place = Place(line="train.py:53", function="train", call=call, kind=kind, samples=samples)
    rest = Place(line="train.py:50", function="train", kind="compute", samples=100 - samples)
    rest = Place(kind="idle", samples=100 - samples) if role == "worker" else rest
    main_thread = {"python": samples / 100, "compute": 1 - samples / 100}
    lines = ([place, rest], [rest]) if role == "worker" else ([place, rest],) * 2
    return [
        {"t": T0 + 16 + 10 * n, "role": role, "places": lines[n % 2], "main_thread": main_thread,
         "samples": sum(item.samples for item in lines[n % 2])}
        for n in range(3)
    ]  # fmt: skip


def _parsing(call: str) -> Case:
    """A job whose loader workers are in one call all the time, for which the training waits."""
    place = Place(line="data.py:9", function="__getitem__", call=call, kind="python", samples=100)
    stacks = [{"t": T0 + 16 + 10 * n, "role": "worker", "places": [place], "samples": 100} for n in range(3)]
    return _external(fractions={"input_wait": 0.4}, stacks=stacks)


FETCHED = {"phases": {"compute": 0.6, "input_wait": 0.4}, "input_wait_stages": {"fetch": 0.4}}
BUSY = {"cpu_core_utilization": [0.95] * 4, "process_cpu": 3.8}
FEW = {"cpu_core_utilization": [0.9, 0.1, 0.1, 0.1], "process_cpu": 1.1}
ONE_WORKER = {"config": NATIVE_CONFIG.replace('workers = "auto"', "workers = 1")}

SCRATCH = {
    "config": NATIVE_CONFIG.replace(
        'weights = "coco"\nbackbone_norm = "frozen_bn"\ntrainable_backbone_layers = 3',
        'weights = "none"\nbackbone_norm = "bn"\ntrainable_backbone_layers = 5',
    ).replace('weights = "a detector\'s own"\n', "")
}

CASES: dict[str, tuple[Case, Case]] = {
    # data loading
    "input_bound": (_wait(0.12, {"queue": 1.0}), _wait(0.08, {"queue": 1.0})),
    "slow_storage: disk": (_wait(0.3, FETCHING), _wait(0.08, FETCHING)),
    "slow_storage: saturated network": (
        _wait(0.3, FETCHING) | _host(net_received_bytes_s=115e6),
        _wait(0.09, FETCHING) | _host(net_received_bytes_s=115e6),
    ),
    "slow_decode: by stage": (_wait(0.3, DECODING), _wait(0.08, DECODING)),
    "too_few_workers": (_wait(0.3, DECODING) | ONE_WORKER | _host(**FEW), _wait(0.05, DECODING) | ONE_WORKER),
    "too_few_cores": (
        _wait(0.3, DECODING) | _host(**BUSY) | _gpu(utilization=0.69),
        _wait(0.04, DECODING, gpus=1) | _host(**BUSY),
    ),
    "slow_decode: large images": (
        _wait(0.3, DECODING, facts=FACTS | {"median_pixels": 12_000_000}),
        _wait(0.05, DECODING, facts=FACTS | {"median_pixels": 12_000_000}),
    ),
    "exposed_h2d_copies": ({"fractions": {"h2d": 0.08}, "gpus": 1}, {"fractions": {"h2d": 0.04}, "gpus": 1}),
    # GPU under-utilized
    "heavy_place": (_external(stacks=_places("copy.deepcopy", 40)), _external(stacks=_places("copy.deepcopy", 1))),
    "workers_start_again": (
        _external(fractions={"input_wait": 0.4}, stacks=_places("import torch", 40, role="worker")),
        _external(fractions={"input_wait": 0.04}, stacks=_places("import torch", 40, role="worker")),
    ),
    "python_bound": (
        _measured(fractions={"unattributed": 0.3}) | _host(process_cpu=1.0),
        _measured(fractions={"unattributed": 0.02}) | _host(process_cpu=1.0),
    ),
    "host_device_syncs": (
        _measured(fractions={"unattributed": 0.3}) | _host(process_cpu=0.72),
        {"fractions": {"sync": 0.08}},
    ),
    "launch_bound": (
        {"gpus": 1, "traces": [{"busy_s": 0.6, "kernel_median_s": 4e-6, "launches": 9000}]},
        {"gpus": 1, "traces": [{"busy_s": 0.9, "kernel_median_s": 4e-6, "launches": 9000}]},
    ),
    "host_bound_steps": (_gpu(utilization=0.6), _gpu(utilization=0.9)),
    "batch_too_small": (
        _config('batch_size = "the recipe\'s"\n', "") | {"num_images": 30, "steps": 30},
        _config('batch_size = "the recipe\'s"\n', "") | {"num_images": 6, "steps": 3},  # steps that are long
    ),
    "gpu_oversized: idle multiprocessors": (_gpu(sm_active=0.15), _gpu(sm_active=0.6)),
    "debug_mode": (
        {"facts": FACTS | {"mistakes": [{"kind": "anomaly", "place": "/job/train.py:83"}]}},
        {"facts": FACTS | {"mistakes": [{"kind": "of a later version", "place": ""}]}},
    ),
    "training_mistake": (
        {"facts": FACTS | {"mistakes": [{"kind": "old_gradients", "place": "/job/train.py:90"}]}},
        {"facts": FACTS | {"mistakes": []}},
    ),
    "recompiles": ({"fractions": {"compile": 0.2}}, {"fractions": {"compile": 0.02}}),
    # architecture and hyper-parameters, divergence
    "evaluation_heavy": (
        {"fractions": {"eval": 0.2}} | _evaluated(0.1, 0.2, 0.3, 0.4),
        {"fractions": {"eval": 0.3}} | _evaluated(0.1),
    ),
    "lr_too_high": (
        _event("lr_too_high", **{"suggested_lr": 0.003}),
        {"losses": lambda s: {"total": 2.0 - 0.02 * s + 0.1 * (s % 3)}},
    ),
    "lr_too_low": (
        {"losses": lambda _: {"total": 2.3}, "window": lambda _: {"grad_norm": 1.0, "lr": 1e-8}},
        {"losses": lambda s: {"total": 2.3 - 0.01 * s}, "window": lambda _: {"grad_norm": 1.0, "lr": 1e-8}},
    ),
    "overfitting": (_evaluated(0.2, 0.4, 0.3, 0.25, 0.2), _evaluated(0.2, 0.3, 0.4, 0.39, 0.395)),
    "augmentation_heavy": (
        _config("brightness = 0.125\ncontrast = 0.125", "brightness = 0.9\ncontrast = 0.9"),
        _config("brightness = 0.125\ncontrast = 0.125", "brightness = 0.5\ncontrast = 0.5"),
    ),
    "anchors_miss_boxes": ({"facts": FACTS | {"anchor_coverage": 0.4}}, {"facts": FACTS | {"anchor_coverage": 0.8}}),
    "training_from_scratch: few images": (
        SCRATCH | {"facts": FACTS},
        SCRATCH | {"facts": FACTS | {"num_images": 50_000}},
    ),
    "training_from_scratch: frozen layers": (_config('weights = "coco"', 'weights = "none"'), {}),
    "tensor_cores_unused": (_gpu(tensor_active=0.001), _gpu(tensor_active=0.08)),
    "unstable_training: skipped steps": (
        {"window": lambda s: {"skipped_steps": s % 2}},
        {"window": lambda s: {"skipped_steps": int(s == 20)}},
    ),
    "non_finite_loss": (
        {"losses": lambda s: {"total": 2.0} if s < 20 else {}},
        {"losses": lambda s: {"total": 2.0 - 0.02 * s} if s != 20 else {}},
    ),
    "unstable_training: rollback": (_event("rolled_back", lr=0.003), {"events": [("info", "rolled_back", {})]}),
    "unstable_training: loss spikes": (
        _event("loss_spike", 2, **{"suggested_lr": 0.003}),
        _event("loss_spike", **{"suggested_lr": 0.003}),
    ),
    # memory
    "gpu_oversized: free memory": (_gpu(memory_used_bytes=10 * GIB), _gpu(memory_used_bytes=50 * GIB)),
    "gpu_memory_leak": (
        {"gpus": 1, "gpu": lambda s, _: {"memory_used_bytes": 60 * GIB + s * 64 * MIB}},
        {"gpus": 1, "gpu": lambda s, _: {"memory_used_bytes": 60 * GIB + min(s, 15) * 64 * MIB}},
    ),
    "gpu_memory_near_limit: fragmented": (
        _gpu(memory_used_bytes=76 * GIB) | {"window": lambda _: {"memory_peak_bytes": 40 * GIB}},
        _gpu(memory_used_bytes=76 * GIB) | {"window": lambda _: {"memory_peak_bytes": 70 * GIB}},
    ),
    "gpu_memory_near_limit: allocated": (
        _gpu(memory_used_bytes=79 * GIB) | {"window": lambda _: {"memory_peak_bytes": 78 * GIB}},
        _gpu(memory_used_bytes=75 * GIB) | {"window": lambda _: {"memory_peak_bytes": 74 * GIB}},
    ),
    "host_memory_near_limit: nearly full": (
        _host(memory_used_bytes=int(14.8 * GIB)),
        _host(memory_used_bytes=13 * GIB),
    ),
    "host_memory_leak": (_growing("rss_bytes", 2e9, 5e6), _flattening("rss_bytes", 2e9, 4e8)),
    "host_memory_leak: a stair in each epoch": (
        {"host": lambda s: {"rss_bytes": 2 * GIB + 200 * MIB * (s // 10)}},
        {"host": lambda s: {"rss_bytes": 2 * GIB + 200 * MIB * (s > 15)}},
    ),
    "host_memory_near_limit: pressure": (_host(psi_memory=0.2), _host(psi_memory=0.05)),
    "host_memory_near_limit: a killed attempt": (
        _event("resumed", restart={"number": 1, "oom_kills": 1}),
        _event("resumed", restart={"number": 1, "oom_kills": 0}),
    ),
    "host_memory_near_limit: killed processes": ({"host": lambda s: {"oom_kills": int(s == 20)}}, _host(oom_kills=0)),
    "shared_memory_small": (
        _host(shm_used_bytes=60 * MIB, shm_total_bytes=64 * MIB),
        _host(shm_used_bytes=10 * MIB, shm_total_bytes=64 * MIB),
    ),
    "fd_limit_near": (_host(open_fds=900), _host(open_fds=700)),
    # communication
    "straggler": (
        {"fractions": {"comm": 0.4}, "ranks": [{"comm": 0.02}]},
        {"fractions": {"comm": 0.06}, "ranks": [{"comm": 0.05}]},
    ),
    "communication_bound": (
        {"fractions": {"comm": 0.3}, "ranks": [{"comm": 0.3}]},
        {"fractions": {"comm": 0.06}, "ranks": [{"comm": 0.06}]},
    ),
    "pcie_degraded": (
        _gpu(pcie_width=4),
        {
            "gpus": 1,
            "gpu": lambda s, _: {"pcie_generation": 1} | ({"utilization": 0.0} if s < 10 else {"pcie_generation": 5}),
        },
    ),
    # allocation and scheduling
    "startup_heavy": ({"startup": 70}, {"startup": 50}),
    "checkpoint_heavy: number": (
        {"fractions": {"checkpoint": 0.2}} | _event("checkpoint_saved", 5),
        {"fractions": {"checkpoint": 0.2}} | _event("checkpoint_saved", 1),
    ),
    "checkpoint_heavy: slow disk": (
        {"fractions": {"checkpoint": 0.2}} | _event("checkpoint_saved", 5) | _host(psi_io=0.3),
        {"fractions": {"checkpoint": 0.03}} | _event("checkpoint_saved", 5) | _host(psi_io=0.3),
    ),
    "cpu_quota": (_host(throttled_s=1.0), _host(throttled_s=0.05)),
    "cpu_contention": (
        _host(cpu_core_utilization=[0.97] * 4, process_cpu=1.8, threads_running=3.0, busiest_processes={"busy": 2.0}),
        _host(
            cpu_core_utilization=[0.97] * 4, process_cpu=1.8, threads_running=1.9
        ),  # a busy neighbor, and enough cores for both
    ),
    "cores_bound": (
        _host(bound_cores=1, unbound_cores=4, threads_running=2.0, process_cpu=0.97),
        _host(bound_cores=1, unbound_cores=4, threads_running=1.0, process_cpu=0.97),  # one core is all that they need
    ),
    "cores_bound: to half of them": (
        _host(bound_cores=2, unbound_cores=4, threads_running=4.0, process_cpu=1.97),
        _host(bound_cores=3, unbound_cores=4, threads_running=4.0, process_cpu=2.97),
    ),
    "threads_oversubscribed": (_host(threads_running=20.0), _host(threads_running=9.0)),
    "threads_oversubscribed: by turns": (
        _host(threads_running=9.0, threads_active=64, process_cpu=4.0),
        _host(threads_running=7.0, threads_active=64, process_cpu=4.0),  # they sleep, and hardly wait for cores
    ),
    "threads_oversubscribed: few of them": (
        _host(threads_running=9.0, threads_active=20, process_cpu=4.0),
        _host(threads_running=9.0, threads_active=19, process_cpu=4.0),
    ),
    "idle_gpus": (
        {"gpus": 2, "gpu": lambda _, n: {} if n == 0 else {"utilization": 0.0, "memory_used_bytes": 0}},
        {"gpus": 2},
    ),
    "gpu_shared": (_gpu(other_processes=1), {"gpus": 1, "gpu": lambda s, _: {"other_processes": int(s == 20)}}),
    "gpu_clocks_low: heat": (_gpu(throttle_reasons=0x24, sm_clock_mhz=1300), _gpu(throttle_reasons=0x4)),
    "gpu_clocks_low: power limit": (_gpu(sm_clock_mhz=1200), _gpu(sm_clock_mhz=1750)),
    "gpu_clocks_low: set clock": (
        _gpu(sm_clock_mhz=1000, throttle_reasons=0x2),
        _gpu(sm_clock_mhz=1800, throttle_reasons=0x2),
    ),
    "costly_restarts: lost work": ({"fractions": {"recovery": 0.1}}, {"fractions": {"recovery": 0.01}}),
    "costly_restarts: many": ({"attempts": 5, "seconds": 12}, {"attempts": 3, "seconds": 12}),
    # observability gaps
    "gpu_not_used": (
        {
            "gpus": 2,
            "gpu": lambda *_: {"utilization": 0.0, "memory_used_bytes": 0},
            "config": None,
            "external": True,
            "fractions": {"unattributed": 0.4},
        },
        {"gpus": 2},
    ),
    # about to fail
    "hung": (
        {"silent": 60, "end": None, "host": lambda s: {"process_cpu": 0.01} if s > 44 else {}},
        {"silent": 60, "end": None},
    ),  # the cores are busy: perhaps an evaluation
    "empty_input": (
        _external(seconds=0, startup=60, losses=None, end=None) | _event("warning", empty_inputs=["/data/a.tfrecord"]),
        _external(end=None) | _event("warning", empty_inputs=["/data/a.tfrecord"]),  # it does steps nevertheless
    ),
    "storage_errors: failed checkpoint": (_event("checkpoint_failed"), _event("checkpoint_saved")),
    "disk_nearly_full": (_host(disk_free_bytes=400 * MIB), _host(disk_free_bytes=3 * GIB)),
    "storage_errors: warnings": (
        _event("warning", 3, storage=True),
        {"events": [("warning", "the disk is odd", {})] * 3},
    ),
    "gpu_errors: Xid": ({"gpus": 1, "gpu": lambda s, _: {"xids": [79]} if s == 20 else {}}, {"gpus": 1}),
    "gpu_errors: ECC": (
        {"gpus": 1, "gpu": lambda s, _: {"ecc_uncorrected": 1} if s > 20 else {}},
        _gpu(ecc_corrected=10**6),
    ),
    "bad_images": ({"quarantined": ["a.jpg"]}, {"quarantined": []}),
}
"""Cause (`cause: reason` if a cause has several) → (a run that has it, a similar run that does not)."""

NOTE_CASES: dict[str, tuple[Case, Case]] = {
    "cold_cache": (
        {
            "facts": FACTS,
            "num_images": 40,
            "steps": 4,
            "seconds": 40,
            "stages": FETCHING,
            "window": lambda s: FETCHED if s < 16 else {},
        },
        {
            "facts": FACTS | {"num_images": 10**6},
            "num_images": 40,
            "steps": 4,
            "seconds": 40,
            "window": lambda s: FETCHED if s < 8 else {},
        },
    ),
    "intentional_idle": ({"fractions": {"idle": 0.2}}, {"fractions": {"idle": 0.02}}),
    "unattributed_time": ({"fractions": {"unattributed": 0.15}}, {"fractions": {"unattributed": 0.02}}),
    "telemetry_mismatch": (
        {
            "gpus": 1,
            "fractions": {"idle": 0.04, "unattributed": 0.02, "host": 0.08, "input_wait": 0.04},
            "window": lambda _: {"phases": {"compute": 0.55, "host": 0.09, "unattributed": 0.36}},
        },
        {"gpus": 1, "fractions": {"host": 0.09}},
    ),
    "no_telemetry": (
        {"config": NATIVE_CONFIG.replace("DEVICE", "cuda"), "window": lambda _: {"wall_s": 100.0}},
        {"config": NATIVE_CONFIG.replace("DEVICE", "cuda")},
    ),
    "no_step_output": (_external(seconds=0, startup=130, losses=None), _external(seconds=0, startup=100)),
    "hardly_begun": ({"facts": FACTS | {"usual_steps": 100_000}}, {"facts": FACTS | {"usual_steps": 100}}),
    "predicted_step": (
        {"facts": FACTS | {"predicted_step_s": 0.1, "predicted_step_error": 0.25}},
        {"facts": FACTS | {"predicted_step_s": 0.1}},
    ),
    "damaged_events": (
        {"facts": FACTS | {"predicted_step_s": "soon"}},
        {"facts": FACTS | {"of_a_later_version": "soon"}},
    ),
}
"""Note → (a run that has it, a similar run that does not)."""

ALSO_FOUND: dict[str, set[str]] = {
    "non_finite_loss": {"lr_too_low"},
    "hung": {"ended_without_record"},
    "empty_input": {"ended_without_record"},
}
"""Cause → others that the same records also have."""

HEALTHY: dict[str, Case] = {
    "native on a CPU": {"facts": FACTS},
    "native on a GPU": {"facts": FACTS, "gpus": 1, "fractions": {"input_wait": 0.02, "eval": 0.05, "host": 0.01}},
    "native on two ranks": {"fractions": {"comm": 0.05}, "ranks": [{"comm": 0.06}]},
    "native, short, with one evaluation and one checkpoint": {
        "seconds": 12,
        "fractions": {"eval": 0.3, "checkpoint": 0.1},
        "events": [("checkpoint_saved", "", {}), ("evaluated", "", {"metrics": {"ap": 0.1}})],
    },
    "measured": _measured(fractions={"unattributed": 0.01}),
    "measured, nothing to learn": _measured(
        fractions={"unattributed": 0.02},
        losses=lambda s: {"total": 2.3 + 0.01 * (s % 2)},
        window=lambda _: {"grad_norm": None},
    ),
    "a training thread that prepares small batches": _external(
        fractions={"input_wait": 0.2},
        window=lambda _: {"thread_cpu_s": {"compute": 0.75, "input_wait": 0.19}},
        stacks=[{"main_thread": {"compute": 1.0}, "samples": 5}],
        host=lambda _: {"process_cpu": 0.95},
    ),
    "TensorFlow, whose threads compute while the main thread waits": _external(
        fractions={"host": 0.3},
        window=lambda _: {"thread_cpu_s": {"compute": 0.05, "host": 0.02}},
        stacks=[{"main_thread": {"other": 0.5, "idle": 0.5}, "samples": 20}] * 2,
    ),
    "TensorFlow without telemetry": _external(
        fractions={"host": 0.3},
        window=lambda _: {"thread_cpu_s": {"compute": 0.05, "host": 0.02}},
        stacks=[{"main_thread": {"other": 0.5, "idle": 0.5}, "samples": 20}] * 2,
        host=lambda _: {"process_cpu": None, "cpu_core_utilization": [], "threads_running": None},
    ),
    "two ranks on a CPU, and their launcher": _external(
        fractions={"comm": 0.15},
        ranks=[{"comm": 0.15}],
        window=lambda _: {"thread_cpu_s": {"compute": 0.83}},
        stacks=[
            {"pid": 6, "main_thread": {"idle": 1.0}, "samples": 20},
            {"main_thread": {"compute": 1.0}, "samples": 20},
        ],
    ),
    "callbacks of a framework between very short steps": _external(
        fractions={"host": 0.2},
        steps=100,
        window=lambda _: {"thread_cpu_s": {"compute": 0.75, "host": 0.2}},
        stacks=[{"main_thread": {"compute": 0.8, "python": 0.2}, "samples": 50}] * 2,
        host=lambda _: {"process_cpu": 0.95},
    ),
    "12 steps and an evaluation": _external(
        seconds=24,
        steps=1,
        window=lambda s: {"window_steps": 0, "phases": {"eval": 1.0}} if 13 <= s < 22 else {"window_steps": 1},
    ),
    "an evaluation and a checkpoint after the last step": _external(
        fractions={},
        window=lambda s: {"window_steps": 0, "phases": {"eval": 0.5, "checkpoint": 0.5}} if s > 36 else {},
    ),
    "a loss that has not fallen yet, or cannot": _external(
        losses=lambda s: {"total": 2.303 + 0.001 * (s % 3)}, window=lambda _: {"grad_norm": 0.5}
    ),
    "a warm-up of the learning rate": _external(
        losses=lambda _: {"total": 2.303}, window=lambda s: {"lr": 1e-8 * s, "grad_norm": 0.5}
    ),
    "a loss that rises by little after it fell": _external(
        losses=lambda s: {"total": 2.0 * 0.8**s + (0.1 if s < 25 else 0.4)}
    ),
    "an evaluation function that is compiled once": _external(
        window=lambda s: {"phases": {"compute": 0.1, "compile": 0.9}} if s in (20, 21, 22) else {}, fractions={}
    ),
    "loader workers that other processes delay": _external(
        fractions={"input_wait": 0.3},
        window=lambda _: {"thread_cpu_s": {"compute": 0.3, "input_wait": 0.01}},
        host=lambda _: {"cpu_core_utilization": [1.0] * 4, "process_cpu": 1.8, "threads_running": 3.4},
        events=[("info", "the job's loader has 2 worker processes", {"workers": 2})],
    ),
    "threads that wait because other processes use the cores": _external(
        host=lambda _: {"cpu_core_utilization": [1.0] * 4, "process_cpu": 0.8, "threads_running": 14.0},
    ),
    "external, seen from inside": _external(fractions={"input_wait": 0.03, "host": 0.02}, num_images=128),
    "external, seen from outside": _external(),
    "external on a GPU": _external(gpus=1),
    "external without steps": _external(seconds=0, startup=300),
    "just started": {"seconds": 2},
    "before its first step": {"seconds": 0},
    "died after three seconds of training": {"seconds": 3, "startup": 20, "fractions": {"input_wait": 0.9}},
}
