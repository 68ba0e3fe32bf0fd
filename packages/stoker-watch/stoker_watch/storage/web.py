"""Opens http and https addresses, for all of stoker. Python's own `urlopen` also opens files, ftp and data URLs, and
follows a server's redirect to ftp; what is asked of one host with a token it sends to any other."""

import urllib.error
import urllib.parse
import urllib.request
from typing import Any


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.lower().startswith(("http://", "https://")):
            raise urllib.error.URLError(f"it redirects to {newurl}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            request.headers = {name: value for name, value in request.headers.items() if name in _PUBLIC_HEADERS}
        return request


_PUBLIC_HEADERS = {"User-agent", "Content-type"}


def open_url(request: urllib.request.Request, *, timeout_s: float, proxies: dict[str, str] | None = None) -> Any:
    """The response. proxies: by scheme; None: those of the environment. Raises OSError (URLError, also for other
    schemes), ValueError, http.client.HTTPException."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener.open(request, timeout=timeout_s)
