"""What a stack says of a training thread: stacks of real jobs, and what no stack may say."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.recording.frames import (
    HELPER,
    KINDS,
    MAX_PLACES,
    RULES,
    Frame,
    classify,
    find_callers,
    find_place,
    innermost_job_frame,
    is_job_code,
    make_window,
)
from stoker_watch.runs.schemas import AFTER_STEP, LOOP_IN_STEP, WITHOUT_GRADIENTS

SITE = "/venv/lib/python3.11/site-packages/"
LIB = "/usr/lib/python3.11/"
JOB = Frame("<module>", "/job/train.py", 9)


def stack(*frames: str) -> list[Frame]:
    """Of `file: function` below site-packages (`lib:` the standard library), the innermost first; the job's is last."""
    found = []
    for text in frames:
        file, _, function = text.rpartition(": ")
        found.append(Frame(function, LIB + file[4:] if file.startswith("lib:") else SITE + file, 1))
    return [*found, JOB]


LOADER = ("torch/utils/data/dataloader.py: _MultiProcessingDataLoaderIter._next_data",
          "torch/utils/data/dataloader.py: _BaseDataLoaderIter.__next__")  # fmt: skip
FETCH = ("torch/utils/data/_utils/fetch.py: _MapDatasetFetcher.fetch", *LOADER)
MODULE = ("torch/nn/modules/module.py: Module._call_impl", "torch/nn/modules/module.py: Module._wrapped_call_impl")


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (("lib:threading.py: Condition.wait", "lib:multiprocessing/queues.py: Queue.get", *LOADER), "input_wait"),
        (FETCH, "input_wait"),
        (("PIL/ImageFile.py: ImageFile.load", "PIL/Image.py: Image.convert", *FETCH), "decode"),
        (("torchvision/io/image.py: decode_jpeg", *FETCH), "decode"),
        ((*MODULE, "torchvision/transforms/v2/_container.py: Compose.forward", *FETCH), "input_wait"),
        (("torch/serialization.py: save", *FETCH), "input_wait"),  # a data set that keeps what it made
        (("PIL/Image.py: Image.resize",), "decode"),
        (("tensorflow/python/data/ops/iterator_ops.py: OwnedIterator._next_internal",), "input_wait"),
        (("keras/src/trainers/data_adapters/py_dataset_adapter.py: PyDatasetAdapter._standard_iterator",
          "keras/src/trainers/epoch_iterator.py: EpochIterator.enumerate_epoch"), "input_wait"),
        (("tensorflow/python/eager/execute.py: quick_execute",), "other"),
        (("h5py/_hl/files.py: make_fid", "tf_keras/src/engine/training.py: Model.save_weights"), "checkpoint"),
        (("torch/nn/modules/conv.py: Conv2d._conv_forward", *MODULE), "compute"),
        (("torch/autograd/graph.py: _engine_run_backward", "torch/_tensor.py: Tensor.backward"), "compute"),
        (("torch/optim/sgd.py: sgd", "torch/optim/optimizer.py: Optimizer.profile_hook_step.<locals>.wrapper"),
         "compute"),
        (("torch/cuda/__init__.py: synchronize",), "sync"),
        (("torch/amp/grad_scaler.py: GradScaler._maybe_opt_step", "torch/amp/grad_scaler.py: GradScaler.step"), "sync"),
        (("torch/distributed/distributed_c10d.py: barrier", "torch/distributed/c10d_logger.py: wrapper"), "comm"),
        (("torch/_tensor.py: Tensor.cpu", "torch/serialization.py: _save", "torch/serialization.py: save"),
         "checkpoint"),
        (("torch/_inductor/scheduler.py: Scheduler.fuse_nodes", "torch/_dynamo/convert_frame.py: _compile", *MODULE),
         "compile"),
        (("torch/_inductor/output_code.py: CompiledFxGraph.__call__", "torch/_dynamo/eval_frame.py: _fn", *MODULE),
         "compute"),
        (("torch/utils/data/_utils/worker.py: _worker_loop", "lib:multiprocessing/process.py: Process.run", *LOADER),
         HELPER),
        (("lib:multiprocessing/connection.py: wait", "torch/multiprocessing/spawn.py: ProcessContext.join"), HELPER),
        (("lib:time.py: sleep", "torch/distributed/elastic/agent/server/api.py: _invoke_run"), HELPER),
        (("torch/nn/modules/conv.py: Conv2d._conv_forward", *MODULE,
          "torch/distributed/elastic/multiprocessing/errors/__init__.py: record.<locals>.wrap.<locals>.wrapper"),
         "compute"),  # a training script whose main function has the decorator `record`
        (("lib:selectors.py: select", "lib:subprocess.py: Popen.communicate"), HELPER),
        (("torch/nn/functional.py: <module>", "lib:importlib/__init__.py: import_module"), "other"),
        (("torch/_ops.py: OpOverload.__init__", "torch/_decomp.py: <module>",
          "lib:importlib/_bootstrap.py: _find_and_load"), "other"),
        (("jax/_src/array.py: ArrayImpl._value", "jax/_src/profiler.py: annotate_function.<locals>.wrapper",
          "jax/_src/array.py: ArrayImpl.__float__"), "sync"),
        (("jax/_src/core.py: concrete_or_error", "jax/_src/numpy/array_methods.py: _item"), "sync"),
        (("jax/_src/compiler.py: backend_compile_and_load", "jax/_src/interpreters/pxla.py: _cached_compilation",
          "jax/_src/interpreters/pxla.py: MeshComputation.compile"), "compile"),
        (("jax/_src/core.py: subjaxprs", "jax/_src/interpreters/pxla.py: lower_sharding_computation",
          "jax/_src/pjit.py: _resolve_and_lower"), "compile"),
        (("jax/_src/interpreters/pxla.py: batched_device_put",
          "jax/_src/interpreters/pxla.py: ExecuteReplicated.__call__", "jax/_src/pjit.py: _pjit_call_impl_python"),
         "compute"),
        (("somewhere/library.py: loop",), "python"),
        ((), "python"),
    ],
)  # fmt: skip
def test_what_frameworks_do(frames: tuple[str, ...], kind: str) -> None:
    assert classify(stack(*frames), active=True) == kind


def test_a_thread_that_sleeps_in_the_jobs_own_code_is_idle() -> None:
    assert classify([JOB], active=False) == "idle"
    assert classify([], active=True) == "other"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("print(loss.item())", "sync"),
        ("shown = boxes.cpu().numpy()", "sync"),
        ("image = cv2.imread(path)", "decode"),
        ("loss.backward()", "compute"),
        ("items = [1]", "python"),
        ("best = max(items, key=cpu_time)", "python"),
    ],
)
def test_a_c_function_is_known_by_the_line_that_calls_it(line: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{line}\n")
    assert classify([Frame("train", str(script), 2)], active=True) == kind
    in_loader = [Frame("Data.__getitem__", str(script), 2), *stack(*FETCH)]
    assert classify(in_loader, active=True) == ("decode" if kind == "decode" else "input_wait")


def test_own_frames_are_named_by_their_place_in_the_jobs_folder() -> None:
    inside = Frame("Trainer.step.<locals>.closure", "/job/src/loop.py", 12)
    frames = [Frame("Module._call_impl", SITE + "torch/nn/modules/module.py", 7), inside, JOB]
    assert innermost_job_frame(frames, "/job") == "closure (src/loop.py:12)"
    assert innermost_job_frame(frames) == "closure (job/src/loop.py:12)"
    assert innermost_job_frame(frames[:1], "/job") is None
    assert [is_job_code(Frame("f", file, 1)) for file in (LIB + "x.py", "<string>", "<frozen os>", "", "train.py")] == [
        False, False, False, False, True
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "frames", "call"),
    [
        ("log = model.fit(data)", ("tf_keras/src/engine/training.py: Model.fit",
                                   "tf_keras/src/utils/traceback_utils.py: error_handler"), "model.fit"),
        ("utils.save_image(grid, name)", ("PIL/Image.py: Image.save", "torchvision/utils.py: save_image",
                                          "torch/utils/_contextlib.py: no_grad"), "utils.save_image"),
        ("fake = net(image)", ("torch/nn/modules/container.py: Sequential.forward", *MODULE), "net"),
        ("train_step(batch)", ("tensorflow/python/util/traceback_utils.py: error_handler",), "train_step"),
    ],
)  # fmt: skip
def test_a_decorator_of_a_library_is_not_what_a_line_calls(
    line: str, frames: tuple[str, ...], call: str, tmp_path: Path
) -> None:
    script = tmp_path / "job" / "train.py"
    script.parent.mkdir()
    script.write_text(f"import torch\n{line}\n")
    assert find_place([*stack(*frames)[:-1], Frame("main", str(script), 2)], str(tmp_path))[:3] == (
        "job/train.py:2", "main", call
    )  # fmt: skip


def test_callers_are_own_functions_further_out() -> None:
    def own(function: str, line: int) -> Frame:
        return Frame(function, "/job/train.py", line)

    frames = [*stack("transformers/tokenizer.py: encode")[:-1], own("<listcomp>", 97), own("tokenize", 97),
              own("preprocess", 120), own("Data.__getitem__", 156),
              *stack(FETCH[0])[:-1], own("main", 200), own("<module>", 210)]  # fmt: skip
    assert find_callers(frames, "/job") == "train.py:120 < train.py:156", (
        "what a loader has called is no part of the loop"
    )
    direct = [frame for frame in frames if is_job_code(frame)]
    assert find_callers(direct, "/job") == "train.py:120 < train.py:156 < train.py:200 < train.py:210"
    assert find_callers(frames[-2:], "/job") == "train.py:210"


def test_a_call_with_many_innermost_frames_keeps_its_samples(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("figure.savefig(name)\nloss.backward()\n")
    drawing = [
        [Frame(f"draw{number}", SITE + "matplotlib/artist.py", 5), Frame("savefig", SITE + "matplotlib/figure.py", 9),
         Frame("plot", str(script), 1)]
        for number in range(120)
    ]  # fmt: skip
    backward = [Frame("backward", SITE + "torch/_tensor.py", 5), Frame("<module>", str(script), 2)]
    samples = [(frames, 1 + number % 2) for number, frames in enumerate(drawing)]
    window = make_window([*samples, (backward, 1)], role="training", t=0.0, attempt=1, pid=1, wall_s=10.0)
    assert window is not None
    lines = Counter[str]()
    for place in window.places:
        lines[place.line.rpartition("/")[2]] += place.samples
    assert lines == {"train.py:1": 180, "train.py:2": 1}
    assert len(window.places) <= MAX_PLACES


def test_work_after_the_step_is_at_the_line_of_the_loop(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "for batch in loader:\n    loss.backward()\n    optimizer.step()\n    draw(net)\ndef draw(n):\n    n(1)\n"
    )
    forward = stack("torch/nn/modules/conv.py: Conv2d._conv_forward", *MODULE)[:-1]
    late = [*forward, Frame("draw", str(script), 6), Frame("<module>", str(script), 4)]
    step = [*forward, Frame("<module>", str(script), 2)]
    fields = {"cwd": str(tmp_path), "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0}
    window = make_window([(late, 3), (step, 1)], role="training", **fields)
    assert window is not None
    assert window.main_thread == {"compute": 1.0}
    assert [(place.line, place.call, place.kind) for place in window.places] == [
        ("train.py:4", "draw", AFTER_STEP), ("train.py:2", "loss.backward", "compute")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        (["matplotlib/backends/backend_agg.py: draw_text", "torch/utils/tensorboard/writer.py: add_figure"], "python"),
        (["torch/nn/functional.py: linear"], "compute"),
        (["scipy/optimize/_lsap.py: linear_sum_assignment"], "compute"),  # a matcher is a part of the step
    ],
)
def test_a_figure_that_is_drawn_in_a_training_step_is_no_part_of_it(
    inside: list[str], kind: str, tmp_path: Path
) -> None:
    script = tmp_path / "net.py"
    script.write_text("def show(self):\n    self.log.add_figure(figure)\n")
    frames = [*stack(*inside)[:-1], Frame("show", str(script), 2),
              *stack("torch/optim/optimizer.py: Optimizer.profile_hook_step.<locals>.wrapper")]  # fmt: skip
    fields = {"cwd": str(tmp_path), "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0, "runnable": 1.0}
    window = make_window([(frames, 3)], role="training", **fields)
    assert window is not None
    assert window.main_thread == {kind: 1.0}
    assert window.places[0].line == "net.py:2"


@pytest.mark.parametrize(("line", "kind"), [("torch.jit.trace(net, x)", "python"), ("compiled(x)", "compile")])
def test_a_model_that_is_traced_to_be_written_is_no_compilation(line: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "export.py"
    script.write_text(f"def export(net):\n    {line}\n")
    frames = [*stack("torch/jit/_trace.py: trace")[:-1], Frame("export", str(script), 2)]
    fields = {"cwd": str(tmp_path), "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0, "runnable": 1.0}
    window = make_window([(frames, 3)], role="training", **fields)
    assert window is not None
    assert (window.main_thread, window.places[0].kind) == ({kind: 1.0}, kind)


SAMPLES = """\
def training_loop():
    for x in loader:
        yield criterion(net(x))
        optimizer.step()
@torch.no_grad()
def samples(net):
    for sigma in schedule:
        x = net(x, sigma)
for loss in training_loop():
    samples(net)
    with torch.no_grad():
        teacher(x)
    net(x)
"""


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ([("samples", 8), ("<module>", 10)], ("train.py:8", "net", WITHOUT_GRADIENTS, "train.py:10")),
        ([("<module>", 12)], ("train.py:12", "teacher", WITHOUT_GRADIENTS, "")),
        ([("<module>", 13)], ("train.py:13", "net", "compute", "")),
    ],
)  # fmt: skip
def test_layers_that_run_with_gradients_off_are_no_training(
    own: list[tuple[str, int]], place: tuple[str, str, str, str], tmp_path: Path
) -> None:
    """Recorded of a diffusion model whose training loop is a generator: what is between its forward and its backward
    pass is not known from the loop. Without layers, as of a matcher, it is a part of the step."""
    (script := tmp_path / "train.py").write_text(SAMPLES)
    outer = [Frame(function, str(script), line) for function, line in own]
    fields = {"cwd": str(tmp_path), "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0}
    layers = stack("torch/nn/modules/conv.py: Conv2d._conv_forward", *MODULE)[:-1]
    window = make_window([([*layers, *outer], 3)], role="training", **fields)
    assert window is not None
    found = window.places[0]
    assert (found.line, found.call, found.kind, found.callers) == place
    window = make_window([([*stack("torch/functional.py: cdist")[:-1], *outer], 3)], role="training", **fields)
    assert window is not None
    assert window.places[0].kind != WITHOUT_GRADIENTS


LOOPS_OF_STEP = """\
def train():
    for images in loader:
        loss = criterion(net(images))
        loss.backward()
    for images in validation:
        match(net(images))
def criterion(points):
    for point in points:
        total += wing(point)
    return total
def wing(point):
    return 1 - point
def forward(x):
    for layer in layers:
        x = layer(x)
def evaluate():
    for images in validation:
        net(images)
def main():
    evaluate()
def on_train_step():
    return criterion(points)
"""


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (["wing 12", "criterion 9", "train 3"], ("train.py:9", "wing", LOOP_IN_STEP)),
        (["wing 12", "criterion 9", "CALL", "train 3"], ("train.py:9", "wing", LOOP_IN_STEP)),
        (["wing 12", "criterion 9", "on_train_step 22", "LIGHTNING"], ("train.py:9", "wing", LOOP_IN_STEP)),
        (["wing 12", "criterion 9"], None),  # nothing tells that it is in a step
        (["wing 12", "CALL", "forward 15", "CALL", "train 3"], None),  # a loop over layers
        (["wing 12", "evaluate 18", "NO_GRAD", "main 20", "<module> 30"], None),
        (["wing 12", "criterion 9", "train 6"], None),  # after the training loop
    ],
)
def test_a_python_loop_in_a_step_is_a_place(
    frames: list[str], place: tuple[str, str, str] | None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOPS_OF_STEP)
    installed = {
        "CALL": stack("torch/nn/modules/module.py: Module._call_impl")[:-1],
        "NO_GRAD": stack("torch/utils/_contextlib.py: context_decorator.<locals>.decorate_context")[:-1],
        "LIGHTNING": [Frame("advance", "/v/site-packages/lightning/pytorch/loops/training_epoch_loop.py", 4)],
    }
    sampled = [*stack("torch/_tensor.py: Tensor.__rsub__")[:-1]]
    for text in frames:
        function, _, line = text.partition(" ")
        sampled += installed.get(text) or [Frame(function, str(script), int(line))]
    fields = {"cwd": str(tmp_path), "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0, "runnable": 1.0}
    window = make_window([(sampled, 3)], role="training", **fields)
    assert window is not None
    (found,) = window.places
    if place is None:
        assert found.kind != LOOP_IN_STEP
    else:
        assert (found.line, found.call, found.kind) == place


LOOPS_WITHOUT_GRADIENTS = """\
def train():
    for images in loader:
        pairs = select(net(images))
        loss = criterion(net(images), pairs)
        loss.backward()
        optimizer.step()
        evaluate()
    evaluate()
def select(points):
    with torch.no_grad():
        for point in points:
            nearest = distance(point, points).item()
        return nearest
@torch.no_grad()
def mine(points):
    for point in points:
        points = points - point
    return 1 - points
def evaluate():
    with torch.no_grad():
        for images in validation:
            losses.append(criterion(net(images)).item())
def soft(points):
    for point in points:
        points = points - point
"""
OPERATION = stack("torch/_tensor.py: Tensor.__rsub__")[:-1]
DISTANCE = stack("torch/nn/modules/distance.py: forward", "torch/nn/modules/module.py: _call_impl")[:-1]
LAYER = stack("torch/nn/modules/conv.py: Conv2d.forward", "torch/nn/modules/module.py: Module._call_impl")[:-1]


@pytest.mark.parametrize(
    ("inside", "frames", "kind"),
    [
        (DISTANCE, ["select 12", "train 3"], "python"),
        ([], ["select 12", "train 3"], "python"),
        (OPERATION, ["mine 17", "train 3"], "python"),
        (OPERATION, ["mine 18", "train 3"], "compute"),
        (LAYER, ["select 12", "train 3"], WITHOUT_GRADIENTS),
        (OPERATION, ["soft 25", "train 4"], LOOP_IN_STEP),
        (DISTANCE, ["soft 25", "train 4"], LOOP_IN_STEP),
        (OPERATION, ["evaluate 22", "train 8"], "compute"),
        (OPERATION, ["select 12"], "compute"),
    ],
    ids=["a distance", "a number is read", "a decorator", "no loop", "a layer", "with gradients",
         "a distance with gradients", "an evaluation", "not in a step"],
)  # fmt: skip
def test_a_loop_of_a_step_without_gradients_is_python(
    inside: list[Frame], frames: list[str], kind: str, tmp_path: Path
) -> None:
    """As one that looks for the hardest negative of each pair; an operation takes the time of Python around it."""
    script = tmp_path / "train.py"
    script.write_text(LOOPS_WITHOUT_GRADIENTS)
    own = [Frame(text.partition(" ")[0], str(script), int(text.partition(" ")[2])) for text in frames]
    fields = {"cwd": str(tmp_path), "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0, "runnable": 1.0}
    window = make_window([([*inside, *own], 3)], role="training", **fields)
    assert window is not None
    assert window.places[0].kind == kind


def test_a_bar_of_progress_is_no_call_of_a_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for batch in tqdm(loader):\n    pass\n")
    waits = stack("torch/utils/data/dataloader.py: _BaseDataLoaderIter.__next__", "tqdm/std.py: tqdm.__iter__")[:-1]
    assert find_place([*waits, Frame("<module>", str(script), 1)], str(tmp_path))[:3] == (
        "train.py:1", "<module>", "torch.utils.data.dataloader.__next__",
    )  # fmt: skip


def test_a_trace_of_autograph_is_at_the_line_that_called_it() -> None:
    generated = Frame("tf__step", "/tmp/__autograph_generated_filexlmx.py", 15)
    assert find_place([*stack("tensorflow/python/framework/ops.py: _create_c_op")[:-1], generated, JOB])[0].endswith(
        "job/train.py:9"
    )


@given(st.lists(st.builds(Frame, st.text(max_size=20), st.text(max_size=40), st.integers(0, 10**6)), max_size=8),
       st.booleans())  # fmt: skip
def test_no_stack_makes_it_fail(frames: list[Frame], active: bool) -> None:
    assert classify(frames, active=active) in (*KINDS, HELPER)


def test_every_kind_of_the_table_is_one() -> None:
    assert {rule.kind for rule in RULES["frame"]} <= {*KINDS, HELPER}


def test_garbage_collection_is_seen_by_the_text_of_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import gc\ngc.collect()\nloss = step()\n")
    kinds = [classify([Frame("<module>", str(script), line)], active=True) for line in (2, 3)]
    assert kinds == ["gc", "python"]


def test_a_function_that_jax_has_compiled_runs_a_step(tmp_path: Path) -> None:
    """Also in later lines of the process; not what JAX calls itself, nor another call of the line."""
    script = tmp_path / "train.py"
    lines = ("import jax", "def train():", "    state, loss = p_step(state, batch)", "    key = jax.random.key(1)")
    script.write_text("\n".join(lines))
    at_step, at_key = Frame("train", str(script), 3), Frame("train", str(script), 4)
    compiling = stack("jax/_src/compiler.py: backend_compile_and_load", "jax/_src/pjit.py: cache_miss")[:-1]
    wrapper = Frame("reraise_with_filtered_traceback.<locals>.wrapper", SITE + "jax/_src/traceback_util.py", 1)
    compiled: set[tuple[str, str]] = set()
    fields = {"role": "training", "compiled": compiled, "t": 0.0, "attempt": 1, "pid": 1, "wall_s": 1.0}
    before = make_window([([wrapper, at_step], 1)], **fields)
    first = [([*compiling, at_step], 2), ([*compiling, at_key], 2), ([at_step], 5)]
    make_window(first, **fields)
    after = make_window([([wrapper, at_step], 3), ([at_key], 1)], **fields)
    assert before is not None
    assert after is not None
    assert before.main_thread == {"python": 1}
    assert after.main_thread == {"compute": 0.75, "python": 0.25}


def test_operations_that_jax_runs_one_by_one_are_work_of_their_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\nimport jax.numpy as jnp\nstate = p_step(state)\nimage = jnp.roll(image, 3)\n")
    runs = stack("jax/_src/interpreters/pxla.py: ExecuteReplicated.__call__", "jax/_src/pjit.py: cache_miss",
                 "jax/_src/traceback_util.py: reraise_with_filtered_traceback.<locals>.wrapper")[:-1]  # fmt: skip
    at_step, at_roll = Frame("<module>", str(script), 3), Frame("<module>", str(script), 4)
    window = make_window(
        [([*runs, at_step], 3), ([*runs, at_roll], 1)], role="training", t=0.0, attempt=1, pid=1, wall_s=1.0
    )
    assert window is not None
    assert window.main_thread == {"compute": 0.75, "python": 0.25}
    assert [(place.line[-1], place.kind) for place in window.places] == [("3", "compute"), ("4", "python")]


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        ((), "python"),  # a hook of a tensor, of DistributedDataParallel's buckets
        (("torch/utils/hooks.py: BackwardHook.setup_input_hook.<locals>.fn",), "python"),
        (("torch/autograd/function.py: BackwardCFunction.apply",), "compute"),
        (("torch/utils/checkpoint.py: CheckpointFunction.backward",), "compute"),
    ],
)
def test_what_is_done_to_each_gradient_is_no_part_of_the_backward_pass(
    between: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def rank(bucket):\n    return bucket.buffer().sort()\nloss.backward()\n")
    outer = ("torch/autograd/graph.py: _engine_run_backward", "torch/_tensor.py: Tensor.backward")
    frames = [Frame("rank", str(script), 2), *stack(*between, *outer)[:-1], Frame("<module>", str(script), 3)]
    window = make_window([(frames, 4)], role="training", t=0.0, attempt=1, pid=1, wall_s=1.0)
    assert window is not None
    assert window.main_thread == {kind: 1.0}
    assert [place.line.rpartition("/")[2] for place in window.places] == ["train.py:2"]


def test_a_transform_of_a_package_is_named_by_its_class() -> None:
    dataset = "torchvision/datasets/cifar.py: CIFAR10.__getitem__"
    frames = stack("torchvision/transforms/transforms.py: LinearTransformation.forward", *MODULE, dataset)[:-1]
    assert find_place(frames)[:2] == ("torchvision/transforms/transforms.py:1", "LinearTransformation.forward")
