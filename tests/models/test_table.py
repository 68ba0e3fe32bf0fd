"""What the rows of MODELS say that a model costs: parameters, operations, memory. `python -m tests.models.test_table`
prints the line `cost=…` of every row, or of those named, as it is computed anew."""

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.config.recipes import RECIPES
from stoker.models import MODELS, build
from stoker.models.architecture import ComputeCost
from stoker.models.layers.winograd import without_winograd
from tests import fakes
from tests.models.samples import make_batch, settings_of

CLASSES, BOXES = 80, 100
"""As on COCO, whose fullest image has 93 boxes."""


def image_size_of(name: str) -> tuple[int, int]:
    """The square that the row's numbers are of."""
    row = MODELS[name]
    side = row.default_image_size // row.size_divisor * row.size_divisor
    return side, side


def trial_of(name: str) -> fakes.Trial:
    """A training step as the recipe has it on a GPU."""
    recipe = RECIPES[MODELS[name].recipe]()
    return fakes.Trial(
        model=name,
        classes=CLASSES,
        slots=BOXES,
        image_size=image_size_of(name),
        batch=recipe.run.batch_size,
        optimizer=recipe.optim.optimizer,
        fused=recipe.optim.optimizer == "adamw",
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
    (step,) = fakes.run(trial_of(name))
    if step.error is not None or step.flop is None:
        raise RuntimeError(f"{name}: {step.error}")
    return ComputeCost(
        gflop=float(f"{inference_gflop(name):.3g}"),
        training_gflop=float(f"{step.flop / 1e9:.3g}"),
        memory_gib=float(f"{step.peak / 2**30:.2g}"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_row_says_what_its_model_costs(name: str):
    message, found = MODELS[name].cost, cost_of(name)
    assert message.gflop == pytest.approx(found.gflop, rel=0.01)
    assert message.training_gflop == pytest.approx(found.training_gflop, rel=0.01)
    assert message.memory_gib == pytest.approx(found.memory_gib, rel=0.05)


def test_a_row_without_its_cost_cannot_be_made():
    row = {**vars(MODELS["retinanet_tiny_fpn"])}
    del row["cost"]
    with pytest.raises(TypeError, match="cost"):
        type(MODELS["retinanet_tiny_fpn"])(**row)
    with pytest.raises(TypeError, match="memory_gib"):
        ComputeCost(gflop=1.0, training_gflop=3.0)  # type: ignore[call-arg]


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        try:
            print(f"{each}: cost={cost_of(each)},", flush=True)
        except RuntimeError as error:
            print(error, flush=True)
