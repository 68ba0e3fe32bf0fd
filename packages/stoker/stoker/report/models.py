"""`stoker models`: lists the architectures, compares some, and shows one in detail.

It reads knowledge/models.toml, so it needs no torch and starts fast.
"""

from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec

from stoker.config.architectures import Architecture, read_architectures
from stoker.config.settings import read_recipes
from stoker.knowledge import read_toml
from stoker_watch.errors import ConfigError, did_you_mean
from stoker_watch.report import format as fmt
from stoker_watch.report.console import facts, plain_text, print_renderables, table


def read_models() -> list[dict[str, Any]]:
    """All models as `--json` has them."""
    return [describe_model(name) for name in read_architectures()]


def describe_model(name: str) -> dict[str, Any]:
    """A model as `--json` has it. Raises ConfigError that lists the valid names."""
    model = find_model(name)
    return {
        "name": name, "use_case": model.description, "parameters": model.num_params,
        "image_size": [model.compute_side] * 2, **msgspec.structs.asdict(model.cost), "recipe": model.recipe,
        "batch_size": _batch_size(model), "weights": model.urls, "licenses": _licenses(model),
        "settings": {field: (value, model.reasons[field]) for field, value in model.defaults.items()},
    }  # fmt: skip


def find_model(name: str) -> Architecture:
    """Raises ConfigError that lists the valid names."""
    models = read_architectures()
    if name not in models:
        raise ConfigError(did_you_mean(f"There is no model {name!r}", name, models), choices=models)
    return models[name]


def _batch_size(model: Architecture) -> int:
    return read_recipes()[model.recipe].run.batch_size


def _licenses(model: Architecture) -> dict[str, str]:
    """Pretrained weights → their license, in a few words."""
    texts = read_toml("models.toml")["licenses"]
    return {
        kind: next(text for start, text in texts.items() if url.startswith(start)) for kind, url in model.urls.items()
    }


COSTS: dict[str, Callable[[Architecture], str]] = {
    "params": lambda model: f"{model.num_params / 1e6:.1f} M",
    "image size": lambda model: str(model.compute_side),
    "GFLOP": lambda model: fmt.number(model.cost.gflop),
    "training": lambda model: fmt.number(model.cost.training_gflop),
    "memory": lambda model: f"{model.cost.memory_gib:.2g} GiB / {_batch_size(model)}",
    "weights": lambda model: " ".join(model.urls) or "none",
}
"""Head → text of what models are compared by."""


def print_models(file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints one line per model, ascending in GFLOP."""
    rows = (
        [name, *(text(model) for text in COSTS.values()), model.description]
        for name, model in sorted(read_architectures().items(), key=lambda row: row[1].cost.gflop)
    )
    shown = table("model", *COSTS, "use case", right=range(1, 6), rows=rows)
    print_renderables([shown, *LEGEND], file, width=width)


LEGEND = (
    "",
    "GFLOP: per image, in inference and in training. memory: predicted peak of a training step with this batch size,"
    " bf16.",
    "`stoker models NAME` shows details, of several it compares them; `stoker train DATA --model NAME` trains it.",
)


def print_comparison(names: Sequence[str], file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints a column per model. Raises ConfigError for a name that there is not."""
    models = {name: find_model(name) for name in names}
    long_heads = {"params": "parameters", "training": "GFLOP, training"}
    quantities = {long_heads.get(head, head): text for head, text in COSTS.items()} | {
        "their license": lambda model: "; ".join(dict.fromkeys(_licenses(model).values())) or "n/a",
        "recipe": lambda model: model.recipe,
    }
    rows = [[head, *map(text, models.values())] for head, text in quantities.items()]
    costs = table("", *models, rows=rows)
    print_renderables(
        [costs, "", facts((name, model.description) for name, model in models.items()), *LEGEND], file, width=width
    )


def print_model(name: str, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints one model: cost, settings with their reasons, weights."""
    model = find_model(name)
    size = f"{model.compute_side}x{model.compute_side}"
    gflop, training = fmt.number(model.cost.gflop), fmt.number(model.cost.training_gflop)
    batch_size, licenses = _batch_size(model), _licenses(model)
    memory = f"{model.cost.memory_gib:.2g} GiB predicted for a training step of {batch_size} such images in bf16"
    rows = [
        ("use case", model.description),
        ("parameters", f"{fmt.count(model.num_params)} with 80 classes"),
        ("compute", f"{gflop} GFLOP per image of {size}; {training} in training"),
        ("memory", memory),
        ("recipe", f"{model.recipe}, batch size {batch_size}"),
        *((f"{kind} weights", f"{uri} (license: {licenses[kind]})") for kind, uri in model.urls.items()),
        *([] if model.urls else [("weights", "none: trained from scratch")]),
    ]
    settings = (
        ["--" + setting.replace("_", "-"), format_default(value), model.reasons[setting]]
        for setting, value in model.defaults.items()
    )
    settings_table = table("setting", "default", "reason", rows=settings)
    print_renderables([plain_text(name, "bold"), facts(rows), "", settings_table], file, width=width)


def format_default(value: object) -> str:
    """A default as on the command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(format_default, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
