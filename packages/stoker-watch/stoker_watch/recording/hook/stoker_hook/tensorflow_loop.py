"""Hooks for TensorFlow and Keras. In loops that users write: batches of eager iterators, calls of a `tf.function`,
tracing. Of Keras: `fit`, `evaluate` and checkpoints, also on torch. `patches.txt` says what is called for which module.

A step is a call of a `tf.function` whose trace took a gradient (`GradientTape.gradient`, as the backward of torch), or
an optimizer's update outside of graphs. A call that traces is `compile` as a whole: the first run of a new graph
optimizes and compiles it in C++. A trace is a recompilation if the same Python function was traced in an earlier call.
A step that is given an iterator fetches its batches inside its graph, as in Keras' `fit` on TensorFlow: only
TensorFlow's profiler, which is sampled, knows the fraction of that. On JAX steps return before they are done, so
nothing is timed. Not timed: calls of a ConcreteFunction, sessions of TensorFlow 1.
"""

import os
import sys
from _thread import get_ident
from functools import partial
from time import monotonic
from typing import Any

from .clock import BATCHES, CHECKPOINT, COMPILE, COMPUTE, GRAPH, RECOMPILES, STEPS, clock, patch_timed, timed_next
from .failures import STATE_DIR, report_failure
from .instruments import count_images, replacing, timed
from .mistakes import LOOK_STEPS, MAX_READ, own_line

FIRST_INTERVAL_S, LONGEST_INTERVAL_S, WARMUP_STEPS = 4.0, 600.0, 3
"""Seconds from the first trace to the second, then twice as long to each, up to the longest; steps before the first.
TensorFlow logs three lines about each trace."""
MAX_ARGUMENT_CHARS = 100
MAX_STEPS, MIN_TRACE_S, MIN_STEPS, MAX_TRACE_S = 50, 1.5, 3, 20.0
"""A trace ends after MAX_STEPS, after MIN_TRACE_S if it has MIN_STEPS, or after MAX_TRACE_S."""
OPTIONS = {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 0}
TRAINS_ATTR, WRAPPED_ATTR = "_stoker_trains", "_stoker_wrapped"
"""Attributes of a `tf.function` whose trace took a gradient, and of a train_function of Keras that is timed."""

LOSSES = ("categorical_crossentropy", "sparse_categorical_crossentropy", "binary_crossentropy")
"""Functions of Keras' backends."""
_AFTER_LAYERS = ("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "BiasAdd", "AddV2")
_LAYERS = ("MatMul", "BatchMatMulV2", "Conv1D", "Conv2D", "Conv3D", "Einsum")
"""Operations of a graph that compute a layer, and those that may follow it: the results are any numbers still."""
MAX_LOSSES = 4
"""Calls of losses whose input is looked at; of a `tf.function` these are traces."""


class LoopState:
    """The outermost `tf.function` that the training thread is in."""

    def __init__(self) -> None:
        self.function: Any = None
        self.has_traced = False
        self.is_compiling = False
        """A trace has begun the phase `compile`, which ends with the call."""
        self.in_fit = False
        """Keras runs the loop."""
        self.steps_per_call = 1
        """Steps of a training function of Keras 2, by its `steps_per_execution`."""
        self.traced_code: dict[Any, tuple[int, dict[str, str]]] = {}
        """Code of a traced function → its id and the arguments of its newest trace."""


state = LoopState()


def _is_outside() -> bool:
    """Whether this is the user's loop, in the training thread."""
    return state.function is None and not state.in_fit and clock.is_outside_phases()


def patch_next(module: "Any", class_name: str, name: str) -> None:
    """`next` of iterators of a dataset, outside of graphs, and of those of tf.distribute, which call these."""
    cls = getattr(module, class_name)
    original = getattr(cls, name)

    @replacing(cls, name)
    def next_batch(self: "Any") -> "Any":
        return timed_next(self, original) if _is_outside() else original(self)


def patch_functions(module: "Any") -> None:
    """polymorphic_function of tensorflow.python.eager (up to 2.9 `def_function`): each call of a `tf.function`."""
    cls = module.Function
    if cls.__module__ != module.__name__:  # the old name of the module
        return
    original = cls.__call__

    @replacing(cls, "__call__")
    def __call__(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        if state.function is not None or not clock.enabled or get_ident() != clock.thread_id:
            return original(self, *args, **kwargs)
        if not _is_outside():
            return _call(original, self, args, kwargs)
        trains = TRAINS_ATTR in self.__dict__
        if trains and any(type(arg).__name__.endswith("Iterator") for arg in args):
            return run_graph_step(self, lambda: _call(original, self, args, kwargs), state.steps_per_call)
        is_entered = False
        if trains:
            clock.confirm_training()
            # without a batch since the last step: a second function of the step, or batches from elsewhere
            is_entered = not clock.has_batch() and clock.enter(COMPUTE)
        try:
            result = _call(original, self, args, kwargs)
        finally:
            if is_entered:
                clock.leave()
        if TRAINS_ATTR in self.__dict__:
            _count_step(self)
        return result


def _call(original: "Any", function: "Any", args: "Any", kwargs: "Any") -> "Any":
    """Calls the outermost `tf.function`, and counts a recompilation."""
    state.function, state.has_traced, state.is_compiling = function, False, False
    try:
        return original(function, *args, **kwargs)
    finally:
        state.function = None
        if state.is_compiling:
            clock.leave()
        if state.has_traced:
            _count_trace(function)


def _count_trace(function: "Any") -> None:
    """By code: a `tf.function` that is created again for each step is traced again, too."""
    try:
        python_function = function.python_function
        while hasattr(python_function, "__wrapped__"):
            python_function = python_function.__wrapped__
        code = getattr(python_function, "__code__", None) or id(function)
        is_again = code in state.traced_code
        clock.values[RECOMPILES] = max(0.0, clock.values[RECOMPILES]) + is_again
        signature = _newest_signature(function)
        if is_again:
            name = getattr(python_function, "__name__", "a function")
            clock.set_recompiled(name, _difference(id(function), signature, *state.traced_code[code]))
        state.traced_code[code] = id(function), signature
    except Exception as error:  # noqa: BLE001
        report_failure("recompilations", error)


def _newest_signature(function: "Any") -> "dict[str, str]":
    """Each argument of the newest trace, as text; empty: this TensorFlow does not tell."""
    list_all = getattr(function, "_list_all_concrete_functions", None)
    traced = list_all() if list_all is not None else []
    args, kwargs = traced[-1].structured_input_signature if traced else ((), {})
    named = dict(enumerate(args))
    return {str(name): repr(value)[:MAX_ARGUMENT_CHARS] for name, value in {**named, **kwargs}.items()}


def _difference(function_id: int, now: "dict[str, str]", before_id: int, before: "dict[str, str]") -> str:
    """What differs between two traces of a function."""
    if function_id != before_id:
        return "another tf.function of the same code was traced before"
    differs = [name for name in now if now[name] != before.get(name)]
    return "; ".join(f"argument {name}: now {now[name]}, before {before.get(name, 'absent')}" for name in differs)


def _count_step(stepper: "Any") -> None:
    """stepper: a function or an optimizer."""
    clock.publish(f"TensorFlow {getattr(sys.modules.get('tensorflow'), '__version__', '')}".rstrip())
    clock.count_optimizer_step(stepper, None)
    _look_for_aids(stepper)


def _look_for_aids(stepper: "Any") -> None:
    """Each LOOK_STEPS: whether the step runs eagerly, because functions are told to, or as it is in none."""
    if clock.values[STEPS] % LOOK_STEPS == 0:
        clock.observe(_look, stepper)


def _look(stepper: "Any") -> None:
    eager = sys.modules.get("tensorflow.python.eager.polymorphic_function.eager_function_run")
    runs_eagerly = bool(getattr(eager, "RUN_FUNCTIONS_EAGERLY", False)) or bool(getattr(stepper, "run_eagerly", False))
    has_graph = TRAINS_ATTR in getattr(stepper, "__dict__", {}) or state.in_fit  # else it is an optimizer
    clock.mistakes.look({"run_eagerly": runs_eagerly, "eager_steps": not has_graph and not runs_eagerly})


def patch_tracing(module: "Any") -> None:
    """tensorflow.python.framework.func_graph: from Python code to a graph; nested traces count once."""
    original = module.func_graph_from_py_func

    @replacing(module, "func_graph_from_py_func")
    def func_graph_from_py_func(*args: "Any", **kwargs: "Any") -> "Any":
        if get_ident() != clock.thread_id:
            return original(*args, **kwargs)
        state.has_traced = True
        if clock.is_in(CHECKPOINT) or not clock.enter(COMPILE):
            return original(*args, **kwargs)
        state.is_compiling = state.function is not None
        try:
            return original(*args, **kwargs)
        finally:
            if state.function is None:
                clock.leave()


def patch_gradients(module: "Any") -> None:
    """tensorflow.python.eager.backprop: a gradient means that the batches before it were for training."""
    original = module.GradientTape.gradient

    @replacing(module.GradientTape, "gradient")
    def gradient(*args: "Any", **kwargs: "Any") -> "Any":
        if state.function is not None:  # replicas of tf.distribute are traced in threads of their own
            state.function.__dict__[TRAINS_ATTR] = True
        elif _is_outside():
            clock.confirm_training()
        return original(*args, **kwargs)


def patch_old_keras_model(module: "Any") -> None:
    """engine.training of Keras 2, also as the package tf_keras. Its steps are those of any `tf.function`."""
    patch_timed(module, "eval", "Model.evaluate", "Model.predict", "Model.predict_on_batch")
    patch_timed(module, "checkpoint", "Model.save", "Model.save_weights")
    original = module.Model.fit

    @replacing(module.Model, "fit")
    def fit(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        before, state.steps_per_call = state.steps_per_call, _steps_per_execution(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            state.steps_per_call = before

    clock.publish("Keras 2")


def _steps_per_execution(model: "Any") -> int:
    """Reads the variable in which a model of Keras 2 keeps it."""
    try:
        return max(1, int(model._steps_per_execution.numpy()))
    except Exception:  # noqa: BLE001 (another version, or not compiled: `fit` says so itself)
        return 1


def patch_apply(module: "Any", class_name: str, name: str) -> None:
    """Optimizers of Keras: `apply` of the backend's, which `apply_gradients` calls; in Keras 2 `apply_gradients`."""
    cls = getattr(module, class_name)
    if name == "apply_gradients" and name not in vars(cls):  # in Keras 3 it inherits from that of the backend
        return
    original = getattr(cls, name)

    @replacing(cls, name)
    def apply(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        result = original(self, *args, **kwargs)
        if _is_outside():
            _count_step(self)
        return result


def patch_losses(module: "Any") -> None:
    """A backend of Keras, whose losses expect probabilities unless they are told that they get raw scores."""
    for name in LOSSES:
        if callable(getattr(module, name, None)):
            _check_loss(module, name)


def _check_loss(module: "Any", name: str) -> None:
    original = getattr(module, name)

    @replacing(module, name)
    def loss(target: "Any", output: "Any", from_logits: "Any" = False, *args: "Any", **kwargs: "Any") -> "Any":
        if not from_logits:
            clock.observe(_look_at_scores, output)
        return original(target, output, from_logits, *args, **kwargs)


def _look_at_scores(output: "Any") -> None:
    if clock.mistakes.count("raw_scores") <= MAX_LOSSES and _are_scores(output):
        clock.mistakes.report("raw_scores", own_line())


def _are_scores(output: "Any") -> bool:
    """Whether it is no probability: by the operation of a graph that makes it, or by the values of its first rows."""
    if getattr(output, "is_meta", False):  # Keras on torch asks for shapes
        return False
    if hasattr(output, "numpy"):
        rows = output[:16]
        values = (rows.detach() if hasattr(rows, "detach") else rows.numpy()).reshape(-1)[:MAX_READ]
        return bool(((values < -0.01) | (values > 1.01)).any())
    operation = getattr(output, "op", None)
    for _ in range(8):
        if operation is None or operation.type in _LAYERS:
            return operation is not None
        operation = operation.inputs[0].op if operation.type in _AFTER_LAYERS and len(operation.inputs) else None
    return False


class ProfilerSampler:
    """The fraction of a step that waits for its input, where the step fetches its batches inside its graph and Python
    cannot time it. So a few steps run under TensorFlow's profiler, in the first minute several times, then once a
    minute, and the trace is written next to the state file for the watcher (`stoker_watch/watch/hook_reader.py`). At
    other times the profiler is off, and a profiler session of the user has priority. In the training thread."""

    def __init__(self) -> None:
        self._session: Any = None
        self._session_class: Any = None
        self._next_s, self._interval_s = 0.0, FIRST_INTERVAL_S
        self._start_s = 0.0
        self._steps = 0
        self._graph_s = 0.0
        self._traces = 0

    def before_step(self, steps: float) -> None:
        now = monotonic()
        if self._session is not None or steps < WARMUP_STEPS or now < self._next_s:
            return
        self._next_s = now + self._interval_s
        self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)
        try:
            if self._session_class is None:
                self._session_class = self._patch_session_class()
            session = self._session_class()
            session.start("", OPTIONS)
        except Exception as error:  # noqa: BLE001
            if type(error).__name__ == "AlreadyExistsError":  # the user's profiler runs: try again in a minute
                return
            self._next_s = float("inf")
            report_failure("profiler", error)
            return
        self._session, self._start_s, self._steps, self._graph_s = session, now, 0, 0.0

    def after_step(self, duration_s: float) -> None:
        if self._session is None:
            return
        self._steps += 1
        self._graph_s += duration_s
        elapsed_s = monotonic() - self._start_s
        is_enough = elapsed_s >= MIN_TRACE_S and self._steps >= MIN_STEPS
        if is_enough or self._steps >= MAX_STEPS or elapsed_s >= MAX_TRACE_S:
            self._stop()

    def _stop(self) -> None:
        session, self._session = self._session, None
        try:
            data = session.stop()
            self._traces += 1
            name = os.path.join(STATE_DIR, f"{os.getpid()}-{self._traces}")
            with open(name + ".part", "wb") as file:
                file.write(f"{self._graph_s:.9f}\n".encode() + data)
            os.rename(name + ".part", name + ".trace")
        except Exception as error:  # noqa: BLE001 (no space or no watcher: the fraction stays unknown)
            report_failure("profiler", error)

    def _patch_session_class(self) -> "Any":
        """Patches TensorFlow's session class to end our session before it creates another: only one can exist."""
        internal = sys.modules["tensorflow.python.profiler.profiler_v2"]._pywrap_profiler
        original = internal.ProfilerSession

        def session(*args: "Any") -> "Any":
            if self._session is not None:
                self._session.stop()
                self._session = None
            return original(*args)

        internal.ProfilerSession = session
        return original


sampler = ProfilerSampler()


def run_graph_step(owner: "Any", call: "Any", steps: int = 1) -> "Any":
    """Calls a step that fetches its batches inside its graph. owner: its model or function; steps: in one call."""
    clock.begin_step()
    sampler.before_step(clock.values[BATCHES])
    if not clock.enter(GRAPH):
        return call()
    start_s = monotonic()
    try:
        result = call()
    finally:
        clock.leave()
        duration_s = monotonic() - start_s
    clock.values[BATCHES] += steps
    clock.count_optimizer_step(owner, None, steps)
    sampler.after_step(duration_s)  # its own time is not that of the step
    _look_for_aids(owner)
    return result


def patch_epoch_iterator(module: "Any") -> None:
    """keras.src.trainers.epoch_iterator: `__next__` returns a list of batches, one per step."""
    iterator_class = module.EpochIterator
    original_next = iterator_class.__next__

    @replacing(iterator_class, "__next__")
    def __next__(self: "Any") -> "Any":
        if not clock.is_outside_phases() or "keras.src.backend.torch.trainer" not in sys.modules:
            return original_next(self)
        return timed_next(self, original_next, lambda batches: sum(map(count_images, batches[-1])))


def patch_torch_trainer(module: "Any") -> None:
    def run_step(self: "Any", step: "Any") -> "Any":
        result = step()
        clock.count_optimizer_step(self, None)
        return result

    _patch_trainer(module.TorchTrainer, "torch", run_step)


def begin_fit() -> "Any":
    """Keras' `fit` begins, in which other calls than its steps are not timed. Returns what ends it."""
    was_in_fit, state.in_fit = state.in_fit, True
    return partial(setattr, state, "in_fit", was_in_fit)


def patch_tensorflow_trainer(module: "Any") -> None:
    def run_step(self: "Any", step: "Any") -> "Any":
        # `train_on_batch` has its batch already: its step is timed as that of any `tf.function`
        if not state.in_fit or not clock.is_outside_phases():
            return step()
        return run_graph_step(self, step, int(getattr(self, "steps_per_execution", 1) or 1))

    module.TensorFlowTrainer.fit = timed(module.TensorFlowTrainer.fit, begin_fit)
    _patch_trainer(module.TensorFlowTrainer, "tensorflow", run_step)


def _patch_trainer(trainer: "Any", backend: str, run_step: "Any") -> None:
    """Times evaluations, and each model's train_function from when it is created. run_step: calls it."""
    patch_timed(trainer, "eval", "evaluate", "predict", "predict_on_batch")
    clock.publish(f"Keras {getattr(sys.modules.get('keras.src.version'), '__version__', '')} on {backend}")
    original = trainer.make_train_function

    @replacing(trainer, "make_train_function")
    def make_train_function(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        result = original(self, *args, **kwargs)
        step = self.train_function
        if step is not None and not hasattr(step, WRAPPED_ATTR):
            self.train_function = lambda *args, **kwargs: run_step(self, partial(step, *args, **kwargs))
            setattr(self.train_function, WRAPPED_ATTR, True)
        return result
