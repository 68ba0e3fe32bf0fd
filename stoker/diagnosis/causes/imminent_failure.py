"""Causes by which a job is about to die, or limps on: storage, faults of the GPU, hangs, bad records. Data only."""

from stoker.diagnosis.causes.cause import HEURISTIC, Cause, Threshold

CAUSES = (
    Cause(
        id="hung",
        title="The job lives and makes no progress",
        reason="dies: hang",
        symptom="no step for far longer than usual; nothing computes",
        required_records=("steps.jsonl: steps, t", "devices.jsonl: process_cpu"),
        critical_threshold=10.0,
        metric="time since the last step, in the longest time that one took before",
        source=HEURISTIC,
        thresholds={
            "least_s": Threshold(
                10.0, "seconds since the last step (our judgment; collectives time out after 600 s and more)"
            ),
            "idle_cpu": Threshold(0.15, "cores' worth of processor time below which nothing computes (our judgment)"),
            "idle_gpu": Threshold(0.05, "utilisation of every GPU, likewise"),
            "spinning_s": Threshold(
                1800.0,
                "seconds from which it is a hang though something is busy: NCCL waits in a kernel; "
                "three times its time limit of 600 s (torch.distributed, default_pg_timeout)",
            ),
        },
        supersedes=(
            "input_bound",
            "slow_storage",
            "too_few_workers",
            "slow_decode",
            "communication_bound",
            "straggler",
            "host_device_syncs",
            "python_bound",
            "intentional_idle",
        ),
        confidence=0.8,
        fix="py-spy dump --pid shows where each process waits: a collective that one rank does not reach, a "
        "storage that "
        "does not answer, a lock; then end it and continue from its checkpoint",
        command="py-spy dump --pid",
    ),
    Cause(
        id="empty_input",
        title="The job reads a file of zero bytes and says nothing",
        reason="dies: bad records",
        symptom="a core at 100 %, no step and no message: TensorFlow's record reader spins on an empty shard",
        required_records=("events.jsonl: warning with data.empty_inputs", "steps.jsonl: steps, t"),
        critical_threshold=1,
        metric="empty files that it has open while it says nothing and does no step",
        source="by count; watch/recorder.py has how long it must have said nothing",
        thresholds={
            "least_s": Threshold(
                10.0, "seconds since the last step, where there was one: as hung; a job that steps is not held up"
            )
        },
        supersedes=("hung", "no_step_output", "input_bound", "slow_storage", "too_few_workers", "slow_decode"),
        confidence=0.85,
        fix="Make or copy the named file again, or take it out of the job's list, and start the job anew",
    ),
    Cause(
        id="checkpoints_failed",
        title="Checkpoints could not be saved",
        reason="dies: storage",
        symptom="training goes on, but a restart would lose more work than it should",
        required_records=("events.jsonl: checkpoint_failed",),
        warning_threshold=1,
        metric="checkpoints that failed",
        source="any is one too many",
        confidence=0.95,
        fix="Make room on the run's disk, or put the run on another one (--run)",
    ),
    Cause(
        id="disk_nearly_full",
        title="The disk of the run is nearly full",
        reason="dies: storage",
        symptom="the next checkpoint, or the one after it, ends with 'No space left on device'",
        required_records=("devices.jsonl: disk_free_bytes",),
        warning_threshold=1.0 * 2**30,
        critical_threshold=100.0 * 2**20,
        lower_is_worse=True,
        metric="least that was free, bytes",
        source="our judgment: a checkpoint of RetinaNet with its optimizer is 0.4 GB, and the new one is whole before "
        "the old one goes",
        confidence=0.85,
        fix="Make room, keep fewer checkpoints, or put the run on another disk (--run)",
        external_fix="Make room, keep fewer checkpoints, or write to another disk",
        command="--run",
    ),
    Cause(
        id="storage_errors",
        title="The storage failed now and then",
        reason="dies: storage",
        symptom="warnings about reads, uploads or records that could not be done at once",
        required_records=("events.jsonl: warning with data.storage, or about records or uploads",),
        info_threshold=1,
        warning_threshold=3,
        metric="such warnings",
        source="our judgment: one is an accident of the network",
        confidence=0.7,
        fix="Look at the named errors: quota of requests (429), a bucket far away, a disk with faults (dmesg)",
    ),
    Cause(
        id="gpu_errors",
        title="The driver reported errors of a GPU (Xid)",
        reason="dies: driver or library mismatch",
        symptom="lines 'NVRM: Xid' in the kernel's log; the job may die soon, or compute wrong numbers",
        required_records=("devices.jsonl: gpus.xids, or events.jsonl: gpu_fault",),
        warning_threshold=1,
        critical_threshold=2,
        metric="1: an error that is mostly the program's; 2: one of the machine, or of which NVIDIA says "
        "nothing better",
        source="NVIDIA, XID Errors (docs.nvidia.com/deploy/xid-errors); diagnosis/xids.py has the table",
        confidence=0.9,
        fix="What the evidence says of the number; where it is the machine's, another machine, and report this one",
        command="dmesg | grep -i xid",
    ),
    Cause(
        id="gpu_memory_errors",
        title="The GPU's memory had errors (ECC)",
        reason="dies: driver or library mismatch",
        symptom="counters of ECC errors grow while the job runs",
        required_records=("devices.jsonl: gpus.ecc_corrected, ecc_uncorrected",),
        info_threshold=1,
        warning_threshold=100,
        critical_threshold=1_000_000,
        metric="errors that were corrected during the run; an uncorrected one counts as a million",
        source="our judgment on the count; NVIDIA, GPU Memory Error Management: an uncorrected error ends the program",
        thresholds={"uncorrected": Threshold(1_000_000, "what an uncorrected error counts")},
        confidence=0.9,
        fix="Restart the machine, which retires or remaps the rows; where it comes again, another machine, and "
        "report this "
        "one",
        command="nvidia-smi -q -d ECC,ROW_REMAPPER",
    ),
    Cause(
        id="bad_images",
        title="Pictures could not be used",
        reason="dies: bad records",
        symptom="other pictures stand in for them; above 1 % the run stops",
        required_records=("quarantine.jsonl",),
        warning_threshold=1,
        metric="pictures in quarantine",
        source="any is a picture that was paid for and not learnt from",
        confidence=0.95,
        fix="Copy or download the named files again, or take them out of the annotations",
        command="stoker data check",
    ),
)
