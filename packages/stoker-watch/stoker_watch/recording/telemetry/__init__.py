"""System telemetry: what the driver, the kernel and the machine report while a run trains.

`sampler` writes a line per second from `gpu` (NVML) and `host` (/proc, cgroup, PSI), in a thread that is independent of
the training; `environment` describes once what the run ran on. Where the time of the training went is
`stoker_watch/recording/ledger.py`; analyzing the records is `stoker_watch/diagnosis/`.
"""
