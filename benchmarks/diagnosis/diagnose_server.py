"""The object server of `diagnose.py`, a process: `python diagnose_server.py FOLDER BUCKET BYTES_PER_S LATENCY_S`.

Google's API with the folder's files, behind a slow link; both are those of the tests (`tests/watch/storage`). Prints
its address, and ends with its standard input.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.watch.storage.object_server import GoogleXml, ObjectServer
from tests.watch.storage.proxy import Conditions, Proxy


def main() -> None:
    folder, bucket, bytes_per_s, latency_s = sys.argv[1:]
    conditions = Conditions(latency_s=float(latency_s), bytes_per_s=float(bytes_per_s) or None)
    with ObjectServer(GoogleXml) as server, Proxy(server.url, conditions) as proxy:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                server.objects.put(bucket, str(path.relative_to(folder)), path.read_bytes())
        print(proxy.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
