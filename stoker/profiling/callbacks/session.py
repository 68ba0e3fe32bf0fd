"""The base of both callbacks: a measured loop whose parts begin and end in calls of a framework, not in blocks.

It contains no framework's names and no timing of its own; that is `stoker.profiling.measure`.
"""

import contextlib
import importlib
import sys
from typing import Any

from stoker.errors import PreflightError
from stoker.profiling.measure.measure import Measure, measure


class Session:
    """Records between `open` and `close`; at other times every call does nothing. settings: of `stoker.measure`."""

    def __init__(self, run: str | None, settings: dict[str, Any]) -> None:
        self._measure: Measure | None = None
        self._run, self._settings = run, settings
        self._blocks: dict[str, contextlib.ExitStack] = {}

    def open(self, *, first_step: int) -> Measure:
        """first_step: optimizer steps done, by the framework's count."""
        self._blocks = {}
        arguments = {"first_step": first_step} | self._settings
        self._measure = measure(self._run, **arguments).__enter__()
        self._measure.is_replaceable = True
        return self._measure

    @property
    def measure(self) -> Measure | None:
        """None outside of a training, or if another training has replaced this one."""
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
        """Begins `step`, `input_wait`, or a phase; does nothing if it is open."""
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
    """The callback base classes of a framework: of its loaded modules, else of the first that can be imported.

    class_names: module → class in it, in order. Raises PreflightError with what to install.
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


def define_callback(
    module: dict[str, Any], name: str, hooks: type, class_names: dict[str, str], *, framework: str, install: str
) -> type:
    """A module's `__getattr__`: defines its `StokerCallback` on first use, since the base class is the framework's.

    module: its globals. hooks: the methods of the callback. Raises AttributeError for other names; otherwise as
    `load_base_classes`.
    """
    if name != "StokerCallback":
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}; it has StokerCallback")
    bases = load_base_classes(class_names, framework=framework, install=install)
    module[name] = type(name, (hooks, *bases), {"__doc__": hooks.__doc__})
    callback: type = module[name]
    return callback
