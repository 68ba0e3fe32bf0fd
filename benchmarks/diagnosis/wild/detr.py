"""RT-DETR with the Trainer of transformers: a small detector from a configuration, on boxes in a JSON file."""

import argparse
import json
import math
import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from clock import Lost
from PIL import Image, ImageFilter
from torch.utils.data import Dataset
from transformers import (
    RTDetrConfig,
    RTDetrForObjectDetection,
    RTDetrImageProcessor,
    RTDetrResNetConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip

lost = Lost()


class Boxes(Dataset):
    """One dict per image: the image as PIL, its boxes in COCO's format."""

    def __init__(self, folder: Path, split: str, limit: int, effects: str) -> None:
        self.folder, self.effects = folder, effects
        self.rows = json.loads((folder / f"{split}.json").read_text())[:limit]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: int) -> dict:
        row = self.rows[n]
        image = Image.open(self.folder / row["file"]).convert("RGB")
        if self.effects == "fog":
            image = self.fog(image)
        box = [float(v) for v in row["box"]]
        note = {"bbox": box, "category_id": row["label"], "area": box[2] * box[3], "iscrowd": 0}
        return {"image": image, "target": {"image_id": n, "annotations": [note]}}

    @staticmethod
    def fog(image: Image.Image) -> Image.Image:
        """Fog that is denser at the top, pixel by pixel."""
        pixels = image.load()
        for y in range(image.height):
            density = 0.5 * math.exp(-3 * y / image.height) + 0.05 * random.random()
            for x in range(image.width):
                r, g, b = pixels[x, y]
                pixels[x, y] = tuple(int(v + (220 - v) * density) for v in (r, g, b))
        return image


class TimedEvaluation(Trainer):
    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with lost.stretch():
            return super().evaluate(*args, **kwargs)


class SaveEverything(TrainerCallback):
    """Keeps weights and optimizer of each few steps, to average them later."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step_end(self, args, state, control, model=None, optimizer=None, **others):  # noqa: ARG002 (the Trainer calls it so)
        if state.global_step % self.every == 0:
            with lost.stretch():
                path = Path(args.output_dir) / f"soup-{state.global_step % 4}.pt"
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
                with path.open("rb+") as file:
                    os.fsync(file.fileno())


def arrays(prediction):
    """The arrays of three axes of each batch."""
    return [[a for a in batch if isinstance(a, np.ndarray) and a.ndim == 3] for batch in prediction.predictions]


def average_precision(scores: list[list[float]], truths: list[list[float]]) -> float:
    """Mean of precision over all thresholds, in plain Python."""
    total = 0.0
    for threshold in [n / 400 for n in range(400)]:
        hits = wrong = 0
        for row, truth in zip(scores, truths, strict=True):
            for value in row:
                if value > threshold:
                    hits, wrong = hits + (abs(value - truth[0]) < 0.5), wrong + 1
        total += hits / max(1, wrong)
    return total / 400


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--labels", type=int, default=3)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--train", type=int, default=96)
    parser.add_argument("--val", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--collate", choices=["processor", "lambda"], default="processor")
    parser.add_argument("--effects", choices=["", "fog"], default="")
    parser.add_argument("--eval-steps", type=int, default=0)
    parser.add_argument("--python-metrics", action="store_true")
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--soup", type=int, default=0)
    parser.add_argument("--disk", type=Path, default=Path())
    args = parser.parse_args()

    torch.manual_seed(1)
    processor = RTDetrImageProcessor(size={"height": args.size, "width": args.size})
    backbone = RTDetrResNetConfig(
        embedding_size=32, hidden_sizes=[32, 48, 64, 96], depths=[2, 2, 2, 2], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = RTDetrConfig(
        backbone_config=backbone, num_labels=args.labels, d_model=64, encoder_hidden_dim=64, encoder_ffn_dim=128,
        encoder_in_channels=[48, 64, 96], decoder_in_channels=[64, 64, 64], decoder_ffn_dim=128, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, num_queries=40, num_denoising=10,
    )  # fmt: skip
    model = RTDetrForObjectDetection(config)

    def collate(rows: list[dict]) -> dict:
        made = processor(
            images=[row["image"] for row in rows], annotations=[row["target"] for row in rows], return_tensors="pt"
        )
        return {"pixel_values": made["pixel_values"], "labels": list(made["labels"])}

    def denoise(image: Image.Image) -> Image.Image:
        with lost.stretch():
            return image.filter(ImageFilter.MedianFilter(5))

    cleaned = lambda rows: collate([row | {"image": denoise(row["image"])} for row in rows])  # noqa: E731

    def metrics(prediction) -> dict[str, float]:
        logits = np.concatenate(
            [next(a for a in batch if a.shape[-1:] == (args.labels,)) for batch in arrays(prediction)]
        )
        scores = (1 / (1 + np.exp(-logits.reshape(len(logits), -1)))).tolist()
        return {"ap": average_precision(scores, [[1.0]] * len(scores))}

    arguments = TrainingArguments(
        output_dir=str(args.disk / "trained"), max_steps=args.steps, per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch, learning_rate=args.lr, max_grad_norm=args.clip, warmup_steps=5,
        optim=args.optim,
        dataloader_num_workers=args.workers, remove_unused_columns=False, report_to=[], logging_steps=5, use_cpu=True,
        eval_strategy="steps" if args.eval_steps else "no", eval_steps=args.eval_steps or None, save_total_limit=1,
        save_strategy="steps" if args.save_steps else "no", save_steps=args.save_steps or 500, disable_tqdm=True,
        eval_do_concat_batches=False,
    )  # fmt: skip
    trainer = (TimedEvaluation if args.python_metrics else Trainer)(
        model=model, args=arguments, data_collator=cleaned if args.collate == "lambda" else collate,
        train_dataset=Boxes(args.data, "train", args.train, args.effects),
        eval_dataset=Boxes(args.data, "val", args.val, ""),
        compute_metrics=metrics if args.python_metrics else None,
        callbacks=[SaveEverything(args.soup)] if args.soup else [],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
