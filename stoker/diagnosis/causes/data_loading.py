"""Causes of the reason "data loading": the device waits for pictures. Data only."""

from stoker.diagnosis.causes.cause import Cause, Threshold

TF_PROFILER_SOURCE = (
    "TensorFlow Profiler, op_stats_to_input_pipeline_analysis.cc: 5 % moderately, 20 % highly input-bound"
)
CPU_WARNING_THRESHOLD = Threshold(
    0.10,
    "threshold where training computes on a CPU, whose cores also decode and belong to others (our judgment)",
)
MIN_STAGE_FRACTION = Threshold(0.5, "share of the wait that must be of this stage: most of it")
_PHASE_RECORDS = ("steps.jsonl: phases",)
_STAGE_RECORDS = ("steps.jsonl: phases, input (or stacks.jsonl, or devices.jsonl: process_cpu)",)

CAUSES = (
    Cause(
        id="input_bound",
        title="The device waits for pictures",
        reason="data loading",
        symptom="the device is busy in bursts; img/s does not rise with a faster device or a larger batch",
        required_records=_PHASE_RECORDS,
        warning_threshold=0.05,
        critical_threshold=0.20,
        metric="input_wait, share of the device time after the start",
        source=TF_PROFILER_SOURCE,
        thresholds={"warn_from_on_cpu": CPU_WARNING_THRESHOLD},
        probe="cached_batch",
        confidence=0.8,
        fix="Prepare pictures faster: decoded pictures that are kept (--cache disk), a machine with more cores per "
        "device, or pictures stored at no more than twice the canvas",
        external_fix="Prepare pictures faster: more loader workers (DataLoader(num_workers=, prefetch_factor=, "
        "persistent_workers=True); tf.data map(num_parallel_calls=tf.data.AUTOTUNE) and prefetch), a "
        "faster decoder, pictures that are decoded or resized once and kept, a machine with more "
        "cores per device",
        config_patch={"cache": "disk"},
    ),
    Cause(
        id="slow_storage",
        title="The storage is too slow for the device",
        reason="data loading",
        symptom="the device waits, and the cores have nothing to do either: pictures come slowly from disk or bucket",
        required_records=_STAGE_RECORDS,
        warning_threshold=0.05,
        critical_threshold=0.20,
        metric="input_wait, share of the device time after the start, when most of it is fetch",
        source=TF_PROFILER_SOURCE,
        thresholds={
            "warn_from_on_cpu": CPU_WARNING_THRESHOLD,
            "of_wait": MIN_STAGE_FRACTION,
            "cpu_while_waiting": Threshold(
                0.5,
                "cores' worth of processor time per second of waiting, below which the wait "
                "of a job without stages is for bytes: decoding takes a whole core (by its nature)",
            ),
        },
        supersedes=("input_bound",),
        probe="cached_batch",
        confidence=0.85,
        fix="Bring the pictures nearer: a copy on a local SSD, a bucket in the machine's own region, or --cache disk, "
        "which reads each picture once",
        external_fix="Bring the pictures nearer: a copy on a local SSD, a bucket in the machine's own region, few "
        "large files (TFRecord, WebDataset) instead of many small ones; and more reads at a time: "
        "DataLoader(num_workers=), tf.data interleave(num_parallel_calls=tf.data.AUTOTUNE) and "
        "prefetch",
        command="--cache disk",
        config_patch={"cache": "disk"},
    ),
    Cause(
        id="cold_cache",
        title="The first pass over the pictures was slow, later ones are not",
        reason="data loading",
        symptom="img/s is low in the first epoch only: caches of the machine or of stoker were empty",
        required_records=("steps.jsonl: input", "events.jsonl: note with data.pictures"),
        info_threshold=0.02,
        metric="fetch in the first epoch, share of the device time after the start",
        source="our judgment: it is over when it is seen, so it is never above info",
        thresholds={"of_fetch": Threshold(0.8, "share of all fetching that lies in the first epoch (our judgment)")},
        supersedes=("slow_storage", "input_bound"),
        fix="Nothing, for one long run. For many short ones: keep the cache folder (STOKER_CACHE_DIR) on a disk that "
        "survives the machine, or copy the pictures there before",
    ),
    Cause(
        id="network_saturated",
        title="The network carries no more pictures",
        reason="data loading",
        symptom="received bytes per second stay at one value, and the device waits",
        required_records=("steps.jsonl: input", "devices.jsonl: net_received_bytes_s"),
        warning_threshold=0.85,
        metric="mean of the received bytes per second, share of the most ever seen, while most of the wait is fetch",
        source="our judgment: traffic that is not limited varies; one that stands at its most has met a limit",
        thresholds={
            "least_bytes_s": Threshold(
                50e6, "received bytes per second: half of a 1 Gbit/s link; below, it is latency"
            ),
            "least_samples": Threshold(20, "samples, so that the most is known (our judgment)"),
            "of_wait": MIN_STAGE_FRACTION,
        },
        supersedes=("slow_storage", "input_bound"),
        confidence=0.6,
        fix="Fewer bytes: --cache disk, pictures stored at twice the canvas at most; or a machine "
        "with a faster network",
        external_fix="Fewer bytes: pictures stored at no more than twice what the model sees, a copy on a local "
        "SSD that is read in every further epoch; or a machine with a faster network",
        command="--cache disk",
        config_patch={"cache": "disk"},
    ),
    Cause(
        id="slow_decode",
        title="Decoding pictures takes longer than training on them",
        reason="data loading",
        symptom="the device waits while the loader's threads or processes decode and resize",
        required_records=_STAGE_RECORDS,
        warning_threshold=0.05,
        critical_threshold=0.20,
        metric="input_wait, share of the device time after the start, when most of it is decode",
        source=TF_PROFILER_SOURCE,
        thresholds={"warn_from_on_cpu": CPU_WARNING_THRESHOLD, "of_wait": MIN_STAGE_FRACTION},
        supersedes=("input_bound",),
        probe="cached_batch",
        confidence=0.8,
        fix="Decode once: --cache disk keeps decoded pictures; or on the GPU (--jpeg-decoder nvjpeg); or store pictures at "
        "twice the canvas at most; of a PyTorch job, a faster decoder and fewer transforms per picture",
        external_fix="Decode less, or elsewhere: pictures stored at no more than twice what the model sees, a "
        "faster decoder (libjpeg-turbo, nvJPEG, DALI), fewer transforms per picture, decoded pictures"
        " that are kept (tf.data cache); and in loader workers rather than in the training thread",
        command="--cache disk",
        config_patch={"cache": "disk"},
    ),
    Cause(
        id="too_few_workers",
        title="One or two threads prepare pictures while cores are idle",
        reason="data loading",
        symptom="the device waits, one core is at 100 %, the others sleep",
        required_records=(
            "steps.jsonl: phases",
            "config.toml: run.threads, or data.workers of an event, or stacks.jsonl",
        ),
        warning_threshold=0.05,
        critical_threshold=0.20,
        metric="input_wait, share of the device time after the start, when most of it is decode, the loader has few "
        "threads and cores are idle",
        source=TF_PROFILER_SOURCE,
        thresholds={
            "one_core": Threshold(
                1.25,
                "cores' worth of processor time beside the training thread's, of a loader that tells "
                "nothing of its threads, up to which one thread or process does it all (our judgment)",
            ),
            "warn_from_on_cpu": CPU_WARNING_THRESHOLD,
            "of_wait": MIN_STAGE_FRACTION,
            "few": Threshold(
                2,
                "threads, or DataLoader workers, that are few (and fewer than half of the cores, or at "
                "most one); our judgment",
            ),
            "busy_cores": Threshold(
                0.85,
                "busy share of the cores above which more threads have no core to run on "
                "(decoding threads reach 0.9 and more)",
            ),
        },
        supersedes=("images_too_large", "slow_decode", "input_bound"),
        probe="more_threads",
        confidence=0.85,
        fix="--workers auto, which finds their number; of a PyTorch job, DataLoader(num_workers=) of about the cores per "
        "GPU, with persistent_workers=True",
        external_fix="DataLoader(num_workers=) of about the cores per GPU, with persistent_workers=True; of "
        "tf.data map(num_parallel_calls=tf.data.AUTOTUNE) and prefetch; of Keras PyDataset(workers=, "
        "use_multiprocessing=True)",
        command="--workers auto",
        config_patch={"workers": 0},
    ),
    Cause(
        id="too_few_cores",
        title="The machine has too few processors for its GPU",
        reason="data loading",
        symptom="the GPU waits while every core decodes",
        required_records=("steps.jsonl: phases", "devices.jsonl: cpu, gpus"),
        warning_threshold=0.05,
        critical_threshold=0.20,
        metric="input_wait, share of the device time after the start, on a GPU, when most of it is decode and the "
        "cores are busy",
        source=TF_PROFILER_SOURCE,
        thresholds={
            "of_wait": MIN_STAGE_FRACTION,
            "busy_cores": Threshold(
                0.85, "busy share of the cores from which no thread can add anything (our judgment)"
            ),
        },
        supersedes=("slow_decode", "input_bound"),
        probe="cached_batch",
        confidence=0.8,
        fix="A machine type with more vCPUs per GPU; or less work for them: --jpeg-decoder nvjpeg, --cache disk",
        external_fix="A machine type with more vCPUs per GPU; or less work for them: decoding on the GPU (nvJPEG, "
        "DALI), pictures stored at no more than twice what the model sees",
        command="--jpeg-decoder nvjpeg",
        config_patch={"jpeg_decoder": "nvjpeg"},
    ),
    Cause(
        id="images_too_large",
        title="The pictures are far larger than what the model sees",
        reason="data loading",
        symptom="decoding takes most of the wait, and most decoded pixels are thrown away by the resize",
        required_records=(
            "steps.jsonl: input",
            "events.jsonl: note with data.median_pixels",
            "config.toml: data.canvas",
        ),
        warning_threshold=8.0,
        metric="pixels of the median picture over those of the canvas, where decoding makes the device wait",
        source="our judgment: JPEG decoders skip work in steps of 2, 4 and 8 (DCT scaling), 8 times the pixels "
        "is beyond the first; benchmarks/loader.py has the cost by size",
        thresholds={
            "of_wait": MIN_STAGE_FRACTION,
            "wait": Threshold(0.05, "input_wait, share of the device time: as input_bound"),
        },
        supersedes=("slow_decode", "input_bound"),
        confidence=0.75,
        fix="Store them once at twice the canvas, or --cache disk, which does it in the first epoch",
        external_fix="Store them once at twice what the model sees",
        command="--cache disk",
        config_patch={"cache": "disk"},
    ),
    Cause(
        id="exposed_h2d_copies",
        title="The device waits for copies from the host",
        reason="data loading",
        symptom="short pauses before each step, while the bus is busy",
        required_records=("steps.jsonl: phases (or traces.jsonl: copy_s)",),
        warning_threshold=0.05,
        critical_threshold=0.20,
        metric="h2d, share of the device time after the start; or, of a trace, the time in which only copies ran",
        source="as input_bound: " + TF_PROFILER_SOURCE,
        probe="cached_batch",
        confidence=0.8,
        fix="Copy while the device computes: pinned memory and a stream of its own (DataLoader(pin_memory=True), "
        ".to(device, non_blocking=True)); uint8 pictures instead of floats are a quarter of the bytes",
    ),
)
