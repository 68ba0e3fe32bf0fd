"""Clocks and counters: where a run's time goes (`ledger`), and what driver, kernel and machine say meanwhile.

`ledger` is the first witness. `witness` writes the second one, from `gpu` (NVML) and `host` (/proc, cgroup, PSI), once
a second; `environment` says once what the run ran on. Explaining what they saw is `diagnose`.
"""
