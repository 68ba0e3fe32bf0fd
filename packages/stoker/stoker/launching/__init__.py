"""`stoker launch`: the same training somewhere else. No torch.

`spec.py` says what is launched, what a place is, and lists the places; `request.py` makes the spec and refuses what
would fail there; `jobs.py` remembers in the run folder what was submitted. What runs at a place is always `stoker
train`: it saves when it is told to stop, and its exit code says what to do next (75: the same command continues).
"""
