"""The data of the tests of faults, and the run that no fault disturbs."""

from pathlib import Path

import pytest

from tests.chaos.harness import train
from tests.drawn import draw


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="session")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ended = train(data, tmp_path_factory.mktemp("undisturbed"))
    assert ended.code == 0, ended.output
    return ended.run
