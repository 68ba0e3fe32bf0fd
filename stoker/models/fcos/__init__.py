"""FCOS."""
