"""Training. `loop.py` is the loop; `start.py` builds what it needs, `state.py` describes it. A step: `forward.py`,
`optim.py`.

Defaults of settings: `defaults/`. Checkpoints: `checkpoint.py`; in a bucket `bucket_run.py`, `uploads.py`. Signals and
rollbacks: `recovery.py`. Neighbors: `data` delivers batches, `models` the losses, `profiling` the ledger, `report` the
screen.
"""
