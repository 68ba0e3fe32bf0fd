"""Training: `run.py` opens and closes a run, `loop.py` is the loop, `step.py` a step (docs/structure.md).

Defaults of settings: `defaults/`. Checkpoints: `resume.py`, `checkpoint.py`; in a bucket `bucket_run.py`.
Several processes: `parallel.py`. Neighbors: `data` delivers batches, `models` the losses, `report` the
screen, `stoker_watch.recording` the ledger.
"""
