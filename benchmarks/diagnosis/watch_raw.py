"""`stoker watch` that also keeps the stacks which its windows were made of, for recordings (`diagnose_recorded.py`).

    python -m benchmarks.diagnosis.watch_raw watch --run-dir RUN -- COMMAND …

RUN/raw-stacks.jsonl has a line for each window: the arguments of `frames.make_window`, and its samples, each a stack of
numbers of frames, the innermost first, and how often it was seen. "frames" are those that no line before it has:
function, file, line, and where its expression ends, or null. So another reading of stacks can be tried without running
the job.
"""

import json
import sys
from pathlib import Path
from typing import Any

from stoker_watch.cli.app import main
from stoker_watch.recording import frames, stacks
from stoker_watch.recording.frames import Frame, Samples
from stoker_watch.runs.schemas import StackWindow

RAW_STACKS = "raw-stacks.jsonl"


class RawStacks:
    """Writes the lines, with a number for each frame."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: dict[Frame, int] = {}

    def make_window(self, samples: Samples, **arguments: Any) -> StackWindow | None:
        window = frames.make_window(samples, **arguments)
        if window is not None:
            known = len(self._numbers)
            seen = [([self._number(frame) for frame in stack], count) for stack, count in samples]
            told = {name: value for name, value in arguments.items() if name != "compiled"}
            line = told | {"frames": list(self._numbers)[known:], "samples": seen}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return window

    def _number(self, frame: Frame) -> int:
        return self._numbers.setdefault(frame, len(self._numbers))


if __name__ == "__main__":
    run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    setattr(stacks, "make_window", RawStacks(run / RAW_STACKS).make_window)  # noqa: B010 (its sampler calls this one)
    main()
