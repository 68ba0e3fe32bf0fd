"""What a line calls, by its text."""

from pathlib import Path

import pytest

from stoker_watch.recording.calls import find_call, find_loop

SOURCE = """\
import copy, gc
import numpy as np
import pandas as pd
from json import load
from xml.etree import ElementTree as ET
def own(x): return x
def train(sock, path, items):
    ema = copy.deepcopy(items)
    frame = pd.read_csv(path, names=["a"])
    gc.collect()
    data = own(np.load(path))
    total = sum(
        float(x) for x in
        load(open(path)))
    rows = [np.asarray(x) for x in items]
    text = sock.recv(10) or b""
    for child in ET.parse(path).getroot():
        f = lambda: gc.collect()
    with open(path) as file:
        pass
    return open(path).read()
def timed():
    begun = time.perf_counter(); gc.collect(); took = time.perf_counter() - begun
    return time.perf_counter()
"""


@pytest.mark.parametrize(
    ("line", "function", "callee", "call"),
    [
        (1, "<module>", "_find_and_load", "import copy, gc"),
        (5, "<module>", "_find_and_load", "import xml.etree"),
        (8, "train", "deepcopy", "copy.deepcopy"),
        (8, "train", "", "copy.deepcopy"),
        (9, "train", "wrapper", "pandas.read_csv"),
        (9, "train", "_read", ""),
        (10, "train", "", "gc.collect"),
        (11, "train", "", "numpy.load"),
        (12, "train", "", "sum"),
        (14, "train", "load", "json.load"),
        (15, "<listcomp>", "", "numpy.asarray"),
        (16, "train", "", "sock.recv"),
        (17, "train", "parse", "xml.etree.ElementTree.parse"),
        (18, "train", "", ""),
        (18, "<lambda>", "", "gc.collect"),
        (19, "train", "", "open"),
        (21, "train", "", "read"),
        (23, "timed", "", "gc.collect"),
        (24, "timed", "", "time.perf_counter"),
        (99, "train", "", ""),
    ],
)
def test_the_call_of_a_line(line: int, function: str, callee: str, call: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SOURCE)
    assert find_call(str(script), line, function, callee) == call


NESTED = """\
image = torch.from_numpy(cv2.resize(cv2.imread(path), size)) * scale[np.argmax(x)]
name = write("ä", encode(image)); gc.collect()
"""


@pytest.mark.parametrize(
    ("line", "ends_after", "call"),
    [
        (1, "imread(path)", "cv2.imread"),
        (1, "size)", "cv2.resize"),
        (1, "size))", "torch.from_numpy"),
        (1, "argmax(x)]", "torch.from_numpy"),  # what runs is no call
        (2, "encode(image)", "encode"),
        (2, "collect()", "gc.collect"),
    ],
)
def test_of_several_calls_it_is_the_one_that_ends_where_the_instruction_does(
    line: int, ends_after: str, call: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(NESTED, encoding="utf-8")
    before, found, _ = NESTED.splitlines()[line - 1].partition(ends_after)
    assert find_call(str(script), line, "<module>", "", (line, len((before + found).encode()))) == call


@pytest.mark.parametrize("content", [b"\x00", b"def (", b"\xff\xfe", None])
def test_a_file_that_is_no_python_has_no_calls(content: bytes | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    if content is not None:
        script.write_bytes(content)
    assert find_call(str(script), 1, "f") == ""


LOOPS = """\
def train(loader):
    for batch in loader:
        loss = net(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if number % 20 == 0:
            images = list(map(lambda n: ema.sample(n), [4]))
    evaluate(net)
def evaluate(net):
    for batch in loader:
        net(batch)
for epoch in range(3):
    train(loader)
    scheduler.step()
    evaluate(net)
"""


@pytest.mark.parametrize(
    ("line", "function", "is_after"),
    [(3, "train", False), (5, "train", False), (6, "train", True), (8, "train", True), (9, "train", False),
     (12, "evaluate", False), (16, "<module>", False), (8, "other", False)],
)  # fmt: skip
def test_lines_after_the_step_of_a_training_loop(line: int, function: str, is_after: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOPS)
    assert find_loop(str(script), line, function).is_after_step is is_after


STEPS = """\
def train(loader):
    for epoch in range(9):
        for images, targets in loader:
            losses = []
            for image, target in zip(net(images), targets):
                losses.append(criterion(image, target))
            counts = [len(target) for target in targets]
            loss = sum(losses)
            loss.backward()
            optimizer.step()
        for images, targets in validation:
            evaluate(net(images), targets)
def criterion(image, target):
    if not len(target):
        return 0
    for point, wanted in zip(image, target):
        total += wing(point, wanted)
    return total
def wing(point, wanted):
    return abs(point - wanted)
for fold in range(5):
    train(loaders[fold])
"""


@pytest.mark.parametrize(
    ("line", "function", "where"),
    [(4, "train", "has_step in_step"), (6, "train", "has_step in_step in_loop"),
     (5, "train", "has_step in_step in_loop"), (7, "train", "has_step in_step in_loop"),
     (9, "train", "has_step in_step"), (12, "train", "has_step"),
     (15, "criterion", ""), (17, "criterion", "in_loop"), (20, "wing", ""), (22, "<module>", "in_loop"),
     (7, "<listcomp>", "in_loop"), (1, "other", "")],
)  # fmt: skip
def test_loops_inside_of_a_training_step(line: int, function: str, where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    found = find_loop(str(script), line, function)._asdict() | {"is_after_step": False}
    assert [name for name, is_so in found.items() if is_so] == where.split()


STEPPER = """\
def train_batch(data):
    loss = net(data)
    loss.backward()
    optimizer.step()
    return loss
def train(epoch):
    for data in loader:
        train_batch(data)
def main():
    for epoch in range(3):
        for data in loader:
            loss = train_batch(data)
            profiler.step()
        evaluate(net)
    train(3)
    for image in images:
        draw(image)
class Trainer:
    def step(self, images):
        for image in images:
            losses.append(criterion(image))
        sum(losses).backward()
        optimizer.step()
    def fit(self, epochs):
        for images in loader:
            self.step(images)
            self.draw(images)
            scheduler.step()
"""


@pytest.mark.parametrize(
    ("line", "function", "is_after", "where"),
    [(12, "main", False, "has_step in_step"), (13, "main", True, "has_step in_step"), (14, "main", True, "has_step"),
     (17, "main", False, "has_step"), (2, "train_batch", False, "has_step in_step"),
     (21, "step", False, "has_step in_step in_loop"), (27, "fit", True, "has_step in_step"),
     (18, "<module>", False, "")],
)  # fmt: skip
def test_a_function_may_take_the_step_of_a_loop(
    line: int, function: str, is_after: bool, where: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPPER)
    assert find_loop(str(script), line, function).is_after_step is is_after
    found = find_loop(str(script), line, function)._asdict() | {"is_after_step": False}
    assert [name for name, is_so in found.items() if is_so] == where.split()


UPDATES = """\
@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = criterion(labels, model(images))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables))
@jax.jit
def update(params, state, batch):
    updates, state = tx.update(jax.grad(loss_fn)(params, batch), state)
    return optax.apply_updates(params, updates), state
for batch in loader:
    params, state = update(params, state, batch)
    for k in range(64):
        count[int(labels[k])] += 1
for images, labels in loader:
    prepare(images)
    train_step(images, labels)
    draw(images)
"""


@pytest.mark.parametrize(
    ("line", "is_after", "where"),
    [(11, False, "has_step in_step"), (13, True, "has_step in_step in_loop"), (15, False, "has_step in_step"),
     (17, True, "has_step in_step")],
)  # fmt: skip
def test_updates_of_tensorflow_and_jax_are_steps(line: int, is_after: bool, where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UPDATES)
    assert find_loop(str(script), line, "<module>").is_after_step is is_after
    found = find_loop(str(script), line, "<module>")._asdict() | {"is_after_step": False}
    assert [name for name, is_so in found.items() if is_so] == where.split()


AGENT = """\
class Agent:
    def choose(self, state):
        return self.policy(state)
    def update(self, batch):
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()
"""
RUNS_AGENT = """\
from tqdm import tqdm
from rl.agent import Agent
agent = Agent()
bar = tqdm(total=9)
for episode in range(9):
    while not done:
        action = agent.choose(state)
        agent.update(memory)
        state, done = env.step(action)
    if episode % 10 == 0:
        while not done:
            action = agent.choose(state)
    bar.update(1)
"""


@pytest.mark.parametrize(
    ("line", "is_after", "where"),
    [(7, False, "has_step in_step"), (9, True, "has_step in_step"), (12, True, "has_step"), (13, True, "has_step")],
)
@pytest.mark.parametrize("where_agent_is", ["rl/agent.py", "../rl/agent.py", "rl/agent/__init__.py"])
def test_a_method_of_an_imported_file_may_take_the_step(
    line: int, is_after: bool, where: str, where_agent_is: str, tmp_path: Path
) -> None:
    script, agent = tmp_path / "scripts" / "main.py", tmp_path / "scripts" / where_agent_is
    script.parent.mkdir()
    agent.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(RUNS_AGENT)
    agent.write_text(AGENT)
    assert find_loop(str(script), line, "<module>").is_after_step is is_after
    found = find_loop(str(script), line, "<module>")._asdict() | {"is_after_step": False}
    assert [name for name, is_so in found.items() if is_so] == where.split()


def test_a_bar_of_progress_takes_no_step(tmp_path: Path) -> None:
    """Without the agent, nothing in the loop is known to train."""
    script = tmp_path / "main.py"
    script.write_text(RUNS_AGENT)
    assert not any(find_loop(str(script), line, "<module>").is_after_step for line in range(1, 14))
