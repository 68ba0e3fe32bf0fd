"""docs/structure.md: the functions that it names exist, and a training calls them in its order."""

import importlib
import re
import sys
import threading
from functools import reduce
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from stoker.models import Detector
from stoker.training import loop
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from tests.drawn import draw
from tests.fixtures.training_run import settings

PAGE = Path(__file__).resolve().parents[3] / "docs/structure.md"


def named_functions() -> list[tuple[str, CodeType]]:
    """(name, code) of the rows, in order; of the module that the row links to, or one that it imports the name from."""
    rows = re.findall(
        r"^\| (\d+) \| \[`([\w.]+)`\]\(\.\./packages/stoker/(stoker/[\w/]+)\.py\)", PAGE.read_text(), re.MULTILINE
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    found = []
    for _, name, path in rows:
        module: Any = importlib.import_module(path.replace("/", "."))
        owner = importlib.import_module("stoker.training.parallel") if name.startswith("SingleProcess.") else module
        function = reduce(getattr, name.split("."), owner)
        assert function.__code__.co_filename.endswith(f"{path}.py"), f"{name} is not in {path}.py"
        found.append((name, function.__code__))
    return found


def test_a_training_calls_what_the_page_names_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {code: name for name, code in named_functions()}
    names = [*functions.values()]
    samples: list[str] = []
    training: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := functions.get(frame.f_code)) is not None:
            (samples if name.startswith("SampleStream.") else training).append(name)

    step = loop.Training.step
    calls: list[str] = []

    def second_step(self: loop.Training) -> None:
        """The services follow the first one, so the second has all of a step before it."""
        training.clear()
        step(self)
        calls[:] = training

    monkeypatch.setattr(loop.Training, "step", second_step)
    previous = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        config = settings(draw(tmp_path / "data"), max_duration="3", eval_every="0", checkpoint_every="0")
        train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    finally:
        sys.setprofile(previous)
        threading.setprofile(None)  # type: ignore[arg-type]
    ahead = names[: names.index("Training.step")]
    assert list(dict.fromkeys(samples)) == ahead, "the first sample"
    assert calls == names[names.index("Training.step") : names.index("Recorder.after_step")]
    after = [name for name in training[len(calls) :] if name.endswith("after_step")]
    assert after[:4] == names[names.index("Recorder.after_step") :]


def test_five_frames_from_the_loop_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    init = Detector.__init__

    def counting_init(self: Detector, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        self.register_forward_pre_hook(lambda *_: seen.append(own_frames(sys._getframe(1))) if self.training else None)

    monkeypatch.setattr(Detector, "__init__", counting_init)
    config = settings(draw(tmp_path / "data"), max_duration="2", eval_every="0", checkpoint_every="0")
    train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    steps = [frames for frames in seen if "run_steps" in frames]
    assert len(steps) == 2
    for frames in steps:
        between = frames[: frames.index("run_steps")]
        assert between == ["compute_losses", "forward_backward", "train_step", "__call__", "step"]


def own_frames(frame: FrameType | None) -> list[str]:
    """Names of the functions of the package on the stack, the innermost first."""
    names = []
    while frame is not None:
        if "/stoker/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names
