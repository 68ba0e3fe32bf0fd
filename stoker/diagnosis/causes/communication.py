"""Causes of the reason "communication": devices wait for each other, or for the bus. Data only."""

from stoker.diagnosis.causes.cause import Cause, Threshold

CAUSES = (
    Cause(
        id="straggler",
        title="One rank is slower than the others, and all wait for it",
        reason="communication",
        symptom="every exchange waits for the same rank; its own waits are short",
        required_records=("steps.jsonl and ranks/*/steps.jsonl: phases.comm or straggler",),
        warning_threshold=0.08,
        critical_threshold=0.25,
        metric="straggler, share of the device time after the start of the ranks that wait",
        source="our judgment: ranks on equal machines differ by less",
        thresholds={"one": Threshold(0.6, "share of the waiting that is for one rank: it is slow, not late by turns")},
        supersedes=("communication_bound",),
        confidence=0.85,
        fix="Look at that rank's machine: a GPU that is throttled, other jobs, a slower disk, more or larger "
        "pictures in "
        "its share; move it, or give every rank the same work",
    ),
    Cause(
        id="communication_bound",
        title="The exchange of gradients is not hidden by computing",
        reason="communication",
        symptom="more devices bring little; all ranks wait about as long in each exchange",
        required_records=("steps.jsonl: phases.comm (or traces.jsonl: comm_s, or stacks.jsonl: main.comm)",),
        warning_threshold=0.10,
        critical_threshold=0.30,
        metric="comm, share of the device time after the start",
        source="our judgment: DistributedDataParallel hides nearly all of it on a good link (Li et al. 2020, figure 6)",
        probe="no_exchange",
        confidence=0.75,
        fix="A faster link (NVLink, one machine instead of two, the network of the provider's GPU clusters; NCCL_DEBUG="
        "INFO says which is used), fewer bytes (bf16 gradients), fewer exchanges (--grad-accum-steps, a larger --batch-size)",
        external_fix="A faster link (NVLink, one machine instead of two, the network of the provider's GPU "
        "clusters; NCCL_DEBUG=INFO says which is used), fewer bytes (bf16 gradients, "
        "DistributedDataParallel's bf16_compress_hook), fewer exchanges (no_sync() over several "
        "batches, a larger batch)",
        command="--grad-accum-steps 2",
        config_patch={"grad_accum_steps": 2},
    ),
    Cause(
        id="pcie_degraded",
        title="The GPU's link to the host is slower than it could be",
        reason="communication",
        symptom="copies take twice as long as on the machine beside it",
        required_records=("devices.jsonl: gpus.pcie_generation, pcie_width and their maxima",),
        info_threshold=0.25,
        warning_threshold=0.45,
        metric="share of the link's speed that is missing while the GPU works: 1 - lanes × 2^generation over "
        "the maxima",
        source="PCI Express: each generation doubles the rate of a lane; half the speed or less is a defect or "
        "a wrong slot",
        thresholds={
            "busy": Threshold(
                0.5, "utilisation of a sample from which it counts: an idle GPU lowers its link by itself"
            ),
            "samples": Threshold(5, "such samples, at least (our judgment)"),
        },
        confidence=0.8,
        fix="Another machine, and report this one; on one's own: reseat the card, another slot, no riser, BIOS "
        "settings",
    ),
)
