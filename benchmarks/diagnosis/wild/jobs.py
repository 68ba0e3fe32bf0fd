"""The jobs of `diagnose_wild.py`: written without a look at the rules, which were not adapted to them."""

import signal
from collections.abc import Callable
from typing import Any

from benchmarks.diagnosis.wild.around import (
    MATRICES,
    busy_neighbors,
    cpu_quota,
    data,
    http_server,
    memory_limit,
    port_in_use,
    send,
    slow_files,
    slow_reads,
    small_disk,
)
from benchmarks.diagnosis.wild.job import HEALTHY, Job, place

DIVERGES = ("lr_too_high", "diverged", "non_finite_loss", "unstable_training")
NAN = ("non_finite_loss", "diverged")
INPUT = ("slow_decode", "too_few_workers", "input_bound")
"""One process or none prepares the images, too slowly: the three say the same."""
HANGS = ("hung", "hang")
MEMORY = ("host_memory_leak", "host_memory_near_limit")
DATA = "{folder}/../data"


def of(program: str, python: str, *command: str) -> Callable[..., Job]:
    """Returns a function that makes a job of the program from the fault, the way and the words of its arguments."""

    def job(fault: str, way: str, words: str, **others: Any) -> Job:
        words = words.replace("@", DATA + "/")
        return Job(program=program, fault=fault, way=way, command=(*command, *words.split()), python=python, **others)

    return job


keras = of("Keras on TensorFlow", "peers", "keras_fit.py", "--out", "{folder}/out")
tape = of("tf.data with GradientTape", "peers", "tape.py")
yolo = of("Ultralytics", "ultralytics", "yolo.py")
detr = of("HF Trainer, RT-DETR", "ultralytics", "detr.py")
engine = of("engine with hooks", "venv", "engine.py")
RUN3 = ("-m", "torch.distributed.run", "--nproc-per-node", "3")
ddp = of("DDP with 3 ranks", "venv", *RUN3, "--standalone", "{wild}/ddp.py")
launched = of("DDP with 3 ranks", "venv", *RUN3)

SHAPES = data("shapes")
YOLO = data("yolo")
RECORDS = data("records")
TRAIN = "--records @records/train-*.tfrecord"

KERAS = (
    keras("slow storage", "LD_PRELOAD delay per read", "--data @shapes --epochs 3",
          around=data("shapes", then=slow_reads("data/shapes", 0.06)), accepted=("slow_storage",)),
    keras("slow storage", "HTTP server, a request per image", "--data @shapes --epochs 4 --remote",
          around=data("shapes", then=http_server("data/shapes", delay_s=0.02)),
          accepted=("slow_storage", place("keras_fit.py", "UrlSequence.load"))),
    keras("slow preprocessing", "Pillow in a PyDataset", "--data @shapes --epochs 3 --input pillow",
          around=SHAPES, accepted=(*INPUT, place("keras_fit.py", "AugmentedSequence.load"))),
    keras("slow preprocessing", "tf.numpy_function in map", "--data @shapes --epochs 5 --input numpy --width 8",
          around=SHAPES, accepted=(*INPUT, place("keras_fit.py", "equalize_in_numpy"))),
    keras("Python after each batch", "confusion matrix", "--data @shapes --epochs 6 --callback confusion",
          around=SHAPES, accepted=("python_bound", place("keras_fit.py", "ConfusionMatrix.on_train_batch_end"))),
    keras("Python after each batch", "history in JSON", "--data @shapes --epochs 6 --callback history",
          around=SHAPES, accepted=("python_bound", place("keras_fit.py", "JsonHistory.on_train_batch_end"))),
    keras("diverges", "learning rate of 100", "--data @shapes --epochs 10 --optimizer sgd --lr 100", around=SHAPES,
          accepted=DIVERGES),
    keras("diverges", "logarithm of zero in a loss", "--data @shapes --epochs 10 --loss focal", around=SHAPES,
          accepted=NAN),
    keras("missing file", "label map", "--data @shapes --label-map @shapes/label_map.pbtxt", around=SHAPES, exits=1,
          accepted=("path_not_found",)),
    keras("missing file", "an image of the list", "--data @shapes --csv @missing/list.csv",
          around=data("shapes", "missing"), exits=1, accepted=("path_not_found",)),
    keras("checkpoints too often", "BackupAndRestore", "--data @shapes --epochs 3 --hidden 1024 --backup-freq 2",
          around=SHAPES, accepted=("checkpoint_heavy",)),
    keras("checkpoints too often", "ModelCheckpoint", "--data @shapes --epochs 3 --hidden 1024 --save-freq 2",
          around=SHAPES, accepted=("checkpoint_heavy",)),
    keras("healthy", "with validation", "--data @shapes --epochs 10", around=SHAPES),
    keras("healthy", "short", "--data @shapes --epochs 3 --width 8", around=SHAPES),
    keras("healthy", "random labels", "--data @shapes --epochs 10 --random-labels", around=SHAPES),
    keras("healthy", "beside a busy process", "--data @shapes --epochs 8",
          around=data("shapes", then=busy_neighbors(1))),
)  # fmt: skip

TAPE = (
    tape("slow storage", "LD_PRELOAD delay per read", f"{TRAIN} --steps 60 --read-buffer 65536 --measure-waits "
         "--shuffle 32", around=data("records", then=slow_reads("data/records", 0.15)), accepted=("slow_storage",)),
    tape("slow storage", "HTTP server behind from_generator", "--folder @shapes --reader server --steps 50 "
         "--measure-waits --shuffle 0", around=data("shapes", then=http_server("data/shapes", delay_s=0.02)),
         accepted=("slow_storage", place("tape.py", "from_server"))),
    tape("slow preprocessing", "large JPEGs, one decoder, no prefetch", "--folder @scans --reader files --parallel 1 "
         "--no-prefetch --steps 30 --shuffle 0 --measure-waits --eval-batches 0", around=data("scans"), accepted=INPUT),
    tape("slow preprocessing", "Pillow in from_generator", "--folder @scans --reader pillow --steps 16 --batch 8 "
         "--shuffle 0 --measure-waits --eval-batches 0", around=data("scans"),
         accepted=(*INPUT, place("tape.py", "from_pillow"))),
    tape("retracing", "a Python number as argument", f"{TRAIN} --steps 40 --warmup-in-python", around=RECORDS,
         accepted=("recompiles",)),
    tape("retracing", "another shape in each step", f"{TRAIN} --steps 40 --multi-scale", around=RECORDS,
         accepted=("recompiles",)),
    tape("damaged record", "truncated file", "--records @records/truncated/*.tfrecord", around=RECORDS, exits=1,
         accepted=("damaged_record", "bad_records")),
    tape("damaged record", "flipped bytes", "--records @records/flipped/*.tfrecord", around=RECORDS, exits=1,
         accepted=("damaged_record", "bad_records")),
    tape("memory leak", "all batches kept as numpy", f"{TRAIN} --steps 250 --batch 32 --width 16 --keep batches",
         around=RECORDS, accepted=MEMORY),
    tape("memory leak", "activations kept as tensors", f"{TRAIN} --steps 200 --batch 8 --keep activations",
         around=RECORDS, accepted=MEMORY),
    tape("healthy", "TFRecords", f"{TRAIN} --steps 250", around=RECORDS),
    tape("healthy", "short", f"{TRAIN} --steps 40", around=RECORDS),
    tape("healthy", "long", f"{TRAIN} --steps 800", around=RECORDS),
    tape("healthy", "random labels, files", "--folder @shapes --reader files --steps 250 --random-labels",
         around=SHAPES),
)  # fmt: skip

YOLOS = (
    yolo("slow storage", "LD_PRELOAD delay per open", "--data @yolo/data.yaml --imgsz 96 --epochs 2 --no-val",
         around=data("yolo", then=slow_files("yolo/images", open_s=0.15)), accepted=("slow_storage",)),
    yolo("slow storage", "HTTP server", "--data @yolo/data.yaml --imgsz 96 --epochs 2 --no-val --images served",
         around=data("yolo", then=http_server("data/yolo/images", delay_s=0.1)),
         accepted=("slow_storage", place("yolo.py", "ServedDataset.load_image"))),
    yolo("slow preprocessing", "large JPEGs", "--data @yolo_large/data.yaml --imgsz 96 --epochs 4 --no-val",
         around=data("yolo_large"), accepted=INPUT),
    yolo("slow preprocessing", "Pillow in the dataset", "--data @yolo/data.yaml --imgsz 96 --epochs 2 --no-val "
         "--images photometric", around=YOLO, accepted=(*INPUT, place("yolo.py", "PhotometricDataset.load_image"))),
    yolo("evaluation too often", "large validation split", "--data @yolo_val/data.yaml --imgsz 96 --epochs 3 "
         "--clock-val", around=data("yolo_val"), accepted=("evaluation_heavy",)),
    yolo("evaluation too often", "callback every two batches", "--data @yolo/data.yaml --imgsz 96 --epochs 2 "
         "--check-every 2", around=YOLO, accepted=("evaluation_heavy", place("yolo.py", "main.check"))),
    yolo("missing file", "validation images", "--data @missing/data.yaml", around=data("missing"), exits=1,
         accepted=("path_not_found",)),
    yolo("missing file", "model configuration", "--data @yolo/data.yaml --model yolo11n-thin-neck.yaml", around=YOLO,
         exits=1, accepted=("path_not_found",)),
    yolo("healthy", "validation after each epoch", "--data @yolo/data.yaml --imgsz 96 --epochs 4", around=YOLO),
    yolo("healthy", "two workers", "--data @yolo/data.yaml --imgsz 96 --epochs 4 --workers 2", around=YOLO),
    yolo("healthy", "beside a busy process", "--data @yolo/data.yaml --imgsz 96 --epochs 3",
         around=data("yolo", then=busy_neighbors(1))),
)  # fmt: skip

DETR = (
    detr("slow preprocessing", "Pillow in a lambda as collator", "--data @yolo_mid --steps 16 --collate lambda",
         around=data("yolo_mid"), accepted=(*INPUT, place("detr.py", "main.denoise"))),
    detr("slow preprocessing", "pixel by pixel, one worker", "--data @yolo_mid --steps 16 --effects fog --workers 1",
         around=data("yolo_mid"), accepted=(*INPUT, place("detr.py", "Boxes.fog"))),
    detr("evaluation too often", "eval_steps", "--data @yolo_val --steps 16 --train 16 --val 48 --eval-steps 2",
         around=data("yolo_val"), accepted=("evaluation_heavy",)),
    detr("evaluation too often", "compute_metrics in Python", "--data @yolo_val --steps 20 --train 16 --val 32 "
         "--eval-steps 3 --python-metrics", around=data("yolo_val"),
         accepted=("evaluation_heavy", place("detr.py", "main.metrics"))),
    detr("checkpoints too often", "save_steps on a slow disk", "--data @yolo --steps 24 --save-steps 1",
         around=data("yolo", then=slow_files("/checkpoint-", write_s=0.0015)), accepted=("checkpoint_heavy",)),
    detr("checkpoints too often", "callback on a slow disk", "--data @yolo --steps 24 --soup 1",
         around=data("yolo", then=slow_files("/soup-", write_s=0.0015)),
         accepted=("checkpoint_heavy", place("detr.py", "SaveEverything.on_step_end"))),
    detr("diverges", "learning rate", "--data @yolo --steps 40 --lr 1e6 --clip 0", around=YOLO, exits=None,
         accepted=DIVERGES),
    detr("diverges", "SGD without clipping", "--data @yolo --steps 40 --lr 1e4 --clip 0 --optim sgd", around=YOLO,
         exits=None, accepted=DIVERGES),
    detr("wrong number of classes", "one instead of three", "--data @yolo --labels 1", around=YOLO, exits=1,
         accepted=("ended_by_error", "label_out_of_range")),
    detr("wrong number of classes", "two instead of three", "--data @yolo --labels 2", around=YOLO, exits=1,
         accepted=("ended_by_error", "label_out_of_range")),
    detr("healthy", "evaluation and checkpoints", "--data @yolo --steps 50 --val 8 --eval-steps 25 --save-steps 25",
         around=YOLO),
    detr("healthy", "short", "--data @yolo --steps 12", around=YOLO),
    detr("healthy", "beside busy processes", "--data @yolo --steps 30", around=data("yolo", then=busy_neighbors(2))),
)  # fmt: skip

NODES = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29587 --rdzv-conf join_timeout=15,last_call_timeout=5"
DDP = (
    ddp("straggler", "slow storage of one rank", "--data @shapes --data-of-rank-1 @shapes_nfs --epochs 4",
        around=data("shapes", "shapes_nfs", then=slow_files("shapes_nfs", open_s=0.04)),
        accepted=("straggler", "slow_storage")),
    ddp("straggler", "slow preprocessing of one rank", "--data @shapes --blur-of-rank-2 2 --epochs 4", around=SHAPES,
        accepted=("straggler", *INPUT, place("ddp.py", "Shapes.__getitem__"))),
    ddp("rank waits in vain", "one rank has fewer images", "--data @shapes --epochs 4 --uneven --timeout 15",
        around=SHAPES, exits=1, accepted=("collective_timeout",)),
    ddp("rank waits in vain", "one rank in a lock, timeout", "--data @shapes --epochs 10 --locked --timeout 15",
        around=SHAPES, exits=1, accepted=("collective_timeout", *HANGS)),
    ddp("rank waits in vain", "one rank in a lock, no timeout", "--data @shapes --epochs 10 --locked", around=SHAPES,
        read_after_s=70, accepted=HANGS),
    launched("rendezvous", "port in use", "--master-addr 127.0.0.1 --master-port 29588 {wild}/ddp.py --data "
             "@shapes", around=data("shapes", then=port_in_use(29588)), exits=1,
             accepted=("rendezvous_failed", "port_in_use")),
    launched("rendezvous", "second node missing", f"{NODES} {{wild}}/ddp.py --data @shapes", around=SHAPES,
             exits=1, accepted=("rendezvous_failed",)),
    ddp("unused parameters", "a head without a loss", "--data @shapes --extra-head", around=SHAPES, exits=1,
        accepted=("ddp_unused_parameters",)),
    ddp("unused parameters", "an adapter of some steps", "--data @shapes --adapter", around=SHAPES, exits=1,
        accepted=("ddp_unused_parameters",)),
    ddp("killed", "SIGKILL of one rank", "--data @shapes --epochs 200", around=SHAPES, exits=None,
        meanwhile=send(signal.SIGKILL, after_s=25, to="worker"), accepted=("killed",)),
    ddp("killed", "SIGKILL of torchrun", "--data @shapes --epochs 200", around=SHAPES, exits=None,
        meanwhile=send(signal.SIGKILL, after_s=25), accepted=("killed",)),
    ddp("healthy", "three ranks on the same data", "--data @shapes --epochs 8", around=SHAPES),
    ddp("healthy", "short", "--data @shapes --epochs 1", around=SHAPES),
    ddp("healthy", "evaluation on rank 0", "--data @shapes --epochs 8 --evaluate", around=SHAPES),
)  # fmt: skip

ENGINE = (
    engine("waits in each step", "POST to a slow server", "--data @shapes --epochs 2 --hook post",
           around=data("shapes", then=http_server("data/shapes", delay_s=0.5)),
           accepted=("host_device_syncs", place("engine.py", "post_metrics"))),
    engine("waits in each step", "a limit of steps per second", "--data @shapes --epochs 2 --hook limit",
           around=SHAPES, accepted=("host_device_syncs", place("engine.py", "token_bucket.limited"))),
    engine("other processes", "four busy loops", "--data @shapes --epochs 3",
           around=data("shapes", then=busy_neighbors(4)), accepted=("cpu_contention",)),
    engine("other processes", "matrix products", "--data @shapes --epochs 3",
           around=data("shapes", then=busy_neighbors(3, MATRICES)), accepted=("cpu_contention",)),
    engine("CPU quota", "0.4 cores", "--data @shapes --epochs 1", around=data("shapes", then=cpu_quota(0.4)),
           accepted=("cpu_quota",)),
    engine("CPU quota", "0.6 cores, two workers", "--data @shapes --epochs 1 --workers 2",
           around=data("shapes", then=cpu_quota(0.6)), accepted=("cpu_quota",)),
    engine("hang", "two locks in two orders", "--data @shapes --epochs 20 --hook deadlock", around=SHAPES,
           read_after_s=60, accepted=HANGS),
    engine("hang", "the prefetch thread died", "--data @shapes --epochs 1 --dead-prefetcher", around=SHAPES,
           read_after_s=60, accepted=HANGS),
    engine("preempted", "SIGTERM, checkpoint, exit 143", "--data @shapes --epochs 200 --on-term save", around=SHAPES,
           exits=None, meanwhile=send(signal.SIGTERM, after_s=25), accepted=("preempted", "machine_preempted")),
    engine("preempted", "SIGTERM, no handler", "--data @shapes --epochs 200", around=SHAPES, exits=None,
           meanwhile=send(signal.SIGTERM, after_s=25), accepted=("preempted",)),
    engine("disk full", "torch.save", "--data @shapes --epochs 5 --save-to {folder}/disk",
           around=data("shapes", then=small_disk("disk", 4_000_000)), exits=1, accepted=("disk_full",)),
    engine("disk full", "predictions appended to a file", "--data @shapes --epochs 5 --dump-to {folder}/disk",
           around=data("shapes", then=small_disk("disk", 4_000_000)), exits=1, accepted=("disk_full",)),
    engine("out of memory", "limit of address space, numpy", "--data @shapes --address-space-gb 6 --crop-pool 1200",
           around=SHAPES, exits=1, accepted=("host_out_of_memory",)),
    engine("out of memory", "limit of address space, torch", "--data @shapes --address-space-gb 6 --size 3000 "
           "--batch 8", around=SHAPES, exits=1, accepted=("host_out_of_memory",)),
    engine("killed by the kernel", "memory limit, one large array", "--data @shapes --crop-pool 400",
           around=data("shapes", then=memory_limit(1_500_000_000)), exits=None,
           accepted=("oom_killed", "host_out_of_memory")),
    engine("killed by the kernel", "memory limit, images kept", "--data @shapes --epochs 200 --keep-images",
           around=data("shapes", then=memory_limit(1_500_000_000)), exits=None,
           accepted=("oom_killed", "host_out_of_memory", "host_memory_leak")),
    engine("memory leak", "images kept by the data set", "--data @shapes --epochs 4 --keep-images", around=SHAPES,
           accepted=MEMORY),
    engine("memory leak", "outputs kept with their graphs", "--data @shapes --epochs 4 --hook keep-maps",
           around=SHAPES, accepted=MEMORY),
    engine("too many threads", "torch.set_num_threads(24)", "--data @shapes --epochs 1 --threads 24", around=SHAPES,
           accepted=("threads_oversubscribed",)),
    engine("too many threads", "OMP_NUM_THREADS=16, two workers", "--data @shapes --epochs 1 --workers 2",
           around=SHAPES, variables={"OMP_NUM_THREADS": "16"}, accepted=("threads_oversubscribed",)),
    engine("evaluation too often", "every two steps", "--data @shapes --epochs 2 --validate-every 2 --val 24",
           around=SHAPES, accepted=("evaluation_heavy",)),
    engine("evaluation too often", "a large part each time", "--data @shapes --epochs 2 --validate-every 9 --val 150",
           around=SHAPES, accepted=("evaluation_heavy",)),
    engine("healthy", "validation and checkpoint", "--data @shapes --epochs 4 --validate-every 36 --val 24",
           around=SHAPES),
    engine("healthy", "short", "--data @shapes --epochs 1", around=SHAPES),
    engine("healthy", "long", "--data @shapes --epochs 13 --validate-every 54 --val 24", around=SHAPES),
    engine("healthy", "random masks, two workers", "--data @shapes --epochs 4 --random-masks --workers 2",
           around=SHAPES),
    engine("healthy", "beside a busy process", "--data @shapes --epochs 3",
           around=data("shapes", then=busy_neighbors(1))),
)  # fmt: skip

JOBS = KERAS + TAPE + YOLOS + DETR + DDP + ENGINE
assert all(bool(job.accepted) != (job.fault == HEALTHY) for job in JOBS)
