"""Monitoring of a running job: alerts, Prometheus metrics, JSON lines for cloud logging, experiment trackers.

A background thread (`monitor.py`) reads new lines of the run's records and passes each one to the enabled sinks:
`alerts.py` with `delivery.py`, `prometheus.py`, trackers, and lines of JSON. Nothing here runs in the training loop, so
a sink that fails or hangs cannot delay it. The flags are in `options.py`.
"""
