"""torchvision's RetinaNet with the weights of one of ours, in torchvision's own custom for classes.

Its class head has one more channel than ours and its labels are ours + 1. The extra channel 0 stands for no class; here
it gets a bias at which it costs nothing, as it would in a trained model. The oracle's memory is channels last as ours:
another order of the sums in its convolutions would change activations in the last bit, some would cross the kink of a
ReLU, and the gradients of a deep network would differ by a percent, whoever computes them.
"""

import torch
from torch import Tensor, nn
from torchvision.models import mobilenet_v2, resnet50
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from stoker.batch import Batch
from stoker.models import Detector

CLASS_HEAD = "head.classification_head.cls_logits."


def oracle_of(model: Detector, canvas: tuple[int, int]) -> RetinaNet:
    settings = model.settings
    norm = FrozenBatchNorm2d if settings.norm == "frozen" else nn.BatchNorm2d
    if settings.model == "retinanet_resnet50_fpn":
        body, stages, channels, depth = (
            resnet50(norm_layer=norm),
            {"layer2": 512, "layer3": 1024, "layer4": 2048},
            256,
            4,
        )
    else:
        body, stages, channels, depth = mobilenet_v2(norm_layer=norm).features, {"6": 32, "13": 96, "18": 1280}, 128, 2
    backbone = BackboneWithFPN(
        body, {name: name for name in stages}, list(stages.values()), channels, LastLevelP6P7(channels, channels)
    )
    sizes = tuple((int(s), int(s * 2 ** (1 / 3)), int(s * 2 ** (2 / 3))) for s in settings.anchor_sizes)
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    head = RetinaNetHead(channels, 9, model.class_count + 1)
    for tower in (head.classification_head, head.regression_head):
        tower.conv = tower.conv[:depth]
    head.regression_head._loss_type = settings.box_loss
    oracle = RetinaNet(
        backbone,
        model.class_count + 1,
        anchor_generator=anchors,
        head=head,
        min_size=min(canvas),
        max_size=max(canvas),
        detections_per_img=100,
    )
    oracle.load_state_dict({name: to_oracle(name, tensor, -100.0) for name, tensor in model.state_dict().items()})
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return oracle.to(memory_format=torch.channels_last)


def to_oracle(name: str, tensor: Tensor, unused: float = 0.0) -> Tensor:
    """Our parameter (or gradient) as the oracle has it: `unused` in the bias of each anchor's channel 0."""
    if not name.startswith(CLASS_HEAD):
        return tensor
    by_anchor = tensor.unflatten(0, (9, -1))
    first = torch.full_like(by_anchor[:, :1], unused if name.endswith("bias") else 0.0)
    return torch.cat((first, by_anchor), dim=1).flatten(0, 1)


def oracle_losses(oracle: RetinaNet, batch: Batch) -> dict[str, Tensor]:
    targets = [
        {"boxes": boxes[valid], "labels": labels[valid] + 1}
        for boxes, labels, valid in zip(batch.boxes, batch.labels, batch.valid, strict=True)
    ]
    return oracle(list(batch.images.float() / 255), targets)


def oracle_detections(oracle: RetinaNet, batch: Batch) -> list[dict[str, Tensor]]:
    """The oracle's own post-processing, of pictures that fill only `content` of the canvas."""
    pixels = torch.stack([oracle.transform.normalize(image.float() / 255) for image in batch.images])
    features = list(oracle.backbone(pixels).values())
    outputs = oracle.head(features)
    contents = [tuple(content.tolist()) for content in batch.content]
    images = ImageList(pixels, contents)
    anchors = oracle.anchor_generator(images, features)
    counts = [feature.shape[2] * feature.shape[3] * 9 for feature in features]
    split = {name: list(output.split(counts, dim=1)) for name, output in outputs.items()}
    found = oracle.postprocess_detections(split, [list(some.split(counts)) for some in anchors], contents)
    return oracle.transform.postprocess(found, contents, [tuple(size.tolist()) for size in batch.size])
