"""A job of `diagnose_wild.py`: a program, its fault, and the causes that are a correct answer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.diagnosis.diagnose_outside import Around, nothing

HEALTHY = "healthy"


def place(file: str, function: str) -> str:
    """An answer: a line of this function, named with its classes and outer functions, takes the time."""
    return f"place {file}:{function}"


def no_fault(folder: Path) -> AbstractContextManager[Around]:  # noqa: ARG001 (the signature of Job.around)
    return nothing()


@dataclass(frozen=True, kw_only=True)
class Job:
    program: str
    """Name of the program in the table, e.g. "hand-written loop"."""
    fault: str
    """Name of the fault, e.g. "slow storage", or HEALTHY."""
    way: str
    """How it is brought about, e.g. "LD_PRELOAD delay"; for a healthy job, what is special about it."""
    command: tuple[str, ...]
    """What follows the interpreter: a script of this folder ("engine.py", or "-m", "torch.distributed.run", …) and its
    arguments. {wild}: this folder; {folder}: the job's own, empty folder, where it also starts; {server}: the address
    of `around.http_server`."""
    accepted: tuple[str, ...] = ()
    """Ids of causes that are a correct first finding, and `place` of the functions that are the fault; several where
    they are equally true. Empty: healthy."""
    python: str = "venv"
    """"venv": this interpreter; "peers": `.peers` with TensorFlow; "ultralytics": that of STOKER_ULTRALYTICS_PYTHON."""
    variables: dict[str, str] = field(default_factory=dict)
    around: Callable[[Path], AbstractContextManager[Around]] = no_fault
    """Gets the job's folder; the fault exists inside (`around.py`). Raises NotPermitted if it is impossible here."""
    meanwhile: Callable[[int], None] | None = None
    """Gets the process id of `stoker watch` at its start, in a thread; for example sends a signal after some time."""
    read_after_s: float | None = None
    """`stoker why` reads the job while it lives, after so many seconds; then it is killed. For jobs that hang."""
    exits: int | None = 0
    """Exit code of the job as intended; another one means that the job itself is wrong: n/a. None: any."""
    limit_s: float = 150.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.program, self.fault, self.way

    @property
    def name(self) -> str:
        return f"{self.program}: {self.fault} ({self.way})"
