"""The runner of `stoker tune`: with a process that speaks the protocol and computes nothing, and end to end."""

import contextlib
import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from stoker.config.settings import Config, from_toml
from stoker.data.index import open_index_of
from stoker.hardware.selection import select_device
from stoker.training.start import resolve_run
from stoker.training.trial import Reply, Request, Trial
from stoker.tuning import policy, runner, trials
from stoker.tuning.policy import same_training
from stoker.tuning.runner import TuneRequest, tune
from stoker.tuning.trials import TrialError, TrialProcess, measure_in_turn
from stoker_watch.errors import DataError, UsageError
from stoker_watch.runs.records import PROBES, read_lines
from stoker_watch.runs.schemas import TRIAL_STATES, Probe
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw
from tests.watch.storage.servers import Conditions, apply, google_server

CPU = select_device("cpu")
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


def test_a_base_that_fails_in_a_trial_is_started_again_for_the_next(
    request_: TuneRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_ONCE", str(tmp_path / "failed"))
    result = tune(request_, lambda _: None)
    failed = [trial for trial in result.trials if "the bucket did not respond" in trial.reason]
    assert [trial.state for trial in failed] == ["unavailable"]
    assert not any("the process ended" in trial.reason for trial in result.trials)
    assert result.changes


def test_losses_are_compared_from_the_first_sample_on_after_the_bounds(request_: TuneRequest) -> None:
    request = dataclasses.replace(request_, config=BAD.replace(eval_every="0"), levers=("batch_size",))
    result = tune(request, lambda _: None)
    assert result.changes["batch_size"] > 2, [trial.reason for trial in result.trials]


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


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_trial_with_a_cache_trains_on_the_samples_of_one_without(cache: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    found = []
    for kind in ("none", cache):
        config = resolve_run(BAD.replace(data="demo", cache=kind), None).config
        trial = Trial(config, open_index_of(config.data), select_device("cpu"), 16)
        try:
            found.append([trial.answer(Request(do="losses", images=8, group=2)) for _ in range(2)])
        finally:
            trial.loader.close()
    (before, later), after = found
    assert [reply.inputs for reply in after] == [before.inputs, later.inputs]
    assert [reply.losses for reply in after] == [before.losses, later.losses]
    assert not same_training(before.inputs, later.inputs, 0.02), "other images are seen"


def test_a_window_of_a_bucket_takes_as_long_as_the_bucket_takes_to_send_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are there when it begins, as after a pause in which the bucket has sent what it was asked for."""
    folder = draw(tmp_path / "drawn", train=100)
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    with google_server() as server, server.bucket().through() as (served, proxy):
        apply(monkeypatch, served.environment)
        store = open_store(parse_uri(served.uri))
        for path in filter(Path.is_file, folder.rglob("*")):
            store.write(str(path.relative_to(folder)), path.read_bytes())
        config = resolve_run(BAD.replace(data=served.uri, image_size=(32, 32)), None).config
        for data, is_bucket in ((served.uri, True), (str(folder), False)):
            trial = Trial(config.replace(data=data), open_index_of(config.replace(data=data).data), CPU, 100)
            try:
                trial.answer(Request(do="train", images=4))
                proxy.conditions = Conditions(latency_s=4.0)
                short, steady = (trial.answer(Request(do="train", images=16, steady=n)) for n in (False, True))
            finally:
                proxy.conditions = Conditions()
                trial.loader.close()
            assert (short.requested > 0) == is_bucket
            waited = steady.phases["input_wait"] - short.phases["input_wait"]
            assert is_bucket == (waited > 0.25 * steady.seconds), (short, steady)


@pytest.mark.parametrize(("requested", "images"), [(0, 8), (64, 40)])
def test_a_window_of_a_bucket_is_long(requested: int, images: int) -> None:
    asked: list[tuple[int, bool]] = []

    def window(count: int, steady: bool) -> Reply:
        asked.append((count, steady))
        return Reply(seconds=0.1 * count, images=count, steps=count // 4, requested=requested)

    found = measure_in_turn(window, window, unit=4, until_s=0.0)  # four pairs, the first look
    assert asked == [(8, False)] * 2 + [(images, True)] * 8
    assert found.steps == images


KILLED = """
import os, signal, sys
from pathlib import Path
from stoker.tuning import policy, runner
from tests.trainer.tuning.test_runner import BAD, FAKE

number, out = int(sys.argv[1]), Path(sys.argv[2])
runner._cache_kinds = lambda *_: ["disk", "ram"]
compare, calls = runner.compare, []

def killed(base, candidate, **options):
    calls.append(1)
    if len(calls) == number:
        print(base._process.pid, candidate._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return compare(base, candidate, **options)

runner.compare = killed
runner.tune(runner.TuneRequest(target="demo", config=BAD, out=out, command=FAKE), lambda _: None)
"""
"""A tuning that is killed in its measurement of this number, while both trial processes run."""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tuning_killed_while_it_measures_loses_no_trial_and_repeats_none(
    request_: TuneRequest, tmp_path: Path, number: int
) -> None:
    whole = tune(request_, lambda _: None)
    out = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(number), str(out)],
        cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    processes, limit_s = [int(pid) for pid in done.stdout.split()], time.monotonic() + 60
    while any(map(is_alive, processes)) and time.monotonic() < limit_s:
        time.sleep(0.01)
    assert not any(map(is_alive, processes))
    before = list(read_lines(out, PROBES, Probe))
    assert before[-1].state == "run"
    again = tune(dataclasses.replace(request_, out=out), lambda _: None)
    lines = list(read_lines(out, PROBES, Probe))
    ended = [line.trial for line in lines if line.state not in ("planned", "run")]
    assert ended == list(range(1, len(ended) + 1))
    assert lines[len(before)].trial == before[-1].trial
    assert [(trial.probe, trial.changes) for trial in again.trials] == [
        (trial.probe, trial.changes) for trial in whole.trials
    ]
    assert again.changes == whole.changes


def test_a_run_is_tuned_from_its_own_settings(request_: TuneRequest, tmp_path: Path) -> None:
    first = tune(request_, lambda _: None)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(first.config, run / "config.toml")
    of_run = dataclasses.replace(request_, target=str(run), config=Config(), out=tmp_path / "again")
    with pytest.raises(UsageError, match="--config is for a data set"):
        tune(dataclasses.replace(of_run, config=BAD), lambda _: None)
    assert not (tmp_path / "again").exists()
    second = tune(of_run, lambda _: None)
    began = from_toml(tmp_path / "again" / runner.FIRST)[0].set_fields()
    found = from_toml(Path(first.config))[0].set_fields()
    assert {name: began[name] for name in first.changes} == {name: found[name] for name in first.changes}
    assert "cache" not in second.changes


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


def test_a_model_that_is_divided_among_devices_is_refused(request_: TuneRequest) -> None:
    with pytest.raises(UsageError, match="divided among devices"):
        tune(dataclasses.replace(request_, config=BAD.replace(shard=True), devices=2), lambda _: None)
    with pytest.raises(UsageError, match="--devices 0"):
        tune(dataclasses.replace(request_, devices=0), lambda _: None)


@pytest.mark.slow
def test_ranks_of_a_trial_train_as_one_device_does(tmp_path: Path) -> None:
    """Losses of single images, before updates and after some: only averaged gradients give the same weights."""
    settings = resolve_run(BAD.replace(data="demo", batch_size=4, precision="fp32"), None).config.set_fields()
    found = []
    for devices in (1, 2):
        process = TrialProcess(settings, tmp_path / "log", devices=devices)
        try:
            found.append(process.first_images(8, 1, 1e-3)["losses"])
            train, load = process.ask("train", 8), process.ask("load", 8)
            ranks = psutil.Process(process._process.pid).children()
        finally:
            process.close()
        assert (train.images, train.steps, load.images) == (8, 2, 8)
        assert ("comm" in train.phases) == (devices > 1)
        assert len(ranks) == devices - 1
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    alone, together = found
    assert same_training(alone, together, 1e-3)
    assert not same_training(alone[:8], alone[8:], 1e-2), "updates change the losses"


@pytest.mark.slow
def test_loader_workers_wait_and_end_with_their_trial(tmp_path: Path) -> None:
    settings = resolve_run(BAD.replace(data="demo", workers=2, worker_processes=2), None).config.set_fields()
    with contextlib.closing(TrialProcess(settings, tmp_path / "log")) as process:
        workers = psutil.Process(process._process.pid).children(recursive=True)
        assert len(workers) >= 2
        for _ in range(2):
            end_s = time.monotonic() + 5
            while {worker.status() for worker in workers} != {psutil.STATUS_STOPPED}:  # a moment after the signal
                assert time.monotonic() < end_s
            assert process.ask("train", 8).images == 8
    assert not psutil.wait_procs(workers, timeout=10)[1]


@pytest.mark.slow
def test_losses_of_several_ranks_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    """Ember's losses are divided by the boxes of all ranks, of which another batch size puts others together."""
    found = []
    for batch_size in (4, 8):
        config = BAD.replace(data="demo", model="ember_n", batch_size=batch_size, precision="fp32")
        settings = resolve_run(config, None).config.set_fields()
        with contextlib.closing(TrialProcess(settings, tmp_path / "log", devices=2)) as process:
            found.append(process.first_images(16, 2, 1e-3)["losses"][:8])
    assert same_training(*found, 1e-3)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_trial_with_its_reason(tmp_path: Path) -> None:
    settings = resolve_run(BAD.replace(data="demo", batch_size=4), None).config.set_fields()
    with contextlib.closing(TrialProcess(settings, tmp_path / "log", devices=2)) as process:
        (rank,) = psutil.Process(process._process.pid).children()
        rank.kill()
        with pytest.raises(TrialError, match=r"[Rr]ank 1|[Cc]onnection"):
            process.ask("train", 8)


def test_losses_that_are_not_finite_are_another_training(request_: TuneRequest, monkeypatch) -> None:
    monkeypatch.setenv("NO_LOSSES", "ram")
    by_cache = {trial.changes.get("cache"): trial for trial in tune(request_, lambda _: None).trials}
    assert by_cache["ram"].state == "failed"
    assert "not finite" in by_cache["ram"].reason


@pytest.mark.slow
def test_communication_is_tuned_with_several_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MIN_EXPECTED", 0.0)  # How long ranks of one machine wait for each other varies.
    monkeypatch.setattr(trials, "WINDOW_S", (0.1, 1.0))
    request = TuneRequest(
        target="demo", config=BAD.replace(eval_every="0"), out=tmp_path / "tune", budget_s=900.0, levers=("sync",),
        devices=2,
    )  # fmt: skip
    said: list[str] = []
    tried = [trial for trial in tune(request, said.append).trials if trial.probe == "sync"]
    assert {trial.changes["sync"] for trial in tried} == {"plain:100", "bf16"}, said
    assert all(trial.pairs for trial in tried if trial.state == "passed")
    assert any(trial.state == "passed" for trial in tried), [trial.reason for trial in tried]


@pytest.mark.slow
def test_a_bad_configuration_becomes_faster(tmp_path: Path) -> None:
    request = TuneRequest(target="demo", config=BAD, out=tmp_path / "tune", budget_s=180.0)
    result = tune(request, lambda _: None)
    assert result.changes
    assert result.confirmation is not None
    assert result.confirmation.ratio_low > 1.2
