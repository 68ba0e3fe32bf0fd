"""A model cut into consecutive stages, one for each rank (`--stages N`), for models that do not fit one device.

Rank k keeps weights, gradients, optimizer state and EMA of stage k; of the others it has the shapes alone (meta
tensors). A model is cut between the parts of its backbone and before its heads, so that no stage has a larger fraction
of the FLOPs or of the parameters than it must. Checkpoints have the whole model, as if one process had written them.

`Pipeline` is the step: micro-batches flow through the ranks, gradients flow back. The schedule is torch's 1F1B
(PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503): a stage keeps the activations of at most as many
micro-batches as there are stages from it on. Of N stages and M micro-batches, each waits (N - 1) / (M + N - 1) of a
step if all are equally slow: the bubble. Losses and gradients are those of one process with M micro-batches.

Rank 0 loads and augments the images, and sends boxes and labels to the last rank, which computes the losses. Between
two stages goes the flow between two parts (`models/detector.py`), in channels-last memory. Everything else of a step is
that of `fsdp.py`. What torch leaves to do, and what its versions differ in: docs/decisions/0017-stages.md.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stoker import models
from stoker.config.settings import Config
from stoker.data.batch import Batch
from stoker.data.loading.loader import Loader
from stoker.evaluation.evaluate import in_eval_mode
from stoker.models.detector import Backbone, Detector, Part
from stoker.models.layers.winograd import without_winograd
from stoker.models.weights.load import shapes_only
from stoker.training.checkpoint import list_tensors, map_tensors, shape_of
from stoker.training.ddp import flatten
from stoker.training.fsdp import Fsdp
from stoker.training.ranks import Ranks
from stoker.training.state import EventLogger, TrainSetup
from stoker.training.step import split_batch
from stoker_watch.errors import ConfigError

TRAINING_FACTOR = 3
"""FLOPs of a forward and a backward pass, relative to the forward pass: gradients of inputs and of weights take as many
each. Parts before the first trained one have no backward pass."""
COUNTED_SIDE = 128
"""Side of the image with which FLOPs are counted. What the parts need relative to each other hardly depends on it."""


@dataclasses.dataclass(frozen=True)
class StagePart:
    """A part of a detector that is in one stage: one of its backbone, or its heads. prefixes: beginnings of the names
    of its tensors; of the heads, which have the rest, none; flop: of a training step with an image of COUNTED_SIDE."""

    name: str
    prefixes: tuple[str, ...]
    flop: float
    num_parameters: int


def list_parts(model: Detector) -> list[StagePart]:
    """The parts of a detector, in the order of its forward pass; for one without values (`shapes_only`), `flop` is 0.
    The others compute an image in evaluation mode. Raises ConfigError for a model that has no parts."""
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, Backbone):
        raise ConfigError(
            f"--stages: {model.settings.model} cannot be cut into stages.", fix="--shard divides any model"
        )
    tensors = dict(model.named_parameters())
    has_values = not any(tensor.is_meta for tensor in tensors.values())
    flow = [torch.zeros(1, 3, COUNTED_SIDE, COUNTED_SIDE, dtype=next(iter(tensors.values())).dtype)]
    found: list[StagePart] = []
    owned: set[str] = set()
    is_trained = False
    parts = backbone.parts()
    for number, (name, prefixes) in enumerate([*parts, Part("heads", ())]):
        full = tuple(f"backbone.{prefix}" for prefix in prefixes)
        own = [key for key in tensors if (key.startswith(full) if full else key not in owned)]
        owned.update(own)
        is_trained = is_trained or any(tensors[key].requires_grad for key in own)
        flop = 0.0
        if has_values:
            with in_eval_mode(model), torch.no_grad(), without_winograd(), FlopCounterMode(display=False) as counter:
                if number < len(parts):
                    flow = backbone.run(flow, number, number + 1)
                else:
                    model.predict(flow, (COUNTED_SIDE, COUNTED_SIDE))
            flop = float(counter.get_total_flops()) * (TRAINING_FACTOR if is_trained else 1)
        found.append(StagePart(name, full, flop, sum(tensors[key].numel() for key in own)))
    return found


def cut(costs: Sequence[tuple[float, ...]], count: int) -> tuple[int, ...]:
    """The first part of each of `count` stages, and the number of parts. costs: of each part, of several kinds; the
    largest fraction that a stage has of one kind is as small as possible, and then the earlier stages are as short as
    possible."""
    sums = [max(float(sum(kind)), 1e-30) for kind in zip(*costs, strict=True)]

    def cost(start: int, stop: int) -> float:
        own = [float(sum(kind)) for kind in zip(*costs[start:stop], strict=True)]
        return max(part / total for part, total in zip(own, sums, strict=True))

    @functools.cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return cost(start, len(costs)), (start, len(costs))
        found = []
        for stop in range(start + 1, len(costs) - left + 2):
            rest, cuts = best(stop, left - 1)
            found.append((max(cost(start, stop), rest), (start, *cuts)))
        return min(found)

    return best(0, count)[1]


def check_stages(config: Config, num_devices: int) -> None:
    """Raises ConfigError for what `--stages` cannot be combined with, on several devices."""
    count = config.run.stages
    if count != num_devices:
        raise ConfigError(
            f"--stages {count} needs as many devices, and the run has {num_devices}.",
            fix=f"--devices {count}, or --stages {num_devices}",
        )
    with shapes_only():
        model = models.build(config.model, 1)
    num_parts = len(list_parts(model))
    if count > num_parts:
        raise ConfigError(
            f"--stages {count}: {config.model.model} has {num_parts} parts.", choices=[f"2 … {num_parts}"]
        )


@dataclasses.dataclass(frozen=True)
class Stages:
    ranks: Ranks
    device: torch.device
    parts: tuple[StagePart, ...]
    cuts: tuple[int, ...]
    """The first part of each stage, and the number of parts."""

    @classmethod
    def of(cls, model: Detector, ranks: Ranks, device: torch.device) -> "Stages":
        """A stage for each rank, of a model on the host."""
        parts = list_parts(model)
        cuts = cut([(part.flop, part.num_parameters) for part in parts], ranks.world_size)
        return cls(ranks, device, tuple(parts), cuts)

    @property
    def own(self) -> range:
        return range(self.cuts[self.ranks.rank], self.cuts[self.ranks.rank + 1])

    def owner(self, name: str) -> int:
        """The rank whose stage has the tensor `name` of the model."""
        for number, part in enumerate(self.parts):
            if part.prefixes and name.startswith(part.prefixes):
                return next(rank for rank in range(self.ranks.world_size) if number < self.cuts[rank + 1])
        return self.ranks.world_size - 1

    def shard(self, model: nn.Module) -> None:
        """Frees the tensors of the other stages, in place, and moves those of this one to the device."""
        self.reshard(model)
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))  # type: ignore[no-untyped-call]

    def reshard(self, model: nn.Module) -> None:
        state = model.state_dict()
        for name, tensor in list(state.items()):
            if self.owner(name) == self.ranks.rank:
                del state[name]
            else:
                state[name] = torch.empty_like(tensor, device="meta")
        model.load_state_dict(state, strict=False, assign=True)

    def collect(self, model: nn.Module) -> None:
        """Makes the model whole in every rank, until `reshard`: the ranks evaluate a part of the images each."""
        state = model.state_dict()
        groups: dict[tuple[int, torch.dtype], list[str]] = {}
        for name, tensor in state.items():
            groups.setdefault((self.owner(name), tensor.dtype), []).append(name)
        for (owner, dtype), names in groups.items():
            whole, is_own = [state.pop(name) for name in names], owner == self.ranks.rank
            sizes = [tensor.numel() for tensor in whole]
            flat = flatten(whole) if is_own else torch.empty(sum(sizes), dtype=dtype, device=self.device)
            dist.broadcast(flat, src=owner)
            if not is_own:
                parts = zip(names, whole, torch.split(flat, sizes), strict=True)
                state.update((name, part.view(tensor.shape)) for name, tensor, part in parts)
        model.load_state_dict(state, strict=False, assign=True)  # modules compute their constants, too (frozen norms)

    def rows(self, whole: Tensor) -> Tensor:
        """A tensor of this stage is whole."""
        return whole

    def distributed(self, rows: Tensor, like: Tensor) -> Tensor:
        del like
        return rows

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        state = model.state_dict()
        shapes = {name: tensor.shape for name, tensor in state.items()}
        if shapes != {name: tensor.shape for name, tensor in weights.items()}:
            raise RuntimeError("names or shapes of the weights are not those of the model")
        state.clear()  # it also has the versions of the modules
        state.update((name, weight) for name, weight in weights.items() if self.owner(name) == self.ranks.rank)
        model.load_state_dict(state, strict=False)

    def gather(self, tree: Any) -> Any:
        """What is in several ranks is that of the first. Tensors go one by one, so that no rank has a second copy."""
        trees = self.ranks.gather(map_tensors(tree, lambda tensor: None if tensor.is_meta else shape_of(tensor)))
        group = self.ranks.host_group
        if trees is None:
            for tensor in list_tensors(tree):
                if not tensor.is_meta:
                    dist.send(tensor.detach().cpu().contiguous(), dst=0, group=group)
            return tree
        own = map_tensors(tree, lambda tensor: None if tensor.is_meta else tensor.detach().to("cpu", copy=True))
        received = [map_tensors(trees[rank], functools.partial(_receive, rank, group)) for rank in range(1, len(trees))]
        return _merge([own, *received])


def _receive(rank: int, group: Any, like: Tensor) -> Tensor:
    tensor = torch.empty_like(like, device="cpu")
    dist.recv(tensor, src=rank, group=group)
    return tensor


def _merge(trees: Sequence[Any]) -> Any:
    """The union of dicts; elsewhere the first value that is there. Numbered entries are sorted."""
    first = next((tree for tree in trees if tree is not None), None)
    if isinstance(first, dict):
        keys = list(dict.fromkeys(key for tree in trees if tree is not None for key in tree))
        if all(isinstance(key, int) for key in keys):
            keys.sort()
        return {key: _merge([tree.get(key) for tree in trees if tree is not None]) for key in keys}
    if isinstance(first, tuple):
        return tuple(_merge(values) for values in zip(*(tree for tree in trees if tree is not None), strict=True))
    return first


NO_BATCH = Batch(*[torch.empty(0)] * len(Batch._fields))
"""The batch of a stage that is not the first."""


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def make(self, device: torch.device | str) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


_NUMBER = _Spec((1,), torch.int64)
"""Input of the first stage: the number of the micro-batch."""
_LOSS = _Spec((), torch.float64, requires_grad=True)


class Pipeline(Fsdp):
    """The steps of a rank that has a stage."""

    can_be_compiled = has_whole_model = False

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        super().__init__(setup, log_event)
        stages = setup.optimizer.sharding
        assert isinstance(stages, Stages)
        self._device, self._group = setup.device.torch_device, setup.ranks.host_group
        self._model, self._image_size = setup.model, setup.config.data.image_size
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
        """Tells torch the shapes of what this stage receives and sends, by a forward pass in evaluation mode. Torch
        would take one in training mode, which changes running statistics in 2.11."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # imports torch.export

        rank, group = self.ranks.rank, self._group
        self._received = _receive_specs(rank - 1, group) if rank else [_NUMBER]
        sent = [_LOSS]
        if rank < self._last:
            with in_eval_mode(self._model):
                sent = [_Spec.of(x) for x in self._forward(*(spec.make(self._device) for spec in self._received))]
            dist.send_object_list([sent], dst=rank + 1, group=group)
        module = nn.Module()  # torch asks for one
        module.forward = self._forward
        inputs, outputs = (tuple(spec.make("meta") for spec in specs) for specs in (self._received, sent))
        stage = PipelineStage(module, rank, self._last + 1, self._device, input_args=inputs, output_args=outputs)
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
            self._target_specs = [_Spec.of(tensor) for tensor in targets]
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


def _receive_specs(peer: int, group: Any) -> list[_Spec]:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=peer, group=group)
    return [_Spec(*spec) for spec in box[0]]


def _from_wire(x: Tensor, spec: _Spec) -> Tensor:
    """A received [B, H, W, C] as [B, C, H, W] in channels-last memory, without a copy."""
    if x.requires_grad and not spec.requires_grad:  # torch 2.11 wants a gradient of everything, and sends it back
        x.grad = torch.zeros_like(x)
        x = x.detach()
    return x.permute(0, 3, 1, 2)
