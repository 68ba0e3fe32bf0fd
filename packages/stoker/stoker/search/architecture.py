"""`stoker search --architecture`: a weight-sharing super-network of the ember family, and NSGA-II over its parts.

All networks of a space use leading channels and blocks of one set of tensors. A step trains the largest, the smallest
and one random network (the sandwich rule: Yu and Huang 2019, arXiv 1903.05134). A network is then scored without
training: batch statistics again from a few batches (section 3.4 there), AP on the validation split, measured cost. What
is tried next is in `study.py`. AP here only ranks; the found network is trained from scratch (`docs/tuning.md`).
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w
import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.architectures import EmberNetwork, check_network
from stoker.config.settings import Config
from stoker.data.augment import augment_batch
from stoker.data.batch import Batch
from stoker.data.loading.samples import compute_max_boxes
from stoker.evaluation.evaluate import compute_metrics, detect, evaluation_loader, ground_truth
from stoker.hardware.device import Device
from stoker.knowledge import read_toml
from stoker.models import Detector
from stoker.models.ember import Ember
from stoker.models.networks import PAFPN, SPPF, CSPLayer
from stoker.models.retinanet import PRIOR_LOGIT
from stoker.search import page
from stoker.search.space import Space
from stoker.search.study import Claim, Outcome, Study, StudySpec, best_trials, create, digest_data
from stoker.search.worker import work
from stoker.training.defaults.derive import total_steps
from stoker.training.resume import lr_at
from stoker.training.run_selection import with_absolute_paths
from stoker.training.start import ResolvedRun, make_training_loader, resolve_run
from stoker_watch import regular_files
from stoker_watch.durations import parse_duration
from stoker_watch.errors import ConfigError, needs_package
from stoker_watch.storage.local_files import write_atomic

PARTS: dict[str, tuple[int, int] | tuple[str, ...]] = {
    "block": ("csp", "inverted"), "width": (4, 64), "depth": (1, 4), "neck": (8, 128), "head_depth": (1, 4),
    "image_size": (32, 1024),
}  # fmt: skip
"""Part → its choices, or its lowest and highest number."""
BASE = {"block": "csp", "width": 16, "depth": 1, "neck": 64, "head_depth": 2}
"""The network ember_n, which is trial 0."""
POPULATION = 10
"""Networks of a generation of NSGA-II."""
CALIBRATION_BATCHES = 4
MAX_SCORED = 256
"""Images of the validation split that a network is scored on: enough to rank."""
REPEATS = 30
WEIGHTS, COSTS = "supernet.pt", "costs.json"
Params = Mapping[str, Any]


def network_of(params: Params) -> EmberNetwork:
    """The network of a point of the space. depth: at strides 8 and 16; neck: channels at stride 8, which double."""
    values = {**BASE, **params}
    depth, neck = values["depth"], values["neck"]
    return EmberNetwork(
        family="ember", block=values["block"], width=values["width"], depths=(1, depth, depth, 1),
        channels=(neck, 2 * neck, 4 * neck), head_depth=values["head_depth"],
    )  # fmt: skip


def make_space(space: Space | None, image_size: tuple[int, int], location: Path | None) -> Space:
    """The space with its parts checked, or the table's with image sizes up to the derived one. Raises ConfigError."""
    if space is None:
        side = max(image_size)
        sizes: list[Any] = sorted({max(32, round(side * factor / 32) * 32) for factor in (0.5, 0.75, 1.0)})
        return Space({**read_toml("search.toml")["architecture"], "image_size": sizes})
    for name, choices in space.settings.items():
        valid = PARTS[name]
        if not isinstance(choices, list):
            raise ConfigError(f"{name} of a network needs choices.", location=location, fix=f"{name} = [16, 32]")
        for value in choices:
            if isinstance(valid[0], str):
                is_valid = value in valid
            else:
                is_valid = type(value) is int and int(valid[0]) <= value <= int(valid[1])
                is_valid = is_valid and not (name == "image_size" and value % 32)
            if not is_valid:
                texts = valid if isinstance(valid[0], str) else [f"{valid[0]} … {valid[1]}"]
                raise ConfigError(f"{name} = {value!r} is not a part of a network.", location=location, choices=texts)
    check_network(network_of({name: choices[0] for name, choices in space.settings.items()}), location)  # type: ignore[index]
    return space


def build_network(network: EmberNetwork, config: Config, num_classes: int) -> Ember:
    kind = {"block": network.block, "width": network.width, "depths": network.depths}
    return Ember(
        config.model, num_classes, backbone=kind, channels=network.channels, num_blocks=network.num_blocks,
        head_depth=network.head_depth,
    )  # fmt: skip


def input_segments(model: Ember) -> dict[str, list[int]]:
    """Parameter → the widths of the maps that are concatenated before its convolution; others have one map."""
    found: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, CSPLayer):
            found[f"{name}.join.0.weight"] = [len(module.through.get_parameter("0.weight"))] * (2 + len(module.blocks))
        elif isinstance(module, SPPF):
            found[f"{name}.join.0.weight"] = [len(module.narrow.get_parameter("0.weight"))] * 4
        elif isinstance(module, PAFPN):
            channels = [layer.join[0].out_channels for layer in module.down]  # type: ignore[union-attr,index]
            for n in range(len(channels)):
                down, up = module.down[n], module.up[n]
                coarse: Any = up.through[0].in_channels - channels[n]  # type: ignore[union-attr,index]
                fine: Any = down.through[0].in_channels - coarse  # type: ignore[union-attr,index]
                for part in ("beside", "through"):
                    found[f"{name}.down.{n}.{part}.0.weight"] = [coarse, fine]
                    found[f"{name}.up.{n}.{part}.0.weight"] = [channels[n], coarse]
    return found


class SuperNet:
    """The shared tensors of all networks of a space."""

    def __init__(self, space: Space, config: Config, num_classes: int, device: Device) -> None:
        self.config, self.num_classes, self.device = config, num_classes, device
        settings: dict[str, list[Any]] = {n: list(c) for n, c in space.settings.items() if n != "image_size"}  # type: ignore[arg-type]
        points = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
        self.networks = [network_of(point) for point in points]
        numeric = [name for name in settings if name != "block"]
        blocks = settings.get("block", [BASE["block"]])
        self.largest, self.smallest = (
            [network_of({name: pick(settings[name]) for name in numeric} | {"block": block}) for block in blocks]
            for pick in (max, min)
        )
        shapes: dict[str, list[int]] = {}
        self._segments: dict[str, list[int]] = {}
        for network in self.networks:
            model = self.model(network)
            for name, widths in input_segments(model).items():
                key = self._key(name, network)
                self._segments[key] = _largest(self._segments.get(key, []), widths)
            for name, tensor in model.named_parameters():
                key = self._key(name, network)
                shapes[key] = _largest(shapes.get(key, []), list(tensor.shape))
        for key, widths in self._segments.items():
            shapes[key][1] = sum(widths)
        self.tensors = {key: self._initial(key, shape) for key, shape in shapes.items()}

    @functools.lru_cache(maxsize=256)  # noqa: B019  # as long as the object
    def model(self, network: EmberNetwork) -> Ember:
        return build_network(network, self.config, self.num_classes).to(self.device.torch_device)

    def _key(self, name: str, network: EmberNetwork) -> str:
        """The name of the shared tensor: backbones of each kind have their own, heads of all depths one last layer."""
        name = name.replace("backbone.body.", f"backbone.body.{network.block}.")
        for branch in ("sides", "classes"):
            for level in range(3):
                last = f"head.many.{branch}.{level}.{network.head_depth}."
                name = name.replace(last, f"head.many.{branch}.{level}.last.")
        return name

    def _initial(self, key: str, shape: list[int]) -> Tensor:
        tensor = torch.zeros(shape, device=self.device.torch_device)
        if len(shape) == 4:
            nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))
        elif key.endswith("weight"):
            tensor.fill_(1.0)
        elif ".classes." in key and ".last." in key:
            tensor.fill_(PRIOR_LOGIT)
        return tensor.requires_grad_(True)

    def parameters(self, network: EmberNetwork) -> dict[str, Tensor]:
        """The parts of the shared tensors that a network uses, by its own names; gradients reach the whole."""
        model, found = self.model(network), {}
        segments = input_segments(model)
        for name, own in model.named_parameters():
            key = self._key(name, network)
            part = self.tensors[key][: own.shape[0]]
            if name in segments:
                maps = torch.split(part, self._segments[key], dim=1)
                part = torch.cat([a[:, :width] for a, width in zip(maps, segments[name], strict=False)], 1)
            elif own.dim() == 4:
                part = part[:, : own.shape[1]]
            found[name] = part.contiguous()
        return found

    def loss(self, network: EmberNetwork, batch: Batch) -> Tensor:
        """The sum of the loss terms of a network."""
        model = self.model(network).train()
        outputs = torch.func.functional_call(model, self.parameters(network), (batch.images,))
        return torch.stack(list(model.loss(outputs, batch).values())).sum()

    def extract(self, network: EmberNetwork, batches: list[Batch]) -> Detector:
        """A network with a copy of its weights, and batch statistics of these batches."""
        model = build_network(network, self.config, self.num_classes).to(self.device.torch_device)
        model.load_state_dict({k: v.detach() for k, v in self.parameters(network).items()}, strict=False)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None  # the mean over all batches
        model.train()
        with torch.no_grad():
            for batch in batches:
                model(batch.images)
        return model.eval()


def _nearest(value: Any, choices: list[Any]) -> Any:
    """The value, or the choice nearest to it: the shared tensors have nothing for others."""
    return value if value in choices or isinstance(value, str) else min(choices, key=lambda choice: abs(choice - value))


def _largest(a: list[int], b: list[int]) -> list[int]:
    return [max(pair) for pair in itertools.zip_longest(a, b, fillvalue=0)]


def resize_batch(batch: Batch, side: int) -> Batch:
    """The batch with its images shrunk to this longest side; boxes follow."""
    ratio = side / max(batch.images.shape[2:])
    if ratio == 1:
        return batch
    size = [round(length * ratio) for length in batch.images.shape[2:]]
    images = functional.interpolate(batch.images.float(), size=size, mode="bilinear", antialias=True)
    return batch._replace(images=images.round().to(torch.uint8), boxes=batch.boxes * ratio)


@dataclasses.dataclass(frozen=True)
class ArchitectureSearch:
    resolved: ResolvedRun
    space: Space
    folder: Path

    @property
    def sides(self) -> list[int]:
        return sorted(self.space.settings.get("image_size", [max(self.resolved.config.data.image_size)]))  # type: ignore[arg-type]

    def image_size(self, side: int) -> tuple[int, int]:
        """The derived shape with this longest side."""
        height, width = self.resolved.config.data.image_size
        factor = side / max(height, width)
        return max(32, round(height * factor / 32) * 32), max(32, round(width * factor / 32) * 32)

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[Batch]]:
        """Augmented training batches of the largest size, without end."""
        config, index = self.resolved.config, self.resolved.index
        config = config.replace(image_size=self.image_size(self.sides[-1]))
        loader = make_training_loader(
            config, index, self.resolved.device,
            max_boxes=compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic),
            log_event=lambda *_, **__: None,
        )  # fmt: skip
        with contextlib.closing(loader):
            yield (augment_batch(batch, config.data, 0.0) for batch in loader)


def train_supernet(setting: ArchitectureSearch, net: SuperNet, steps: int, say: Callable[[str], None]) -> None:
    """Trains the shared tensors, or reads those of a search that was killed after it."""
    path, config = setting.folder / WEIGHTS, setting.resolved.config
    if path.exists():
        with regular_files.open_torch_file(path) as file:
            tensors = torch.load(file, weights_only=True)
        for key, tensor in tensors.items():
            net.tensors[key].data.copy_(tensor)
        return
    optim, rng = config.optim, random.Random(config.run.seed)
    matrices, others = ([t for t in net.tensors.values() if (t.dim() > 1) == big] for big in (True, False))
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr)
    start_s = time.monotonic()
    with setting.batches() as batches:
        for step, batch in enumerate(itertools.islice(batches, steps)):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(optim, step, step / steps)
            batch = resize_batch(batch, rng.choice(setting.sides))
            kind = rng.randrange(len(net.largest))
            for network in (net.largest[kind], net.smallest[kind], rng.choice(net.networks)):
                loss = net.loss(network, batch)
                if not torch.isfinite(loss):
                    raise ConfigError("The super-network diverges.", cause=f"step {step}", fix="a smaller --lr")
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.tensors.values(), optim.clip_grad_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 in (20, steps // 2, steps):
                say(f"super-network: step {step + 1} of {steps}, {time.monotonic() - start_s:.0f} s, loss {loss:.3f}")
    buffer = io.BytesIO()
    torch.save({key: tensor.detach() for key, tensor in net.tensors.items()}, buffer)
    write_atomic(path, buffer.getvalue())


def measure_costs(network: EmberNetwork, image_size: tuple[int, int], net: SuperNet) -> dict[str, float]:
    """Milliseconds of one image, from pixels to candidates before NMS, with random weights (ONNX Runtime with
    one thread on a CPU, else torch), and GiB of the weights and of the largest layer's input and output."""
    model = build_network(network, net.config, net.num_classes).eval()
    largest = [0]

    def watch(_module: nn.Module, inputs: Any, output: Any) -> None:
        values = [value for value in (*inputs, output) if isinstance(value, Tensor)]
        largest[0] = max(largest[0], sum(value.numel() * value.element_size() for value in values))

    hooks = [module.register_forward_hook(watch) for module in model.modules() if not list(module.children())]
    images = torch.zeros((1, 3, *image_size), dtype=torch.uint8)
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    memory = sum(p.numel() * p.element_size() for p in model.parameters()) + largest[0]
    if net.device.is_cpu:
        with needs_package("onnxruntime", "`stoker search --architecture` on a CPU"):
            import onnxruntime  # type: ignore[import-untyped]
        from stoker.export.graph import OPSETS, export_network

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        data = export_network(model, image_size, OPSETS[0]).SerializeToString()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        feed = {
            "images": images.numpy(), "content": np.array([image_size], np.int32),
            "score_threshold": np.array(0.05, np.float32),
        }  # fmt: skip
        names = {value.name for value in session.get_inputs()}
        feed = {name: value for name, value in feed.items() if name in names}

        def run() -> None:
            session.run(None, feed)
    else:
        device_images = images.to(net.device.torch_device)
        model = model.to(net.device.torch_device)

        def run() -> None:
            with torch.no_grad():
                model(device_images)
            net.device.synchronize()

    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    # The fastest one: other programs of the machine only add time.
    return {"latency_ms": 1e3 * min(times), "memory_gib": memory / 2**30}


class Scores:
    """Scores trials: AP with the shared weights, and costs from the table of what was measured on this device."""

    def __init__(self, setting: ArchitectureSearch, net: SuperNet) -> None:
        self._setting, self._net, self._path = setting, net, setting.folder / COSTS
        self._device = f"{net.device.name}, torch {torch.__version__}"
        self._known = json.loads(regular_files.read_text(self._path)) if self._path.exists() else {}
        self._costs: dict[str, dict[str, float]] = self._known.setdefault(self._device, {})
        with setting.batches() as batches:
            self._batches = list(itertools.islice(batches, CALIBRATION_BATCHES))
            self._batches = [Batch(*(tensor.clone() for tensor in batch)) for batch in self._batches]

    def __call__(self, study: Study, claim: Claim) -> Outcome:
        params = study.trials()[claim.number].params
        network, side = network_of(params), params.get("image_size", self._setting.sides[-1])
        costs = self.costs(network, self._setting.image_size(side))
        model = self._net.extract(network, [resize_batch(batch, side) for batch in self._batches])
        return Outcome({"ap": self._ap(model, self._setting.image_size(side)), **costs}, (), 0)

    def costs(self, network: EmberNetwork, image_size: tuple[int, int]) -> dict[str, float]:
        """The costs in the table; measured where it has none."""
        key = f"{network.name()} {image_size[0]}x{image_size[1]}"
        if key not in self._costs:
            self._costs[key] = measure_costs(network, image_size, self._net)
            write_atomic(self._path, msgspec.json.format(msgspec.json.encode(self._known)))
        return self._costs[key]

    def _ap(self, model: Detector, image_size: tuple[int, int]) -> float:
        config, index, device = (getattr(self._setting.resolved, name) for name in ("config", "index", "device"))
        images = index.image_indices("val")[:MAX_SCORED]
        loader = evaluation_loader(
            index, images, device, batch_size=config.run.batch_size, image_size=image_size, resize=config.data.resize,
            workers=config.run.workers, max_bad_fraction=1.0,
        )  # fmt: skip
        with contextlib.closing(loader):
            detections = detect(model, loader, device, precision=config.run.precision)
        return compute_metrics(ground_truth(index, images), detections).ap or 0.0


def search_architecture(
    config: Config, space: Space | None, location: Path | None, *, trials: int, folder: Path | None, dry_run: bool,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Trains the super-network, searches, and writes the networks of the front as recipe files. Raises StokerError."""
    config = with_absolute_paths(config)
    if config.model.model not in (None, "ember_n"):
        raise ConfigError(
            f"--model {config.model.model}: networks of the family ember are searched.", fix="leave it out"
        )
    resolved = resolve_run(config.replace(model="ember_n"), None, fetch=None)
    space = make_space(space, resolved.config.data.image_size, location)
    if space.size() < trials:
        fix = f"--trials {space.size():.0f}"
        raise ConfigError(f"The space has only {space.size():.0f} networks.", location=location, fix=fix)
    length, batch_size = parse_duration(resolved.config.run.max_duration), resolved.config.run.batch_size
    steps = total_steps(length, len(resolved.index.image_indices("train")), batch_size)
    if steps is None:
        raise ConfigError("The length of the super-network is a time.", fix="--steps or --epochs")
    folder = (folder or Path(f"runs/{Path(str(config.data.data)).name}-architecture")).absolute()
    for line in ("space:", *(f"  {text}" for text in space.lines())):
        say(line)
    say(f"the super-network is trained for {steps} steps of three networks each; then {trials} networks are scored")
    if dry_run:
        say("nothing was trained or written (--dry-run)")
        return
    torch.manual_seed(resolved.config.run.seed)
    setting = ArchitectureSearch(resolved, space, folder)
    base = {**BASE, "image_size": max(resolved.config.data.image_size)}
    first = {name: _nearest(base[name], choices) for name, choices in space.settings.items()}  # type: ignore[arg-type]
    spec = StudySpec(
        data=str(config.data.data), digest=digest_data(resolved.index), space=space, trials=trials, round=POPULATION,
        settings=msgspec.to_builtins(config.set_fields()), objectives=["ap", "latency_ms"], pruner="none",
        defaults=first, evaluations=1, seed=resolved.config.run.seed, sampler="nsga2",
    )  # fmt: skip
    create(folder, spec)
    net = SuperNet(space, resolved.config, len(resolved.index.class_names), resolved.device)
    train_supernet(setting, net, steps, say)
    scores = Scores(setting, net)
    work(folder, scores)
    study = Study(folder)
    write_recipes(setting, study, say)
    say(f"page: {page.write_study(study)}")


def write_recipes(setting: ArchitectureSearch, study: Study, say: Callable[[str], None]) -> None:
    """A recipe file for each network of the front, the fastest last, and the commands that train them."""
    first = study.trials()[0].user_attrs.get("metrics", {})
    front = sorted(best_trials(study.spec, study.trials()), key=lambda trial: -trial.values[1])
    for trial in front:
        network = network_of(trial.params)
        height, width = setting.image_size(trial.params.get("image_size", setting.sides[-1]))
        path = setting.folder / f"network-{trial.number}.toml"
        write_atomic(path, tomli_w.dumps(msgspec.to_builtins(network)).encode())
        speed = first.get("latency_ms", math.nan) / trial.values[1]
        ap, latency_ms = trial.values
        say(f"trial {trial.number}: AP {ap:.3f} with shared weights, {latency_ms:.2f} ms, {speed:.2f} x trial 0")
        say(f"  stoker train {setting.resolved.config.data.data} --model {path} --image-size {height} {width}")
    if not front:
        say("no network is within the limits")
