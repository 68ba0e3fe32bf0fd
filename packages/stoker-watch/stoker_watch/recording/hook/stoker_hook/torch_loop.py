"""Hooks for PyTorch: batches of a DataLoader, backward passes, optimizer steps, checkpoints, compilation, collectives.

One function per module of torch, called after the import of that module. Steps need torch 2.0 or newer.
"""

import os
from _thread import get_ident
from collections import Counter, deque
from functools import partial
from sys import modules
from time import monotonic
from typing import Any
from weakref import ref

from .clock import (
    BUSY,
    COMM,
    COMPILE,
    DEVICE_COMM,
    RANK,
    SYNCS,
    WORKER_START_S,
    WORKER_STARTS,
    clock,
    patch_timed,
    timed_next,
)
from .failures import report_failure
from .instruments import patch_collectives as time_collectives
from .instruments import replacing, time_compilations, timed
from .mistakes import PLACE_ATTR, own_line


def _report_torch_version() -> None:
    """Adds the version of torch to the state file, if there is one."""
    if clock.is_published:
        clock.publish(f"torch {getattr(modules.get('torch'), '__version__', '')}".rstrip())


def patch_dataloader(module: "Any") -> None:
    """torch.utils.data.dataloader: the training thread's time in iterators is `input_wait`."""
    iterator_class = module._BaseDataLoaderIter
    original_next = iterator_class.__next__
    grad_enabled = modules["torch"].is_grad_enabled

    @replacing(iterator_class, "__next__")
    def __next__(self: "Any") -> "Any":
        if not clock.is_outside_phases():
            return original_next(self)
        workers = getattr(self, "_num_workers", -1)
        is_evaluating = not grad_enabled()
        batch = timed_next(self, original_next, workers=workers, is_evaluating=is_evaluating)
        if not is_evaluating:
            clock.observe(clock.mistakes.batches.note, self, batch)
        return batch

    _time_worker_starts(module._MultiProcessingDataLoaderIter)
    # starts the workers; `maybe_` because it is not known yet whether the iterator is for training
    patch_timed(module, "maybe_wait", "DataLoader.__iter__")
    _report_torch_version()


def _time_worker_starts(iterator_class: "Any") -> None:
    """Counts iterators that start worker processes after the first step, and the time that starting and ending them
    takes, with the wait for their first batch."""
    original_init, original_next = iterator_class.__init__, iterator_class._next_data

    def begin() -> "Any":
        if not clock.has_stepped or get_ident() != clock.thread_id:
            return None
        begin_s = monotonic()

        def end() -> None:
            clock.values[WORKER_START_S] += monotonic() - begin_s

        return end

    first_data = timed(original_next, begin)
    start = timed(original_init, begin)

    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        start(self, *args, **kwargs)
        clock.values[WORKER_STARTS] += clock.has_stepped and get_ident() == clock.thread_id
        self._stoker_awaits_first = True

    def _next_data(self: "Any") -> "Any":
        is_first = self.__dict__.pop("_stoker_awaits_first", False)
        return (first_data if is_first else original_next)(self)

    iterator_class.__init__, iterator_class._next_data = __init__, _next_data
    iterator_class._shutdown_workers = timed(iterator_class._shutdown_workers, begin)


def patch_optimizers(module: "Any") -> None:
    """torch.optim.optimizer: optimizer steps; steps that a GradScaler skips do not count."""

    def after_step(optimizer: "Any", *_: "Any") -> None:
        groups = optimizer.param_groups
        lr, has_gradients, group = _read_groups(groups)
        clock.count_optimizer_step(optimizer, lr, has_gradients=has_gradients, group=group)
        clock.observe(clock.mistakes.after_step, optimizer, groups, is_trained)

    def before_step(optimizer: "Any", *_: "Any") -> None:
        clock.observe(clock.mistakes.before_step, optimizer)

    def is_trained(module: "Any") -> bool:
        # a backbone that is frozen on purpose has less of the optimizer, a model of which only the head is trained more
        return clock.is_of_training(module.parameters(), 0.95, 0.5)

    original = module.Optimizer.__init__

    @replacing(module.Optimizer, "__init__")
    def __init__(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        try:
            self.__dict__.setdefault(PLACE_ATTR, own_line())
        except Exception as error:  # noqa: BLE001 (an optimizer without attributes)
            report_failure("optimizer", error)
        original(self, *args, **kwargs)

    module.register_optimizer_step_pre_hook(before_step)
    module.register_optimizer_step_post_hook(after_step)
    clock.make_device_events = make_device_events
    _report_torch_version()


def _read_groups(groups: "Any") -> "tuple[Any, bool, int]":
    """(highest learning rate, None: not numbers of Python; whether a parameter has a gradient; what tells parameters of
    optimizers apart). A frozen group may have the rate 0; loading a state replaces groups, not parameters."""
    lr, parameters = None, 0
    try:
        rates = [rate for group in groups if isinstance(rate := group.get("lr"), (int, float))]
        lr = max(rates) if len(rates) == len(groups) else None
        first = groups[0]["params"]
        parameters = id(first[0]) if first else 0
        has_gradients = any(parameter.grad is not None for group in groups for parameter in group["params"])
    except Exception:  # noqa: BLE001 (an optimizer whose groups or parameters are others than torch's)
        return lr, True, parameters
    return lr, has_gradients, parameters


def patch_backward(module: "Any") -> None:
    """torch.autograd: a backward means that the batches before it were for training."""
    original = module.backward
    depth = 0  # with checkpointing, a backward may run others

    @replacing(module, "backward")
    def backward(*args: "Any", **kwargs: "Any") -> "Any":
        nonlocal depth
        is_training_thread = get_ident() == clock.thread_id
        if is_training_thread:
            clock.confirm_training()
            if not depth:
                tensors = args[0] if args else kwargs.get("tensors")
                create_graph = args[3] if len(args) > 3 else kwargs.get("create_graph")
                retain_graph = args[2] if len(args) > 2 else kwargs.get("retain_graph")
                clock.observe(clock.mistakes.before_backward, tensors, create_graph, retain_graph)
        depth += is_training_thread
        try:
            original(*args, **kwargs)
        finally:
            depth -= is_training_thread
        if is_training_thread and not depth:
            clock.observe(clock.mistakes.after_backward)
            if not clock.has_optimizer:
                clock.count_backward(module)


def patch_anomaly_mode(module: "Any") -> None:
    """torch.autograd.anomaly_mode: where the mode for debugging is turned on, as a function or with `with`."""
    for cls in (module.detect_anomaly, module.set_detect_anomaly):
        cls.__init__ = timed(cls.__init__, lambda: clock.observe(clock.mistakes.note_place, "anomaly"))


def patch_modules(module: "Any") -> None:
    """torch.nn.modules.module: `.eval()` of the whole model after a step, or with a batch of which nothing is known
    yet, begins an evaluation; its `.train()` ends it, and is patched only until then: some loops call it each step."""
    cls = module.Module
    original_eval, original_train = cls.eval, cls.train
    evaluated: list[Any] = []

    def train(self: "Any", mode: bool = True) -> "Any":
        if mode and evaluated and self is evaluated[-1]():
            stop_watching_train()
            if clock.is_after_step():
                clock.set_evaluating(False)
        return original_train(self, mode)

    def stop_watching_train() -> None:
        evaluated.clear()
        if cls.train is train:
            cls.train = original_train

    def begin_evaluation(self: "Any") -> None:
        nonlocal original_train
        clock.observe(clock.mistakes.note_evaluated, self)
        try:
            if clock.may_evaluate() and clock.is_of_training(self.parameters()):
                clock.set_evaluating(True)
                evaluated[:] = [ref(self)]
                if cls.train is not train:
                    original_train = cls.train  # which the job may have replaced
                    cls.train = train
        except Exception as error:  # noqa: BLE001
            clock.disable("eval", error)

    @replacing(cls, "eval")
    def eval(self: "Any") -> "Any":
        begin_evaluation(self)
        return original_eval(self)

    train.__wrapped__ = original_train  # type: ignore[attr-defined]
    evaluations.append(begin_evaluation)


evaluations: "list[Any]" = []
"""What `.eval()` of a module calls first."""


def patch_pretrained(module: "Any") -> None:
    """transformers.modeling_utils: from version 5 on, `.eval()` of its models is none of torch's."""
    cls = module.PreTrainedModel
    if "eval" not in vars(cls):
        return
    original = cls.eval

    @replacing(cls, "eval")
    def eval(self: "Any") -> "Any":
        for begin in evaluations:
            begin(self)
        return original(self)


def patch_serialization(module: "Any") -> None:
    """torch.serialization, and what saves without it: a pickled state, files that are brought to the disk."""
    import pickle

    patch_timed(module, "checkpoint", "save")
    patch_timed(pickle, "checkpoint", "dump")
    patch_timed(os, "checkpoint", *(name for name in ("fsync", "fdatasync") if hasattr(os, name)))


def patch_transformers(module: "Any") -> None:
    patch_timed(module, "checkpoint", "Trainer._save_checkpoint")
    patch_timed(module, "eval", "Trainer.evaluate")

    def begin() -> "Any":
        """All batches of a step before its first backward, which would look like an evaluation."""
        clock.is_fetching_for_training = True
        return partial(setattr, clock, "is_fetching_for_training", False)

    if hasattr(module.Trainer, "get_batch_samples"):  # from version 4.46 on
        module.Trainer.get_batch_samples = timed(module.Trainer.get_batch_samples, begin)


def patch_compilation(module: "Any") -> None:
    """torch._dynamo.callback."""
    times: Counter[str] = Counter()
    known = 0

    def begin() -> "Any":
        nonlocal known
        known = _note_recompilations(times, known)
        return clock.begin(COMPILE)

    time_compilations(module.callback_handler, begin)


def _note_recompilations(times: "Counter[str]", known: int) -> int:
    """Tells which function was compiled again most often, and which guard of torch.compile failed then. known: how many
    compilations have been looked at; returns how many there are."""
    try:
        list_all = getattr(modules.get("torch._dynamo.utils"), "get_compilation_metrics", None)
        compiled = list(list_all()) if list_all is not None else []
        for one in compiled[known:]:
            why, name = getattr(one, "recompile_reason", None), getattr(one, "co_name", None)
            if not why or not name:
                continue
            times[name] += 1
            if times[name] == max(times.values()):
                guard = why.partition("\n")[0].partition(": ")[2].partition("  #")[0].strip()
                at = f"{(one.co_filename or '').rpartition('/')[2]}:{one.co_firstlineno}"
                clock.set_recompiled(f"{name} ({at})", f"a guard failed: {guard}")
        return len(compiled)
    except Exception as error:  # noqa: BLE001
        report_failure("recompilations", error)
        return known


def patch_collectives(module: "Any") -> None:
    """torch.distributed.distributed_c10d, before torch.distributed imports its names."""
    if not hasattr(module, "all_reduce"):  # a torch without distributed
        return
    original = module.init_process_group
    patches: list[Any] = []

    @replacing(module, "init_process_group")
    def init_process_group(*args: "Any", **kwargs: "Any") -> "Any":
        result = original(*args, **kwargs)
        try:
            if clock.values[RANK] < 0 or _task_has_several_ranks(module.get_world_size()):
                clock.values[RANK] = float(module.get_rank())
            if module.get_world_size() > 1 and not patches:
                patches.extend(time_collectives(lambda: clock.begin(COMM), clock.is_outside_phases, _begin_exchange))
        except Exception as error:  # noqa: BLE001
            clock.disable("init_process_group", error)
        return result


def _task_has_several_ranks(world_size: int) -> bool:
    """Whether a task of Slurm or MPI has started several ranks itself: all of them have its number."""
    if "LOCAL_RANK" in os.environ:
        return False
    counts = (os.environ.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    # a batch script of Slurm has a number, and is no task
    alone = 1 if "SLURM_LOCALID" in os.environ else world_size
    return world_size > next((int(count) for count in counts if count.isdecimal() and len(count) < 8), alone)


def _begin_exchange() -> "Any":
    """The part of DDP's all-reduce that the backward does not hide; on a GPU, by two events on the training stream."""
    if clock.device_events is None:
        return clock.begin(COMM)
    clock.device_events.begin(DEVICE_COMM)
    return partial(clock.device_events.end, DEVICE_COMM)


def make_device_events() -> "Any":
    """Events of this process, or None if torch does not use a CUDA device (ROCm is named CUDA too)."""
    torch = modules["torch"]
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    _count_syncs(torch)
    return DeviceEvents(lambda: cuda.Event(enable_timing=True), cuda.is_current_stream_capturing)


class DeviceEvents:
    """The time in which the device worked, by two events on the training stream from a batch to its step, read later by
    `query()`; the job never waits for one. Untested on a GPU (docs/gpu-status.md).

    new_event: creates an event with record(), query(), elapsed_time(other) in milliseconds. is_capturing: whether the
    stream records a CUDA graph, in which an event is a part of it, and a query ends it with an error.
    """

    def __init__(self, new_event: "Any", is_capturing: "Any" = bool) -> None:
        self._new_event, self._is_capturing = new_event, is_capturing
        self._free_events: list[Any] = []
        self._starts: dict[int, Any] = {}
        self._pending: deque[Any] = deque()

    def begin(self, slot: int) -> None:
        """Work of the device begins: on a batch that has arrived (BUSY), or to communicate (DEVICE_COMM)."""
        if slot not in self._starts and not self._is_capturing():
            self._starts[slot] = self._record()

    def end(self, slot: int) -> None:
        """This work has been issued."""
        if self._is_capturing():
            return
        if slot in self._starts:
            self._pending.append((slot, self._starts.pop(slot), self._record()))
        while slot == BUSY and self._pending and self._pending[0][2].query():
            done, start, end = self._pending.popleft()
            clock.values[done] += start.elapsed_time(end) / 1e3
            self._free_events += (start, end)

    def _record(self) -> "Any":
        event = self._free_events.pop() if self._free_events else self._new_event()
        event.record()
        return event


def _count_syncs(torch: "Any") -> None:
    """Counts `.item()` and `synchronize()`: after these the device is idle until the host issues new work."""
    item, synchronize = torch.Tensor.item, torch.cuda.synchronize

    @replacing(torch.Tensor, "item")
    def counted_item(self: "Any") -> "Any":
        if self.is_cuda:
            clock.values[SYNCS] += 1.0
        return item(self)

    @replacing(torch.cuda, "synchronize")
    def counted_synchronize(*args: "Any", **kwargs: "Any") -> "Any":
        clock.values[SYNCS] += 1.0
        return synchronize(*args, **kwargs)
