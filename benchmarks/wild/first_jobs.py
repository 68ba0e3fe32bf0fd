"""The first half of the jobs of `diagnose_wild.py`.

Causes that mean the same to the user of a job are accepted together: of a loss that became NaN at a learning rate
hundred times too high, for example, both the rate and the NaN.
"""

import signal
from collections.abc import Callable
from typing import Any

from wild import around
from wild.around import send
from wild.job import HEALTHY, Job

DIVERGES = ("lr_too_high", "diverged", "non_finite_loss", "unstable_training")
INPUT = ("slow_decode", "too_few_workers", "input_bound")
"""Python, PIL or a decoder too slow for one worker or none: which of the three is a matter of taste."""
HANGS = ("hung", "hang")
MEMORY = ("host_memory_leak", "host_memory_near_limit")
KILLED_FULL = ("oom_killed", "host_out_of_memory", "host_memory_leak")


def of(program: str, script: str, *data: str) -> Callable[..., Job]:
    """Returns a function that makes a job of the program from the fault, the way and the words after `data`."""

    def job(fault: str, way: str, words: str, **others: Any) -> Job:
        return Job(program=program, fault=fault, way=way, command=(script, *data, *words.split()), **others)

    return job


loop = of("hand-written loop", "loop.py")

LOOP = (
    loop("slow storage", "LD_PRELOAD delay", "{images} --workers 1", around=around.slow_reads("/images/", 0.02),
         accepted=("slow_storage",), variables={"LOST_BY": "waited"}),
    loop("slow storage", "throttled HTTP server", "{server} --workers 1",
         around=around.http_server("images", delay_s=0.03), accepted=("slow_storage",),
         variables={"LOST_BY": "waited"}),
    loop("slow storage", "cold files on a throttled disk", "{folder}/data --workers 2 --bs 16",
         around=around.slow_disk("photos", read_bytes_per_s=1_500_000), accepted=("slow_storage", "cold_cache")),
    loop("slow preprocessing", "Python pixel by pixel, one worker", "{images} --workers 1 --augment python",
         accepted=INPUT, variables={"LOST_BY": "waited"}),
    loop("slow preprocessing", "PIL in a lambda, no worker", "{images} --workers 0 --augment lambda",
         accepted=INPUT, variables={"LOST_BY": "waited"}),
    loop("waits in each step", "POST to a slow server", "{images} --tracker {server}", alone=False,
         around=around.http_server("images", delay_s=0.4), accepted=("host_device_syncs",),
         variables={"LOST_BY": "posted"}),
    loop("waits in each step", "CSV on a slow disk", "{images} --csv {folder}/metrics.csv", alone=False,
         around=around.slow_reads("/metrics.csv", 0.4), accepted=("host_device_syncs", "slow_storage"),
         variables={"LOST_BY": "posted"}),
    loop("Python in the loop", "AUC by pairs", "{images} --auc 4000", accepted=("python_bound",),
         variables={"LOST_BY": "scored"}),
    loop("Python in the loop", "statistics of a long list", "{images} --stats 300000", accepted=("python_bound",),
         variables={"LOST_BY": "scored"}),
    loop("evaluation too often", "net.eval() and no_grad", "{images} --eval-every 4", accepted=("evaluation_heavy",)),
    loop("evaluation too often", "no eval(), no no_grad", "{images} --valid-every 4", accepted=("evaluation_heavy",)),
    loop("checkpoints too often", "torch.save of a large model", "{images} --hidden 8192 --save-every 2",
         accepted=("checkpoint_heavy",), variables={"LOST_BY": "saved"}),
    loop("checkpoints too often", "pickle and fsync on a slow disk",
         "{images} --hidden 3000 --save-every 6 --save-with pickle",
         around=around.slow_disk("", write_bytes_per_s=15_000_000), accepted=("checkpoint_heavy", "slow_storage"),
         variables={"LOST_BY": "saved"}),
    loop("learning rate too high", "SGD, 200", "{images} --opt sgd --lr 200 --print-every 1", accepted=DIVERGES),
    loop("learning rate too high", "Adam, 1", "{images} --lr 1 --print-every 1", accepted=DIVERGES),
    loop("nothing is learned", "optimizer of another model", "{images} --wrong-net --print-every 1",
         accepted=("lr_too_low",)),
    loop("nothing is learned", "lr 1e-9", "{images} --lr 1e-9 --print-every 1", accepted=("lr_too_low",)),
    loop("host memory leak", "losses kept with their graph", "{images} --history --max-seconds 20", accepted=MEMORY),
    loop("host memory leak", "decoded images kept by the worker", "{images} --workers 1 --keep --max-seconds 20",
         accepted=MEMORY),
    loop("hang", "a lock taken twice", "{images} --lock-at 10", accepted=HANGS, read_after_s=70, alone=False),
    loop("hang", "a queue whose thread has ended", "{images} --prefetch-thread-stops 10", accepted=HANGS,
         read_after_s=70, alone=False),
    loop("CPU quota", "half a core", "{images} --workers 1", around=around.cpu_quota(0.5), accepted=("cpu_quota",)),
    loop("CPU quota", "one core for four workers", "{images} --workers 4 --augment lambda",
         around=around.cpu_quota(1.0), accepted=("cpu_quota",)),
    loop("killed from outside", "SIGKILL", "{images} --max-seconds 60", meanwhile=send(signal.SIGKILL, after_s=22),
         accepted=("killed",), exits=None),
    loop("killed from outside", "memory limit", "{images} --history --max-seconds 60", exits=None,
         around=around.memory_limit(1_000_000_000), accepted=KILLED_FULL),
    loop(HEALTHY, "two workers", "{images} --width 32"),
    loop(HEALTHY, "short", "{images} --max-seconds 3"),
    loop(HEALTHY, "long", "{images} --max-seconds 60 --width 32 --eval-every 200 --save-every 400"),
    loop(HEALTHY, "random labels", "{images} --random-labels"),
    loop(HEALTHY, "a busy neighbor", "{images} --width 32", around=around.busy_neighbors(1)),
    loop(HEALTHY, "no worker, cheap images", "{images} --workers 0 --width 64 --size 64 --print-every 20"),
)  # fmt: skip

JOBS: tuple[Job, ...] = (*LOOP,)
