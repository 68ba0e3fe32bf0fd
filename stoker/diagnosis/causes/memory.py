"""Causes of the reason "memory", and of deaths for want of it, on the device and on the host. Data only."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold

NEAR_OOM_SOURCE = "our judgment: the next larger batch of boxes, fragment or fork has to fit into what is left"
STEADY_GROWTH = {
    "least_growth_bytes": Threshold(
        64 * 2**20,
        "growth in what was seen, below which allocators explain it: a healthy run on the demo grows by 25 MiB "
        "in its first half minute",
    ),
    "least_span_s": Threshold(5.0, "time over which it was seen (our judgment)"),
    "least_points": Threshold(6, "samples in it (our judgment)"),
    "straight": Threshold(0.95, "share of the variance that a straight line explains (R²); a warm-up bends"),
    "goes_on": Threshold(0.7, "slope of the second half over that of the first: what fills a cache slows down"),
}
"""When growth is a leak: it is straight, and goes on."""
LEAK_HOURS_SOURCE = "our judgment: a training takes a day; what would be full within one ends it"

CAUSES = (
    Cause(
        id="gpu_memory_unused",
        title="Most of the GPU's memory is free",
        reason="memory",
        symptom="nvidia-smi shows a fraction of the memory in use all through the run",
        required_records=("devices.jsonl: gpus.memory_used_bytes, memory_total_bytes",),
        info_threshold=0.50,
        metric="share of the memory that was never used, of the GPU that used most",
        source="our judgment: twice the batch would fit",
        confidence=0.6,
        fix="A larger --batch-size (--auto-batch tries which), a larger --image-size; or a GPU with less memory, which is cheaper",
        external_fix="A larger batch or larger pictures; or a GPU with less memory, which is cheaper",
        command="--auto-batch",
        config_patch={"auto_batch": True},
    ),
    Cause(
        id="gpu_memory_leak",
        title="The memory of the GPU fills up",
        reason="dies: GPU memory",
        symptom="torch.OutOfMemoryError hours in, at a batch like any other",
        required_records=("devices.jsonl: gpus.memory_used_bytes, memory_total_bytes",),
        warning_threshold=24.0,
        critical_threshold=1.0,
        lower_is_worse=True,
        metric="hours until it is full at the steady growth that was seen",
        source=LEAK_HOURS_SOURCE,
        thresholds=STEADY_GROWTH,
        confidence=0.75,
        fix="Tensors that are kept with their history are the usual cause: .detach() or float() what is collected over "
        "steps (losses, predictions); varying shapes: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        command="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    Cause(
        id="gpu_memory_fragmented",
        title="Much of the GPU's memory is held without being used",
        reason="memory",
        symptom="the driver shows a full GPU, the program far less; large allocations fail",
        required_records=("steps.jsonl: memory_peak_bytes", "devices.jsonl: gpus.memory_used_bytes, other_processes"),
        warning_threshold=0.25,
        metric="most that the driver shows, less the most that was allocated, share of the GPU's memory, when it is "
        "nearly full and nobody else is on it",
        source=HEURISTIC + ": the CUDA context takes under 1 GiB",
        thresholds={"full": Threshold(0.9, "share of the memory that the driver shows as used (our judgment)")},
        confidence=0.6,
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and fixed shapes",
        command="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    Cause(
        id="gpu_memory_near_limit",
        title="GPU memory is nearly full",
        reason="dies: GPU memory",
        symptom="torch.OutOfMemoryError, often hours in, at an unusual batch or after an evaluation",
        required_records=("steps.jsonl: memory_peak_bytes", "devices.jsonl: gpus.memory_total_bytes"),
        warning_threshold=0.95,
        metric="most memory allocated, share of the smallest GPU",
        source=NEAR_OOM_SOURCE,
        confidence=0.8,
        fix="A smaller --batch-size or --image-size, or --grad-accum-steps 2",
        external_fix="A smaller batch with accumulated gradients, smaller pictures, or activation checkpointing",
        command="--grad-accum-steps 2",
        config_patch={"grad_accum_steps": 2},
    ),
    Cause(
        id="host_memory_near_limit",
        title="Host memory is nearly full",
        reason="dies: host memory",
        symptom="the kernel kills the process (exit 137) without a message",
        required_records=("devices.jsonl: memory_used_bytes, memory_limit_bytes",),
        warning_threshold=0.90,
        critical_threshold=0.97,
        metric="most memory in use, share of the limit (of the machine, or of the container where that is tighter)",
        source=NEAR_OOM_SOURCE,
        confidence=0.85,
        fix="Fewer --workers, a smaller --batch-size, a higher memory limit of the container, or fewer other processes",
        external_fix="Fewer loader workers, a smaller prefetch or batch, a higher memory limit of the container, "
        "or fewer other processes",
        command="--workers",
    ),
    Cause(
        id="host_memory_leak",
        title="The job's memory on the host grows and grows",
        reason="dies: host memory",
        symptom="resident memory rises in a straight line; hours later the kernel kills the job",
        required_records=("devices.jsonl: rss_bytes, memory_used_bytes, memory_limit_bytes",),
        warning_threshold=24.0,
        critical_threshold=1.0,
        lower_is_worse=True,
        metric="hours until the limit at the steady growth that was seen after the start",
        source=LEAK_HOURS_SOURCE,
        thresholds=STEADY_GROWTH,
        confidence=0.75,
        fix="What is appended to in the loop and never emptied: histories of losses or predictions, caches without a "
        "bound; of DataLoader workers, Python lists that are copied page by page (keep annotations in numpy or Arrow)",
    ),
    Cause(
        id="memory_pressure",
        title="The machine has too little memory and makes room all the time",
        reason="memory",
        symptom="everything is slow by turns; swap is used",
        required_records=("devices.jsonl: psi_memory or swap_used_bytes",),
        warning_threshold=0.10,
        critical_threshold=0.40,
        metric="share of the time in which some task waited for memory; or growth of the swap, as a share of "
        "`swap_bytes` tenths",
        source="systemd-oomd and Meta's oomd act on memory pressure of 10 to 60 % (their manuals' examples)",
        thresholds={
            "swap_bytes": Threshold(2.0 * 2**30, "growth of the swap that counts like a pressure of 1 (our judgment)")
        },
        supersedes=("slow_decode", "input_bound"),
        confidence=0.7,
        fix="More memory, fewer loader threads or processes, a smaller cache (--cache disk instead of memory)",
        external_fix="More memory, fewer loader workers, a smaller cache or prefetch",
        command="--cache disk",
        config_patch={"cache": "disk"},
    ),
    Cause(
        id="processes_killed_for_memory",
        title="The kernel killed processes of the job for memory, and it went on",
        reason="dies: host memory",
        symptom="loader workers or helpers vanish; the job gets slower or dies later for another reason",
        required_records=("devices.jsonl: oom_kills",),
        critical_threshold=1,
        metric="processes killed",
        source="any is one too many",
        confidence=0.95,
        fix="A higher memory limit of the container, fewer loader processes, a smaller batch",
    ),
    Cause(
        id="shared_memory_small",
        title="/dev/shm is nearly full",
        reason="dies: shared memory",
        symptom="DataLoader workers die with a bus error, or 'unable to allocate shared memory'",
        required_records=("devices.jsonl: shm_used_bytes, shm_total_bytes",),
        info_threshold=0.50,
        warning_threshold=0.80,
        critical_threshold=0.95,
        metric="most of /dev/shm in use, share of its size",
        source=HEURISTIC + ": a worker's next batch has to fit",
        thresholds={
            "docker_bytes": Threshold(
                64 * 2**20,
                "size that is always worth a word: docker's default (docker run, "
                "--shm-size), less than a batch of 16 pictures of 800 × 800 as floats",
            )
        },
        confidence=0.8,
        fix="`docker run --shm-size 8g` or `--ipc host`, in Kubernetes an emptyDir of medium Memory at /dev/shm; or "
        "fewer loader workers",
        command="docker run --shm-size 8g",
    ),
    Cause(
        id="fd_limit_near",
        title="Open files run out",
        reason="dies: paths or environment",
        symptom="OSError: [Errno 24] Too many open files, often in a loader worker, hours in",
        required_records=("devices.jsonl: handles, handles_limit",),
        warning_threshold=0.80,
        critical_threshold=0.95,
        metric="open files of one process, share of its limit; or the same at the end of a day of the growth that was "
        "seen, at most critical_from less a little",
        source=HEURISTIC,
        thresholds={
            "least_growth": Threshold(30, "open files more, in a straight line, that are a leak (our judgment)"),
            "straight": STEADY_GROWTH["straight"],
            "goes_on": STEADY_GROWTH["goes_on"],
            "least_span_s": STEADY_GROWTH["least_span_s"],
            "least_points": STEADY_GROWTH["least_points"],
        },
        confidence=0.8,
        fix="Close what is opened (with open(…)); torch.multiprocessing.set_sharing_strategy('file_system'); "
        "`ulimit -n 65536` for time",
        command="ulimit -n 65536",
    ),
)
