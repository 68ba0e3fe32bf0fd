"""A model cut into consecutive stages, one for each rank (`--stages N`), for models that do not fit one device.

Rank k keeps weights, gradients, optimizer state and EMA of stage k; of the others it has the shapes alone (meta
tensors). A model is cut between the parts of its backbone and before its heads, so that the stage with the most FLOPs
has as few as possible. Checkpoints have the whole model, as if one process had written them. How a batch flows through
the stages: `pipeline.py`. `Stages` is an `optim.Division`, as `fsdp.Sharding` is.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stoker import models
from stoker.config.settings import Config
from stoker.config.sync_method import parse_sync
from stoker.errors import ConfigError
from stoker.evaluation.evaluate import in_eval_mode
from stoker.models.detector import Backbone, Detector, Part
from stoker.models.layers.winograd import without_winograd
from stoker.models.weights.shapes_only import shapes_only
from stoker.training.checkpoint import map_tensors
from stoker.training.ranks import Ranks

TRAINING_FACTOR = 3
"""FLOPs of a forward and a backward pass, relative to the forward pass: gradients of inputs and of weights take as many
each. Parts before the first trained one have no backward pass."""
COUNTED_SIDE = 128
"""Side of the image with which FLOPs are counted. What the parts need relative to each other hardly depends on it."""


@dataclasses.dataclass(frozen=True)
class StagePart:
    """A part of a detector that is in one stage: one of its backbone, or its heads."""

    name: str
    prefixes: tuple[str, ...]
    """Beginnings of the names of its tensors; of the heads, which have the rest, none."""
    num_params: int
    flop: float
    """Of a training step with one image of COUNTED_SIDE."""


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
        found.append(StagePart(name, full, sum(tensors[key].numel() for key in own), flop))
    return found


def cut(costs: Sequence[float], count: int) -> tuple[int, ...]:
    """The first part of each of `count` stages, and the number of parts: the largest cost of a stage is as small as
    possible, and then the earlier stages are as short as possible."""

    @functools.cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]), (start, len(costs))
        found = []
        for stop in range(start + 1, len(costs) - left + 2):
            rest, cuts = best(stop, left - 1)
            found.append((max(sum(costs[start:stop]), rest), (start, *cuts)))
        return min(found)

    return best(0, count)[1]


def check_stages(config: Config, num_devices: int) -> None:
    """Raises ConfigError for what `--stages` cannot be combined with, on several devices."""
    run, count = config.run, config.run.stages
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
    if run.shard:
        raise ConfigError(
            "--stages and --shard exclude each other.",
            cause="both divide the model among the devices",
            fix="leave out one of them",
        )
    if run.sync is not None and parse_sync(run.sync).kind not in ("plain", "auto"):
        raise ConfigError(
            f"--stages and --sync {run.sync} exclude each other.",
            cause="stages exchange activations, and no gradients of weights",
            fix="leave out one of them",
        )


class _Place(NamedTuple):
    """Where a module keeps a tensor of its state."""

    name: str
    tensors: dict[str, Any]
    key: str


@dataclasses.dataclass(frozen=True)
class Stages:
    """Which parts of a model are this rank's stage."""

    ranks: Ranks
    device: torch.device
    parts: tuple[StagePart, ...]
    cuts: tuple[int, ...]
    """The first part of each stage, and the number of parts."""

    @classmethod
    def of(cls, model: Detector, ranks: Ranks, device: torch.device) -> "Stages":
        """A stage for each rank, of a model on the host."""
        parts = list_parts(model)
        return cls(ranks, device, tuple(parts), cut([part.flop for part in parts], ranks.world_size))

    @property
    def own(self) -> range:
        """Numbers of the parts of this rank's stage."""
        return range(self.cuts[self.ranks.rank], self.cuts[self.ranks.rank + 1])

    def describe(self) -> list[str]:
        """A sentence for each stage."""
        total = sum(part.flop for part in self.parts) or 1.0
        lines = []
        for rank, (start, stop) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            held = self.parts[start:stop]
            names = held[0].name if len(held) == 1 else f"{held[0].name} … {held[-1].name}"
            size, share = sum(part.num_params for part in held), sum(part.flop for part in held) / total
            lines.append(
                f"stage {rank + 1} of {self.ranks.world_size}: {names}, {size / 1e6:.3g} M parameters, "
                f"{100 * share:.0f} % of the FLOPs"
            )
        return lines

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
        """Frees the tensors of the other stages."""
        for place in _places(model):
            if self.owner(place.name) != self.ranks.rank:
                _put(place, torch.empty_like(place.tensors[place.key], device="meta"))

    def collect(self, model: nn.Module) -> None:
        """Makes the model whole in every rank, until `reshard`: the ranks evaluate a part of the images each."""
        groups: dict[tuple[int, torch.dtype], list[_Place]] = {}
        for place in _places(model):
            groups.setdefault((self.owner(place.name), place.tensors[place.key].dtype), []).append(place)
        for (owner, dtype), places in groups.items():
            whole = [place.tensors[place.key].detach() for place in places]
            is_own = owner == self.ranks.rank
            size = sum(tensor.numel() for tensor in whole)
            flat = (
                torch.cat([tensor.reshape(-1) for tensor in whole])
                if is_own
                else torch.empty(size, dtype=dtype, device=self.device)
            )
            dist.broadcast(flat, src=owner)
            if not is_own:
                for place, part in zip(places, torch.split(flat, [t.numel() for t in whole]), strict=True):
                    _put(place, part.view(place.tensors[place.key].shape))
        constants = model.state_dict()
        constants.clear()
        model.load_state_dict(constants, strict=False)  # modules compute their constants (frozen norms)

    def rows(self, whole: Tensor) -> Tensor:
        """A tensor of this stage is whole."""
        return whole

    def distributed(self, tensor: Tensor, like: Tensor) -> Tensor:
        """The same."""
        del like
        return tensor

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        state = model.state_dict()
        shapes = {name: tensor.shape for name, tensor in state.items()}
        if shapes != {name: tensor.shape for name, tensor in weights.items()}:
            raise RuntimeError("names or shapes of the weights are not those of the model")
        for name in shapes:
            if self.owner(name) == self.ranks.rank:
                state[name] = weights[name]
            else:
                del state[name]
        model.load_state_dict(state, strict=False)

    def gather(self, tree: Any) -> Any:
        """What is in several ranks is that of the first."""
        own = map_tensors(tree, lambda tensor: tensor if tensor.is_meta else tensor.detach().to("cpu", copy=True))
        trees = self.ranks.gather(own)
        return own if trees is None else _merge(trees)


def _places(model: nn.Module) -> Iterator[_Place]:
    """The tensors of a model that are in its `state_dict`."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    yield _Place(start + key, table, key)


def _put(place: _Place, tensor: Tensor) -> None:
    old = place.tensors[place.key]
    is_parameter = isinstance(old, nn.Parameter)
    place.tensors[place.key] = nn.Parameter(tensor, requires_grad=old.requires_grad) if is_parameter else tensor


def _merge(trees: Sequence[Any]) -> Any:
    """The union of dicts; elsewhere the first value that is there. Numbered entries are sorted."""
    first = next((tree for tree in trees if tree is not None and not (isinstance(tree, Tensor) and tree.is_meta)), None)
    if isinstance(first, dict):
        keys = list(dict.fromkeys(key for tree in trees if tree is not None for key in tree))
        if all(isinstance(key, int) for key in keys):
            keys.sort()
        return {key: _merge([tree.get(key) for tree in trees if tree is not None]) for key in keys}
    if isinstance(first, tuple):
        return tuple(_merge(values) for values in zip(*(tree for tree in trees if tree is not None), strict=True))
    return first
