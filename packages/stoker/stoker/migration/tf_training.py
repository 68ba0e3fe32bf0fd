"""The `train_config` of a pipeline.config: length, initial weights, optimizer, schedule, weight decay, augmentation.

stoker's schedules have fixed shapes over the whole length (`training/resume.py: lr_at`), so a schedule of the API is
compared with them over the steps that the training really has. The API applies a list of augmentation steps in order;
stoker has one crop or zoom, a flip, and one change of colors. Numbers of the steps and their defaults are those of
object_detection/protos/preprocessor.proto and core/preprocessor.py.
"""

import math
import re
from typing import Any

from stoker.migration.fields import FieldAccount, Status, knowledge
from stoker.migration.text_format import Message

API_MOVING_AVERAGE = 0.9999
END_OF_SCHEDULE = 0.01
"""Where cosine and exponential end in stoker, relative to the peak."""
NEAR_CONSTANT = 0.5
"""A cosine schedule that is above this fraction of its peak at the last step is nearer to a constant one."""
SCALE_LIMITS = (0.05, 20.0)
"""`--scale-range` is between these."""
SSD_CROP_COVERED, SSD_CROP_AREA, SSD_CROP_SKIPPED = 0.1, 0.1, 0.15
"""ssd_random_crop without operations: the lowest coverage above 0, the smallest area, probability to skip the crop."""


def read_training(account: FieldAccount, train: Message, model: Message) -> None:
    """Rows and settings of batch size, length, weights, optimizer, schedule, weight decay and augmentation."""
    batch_size = int(train.number("batch_size", 32))
    account.carry(train, "batch_size", "exact", {"batch_size": batch_size}, "images per step of the whole job")
    account.trap("batch-per-job", train.lines.get("batch_size"), batch_size=batch_size)
    steps = int(train.number("num_steps", 0))
    if steps:
        account.carry(train, "num_steps", "exact", {"max_duration": str(steps)}, "")
    else:
        account.drop(train, "num_steps", "0 never ends; the length is derived from the data: --steps sets it")
    _read_weights(account, train)
    _read_optimizer(account, train.child("optimizer"), steps)
    _read_weight_decay(account, train, model)
    _read_augmentation(account, train)
    if not train.has("freeze_variables") and not train.has("update_trainable_variables"):
        account.carry(train, "freeze_variables", "exact", {"trainable_backbone_layers": 5}, "every layer is trained")


def _read_weights(account: FieldAccount, train: Message) -> None:
    """The initial weights. TensorFlow's cannot be loaded."""
    checkpoint = train.text("fine_tune_checkpoint")
    if not checkpoint:
        note = "no checkpoint: the weights are random; --weights imagenet learns much faster"
        account.carry(train, "fine_tune_checkpoint", "exact", {"weights": "none"}, note)
        return
    kind = train.text("fine_tune_checkpoint_type")
    is_detector = kind in ("detection", "full") or (not kind and train.flag("from_detection_checkpoint", False))
    wanted = ("coco", "imagenet") if is_detector else ("imagenet",)
    weights = next((name for name in wanted if name in account.model.urls), "none")
    what = {
        "coco": "torchvision's COCO weights of the whole detector",
        "imagenet": "the backbone's ImageNet weights",
        "none": f"random weights: {account.model.name} has no pretrained ones",
    }[weights]
    note = f"TensorFlow's checkpoints have other names and layouts and cannot be loaded; instead {what}"
    account.carry(train, "fine_tune_checkpoint", "substitute", {"weights": weights}, note)
    if kind == "classification" and re.search(r"_coco(17|_20\d\d)_|_coco_v\d", checkpoint):
        account.trap("checkpoint-type", train.lines.get("fine_tune_checkpoint_type"), checkpoint=checkpoint)
    account.trap("fine-tune-checkpoint", train.lines.get("fine_tune_checkpoint"), checkpoint=checkpoint, what=what)


def _read_optimizer(account: FieldAccount, optimizer: Message, steps: int) -> None:
    kind = optimizer.kind() or "momentum_optimizer"
    chosen = optimizer.child(kind)
    settings: dict[str, Any] = {"optimizer": "sgd", "momentum": chosen.number("momentum_optimizer_value", 0.9)}
    if kind == "momentum_optimizer":
        account.carry(chosen, "momentum_optimizer_value", "exact", settings, "")
    elif kind == "rms_prop_optimizer":
        note = "RMSProp does not exist here; with this epsilon it divides by about 1 and is SGD with momentum"
        if chosen.number("epsilon", 1.0) < 0.1:
            settings["optimizer"] = "adamw"
            note = "RMSProp does not exist here; AdamW divides by the same running mean"
        account.carry(chosen, "momentum_optimizer_value", "substitute", settings, note)
    _read_schedule(account, chosen.child("learning_rate"), steps)
    if kind == "adam_optimizer":  # its fields may all be those of the schedule
        note = "AdamW: weight decay is not scaled by the gradients"
        account.carry(optimizer, kind, "substitute", {"optimizer": "adamw"}, note)
    if optimizer.flag("use_moving_average", True):
        decay = {"ema_decay": optimizer.number("moving_average_decay", API_MOVING_AVERAGE)}
        for name in ("use_moving_average", "moving_average_decay"):
            account.carry(optimizer, name, "exact", decay, "the averaged weights are evaluated and saved")
    else:
        account.carry(optimizer, "use_moving_average", "exact", {"ema_decay": 0.0}, "")


def _read_schedule(account: FieldAccount, schedule: Message, steps: int) -> None:
    kind = schedule.kind() or "constant_learning_rate"
    chosen = schedule.child(kind)
    if kind == "cosine_decay_learning_rate":
        _read_cosine(account, chosen, steps)
    elif kind == "exponential_decay_learning_rate":
        _read_exponential(account, chosen, steps)
    elif kind == "manual_step_learning_rate":
        _read_manual_steps(account, chosen, steps)
    else:
        settings = {"lr": chosen.number("learning_rate", 0.002), "lr_scheduler": "constant", "warmup_steps": 0}
        account.carry(chosen, "learning_rate", "exact", settings, "")


def _read_cosine(account: FieldAccount, chosen: Message, steps: int) -> None:
    peak = {"lr": chosen.number("learning_rate_base", 0.002)}
    total, warmup = int(chosen.number("total_steps", 4_000_000)), int(chosen.number("warmup_steps", 10_000))
    account.carry(chosen, "learning_rate_base", "exact", peak, "")
    held = warmup + int(chosen.number("hold_base_rate_steps", 0))
    progress = (steps - held) / max(1, total - held) if steps else 1.0
    final = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    scheduler = "constant" if final > NEAR_CONSTANT else "cosine"
    note = "the cosine ends at 1 % of the peak instead of 0, and begins with the first step, not after the warm-up"
    if total < steps or scheduler == "constant":
        values = {"total": total, "steps": steps, "percent": 100 * final, "scheduler": scheduler}
        note = account.trap("schedule-length", chosen.lines.get("total_steps"), **values)
    account.carry(chosen, "total_steps", "substitute", {"lr_scheduler": scheduler}, note)
    if steps and warmup >= steps:
        note = f"the warm-up is as long as the training of {steps:,} steps; here a tenth of it"
        account.carry(chosen, "warmup_steps", "substitute", {"warmup_steps": steps // 10}, note)
    else:
        account.carry(chosen, "warmup_steps", "exact", {"warmup_steps": warmup}, "")
    if warmup:
        note = "the warm-up begins at a thousandth of the peak"
        account.carry(chosen, "warmup_learning_rate", "substitute", {}, note)


def _read_exponential(account: FieldAccount, chosen: Message, steps: int) -> None:
    peak = {"lr": chosen.number("initial_learning_rate", 0.002)}
    account.carry(chosen, "initial_learning_rate", "exact", peak, "")
    every, factor = chosen.number("decay_steps", 4_000_000), chosen.number("decay_factor", 0.95)
    periods = (steps or every) / max(1.0, every)
    if chosen.flag("staircase", True):
        periods = math.floor(periods)
    final = factor**periods
    scheduler = "exponential" if final < math.sqrt(END_OF_SCHEDULE) else "constant"
    status: Status = "exact" if final == 1.0 and steps else "substitute"
    ending = "falls smoothly to 1 % of the peak over the length" if scheduler == "exponential" else "does not fall"
    falls = "does not fall" if final == 1.0 else f"falls to {100 * final:.3g} % of the peak"
    note = f"there, the learning rate {falls} in this training; here it {ending}"
    for name in ("decay_steps", "decay_factor", *(["staircase"] if chosen.has("staircase") else [])):
        account.carry(chosen, name, status, {"lr_scheduler": scheduler}, note)
    burn_in = int(chosen.number("burnin_steps", 0))
    note = "a linear warm-up instead of a constant lower learning rate"
    account.carry(chosen, "burnin_steps", "substitute" if burn_in else "exact", {"warmup_steps": burn_in}, note)


def _read_manual_steps(account: FieldAccount, chosen: Message, steps: int) -> None:
    entries = chosen.children("schedule")
    schedule = [(int(entry.number("step", 0)), entry.number("learning_rate", 0.002)) for entry in entries]
    reached = [(step, lr) for step, lr in schedule if not steps or step < steps]
    lrs = [lr for _, lr in reached]
    initial, warmup = chosen.number("initial_learning_rate", 0.002), 0
    before = [initial]
    if schedule and chosen.flag("warmup", False):
        first_step = schedule[0][0]
        warmup = min(first_step, steps // 10) if steps else first_step
        before = [] if lrs else before  # the warm-up begins with it
    peak = max(before + lrs)
    falling = [(step, lr) for step, lr in reached[lrs.index(peak) if peak in lrs else 0 :] if lr < peak]
    scheduler, note = _nearest_scheduler(falling, peak, steps)
    account.settings["lr_scheduler"] = scheduler
    note_of_peak = "" if peak == initial else "the highest of the schedule"
    account.carry(chosen, "initial_learning_rate", "exact", {"lr": peak}, note_of_peak)
    note_of_warmup = "it begins at a thousandth of the peak"
    account.carry(chosen, "warmup", "substitute" if warmup else "exact", {"warmup_steps": warmup}, note_of_warmup)
    for entry in entries:
        for name in ("step", "learning_rate"):
            account.carry(entry, name, "substitute" if falling else "exact", {"lr_scheduler": scheduler}, note)


def _nearest_scheduler(falling: list[tuple[int, float]], peak: float, steps: int) -> tuple[str, str]:
    """(a value of `--lr-scheduler`, what differs) for a schedule that falls from its peak at these steps."""
    if not falling:
        return "constant", f"no step within the training's {steps:,}"
    listed = ", ".join(f"{lr:g} from step {step:,}" for step, lr in falling)
    if falling[-1][1] <= peak * math.sqrt(0.1):
        return "multistep", f"there: {listed}; here times 0.1 at 2/3 and 8/9 of the length"
    return "constant", f"there: {listed}; here a constant learning rate"


def _read_weight_decay(account: FieldAccount, train: Message, model: Message) -> None:
    """The L2 regularizer: TF's gradient of weight · w² / 2 is the weight decay of SGD."""
    found = [owner for owner, name in model.leaves() if ".l2_regularizer" in f".{owner.path}" and name == "weight"]
    values = [owner.number("weight", 0.0) for owner in found]
    of_backbone = [
        value for owner, value in zip(found, values, strict=True) if "feature_extractor" in owner.path
    ] or sorted(values)[-1:]
    if not train.flag("add_regularization_loss", True):
        account.settings["weight_decay"] = 0.0
        of_backbone = []
    if not found:
        account.carry(
            train, "add_regularization_loss", "exact", {"weight_decay": 0.0}, "the model has no L2 regularizer"
        )
    for owner, value in zip(found, values, strict=True):
        if not of_backbone:
            account.carry(owner, "weight", "exact", {}, "not used: add_regularization_loss is false")
        elif value == of_backbone[0] and account.settings.get("optimizer") == "sgd":
            account.carry(owner, "weight", "exact", {"weight_decay": value}, "not applied to biases and norms")
        else:
            note = "one weight decay for all layers, which AdamW applies to the weights, not to the gradients"
            account.carry(owner, "weight", "substitute", {"weight_decay": of_backbone[0]}, note)


def _read_augmentation(account: FieldAccount, train: Message) -> None:
    """Rows and settings of colors, crops and zooms. What the file does not ask for is switched off."""
    account.settings["augment"] = "none"
    for option in train.children("data_augmentation_options"):
        for name, steps in option.messages.items():
            for step in steps:
                if name in knowledge().colors:
                    settings = {}
                    for setting, (center, limit, fields) in knowledge().colors[name].items():
                        distance = max(abs(step.number(field, value) - center) for field, value in fields.items())
                        more = account.settings.get(setting, 0.0)  # of a step before
                        settings[setting] = max(more, float(f"{min(limit, distance):.4g}"))
                    account.whole(step, settings, "stoker changes colors once, in a fixed order, by factors around 1")
                elif (scales := _scale_settings(name, step)) is not None:
                    note = "one scale per image, with its aspect ratio kept, instead of a window of random shape"
                    account.whole(step, _merge(account, scales), note)


def _scale_settings(name: str, step: Message) -> dict[str, Any] | None:
    """Crop and zoom as a range of scales and its probability; None: the step does not crop or zoom. A window with the
    fraction a of the image's area shows it at the scale 1/√a."""
    if name in ("random_crop_image", "random_crop_pad_image"):
        low = 1 / math.sqrt(max(1e-4, step.number("max_area", 1.0)))
        high = 1 / math.sqrt(max(1e-4, step.number("min_area", 0.1)))
        if name == "random_crop_pad_image":
            low /= max([2.0, *step.numbers("max_padded_size_ratio")])
        return {
            "scale_jitter_prob": 1 - step.number("random_coef", 0.0),
            "scale_range": (low, high),
            "min_object_covered": step.number("min_object_covered", 1.0),
        }
    if name.startswith("ssd_random_crop"):
        operations = step.children("operations")
        areas = [op.number("min_area", SSD_CROP_AREA) for op in operations] or [SSD_CROP_AREA]
        covered = [op.number("min_object_covered", 0.0) for op in operations]
        skipped = [op.number("random_coef", 0.0) for op in operations] or [SSD_CROP_SKIPPED]
        padded = [2.0] if "pad" in name else [1.0]
        padded += [ratio for op in [step, *operations] for ratio in op.numbers("max_padded_size_ratio")]
        return {
            "scale_jitter_prob": 1 - sum(skipped) / len(skipped),
            "scale_range": (1 / max(padded), 1 / math.sqrt(max(1e-4, min(areas)))),
            "min_object_covered": min([value for value in covered if value > 0] or [SSD_CROP_COVERED]),
        }
    if name == "random_square_crop_by_scale":
        scales = 1 / step.number("scale_max", 1.3), 1 / step.number("scale_min", 0.6)
    elif name in knowledge().scales:
        low_field, high_field = knowledge().scales[name]
        scales = step.number(*low_field), step.number(*high_field)
    else:
        return None
    return {"scale_jitter_prob": 1.0, "scale_range": scales}


def _merge(account: FieldAccount, settings: dict[str, Any]) -> dict[str, Any]:
    """With the crops and zooms of earlier steps: the wider range, the higher probability."""
    before = account.settings
    ranges = [settings["scale_range"], *([before["scale_range"]] if "scale_range" in before else [])]
    low = max(SCALE_LIMITS[0], min(low for low, _ in ranges))
    high = min(SCALE_LIMITS[1], max(low, *(high for _, high in ranges)))
    probability = max(settings["scale_jitter_prob"], before.get("scale_jitter_prob", 0.0))
    merged = {
        "scale_jitter_prob": float(f"{min(1.0, max(0.0, probability)):.4g}"),
        "scale_range": (float(f"{low:.4g}"), float(f"{high:.4g}")),
    }
    covered = [part["min_object_covered"] for part in (settings, before) if "min_object_covered" in part]
    return merged | ({"min_object_covered": min(covered)} if covered else {})
