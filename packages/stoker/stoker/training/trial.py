"""A process that repeats steps of a training on request, so that two configurations can be measured in turn.

`python -m stoker.training.trial` reads a `Start`, then `Request`s, as JSON lines from stdin, and answers each with a
`Reply`; it ends at the end of stdin. Steps are those of a run, from its first weights. The stream of samples begins at
position 0 in every process, so that two processes that get the same requests train on the same samples. Who asks is
`stoker/tuning/trials.py`. With several devices it is rank 0: it starts the other ranks and passes on what it reads.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from stoker.config.settings import Config, check_config, from_fields
from stoker.data.batch import Batch
from stoker.data.index import Index, open_index_of
from stoker.evaluation.evaluate import detect, evaluation_loader
from stoker.hardware.cpu import configure_malloc
from stoker.hardware.device import Device
from stoker.hardware.memory_errors import is_out_of_memory, out_of_memory_as_error
from stoker.hardware.selection import select_device
from stoker.models.layers.rank_mean import counting_over_ranks
from stoker.training.checkpoint import CheckpointWriter
from stoker.training.cluster import RankPlace, find_place
from stoker.training.defaults.checks import check_user_settings
from stoker.training.defaults.dry_run import make_worst_case
from stoker.training.local_ranks import make_places
from stoker.training.make_step import CudaCapture, CudaGraphStep, make_parallel
from stoker.training.ranks import FAILURE_WAIT_S, Ranks, joined
from stoker.training.start import ResolvedRun, build_initial_model, make_setup, start_worker_processes
from stoker.training.step import split_batch, train_step
from stoker_watch.errors import OutOfMemoryError, RankError, StokerError
from stoker_watch.recording.ledger import Ledger
from stoker_watch.runs.records import RunFolder

SETTLE_S = 2.0
"""Most seconds for what has arrived in a pause to be read."""
OTHER_RANK = "other-rank"
"""The argument of a process that rank 0 starts."""
NO_END = 2**62
"""Steps of a training whose progress stays 0."""
MAX_EVALUATED = 64
"""Images of a measured evaluation; the time of all follows from their number."""


class Start(msgspec.Struct, forbid_unknown_fields=True):
    """The first line. settings: all of a run; num_images: that the stream repeats; devices: that train together."""

    settings: dict[str, Any]
    num_images: int
    devices: int = 1


Work = Literal["train", "step", "load", "losses", "eval", "checkpoint", "ramp", "restore"]


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """train: whole steps. step: the same on one batch that is kept on the device. load: loading alone. losses: the
    total loss and the inputs of each `group` of images, with updates at `lr`. eval, checkpoint: the seconds of one.
    ramp: a step at `lr`, and its loss before the update; the first begins with the weights of a run. restore: back to
    before it. steady: as in the middle of a run, which has no pauses in which a bucket goes on sending. train: the
    clock starts after some steps, and the images take as long as the bucket takes to send as many; load: it starts
    after what was asked for before."""

    do: Work
    images: int = 0
    group: int = 1
    lr: float = 0.0
    steady: bool = False


class Reply(msgspec.Struct, omit_defaults=True):
    """An answer. seconds: of the work; images, steps: that were done; phases: seconds by phase of the ledger."""

    seconds: float = 0.0
    images: int = 0
    steps: int = 0
    phases: dict[str, float] = {}
    losses: list[float] = []
    inputs: list[float] = []
    """Three of each group: the means of the left and the right half of the pixels, and that of the boxes' sides."""
    workers: int = 0
    prefetch_depth: int = 0
    requested: int = 0
    """Images that a bucket is asked for ahead of the loader; 0: none is used."""
    error: str = ""
    """Why it could not be done; the process ends then."""
    unavailable: bool = False
    """It cannot be done on this machine, rather than failed."""


class Trial:
    """Steps of a configuration. ranks: those that train together; all get the same requests."""

    def __init__(
        self, config: Config, index: Index, device: Device, num_images: int, ranks: Ranks | None = None
    ) -> None:
        self.ranks = ranks = ranks or Ranks()
        config = config.replace(max_bad_fraction=1.0)
        train_indices = index.image_indices("train")
        chosen = np.linspace(0, len(train_indices) - 1, min(num_images, len(train_indices))).astype(np.int64)
        nowhere = Path("nowhere")  # a trial writes no records and no checkpoints
        # One rank of a machine downloads weights.
        model = ranks.locally_first(lambda: build_initial_model(config, index, device, _ignore_event))
        resolved = ResolvedRun(config, {}, device, index, ranks)
        setup = make_setup(
            resolved,
            model,
            RunFolder(nowhere, 1),
            _ignore_event,
            CheckpointWriter(nowhere, _ignore_event, has_folder=False),
            start_worker_processes(resolved, _ignore_event),
            quarantine=lambda _: None,
            image_indices=train_indices[chosen],
        )
        setup = dataclasses.replace(setup, total_steps=NO_END)
        self.setup, self.optimizer, self.loader, self.device = setup, setup.optimizer, setup.loader, device
        self.batch_size = config.run.batch_size
        self.parallel = make_parallel(setup, _ignore_event)
        self.parallel.micro_batches = config.optim.grad_accum_steps
        if config.run.compile:  # anchors of this image size are constants of the compiled step
            with torch.no_grad(), self.parallel.autocast:
                model(make_worst_case(setup).images)
        self._train: Callable[[Batch], None] = functools.partial(train_step, self.parallel)
        if config.run.cuda_graph and self.parallel.can_be_captured:
            self._train = CudaGraphStep(self._train, CudaCapture())
        self.ledger = Ledger(device.make_clock(), start_s=time.perf_counter())
        self.loader.on_copy_awaited = self.ledger.begin_h2d_wait
        self._kept_batch: Batch | None = None
        self._before_ramp: dict[str, Any] | None = None
        self._ramp_steps = 0
        if config.run.cache != "none":  # in a run, all but the first epoch finds the images there
            first = self.loader.state_dict()
            self._load(len(chosen))
            self.loader.load_state_dict(first)  # the samples are those of a trial without a cache

    def answer(self, request: Request) -> Reply:
        """Does what is asked, and measures it."""
        if request.do == "restore":
            self._restore()
            return Reply()
        start_s = time.perf_counter()
        if request.do == "ramp":
            loss = self._ramp(request.lr)
            finite = [loss] if math.isfinite(loss) else []  # JSON has no other numbers
            return Reply(seconds=time.perf_counter() - start_s, images=self.batch_size, steps=1, losses=finite)
        if request.do in ("eval", "checkpoint"):
            return Reply(seconds=self._evaluate() if request.do == "eval" else self._copy_state())
        steps = max(1, -(-request.images // self.batch_size))
        before = self.loader.stats()
        if request.steady and self.ranks.any(before.requested > 0):
            if request.do == "load":
                self._load((before.ready + before.loading + before.requested) * self.ranks.world_size)
            else:
                self._settle(max(1, steps // 2))
            before = self.loader.stats()
        self.ranks.barrier()
        self.device.synchronize()
        self.ledger.window(0.0)
        start_s = time.perf_counter()
        losses: list[float] = []
        inputs: list[float] = []
        if request.do == "losses":
            losses, inputs = self._compute_losses(steps, request.group, request.lr)
        elif request.do == "load":
            self._load(steps * self.batch_size)
        else:
            with self.parallel.timing_waits(self.ledger):
                if request.do == "step" and self._kept_batch is None:  # its buffer will be filled again
                    self._kept_batch = Batch(*(tensor.clone() for tensor in next(self.loader)))
                for _ in range(steps):
                    self._step(self._kept_batch if request.do == "step" else None)
        self.device.synchronize()
        seconds, breakdown = time.perf_counter() - start_s, self.ledger.window(0.0)
        images, after = steps * self.batch_size, self.loader.stats()
        phases = {} if breakdown is None else dict(breakdown.phases)
        if request.steady and request.do == "train" and after.requested:  # it used up what was there
            own_images = images / self.ranks.world_size
            wait_s = seconds * max(0.0, own_images / max(1, after.fetched - before.fetched) - 1.0)
            phases["input_wait"] = phases.get("input_wait", 0.0) + wait_s
            seconds += wait_s
        return Reply(
            seconds=self._longest(seconds),
            images=images,
            steps=steps,
            phases=phases,
            losses=losses,
            inputs=inputs,
            workers=after.workers,
            requested=after.requested * self.ranks.world_size,
        )

    def _longest(self, seconds: float) -> float:
        """The longest time of all ranks."""
        return max(self.ranks.gather_all(seconds))

    def _settle(self, steps: int) -> None:
        """Waits for what a bucket has sent in a pause, and trains until requests are as far apart as in a run."""
        limit_s, fetched = time.perf_counter() + SETTLE_S, -1
        while fetched != (fetched := self.loader.stats().fetched) and time.perf_counter() < limit_s:
            time.sleep(SETTLE_S / 10)
        for _ in range(steps):
            self._step(None)

    def _next_batch(self) -> Batch:
        with self.ledger.phase("input_wait"):
            batch = next(self.loader)
            self.ledger.split_input_wait(self.loader.last_wait)
        return batch

    def _load(self, images: int) -> None:
        for _ in range(-(-images // self.batch_size)):
            self._next_batch()

    def _step(self, batch: Batch | None) -> None:
        batch = batch or self._next_batch()
        with self.ledger.compute():
            self.optimizer.set_scalars(0.0, 0)
            self._train(batch)
            self.setup.state.step += 1

    def _compute_losses(self, steps: int, group: int, lr: float) -> tuple[list[float], list[float]]:
        """One update of the weights for each batch, which is split into groups that the model gets one by one."""
        losses: list[float] = []
        inputs: list[float] = []
        parts = max(1, self.setup.rank_batch_size // group)
        for _ in range(steps):
            batch = self._next_batch()
            means = []
            for part in split_batch(batch, parts):
                halves = part.images.float().tensor_split(2, dim=3)
                means += [*(half.mean() for half in halves), part.boxes.float().mean()]
            own = self._update(batch, lr, 0, parts), [float(mean) for mean in means]
            for rank_losses, rank_means in self.ranks.gather_all(own):  # in the order of the images of a batch
                losses += [loss for loss in rank_losses if math.isfinite(loss)]  # JSON has no other numbers
                inputs += rank_means
        return losses, inputs

    def _update(self, batch: Batch, lr: float, completed_steps: int, parts: int) -> list[float]:
        """A step without a CUDA graph, and the loss of each part of the batch before it, as of one device alone."""
        parallel, compute = self.parallel, self.parallel.loss_fn
        found: list[Tensor] = []

        def record(part: Batch) -> dict[str, Tensor]:
            losses = own = compute(part)
            if not self.ranks.alone:  # these are divided by the boxes that all ranks have in their parts
                with torch.no_grad(), counting_over_ranks(1):
                    own = compute(part)
            found.append(torch.stack([loss.detach() for loss in own.values()]).sum())
            return losses

        micro_batches, parallel.micro_batches, parallel.loss_fn = parallel.micro_batches, parts, record
        try:
            self.optimizer.set_scalars(lr, completed_steps)
            train_step(parallel, batch)
            self.setup.state.step += 1
        finally:
            parallel.micro_batches, parallel.loss_fn = micro_batches, compute
        return [float(loss) for loss in found]

    def _ramp(self, lr: float) -> float:
        """The loss of the next batch, and an update; all groups of parameters keep the ratio of their rates."""
        if self._before_ramp is None:
            self._before_ramp = copy.deepcopy(self._state())
        losses = self._update(self._next_batch(), lr, self._ramp_steps, self.parallel.micro_batches)
        self._ramp_steps += 1
        return statistics.fmean(map(statistics.fmean, self.ranks.gather_all(losses)))

    def _state(self) -> dict[str, Any]:
        """The state that a ramp changes."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "ema": self.optimizer.ema_model.state_dict(),
            "loader": self.loader.state_dict(),
            "generator": torch.get_rng_state(),
            "generators": torch.cuda.get_rng_state_all() if self.device.kind == "cuda" else [],
        }

    def _restore(self) -> None:
        """Restores the state before the first step of the ramp, to the bit."""
        if self._before_ramp is None:
            return
        saved = self._before_ramp
        self.optimizer.load_state_dict(saved["optimizer"], saved["ema"])
        self.optimizer.set_scalars(0.0, 0)
        self.loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["generator"])
        if saved["generators"]:
            torch.cuda.set_rng_state_all(saved["generators"])
        self._ramp_steps = 0

    def _evaluate(self) -> float:
        """Seconds of an evaluation of the validation split, from those of a part of it."""
        config, indices = self.setup.config, self.setup.val_indices
        part = indices[:MAX_EVALUATED]
        loader = evaluation_loader(
            self.setup.index, part, self.device,
            batch_size=max(1, self.setup.rank_batch_size // config.optim.grad_accum_steps),
            image_size=config.data.image_size, resize=config.data.resize, workers=config.run.workers,
            max_bad_fraction=1.0, rank=self.ranks.rank, world_size=self.ranks.world_size,
        )  # fmt: skip
        with contextlib.closing(loader):
            batches = iter(loader)
            self.ranks.barrier()
            start_s = time.perf_counter()
            detect(self.optimizer.ema_model, batches, self.device, precision=config.run.precision)
            self.device.synchronize()
            return self._longest(time.perf_counter() - start_s) * len(indices) / len(part)

    def _copy_state(self) -> float:
        """Seconds that a checkpoint interrupts the steps: the copy of the state; it is written in the background."""
        times = []
        for _ in range(3):
            start_s = time.perf_counter()
            copy.deepcopy((self.optimizer.state_dict(), self.optimizer.ema_model.state_dict()))
            self.device.synchronize()
            times.append(time.perf_counter() - start_s)
        return self._longest(statistics.median(times))


def _ignore_event(_kind: str, _text: str, /, **_: object) -> None:
    """Drops messages of the loader, which were printed when the run trained."""


class _OtherRanks:
    """The processes of the other ranks, which rank 0 has started; none where it trains alone."""

    def __init__(self, devices: int, reply: Callable[["Reply"], None]) -> None:
        places: list[RankPlace] = make_places(devices) if devices > 1 else []
        self.place = places[0] if places else None
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "stoker.training.trial", OTHER_RANK],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **place.variables()},
            )
            for place in places[1:]
        ]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process, reply), daemon=True).start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]", reply: Callable[["Reply"], None]) -> None:
        """Ends this process if the other one has failed and no exchange with it has said so: it may wait for ever."""
        if process.wait():
            time.sleep(FAILURE_WAIT_S)
            reply(Reply(error=f"rank {rank} ended with exit code {process.returncode}"))
            os._exit(1)

    def tell(self, line: bytes) -> None:
        """Passes on what rank 0 has read."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its error is raised by the next exchange
                process.stdin.write(line)
                process.stdin.flush()

    def end(self) -> None:
        """Ends their input, at which they end."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def main() -> int:
    """Answers until the end of stdin. Returns the exit code."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no reply

    def reply(value: Reply) -> None:
        replies.write(msgspec.json.encode(value) + b"\n")

    def fail(value: Reply) -> int:
        reply(value)
        print(value.error, file=sys.stderr)
        return 1

    try:
        line = sys.stdin.buffer.readline()
        start = msgspec.json.decode(line, type=Start)
        config = from_fields(start.settings)
        check_config(config)
        is_other = OTHER_RANK in sys.argv
        others = _OtherRanks(1 if is_other else start.devices, reply)
        others.tell(line)
        with joined(find_place() if is_other else others.place) as ranks, out_of_memory_as_error("training"):
            device = select_device(ranks.device_name(config.run.device))
            device.prepare_for_fixed_shapes()
            if device.is_cpu:
                configure_malloc()
            index = ranks.locally_first(lambda: open_index_of(config.data))
            check_user_settings(config, index, device, ranks.devices())  # a run refuses them too
            trial = Trial(config, index, device, start.num_images, ranks)
            stats = trial.loader.stats()
            reply(Reply(workers=stats.workers, prefetch_depth=stats.prefetch_depth))
            for line in sys.stdin.buffer:
                others.tell(line)
                reply(trial.answer(msgspec.json.decode(line, type=Request)))
            trial.loader.close()
            others.end()
    except StokerError as error:
        text = " ".join([error.what, *(error.cause or "").strip().splitlines()[-1:]])
        text = "out of memory" if isinstance(error, OutOfMemoryError) else text
        has_failed = isinstance(error, OutOfMemoryError | RankError)
        return fail(Reply(error=text, unavailable=not has_failed))
    except (MemoryError, RuntimeError, ImportError) as error:  # of kernels, compilers, allocators
        text = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}".partition("\n")[0]
        return fail(Reply(error=text))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # worker processes and threads of a trial that failed do not hold it
