"""A measured loop whose parts begin and end in calls of a framework, not in blocks; the base of both callbacks.

Not a framework's name in here, and no time of its own: `stoker.profiling.measure`.
"""

import contextlib
import importlib
import sys
from typing import Any

from stoker.errors import PreflightError
from stoker.profiling.measure.measure import Measure, measure


class Session:
    """Between `open` and `close`; outside of that, every call does nothing. settings: those of `stoker.measure`."""

    def __init__(self, run: str | None, settings: dict[str, Any]) -> None:
        self._measure: Measure | None = None
        self._run, self._settings = run, settings
        self._blocks: dict[str, contextlib.ExitStack] = {}

    def open(self, *, first_step: int) -> Measure:
        """first_step: optimizer steps that are done, by the framework's own count."""
        self._blocks = {}
        arguments = {"first_step": first_step} | self._settings
        self._measure = measure(self._run, **arguments).__enter__()
        self._measure.is_replaceable = True
        return self._measure

    @property
    def measure(self) -> Measure | None:
        """None outside of a training, and when another one has taken its place."""
        return None if self._measure is None or self._measure.closed else self._measure

    def close(self, error: BaseException | None = None) -> None:
        """error: what ended the training."""
        measure = self.measure
        if measure is None:
            return
        for stack in reversed(self._blocks.values()):
            stack.close()
        self._blocks = {}
        measure.close(error)

    def begin(self, name: str) -> None:
        """`step`, `part_of_step`, `input_wait`, or a phase; one that has begun already goes on."""
        measure = self.measure
        if measure is None or name in self._blocks:
            return
        block: contextlib.AbstractContextManager[None]
        if name == "step":
            block = measure.micro_step()
        elif name == "input_wait":
            block = measure.waiting()
        else:
            block = measure.phase(name)
        self._blocks[name] = contextlib.ExitStack()
        self._blocks[name].enter_context(block)

    def end(self, name: str) -> None:
        if name in self._blocks:
            self._blocks.pop(name).close()


def load_base_classes(class_names: dict[str, str], *, framework: str, install: str) -> tuple[type, ...]:
    """The callback classes of a framework that are loaded, else of the first that can be.

    places: module → name in it, in order. Raises PreflightError that says what to install.
    """
    loaded = [module for module in class_names if module.partition(".")[0] in sys.modules]
    classes: list[type] = []
    missing: ImportError | None = None
    for module in loaded or class_names:
        try:
            classes.append(getattr(importlib.import_module(module), class_names[module]))
        except ImportError as error:
            missing = error
        if classes and not loaded:
            break
    if not classes:
        raise PreflightError(f"The callback needs {framework}.", cause=str(missing), fix=f"pip install {install}")
    return tuple(dict.fromkeys(classes))
