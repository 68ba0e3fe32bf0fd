"""Causes of the reason "too little parallel work": the device has pictures and is not kept busy. Data only."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold

HOST_WAIT_WARNING = 0.10
DCGM_SOURCE = (
    "NVIDIA DCGM user guide, profiling metrics: SM activity of 0.8 or more is necessary for effective use of a GPU, "
    "below 0.5 it is likely used ineffectively"
)

CAUSES = (
    Cause(
        id="python_bound",
        title="The training thread is busy with Python between steps",
        reason="too little parallel work",
        symptom="the device waits between steps, one core is at 100 %, the loader has batches ready",
        required_records=("steps.jsonl: phases.host (of stoker.measure unattributed too), or stacks.jsonl: main",),
        warning_threshold=HOST_WAIT_WARNING,
        critical_threshold=0.40,
        metric="host (of stoker.measure with unattributed), share of the device time after the start, while "
        "the process uses a core; or the share of the "
        "main thread's stacks in Python",
        source="our judgment: a healthy loop issues its steps ahead of the device and shows under 2 %",
        thresholds={
            "busy": Threshold(
                0.6,
                "cores' worth of processor time of the process, below which its thread waits instead "
                "of computing (our judgment)",
            )
        },
        supersedes=("host_bound_steps", "launch_bound", "unattributed_time"),
        probe="compiled",
        confidence=0.75,
        fix="Take work out of the loop: encode targets in the loader's workers, log every 50 steps, vectorise; the "
        "evidence names the lines; py-spy top shows more",
    ),
    Cause(
        id="host_device_syncs",
        title="The training thread waits in each step",
        reason="too little parallel work",
        symptom="device and cores rest together: .item(), a print of the loss, a service that is asked in each step",
        required_records=("steps.jsonl: phases.sync or host, or stacks.jsonl: main.sync",),
        warning_threshold=HOST_WAIT_WARNING,
        critical_threshold=0.40,
        metric="sync (and host, while the process uses little of a core), share of the device time after the start; "
        "or the share of the main thread's stacks in a wait for the device",
        source=HEURISTIC + ": a wait that nothing hides costs at least what it takes; twice a healthy loop's few %",
        thresholds={"busy": Threshold(0.6, "as python_bound: above, its thread computes")},
        supersedes=("host_bound_steps", "unattributed_time"),
        confidence=0.75,
        fix="Keep losses on the device and read them once a second; log in a thread of its own; no .item(), .cpu() or "
        "print in a step",
    ),
    Cause(
        id="launch_bound",
        title="Kernels are too short for the host to keep up",
        reason="too little parallel work",
        symptom="thousands of kernels of a few microseconds, and gaps between them, all through the step",
        required_records=("traces.jsonl: busy_s, kernel_median_s, launches",),
        warning_threshold=0.20,
        critical_threshold=0.50,
        metric="share of a traced step without any work on the device, where the median kernel is short",
        source="our judgment, on the cost of a launch: 3 to 10 µs of the host (CUDA programming guide, CUDA graphs)",
        thresholds={"kernel_s": Threshold(10e-6, "median length of a kernel: as long as launching it takes the host")},
        supersedes=("host_bound_steps",),
        probe="compiled",
        confidence=0.8,
        fix="Fewer and larger kernels: --compile (torch.compile, CUDA graphs), a larger --batch-size, channels-last and "
        "bf16, fused optimizers",
        external_fix="Fewer and larger kernels: torch.compile(mode='reduce-overhead') or CUDA graphs, a larger "
        "batch, channels-last and bf16, fused optimizers; of TensorFlow jit_compile=True",
        command="--compile",
        config_patch={"compile": False},
    ),
    Cause(
        id="host_bound_steps",
        title="The device stands still inside steps",
        reason="too little parallel work",
        symptom="the ledger says compute, the driver says idle: kernels are too small or launched too late",
        required_records=(
            "steps.jsonl: phases",
            "devices.jsonl: gpus.utilisation of just the devices that train, or traces.jsonl",
        ),
        warning_threshold=0.20,
        metric="share of traced steps without work on the device; without traces, compute in the ledger minus the "
        "driver's utilisation",
        source="our judgment: the driver's sample period of 1/6 to 1 s (NVML manual, nvmlDeviceGetUtilizationRates) "
        "blurs less than this over a run",
        probe="twice_the_batch",
        confidence=0.6,
        fix="Give each step more work: a larger --batch-size or --image-size, or --compile",
        external_fix="Give each step more work: a larger batch or larger pictures, torch.compile; of TensorFlow "
        "jit_compile=True",
        command="--compile",
        config_patch={"compile": False},
    ),
    Cause(
        id="batch_too_small",
        title="The batch is too small to fill the device",
        reason="too little parallel work",
        symptom="many short steps a second; the memory is mostly free",
        required_records=("probes.jsonl: twice_the_batch, or steps.jsonl: steps, pictures",),
        warning_threshold=0.10,
        critical_threshold=0.40,
        metric="time that twice the batch saves, of the probe; without a probe the share that a fixed cost of "
        "`overhead_s` has in a step of at most `batch` pictures",
        source="our judgment; the probe is a measurement of this run",
        thresholds={
            "batch_size": Threshold(
                2,
                "pictures in a step at most, where nothing was probed: statistics of norms and gradients "
                "are poor too (Wu and He 2018, Group Normalization, figure 1: errors rise below 8)",
            ),
            "overhead_s": Threshold(
                0.005,
                "fixed cost of a step: some 1,000 launches of 5 µs forward, backward and in the "
                "optimizer (LOG.md, step)",
            ),
            "memory": Threshold(
                0.7, "share of the memory in use above which a larger batch may not fit (our judgment)"
            ),
        },
        supersedes=("gpu_memory_unused", "low_sm_activity"),
        probe="twice_the_batch",
        confidence=0.6,
        fix="A larger --batch-size (the rate follows it when it is not set), or --auto-batch, which tries",
        external_fix="A larger batch, with a rate that follows it",
        command="--auto-batch",
        config_patch={"auto_batch": True},
    ),
    Cause(
        id="low_sm_activity",
        title="The model is too small for this GPU",
        reason="too little parallel work",
        symptom="the driver says busy, yet most multiprocessors have no work",
        required_records=("devices.jsonl: gpus.utilisation, sm_active",),
        info_threshold=0.50,
        warning_threshold=0.75,
        metric="share of the multiprocessors without work while a kernel runs",
        source=DCGM_SOURCE,
        thresholds={
            "busy": Threshold(0.5, "utilisation of a sample from which it counts: the device was asked to work")
        },
        probe="twice_the_batch",
        confidence=0.7,
        fix="A larger --batch-size; else a smaller GPU, a MIG slice, or two jobs on this one",
        external_fix="A larger batch; else a smaller GPU, a MIG slice, or two jobs on this one",
        command="--auto-batch",
        config_patch={"auto_batch": True},
    ),
    Cause(
        id="recompiles",
        title="The model is compiled again and again",
        reason="too little parallel work",
        symptom="some steps take seconds; torch logs recompilations; shapes change from step to step",
        required_records=("steps.jsonl: phases.compile, or stacks.jsonl: main.compile",),
        warning_threshold=0.05,
        critical_threshold=0.25,
        metric="compile after the first steps, share of the device time after the start",
        source="our judgment: a program of fixed shapes compiles once",
        supersedes=("python_bound",),
        confidence=0.85,
        fix="Fixed shapes: one --image-size, drop_last=True; torch.compile(dynamic=True), or mark_dynamic on what changes; "
        "TORCH_LOGS=recompiles says why",
        external_fix="Fixed shapes: pictures of one size, drop_last=True; torch.compile(dynamic=True), or "
        "mark_dynamic on what changes; TORCH_LOGS=recompiles says why. Of tf.function an "
        "input_signature",
    ),
)
