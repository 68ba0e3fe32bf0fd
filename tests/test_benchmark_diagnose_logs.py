"""A log counts as right if its first finding above "info" is accepted; a healthy one, if it has none."""

import json
from pathlib import Path

from benchmarks.diagnosis.diagnose_logs import diagnose_logs, parser

FULL = "OSError: [Errno 28] No space left on device: '/data/last.pt'"
LOGS = [
    {"lines": FULL, "accepted": ["disk_full", "disk_quota_exceeded"], "healthy": False},
    {"lines": FULL, "accepted": ["shared_memory_full"], "healthy": False},
    {"lines": "epoch 1 loss 0.5", "accepted": ["diverged"], "healthy": False},
    {"lines": "epoch 1 loss 0.5", "accepted": [], "healthy": True},
    {"lines": FULL, "accepted": [], "healthy": True},
]


def test_right_and_wrong_findings_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    rows = (log | {"source": f"owner/name#{number}", "truth": "as it was"} for number, log in enumerate(LOGS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = diagnose_logs(parser().parse_args(["--logs", str(path)]))
    assert [row["right"] for row in report.rows] == [True, False, False, True, False]
    assert [row["found"] for row in report.rows] == ["disk_full", "disk_full", "nothing", "nothing", "disk_full"]
    assert [round(bar.value, 3) for bar in report.bars] == [0.333, 0.5]
    assert "lines" not in report.rows[0]  # of threads with other licenses
