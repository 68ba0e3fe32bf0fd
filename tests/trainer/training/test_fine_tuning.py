"""D-FINE from a file with COCO's 80 classes: what is kept, what is new, and that it helps from the first step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.config.settings import OptimSettings
from stoker.hardware.device import Device
from stoker.models import Detector, build, load_weights
from stoker.models.weights.load import COCO_CLASSES
from stoker.models.weights.model_file import ModelMetadata
from stoker.training.optim import OptimizerStep
from tests.trainer.models.samples import make_batch, settings_of

NAME, SIDE = "dfine_n", (64, 64)
CAT, DOG = 15, 16
"""Rows of COCO's 80 classes."""
HEADS = [f"decoder.class_embed.{layer}" for layer in range(3)] + ["enc_score_head"]
OPTIM = OptimSettings(
    optimizer="adamw", backbone_lr_mult=0.5, momentum=0.9, weight_decay=1e-4, clip_grad_norm=0.1, ema_decay=0.0
)


def train(model: Detector, labels: tuple[int, int], steps: int) -> tuple[OptimizerStep, list[float]]:
    """Steps on the same images, whose boxes are of two classes; the loss of each."""
    batch = make_batch((3, 2), SIDE, classes=2)
    batch = batch._replace(labels=torch.tensor(labels)[batch.labels])
    optimizer, losses = OptimizerStep(model.train(), OPTIM, Device(torch.device("cpu")), precision="fp32"), []
    for step in range(steps):
        loss = torch.stack(list(model.loss(model(batch.images), batch).values())).sum()
        optimizer.backward(loss)
        optimizer.step(1e-3, step)
        losses.append(loss.item())
    return optimizer, losses


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights that were trained on cats and dogs."""
    torch.manual_seed(0)
    model = build(settings_of(NAME), len(COCO_CLASSES))
    train(model, (CAT, DOG), 12)
    metadata = ModelMetadata(settings=settings_of(NAME), class_names=COCO_CLASSES, image_size=SIDE, resize="letterbox")
    path = tmp_path_factory.mktemp("weights") / "coco.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, metadata.header())
    return path


def started(weights: str, class_names: tuple[str, ...]) -> tuple[Detector, dict[str, Tensor], list[str]]:
    """A model with these weights, its random values before, and the messages."""
    torch.manual_seed(1)
    settings = settings_of(NAME, weights=weights)
    model = build(settings, len(class_names))
    random = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, random, load_weights(model, settings, class_names=class_names)


def test_classes_of_the_file_keep_their_rows_and_others_are_new(published: Path) -> None:
    model, random, sentences = started(str(published), ("screw", "Dog"))
    assert sentences[1] == "class head kept, 80 -> 2 channels; 1 of 2 classes matched by name, random: screw"
    own, other = model.state_dict(), load_file(published)
    rows = [f"{head}.{kind}" for head in HEADS for kind in ("weight", "bias")] + ["denoising_class_embed.weight"]
    for name in rows:
        assert torch.equal(own[name][1], other[name][DOG])
        assert torch.equal(own[name][0], random[name][0])
    others = [name for name in own if name not in rows and not name.endswith("num_batches_tracked")]
    assert all(torch.equal(own[name], other[name]) for name in others)


def test_the_loss_starts_below_that_of_random_weights_and_falls(published: Path) -> None:
    """Also with classes that are all new: boxes are found as before."""
    classes = ("screw", "nut")
    _, losses = train(started(str(published), classes)[0], (0, 1), 4)
    _, from_random = train(started("none", classes)[0], (0, 1), 4)
    assert losses[0] < from_random[0]
    assert losses[-1] < losses[0]
    assert losses[-1] < from_random[-1]


def test_the_backbone_has_its_own_learning_rate_and_norms_and_biases_do_not_decay() -> None:
    """D-FINE's configurations: the backbone apart, and `weight_decay: 0.` for norms, and biases of encoder and decoder
    (Peterande/D-FINE, configs/dfine/custom/dfine_hgnetv2_n_custom.yml)."""
    model = build(settings_of(NAME), 2)
    optimizer, _ = train(model, (0, 1), 1)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    seen = {
        name_of[parameter]: (group["lr"], group["weight_decay"])
        for group in optimizer._optimizer.param_groups
        for parameter in group["params"]
    }
    assert seen.keys() == set(name_of.values())
    for name, (lr, decay) in seen.items():
        assert lr == pytest.approx(5e-4 if name.startswith("backbone.body.") else 1e-3), name
        if name.endswith("bias") or "norm" in name:
            assert decay == 0.0, name
    assert {decay for name, (_, decay) in seen.items() if name.endswith("layers.0.weight")} == {1e-4}
