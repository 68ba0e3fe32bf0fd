"""Hooks for Keras: `fit`, `evaluate` and checkpoints, on torch or TensorFlow.

On torch the batches come from an EpochIterator, one at a time. On TensorFlow a step fetches them inside its graph: only
TensorFlow's profiler knows the fraction of that (`tensorflow_loop.py`). On JAX steps return before they are done, so
nothing is timed.
"""

from functools import wraps

from .clock import SOURCE_ATTR, clock, patch_timed, timed_next
from .instruments import count_images

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch_epoch_iterator(module: "Any") -> None:
    """keras.src.trainers.epoch_iterator: `__next__` returns a list of batches, one per step."""
    from sys import modules

    iterator_class = module.EpochIterator
    original_next = iterator_class.__next__

    def __next__(self: "Any") -> "Any":
        if not clock.is_outside_phases() or "keras.src.backend.torch.trainer" not in modules:
            return original_next(self)
        return timed_next(self, original_next, lambda batches: sum(map(count_images, batches[-1])))

    iterator_class.__next__ = __next__


def patch_torch_trainer(module: "Any") -> None:
    trainer = module.TorchTrainer
    patch_timed(module, "eval", "TorchTrainer.evaluate", "TorchTrainer.predict")
    clock.publish(_framework_name("torch"))

    def wrap_step(self: "Any", step: "Any") -> "Any":
        @wraps(step)
        def wrapper(*args: "Any", **kwargs: "Any") -> "Any":
            result = step(*args, **kwargs)
            clock.count_optimizer_step(self, None)
            return result

        return wrapper

    _patch_train_function(trainer, wrap_step)


def patch_tensorflow_trainer(module: "Any") -> None:
    from .tensorflow_loop import run_graph_step, state, wrap_fit

    trainer = module.TensorFlowTrainer
    patch_timed(module, "eval", "TensorFlowTrainer.evaluate", "TensorFlowTrainer.predict")
    clock.publish(_framework_name("tensorflow"))
    trainer.fit = wrap_fit(trainer.fit)

    def wrap_step(self: "Any", step: "Any") -> "Any":
        def train_function(*args: "Any", **kwargs: "Any") -> "Any":
            # `train_on_batch` has its batch already: its step is timed as that of any `tf.function`
            if not state.in_fit or not clock.is_outside_phases():
                return step(*args, **kwargs)
            steps = int(getattr(self, "steps_per_execution", 1) or 1)
            return run_graph_step(self, lambda: step(*args, **kwargs), steps)

        return train_function

    _patch_train_function(trainer, wrap_step)


def _patch_train_function(trainer: "Any", wrap: "Any") -> None:
    """Wraps each model's train_function when it is created."""
    original = trainer.make_train_function

    @wraps(original)
    def make_train_function(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        result = original(self, *args, **kwargs)
        function = self.train_function
        if function is not None and not hasattr(function, SOURCE_ATTR):
            wrapped = wrap(self, function)
            setattr(wrapped, SOURCE_ATTR, True)
            self.train_function = wrapped
        return result

    trainer.make_train_function = make_train_function


def _framework_name(backend: str) -> str:
    from sys import modules

    version = getattr(modules.get("keras.src.version"), "__version__", "")
    return f"Keras {version} on {backend}"
