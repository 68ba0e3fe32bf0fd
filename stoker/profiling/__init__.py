"""Where the time of a run went: the ledger, profiler windows, system telemetry, and `stoker.measure` for loops that
stoker did not write. Explaining the records is `stoker/diagnosis/`.
"""
