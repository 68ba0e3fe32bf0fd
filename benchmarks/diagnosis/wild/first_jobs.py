"""The first half of the jobs of `diagnose_wild.py`.

Causes that mean the same to the user of a job are accepted together: of a loss that became NaN at a learning rate
hundred times too high, for example, both the rate and the NaN.
"""

import signal
from collections.abc import Callable
from typing import Any

from benchmarks.diagnosis.wild import around
from benchmarks.diagnosis.wild.around import send
from benchmarks.diagnosis.wild.job import HEALTHY, Job

DIVERGES = ("lr_too_high", "diverged", "non_finite_loss", "unstable_training")
INPUT = ("slow_decode", "too_few_workers", "input_bound")
"""Python, PIL or a decoder too slow for one worker or none: which of the three is a matter of taste."""
OPEN_FILES = ("too_many_open_files", "fd_limit_near")
SHM = ("shared_memory_full", "shared_memory_small", "loader_worker_killed")
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
    loop("slow preprocessing", "Python pixel by pixel, one worker", "{images} --workers 1 --augment python --width 16",
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
    loop("evaluation too often", "net.eval() and no_grad", "{images} --eval-every 2", accepted=("evaluation_heavy",)),
    loop("evaluation too often", "no eval(), no no_grad", "{images} --valid-every 2", accepted=("evaluation_heavy",)),
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
    loop(HEALTHY, "two workers", "{images} --width 48"),
    loop(HEALTHY, "short", "{images} --width 48 --max-seconds 3"),
    loop(HEALTHY, "long", "{images} --max-seconds 60 --width 48 --eval-every 100 --save-every 200"),
    loop(HEALTHY, "random labels", "{images} --width 48 --random-labels"),
    loop(HEALTHY, "a busy neighbor", "{images} --width 48", around=around.busy_neighbors(1)),
    loop(HEALTHY, "no worker, cheap images", "{images} --workers 0 --width 64 --size 64 --print-every 20"),
)  # fmt: skip

ddp = of("DDP, 2 ranks", "-m", "torch.distributed.run", "--nproc-per-node", "2")
alone_rank = of("DDP, 2 ranks", "ddp.py")
RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}

DDP = (
    ddp("straggler", "work on the last rank only", "{wild}/ddp.py {images} --mining 0.25", accepted=("straggler",),
        variables={"LOST_BY": "mined"}),
    ddp("straggler", "larger images on the last rank", "{wild}/ddp.py {images} --multi-scale 192",
        accepted=("straggler",)),
    ddp("slow storage", "LD_PRELOAD delay", "{wild}/ddp.py {images}", accepted=("slow_storage",),
        around=around.slow_reads("/images/", 0.015), variables={"LOST_BY": "waited"}),
    ddp("slow storage", "throttled HTTP server", "{wild}/ddp.py {server}", accepted=("slow_storage",),
        around=around.http_server("images", delay_s=0.02), variables={"LOST_BY": "waited"}),
    ddp("hang of one rank", "a lock taken twice", "{wild}/ddp.py {images} --wait-lock 10", accepted=HANGS, alone=False,
        read_after_s=75),
    ddp("hang of one rank", "waits for a file", "{wild}/ddp.py {images} --wait-file 10", accepted=HANGS, alone=False,
        read_after_s=75),
    ddp("unused parameters", "a head without a loss", "{wild}/ddp.py {images} --aux-head", alone=False, exits=1,
        accepted=("ddp_unused_parameters",)),
    ddp("unused parameters", "layers skipped at random", "{wild}/ddp.py {images} --drop-path 0.2", alone=False,
        exits=1, accepted=("ddp_unused_parameters",)),
    ddp("rendezvous", "the port is in use", "--master-port 29517 {wild}/ddp.py {images}", alone=False, exits=1,
        around=around.port_in_use(29517), accepted=("port_in_use", "rendezvous_failed")),
    alone_rank("rendezvous", "a rank is missing", "{images} --timeout 12", alone=False, exits=1,
               accepted=("rendezvous_failed",), variables=RANK_0_OF_2 | {"MASTER_PORT": "29518"}),
    ddp("exception on one rank", "shape mismatch", "{wild}/ddp.py {images} --bad-shape 8", alone=False, exits=1,
        accepted=("input_channels_mismatch", "shape_mismatch")),
    ddp("exception on one rank", "missing key", "{wild}/ddp.py {images} --bad-key 8", alone=False, exits=1,
        accepted=("key_error",)),
    ddp(HEALTHY, "as usual", "{wild}/ddp.py {images} --save-every 50"),
    ddp(HEALTHY, "short", "{wild}/ddp.py {images} --duration 4"),
)  # fmt: skip

detection = of("torchvision-style detection", "detection.py", "--data-path")

DETECTION = (
    detection("too many threads", "torch.set_num_threads(48)", "{images} --threads 48",
              accepted=("threads_oversubscribed",)),
    detection("too many threads", "OMP_NUM_THREADS=64 in the environment", "{images}",
              accepted=("threads_oversubscribed",), variables={"OMP_NUM_THREADS": "64"}),
    detection("worker died", "SIGKILL", "{images} -j 2 --max-time 60", meanwhile=send(
        signal.SIGKILL, after_s=25, to="worker"), accepted=("loader_worker_killed",), exits=1),
    detection("worker died", "abort in the worker", "{images} -j 2 --segfault 0.02 --max-time 60", exits=1,
              accepted=("loader_worker_killed", "crashed")),
    detection("broken data set", "truncated JPEG", "{images} --truncated --max-time 60", exits=1,
              accepted=("bad_images", "bad_records")),
    detection("broken data set", "missing image", "{images} --extra-file red/9999.jpg --max-time 60", exits=1,
              accepted=("path_not_found",)),
    detection("full /dev/shm", "1 MB", "{images} -j 2 --size 256 -b 8", around=around.small_shm(1_000_000),
              accepted=SHM, exits=None, read_after_s=70),
    detection("full /dev/shm", "4 MB, larger batches", "{images} -j 1 --size 400 -b 8", exits=None,
              around=around.small_shm(4_000_000), accepted=SHM, read_after_s=70),
    detection("file descriptors", "files left open by the worker", "{images} -j 1 --leak-files 2 --max-time 60",
              exits=1,
              around=around.few_files(256), accepted=OPEN_FILES),
    detection("file descriptors", "files left open by the main process", "{images} -j 0 --leak-files 4 --max-time 60",
              exits=1,
              around=around.few_files(400), accepted=OPEN_FILES),
    detection("loss diverges", "lr 5", "{images} --lr 5 --print-freq 1", accepted=DIVERGES, exits=None),
    detection("loss diverges", "lr 1000", "{images} --lr 1000 --print-freq 1", accepted=DIVERGES, exits=None),
    detection(HEALTHY, "as usual", "{images} --size 96"),
    detection(HEALTHY, "a long one with evaluation", "{images} --max-time 60 --eval --width 32"),
)  # fmt: skip

lightning = of("Lightning", "lit.py", "{images}")

LIGHTNING = (
    lightning("slow preprocessing", "Python in T.Lambda, one worker", "--augment python", accepted=INPUT),
    lightning("slow preprocessing", "PIL filters, no worker", "--augment pil --num-workers 0", accepted=INPUT),
    lightning("Python in the loop", "counting in training_step", "--counting 40", accepted=("python_bound",),
              variables={"LOST_BY": "counted"}),
    lightning("Python in the loop", "sorting in a callback", "--rank-table 120000", accepted=("python_bound",),
              variables={"LOST_BY": "ranked"}),
    lightning("evaluation too often", "val_check_interval=2", "--val-check-interval 2",
              accepted=("evaluation_heavy",)),
    lightning("evaluation too often", "validation in a callback", "--val-now 2", accepted=("evaluation_heavy",)),
    lightning("checkpoints too often", "ModelCheckpoint every 2 steps", "--ckpt-every 2 --hidden 60000",
              accepted=("checkpoint_heavy",)),
    lightning("checkpoints too often", "torch.save in a callback", "--save-now 2 --hidden 60000",
              accepted=("checkpoint_heavy",), variables={"LOST_BY": "saved"}),
    lightning("preempted", "SIGTERM to the job", "--seconds 60", meanwhile=send(signal.SIGTERM, after_s=30), exits=None,
              accepted=("preempted",)),
    lightning("preempted", "SIGTERM to all", "--seconds 60", meanwhile=send(signal.SIGTERM, after_s=30, to="all"),
              exits=None, accepted=("preempted",)),
    lightning("nothing is learned", "all layers frozen but a bias", "--freeze --lr 1e-7",
              accepted=("lr_too_low", "training_from_scratch")),
    lightning("nothing is learned", "lr 1e-10", "--lr 1e-10", accepted=("lr_too_low",)),
    lightning(HEALTHY, "as usual", "--width 48"),
    lightning(HEALTHY, "a busy neighbor", "--width 48", around=around.busy_neighbors(1)),
    lightning(HEALTHY, "with checkpoints and validation", "--width 48 --ckpt-every 40 --val-check-interval 40 "
              "--seconds 50"),
)  # fmt: skip

fit = of("Keras on torch", "keras_fit.py")

KERAS = (
    fit("slow storage", "LD_PRELOAD delay", "{images}", around=around.slow_reads("/images/", 0.02),
        accepted=("slow_storage",), variables={"LOST_BY": "loaded"}),
    fit("slow storage", "throttled HTTP server", "{server}", around=around.http_server("images", delay_s=0.03),
        accepted=("slow_storage",), variables={"LOST_BY": "loaded"}),
    fit("slow preprocessing", "Python pixel by pixel", "{images} --augment python", accepted=INPUT,
        variables={"LOST_BY": "loaded"}),
    fit("slow preprocessing", "PIL filters", "{images} --augment pil", accepted=INPUT,
        variables={"LOST_BY": "loaded"}),
    fit("waits in each step", "POST in a callback", "{images} --tracker {server}", alone=False,
        around=around.http_server("images", delay_s=0.5), accepted=("host_device_syncs",),
        variables={"LOST_BY": "tracked"}),
    fit("waits in each step", "POST to an overloaded server", "{images} --tracker {server} --verbose 2 "
        "--steps-per-epoch 5", alone=False, around=around.http_server("images", delay_s=1.0),
        accepted=("host_device_syncs",), variables={"LOST_BY": "tracked"}),
    fit("evaluation too often", "validation_data with short epochs", "{images} --validate --steps-per-epoch 2",
        accepted=("evaluation_heavy",)),
    fit("evaluation too often", "model.evaluate in a callback", "{images} --evaluate-every 3",
        accepted=("evaluation_heavy",)),
    fit("learning rate too high", "SGD, 1000", "{images} --optimizer sgd --lr 1000 --verbose 2 --steps-per-epoch 2",
        accepted=DIVERGES),
    fit("learning rate too high", "Adam, 3", "{images} --lr 3", accepted=DIVERGES),
    fit("broken start", "weights that do not exist", "{images} --weights best.weights.h5", alone=False, exits=1,
        accepted=("path_not_found", "checkpoint_missing")),
    fit("broken start", "weights in a file of another kind", "{images} --weights {wild}/keras_fit.py", alone=False,
        exits=1, accepted=("keras_file_format", "checkpoint_mismatch", "checkpoint_damaged")),
    fit(HEALTHY, "as usual", "{images} --width 64"),
    fit(HEALTHY, "short, with validation", "{images} --width 64 --validate --seconds 5"),
    fit(HEALTHY, "long, a checkpoint now and then", "{images} --width 64 --seconds 50 --checkpoint-freq 60"),
)  # fmt: skip

JOBS: tuple[Job, ...] = (*LOOP, *DETECTION, *KERAS, *DDP, *LIGHTNING)
