"""The callback in a real Trainer of transformers."""

import time
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.diagnosis.reader import read_run
from stoker_watch.runs.records import EVENTS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.timing import undisturbed_once

torch = pytest.importorskip("torch")
Tensor = torch.Tensor

pytestmark = pytest.mark.slow

SAMPLES, BATCH, SLOW_S, STEPS_DONE = 80, 4, 0.005, 20


class SlowData(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(SLOW_S)
        return {"x": torch.randn(4), "labels": torch.zeros(1)}


class Model(torch.nn.Module):
    def __init__(self, fail_after: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.left = fail_after

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ValueError("tired")
        time.sleep(0.01 if self.training else 0)
        found = self.layer(x)
        return {"loss": (found - labels).pow(2).mean(), "logits": found}


@undisturbed_once
def test_a_training_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    from transformers import Trainer, TrainingArguments

    from stoker_watch.recording.callbacks.huggingface import StokerCallback

    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=STEPS_DONE, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2,
        report_to=[], logging_steps=5, eval_strategy="steps", eval_steps=10, save_steps=10, use_cpu=True,
        disable_tqdm=True, learning_rate=0.1, lr_scheduler_type="constant",
    )  # fmt: skip

    class TimedTrainer(Trainer):
        """Measures how long its batches and its evaluations took, on busy cores too."""

        waited_s = evaluate_s = 0.0

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            batches = super().get_batch_samples(*args, **kwargs)
            self.waited_s += time.perf_counter() - start_s
            return batches

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            start_s = time.perf_counter()
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            self.evaluate_s += time.perf_counter() - start_s
            return metrics

    def train(name: str, fail_after: int | None) -> tuple[float, float]:
        callbacks = [StokerCallback(str(tmp_path / name))]
        trainer = TimedTrainer(
            Model(fail_after), arguments, train_dataset=SlowData(), eval_dataset=SlowData(), callbacks=callbacks
        )
        trainer.train()
        return trainer.waited_s, trainer.evaluate_s

    waited_s, evaluate_s = train("good", None)
    found = read_run(tmp_path / "good").totals
    images = STEPS_DONE * BATCH * 2
    assert found.phases["input_wait"] == pytest.approx(waited_s, rel=0.15)
    assert found.phases["eval"] == pytest.approx(evaluate_s, rel=0.05, abs=0.02)
    assert found.phases["compute"] >= STEPS_DONE * 2 * 0.01
    assert found.phases["checkpoint"] > 0
    assert found.phases["host"] < 0.05 * found.device_s, "time that no callback explains"
    assert (found.steps, found.step, found.num_images) == (STEPS_DONE, STEPS_DONE, images)
    logged = [line for line in read_lines(tmp_path / "good", STEPS, StepWindow) if line.losses]
    assert logged
    assert all(line.lr == pytest.approx(0.1) and line.grad_norm for line in logged)

    with pytest.raises(ValueError, match="tired"):
        train("bad", 5)
    train("next", None)
    last = list(read_lines(tmp_path / "bad", EVENTS, Event))[-1]
    assert last.kind == "failed"
    assert "not reported" in last.text
