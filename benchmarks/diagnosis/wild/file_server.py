"""A slow HTTP server, a process: `python file_server.py FOLDER BYTES_PER_S DELAY_S`. Prints its address, and ends with
its standard input. GET: a file of the folder; / lists all, a path a line. POST: reads the body and answers "ok"."""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    folder, bytes_per_s, delay_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = folder / self.path.strip("/")
            if self.path == "/":
                names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
                self.answer(200, "\n".join(names).encode(), delay_s=0.0)
            elif path.is_file():
                self.answer(200, path.read_bytes(), delay_s)
            else:
                self.answer(404, b"not found", delay_s)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(200, b"ok", delay_s)

        def answer(self, code: int, body: bytes, delay_s: float) -> None:
            time.sleep(delay_s + (len(body) / bytes_per_s if bytes_per_s else 0.0))
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
