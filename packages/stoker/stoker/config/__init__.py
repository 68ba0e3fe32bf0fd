"""The settings of a run and named starting points (`settings`), the same as keyword arguments for type checkers
(`keywords`). Settings that are not set are filled in by `stoker/training/defaults/`.
"""
