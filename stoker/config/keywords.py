"""The settings as keyword arguments: what a type checker and an editor know of `stoker.train(data, **settings)`.

The same names and types as the fields of `settings.py`, where each is described; `tests/test_surface.py` holds the two,
the flags and docs/settings.md together.
"""

from typing import Literal, TypedDict


class Settings(TypedDict, total=False):
    """Every setting but `data`. What is not given is derived, as on the command line."""

    format: Literal["coco", "voc", "yolo", "tfrecord", "csv"]
    classes: tuple[str, ...]
    val_fraction: float
    max_bad: float
    canvas: tuple[int, int]
    resize: Literal["letterbox", "squash"]
    augment: Literal["recipe", "none"]
    flip: float
    crop: float
    zoom: tuple[float, float]
    overlap: float
    brightness: float
    contrast: float
    saturation: float
    hue: float
    mosaic: float
    model: str
    weights: str
    norm: Literal["frozen", "train", "sync"]
    trainable_stages: int
    anchor_sizes: tuple[float, ...]
    anchor_scales: tuple[float, ...]
    anchor_ratios: tuple[float, ...]
    foreground_iou: float
    background_iou: float
    focal_alpha: float
    focal_gamma: float
    box_loss: Literal["l1", "giou"]
    tail: Literal["half", "full"]
    nms_free: bool
    depthwise: bool
    checkpoint_activations: bool
    optimizer: Literal["sgd", "adamw"]
    rate: float
    backbone_rate: float
    momentum: float
    weight_decay: float
    schedule: Literal["cosine", "step", "exponential", "constant"]
    warmup: int
    clip: float
    ema: float
    accumulate: int
    max_skipped: int
    for_: str
    batch: int
    fit: bool
    eager: bool
    precision: Literal["fp32", "bf16", "fp16"]
    device: str
    threads: int
    cache: Literal["none", "memory", "disk"]
    decoder: Literal["host", "nvjpeg"]
    seed: int
    eval_every: str
    patience: int
    checkpoint_every: str
    price: float
