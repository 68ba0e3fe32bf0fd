"""Where the time of a run went: the ledger, stacks, telemetry, and `stoker_watch.measure` for training loops that
stoker did not write. Profiler windows are the trainer's (`stoker/training/trace.py`); `diagnosis/` reads the records.
"""
