"""A trained detector at work: load it (`model`), run it over images (`predict`) or tiles of large ones (`tiles`), and
draw what it detects (`draw`).
"""
