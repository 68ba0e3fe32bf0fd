"""Where a custom job of Vertex AI wants its results: the folders in `AIP_CHECKPOINT_DIR`, `AIP_MODEL_DIR` and
`AIP_TENSORBOARD_LOG_DIR` (cloud.google.com/vertex-ai/docs/training/code-requirements), which are URIs or paths.

The run itself is in the folder for checkpoints, unless --run-dir names another: a restarted job continues it. The files
of TensorBoard are copied while it trains, the trained model when it is finished.
"""

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stoker.errors import StorageError
from stoker.report.tensorboard import FOLDER as TENSORBOARD
from stoker.runs.records import BEST, CONFIG, EVALUATION, FINAL, is_finished
from stoker.storage.store import open_store
from stoker.storage.uri import is_uri, parse_uri

COPY_INTERVAL_S = 30.0
"""As for the records of a run in a bucket (`uploads.py`)."""
MODEL_FILES = (BEST, FINAL, CONFIG, EVALUATION)


@dataclasses.dataclass(frozen=True)
class VertexFolders:
    """The folders that are set, without a slash at the end."""

    checkpoints: str | None = None
    model: str | None = None
    tensorboard: str | None = None


def vertex_folders(env: Mapping[str, str] = os.environ) -> VertexFolders:
    names = ("AIP_CHECKPOINT_DIR", "AIP_MODEL_DIR", "AIP_TENSORBOARD_LOG_DIR")
    return VertexFolders(*(env.get(name, "").rstrip("/") or None for name in names))


@contextlib.contextmanager
def copying_results(run: Path, folders: VertexFolders, report: Callable[[str, str], None]) -> Iterator[None]:
    """Copies what the block writes into the run's folder, about every COPY_INTERVAL_S and at the end.

    A folder that cannot be written is reported as a warning, once: training goes on, and the run has everything.
    """
    if folders.tensorboard is None and folders.model is None:
        yield
        return
    copier = _Copier(run, folders, report)
    thread = threading.Thread(target=copier.run_until_stopped, name="stoker-vertex", daemon=True)
    thread.start()
    try:
        yield
    finally:
        copier.stopped.set()
        thread.join()
        copier.copy(with_model=is_finished(run))


class _Copier:
    def __init__(self, run: Path, folders: VertexFolders, report: Callable[[str, str], None]) -> None:
        self._run, self._folders, self._report = run, folders, report
        self._copied: dict[Path, tuple[int, int]] = {}
        self._failed = False
        self.stopped = threading.Event()

    def run_until_stopped(self) -> None:
        while not self.stopped.wait(COPY_INTERVAL_S):
            self.copy(with_model=False)

    def copy(self, *, with_model: bool) -> None:
        """Copies the files that changed."""
        try:
            if self._folders.tensorboard is not None:
                for path in sorted((self._run / TENSORBOARD).rglob("*")):
                    self._copy_file(path, self._folders.tensorboard, path.relative_to(self._run / TENSORBOARD))
            if self._folders.model is not None and with_model:
                for name in MODEL_FILES:
                    self._copy_file(self._run / name, self._folders.model, Path(name))
        except (StorageError, OSError) as error:
            if not self._failed:
                self._failed = True
                self._report("warning", f"results are not copied to Vertex AI's folders: {error}")

    def _copy_file(self, path: Path, folder: str, name: Path) -> None:
        if not path.is_file():
            return
        status = path.stat()
        state = (status.st_size, status.st_mtime_ns)
        if self._copied.get(path) == state:
            return
        if is_uri(folder):
            uri = parse_uri(folder)
            open_store(uri).write(uri.child(name.as_posix()).key, path)
        else:
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        self._copied[path] = state
