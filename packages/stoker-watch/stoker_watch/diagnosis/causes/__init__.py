"""The rules of the causes, one file for each topic; their rows are in `knowledge/causes.toml`.

`cause.py` defines what a row is, `shared.py` has helpers of the rules, and `../engine.py` runs them.
`stoker why --explain ID` prints a row. How to add one: docs/add-a-cause.md.
"""
