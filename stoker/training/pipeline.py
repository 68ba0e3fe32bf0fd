"""A step of a model in stages (`--stages N`): micro-batches flow through the ranks, gradients flow back.

The schedule is torch's (`torch.distributed.pipelining`), 1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv
2006.09503): the first stages start with a few forward passes, then each stage computes a forward and a backward pass in
turn. A stage keeps the activations of at most as many micro-batches as there are stages from it on. Of N stages and M
micro-batches, each waits (N - 1) / (M + N - 1) of a step if all are equally slow: the bubble. Losses and gradients are
those of one process with M micro-batches.

Rank 0 loads and augments the images, and sends boxes and labels to the last rank, which computes the losses. Between
two stages goes the flow between two parts (`models/detector.py`), in channels-last memory. Everything else of a step is
that of `fsdp.py`: the losses ride on the sum that gives the norm of all gradients. What torch leaves to do, and what
its versions differ in: docs/decisions/0017-stages.md.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader
from stoker.evaluation.evaluate import in_eval_mode
from stoker.models import Detector
from stoker.models.detector import Backbone
from stoker.training.fsdp import Fsdp
from stoker.training.stages import Stages
from stoker.training.state import EventLogger, TrainSetup
from stoker.training.step import split_batch

NO_BATCH = Batch(*[torch.empty(0)] * len(Batch._fields))
"""What a stage gets that is not the first."""


class _Spec(NamedTuple):
    """What a receiver must know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def make(self, device: torch.device | str) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


_NUMBER = _Spec((1,), torch.int64)
"""Input of the first stage: the number of the micro-batch."""
_LOSS = _Spec((), torch.float64, requires_grad=True)


class Pipeline(Fsdp):
    """The steps of a rank that has a stage."""

    has_whole_model = False

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        super().__init__(setup, log_event)
        stages = setup.optimizer.sharding
        assert isinstance(stages, Stages)
        self._device, self._group = setup.device.torch_device, setup.ranks.host_group
        self._model: Detector = setup.model
        self._image_size = setup.config.data.image_size
        self._stages, self._last = stages, self.ranks.world_size - 1
        self._target_specs: list[_Spec] | None = None
        self._received: list[_Spec] = []
        self._schedule: Any = None
        self._micro_batches: list[Batch] = []
        self._number = 0
        """Forward passes of this step."""
        self._totals: dict[str, Tensor] = {}
        self._loss_names: list[str] = []
        dist.all_reduce(torch.zeros(1, device=self._device))  # NCCL connects all ranks in a collective, not between two

    @property
    def compiles(self) -> bool:
        """A run that was started on one device may ask for it; stages are not compiled."""
        return False

    def next_batch(self, loader: Loader) -> Batch:
        return super().next_batch(loader) if self.ranks.is_main else NO_BATCH

    def augment(self, batch: Batch) -> Batch:
        return super().augment(batch) if self.ranks.is_main else batch

    def forward_backward(self, batch: Batch) -> dict[str, Tensor]:
        rank, micro_batches = self.ranks.rank, self.micro_batches
        batch = self._share_targets(batch)
        self._micro_batches = list(split_batch(batch, micro_batches)) if rank in (0, self._last) else []
        if self._schedule is None:
            self._schedule = self._make_schedule(micro_batches)
        self._number, self._totals = 0, {}
        numbers = torch.arange(micro_batches)  # torch splits one tensor; what belongs to a number is found here
        inputs, target = ([numbers] if rank == 0 else []), (numbers if rank == self._last else None)
        try:
            self._schedule.step(*inputs, target=target, return_outputs=False)
        except RuntimeError as error:
            raise (error.__cause__ or error) from None  # torch hides what a stage raised, as out of memory
        return self._set_signals(self._own.to(self._device, non_blocking=True, copy=True))

    def _make_schedule(self, micro_batches: int) -> Any:
        """Tells torch the shapes of what this stage receives and sends: those of a forward pass in
        evaluation mode. Torch would take one in training mode, which changes running statistics in 2.11."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # imports torch.export

        rank, group = self.ranks.rank, self._group
        self._received = _receive_specs(rank - 1, group) if rank else [_NUMBER]
        sent = [_LOSS]
        if rank < self._last:
            with in_eval_mode(self._model):
                sent = [_spec_of(x) for x in self._forward(*(spec.make(self._device) for spec in self._received))]
            dist.send_object_list([sent], dst=rank + 1, group=group)
        stage = PipelineStage(
            _Stage(self._forward),
            rank,
            self._last + 1,
            self._device,
            input_args=tuple(spec.make("meta") for spec in self._received),
            output_args=tuple(spec.make("meta") for spec in sent),
        )
        # With fewer micro-batches than stages, 1F1B has no steady state, and torch refuses it.
        schedule = Schedule1F1B if micro_batches > self._last else ScheduleGPipe
        return schedule(stage, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _forward(self, *received: Tensor) -> Any:
        """The flow after this stage, of the next micro-batch; in the last stage its loss, whose terms are added up."""
        rank, own, backbone = self.ranks.rank, self._stages.own, self._model.backbone
        assert isinstance(backbone, Backbone)
        batch = self._micro_batches[self._number] if self._micro_batches else None
        self._number += 1
        with self.autocast:
            if rank == 0:
                assert batch is not None
                flow = [self._model.normalize(batch.images)]
            else:
                flow = [_from_wire(x, spec) for x, spec in zip(received, self._received, strict=True)]
            num_parts = len(self._stages.parts) - 1
            if own.start < num_parts:
                flow = backbone.run(flow, own.start, min(own.stop, num_parts))
            if rank < self._last:
                return tuple(x.permute(0, 2, 3, 1).contiguous() for x in flow)
            assert batch is not None
            terms = self._model.loss(self._model.predict(flow, self._image_size), batch)
            if len(self._micro_batches) > 1:
                terms = {name: loss / len(self._micro_batches) for name, loss in terms.items()}
        for name, loss in terms.items():
            self._totals[name] = self._totals[name] + loss.detach() if name in self._totals else loss.detach()
        total, scale = torch.stack(list(terms.values())).sum(), self.optimizer.loss_scale
        return (total if scale is None else total * scale).to(_LOSS.dtype)

    def _set_signals(self, values: Tensor) -> dict[str, Tensor]:
        """Leaves the signals where the exchange of the step takes them from. Returns the losses by name."""
        if not self._loss_names:
            names = [list(self._totals)]
            dist.broadcast_object_list(names, src=self._last, group=self._group)
            self._loss_names = names[0]
        if self._totals:  # a mean over the ranks, of which only this one has some
            values[: len(self._totals)] = torch.stack(list(self._totals.values())) * self.ranks.world_size
        scale = self.optimizer.loss_scale
        self.signals.grad = values if scale is None else values * scale
        return dict(zip(self._loss_names, values.unbind(), strict=False))

    def _share_targets(self, batch: Batch) -> Batch:
        """Sends everything but the images from the first rank to the last, which gets it."""
        rank, group = self.ranks.rank, self._group
        if rank not in (0, self._last):
            return batch
        targets = [tensor.contiguous() for tensor in batch[1:]]
        if self._target_specs is None and rank == 0:
            self._target_specs = [_spec_of(tensor) for tensor in targets]
            dist.send_object_list([self._target_specs], dst=self._last, group=group)
        elif self._target_specs is None:
            self._target_specs = _receive_specs(0, group)
        if rank == self._last:
            targets = [spec.make(self._device) for spec in self._target_specs]
            batch = Batch(targets[0].new_empty(len(targets[0]), 0), *targets)
        operation: Any = dist.irecv if rank else dist.isend
        for work in dist.batch_isend_irecv([dist.P2POp(operation, x, self._last - rank) for x in targets]):
            work.wait()
        return batch


class _Stage(nn.Module):
    """What torch asks for: a function as a module."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward


def _receive_specs(peer: int, group: Any) -> list[_Spec]:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=peer, group=group)
    return [_Spec(*spec) for spec in box[0]]


def _spec_of(tensor: Tensor) -> _Spec:
    return _Spec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _from_wire(x: Tensor, spec: _Spec) -> Tensor:
    """A received [B, H, W, C] as [B, C, H, W] in channels-last memory, without a copy."""
    if x.requires_grad and not spec.requires_grad:  # torch 2.11 wants a gradient of everything, and sends it back
        x.grad = torch.zeros_like(x)
        x = x.detach()
    return x.permute(0, 3, 1, 2)
