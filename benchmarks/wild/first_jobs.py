"""The first half of the jobs of `diagnose_wild.py`."""

from wild import around
from wild.job import HEALTHY, Job

LOOP = "hand-written loop"

JOBS: tuple[Job, ...] = (
    Job(
        program=LOOP, fault="slow storage", way="LD_PRELOAD delay", command=("loop.py", "{images}", "--workers", "1"),
        around=around.slow_reads("/images/", 0.02), accepted=("slow_storage",), variables={"LOST_BY": "waited"},
    ),
    Job(program=LOOP, fault=HEALTHY, way="two workers", command=("loop.py", "{images}", "--width", "32")),
)  # fmt: skip
