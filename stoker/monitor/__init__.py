"""A run looked after while it lives: alerts, metrics for Prometheus, JSON lines for cloud logging, experiment trackers.

`monitor.py` follows the records that the run writes (`follow.py`) on a thread of its own, and hands each new line to
whoever was asked for: `alerts.py` and `delivery.py`, `prometheus.py`, `log.py`, `trackers.py`. Nothing here is part of
the loop, so nothing that fails or hangs here can hold it up. What was asked for is `options.py`.
"""
