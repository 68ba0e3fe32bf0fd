"""Threads of OpenMP spin long on an idle machine only."""

import os
from pathlib import Path

import pytest

from stoker_watch.hardware import cgroup
from stoker_watch.hardware.cgroup import LONG_SPIN, SHORT_SPIN, choose_spin_count

CORES = float(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("line", "spins"),
    [
        ("0.00 0.01 0.05 1/345 2222", LONG_SPIN),
        ("0.00 0.01 0.05 2/345 2222", SHORT_SPIN),
        ("0.5 0.1 0.2 9/345 2222", SHORT_SPIN),
    ],
)
def test_they_spin_long_where_nothing_else_runs(tmp_path: Path, line: str, spins: int) -> None:
    loadavg = tmp_path / "loadavg"
    loadavg.write_text(line + "\n")
    assert choose_spin_count(loadavg, cores=CORES) == spins


@pytest.mark.parametrize("text", ["", "0.00 0.01", "0.00 0.01 0.05 many"])
def test_they_spin_briefly_where_the_machine_does_not_say(tmp_path: Path, text: str) -> None:
    assert choose_spin_count(tmp_path / "absent", cores=CORES) == SHORT_SPIN
    (tmp_path / "loadavg").write_text(text)
    assert choose_spin_count(tmp_path / "loadavg", cores=CORES) == SHORT_SPIN


def test_they_spin_briefly_where_a_quota_leaves_fewer_cores_than_threads(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.00 0.01 0.05 1/345 2222\n")
    assert choose_spin_count(tmp_path / "loadavg", cores=CORES - 0.5) == SHORT_SPIN


@pytest.mark.parametrize("by_user", [None, "77"])
def test_a_job_of_others_has_the_environment_of_the_user(monkeypatch: pytest.MonkeyPatch, by_user: str | None) -> None:
    monkeypatch.delenv(cgroup.SPIN_VARIABLE, raising=False)
    if by_user is not None:
        monkeypatch.setenv(cgroup.SPIN_VARIABLE, by_user)
    monkeypatch.setattr(cgroup, "_set_here", False)
    before = dict(os.environ)
    cgroup.set_spin_count()
    assert os.environ[cgroup.SPIN_VARIABLE] in ({str(LONG_SPIN), str(SHORT_SPIN)} if by_user is None else {by_user})
    assert cgroup.users_environment() == before
    os.environ.pop(cgroup.SPIN_VARIABLE)
