"""Python imports this module at its start if its folder is on PYTHONPATH: so `stoker watch` enters a job's processes.

It starts `stoker_hook`, removes the folder from the path and imports the `sitecustomize` that Python would have found
without it. Any Python may import it, also one of an environment without stoker: only the standard library, and syntax
of Python 3.8. If it fails, the job goes on.
"""

import sys


def _start():  # type: () -> None
    import os

    hook_dir = os.path.dirname(os.path.abspath(__file__))
    directory = os.environ.get("STOKER_HOOK")
    try:
        if directory and sys.version_info >= (3, 8):
            import stoker_hook  # type: ignore[import-not-found, unused-ignore]

            stoker_hook.start(directory)
    except Exception as error:  # noqa: BLE001 (the job goes on without the hook)
        try:
            with open(os.path.join(directory or hook_dir, "errors-%d" % os.getpid()), "a") as file:  # noqa: UP031 (any Python)
                file.write("start: %r\n" % error)  # noqa: UP031
        except OSError:  # the watcher reports that no process loaded the hook
            pass
    sys.path[:] = [entry for entry in sys.path if entry != hook_dir]


def _import_shadowed_sitecustomize():  # type: () -> None
    """Imports the job's own sitecustomize in place of this module; its errors are not handled."""
    this_module = sys.modules.pop(__name__, None)
    try:
        import sitecustomize  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            raise
        if this_module is not None:
            sys.modules[__name__] = this_module


if __name__ == "sitecustomize":
    _start()
    _import_shadowed_sitecustomize()
