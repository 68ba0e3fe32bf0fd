"""`stoker models`: lists the architectures, compares some, and shows one in detail.

It reads knowledge/models.toml, so it needs no torch and starts fast.
"""

from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec

from stoker.config.architectures import read_architectures
from stoker.config.settings import read_recipes
from stoker.knowledge import read_toml
from stoker_watch.errors import ConfigError, did_you_mean
from stoker_watch.report import format as fmt
from stoker_watch.report.console import facts, plain_text, print_renderables, table


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    use_case: str
    parameters: int
    image_size: tuple[int, int]
    """Height and width for which GFLOP and memory are given; the image size of a run depends on its data."""
    gflop: float
    training_gflop: float
    memory_gib: float
    recipe: str
    batch_size: int
    """Batch size of the recipe."""
    weights: dict[str, str]
    """Pretrained weights → URL; keys are values of `--weights`."""
    licenses: dict[str, str]
    """Pretrained weights → their license, in a few words."""
    settings: dict[str, tuple[Any, str]]
    """Settings specific to the architecture: default and its reason."""


def read_models() -> list[ModelInfo]:
    models, licenses = [], read_toml("models.toml")["licenses"]
    for name, arch in read_architectures().items():
        side = arch.default_image_size // arch.size_divisor * arch.size_divisor
        models.append(
            ModelInfo(
                name=name,
                use_case=arch.description,
                parameters=arch.num_params,
                image_size=(side, side),
                **msgspec.structs.asdict(arch.cost),
                recipe=arch.recipe,
                batch_size=read_recipes()[arch.recipe].run.batch_size,
                weights=dict(arch.urls),
                licenses={
                    kind: next(text for start, text in licenses.items() if url.startswith(start))
                    for kind, url in arch.urls.items()
                },
                settings={field: (value, arch.reasons[field]) for field, value in arch.defaults.items()},
            )
        )
    return models


def find_model(name: str) -> ModelInfo:
    """Raises ConfigError that lists the valid names."""
    models = {model.name: model for model in read_models()}
    if name not in models:
        raise ConfigError(did_you_mean(f"There is no model {name!r}", name, models), choices=models)
    return models[name]


COSTS: dict[str, Callable[[ModelInfo], str]] = {
    "params": lambda model: f"{model.parameters / 1e6:.1f} M",
    "image size": lambda model: str(model.image_size[0]),
    "GFLOP": lambda model: fmt.number(model.gflop),
    "training": lambda model: fmt.number(model.training_gflop),
    "memory": lambda model: f"{model.memory_gib:.2g} GiB / {model.batch_size}",
    "weights": lambda model: " ".join(model.weights) or "none",
}
"""Head → text of what models are compared by."""


def print_models(file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints one line per model, ascending in GFLOP."""
    rows = (
        [model.name, *(text(model) for text in COSTS.values()), model.use_case]
        for model in sorted(read_models(), key=lambda model: model.gflop)
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
    models = [find_model(name) for name in dict.fromkeys(names)]
    long_heads = {"params": "parameters", "training": "GFLOP, training"}
    quantities = {long_heads.get(head, head): text for head, text in COSTS.items()} | {
        "their license": lambda model: "; ".join(dict.fromkeys(model.licenses.values())) or "n/a",
        "recipe": lambda model: model.recipe,
    }
    rows = [[head, *map(text, models)] for head, text in quantities.items()]
    costs = table("", *(model.name for model in models), rows=rows)
    print_renderables([costs, "", facts((m.name, m.use_case) for m in models), *LEGEND], file, width=width)


def print_model(name: str, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints one model: cost, settings with their reasons, weights."""
    model = find_model(name)
    size = f"{model.image_size[1]}x{model.image_size[0]}"
    gflop = f"{fmt.number(model.gflop)} GFLOP per image of {size}; {fmt.number(model.training_gflop)} in training"
    memory = f"{model.memory_gib:.2g} GiB predicted for a training step of {model.batch_size} such images in bf16"
    rows = [
        ("use case", model.use_case),
        ("parameters", f"{fmt.count(model.parameters)} with 80 classes"),
        ("compute", gflop),
        ("memory", memory),
        ("recipe", f"{model.recipe}, batch size {model.batch_size}"),
        *((f"{kind} weights", f"{uri} (license: {model.licenses[kind]})") for kind, uri in model.weights.items()),
        *([] if model.weights else [("weights", "none: trained from scratch")]),
    ]
    settings = (
        ["--" + setting.replace("_", "-"), format_default(value), reason]
        for setting, (value, reason) in model.settings.items()
    )
    settings_table = table("setting", "default", "reason", rows=settings)
    print_renderables([plain_text(model.name, "bold"), facts(rows), "", settings_table], file, width=width)


def format_default(value: object) -> str:
    """A default as on the command line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(format_default, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
