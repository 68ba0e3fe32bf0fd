"""`stoker.measure`: the ledger and the second witness around a training loop that stoker did not write.

`measure.py` is what a user holds, `run_writer.py` where the records go and what several ranks agree on, `inside.py`
what is learnt from torch without the loop's help, `logged_scalars.py` losses and counts. For users: docs/measure.md.
Callbacks for frameworks: `stoker/profiling/callbacks/`. Jobs that nobody may change: `stoker/watch/`.
"""
