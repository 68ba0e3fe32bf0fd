"""The causes as data, a file for each reason: no code, and every threshold with its source.

`cause.py` says what a row is, `../catalogue.py` puts the rows together, `../rules/` has the code that looks, and
docs/verdicts.md is made of them for people.
"""
