"""`stoker_watch.measure` as callbacks of training frameworks: `lightning.py`, `huggingface.py`. None is a dependency.

Their base, `Session`, is a measured loop whose parts begin and end in calls of a framework, not in blocks.
"""

import contextlib
import importlib
import sys
from typing import Any

from stoker_watch.errors import PreflightError
from stoker_watch.recording.measure import Measure


class Session:
    """Records between `open` and `close`; at other times every call does nothing. settings: of `measure`."""

    def __init__(self, run: str | None, settings: dict[str, Any]) -> None:
        self._measure: Measure | None = None
        self._run, self._settings = run, settings
        self._blocks: dict[str, contextlib.ExitStack] = {}

    def open(self, *, first_step: int) -> None:
        """first_step: optimizer steps done, by the framework's count."""
        self._blocks = {}
        self._measure = Measure(self._run, **{"first_step": first_step} | self._settings).__enter__()
        self._measure.is_replaceable = True

    @property
    def measure(self) -> Measure | None:
        """None outside of a training, or if another training has replaced this one."""
        return None if self._measure is None or self._measure.closed else self._measure

    def close(self, error: BaseException | None = None) -> None:
        """error: what ended the training."""
        if (measure := self.measure) is not None:
            for name in reversed([*self._blocks]):
                self.end(name)
            measure.close(error)

    def begin(self, name: str) -> None:
        """Begins `step`, `input_wait`, or a phase; does nothing if it is open."""
        measure = self.measure
        if measure is None or name in self._blocks:
            return
        block = {"step": measure.micro_step, "input_wait": measure.waiting}.get(name, lambda: measure.phase(name))
        self._blocks[name] = contextlib.ExitStack()
        self._blocks[name].enter_context(block())

    def end(self, name: str) -> None:
        if name in self._blocks:
            self._blocks.pop(name).close()


def load_class(name: str, *modules: str, install: str) -> Any:
    """A class of the first module that is loaded, else of the first that can be imported. Raises PreflightError."""
    missing: ImportError | None = None
    for module in sorted(modules, key=lambda module: module not in sys.modules):
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            missing = error
    raise PreflightError(f"The callback needs {modules[0]}.", cause=str(missing), fix=f"pip install {install}")
