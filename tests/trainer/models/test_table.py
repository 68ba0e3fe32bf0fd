"""What the rows of MODELS say that a model costs: parameters, operations, memory.

`python -m tests.trainer.models.test_table` prints the line `cost=…` of every row, or of those
named, as it is computed anew."""

import sys
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.config.architectures import ComputeCost, make_architecture
from stoker.config.settings import read_recipes
from stoker.knowledge import read_toml
from stoker.models import MODELS, build
from stoker.models.layers.winograd import without_winograd
from tests import fakes
from tests.trainer.models.samples import ALIKE, make_batch, settings_of

CLASSES, BOXES = 80, 100
"""As on COCO, whose fullest image has 93 boxes."""


def image_size_of(name: str) -> tuple[int, int]:
    """The square that the row's numbers are of."""
    row = MODELS[name]
    side = row.default_image_size // row.size_divisor * row.size_divisor
    return side, side


def trial_of(name: str, optimizer: Literal["sgd", "adamw", "muon"]) -> fakes.Trial:
    """A training step as the recipe has it on a GPU."""
    recipe = read_recipes()[MODELS[name].recipe]
    return fakes.Trial(
        model=name,
        classes=CLASSES,
        slots=BOXES,
        image_size=image_size_of(name),
        batch=recipe.run.batch_size,
        optimizer=optimizer,
        average=True,
        flop=True,
    )


def inference_gflop(name: str) -> float:
    """Of an image, from pixels to candidates."""
    model = build(settings_of(name), CLASSES).eval()
    batch = make_batch((0,), image_size_of(name), CLASSES)
    with torch.inference_mode(), without_winograd(), FlopCounterMode(display=False) as counter:
        model.candidates(model(batch.images), batch.resized_size, score_threshold=0.0)
    return counter.get_total_flops() / 1e9


def cost_of(name: str) -> ComputeCost:
    """What the row has to say. Raises RuntimeError where the step does not run."""
    (step,) = fakes.run(trial_of(name, read_recipes()[MODELS[name].recipe].optim.optimizer))
    (sgd_step,) = fakes.run(trial_of(name, "sgd"))  # Muon's are of a step, whatever its batch
    if step.error is not None or sgd_step.flop is None:
        raise RuntimeError(f"{name}: {step.error or sgd_step.error}")
    return ComputeCost(
        gflop=float(f"{inference_gflop(name):.3g}"),
        training_gflop=float(f"{sgd_step.flop / 1e9:.3g}"),
        memory_gib=float(f"{step.peak / 2**30:.2g}"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALIKE])
def test_a_row_says_what_its_model_costs(name: str):
    message, found = MODELS[name].cost, cost_of(name)
    assert message.gflop == pytest.approx(found.gflop, rel=0.01)
    assert message.training_gflop == pytest.approx(found.training_gflop, rel=0.01)
    assert message.memory_gib == pytest.approx(found.memory_gib, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": None}, "cost"),
        ({"cost": {"gflop": 1.0, "training_gflop": 3.0}}, "memory_gib"),
        ({"default_image_size": "big"}, "default_image_size"),
        ({"image_size": 320}, "image_size"),
    ],
)
def test_a_row_of_another_form_is_refused(change: dict[str, Any], message: str):
    tables = read_toml("models.toml")
    row = {**tables["models"]["retinanet_tiny_fpn"], **change}
    with pytest.raises(msgspec.ValidationError, match=message):
        make_architecture({name: value for name, value in row.items() if value is not None}, tables["defaults"])


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        try:
            fields = ", ".join(f"{field} = {value}" for field, value in msgspec.structs.asdict(cost_of(each)).items())
            print(f"{each}: cost = {{ {fields} }}", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
