"""The servers as fixtures. A test elsewhere opens them itself: `from tests.watch.storage.servers import s3_server`."""

from collections.abc import Iterator

import pytest

from tests.watch.storage import servers


@pytest.fixture(scope="session")
def s3() -> Iterator[servers.Server]:
    with servers.s3_server() as server:
        yield server


@pytest.fixture(scope="session")
def google() -> Iterator[servers.Server]:
    with servers.google_server() as server:
        yield server


@pytest.fixture(scope="session")
def web() -> Iterator[servers.Server]:
    with servers.web_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this folder finds credentials, or asks for them."""
    servers.apply(monkeypatch, servers.NO_CREDENTIALS)
