"""`stoker models`: what there is to choose from, and one architecture in full.

It reads models.json, which is written from the table of architectures (`stoker/models/table.py`) by
`python -m tests.test_models_command`, so that the command needs no torch and starts at once.
"""

from pathlib import Path
from typing import Any, TextIO

import msgspec

from stoker.errors import ConfigError, nearest
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table

FILE = Path(__file__).with_name("models.json")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A row of MODELS, as data."""

    name: str
    use_case: str
    parameters: int
    image_size: tuple[int, int]
    """Height and width of which the following three are; the canvas of a run follows its data."""
    gflop: float
    training_gflop: float
    memory_gib: float
    recipe: str
    batch_size: int
    """Of the recipe."""
    weights: dict[str, str]
    """Pretrained weights and their addresses: coco, imagenet."""
    settings: dict[str, tuple[Any, str]]
    """The settings that belong to it: default and its reason."""


def read_models() -> list[ModelInfo]:
    return msgspec.json.decode(FILE.read_bytes(), type=list[ModelInfo])


def find_model(name: str) -> ModelInfo:
    """Raises ConfigError with the valid names."""
    models = {model.name: model for model in read_models()}
    if name not in models:
        near = nearest(name, models)
        raise ConfigError(
            f"There is no model called {name!r}" + (f"; did you mean {near!r}?" if near else "."), choices=models
        )
    return models[name]


def as_json(name: str | None) -> str:
    """All models, or the one called `name`."""
    return msgspec.json.encode(read_models() if name is None else find_model(name)).decode()


def print_models(file: TextIO | None = None, *, width: int | None = None) -> None:
    """A line for each, the one with the least work first."""
    rendered = table(
        "model", "params", "canvas", "GFLOP", "training", "memory", "weights", "for", right=(1, 2, 3, 4, 5)
    )
    for model in sorted(read_models(), key=lambda m: m.gflop):
        rendered.add_row(
            model.name,
            f"{model.parameters / 1e6:.1f} M",
            str(model.image_size[0]),
            fmt.number(model.gflop),
            fmt.number(model.training_gflop),
            format_memory(model),
            " ".join(model.weights) or "none",
            model.use_case,
        )
    print_renderables([rendered, plain_text(LEGEND)], file, width=width)


LEGEND = """
GFLOP: of a picture, found in and trained on. memory: predicted peak of a training step with that many pictures, bf16.
`stoker models NAME` shows one in full; `stoker train DATA --model NAME` trains it."""


def format_memory(model: ModelInfo) -> str:
    """4.2 GiB / 16."""
    return f"{model.memory_gib:.2g} GiB / {model.batch_size}"


def print_model(name: str, file: TextIO | None = None, *, width: int | None = None) -> None:
    """One in full: what it costs, its settings with their reasons, where its weights come from."""
    model = find_model(name)
    facts = table("", "", header=False)
    for label, value in (
        ("for", model.use_case),
        ("parameters", f"{fmt.count(model.parameters)} with 80 classes"),
        ("operations", f"{fmt.number(model.gflop)} GFLOP a picture of {_format_size(model)}; "
                       f"{fmt.number(model.training_gflop)} in training"),
        ("memory", f"{model.memory_gib:.2g} GiB predicted for a training step of {model.batch_size} such pictures in bf16"),
        ("recipe", f"{model.recipe}, a batch of {model.batch_size}"),
        *((f"{kind} weights", uri) for kind, uri in model.weights.items()),
    ):  # fmt: skip
        facts.add_row(label, value)
    if not model.weights:
        facts.add_row("weights", "none: it is trained from scratch")
    settings_table = table("setting", "default", "why")
    for setting, (value, reason) in model.settings.items():
        settings_table.add_row("--" + setting.replace("_", "-"), format_default(value), reason)
    print_renderables([plain_text(model.name, "bold"), facts, plain_text(""), settings_table], file, width=width)


def _format_size(model: ModelInfo) -> str:
    return f"{model.image_size[1]}x{model.image_size[0]}"


def format_default(value: object) -> str:
    """A default as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(format_default, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
