"""Keras' side of the clock: `fit`, `evaluate` and checkpoints, with torch or TensorFlow below it.

With torch the batches come out of an EpochIterator, one at a time. With TensorFlow a step fetches them inside its
graph: what share of it that takes only TensorFlow's profiler knows (`tensorflow_input.py`). With JAX steps return
before they are done, so nothing is timed.
"""

from functools import wraps

from .clock import CHECKPOINT, EVAL, Source, clock, timed
from .torch_loop import SOURCE, pictures_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def waits(module: "Any") -> None:
    """keras.src.trainers.epoch_iterator: `__next__` gives a list of batches, one each step."""
    from sys import modules

    iterators = module.EpochIterator
    following = iterators.__next__

    def __next__(self: "Any") -> "Any":
        if not clock.is_free() or "keras.src.backend.torch.trainer" not in modules:
            return following(self)
        source = self.__dict__.get(SOURCE)
        if source is None:
            source = self.__dict__[SOURCE] = Source()
        clock.wait_begins(source, False)
        try:
            found = following(self)
        except BaseException as error:
            clock.source_ends(source, failed=not isinstance(error, StopIteration))
            raise
        clock.wait_ends(source, sum(pictures_in(batch) for batch in found[-1]))
        return found

    iterators.__next__ = __next__


def saving(module: "Any") -> None:
    for name in ("save", "save_weights"):
        setattr(module.Model, name, timed(CHECKPOINT, getattr(module.Model, name)))


def torch_trainer(module: "Any") -> None:
    trainer = module.TorchTrainer
    _evaluations(trainer)
    clock.show(_name("torch"))

    def stepping(self: "Any", step: "Any") -> "Any":
        @wraps(step)
        def wrapper(*words: "Any", **named: "Any") -> "Any":
            result = step(*words, **named)
            clock.stepped(self, None)
            return result

        return wrapper

    _train_function(trainer, stepping)


def tensorflow_trainer(module: "Any") -> None:
    from . import tensorflow_input

    trainer = module.TensorFlowTrainer
    _evaluations(trainer)
    clock.show(_name("tensorflow"))
    _train_function(trainer, tensorflow_input.stepping)


def _evaluations(trainer: "Any") -> None:
    trainer.evaluate = timed(EVAL, trainer.evaluate)
    trainer.predict = timed(EVAL, trainer.predict)


def _train_function(trainer: "Any", around: "Any") -> None:
    """Has each model's train_function wrapped when it is made."""
    make = trainer.make_train_function

    @wraps(make)
    def make_train_function(self: "Any", *words: "Any", **named: "Any") -> "Any":
        result = make(self, *words, **named)
        function = self.train_function
        if function is not None and not hasattr(function, SOURCE):
            wrapped = around(self, function)
            setattr(wrapped, SOURCE, True)
            self.train_function = wrapped
        return result

    trainer.make_train_function = make_train_function


def _name(backend: str) -> str:
    from sys import modules

    version = getattr(modules.get("keras.src.version"), "__version__", "")
    return f"Keras {version} on {backend}"
