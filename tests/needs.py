"""Packages that the jobs of some tests use: where one is not installed, these tests are skipped."""

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """For tests that start a program with these packages; for those that import them there is `pytest.importorskip`."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")
