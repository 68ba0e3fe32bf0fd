"""`stoker.measure`: the ledger and the system telemetry around a training loop that stoker did not write.

`measure.py` is the public object, `run_writer.py` writes the records and shares the run folder between ranks,
`torch_hooks.py` observes torch without help of the loop, `logged_scalars.py` holds losses and counts. For users:
docs/measure.md. Callbacks for frameworks: `stoker/profiling/callbacks/`. Jobs whose code is not changed:
`stoker/watch/`.
"""
