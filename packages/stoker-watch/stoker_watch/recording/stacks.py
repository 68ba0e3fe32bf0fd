"""Samples the Python stacks of a watched or measured job into stacks.jsonl (data source 1).

They are read from outside, from the memory of its processes (`remote_stacks.py`), without stopping the job. A sample
takes some 50 µs while the CPU's caches have what it needs, and several times that while a job computes; the rate keeps
all of it below MAX_CPU_FRACTION of a core. What they say is in `frames.py`. If stacks cannot be read, that is reported
once.
"""

import collections
import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from stoker_watch.recording.frames import (
    HELPER,
    CompiledCalls,
    Frame,
    Samples,
    find_loader,
    find_role,
    find_trainer,
    make_window,
    working_threads,
)
from stoker_watch.recording.remote_stacks import EndedError, RemoteStacks, UnreadableError
from stoker_watch.recording.telemetry.machine import ForeignProcess, list_process_tree, read, read_life
from stoker_watch.runs.records import RANKS, STACKS, RunFolder
from stoker_watch.runs.schemas import StackWindow

WINDOW_S, FIRST_WINDOW_S = 10.0, 2.0
"""Time of a line; the first one of a process is short, because only its stacks tell whether it trains."""
MAX_RATE_HZ, MIN_RATE_HZ = 50.0, 1.0
"""Samples a second: as many as may be taken for MAX_CPU_FRACTION."""
TRIAL_HZ, TRIAL_POLLS = 20.0, 8
"""Where fewer are affordable, so many are tried at each eighth poll: a sample costs more where samples are rare, as
what it reads and runs is in no cache any more (of one job 1.3 ms at 12 a second, and 5.3 ms at 1.5)."""
MAX_CPU_FRACTION = 0.01
"""Fraction of a core that sampling may take, half of what watching may (benchmarks/diagnosis/watch_overhead.py)."""
START_S, SPENT_IN_S = 60.0, 30.0
"""Time of a job for which samples may be taken in advance, so that a short one has enough; and in which they are."""
STARTING_S = 20.0
"""Time in which a process that does not train yet takes half as many: its imports need few."""
MAX_PROCESSES = 8
"""The busiest Python processes are sampled, besides one loader worker."""
HELPER_RECHECK_S = 120.0
"""Time after which a process that waited for others is sampled again: it may train now."""
MAX_TREE = 512
"""Processes of a job that are looked at."""
PROCESS_POLL_S = 2.0
"""Time between polls of the processes, a tenth of that until one was sampled."""
MAX_FAILURES, MAX_FAILING_S = 5, 30.0
"""Polls at which a process cannot be read, and its age, from which it is skipped: a new one has no interpreter yet."""
MAX_REPORTS = 20
"""Changes of the status that are reported."""
STOP_TIMEOUT_S = 5.0

PERMISSION_HINT = (
    "it needs the user of the job and kernel.yama.ptrace_scope 0, or root; in a container CAP_SYS_PTRACE: "
    "docker run --cap-add SYS_PTRACE"
)
NOT_PERMITTED = f"reading another process is not permitted here ({PERMISSION_HINT})"
RECORDED = "sampled from outside the job"

_PYTHON = re.compile(r"(^|/)(python|pypy)[\d.]*\w?$")
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with the rank of a process: of torchrun, then of MPI and Slurm."""


def _program(pid: int) -> str:
    """Path of the program that a process runs; empty: it ended, or may not be read."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def is_python(pid: int) -> bool:
    """By the name of the program, else by whether Python's library is loaded. Raises PermissionError."""
    if _PYTHON.search(_program(pid)):
        return True
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:  # line by line: it may have 65,530 of 4 KiB
            return any(re.search(r"/libpython\d", line) for line in file)
    except PermissionError:
        raise
    except OSError:  # it ended
        return False


class SampleWindow:
    """Samples of a process for a line of stacks.jsonl, from now on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.start_s = self._runnable_at_s = time.monotonic()
        self._start_life = read_life(pid)
        self._start_runnable_s = self._end_runnable_s = _runnable_seconds(pid)
        self._start_threads_s: dict[int, float | None] = {}
        with contextlib.suppress(OSError):  # it ended
            for name in os.listdir(f"/proc/{pid}/task"):
                self._start_threads_s[int(name)] = _runnable_seconds(pid, int(name))
        self.counts: dict[int, collections.Counter[tuple[Frame, ...]]] = {}
        """Thread → samples of each stack."""
        self.trainer: int | None = None
        """Another thread than the main one that trains."""
        self.is_complete = False
        """It ends before its time, because the process began to train."""

    def add(self, stacks: Mapping[int, list[Frame]]) -> None:
        """A sample: thread → stack."""
        for thread, stack in stacks.items():
            self.counts.setdefault(thread, collections.Counter())[tuple(stack)] += 1
        if (now_s := time.monotonic()) - self._runnable_at_s > 0.25:  # for the case that the process ends
            self._runnable_at_s = now_s
            self._end_runnable_s = _runnable_seconds(self._pid) or self._end_runnable_s

    def age_s(self) -> float:
        return time.monotonic() - self.start_s

    def samples(self) -> tuple[Samples, dict[int, Samples]]:
        """(those of the main thread, kernel's ID → those of each other thread)"""
        found = {
            thread: [(list(stack), count) for stack, count in counts.items()] for thread, counts in self.counts.items()
        }
        return found.pop(self._pid, []), found

    def cpu_fractions(self) -> tuple[float | None, float | None]:
        """Cores that the process used, and the fraction of time in which its main thread, or the one that trains, could
        run; None: not known."""
        wall_s, life, start = self.age_s(), read_life(self._pid), self._start_life
        process_cpu, runnable = None, None
        if wall_s > 0 and life is not None and start is not None and life.start_ticks == start.start_ticks:
            process_cpu = max(0.0, life.cpu_s - start.cpu_s) / wall_s
        self._end_runnable_s = _runnable_seconds(self._pid) or self._end_runnable_s
        if wall_s > 0 and self._start_runnable_s is not None and self._end_runnable_s is not None:
            runnable = (self._end_runnable_s - self._start_runnable_s) / wall_s
        return process_cpu, runnable if self.trainer is None else self.thread_runnable(self.trainer)

    def thread_runnable(self, thread: int) -> float | None:
        """The fraction of the window in which a thread ran or waited for a core; None: it ended."""
        seconds, wall_s = _runnable_seconds(self._pid, thread), max(1e-3, self.age_s())
        return None if seconds is None else (seconds - (self._start_threads_s.get(thread) or 0.0)) / wall_s


class SampledProcess:
    """A Python process of the job. role: of `StackWindow`, HELPER, or empty: not known yet."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.role = ""
        self.cpu_s = self.recent_cpu_s = 0.0
        """The latter since the poll before the newest one."""
        self.failures, self.seen_s = 0, time.monotonic()
        self.is_given_up = False
        """It is sampled no more: it may not be read, or its memory is forged."""
        self.is_new = True
        """It has no window yet."""
        self.trainer: int | None = None
        """The thread that trains, if not the main one."""
        self.serves = False
        """It computes for a process that trains, which has started it."""
        self.trains = False
        """The hook has counted a step of it."""
        self.sampled_s = 0.0
        """Monotonic time at which its newest window began."""
        self.window: SampleWindow | None = None
        self.stacks: RemoteStacks | None = None
        self.compiled: CompiledCalls = set()
        env: dict[str, str] = {}
        self.cwd, self.parent = "", 0
        with contextlib.suppress(psutil.Error):  # it ended, or may not be read
            process = ForeignProcess(pid)
            env, self.cwd, self.parent = process.environ(), process.cwd(), process.ppid()
        self.rank = next(
            (int(env[name]) for name in _RANK_VARIABLES if re.fullmatch("[0-9]{1,7}", env.get(name, ""))), 0
        )

    def close(self) -> None:
        if self.stacks is not None:
            self.stacks.close()
        self.stacks = self.window = None


def _runnable_seconds(pid: int, thread: int | None = None) -> float | None:
    """Seconds in which a thread (None: the main one) ran or waited for a core; None: not known."""
    try:
        running_ns, waiting_ns, _ = read(f"/proc/{pid}/task/{thread or pid}/schedstat").split()
    except (OSError, ValueError):
        return None
    return (int(running_ns) + int(waiting_ns)) / 1e9


class StackSampler:
    """Samples a job's Python processes inside a `with` block, in a thread.

    pid: the root of the job; on_status: called when the status changes from RECORDED, with the reason if stacks of the
    job or of one of its processes are not recorded; training_ranks: PID → rank of the live processes that train, as far
    as the hook knows them; then only these and their loader workers are sampled. own_rank: `pid` is the only process of
    this rank that trains: other ranks have samplers of their own.
    """

    def __init__(
        self, folder: RunFolder, pid: int, *, on_status: Callable[[str], None],
        training_ranks: Callable[[], Mapping[int, int]] = dict, own_rank: int | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._pid, self._own_rank = folder, pid, own_rank
        self._on_status, self._training_ranks = on_status, training_ranks
        self._processes: dict[tuple[int, int], SampledProcess] = {}
        """PID and start → process."""
        self._not_python: dict[tuple[int, int], str] = {}
        """The same → program."""
        self._rate_hz, self._cost_s, self._num_rates = MAX_RATE_HZ, 0.0, 0
        """CPU-seconds of a sample of all processes; how often the rate was set."""
        self._last_failure = "no Python process of the job was seen"
        self._any_sampled = self._is_unreadable = False
        self._start_s = self._next_poll_s = time.monotonic()
        self._is_due = True
        """The processes are looked for at the next sample."""
        self._num_samples, self._samples_s = 0, 0.0
        """Since the rate was set: samples of all processes, and the CPU-seconds that they took."""
        self._status, self._num_reports = RECORDED, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._thread_main, name="stacks", daemon=True)

    def __enter__(self) -> "StackSampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Writes the windows that have begun."""
        self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)  # a thread that hangs is abandoned

    def _thread_main(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 (the job goes on, and an event says so)
            self._report(f"not recorded from here on: {type(error).__name__}: {error}")
        finally:
            for target in self._processes.values():
                target.close()

    def _sample_until_stopped(self) -> None:
        targets = list[SampledProcess]()
        # at random times: what happens in every step must not happen in every sample
        while not self._stop.wait(random.uniform(0.5, 1.5) / self._rate_hz):
            now_s = time.monotonic()
            if self._is_due or now_s >= self._next_poll_s:
                targets = self._poll(targets, now_s)
            for target in targets:
                self._follow_training(target)
                self._renew_window(target)
            begin_s = time.thread_time()
            for target in targets:
                self._sample(target)
            self._num_samples += 1
            self._samples_s += time.thread_time() - begin_s
        for target in self._processes.values():
            self._end(target)
        # a measured loop may be shorter than a window
        if not self._any_sampled and (self._own_rank is None or self._is_unreadable):
            self._report(f"not recorded: {self._last_failure}")

    def _poll(self, earlier: list[SampledProcess], now_s: float) -> list[SampledProcess]:
        """Looks for processes of the job, and sets the rate by what the samples since the last time cost."""
        targets = self._find_targets(now_s)
        for target in earlier:
            if target not in targets:
                self._end(target)
                target.close()
        self._begin(targets)
        if self._num_samples:
            elapsed_s = now_s - self._start_s
            starting = elapsed_s < STARTING_S and not any(target.trains for target in targets)
            cost_s = self._samples_s / self._num_samples
            self._follow_cost(cost_s, time.thread_time(), elapsed_s, starting=starting)
        self._samples_s, self._num_samples, self._is_due = 0.0, 0, False
        self._next_poll_s = now_s + (PROCESS_POLL_S if self._any_sampled else PROCESS_POLL_S / 10)
        return targets

    def _follow_training(self, target: SampledProcess) -> None:
        """What a process does from its first step on is a window of its own, and costs less than imports."""
        if target.trains or target.pid not in self._training_ranks():
            return
        target.trains = True
        self._cost_s, self._samples_s, self._num_samples, self._rate_hz = 0.0, 0.0, 0, MAX_RATE_HZ
        if target.window is not None and target.window.counts:
            target.window.is_complete = True

    def _renew_window(self, target: SampledProcess) -> None:
        window = target.window
        if window is None:
            return
        if window.is_complete or window.age_s() >= (FIRST_WINDOW_S if target.is_new else WINDOW_S):
            self._end(target)
            if target.role == "worker":
                self._is_due = True  # another one's turn
            else:
                self._begin([target])

    def _sample(self, target: SampledProcess) -> None:
        if target.window is None or target.stacks is None:
            return
        try:
            target.window.add(target.stacks.read())
        except EndedError:
            self._end(target)
            target.close()
        except Exception as error:  # noqa: BLE001 (what it forged must not end the samples of others)
            self._end(target)
            self._give_up(target, f"{type(error).__name__}: {error}")

    def _begin(self, targets: list[SampledProcess]) -> None:
        """Begins a window of each process that has none and may have one."""
        for target in targets:
            if target.window is not None or target.role == HELPER or target.is_given_up:
                continue
            try:
                target.stacks = target.stacks or RemoteStacks(target.pid)
                target.window, target.sampled_s = SampleWindow(target.pid), time.monotonic()
            except PermissionError:
                self._give_up(target, NOT_PERMITTED)
            except (UnreadableError, EndedError) as error:
                target.failures += 1
                if isinstance(error, UnreadableError):
                    self._last_failure, self._is_unreadable = str(error), True
            except Exception as error:  # noqa: BLE001 (a name or a file that it forged)
                self._give_up(target, f"{type(error).__name__}: {error}")

    def _give_up(self, target: SampledProcess, reason: str) -> None:
        target.is_given_up = self._is_unreadable = True
        target.close()
        self._last_failure = reason
        if any(not other.is_given_up for other in self._processes.values()):
            self._report(f"{RECORDED}; process {target.pid} no more: {reason}")
        else:
            self._report(f"not recorded{' from here on' if self._any_sampled else ''}: {reason}")

    def _report(self, status: str) -> None:
        """Reports a changed status, MAX_REPORTS at most: a job may have any number of processes that cannot be read."""
        if status != self._status and self._num_reports < MAX_REPORTS:
            self._status, self._num_reports = status, self._num_reports + 1
            self._on_status(status)

    def _end(self, target: SampledProcess) -> None:
        try:
            self._end_window(target)
        except Exception as error:  # noqa: BLE001 (the names of its functions and files may be forged, too)
            self._give_up(target, f"{type(error).__name__}: {error}")

    def _end_window(self, target: SampledProcess) -> None:
        window, target.window = target.window, None
        if window is None:
            return
        samples, others = window.samples()
        if not samples:
            self._last_failure = "its main thread has no Python frames"
            target.failures += 1
            return
        target.failures = 0
        self._any_sampled = True
        target.is_new = False
        if target.stacks is not None:
            target.stacks.forget()
        if (trainer := self._find_trainer(target, samples, others)) is not None:
            target.trainer = window.trainer = trainer
            samples = others.pop(trainer)
        role = find_role(samples)
        if role and target.role != "training" and not target.serves:
            target.role = role
        if target.role == HELPER:
            return
        if self._status.startswith("not "):  # of processes that have ended, or were given up
            self._report(RECORDED)
        for line in filter(None, self._make_lines(target, window, samples, others)):
            self._write(target, line)

    def _find_trainer(self, target: SampledProcess, samples: Samples, others: Mapping[int, Samples]) -> int | None:
        """The thread that trains while the main one only waits for it; None: the main one may train."""
        return find_trainer(samples, others, target.trainer)

    def _make_lines(
        self, target: SampledProcess, window: SampleWindow, samples: Samples, others: Mapping[int, Samples]
    ) -> list[StackWindow | None]:
        """The lines of a process that trains or loads, and of its threads that work. samples, others: those of the
        main thread, or of the one that trains, and of the others by their kernel IDs."""
        process_cpu, runnable = window.cpu_fractions()
        fields: dict[str, Any] = {
            "cwd": target.cwd, "t": time.time(), "attempt": self._folder.attempt, "pid": target.pid,
            "wall_s": window.age_s(),
        }  # fmt: skip
        role = target.role or "training"
        of_process = fields | {"runnable": runnable, "process_cpu": process_cpu, "compiled": target.compiled}
        lines = [make_window(samples, role=role, **of_process)]
        if role == "training":
            working = working_threads(others, sum(count for _, count in samples), window.thread_runnable)
            loader = find_loader(others.values())
            lines += [
                make_window(found, role=name, runnable=can_run, loader=loader if name == "worker" else "", **fields)
                for name, found, can_run in working
            ]
        return lines

    def _write(self, target: SampledProcess, line: StackWindow) -> None:
        name = STACKS if target.rank == 0 else f"{RANKS}/{target.rank:04d}/{STACKS}"
        (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        self._folder.append(name, line)

    def _follow_cost(self, cost_s: float, spent_s: float, elapsed_s: float, *, starting: bool = False) -> None:
        """The rate for the next seconds. cost_s: CPU-seconds of a sample of all processes in the last ones; spent_s:
        all that this thread took so far; much of it is for what is new at the start, as source files."""
        self._cost_s = (self._cost_s + cost_s) / 2 if self._cost_s else cost_s
        left_s = MAX_CPU_FRACTION * (START_S + elapsed_s) - spent_s
        fraction = min(left_s / SPENT_IN_S, MAX_CPU_FRACTION / 2) if starting else left_s / SPENT_IN_S
        self._rate_hz = min(MAX_RATE_HZ, max(MIN_RATE_HZ, fraction / max(self._cost_s, 1e-9)))
        self._num_rates += 1
        is_trial = self._num_rates % TRIAL_POLLS == 0 and self._rate_hz < TRIAL_HZ and not starting
        if is_trial and left_s > PROCESS_POLL_S * TRIAL_HZ * self._cost_s:
            self._rate_hz, self._cost_s = TRIAL_HZ, 0.0

    def _find_targets(self, now_s: float) -> list[SampledProcess]:
        """Those that train or may train, the busiest first, and the loader worker whose turn it is."""
        self._update_processes()
        found = [
            target for target in self._processes.values()
            if not target.is_given_up and (target.failures < MAX_FAILURES or now_s - target.seen_s < MAX_FAILING_S)
            and self._is_own(target)
        ]  # fmt: skip
        known_ranks = self._training_ranks() if self._own_rank is None else {self._pid: self._own_rank}
        self._update_roles(found, known_ranks, now_s)
        trainers = [target for target in found if target.pid in known_ranks]
        training = trainers or [target for target in found if target.role in ("training", "")]
        training.sort(key=lambda target: -target.recent_cpu_s)
        workers = [target for target in found if target.role == "worker"]
        current = [target for target in workers if target.window is not None]
        turn = current or sorted(workers, key=lambda target: target.sampled_s)
        return training[:MAX_PROCESSES] + turn[:1]

    def _update_processes(self) -> None:
        """Looks for the Python processes of the job that live."""
        alive: dict[tuple[int, int], SampledProcess] = {}
        not_python: dict[tuple[int, int], str] = {}
        for pid in list_process_tree(self._pid, limit=MAX_TREE):
            life = None if pid == os.getpid() != self._pid else read_life(pid)
            if life is None:
                continue
            key = pid, life.start_ticks
            known = self._processes.get(key)
            if known is None:  # a shell, as the one that pyenv starts, may become Python by exec
                program = _program(pid)
                try:
                    if self._not_python.get(key) != program and is_python(pid):
                        known = SampledProcess(pid)
                except PermissionError:  # so nothing says whether it is Python
                    self._last_failure = NOT_PERMITTED
                    if pid == self._pid and self._own_rank is not None:
                        self._report(f"not recorded: {NOT_PERMITTED}")
                if known is None and life.cpu_s > 0:  # else it has only begun
                    not_python[key] = program
            if known is not None:
                known.recent_cpu_s, known.cpu_s = life.cpu_s - known.cpu_s, life.cpu_s
                alive[key] = known
        self._processes, self._not_python = alive, not_python

    def _is_own(self, target: SampledProcess) -> bool:
        """Whether no other sampler has this process."""
        return self._own_rank is None or target.pid == self._pid or target.rank == self._own_rank

    @staticmethod
    def _update_roles(found: list[SampledProcess], known_ranks: Mapping[int, int], now_s: float) -> None:
        """Sets ranks and roles by the processes that are known to train."""
        training_pids = {target.pid for target in found if target.pid in known_ranks or target.role == "training"}
        for target in found:
            if target.pid in known_ranks:
                target.rank = known_ranks[target.pid]  # children of `mp.spawn` have no RANK
                target.role = "training"
            elif target.role == "" and target.parent in training_pids:
                target.role = "worker"  # until a stack says more
            elif target.role == "training" and target.parent in known_ranks:
                target.role, target.serves = "worker", True
            elif target.role == HELPER and now_s - target.sampled_s > HELPER_RECHECK_S:
                target.role = ""
