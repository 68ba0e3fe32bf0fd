"""What is asked of a web server: it leads to no other scheme, and tokens stay with the host that was asked."""

import http.server
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker_watch
from stoker_watch.storage import clients
from stoker_watch.storage.web import open_url

PACKAGE = Path(stoker_watch.__file__).parent


class Server:
    """Redirects each request to `target`; without one it answers. asked: (method, headers)."""

    def __init__(self) -> None:
        server = self
        self.target = ""
        self.asked: list[tuple[str, dict[str, str]]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.command, {name.lower(): text for name, text in self.headers.items()}))
                self.send_response(302 if server.target else 200)
                if server.target:
                    self.send_header("Location", server.target)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    found = [Server(), Server()]
    yield found
    for server in found:
        server.close()


@pytest.mark.parametrize("scheme", ["ftp", "file", "data", "FTP"])
def test_no_other_scheme_is_opened_or_redirected_to(servers: list[Server], tmp_path: Path, scheme: str) -> None:
    (tmp_path / "secret").write_text("secret")
    address = {"data": "data:,secret"}.get(scheme, f"{scheme}://{servers[1].url[7:]}{tmp_path}/secret")
    with pytest.raises(urllib.error.URLError):
        open_url(urllib.request.Request(address), timeout_s=30)
    servers[0].target = address
    with pytest.raises(urllib.error.URLError):
        open_url(urllib.request.Request(servers[0].url), timeout_s=30)
    assert [len(server.asked) for server in servers] == [1, 0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_token_stays_with_the_host_that_was_asked(servers: list[Server], number: int) -> None:
    headers = {"Authorization": "Bearer secret", "X-aws-ec2-metadata-token": "secret", "User-Agent": "stoker"}
    first, other = servers
    first.target = f"{(other if number else first).url}/there"
    request = urllib.request.Request(first.url, headers=headers)
    if number == 0:
        with pytest.raises(urllib.error.HTTPError, match="infinite loop"):
            open_url(request, timeout_s=30)
        assert "secret" in first.asked[-1][1]["authorization"]
    else:
        with open_url(request, timeout_s=30):
            pass
        assert "secret" not in str(other.asked)
        assert other.asked[0][1]["user-agent"] == "stoker"


def test_every_caller_refuses_ftp(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing connects to the second server, whatever asks the first one."""
    servers[0].target = f"ftp://{servers[1].url[7:]}/x"
    opened: list[str] = []
    monkeypatch.setattr(urllib.request.FTPHandler, "ftp_open", lambda _, request: opened.append(request.full_url))
    monkeypatch.setenv("AWS_ENDPOINT_URL", servers[0].url)
    assert clients.bucket_region("bucket") is None
    assert clients._query_metadata(servers[0].url, {}) is None
    assert len(servers[0].asked) == 2
    assert opened == []


def test_there_is_one_opener() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "web.py"]
    pattern = r"urlopen\(|urlretrieve\(|build_opener\(|OpenerDirector\("
    assert [path.name for path in files if re.search(pattern, path.read_text())] == []
