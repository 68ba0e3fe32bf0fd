"""Explains a run: what its records show that it lost, the cause, and what to change.

`causes/` has the rules of the causes, whose rows are in `knowledge/causes.toml`; `engine.py` runs them, `reader.py`
reads the records, `notes.py` has what needs no action, `postmortem.py` explains an end. Nothing here trains, prints or
imports torch: `stoker why` works on any machine that can read the run folder.
"""
