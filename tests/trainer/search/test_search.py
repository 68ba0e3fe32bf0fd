"""The study of `stoker search`: what is tried does not depend on who works on it, nor on who is killed."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.search import page
from stoker.search.space import Range, Space, default_space, defaults_in, make_space, read_space
from stoker.search.study import (
    JOURNAL,
    MAX_JOURNAL_BYTES,
    Claim,
    Study,
    StudySpec,
    TrialState,
    best_trials,
    create,
    importances,
)
from stoker.search.worker import MAX_STARTS, work
from stoker_watch.errors import ConfigError, UsageError
from tests.trainer.search.fake_worker import EVALUATIONS, objective

LR = Range(low=1e-4, high=1e-1, log=True)


def make_spec(**changes: Any) -> StudySpec:
    spec = StudySpec(
        data="/data",
        digest="d1",
        settings={"data": "/data", "steps": 90},
        defaults={"lr": 1e-3, "precision": "fp32"},
        space=Space({"lr": LR, "precision": ["bf16", "fp32"]}),
        trials=20,
        round=2,
        objectives=["ap"],
        pruner="halving",
        evaluations=EVALUATIONS,
        seed=7,
    )
    return msgspec.structs.replace(spec, **changes)


def start_worker(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "tests.trainer.search.fake_worker", str(folder), *words])


def results(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (t.number, t.state.name, json.dumps(t.params, sort_keys=True), t.values, tuple(t.intermediate_values.values()))
        for t in Study(folder).trials()
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One worker that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "study"
    create(folder, make_spec())
    assert work(folder, objective) == 20
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 3_300}, r"(?s)3,300 trials are too many.*--trials 3\d\d\d"),
        ({"trials": 10**9}, "too many"),
        ({"trials": 900, "evaluations": 100}, "too many"),
        ({"trials": 100, "space": Space({"lr": LR, "model": [f"name-{n:09}" for n in range(5_000)]})}, "too many"),
        ({"round": 6_000}, r"(?s)out of range.*round"),
        ({"evaluations": 9_000, "trials": 2}, r"(?s)out of range.*evaluations"),
        ({"settings": {"data": "x" * (1 << 20)}}, "too large"),
    ],
)
def test_a_study_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create(tmp_path / "new", make_spec(**changes))
    assert not (tmp_path / "new").exists()
    if set(changes) == {"trials"}:
        create(tmp_path / "old", make_spec())
        before = (tmp_path / "old" / "study.json").read_bytes()
        with pytest.raises(ConfigError, match=message):
            create(tmp_path / "old", make_spec(**changes))
        assert (tmp_path / "old" / "study.json").read_bytes() == before


def test_what_a_trial_takes_of_the_journal_is_what_is_expected(undisturbed: Path, tmp_path: Path) -> None:
    """A journal with as many trials as are allowed can be read."""
    create(tmp_path / "study", make_spec(pruner="none"))
    assert work(tmp_path / "study", objective) == 20
    for folder in (undisturbed, tmp_path / "study"):
        with pytest.raises(ConfigError) as refused:
            create(tmp_path / "large", make_spec(trials=5_000))
        largest = int(str(refused.value.fix).split()[-1])
        assert (folder / JOURNAL).stat().st_size / 20 * largest < MAX_JOURNAL_BYTES


def test_two_workers_killed_once_each_try_what_one_undisturbed_worker_tries(tmp_path: Path, undisturbed: Path) -> None:
    create(tmp_path / "study", make_spec())
    workers = [start_worker(tmp_path / "study", *words) for words in (("evaluation", "5"), ("end", "5"))]
    assert [worker.wait() for worker in workers] == [-signal.SIGKILL] * 2
    assert len(Study(tmp_path / "study").trials()) < 20
    workers = [start_worker(tmp_path / "study") for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    found = results(tmp_path / "study")
    assert found == results(undisturbed)
    assert [row[0] for row in found] == list(range(20))
    assert len({row[2] for row in found}) == 20
    spec, trials = make_spec(), Study(undisturbed).trials()
    assert best_trials(spec, trials)[0].values[0] == max(t.values[0] for t in trials if t.state == TrialState.COMPLETE)


@pytest.mark.parametrize("place", ["begin", "evaluation", "end"])
def test_a_trial_is_continued_under_its_number(tmp_path: Path, place: str, undisturbed: Path) -> None:
    create(tmp_path / "study", make_spec())
    assert start_worker(tmp_path / "study", place, "3").wait() == -signal.SIGKILL
    states = [trial.state.name for trial in Study(tmp_path / "study").trials()]
    assert states[3:] == ["RUNNING"]
    work(tmp_path / "study", objective)
    assert results(tmp_path / "study") == results(undisturbed)


def test_a_journal_line_that_a_killed_worker_wrote_in_part_is_removed(tmp_path: Path, undisturbed: Path) -> None:
    create(tmp_path / "study", make_spec())
    start_worker(tmp_path / "study", "begin", "4").wait()
    with (tmp_path / "study" / JOURNAL).open("ab") as journal:
        journal.write(b'{"op_code":6,"worker_id":"x","tri')
    work(tmp_path / "study", objective)
    assert results(tmp_path / "study") == results(undisturbed)


def test_a_trial_that_kills_its_workers_fails(tmp_path: Path) -> None:
    create(tmp_path / "study", make_spec(trials=1, defaults={"lr": 1e-3, "precision": "fp32"}))
    study = Study(tmp_path / "study")
    for _ in range(MAX_STARTS):
        claim = study.claim()
        assert claim is not None
        assert not isinstance(claim, str)
        claim.lock.close()  # as the kernel does when the worker ends
    assert work(tmp_path / "study", objective) == 1
    assert study.trials()[0].state == TrialState.FAIL


def test_a_trial_in_other_hands_is_not_taken(tmp_path: Path) -> None:
    create(tmp_path / "study", make_spec(trials=3))
    study = Study(tmp_path / "study")
    first, second = study.claim(), study.claim()
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (0, 1)
    assert study.claim() == "wait"  # for the end of its round


def test_a_trial_that_ends_while_another_worker_looks_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "study", make_spec(trials=2, pruner="none"))
    one, other = Study(tmp_path / "study"), Study(tmp_path / "study")
    claim = one.claim()
    assert isinstance(claim, Claim)
    lock = Study._lock

    def end_first(study: Study, number: int) -> Any:  # after the other has read the trials, before it asks for the lock
        if not claim.lock.closed:
            one.finish(claim, objective(one, claim))
        return lock(study, number)

    monkeypatch.setattr(Study, "_lock", end_first)
    second = other.claim()
    assert isinstance(second, Claim)
    assert second.number == 1


def test_pruned_trials_cost_less_than_half(undisturbed: Path) -> None:
    trials = Study(undisturbed).trials()
    pruned = [t.user_attrs["steps"] for t in trials if t.state == TrialState.PRUNED]
    full = [t.user_attrs["steps"] for t in trials if t.state == TrialState.COMPLETE]
    assert pruned
    assert max(pruned) < 0.5 * min(full)
    assert min(full) == 10 * EVALUATIONS


def test_hyperband_is_reproducible_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        create(tmp_path / name, make_spec(pruner="hyperband", trials=12))
    work(tmp_path / "a", objective)
    start_worker(tmp_path / "b", "end", "6").wait()
    work(tmp_path / "b", objective)
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert {row[1] for row in results(tmp_path / "a")} == {"COMPLETE", "PRUNED"}


def test_another_seed_tries_other_points(tmp_path: Path, undisturbed: Path) -> None:
    create(tmp_path / "study", make_spec(seed=8, trials=4))
    work(tmp_path / "study", objective)
    assert [row[2] for row in results(tmp_path / "study")][1:] != [row[2] for row in results(undisturbed)][1:4]


def test_more_trials_continue_a_study(tmp_path: Path, undisturbed: Path) -> None:
    create(tmp_path / "study", make_spec(trials=6))
    work(tmp_path / "study", objective)
    assert create(tmp_path / "study", make_spec(trials=20)).trials == 20
    assert work(tmp_path / "study", objective) == 14
    assert results(tmp_path / "study") == results(undisturbed)


def test_a_space_of_choices_is_tried_without_repetition(tmp_path: Path) -> None:
    space = Space({"batch_size": [4, 8, 16], "precision": ["bf16", "fp32"]})
    create(tmp_path / "s", make_spec(space=space, trials=6, defaults={"batch_size": 8, "precision": "fp32"}))
    work(tmp_path / "s", objective)
    assert len({row[2] for row in results(tmp_path / "s")}) == space.size() == 6


def test_limits_and_two_objectives(tmp_path: Path) -> None:
    space = Space({"lr": LR}, {"latency_ms": 10.0})
    spec = make_spec(space=space, objectives=["ap", "latency_ms"], pruner="none", defaults={"lr": 1e-3}, trials=16)
    create(tmp_path / "s", spec)
    work(tmp_path / "s", objective)
    trials = Study(tmp_path / "s").trials()
    assert any(trial.values[1] > 10 for trial in trials)
    front = best_trials(spec, trials)
    assert front
    for trial in front:
        assert trial.values[1] <= 10
        assert not any(
            o.values[0] > trial.values[0] and o.values[1] < trial.values[1] for o in trials if o.values[1] <= 10
        )
    html = page.render_study(Study(tmp_path / "s"))
    assert "Pareto front" in html
    assert "latency_ms above the limit" in html


def test_importance_and_page(undisturbed: Path, tmp_path: Path) -> None:
    study = Study(undisturbed)
    found = importances(study.spec, study.trials())
    assert next(iter(found)) == "lr"  # it moves the formula 20 × as much as the precision
    text = page.write_study(study, tmp_path / "page.html").read_text()
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.S)[1])
    assert [chart["data"][0]["name"] for chart in charts] == ["AP", "importance"]
    assert len(page.study_json(study)["trials"]) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": "d2"}, "another data set"),
        ({"space": Space({"lr": LR})}, "another space"),
        ({"seed": 8}, "other seed"),
        ({"pruner": "none"}, "other pruner"),
    ],
)
def test_a_study_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    create(tmp_path / "study", make_spec())
    with pytest.raises(ConfigError, match=message):
        create(tmp_path / "study", make_spec(**changes))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        create(tmp_path, make_spec())
    with pytest.raises(UsageError, match="no study"):
        Study(tmp_path)


@pytest.mark.parametrize(
    ("text", "message", "valid"),
    [
        ("learning_rat = [1]", "no setting called 'learning_rat'", "lr"),
        ("weight_deca = [0.1]", "did you mean 'weight_decay'", "weight_decay"),
        ("data = ['a']", "'data' cannot be searched", "lr"),
        ("lr = { low = 1.0, high = 0.1 }", "range of lr is empty", None),
        ("lr = { low = 0.1, high = 0.1 }", "range of lr is empty", None),
        ("lr = { low = 0.0, high = 0.1, log = true }", "begins above 0", None),
        ("lr = { low = 0.1, hihg = 0.2 }", "not a range", None),
        ("lr = []", "no choices", None),
        ("lr = ['x']", "wrong kind", None),
        ("hflip = { low = 0.0, high = 2.0 }", "out of range", "0 … 1"),
        ("precision = ['fp8']", "wrong kind", "bf16"),
        ("precision = { low = 1, high = 2 }", "not a number", None),
        ("batch_size = { low = 4.5, high = 8 }", "whole numbers", None),
        ("batch_size = { low = 4, high = 8, step = 5 }", "step 5 does not fit", None),
        ("[limits]\nlatency = 3", "no limit 'latency'", "latency_ms"),
        ("lr = [0.1]\n[limits]\nlatency_ms = -1", "not a number above 0", None),
        ("lr = ", "not valid TOML", None),
        ("", "space is empty", None),
    ],
)
def test_bad_spaces(tmp_path: Path, text: str, message: str, valid: str | None) -> None:
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_space(tmp_path / "space.toml")
    assert str(tmp_path / "space.toml") in str(caught.value)
    assert valid is None or valid in str(caught.value)


def test_a_space_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        "lr = { low = 1e-4, high = 1e-2, log = true }\nprecision = ['bf16', 'fp32']\n"
        "batch_size = { low = 4, high = 17, step = 4 }\n[limits]\nmemory_gib = 8\n"
    )
    space = read_space(tmp_path / "space.toml")
    entries = space.distributions()
    assert (entries["batch_size"].low, entries["batch_size"].high, entries["batch_size"].step) == (4, 16, 4)  # type: ignore[attr-defined]
    assert space.limits == {"memory_gib": 8.0}
    assert make_space({"batch_size": {"low": 4, "high": 17, "step": 4}, "precision": ["fp32"]}, {}).size() == 4
    assert msgspec.json.decode(msgspec.json.encode(space), type=Space) == space


@pytest.mark.parametrize("model", ["demo", "ember_n", "ssdlite_mobilenet_v3_large", "retinanet_resnet50_fpn"])
def test_the_default_space_contains_the_defaults(model: str) -> None:
    from stoker.config.architectures import read_architectures
    from stoker.config.settings import read_recipes

    if model not in read_architectures():
        model = next(name for name, row in read_architectures().items() if row.recipe == "tiny")
    recipe = read_recipes()[read_architectures()[model].recipe]
    config = recipe.replace(
        model=model, batch_size=8, warmup_steps=100, ema_decay=0.999, scale_jitter_prob=0.5, mosaic=0.5,
        backbone_lr_mult=0.3,
    )  # fmt: skip
    if config.optim.lr is None:
        config = config.replace(lr=0.01)
    if config.optim.weight_decay is None:
        config = config.replace(weight_decay=1e-4)
    space = default_space(config)
    assert 5 <= len(space.settings) <= 7
    assert set(defaults_in(space, config)) == set(space.settings)


def test_defaults_outside_the_space_are_trial_0_without_them(tmp_path: Path) -> None:
    create(tmp_path / "s", make_spec(defaults={"lr": 1e-3}, trials=14))
    work(tmp_path / "s", objective)
    trials = Study(tmp_path / "s").trials()
    assert trials[0].params == {"lr": 1e-3}
    assert all(set(trial.params) == {"lr", "precision"} for trial in trials[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objective", "ap,latenc"], "no objective 'latenc'; did you mean 'latency'"),
        (["--objective", "latency"], "wanted ap, or ap and one other"),
        (["--objective", "ap,latency", "--pruner", "halving"], "cannot be pruned"),
        (["--pruner", "halvin"], "did you mean 'halving'"),
        (["--launcher", "k8s"], "no launcher 'k8s'"),
        (["--partition", "gpu"], "launcher local has no --partition"),
        (["--trials", "0"], "--trials 0 is out of range"),
        (["--lr", "0.1", "--space", "SPACE"], "--lr is set and searched"),
        (["--space", "SPACE", "--trials", "50"], "only 2 points"),
        (["--eval-every", "45"], "too few to prune"),
    ],
)
def test_bad_commands(tmp_path: Path, words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    from stoker_watch.cli.app import _run

    (tmp_path / "space.toml").write_text("lr = [0.001, 0.002]")
    words = [str(tmp_path / "space.toml") if word == "SPACE" else word for word in words]
    code = _run(["search", "demo", "--steps", "90", "--run-dir", str(tmp_path / "study"), *words])
    error = capfd.readouterr().err
    assert message in error, error
    assert code == 2
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_search_of_real_trainings_survives_kills(tmp_path: Path) -> None:
    """Trainings on the built-in data; a worker is killed inside a training, and the run goes on."""
    from stoker_watch.runs.records import EVENTS, read_lines
    from stoker_watch.runs.schemas import Event

    (tmp_path / "space.toml").write_text("lr = { low = 1e-4, high = 1e-2, log = true }\nhflip = [0.0, 0.5]")
    command = [
        sys.executable, "-m", "stoker", "search", "demo", "--steps", "12", "--space", str(tmp_path / "space.toml"),
        "--trials", "2", "--parallel", "1", "--device", "cpu", "--checkpoint-every", "4",
        "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--workers", "1",
    ]  # fmt: skip
    found = {}
    for name in ("killed", "undisturbed"):
        folder = tmp_path / name
        process = subprocess.Popen([*command, "--run-dir", str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if name == "killed":
            run = folder / "trials" / "0001"
            while not any(event.kind == "evaluated" for event in read_lines(run, EVENTS, Event)):
                assert process.poll() is None
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            for pid in children:
                subprocess.run(["kill", "-KILL", pid], check=True)
        output = process.communicate()[0]
        assert process.returncode == 0, output
        assert ("ended with code -9: started again" in output) == (name == "killed")
        found[name] = results(folder)
        assert (folder / "report.html").exists()
    assert [row[:5] for row in found["killed"]] == [row[:5] for row in found["undisturbed"]]
    assert len(found["killed"]) == 2
