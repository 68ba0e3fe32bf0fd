"""Instrumentation of training loops that stoker did not write: `stoker_hook`, a package without stoker and without
dependencies. `stoker watch` puts this folder on the PYTHONPATH of a job, whose Pythons then import `sitecustomize.py`;
`stoker_watch.measure` and distributed trainings use `stoker_hook/instruments.py` in their own process."""
