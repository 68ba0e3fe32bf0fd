"""`stoker why --all` of a bucket: the sums of all runs in it; reading changes nothing there."""

from pathlib import Path

import pytest

from stoker_watch.report.explain import explain_run
from stoker_watch.report.runs_summary import summarize_runs
from stoker_watch.runs.records import PROBES, TRACES, RunFolder
from stoker_watch.runs.schemas import Probe, TraceWindow
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.watch.report.runs import write_run
from tests.watch.storage.servers import Server, apply


def test_all_runs_of_a_bucket(s3: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served = s3.bucket()
    apply(monkeypatch, served.environment)
    top = parse_uri(f"{served.uri}/runs")
    store = open_store(top)
    for name, wait in (("a", 100.0), ("team/x/b", 300.0)):
        run = write_run(tmp_path / name, phases={"compute": 900.0, "input_wait": wait})
        folder = RunFolder(run, 1)
        folder.append(TRACES, TraceWindow(t=1.0, attempt=1, step=1, window_steps=1, wall_s=1.0, busy_s=0.5))
        numbers = dict.fromkeys(("before_img_per_s", "after_img_per_s", "ratio", "ratio_low", "ratio_high"), 1.0)
        folder.append(PROBES, Probe(t=1.0, attempt=1, probe="compiled", steps=1, **numbers))
        folder.close()
        for file in run.iterdir():
            store.write(top.child(f"{name}/{file.name}").key, file.read_bytes())
    store.write(top.child("notes.txt").key, b"no run")
    before = [info.key for info in store.list(top.key)]
    fleet = summarize_runs(str(top))
    assert (fleet.runs, fleet.num_unreadable) == (2, 0)
    assert fleet.device_s == 2 * (1000.0 + 1200.0)
    assert fleet.worst_runs[0].run == str(top.child("team/x/b"))
    assert [info.key for info in store.list(top.key)] == before
    found = explain_run(str(top.child("a")))
    assert "traces.jsonl" in found.evidence_paths
    assert [probe.probe for probe in found.probes] == ["compiled"]
