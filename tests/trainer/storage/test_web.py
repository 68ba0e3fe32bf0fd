"""What the trainer asks of web servers goes through the one opener of `stoker_watch.storage.web`."""

import re
import urllib.request
from pathlib import Path

import pytest

import stoker
from stoker.preflight import cloud
from tests.watch.storage.test_web import Server, servers

__all__ = ["servers"]


def test_every_caller_refuses_ftp(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing connects to the second server, whatever asks the first one."""
    servers[0].target = f"ftp://{servers[1].url[7:]}/x"
    opened: list[str] = []
    monkeypatch.setattr(urllib.request.FTPHandler, "ftp_open", lambda _, request: opened.append(request.full_url))
    assert cloud._request(servers[0].url, {}, timeout_s=30.0) is None
    assert len(servers[0].asked) == 1
    assert opened == []


def test_there_is_one_opener() -> None:
    files = list(Path(stoker.__file__).parent.rglob("*.py"))
    pattern = r"urlopen\(|urlretrieve\(|build_opener\(|OpenerDirector\("
    assert [path.name for path in files if re.search(pattern, path.read_text())] == []
