"""The output of real trainings by the frameworks that are installed here: their steps and losses are read right."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_watch.runs.schemas import StepWindow
from stoker_watch.watch.output import LineSplitter, ProgressParser, ProgressWindows

pytestmark = pytest.mark.slow

KERAS = """
import os; os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
x = np.random.rand(320, 4).astype("float32"); y = x.sum(1, keepdims=True)
model.fit(x, y, batch_size=16, epochs=3, validation_data=(x, y), verbose=VERBOSE)
model.evaluate(x, y, batch_size=8, verbose=VERBOSE)
model.predict(x, verbose=VERBOSE)
"""
LIGHTNING = """
import torch, pytorch_lightning as pl
class Model(pl.LightningModule):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, n):
        loss = (self.layer(batch[0]) - 1).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, n): self.log("val_loss", self.layer(batch[0]).mean(), prog_bar=True)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
from torch.utils.data import DataLoader, TensorDataset
def loader(count): return DataLoader(TensorDataset(torch.rand(count, 4)), batch_size=4)
bar = pl.callbacks.TQDMProgressBar()
pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[bar]).fit(
    Model(), loader(80), loader(16))
"""
TRANSFORMERS = """
import torch, transformers
class Model(torch.nn.Module):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(4, 1)
    def forward(self, x=None, labels=None):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}
class Data(torch.utils.data.Dataset):
    def __len__(self): return 80
    def __getitem__(self, n): x = torch.rand(4); return {"x": x, "labels": x.sum(0, keepdim=True)}
arguments = transformers.TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, logging_steps=5, eval_strategy="epoch",
    save_strategy="no", report_to=[], use_cpu=True)
transformers.Trainer(Model(), arguments, train_dataset=Data(), eval_dataset=Data()).train()
"""


def told(code: str, folder: Path) -> StepWindow:
    """What the lines of a job add up to."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout.decode()[-2000:]
    lines, reader, meter = LineSplitter(), ProgressParser(), ProgressWindows(attempt=1, devices=1, start_s=0.0)
    for start in range(0, len(done.stdout), 1000):
        for line in lines.feed(done.stdout[start : start + 1000], final=start + 1000 >= len(done.stdout)):
            if (progress := reader.read(line)) is not None:
                meter.add(progress)
    return meter.window(1.0)


@pytest.mark.parametrize(
    ("code", "package"),
    [
        (KERAS.replace("VERBOSE", "1"), "keras"),
        (KERAS.replace("VERBOSE", "2"), "keras"),
        (LIGHTNING, "pytorch_lightning"),
        (TRANSFORMERS, "transformers"),
    ],
    ids=["keras", "keras-2", "lightning", "transformers"],
)
def test_sixty_steps_of_three_epochs(code: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    window = told(code, tmp_path)
    assert window.step == window.window_steps == 60
    assert 0.0 <= window.losses["total"] < 100.0
