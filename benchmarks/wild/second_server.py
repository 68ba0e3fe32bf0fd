"""A slow HTTP service: `python second_server.py FOLDER PORT LATENCY_S BYTES_PER_S`.

GET returns a file of FOLDER after LATENCY_S, at BYTES_PER_S (0: unlimited). POST answers "ok" after LATENCY_S.
"""

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BLOCK = 8192


def main() -> None:
    folder, port, latency_s, bytes_per_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bytes) -> None:
            time.sleep(latency_s)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for at in range(0, len(body), BLOCK):
                block = body[at : at + BLOCK]
                if bytes_per_s:
                    time.sleep(len(block) / bytes_per_s)
                self.wfile.write(block)

        def do_GET(self) -> None:
            self.answer((folder / self.path.lstrip("/")).read_bytes())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(b"ok")

        def log_message(self, *args: object) -> None:
            """Writes no line for a request."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
