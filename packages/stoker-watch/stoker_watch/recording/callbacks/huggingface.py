"""`stoker_watch.measure` as a callback of `transformers.Trainer`.

    from stoker_watch.recording.callbacks.huggingface import StokerCallback
    trainer = Trainer(…, callbacks=[StokerCallback("runs/x")])

The Trainer calls its callbacks when a step begins and ends, and when other work has ended. The time before a step is
the wait for its batches; the time before `on_evaluate` and `on_save` is evaluation and saving. Callbacks do not receive
errors: a training that raised is recorded as failed by the next one, at process exit, or by `StokerCallback.close`.
"""

import time
from typing import Any

from stoker_watch.recording.callbacks import Session, load_class

_LOG_NAMES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""Name in the Trainer's logs → name in `Measure.log`. Logs of an evaluation have other names."""


class StokerCallback(load_class("TrainerCallback", "transformers", install="transformers accelerate")):  # type: ignore[misc]
    """run, settings: arguments of `stoker_watch.measure`. Each step counts as many images as a whole batch has."""

    def __init__(self, run: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._session = Session(run, settings)
        self._accounted_until_s = 0.0
        """Time up to which the Trainer's work is assigned to a phase."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._session.open(first_step=state.global_step)
        self._accounted_until_s = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the record. error: what ended the training."""
        self._session.close(error)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._accounted_until_s = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._attribute_since_last("input_wait")
        self._session.begin("step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._session.end("step")
        if self._session.measure is not None:
            num_images = args.train_batch_size * args.gradient_accumulation_steps
            self._session.measure.count_steps(num_images=num_images)
        self._accounted_until_s = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._attribute_since_last("eval")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._attribute_since_last("checkpoint")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        values = {name: float(logs[hf_name]) for hf_name, name in _LOG_NAMES.items() if logs and hf_name in logs}
        if self._session.measure is not None and "loss" in values:
            self._session.measure.log(**values)
            self._accounted_until_s = time.perf_counter()  # an evaluation logs too, before it ends

    def _attribute_since_last(self, phase: str) -> None:
        now_s = time.perf_counter()
        if self._session.measure is not None:
            self._session.measure.attribute(phase, self._accounted_until_s, now_s)
        self._accounted_until_s = now_s
