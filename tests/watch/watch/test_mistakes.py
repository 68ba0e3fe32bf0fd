"""Mistakes in training loops and debugging aids that stay on, as the hook sees them: jobs that have one, and near ones
that do not."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from stoker_watch.diagnosis.causes.mistakes import mistake_evidence, mistake_kinds
from stoker_watch.recording.hook.stoker_hook.mistakes import own_line
from tests.needs import needs
from tests.watch.watch.test_hook import PEERS, ran, watched

JOB = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
width = 4
{before}
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, width))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
kept = 0
{after}
for step in range(160):
    x, y = torch.randn(16, 8), torch.randint(0, width, (16,))
    {clear}
    logits = model(x)
    loss = {loss}
    loss.backward({backward})
    {end}
"""
PLAIN = {
    "before": "", "after": "", "clear": "optimizer.zero_grad()", "loss": "F.cross_entropy(logits, y)", "backward": "",
    "end": "optimizer.step()",
}  # fmt: skip
EVERY_20 = "optimizer = optimizer if step % 20 else torch.optim.{}(model.parameters(), {})\n    optimizer.zero_grad()"
PER_FOUR = "step % 4 == 3 and (optimizer.step(), optimizer.zero_grad())"
BCE = "F.binary_cross_entropy_with_logits({}, F.one_hot(y, 4).float())"
KEPT = "(kept := kept + F.cross_entropy(logits, y))"


def found(folder: Path, **changed: str) -> list[dict[str, Any]]:
    (folder / "job.py").write_text(JOB.format_map(PLAIN | changed))
    ran([sys.executable, "job.py"], folder)
    return reported(folder)


def reported(folder: Path) -> list[dict[str, Any]]:
    """The mistakes that the hook reported of a job in this folder."""
    return [seen for seen in seen_in(folder) if seen["kind"] != "class_loss"]


def seen_in(folder: Path) -> list[dict[str, Any]]:
    """The same, with what is a mistake only together with a symptom."""
    assert not list((folder / "state").glob("errors-*"))
    return [seen for path in (folder / "state").glob("*.mistakes") for seen in json.loads(path.read_text())]


KINDS: list[tuple[str, int | None, dict[str, str]]] = [
    ("old_gradients", 19, {"clear": "pass"}),
    ("outer_loss", 18, {"before": "width = 1", "loss": "(y + x[:, 0] - logits).abs().mean()"}),
]
MORE_KINDS: list[tuple[str, int | None, dict[str, str]]] = [
    ("softmax_twice", 18, {"loss": "F.cross_entropy(logits.softmax(1), y)"}),
    ("optimizer_again", 15, {"clear": EVERY_20.format("Adam", 0.01)}),
    ("growing_graph", 18, {"loss": KEPT, "backward": "retain_graph=True", "end": "optimizer.step"}),
    ("eval_mode", 12, {"after": "model.eval()"}),
    ("eval_mode", 19, {"end": "optimizer.step(); step == 30 and model.eval()"}),
    ("softmax_twice", 18, {"loss": "nn.CrossEntropyLoss()(logits.softmax(1).view(16, -1), y)"}),
    ("sigmoid_twice", 18, {"loss": BCE.format("logits.sigmoid()")}),
    ("raw_nll", 18, {"loss": "F.nll_loss(logits, y)"}),
    ("nll_of_probabilities", 18, {"loss": "nn.NLLLoss()(logits.softmax(-1), y)"}),
    ("one_class", 18, {"before": "width = 1"}),
    (
        "outer_loss",
        18,
        {
            "before": "width = 1; import warnings; warnings.simplefilter('ignore')",
            "loss": "F.mse_loss(logits, x[:, 0])",
        },
    ),
    (
        "outer_loss",
        18,
        {
            "before": "width = 1; import warnings; warnings.simplefilter('ignore')",
            "loss": "F.smooth_l1_loss(logits.squeeze(1), x[:, :1])",
        },
    ),
    (
        "create_graph",
        18,
        {"backward": "create_graph=True", "before": "import warnings; warnings.simplefilter('ignore')"},
    ),
    ("retained_graph", 18, {"backward": "retain_graph=True"}),
    ("unused_parameters", 10, {"loss": "F.cross_entropy(model[4](model[:4](x).detach()), y)"}),
    ("no_gradients", 10, {"after": "model[4] = nn.Linear(16, width); model[:4].requires_grad_(False)"}),
    ("weights_grow", 10, {"after": "optimizer.param_groups[0]['lr'] = 1.0"}),
    ("torch_threads", None, {"before": "import os; torch.set_num_threads(2 * len(os.sched_getaffinity(0)))"}),
    ("zero_gradients", 18, {"loss": "(0 * logits).sum()"}),
    ("non_finite_gradients", None, {"loss": "F.cross_entropy(logits / 0, y)"}),
    ("double_precision", None, {"before": "torch.set_default_dtype(torch.float64)"}),
    ("anomaly", 8, {"before": "torch.autograd.set_detect_anomaly(True)"}),
    ("line_tracing", None, {"before": "sys.settrace(lambda *_: None)"}),
    ("python_profiler", None, {"before": "import cProfile; cProfile.Profile().enable()"}),
    ("tracemalloc", None, {"before": "import tracemalloc; tracemalloc.start()"}),
]


@needs("torch")
@pytest.mark.parametrize(
    ("kind", "line", "changed"), [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in MORE_KINDS)]
)
def test_a_mistake_is_named_with_its_line(kind: str, line: int | None, changed: dict[str, str], tmp_path: Path) -> None:
    mistakes = {mistake["kind"]: mistake for mistake in found(tmp_path, **changed)}
    assert kind in mistakes
    if line:
        assert mistakes[kind]["place"] == f"job.py:{line}"
    assert "{" not in mistake_evidence(mistake_kinds()[kind], mistakes[kind]).text
    assert mistakes.keys() <= {kind, "zero_gradients", "weights_grow"}  # a loss without a bound makes them grow


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"clear": "optimizer.zero_grad(set_to_none=False)"},
        {"clear": "[one.grad.zero_() for one in model.parameters() if one.grad is not None]"},
        {"clear": "for one in model.parameters(): one.grad = None"},
        {"clear": "pass", "end": PER_FOUR},  # accumulated over four batches
        {"clear": "pass", "end": "optimizer.step(); model.zero_grad()"},
        {"end": "optimizer.step(); step % 9 or (model.eval(), model.train())"},
        {"end": "optimizer.step(); model[1].eval()"},  # normalization is frozen, as of detectors
        {"after": "model[:4].eval()"},  # a backbone with all but the last layer
        {
            "after": "whole, model = model.eval(), model\noptimizer = torch.optim.Adam(model[4].parameters(), 0.01)"
        },  # a probe
        {"after": "wrapper = nn.Sequential(model).eval()\nmodel.train()"},
        {"after": "model[1] = nn.Identity(); model[3].p = 0.0; model.eval()"},
        {
            "after": "torch.__future__.set_swap_module_params_on_conversion(True)",
            "end": "optimizer.step(); step == 3 and model.to(torch.bfloat16).to(torch.float32)",
        },
        {
            "after": "kept = {}; hooks = torch.autograd.graph.saved_tensors_hooks(\n"
            "    lambda one: kept.setdefault(len(kept) + 1000 * step, one) is one and max(kept), kept.pop)\n"
            "hooks.__enter__()"
        },
        {
            "after": "master = [nn.Parameter(one.detach().clone()) for one in model.parameters()]\n"
            "optimizer = torch.optim.SGD(master, 0.01)",
            "clear": "model.zero_grad()",
            "end": "[setattr(m, 'grad', o.grad.clone()) for m, o in zip(master, model.parameters())]; optimizer.step()",
        },
        {
            "clear": "step == 50 and tracemalloc.stop()\n    optimizer.zero_grad()",
            "before": "import tracemalloc; tracemalloc.start()",
        },
        {"loss": "F.cross_entropy(logits, y) * (step > 60)"},  # rewards that come late
        {"loss": "F.nll_loss(logits.log_softmax(1), y)"},
        {"loss": "F.nll_loss(logits.softmax(1).log(), y)"},
        {"loss": "F.binary_cross_entropy(logits.sigmoid(), F.one_hot(y, 4).float())"},
        {"loss": "F.cross_entropy(logits * logits.softmax(1), y)"},  # an attention
        {"clear": "step == 80 and (optimizer := torch.optim.Adam(model.parameters()))\n    optimizer.zero_grad()"},
        {"clear": EVERY_20.format("SGD", 0.01)},  # which remembers nothing
        {"before": "import tracemalloc; tracemalloc.start()", "end": "optimizer.step(); tracemalloc.stop()"},
        {"before": "torch.autograd.set_detect_anomaly(False)"},
        {"backward": "retain_graph=True", "end": "F.cross_entropy(logits, 3 - y).backward(); optimizer.step()"},
        {"loss": "F.cross_entropy(model[4](model[:4](x).detach()) if step % 2 else logits, y)"},  # parts in turn
        {"after": "model[:4].requires_grad_(False)"},
        {"before": "width = 1", "loss": "(logits.squeeze(1) - x[:, 0]).square().mean()"},
        {"before": "width = 16", "loss": "(logits - x[:, 0]).square().mean()"},  # as many targets as samples
        {"before": "width = 1", "loss": "(logits[:, 0].unsqueeze(1) - x[:, 0]).abs().mean()"},  # meant
        {"before": "width = 1", "loss": "F.softplus(logits - logits.T).mean()"},  # all pairs of predictions
    ],
)
def test_a_loop_without_a_mistake(changed: dict[str, str], tmp_path: Path) -> None:
    assert found(tmp_path, **changed) == []


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "classes"),
    [
        ("F.cross_entropy(logits, y)", [4]),
        ("F.cross_entropy(logits.view(2, 8, 4).transpose(1, 2), y.view(2, 8), label_smoothing=0.1)", [4]),
        ("F.cross_entropy(logits, y) + F.cross_entropy(logits[:, :2], y % 2)", []),
        ("F.mse_loss(logits[:, 0], y.float())", []),
    ],
)
def test_the_number_of_classes_of_a_loss(loss: str, classes: list[int], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.format_map(PLAIN | {"loss": loss}))
    ran([sys.executable, "job.py"], tmp_path)
    assert [seen["classes"] for seen in seen_in(tmp_path) if seen["kind"] == "class_loss"] == classes


@needs("torch")
@pytest.mark.slow
def test_two_models_that_share_backward_passes(tmp_path: Path) -> None:
    """As in a GAN: the generator's backward leaves gradients in the discriminator, which clears them first."""
    (tmp_path / "job.py").write_text("""
import torch
from torch import nn
generator, judge = nn.Linear(4, 8), nn.Linear(8, 1)
of_generator, of_judge = (torch.optim.Adam(model.parameters()) for model in (generator, judge))
for _ in range(120):
    of_judge.zero_grad()
    (judge(generator(torch.randn(8, 4)).detach()).mean() - judge(torch.randn(8, 8)).mean()).backward()
    of_judge.step()
    of_generator.zero_grad()
    judge(generator(torch.randn(8, 4))).mean().neg().backward()
    of_generator.step()
""")
    ran([sys.executable, "job.py"], tmp_path)
    assert not list((tmp_path / "state").glob("*.mistakes"))
    assert not list((tmp_path / "state").glob("errors-*"))


@needs("torch")
@pytest.mark.slow
def test_a_recurrent_network_and_a_closure(tmp_path: Path) -> None:
    """Sequences of other lengths are graphs of other sizes; LBFGS clears its gradients inside of its step."""
    (tmp_path / "job.py").write_text("""
import torch
from torch import nn
torch.manual_seed(0)  # else LBFGS may reach a loss whose gradients are all zero, which is said
model = nn.RNNCell(4, 8)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
for step in range(60):
    data = torch.randn(1 + step % 20, 3, 4)

    def closure():
        optimizer.zero_grad()
        state = torch.zeros(3, 8)
        for one in data:
            state = model(one, state)
        loss = state.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
""")
    ran([sys.executable, "job.py"], tmp_path)
    assert not list((tmp_path / "state").glob("*.mistakes"))
    assert not list((tmp_path / "state").glob("errors-*"))


@pytest.mark.slow
@needs("torch")
def test_why_names_the_mistake(tmp_path: Path) -> None:
    changed = {"clear": "import time; time.sleep(0.03)"}
    (tmp_path / "job.py").write_text(JOB.format_map(PLAIN | changed))
    why = watched([sys.executable, "job.py"], tmp_path)
    (finding,) = [finding for finding in why.findings if finding.id == "training_mistake"]
    assert finding.title == mistake_kinds()["old_gradients"].title
    assert finding.place.endswith("job.py:19")
    assert "zero_grad" in finding.fix


@needs("torch")
@pytest.mark.slow
def test_a_warning_of_a_framework_in_the_output_is_a_finding(tmp_path: Path) -> None:
    """Printed by PyTorch itself, as targets have another size than predictions."""
    loss = "F.mse_loss(logits[:, :1], y.float())"
    (tmp_path / "job.py").write_text(JOB.format_map(PLAIN | {"loss": loss}))
    why = watched([sys.executable, "job.py"], tmp_path, PYTHONWARNINGS="default")
    (finding,) = [finding for finding in why.findings if finding.id == "training_mistake"]
    assert finding.title == mistake_kinds()["loss_sizes"].title
    assert "torch.Size([16])" in finding.evidence[0].text


@pytest.mark.slow
@pytest.mark.parametrize("is_eager", [True, False])
def test_functions_of_tensorflow_that_run_eagerly(is_eager: bool, tmp_path: Path) -> None:
    if not Path(PEERS).exists():
        pytest.skip("TensorFlow is not here: `make peers`, or name a Python that has it: STOKER_PEERS_PYTHON")
    (tmp_path / "job.py").write_text(f"""
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly={is_eager})
model.fit(tf.zeros((80, 2)), tf.zeros((80, 1)), batch_size=1, verbose=0)
""")
    why = watched([PEERS, "job.py"], tmp_path, KERAS_BACKEND="tensorflow")
    found = [finding.title for finding in why.findings if finding.id == "debug_mode"]
    assert found == ([mistake_kinds()["run_eagerly"].title] if is_eager else [])


class LineLocation(NamedTuple):
    """As in TensorFlow."""

    filename: str
    lineno: int


LOOP_OF_KERAS = """
import keras
import tensorflow as tf
model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(3, activation={activation!r})])
loss, optimizer = keras.losses.SparseCategoricalCrossentropy(from_logits={from_logits}), keras.optimizers.SGD(0.01)
{decorator}
def step(x, y):
    with tf.GradientTape() as tape:
        value = loss(y, model(x))
    optimizer.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))
x, y = tf.random.normal((8, 5)), tf.constant([0, 1, 2, 0, 1, 2, 0, 1])
for _ in range(40):
    step(x, y)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "decorator", "activation", "from_logits", "line"),
    [
        ("tensorflow", "@tf.function", None, False, "job.py:9"),
        ("tensorflow", "", None, False, "job.py:9"),
        ("tensorflow", "@tf.function", "softmax", False, None),
        ("tensorflow", "", "softmax", False, None),
        ("tensorflow", "@tf.function", None, True, None),
        ("torch", "fit", None, False, "job.py:7"),
        ("torch", "fit", "softmax", False, None),
        ("tensorflow", "fit", None, False, "job.py:7"),
        ("tensorflow", "fit", "softmax", False, None),
    ],
)
def test_a_loss_of_keras_is_given_raw_scores(
    backend: str, decorator: str, activation: str | None, from_logits: bool, line: str | None, tmp_path: Path
) -> None:
    if not Path(PEERS).exists():
        pytest.skip("TensorFlow is not here: `make peers`, or name a Python that has it: STOKER_PEERS_PYTHON")
    job = LOOP_OF_KERAS.format(decorator=decorator, activation=activation, from_logits=from_logits)
    if decorator == "fit":
        head, _, _ = job.partition("fit\n")
        job = (
            head.replace("import tensorflow as tf", "import numpy as np")
            + """model.compile(optimizer, loss)
model.fit(np.random.randn(400, 5), np.arange(400) % 3, batch_size=8, verbose=0)
"""
        )
    (tmp_path / "job.py").write_text(job)
    why = watched([PEERS, "job.py"], tmp_path, KERAS_BACKEND=backend)
    title = mistake_kinds()["raw_scores"].title
    found = [finding.place for finding in why.findings if finding.title.startswith(title)]
    assert found == ([line] if line else []), [finding.title for finding in why.findings]


@pytest.mark.parametrize(
    ("source", "own"), [("/job/model.py", "/job/model.py:7"), ("/x/site-packages/tf_keras/training.py", None)]
)
def test_a_line_that_autograph_has_rewritten_is_that_of_its_source(source: str, own: str | None) -> None:
    """A function of a library is no line of the job: the one that called it is."""
    generated = "/tmp/__autograph_generated_file1.py"
    functions: dict[str, Any] = {"own_line": own_line}
    exec(compile("def step():\n    return own_line()\n", generated, "exec"), functions)
    converted_f = functions["step"]
    origin = SimpleNamespace(loc=SimpleNamespace(filename=source, lineno=7))
    converted_f.ag_source_map = {LineLocation(generated, 2): origin}
    found = converted_f()
    assert found == own if own else "/test_mistakes.py:" in found
