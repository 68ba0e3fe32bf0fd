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
        self._parts: dict[str, contextlib.ExitStack] = {}

    def open(self, *, first_step: int) -> Measure:
        """first_step: optimizer steps that are done, by the framework's own count."""
        self._parts = {}
        asked = {"first_step": first_step} | self._settings
        self._measure = measure(self._run, **asked).__enter__()
        self._measure.gives_way = True
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
        for part in reversed(self._parts.values()):
            part.close()
        self._parts = {}
        measure.close(error)

    def begin(self, part: str) -> None:
        """`step`, `part_of_step`, `input_wait`, or a phase; one that has begun already goes on."""
        measure = self.measure
        if measure is None or part in self._parts:
            return
        block: contextlib.AbstractContextManager[None]
        if part == "step":
            block = measure.part_of_step()
        elif part == "input_wait":
            block = measure.waiting()
        else:
            block = measure.phase(part)
        self._parts[part] = contextlib.ExitStack()
        self._parts[part].enter_context(block)

    def end(self, part: str) -> None:
        if part in self._parts:
            self._parts.pop(part).close()


def base_classes(places: dict[str, str], *, what: str, install: str) -> tuple[type, ...]:
    """The callback classes of a framework that are loaded, else of the first that can be.

    places: module → name in it, in order. Raises PreflightError that says what to install.
    """
    loaded = [module for module in places if module.partition(".")[0] in sys.modules]
    found: list[type] = []
    missing: ImportError | None = None
    for module in loaded or places:
        try:
            found.append(getattr(importlib.import_module(module), places[module]))
        except ImportError as error:
            missing = error
        if found and not loaded:
            break
    if not found:
        raise PreflightError(f"The callback needs {what}.", cause=str(missing), fix=f"pip install {install}")
    return tuple(dict.fromkeys(found))
