"""A step of a model in stages (`--stages N`): micro-batches flow through the ranks, gradients flow back.

The schedule is 1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503): the first stages start with a few
forward passes, then each stage computes a forward and a backward pass in turn. A stage keeps the activations of at most
as many micro-batches as there are stages from it on. Of N stages and M micro-batches, each waits (N - 1) / (M + N - 1)
of a step if all are equally slow: the bubble. Losses and gradients are those of one process with M micro-batches.

Rank 0 loads and augments the images, and sends boxes and labels to the last rank, which computes the losses. A message
is the flow between two parts (`models/detector.py`) or its gradient, in channels-last memory; shapes are told once,
before the first. What needs no gradient (frozen stages) gets none. Everything else of a step is that of `fsdp.py`: the
losses ride on the sum that gives the norm of all gradients.

Why not torch.distributed.pipelining: docs/decisions/0017-stages.md.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader
from stoker.models import Detector
from stoker.models.detector import Backbone
from stoker.training.fsdp import Fsdp
from stoker.training.optim import OptimizerStep
from stoker.training.stages import Stages
from stoker.training.state import EventLogger, TrainSetup
from stoker.training.step import Autocast, LossFn, split_batch

TARGETS_TAG = 100
"""Above the tags of a flow, which are the numbers of its tensors."""


NO_BATCH = Batch(*[torch.empty(0)] * len(Batch._fields))
"""What a stage gets that is not the first."""


class _Spec(NamedTuple):
    """What a receiver must know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Pipeline(Fsdp):
    """The steps of a rank that has a stage."""

    has_whole_model = False

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        super().__init__(setup, log_event)
        stages = setup.optimizer.sharding
        assert isinstance(stages, Stages)
        self._model: Detector = setup.model
        self._image_size = setup.config.data.image_size
        self._stages, self._last = stages, self.ranks.world_size - 1
        self._before, self._after = self.ranks.rank - 1, self.ranks.rank + 1
        self._received_specs: list[_Spec] | None = None
        self._sent_specs: list[_Spec] | None = None
        self._target_specs: list[_Spec] | None = None
        self._sent: list[tuple[list[Any], Sequence[Tensor]]] = []
        self._loss_names: list[str] = []
        dist.all_reduce(
            torch.zeros(1, device=self.signals.device)
        )  # NCCL connects all ranks in a collective, not between two

    @property
    def compiles(self) -> bool:
        """A run that was started on one device may ask for it; stages are not compiled."""
        return False

    def next_batch(self, loader: Loader) -> Batch:
        return super().next_batch(loader) if self.ranks.is_main else NO_BATCH

    def augment(self, batch: Batch) -> Batch:
        return super().augment(batch) if self.ranks.is_main else batch

    def forward_backward(
        self, loss_fn: LossFn, optimizer: OptimizerStep[Detector], batch: Batch, micro_batches: int, autocast: Autocast
    ) -> dict[str, Tensor]:
        del loss_fn, optimizer
        rank = self.ranks.rank
        batch = self._share_targets(batch)
        parts = list(split_batch(batch, micro_batches)) if rank in (0, self._last) else [batch] * micro_batches
        losses: dict[str, Tensor] = {}
        started: deque[tuple[list[Tensor], list[Tensor]]] = deque()

        def forward(number: int, received: list[Tensor]) -> list[Tensor]:
            with autocast:
                outputs = self._forward(parts[number], received, losses, micro_batches)
            started.append((received, outputs))
            return outputs

        def backward(gradients: list[Tensor]) -> list[Tensor]:
            received, outputs = started.popleft()
            self._backward(outputs, gradients)
            needed = [x for x in received if x.requires_grad]
            return [_to_wire(torch.zeros_like(x) if x.grad is None else x.grad) for x in needed]

        warm_up = min(self._last - rank, micro_batches)
        for number in range(warm_up):
            self._send(forward(number, self._receive()))
        received = self._receive() if warm_up < micro_batches else []
        for number in range(warm_up, micro_batches):
            outputs = forward(number, received)
            gradients = backward(self._swap_with_after(outputs))
            if number + 1 < micro_batches:
                received = self._swap_with_before(gradients)
            else:
                self._transfer(self._before, gradients, [])
        for _ in range(warm_up):
            self._transfer(self._before, backward(self._swap_with_after([])), [])
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()
        return self._set_signals(self._own.to(self.signals.device, non_blocking=True, copy=True), losses)

    def _set_signals(self, values: Tensor, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leaves the signals where the exchange of the step takes them from. Returns the losses by name."""
        if not self._loss_names:
            names = [list(losses)]
            dist.broadcast_object_list(names, src=self._last, group=self.ranks.host_group)
            self._loss_names = names[0]
        if losses:  # a mean over the ranks, of which only this one has some
            values[: len(losses)] = torch.stack(list(losses.values())) * self.ranks.world_size
        scale = self.optimizer.loss_scale
        self.signals.grad = values if scale is None else values * scale
        return dict(zip(self._loss_names, values.unbind(), strict=False))

    def _forward(
        self, batch: Batch, received: list[Tensor], losses: dict[str, Tensor], micro_batches: int
    ) -> list[Tensor]:
        """The flow after this stage; in the last one its loss alone, whose terms are added to `losses`."""
        model, own = self._model, self._stages.own
        backbone = model.backbone
        assert isinstance(backbone, Backbone)
        flow = received if self.ranks.rank else [model.normalize(batch.images)]
        num_parts = len(self._stages.parts) - 1
        if own.start < num_parts:
            flow = backbone.run(flow, own.start, min(own.stop, num_parts))
        if self.ranks.rank < self._last:
            return flow
        terms = model.loss(model.predict(flow, self._image_size), batch)
        if micro_batches > 1:
            terms = {name: loss / micro_batches for name, loss in terms.items()}
        for name, loss in terms.items():
            losses[name] = losses[name] + loss.detach() if name in losses else loss.detach()
        return [torch.stack(list(terms.values())).sum()]

    def _backward(self, outputs: list[Tensor], gradients: list[Tensor]) -> None:
        if self.ranks.rank == self._last:
            self.optimizer.backward(outputs[0])
        elif gradients:
            torch.autograd.backward([x for x in outputs if x.requires_grad], gradients)

    def _share_targets(self, batch: Batch) -> Batch:
        """Sends everything but the images from the first rank to the last, which gets it."""
        rank, device = self.ranks.rank, self.signals.device
        if rank == 0:
            targets = [tensor.contiguous() for tensor in batch[1:]]
            if self._target_specs is None:
                self._target_specs = self._tell(self._last, targets)
            self._transfer(self._last, targets, [], tag=TARGETS_TAG)
        elif rank == self._last:
            if self._target_specs is None:
                self._target_specs = self._hear(0)
            targets = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self._target_specs]
            self._transfer(0, [], targets, tag=TARGETS_TAG)
            return Batch(targets[0].new_empty(len(targets[0]), 0), *targets)
        return batch

    def _receive(self) -> list[Tensor]:
        """The flow before this stage, of the next micro-batch."""
        return self._swap_with_before([])

    def _send(self, outputs: list[Tensor]) -> None:
        """Sends the flow after this stage, and does not wait."""
        if self._sent_specs is None:
            self._sent_specs = self._tell(self._after, [_to_wire(x) for x in outputs], outputs)
        self._transfer(self._after, [_to_wire(x) for x in outputs], [])

    def _swap_with_before(self, gradients: list[Tensor]) -> list[Tensor]:
        """Sends gradients to the stage before and gets a flow from it."""
        if self._before < 0:
            return []
        if self._received_specs is None:
            self._received_specs = self._hear(self._before)
        buffers = [torch.empty(s.shape, dtype=s.dtype, device=self.signals.device) for s in self._received_specs]
        self._transfer(self._before, gradients, buffers)
        return [
            _from_wire(buffer).requires_grad_(spec.requires_grad)
            for buffer, spec in zip(buffers, self._received_specs, strict=True)
        ]

    def _swap_with_after(self, outputs: list[Tensor]) -> list[Tensor]:
        """Sends a flow to the stage after and gets gradients from it: those of the oldest micro-batch that is there."""
        if self._after > self._last:
            return []
        specs = [spec for spec in self._sent_specs or () if spec.requires_grad]
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self.signals.device) for spec in specs]
        self._transfer(self._after, [_to_wire(x) for x in outputs], buffers)
        return [_from_wire(buffer) for buffer in buffers]

    def _transfer(self, peer: int, sent: Sequence[Tensor], received: Sequence[Tensor], *, tag: int = 0) -> None:
        """Sends and receives at once, as NCCL needs it. Waits for what is received, and for the rest at the end."""
        # gloo says that it can receive on the connection that carries its own data: receives are asked for first.
        operations = [dist.P2POp(dist.irecv, x, peer, tag=tag + n) for n, x in enumerate(received)]
        operations += [dist.P2POp(dist.isend, x, peer, tag=tag + n) for n, x in enumerate(sent)]
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        if not received:
            self._sent.append((works, sent))
            return
        for work in works:
            work.wait()

    def _tell(self, peer: int, tensors: Sequence[Tensor], outputs: Sequence[Tensor] | None = None) -> list[_Spec]:
        """Tells a rank the shapes of what it will receive. outputs: whose gradients come back."""
        specs = [
            _Spec(tuple(x.shape), x.dtype, y.requires_grad) for x, y in zip(tensors, outputs or tensors, strict=True)
        ]
        dist.send_object_list([specs], dst=peer, group=self.ranks.host_group)
        return specs

    def _hear(self, peer: int) -> list[_Spec]:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=peer, group=self.ranks.host_group)
        return [_Spec(*spec) for spec in box[0]]


def _to_wire(x: Tensor) -> Tensor:
    """[B, C, H, W] → contiguous [B, H, W, C], which is not a copy of a map in channels-last memory."""
    return x.detach().permute(0, 2, 3, 1).contiguous()


def _from_wire(x: Tensor) -> Tensor:
    """The reverse, without a copy."""
    return x.permute(0, 3, 1, 2)
