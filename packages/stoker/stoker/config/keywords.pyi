"""The settings as keyword arguments, for type checkers and editors. Generated from `settings.py` by
`python -m tests.trainer.config.test_surface`; do not edit. `epochs`, `steps`, `max_time` set `max_duration`.
"""

# fmt: off
# ruff: noqa: E501

from typing import Literal, TypedDict

class Settings(TypedDict, total=False):
    """What `stoker.train` takes, by the names of its flags; a setting that is not given is derived."""

    format: Literal["coco", "voc", "kitti", "yolo", "tfrecord", "openimages", "via", "csv", "cvat", "labelme", "label-studio", "createml", "jsonl", "webdataset", "parquet", "public"]
    classes: tuple[str, ...]
    train: str
    val: str
    splits: str
    val_fraction: float
    split_method: Literal["stratified", "hash"]
    max_bad_fraction: float
    max_bad_boxes: float
    allow_outside: bool
    image_size: int | tuple[int, int]
    resize: Literal["letterbox", "squash"]
    augment: Literal["default", "none"]
    hflip: float
    scale_jitter_prob: float
    scale_range: tuple[float, float]
    min_object_covered: float
    brightness: float
    contrast: float
    saturation: float
    hue: float
    mosaic: float
    mixup: float
    repeat_thresh: float
    model: str
    weights: str
    backbone_norm: Literal["frozen_bn", "bn", "sync_bn"]
    trainable_backbone_layers: int
    anchor_sizes: tuple[float, ...]
    anchor_scales: tuple[float, ...]
    aspect_ratios: tuple[float, ...]
    fg_iou_thresh: float
    bg_iou_thresh: float
    focal_alpha: float
    focal_gamma: float
    box_loss: Literal["l1", "giou"]
    reduced_tail: bool
    nms_free: bool
    depthwise: bool
    queries: int
    class_loss: Literal["vfl", "mal"]
    activation_checkpointing: bool
    optimizer: Literal["sgd", "adamw", "muon"]
    lr: float
    backbone_lr_mult: float
    momentum: float
    weight_decay: float
    lr_scheduler: Literal["cosine", "multistep", "exponential", "constant"]
    warmup_steps: int
    clip_grad_norm: float
    ema_decay: float
    grad_accum_steps: int
    max_skipped_steps: int
    max_duration: str
    epochs: float
    steps: int
    max_time: str
    batch_size: int
    auto_batch: bool
    compile: bool
    cuda_graph: bool
    shard: bool
    sync: str
    precision: Literal["fp32", "bf16", "fp16"]
    device: str
    workers: int | Literal["auto"]
    worker_processes: int | Literal["auto"]
    cache: Literal["none", "ram", "disk"]
    jpeg_decoder: Literal["cpu", "nvjpeg"]
    seed: int
    shuffle_buffer: int
    eval_every: str
    patience: int
    checkpoint_every: str
    price_per_device_hour: float
