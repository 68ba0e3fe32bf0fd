"""Where the time of a run went: the ledger, profiler windows, system telemetry, and `stoker.measure` for training loops
that stoker did not write. Analyzing the records is `stoker_watch/diagnosis/`.
"""
