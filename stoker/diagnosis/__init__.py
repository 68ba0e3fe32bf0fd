"""Explains a run: what its records say it lost, why, and what to change.

`catalogue.py` holds the causes and every threshold as data; `rules.py` the pure functions that look for them. Nothing
here trains, shows or imports torch: `stoker why` works on any machine that can read the run's folder.
"""
