"""How the commands import torch: sooner, without its compiler, and with the garbage collector as it was."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.drawn import draw

LOADS_LIBRARIES = """
import gc, pathlib, sys, threading
from stoker.cli import quick_import
with quick_import.quick_imports():
    assert not gc.isenabled()
    for thread in threading.enumerate():
        if thread.name == "torch libraries":
            thread.join()
    assert "libtorch_cpu" in pathlib.Path("/proc/self/maps").read_text()
    assert not {name for name in sys.modules if name.partition(".")[0] in ("torch", "torchvision")}
    kept = gc.get_freeze_count()
assert gc.isenabled() and gc.get_freeze_count() > kept
"""
FIRST_STEP = """
import sys
from stoker.cli.app import app
from stoker.training import loop

class Done(BaseException):
    pass

step = loop.Training.step
def first_step(training):
    step(training)
    raise Done
loop.Training.step = first_step
try:
    app(["train", sys.argv[1], "--model", sys.argv[2], "--weights", "none", "--image-size", "64", "64", "--steps", "2",
         "--batch-size", "2", "--run-dir", sys.argv[3], "--device", "cpu"])
except Done:
    print("loaded:", *({"torch._dynamo", "torchvision"} & set(sys.modules)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the thread that loads the libraries")
def test_torchs_libraries_are_loaded_while_other_packages_are_imported() -> None:
    subprocess.run([sys.executable, "-c", LOADS_LIBRARIES], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["retinanet_mobilenet_v2_fpn", "faster_rcnn_resnet18_fpn"])
def test_a_training_on_a_cpu_starts_without_torchs_compiler_and_torchvision(tmp_path: Path, model: str) -> None:
    data = draw(tmp_path / "drawn", train=16, val=4)
    command = [sys.executable, "-c", FIRST_STEP, str(data), model, str(tmp_path / "run")]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert completed.stdout.splitlines()[-1] == "loaded:"
