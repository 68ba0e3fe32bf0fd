"""The settings of a run (`settings`), the same as keyword arguments for type checkers (`keywords`), and named starting
points (`recipes`). What fills in the settings that nobody set is `stoker/training/defaults/`.
"""
