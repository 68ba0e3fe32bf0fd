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
    max_bad_fraction: float
    image_size: tuple[int, int]
    resize: Literal["letterbox", "squash"]
    augment: Literal["recipe", "none"]
    hflip: float
    scale_jitter_prob: float
    scale_range: tuple[float, float]
    min_object_covered: float
    brightness: float
    contrast: float
    saturation: float
    hue: float
    mosaic: float
    model: str
    weights: str
    backbone_norm: Literal["frozen", "train", "sync"]
    trainable_backbone_layers: int
    anchor_sizes: tuple[float, ...]
    anchor_scales: tuple[float, ...]
    aspect_ratios: tuple[float, ...]
    fg_iou_thresh: float
    bg_iou_thresh: float
    focal_alpha: float
    focal_gamma: float
    box_loss: Literal["l1", "giou"]
    reduced_tail: Literal["half", "full"]
    nms_free: bool
    depthwise: bool
    activation_checkpointing: bool
    optimizer: Literal["sgd", "adamw"]
    lr: float
    backbone_lr_mult: float
    momentum: float
    weight_decay: float
    lr_scheduler: Literal["cosine", "step", "exponential", "constant"]
    warmup_steps: int
    clip_grad_norm: float
    ema_decay: float
    grad_accum_steps: int
    max_skipped_steps: int
    max_duration: str
    batch_size: int
    auto_batch: bool
    compile: bool
    precision: Literal["fp32", "bf16", "fp16"]
    device: str
    workers: int
    cache: Literal["none", "memory", "disk"]
    jpeg_decoder: Literal["host", "nvjpeg"]
    seed: int
    eval_every: str
    patience: int
    checkpoint_every: str
    price_per_device_hour: float
