"""`stoker_watch.measure` as a callback of Lightning's Trainer (`pytorch_lightning` or `lightning`), for one fit.

    from stoker_watch.recording.callbacks.lightning import StokerCallback
    trainer = Trainer(callbacks=[StokerCallback("runs/x")])

Steps, validation and checkpoints are known from the callback's hooks. No hook reports the wait for batches; Lightning
reports it to its profiler (`train_dataloader_next`, as `profiler="simple"` shows), so the trainer's profiler, of any
kind, is wrapped during the fit. With several ranks each one has its own callback, as usual.
"""

from collections.abc import Mapping
from typing import Any

from stoker_watch.recording.callbacks import Session, load_class

_ACTIONS = {".train_dataloader_next": "input_wait", ".batch_to_device": "h2d", "save_checkpoint": "checkpoint"}
"""End of the profiler's name of an action → phase."""


class StokerCallback(load_class("Callback", "lightning.pytorch", "pytorch_lightning", install="lightning")):  # type: ignore[misc]
    """run, settings: arguments of `stoker_watch.measure`. Another fit with the same folder is another attempt."""

    def __init__(self, run: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._session = Session(run, settings)
        self._profiler: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        if stage == "fit":
            self._session.open(first_step=trainer.global_step)
            self._patch_profiler(trainer.profiler)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        if stage == "fit":
            self._close(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        self._close(exception)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        measure = self._session.measure
        if measure is not None:
            measure.count_batch(batch)
            self._session.begin("step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        measure = self._session.measure
        if measure is None:
            return
        self._session.end("step")
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if getattr(loss, "numel", lambda: 0)() != 1:  # with manual optimization a step may return anything
            loss = None
        elif loss is not None:  # Lightning has divided it, for the gradients
            loss = loss * trainer.accumulate_grad_batches
        lr = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
        measure.log(loss=loss, lr=lr)
        if trainer.global_step > measure.step_count:  # else the gradient is accumulated
            measure.count_steps(trainer.global_step - measure.step_count)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self._session.begin("eval")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self._session.end("eval")

    def _patch_profiler(self, profiler: Any) -> None:
        """Wraps `start` and `stop` of this profiler object until `_close`."""
        session, start, stop = self._session, profiler.start, profiler.stop

        def timed_start(action_name: str) -> Any:
            if phase := _find_phase(action_name):
                session.begin(phase)
            return start(action_name)

        def timed_stop(action_name: str) -> Any:
            result = stop(action_name)
            if phase := _find_phase(action_name):
                session.end(phase)
            return result

        profiler.start, profiler.stop = timed_start, timed_stop
        self._profiler = profiler

    def _close(self, error: BaseException | None) -> None:
        if self._profiler is not None:
            for name in ("start", "stop"):  # uncovers the methods of the class
                vars(self._profiler).pop(name, None)
            self._profiler = None
        self._session.close(error)


def _find_phase(action: str) -> str | None:
    return next((phase for suffix, phase in _ACTIONS.items() if action.endswith(suffix)), None)
