"""How many of the nodes that there are an attempt of an elastic training takes: the most whose devices can share the
batch equally, because a run keeps its batch on any number of devices.

Places ask at each start of a job: a driver by `choose_nodes`, a batch script by
`python -m stoker.launching.elastic RUN SETTINGS DEVICES LEAST NODE…`, which prints the nodes, with commas. No torch.
"""

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.training.cluster import can_divide
from stoker_watch.errors import StokerError
from stoker_watch.runs.records import open_run, read_settings

SETTINGS = ("batch_size", "mosaic")
"""That decide it. The run has them from its first start on; before, those that the user set count."""


def read_batch(run: Path) -> dict[str, Any]:
    """Those of SETTINGS with which the run in this folder was started; empty before. Raises UsageError."""
    tables = read_settings(run) or {}
    found = {name: value for section, table in tables.items() if section != "reasons" for name, value in table.items()}
    return {name: found[name] for name in SETTINGS if name in found}


def choose_nodes(run: str, settings: Mapping[str, Any], *, devices: int, least: int, nodes: int) -> int:
    """The most of `nodes`, and at least `least`, that can train; `nodes` if none can: the training says why and ends
    with exit code 2. devices: of each node; settings: of SETTINGS, those that the user set."""
    with contextlib.suppress(StokerError):  # it has not been started, or cannot be read: the training says so
        settings = read_batch(open_run(run)) or settings
    return next((count for count in range(nodes, least - 1, -1) if can_divide(settings, count * devices)), nodes)


def describe_idle(idle: list[str], used: int) -> str:
    return f"{used} nodes train, as more devices cannot share the batch equally; idle: {', '.join(idle)}"


def main(run: str, settings: str, devices: str, least: str, *nodes: str) -> None:
    count = choose_nodes(run, json.loads(settings), devices=int(devices), least=int(least), nodes=len(nodes))
    if count < len(nodes):
        print(f"stoker: {describe_idle(list(nodes[count:]), count)}", file=sys.stderr)
    print(",".join(nodes[:count]))


if __name__ == "__main__":
    main(*sys.argv[1:])
