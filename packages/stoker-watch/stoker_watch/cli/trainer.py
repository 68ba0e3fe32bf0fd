"""The trainer (the package `stoker`), where it is installed: the one place that knows of it."""

import importlib
import importlib.util
from types import ModuleType

from stoker_watch.errors import UsageError

_SPEC = importlib.util.find_spec("stoker")
IS_INSTALLED = _SPEC is not None and _SPEC.origin is not None  # not just a folder of this name
COMMANDS = (
    "train", "check", "plan", "launch", "tune", "search", "eval", "predict", "export", "import", "data", "models",
)  # fmt: skip
"""Those of the trainer."""


def require(what: str, module: str = "stoker.cli.commands") -> ModuleType:
    """A module of the trainer. what: what needs it. Raises UsageError if the trainer is not installed."""
    if not IS_INSTALLED:
        raise UsageError(f"{what} needs the trainer: pip install stoker")
    return importlib.import_module(module)
