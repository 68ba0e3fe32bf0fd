"""The runner of `stoker tune`: with a process that speaks the protocol and computes nothing, and end to end."""

import dataclasses
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import Config, from_toml
from stoker.errors import DataError, UsageError
from stoker.runs.records import PROBES, read_lines
from stoker.runs.schemas import TRIAL_STATES, Probe
from stoker.tuning import runner
from stoker.tuning.runner import TuneRequest, tune

FAKE = (sys.executable, str(Path(__file__).with_name("fake_trial.py")))
BAD = Config().replace(
    batch_size=2, workers=1, worker_processes=0, cache="none", eval_every="50", max_duration="10ep", image_size=(64, 64)
)


@pytest.fixture
def request_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneRequest:
    monkeypatch.setattr(runner, "_cache_kinds", lambda *_: ["disk", "ram"])
    return TuneRequest(target="demo", config=BAD, out=tmp_path / "tune", command=FAKE)


def test_changes_that_pay_and_train_the_same_are_kept(request_: TuneRequest) -> None:
    said: list[str] = []
    result = tune(request_, said.append)
    assert result.changes["cache"] == "ram"
    assert result.changes["batch_size"] > 2
    by_cache = {trial.changes.get("cache"): trial for trial in result.trials if trial.probe == "cache"}
    assert by_cache["disk"].state == "failed"
    assert "another training" in by_cache["disk"].reason
    assert result.confirmation is not None
    assert result.confirmation.ratio_low > 1
    config, reasons = from_toml(Path(result.config))
    assert (config.run.cache, config.run.batch_size) == ("ram", result.changes["batch_size"])
    assert not {"cache", "batch_size", "lr"} & reasons.keys()
    verified = {finding.id: finding for finding in result.findings if finding.config_patch}
    assert verified["slow_decode"].probe_result is not None
    assert verified["slow_decode"].probe_result.startswith("confirmed by")
    assert {trial.state for trial in result.trials} <= set(TRIAL_STATES)
    assert any("unavailable" in text for text in said)


def test_a_killed_tuning_continues_with_the_next_trial(request_: TuneRequest) -> None:
    whole = tune(request_, lambda _: None)
    assert request_.out is not None
    file = request_.out / PROBES
    lines = file.read_bytes().splitlines(keepends=True)
    keep = next(k for k, line in enumerate(lines) if b'"probe":"cache"' in line and b'"state":"run"' in line) + 1
    file.write_bytes(b"".join(lines[:keep]) + lines[keep][:20])  # in the middle of a line
    said: list[str] = []
    again = tune(request_, said.append)
    assert said[0].startswith("continuing ")
    assert [trial.trial for trial in again.trials] == list(range(1, len(again.trials) + 1))
    assert again.changes == whole.changes
    assert (
        sum(probe.probe == "bounds" and probe.state == "passed" for probe in read_lines(request_.out, PROBES, Probe))
        == 1
    )


def test_trials_of_another_machine_are_measured_again_and_of_other_data_refused(request_: TuneRequest) -> None:
    tune(request_, lambda _: None)
    assert request_.out is not None
    file = request_.out / PROBES
    lines = list(read_lines(request_.out, PROBES, Probe))
    elsewhere = [msgspec.structs.replace(line, machine="a GPU machine") for line in lines]
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in elsewhere))
    said: list[str] = []
    result = tune(request_, said.append)
    assert "another machine" in said[0]
    assert result.trials[0].machine == result.machine
    changed = [msgspec.structs.replace(line, data="other") for line in lines]
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in changed))
    with pytest.raises(DataError, match="other data"):
        tune(request_, said.append)


def test_bad_input_is_refused_before_anything_runs(request_: TuneRequest) -> None:
    for change, text in (({"budget_s": 30.0}, "too short"), ({"levers": ("wrokers",)}, "no lever")):
        with pytest.raises(UsageError, match=text):
            tune(dataclasses.replace(request_, **change), lambda _: None)
    assert request_.out is not None
    assert not request_.out.exists()


def test_first_settings_that_fail_end_the_tuning(request_: TuneRequest) -> None:
    result = tune(dataclasses.replace(request_, config=BAD.replace(workers="auto")), lambda _: None)
    assert result.changes == {}
    assert "out of memory" in result.end


@pytest.mark.slow
def test_a_bad_configuration_becomes_faster(tmp_path: Path) -> None:
    request = TuneRequest(target="demo", config=BAD, out=tmp_path / "tune", budget_s=180.0)
    result = tune(request, lambda _: None)
    assert result.changes
    assert result.confirmation is not None
    assert result.confirmation.ratio_low > 1.2
