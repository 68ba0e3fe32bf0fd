"""The settings of a run (`settings`), the same as keyword arguments for type checkers (`keywords`), and named starting
points (`recipes`). Settings that are not set are filled in by `stoker/training/defaults/`.
"""
