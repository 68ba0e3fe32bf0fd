"""The port for Prometheus of a real training, against strangers."""

import sys
from pathlib import Path

import pytest

from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw
from tests.watch.monitor.test_metrics_port import FEW_DESCRIPTORS, flood

TRAIN = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_DESCRIPTORS}, {FEW_DESCRIPTORS}))
from stoker_watch.cli.app import main
sys.argv[0] = "stoker"
main()
"""


@pytest.mark.slow  # tests/watch/monitor has the same with a loop that takes a second
def test_strangers_do_not_end_a_training(tmp_path: Path) -> None:
    """A training with few descriptors, whose port strangers hold as many connections to as they get."""
    data, run = draw(tmp_path / "shapes", train=8, val=2), tmp_path / "run"
    flags = (
        "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "2", "--steps", "300",
        "--workers", "1", "--precision", "fp32", "--metrics-port", "0", "--run-dir", str(run),
    )  # fmt: skip
    command = [sys.executable, "-c", TRAIN, "train", str(data), *flags]
    flood(command, run, lambda held: held >= 2 * FEW_DESCRIPTORS, lambda: None)
    kinds = [event.kind for event in read_lines(run, EVENTS, Event)]
    assert kinds[-1] == "finished"
    assert "evaluated" in kinds
