"""Imports torch sooner, for the commands that train or use a model: two to three seconds of a start are its imports.

- The shared libraries of torch are loaded in a thread, which needs no GIL, while Python imports other packages. On a
  machine with one core nothing is won.
- The garbage collector pauses: the imports create some 350,000 objects that stay, and it would visit them again and
  again. Afterwards it leaves them alone (`gc.freeze`): a visit would stop a training step for 0.1 to 0.2 s.

Figures are in LOG.md, "Start-up".
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

WITHOUT_TORCH = (
    "numpy",
    "pyarrow",
    "cv2",
    "PIL.Image",
    "yaml",
    "psutil",
    "rich.console",
    "stoker_watch.diagnosis.engine",
)
"""What training imports, and what does not import torch."""
SET_BY_OTHERS = {"OPENBLAS_MAIN_FREE": "1", "LD_LIBRARY_PATH": ""}
"""Variables that numpy and cv2 add when they are imported. A new one moves the environment, which torch's libraries
read meanwhile in their thread: a segmentation fault. One that is there already is replaced in its place."""


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """For a block that imports torch and code that uses it."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    for name, value in SET_BY_OTHERS.items():
        os.environ.setdefault(name, value)
    try:
        loading = threading.Thread(target=_load_torch_libraries, name="torch libraries", daemon=True)
        loading.start()
        for name in WITHOUT_TORCH:
            importlib.import_module(name)
        yield
        gc.freeze()
    finally:
        gc.enable()


def _load_torch_libraries() -> None:
    """Loads what `import torch` loads, in its order and with its flags. What fails here, fails there with a message."""
    spec = importlib.util.find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    # Called as a function of libc, because ctypes.CDLL holds the GIL while it loads.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, scope in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        dlopen(os.fsencode(folder / name), os.RTLD_NOW | scope)
