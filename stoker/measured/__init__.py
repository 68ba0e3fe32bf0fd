"""`stoker.measure`: the ledger and the second witness around a training loop that stoker did not write.

`measure.py` is what a user holds, `book.py` where the records go and what several ranks agree on, `inside.py` what is
learnt from torch without the loop's help, `numbers.py` losses and counts. For users: docs/measure.md. Callbacks for
frameworks: `stoker/integrations/`. Jobs that nobody may change: `stoker/watch/`.
"""
