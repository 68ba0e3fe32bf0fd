"""A rank of `test_shard_training.py`: `stoker train`, with a record of the images that each of its steps trained on.

    python -m tests.trainer.training.recorded_rank RECORD STOP_AFTER train DATA …

Appends a line {"step", "images"} to RECORD after each step. images: rows of the index, those of the batch that the
forward pass got. STOP_AFTER: the step after which this rank sends itself a SIGTERM; 0: none.
"""

import json
import os
import signal
import sys
from pathlib import Path

from stoker.data.batch import Batch
from stoker.training.loop import Training
from stoker.training.parallel import SingleProcess
from stoker_watch.cli.app import main


def record_steps(record: Path, stop_after: int) -> None:
    augment, step = SingleProcess.augment, Training.step
    trained_on: list[int] = []

    def recorded_augment(self: SingleProcess, batch: Batch) -> Batch:
        augmented = augment(self, batch)
        trained_on[:] = augmented.image_index.tolist()
        return augmented

    def recorded_step(self: Training) -> None:
        step(self)
        with record.open("a") as file:
            file.write(json.dumps({"step": self.state.step, "images": trained_on}) + "\n")
        if self.state.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    SingleProcess.augment = recorded_augment  # type: ignore[method-assign]
    Training.step = recorded_step  # type: ignore[method-assign]


if __name__ == "__main__":
    _, record_path, stop_after_text, *arguments = sys.argv
    record_steps(Path(record_path), int(stop_after_text))
    sys.argv[1:] = arguments
    main()
