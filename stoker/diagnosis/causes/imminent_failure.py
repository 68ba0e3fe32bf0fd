"""Causes by which a job is about to die, or limps on: storage, faults of the GPU, hangs, bad records. Data only."""

from stoker.diagnosis.causes.cause import OUR_JUDGMENT, Cause, Limit

ROWS = (
    Cause(
        id="hung",
        title="The job lives and makes no progress",
        reason="dies: hang",
        looks_like="no step for far longer than usual; nothing computes",
        needs=("steps.jsonl: steps, t", "devices.jsonl: process_cpu"),
        critical_from=10.0,
        measure="time since the last step, in the longest time that one took before",
        source=OUR_JUDGMENT,
        limits={
            "least_s": Limit(
                10.0, "seconds since the last step (our judgment; collectives time out after 600 s and more)"
            ),
            "idle_cpu": Limit(0.15, "cores' worth of processor time below which nothing computes (our judgment)"),
            "idle_gpu": Limit(0.05, "utilisation of every GPU, likewise"),
            "spinning_s": Limit(
                1800.0,
                "seconds from which it is a hang though something is busy: NCCL waits in a kernel; "
                "three times its time limit of 600 s (torch.distributed, default_pg_timeout)",
            ),
        },
        over=(
            "input_bound",
            "slow_storage",
            "too_few_threads",
            "slow_decode",
            "communication_bound",
            "straggler",
            "host_waits",
            "python_bound",
            "idle_by_intent",
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
        looks_like="a core at 100 %, no step and no message: TensorFlow's record reader spins on an empty shard",
        needs=("events.jsonl: warning with data.empty_inputs", "steps.jsonl: steps, t"),
        critical_from=1,
        measure="empty files that it has open while it says nothing and does no step",
        source="by count; watch/recorder.py has how long it must have said nothing",
        limits={
            "least_s": Limit(
                10.0, "seconds since the last step, where there was one: as hung; a job that steps is not held up"
            )
        },
        over=("hung", "job_says_no_steps", "input_bound", "slow_storage", "too_few_threads", "slow_decode"),
        confidence=0.85,
        fix="Make or copy the named file again, or take it out of the job's list, and start the job anew",
    ),
    Cause(
        id="checkpoints_failed",
        title="Checkpoints could not be saved",
        reason="dies: storage",
        looks_like="training goes on, but a restart would lose more work than it should",
        needs=("events.jsonl: checkpoint_failed",),
        warn_from=1,
        measure="checkpoints that failed",
        source="any is one too many",
        confidence=0.95,
        fix="Make room on the run's disk, or put the run on another one (--run)",
    ),
    Cause(
        id="disk_nearly_full",
        title="The disk of the run is nearly full",
        reason="dies: storage",
        looks_like="the next checkpoint, or the one after it, ends with 'No space left on device'",
        needs=("devices.jsonl: disk_free_bytes",),
        warn_from=1.0 * 2**30,
        critical_from=100.0 * 2**20,
        below=True,
        measure="least that was free, bytes",
        source="our judgment: a checkpoint of RetinaNet with its optimizer is 0.4 GB, and the new one is whole before "
        "the old one goes",
        confidence=0.85,
        fix="Make room, keep fewer checkpoints, or put the run on another disk (--run)",
        fix_elsewhere="Make room, keep fewer checkpoints, or write to another disk",
        command="--run",
    ),
    Cause(
        id="storage_errors",
        title="The storage failed now and then",
        reason="dies: storage",
        looks_like="warnings about reads, uploads or records that could not be done at once",
        needs=("events.jsonl: warning with data.storage, or about records or uploads",),
        info_from=1,
        warn_from=3,
        measure="such warnings",
        source="our judgment: one is an accident of the network",
        confidence=0.7,
        fix="Look at the named errors: quota of requests (429), a bucket far away, a disk with faults (dmesg)",
    ),
    Cause(
        id="gpu_errors",
        title="The driver reported errors of a GPU (Xid)",
        reason="dies: driver or library mismatch",
        looks_like="lines 'NVRM: Xid' in the kernel's log; the job may die soon, or compute wrong numbers",
        needs=("devices.jsonl: gpus.xids, or events.jsonl: gpu_fault",),
        warn_from=1,
        critical_from=2,
        measure="1: an error that is mostly the program's; 2: one of the machine, or of which NVIDIA says "
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
        looks_like="counters of ECC errors grow while the job runs",
        needs=("devices.jsonl: gpus.ecc_corrected, ecc_uncorrected",),
        info_from=1,
        warn_from=100,
        critical_from=1_000_000,
        measure="errors that were corrected during the run; an uncorrected one counts as a million",
        source="our judgment on the count; NVIDIA, GPU Memory Error Management: an uncorrected error ends the program",
        limits={"uncorrected": Limit(1_000_000, "what an uncorrected error counts")},
        confidence=0.9,
        fix="Restart the machine, which retires or remaps the rows; where it comes again, another machine, and "
        "report this "
        "one",
        command="nvidia-smi -q -d ECC,ROW_REMAPPER",
    ),
    Cause(
        id="quarantined_pictures",
        title="Pictures could not be used",
        reason="dies: bad records",
        looks_like="other pictures stand in for them; above 1 % the run stops",
        needs=("quarantine.jsonl",),
        warn_from=1,
        measure="pictures in quarantine",
        source="any is a picture that was paid for and not learnt from",
        confidence=0.95,
        fix="Copy or download the named files again, or take them out of the annotations",
        command="stoker data check",
    ),
)
