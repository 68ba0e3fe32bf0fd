"""Programs of `diagnose_wild.py`, written as users write them, and the lists of jobs that run them."""
