"""Tests that measure real time, on machines whose cores other programs use, too."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ATTEMPTS = 3


def undisturbed_once(test: Callable[..., None]) -> Callable[..., None]:
    """Repeats a test of `tmp_path` and `monkeypatch` that fails, each time in a folder of its own.

    Other programs can disturb one measurement; if it is off three times in a row, the code is wrong.
    """

    @functools.wraps(test)
    def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **parameters: Any) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            folder = tmp_path / f"attempt-{attempt}"
            folder.mkdir()
            with monkeypatch.context() as patch:
                try:
                    test(folder, patch, **parameters)
                except AssertionError:
                    if attempt == ATTEMPTS:
                        raise
                else:
                    return

    return wrapper
