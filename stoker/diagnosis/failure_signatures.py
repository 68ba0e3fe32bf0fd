"""The ways in which a job fails, as data: what it prints then, and what to do.

`postmortem.py` has the code that uses them. A pattern is a regular expression for one line of output. Its origin, R:
seen in a job that was made to fail so; B: in the source of an installed library; I: in public issue threads. The rows
are ordered from the more to the less specific: a line counts for the first row with a pattern that matches.
"""

import re
from typing import Literal

import msgspec

from stoker.diagnosis.causes.cause import Reason


class LogPattern(msgspec.Struct, frozen=True):
    """A pattern of a line of output; it also matches its line in a text of many lines. origins: letters of R, B and
    I."""

    regex: re.Pattern[str]
    origins: str
    harmless: bool = False
    """Jobs that continue print it too: it never decides alone."""
    traceback_end: re.Pattern[str] | None = None
    """The line is in a traceback, and this matches the traceback's last line."""


class FailureSignature(msgspec.Struct, frozen=True, kw_only=True):
    """A way to fail. Without patterns it is recognized by other things than its output."""

    id: str
    title: str
    reason: Reason
    log_patterns: tuple[LogPattern, ...] = ()
    severity: Literal["critical", "warning", "info"] = "critical"
    fix: str


def _log_pattern(pattern: str, origins: str, *, harmless: bool = False, traceback_end: str | None = None) -> LogPattern:
    return LogPattern(
        re.compile(pattern, re.MULTILINE),
        origins,
        harmless,
        None if traceback_end is None else re.compile(traceback_end),
    )


_FAILURE_SIGNATURES = (
    FailureSignature(
        id="shared_memory_full",
        title="/dev/shm, the shared memory of processes, was full",
        reason="failure: shared memory",
        log_patterns=(
            _log_pattern(r"insufficient shared memory \(shm\)", "B"),
            _log_pattern(r"workers are out of shared memory", "B"),
            _log_pattern(r"No space left on device.*(/dev/shm|/torch_)", "I"),
            _log_pattern(r"killed by signal: Bus error", "B"),
            # Locks, queues and events of multiprocessing are there too.
            _log_pattern(r"_multiprocessing\.SemLock\(", "R", traceback_end=r"No space left on device"),
            _log_pattern(r"unable to (write to|mmap|resize) file </torch_", "I"),
            _log_pattern(r"unable to allocate shared memory\(shm\) for file </torch_", "R"),
        ),
        fix="Provide more shared memory: `docker run --shm-size 8g` or `--ipc host`, in Kubernetes an emptyDir of "
        "medium Memory at /dev/shm; or use fewer loader processes",
    ),
    FailureSignature(
        id="loader_worker_killed",
        title="A DataLoader worker process was killed",
        reason="failure: host memory",
        log_patterns=(
            _log_pattern(r"DataLoader worker \(pid \S+\) is killed by signal", "B"),
            _log_pattern(r"DataLoader worker \(pid\(s\) [^)]*\) exited unexpectedly", "B"),
        ),
        fix="Most often the host's memory is too small: use fewer workers, a smaller prefetch, a higher memory limit. "
        "The worker's own message, if there is one, is above",
    ),
    FailureSignature(
        id="diverged",
        title="The loss became NaN: nothing was learned from then on",
        reason="failure: divergence",
        log_patterns=(
            _log_pattern(r"Loss NaN/Inf detected", "B"),
            _log_pattern(r"(?i)loss is (nan|inf), stopping training", "B"),
            _log_pattern(r"gradients that are not finite", "B"),
            _log_pattern(r"LossTensor is inf or nan|Model diverged with loss = NaN", "I"),
        ),
        fix="Use a lower learning rate, a longer warm-up, gradient clipping; then look for boxes without area, and try "
        "bf16 instead of fp16",
    ),
    FailureSignature(
        id="collective_timeout",
        title="Ranks waited for each other until the timeout",
        reason="failure: hang",
        log_patterns=(
            _log_pattern(r"Watchdog caught collective operation timeout", "BI"),
            _log_pattern(r"Timed out waiting \d+ms for (recv|send) operation to complete", "I"),
        ),
        fix="The ranks that report it are those that waited: look for a rank that is missing among them or whose last "
        "sequence number (SeqNum, last enqueued work) is lower, and read its output",
    ),
    FailureSignature(
        id="ddp_unused_parameters",
        title="Parameters without a gradient, under DistributedDataParallel",
        reason="failure: hang",
        log_patterns=(_log_pattern(r"Expected to have finished reduction in the prior iteration", "B"),),
        fix="Use every parameter in the loss, or DistributedDataParallel(find_unused_parameters=True)",
    ),
    FailureSignature(
        id="rendezvous_failed",
        title="The processes of the job did not find each other",
        reason="communication",
        log_patterns=(
            _log_pattern(r"client socket has timed out", "B"),
            _log_pattern(r"Rendezvous(Timeout|Connection|Closed)Error", "B"),
            _log_pattern(r"(?i)(EADDRINUSE|Address already in use)", "R"),
        ),
        fix="Check MASTER_ADDR and MASTER_PORT: the same on all, reachable from each (firewall, container network), "
        "and the port free; and start as many processes as WORLD_SIZE",
    ),
    FailureSignature(
        id="gpu_memory_in_use",
        title="Another process uses the GPU's memory",
        reason="failure: GPU memory",
        log_patterns=(_log_pattern(r"failed to allocate .* from device: CUDA_ERROR_OUT_OF_MEMORY", "I"),),
        fix="End the other process (nvidia-smi names it), or let TensorFlow take memory as it needs it "
        "(TF_FORCE_GPU_ALLOW_GROWTH=true)",
    ),
    FailureSignature(
        id="host_out_of_memory",
        title="The host ran out of memory",
        reason="failure: host memory",
        log_patterns=(
            _log_pattern(r"OOM when allocating tensor with shape.* by allocator (mkl)?cpu", "R"),
            _log_pattern(r"DefaultCPUAllocator: (can't allocate|not enough) memory", "R"),
            _log_pattern(r"Unable to allocate .* for an array with shape", "R"),
            _log_pattern(r"\[Errno 12\]|(?<!\()Cannot allocate memory|std::bad_alloc", "R"),
            _log_pattern(r"^MemoryError\b", "R"),
            _log_pattern(r"Out of host memory", "R"),
            _log_pattern(r"RESOURCE_EXHAUSTED: Out of memory allocating \d+ bytes", "RB"),  # XLA's client of the CPU
        ),
        fix="Use a smaller batch or image size, fewer loader processes, a higher memory limit of the container",
    ),
    FailureSignature(
        id="gpu_out_of_memory",
        title="The GPU ran out of memory",
        reason="failure: GPU memory",
        log_patterns=(
            _log_pattern(r"CUDA out of memory\. Tried to allocate|torch\.(cuda\.)?OutOfMemoryError", "B"),
            _log_pattern(r"OOM when allocating tensor with shape.* by allocator GPU_\d", "RI"),
            _log_pattern(r"RESOURCE_EXHAUSTED: Out of memory while trying to allocate", "I"),
            _log_pattern(r"Dst tensor is not initialized", "I"),
            _log_pattern(r"fit the memory of", "R"),
            _log_pattern(r"CUDA(_ERROR_OUT_OF_MEMORY| error: out of memory)", "I"),
            _log_pattern(r"(?i)could not create cudnn handle", "I"),
            _log_pattern(r"Allocator \(GPU_\d+_bfc\) ran out of memory trying to allocate", "I", harmless=True),
            _log_pattern(r"Reducing to batch=\d+ and retrying", "B", harmless=True),
        ),
        fix="Use a smaller batch or image size, mixed precision, or gradient accumulation; and run nothing else on "
        "the GPU",
    ),
    FailureSignature(
        id="device_assert",
        title="A kernel on the GPU found an index out of range",
        reason="failure: bad records",
        log_patterns=(_log_pattern(r"device-side assert triggered|\.cu:\d+: .*Assertion", "I"),),
        fix="Most often a label that is not below the number of classes; a run with CUDA_LAUNCH_BLOCKING=1, or on the "
        "CPU, shows the line",
    ),
    FailureSignature(
        id="gpu_fault",
        title="The GPU or its driver reported a fault",
        reason="failure: driver or library mismatch",
        log_patterns=(
            _log_pattern(r"NVRM: Xid \(", "I"),
            _log_pattern(
                r"(?i)uncorrectable ECC error|GPU has fallen off the bus|Unable to determine the device handle", "I"
            ),
            _log_pattern(r"an illegal memory access was encountered", "I"),
        ),
        fix="NVIDIA's list of Xid errors explains the number: 13, 31 and 43 are mostly errors of the program, 48, 74, "
        "79, 94 and 95 of the machine (use another machine, and report this one)",
    ),
    FailureSignature(
        id="version_mismatch",
        title="The versions of driver, CUDA, cuDNN and the program do not match",
        reason="failure: driver or library mismatch",
        log_patterns=(
            _log_pattern(r"Loaded runtime CuDNN library: .* but source was compiled with", "I"),
            _log_pattern(r"NVIDIA driver on your system is too old", "B"),
            _log_pattern(r"no kernel image is available for execution", "I"),
            _log_pattern(r"CUDA driver version is insufficient for CUDA runtime version", "I"),
            _log_pattern(r"with CUDA capability sm_\w+ is not compatible", "B", harmless=True),
        ),
        fix="Install a build for this driver and this GPU (`nvidia-smi` shows the newest CUDA that the driver "
        "supports), or a newer driver",
    ),
    FailureSignature(
        id="packages_too_new",
        title="protobuf, Keras or Python are too new for this program",
        reason="failure: paths or environment",
        log_patterns=(
            _log_pattern(r"Descriptors cannot be created directly", "R"),
            _log_pattern(r"No module named 'keras\.layers\.preprocessing'", "R"),
            _log_pattern(r"mutable default .* use default_factory", "R"),
        ),
        fix="Install the versions that the program was written for: protobuf < 3.21, Keras 2 (TF_USE_LEGACY_KERAS=1 "
        "with tf_keras), Python 3.10 or older",
    ),
    FailureSignature(
        id="library_missing",
        title="A library or package is missing",
        reason="failure: paths or environment",
        log_patterns=(
            _log_pattern(r"Could not load library lib\S+", "I"),
            _log_pattern(r"cannot open shared object file: No such file or directory", "R"),
            _log_pattern(r"ModuleNotFoundError: No module named", "R"),
            _log_pattern(r"Could not load dynamic library '", "IB", harmless=True),
        ),
        fix="Install what the line names, or add its folder to LD_LIBRARY_PATH (for a Python package: use the "
        "environment that has it)",
    ),
    FailureSignature(
        id="damaged_record",
        title="A record file is damaged",
        reason="failure: bad records",
        log_patterns=(
            _log_pattern(r"(corrupted|truncated) record at \d+", "R"),
            _log_pattern(r"\bDataLossError\b", "R"),
        ),
        fix="Copy or make the shard again; its size differs from that of its source",
    ),
    FailureSignature(
        id="bad_records",
        title="Images or records of the data cannot be read",
        reason="failure: bad records",
        log_patterns=(
            _log_pattern(r"[\d,]+ of [\d,]+ \w+ cannot be used", "R"),
            _log_pattern(r"None of the [\d,]+ \w+ tried can be used", "R"),
            _log_pattern(r"cannot identify image file", "B"),
            _log_pattern(r"OSError: image file is truncated", "B"),
        ),
        fix="Copy or download the named files again, or remove them from the annotations; `stoker data check DATA` "
        "lists all that cannot be read",
    ),
    FailureSignature(
        id="unknown_config_key",
        title="The configuration has an unknown name",
        reason="failure: paths or environment",
        log_patterns=(_log_pattern(r"has no field named", "R"),),
        fix="Correct the name at the line and column that the message gives",
    ),
    FailureSignature(
        id="path_not_found",
        title="A path does not exist",
        reason="failure: paths or environment",
        log_patterns=(
            _log_pattern(r"Did not find any input files matching the glob pattern", "R"),
            _log_pattern(r"Failed to find any matching files for", "R"),
            _log_pattern(r"No labels found in", "BR"),
            _log_pattern(r"^(FileNotFoundError|NotADirectoryError|IsADirectoryError): ", "R"),
            _log_pattern(r"(?i)\b(dataset|file|path|folder|directory)\b.{0,200}\bdoes not exist", "BR"),
        ),
        fix="Correct the path or pattern; in a container, check that the volume is mounted",
    ),
    FailureSignature(
        id="bucket_access_denied",
        title="The bucket denied access: no permission, or invalid credentials",
        reason="failure: storage",
        log_patterns=(
            _log_pattern(r"(?i)HTTP response code 40[13]|\b40[13]\b.{0,20}(Forbidden|Unauthorized)", "RI"),
            _log_pattern(
                r"AccessDenied|does not have storage\.\w+\.\w+ access|InvalidAccessKeyId|SignatureDoesNotMatch", "I"
            ),
        ),
        fix="Give this identity the right to read and list (to write, for outputs), or use an identity that has it",
    ),
    FailureSignature(
        id="bucket_object_missing",
        title="The object or the bucket does not exist",
        reason="failure: storage",
        log_patterns=(
            _log_pattern(r"(?i)HTTP response code 404|\b404\b.{0,20}Not Found|\bNoSuch(Key|Bucket)\b", "RI"),
        ),
        fix="Correct the URI; names are case-sensitive",
    ),
    FailureSignature(
        id="bucket_unreachable",
        title="The bucket did not answer",
        reason="failure: storage",
        log_patterns=(_log_pattern(r"Error executing an HTTP request", "R"),),
        fix="Check network, DNS, proxy, and credentials (the metadata server is reached over HTTP too)",
    ),
    FailureSignature(
        id="disk_full",
        title="A disk was full",
        reason="failure: storage",
        log_patterns=(
            _log_pattern(r"No space left on device|Disk quota exceeded", "R"),
            # torch.save does not report why a write failed.
            _log_pattern(r"enforce fail at inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+", "R"),
            _log_pattern(r"PytorchStreamWriter failed writing file", "I"),
            _log_pattern(r"basic_ios::clear: iostream error", "R"),
        ),
        fix="Make room, keep fewer checkpoints, or write to another disk; an exceeded quota and missing inodes look "
        "the same",
    ),
    FailureSignature(
        id="trained_on_cpu",
        title="No GPU was used",
        reason="observability gaps",
        log_patterns=(
            _log_pattern(r"Could not find cuda drivers on your machine", "I", harmless=True),
            _log_pattern(r"Cannot dlopen some GPU libraries", "I", harmless=True),
            _log_pattern(r"There are non-GPU devices in `?tf\.distribute\.Strategy", "R", harmless=True),
        ),
        severity="warning",
        fix="Check the driver, the container runtime (`docker run --gpus all`) and the framework's CUDA libraries; if "
        "the CPU was intended, nothing is wrong",
    ),
    FailureSignature(
        id="oom_killed",
        title="The kernel killed it because memory was full",
        reason="failure: host memory",
        fix="Use a higher memory limit of the container, fewer loader workers, a smaller batch, smaller caches",
    ),
    FailureSignature(
        id="empty_shard",
        title="It was killed while it read an input file of zero bytes",
        reason="failure: bad records",
        fix="Make or copy the file again; TensorFlow's record reader is known to spin on it without a message",
    ),
    FailureSignature(
        id="hang",
        title="It hung until it was stopped",
        reason="failure: hang",
        fix="The evidence shows where it hung. In a collective: look for the rank that is missing. At a file or a "
        "bucket: try to read it by hand. When it hangs again, `py-spy dump --pid N` shows every thread",
    ),
    FailureSignature(
        id="preempted",
        title="It was stopped by a request (SIGTERM)",
        reason="failure: preemption",
        severity="warning",
        fix="Start it again; it continues from its last checkpoint. The reason (a preempted machine, a time limit of "
        "the scheduler, a person) is in the scheduler's log",
    ),
    FailureSignature(
        id="interrupted",
        title="It was interrupted from the keyboard (SIGINT)",
        reason="failure: preemption",
        severity="info",
        fix="Start it again if that was not intended",
    ),
    FailureSignature(
        id="killed",
        title="It was killed (SIGKILL), and it is not known by whom",
        reason="unknown",
        fix="Look at the kernel's log (`dmesg -T | grep -i oom`), at the container's state (OOMKilled) and at the "
        "scheduler's log",
    ),
    FailureSignature(
        id="crashed",
        title="It crashed in native code",
        reason="unknown",
        fix="Run it again with PYTHONFAULTHANDLER=1, which prints where; a crash at the import is most often caused "
        "by two builds that do not match",
    ),
    FailureSignature(
        id="ended_by_error",
        title="It ended with an error that is not in the catalog",
        reason="unknown",
        fix="Correct what the message names",
    ),
    FailureSignature(
        id="exit_code_unknown",
        title="It ended, and its exit code is not known",
        reason="unknown",
        severity="info",
        fix="Kernels from 6.15 on report the exit code of a job that another process started; `stoker watch -- CMD` "
        "starts the job itself",
    ),
    FailureSignature(
        id="ended_without_record",
        title="Its end is not recorded: it was killed, crashed, or lost its machine",
        reason="unknown",
        fix="Look at the kernel's log (`dmesg -T | grep -i oom`), at the container's or machine's state, and at the "
        "scheduler's log; then continue it from its last checkpoint",
    ),
)

FAILURE_SIGNATURES: dict[str, FailureSignature] = {failure.id: failure for failure in _FAILURE_SIGNATURES}

UNEXPLAINED = frozenset({"killed", "crashed", "ended_by_error", "ended_without_record", "exit_code_unknown"})
"""Failures that describe how a job ended without its reason."""

SECONDARY_ERRORS = re.compile(
    r"ChildFailedError|CalledProcessError|Connection (reset|closed) by peer|ConnectionResetError|BrokenPipeError|"
    r"DistBackendError|NCCL (error|communicator)|exited unexpectedly|EOFError"
)
"""Errors of a process about the end of another one: the messages before them decide (heuristic)."""
