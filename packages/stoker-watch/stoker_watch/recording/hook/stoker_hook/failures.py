"""Failures of the hook: each is written once into the state directory, and the job goes on."""

import os

STATE_DIR = ""
"""Set by `start` in `__init__.py` before other modules are imported."""
_reported: "set[str]" = set()


def report_failure(location: str, error: BaseException) -> None:
    """Writes the error, once per location."""
    if location in _reported or len(_reported) > 20:
        return
    _reported.add(location)
    try:
        with open(os.path.join(STATE_DIR, "errors-%d" % os.getpid()), "a") as file:  # noqa: UP031 (quick to import)
            file.write(f"{location}: {type(error).__name__}: {error}\n")
    except Exception:  # noqa: BLE001 (the watcher is gone, the disk is full, or Python ends)
        return
