"""The callback in a real Lightning Trainer."""

import time
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import PreflightError
from stoker_watch.recording.callbacks import load_class
from stoker_watch.runs.records import EVENTS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.timing import undisturbed_once

torch = pytest.importorskip("torch")
Tensor = torch.Tensor

SAMPLES, BATCH, SLOW_S = 80, 4, 0.005


class SlowData(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SLOW_S)
        return torch.randn(4), torch.zeros(1)


class TimedLoader(torch.utils.data.DataLoader[tuple[Tensor, Tensor]]):
    """Measures how long its batches took, on busy cores too: what it gets is what a callback may call a wait."""

    waited_s = 0.0

    def __iter__(self) -> Any:
        batches = super().__iter__()
        while True:
            start_s = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited_s += time.perf_counter() - start_s
            yield batch


def test_a_framework_that_is_not_there_is_named() -> None:
    with pytest.raises(PreflightError) as caught:
        load_class("Callback", "nowhere_to_be_found", install="nowhere")
    assert "pip install nowhere" in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@undisturbed_once
def test_a_fit_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    import pytorch_lightning as pl
    from pytorch_lightning.profilers import SimpleProfiler

    from stoker_watch.recording.callbacks import lightning

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == fail_at:
                raise ValueError("tired")
            time.sleep(0.01)
            loss: Tensor = (self.layer(batch[0]) - batch[1]).pow(2).mean()
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(name: str, training: TimedLoader, validation: TimedLoader) -> dict[str, float]:
        """Returns the seconds of each action, as Lightning's own profiler measured them."""
        profiler = SimpleProfiler()
        trainer = pl.Trainer(
            max_epochs=2, accumulate_grad_batches=2, callbacks=[lightning.StokerCallback(str(tmp_path / name))],
            accelerator="cpu", logger=False, profiler=profiler, enable_progress_bar=False, default_root_dir=tmp_path,
            num_sanity_val_steps=0, enable_model_summary=False,
        )  # fmt: skip
        start = trainer.profiler.start
        try:
            trainer.fit(Model(), training, validation)
        finally:
            assert trainer.profiler.start == start, "the profiler is as before"
        return {action: sum(durations) for action, durations in profiler.recorded_durations.items()}

    fail_at = -1
    training, validation = TimedLoader(SlowData(), batch_size=BATCH), TimedLoader(SlowData(), batch_size=2 * BATCH)
    seconds = fit("good", training, validation)
    found = read_run(tmp_path / "good").totals
    assert found.phases["input_wait"] == pytest.approx(training.waited_s, rel=0.15)
    assert 0.99 * validation.waited_s <= found.phases["eval"] <= 1.3 * validation.waited_s
    assert found.phases["compute"] >= 2 * SAMPLES / BATCH * 0.01
    assert found.phases["checkpoint"] > 0
    known_s = seconds["run_training_batch"] + training.waited_s + validation.waited_s
    # What Lightning itself does between these takes its time, 2 to 12 % of this fit on different machines.
    assert found.phases["host"] < 1.2 * (seconds["run_training_epoch"] - known_s), "time that no callback explains"
    assert (found.steps, found.num_images) == (SAMPLES // BATCH, 2 * SAMPLES)
    lines = list(read_lines(tmp_path / "good", STEPS, StepWindow))
    assert any("total" in line.losses and line.lr == pytest.approx(0.1) for line in lines)

    fail_at = 3
    with pytest.raises(ValueError, match="tired"):
        fit("bad", training, validation)
    last = list(read_lines(tmp_path / "bad", EVENTS, Event))[-1]
    assert (last.kind, last.text) == ("failed", "ValueError: tired")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_callbacks_and_a_step_that_returns_anything_end_no_fit(tmp_path: Path) -> None:
    import pytorch_lightning as pl

    from stoker_watch.recording.callbacks import lightning

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:  # noqa: ARG002
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self.layer(batch[0]) - batch[1]).pow(2).mean())
            optimizer.step()
            return torch.zeros(3)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = pl.Trainer(
        max_epochs=1, callbacks=[lightning.StokerCallback(str(tmp_path / name)) for name in ("a", "b")],
        accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        num_sanity_val_steps=0, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(SlowData(), batch_size=BATCH))
    assert read_run(tmp_path / "b").totals.steps == SAMPLES // BATCH
