"""The causes: one file for each cause, or for a few that share their arithmetic, with the row and its rule together.

`cause.py` defines what a row is, `shared.py` has helpers of the rules, and `../catalog.py` lists all causes.
docs/causes.md is generated from the rows. How to add one: docs/add-a-cause.md.
"""
