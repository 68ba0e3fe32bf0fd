"""`stoker search`: checks the search, prints what it tries and costs, starts its workers, and says what was best.

There is no scheduler here: workers are processes of this machine, a job array of Slurm, or jobs of a Ray cluster, and
each takes the next trial from the study (`study.py`). The same command again continues a study.
"""

import dataclasses
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec
from optuna.trial import TrialState

from stoker.config.settings import Config
from stoker.launching.jobs import remember, submit
from stoker.launching.request import check_launch, make_spec
from stoker.launching.spec import FAILING_EXIT_CODES, open_place
from stoker.planning.plan import make_plan, train_command
from stoker.planning.recommend import describe_cost, describe_duration
from stoker.search import SearchRequest, page
from stoker.search.space import Metric, Space, default_space, defaults_in, read_space
from stoker.search.study import PRUNERS, RUNGS, Study, StudySpec, best_trials, create, digest_data
from stoker.search.worker import describe, trial_config
from stoker.training.run_selection import with_absolute_paths
from stoker.training.start import resolve_run
from stoker.training.state import IntervalTrigger
from stoker.training.supervisor import handling_signals
from stoker_watch import regular_files
from stoker_watch.durations import Duration, parse_duration
from stoker_watch.errors import ConfigError, Preempted, StokerError, UsageError, did_you_mean
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.report import format as fmt
from stoker_watch.storage.uri import is_uri

OBJECTIVES: dict[str, Metric] = {"ap": "ap", "latency": "latency_ms", "step_time": "step_s", "memory": "memory_gib"}
LAUNCHERS = ("local", "slurm", "ray")
MAX_RESTARTS = 3
"""Restarts of a worker of this machine that was killed or crashed."""
POLL_S = 0.5


def search(request: SearchRequest, say: Callable[[str], None]) -> Study | None:
    """Runs or continues a search; None: nothing was run here (`dry_run`, or it was submitted). Raises StokerError."""
    if request.launcher not in LAUNCHERS:
        raise UsageError(f"A search has no launcher {request.launcher!r}.", choices=LAUNCHERS)
    for flag, value in (("--trials", request.trials), ("--parallel", request.parallel)):
        if value < 1:
            raise UsageError(f"{flag} {value} is out of range.", choices=["1 or more"])
    launch = {name for name in request.launch.kept_fields() if name != "run_dir"} | set(request.options.set_fields())
    if request.launcher == "local" and launch:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(launch))
        raise UsageError(f"The launcher local has no {flags}.", fix="--parallel sets the number of workers")
    if request.launch.run_dir is not None and is_uri(request.launch.run_dir):
        raise UsageError("A study cannot be in a bucket.", location=request.launch.run_dir, fix="--run-dir FOLDER")
    spec, base = make_study(request)
    folder = Path(request.launch.run_dir or f"runs/{Path(str(base.data.data)).name}-search").absolute()
    for line in ("space:", *(f"  {text}" for text in spec.space.lines())):
        say(line)
    say(f"trial 0 has the defaults: {', '.join(f'{name} {fmt.setting(v)}' for name, v in spec.defaults.items())}")
    say(expected_cost(base, spec, request.parallel))
    if request.dry_run:
        say("nothing was trained or written (--dry-run)")
        return None
    spec = create(folder, spec)
    study = Study(folder)
    if request.launcher != "local":
        launch_workers(folder, request, base, say)
        return None
    run_workers(study, request.parallel, say)
    for line in summary(study):
        say(line)
    say(f"page: {page.write_study(study)}")
    return study


def make_study(request: SearchRequest) -> tuple[StudySpec, Config]:
    """(the study, the settings of all trials). Raises ConfigError, DataError before anything runs."""
    if request.config.data.data is None:
        raise UsageError("What should be trained on?", fix="stoker search DATA --trials 50")
    objectives = _read_objectives(request.objective)
    pruner = request.pruner or ("halving" if len(objectives) == 1 else "none")
    if pruner not in PRUNERS:
        raise UsageError(did_you_mean(f"There is no pruner {pruner!r}", pruner, PRUNERS), choices=PRUNERS)
    if pruner != "none" and len(objectives) > 1:
        raise UsageError("Trials with two objectives cannot be pruned.", choices=["--pruner none"])
    space = None if request.space is None else read_space(request.space)
    config = with_absolute_paths(request.config)
    resolved = resolve_run(config, None, fetch=None)
    if space is None:
        space = default_space(resolved.config)
        twice = set(space.settings) & set(config.set_fields())
        space = Space({name: entry for name, entry in space.settings.items() if name not in twice}, space.limits)
    for name in space.settings:
        if name in config.set_fields():
            raise ConfigError(f"--{name.replace('_', '-')} is set and searched.", fix="leave out one of them")
        if resolved.config.set_fields().get(name) is None and name != "mosaic":
            raise ConfigError(f"The model {resolved.config.model.model} has no {name}.", location=request.space)
    if space.size() < request.trials:
        raise ConfigError(
            f"The space has only {space.size():.0f} points.", location=request.space, fix=f"--trials {space.size():.0f}"
        )
    num_images, complete = len(resolved.index.image_indices("train")), resolved.config
    length = parse_duration(complete.run.max_duration)
    if "max_duration" not in config.set_fields() and length.unit == "steps":
        # in epochs: every trial sees the same images, whatever batch or weights it has
        epochs = f"{length.value * complete.run.batch_size / num_images:.6g}ep"
        config, complete = config.replace(max_duration=epochs), complete.replace(max_duration=epochs)
    config, evaluations = _evaluations(config, complete, num_images, pruner)
    return StudySpec(
        data=str(config.data.data),
        digest=digest_data(resolved.index),
        settings=msgspec.to_builtins(config.set_fields()),
        defaults=defaults_in(space, resolved.config),
        space=space,
        trials=request.trials,
        round=request.parallel,
        objectives=objectives,
        pruner=pruner,  # type: ignore[arg-type]
        evaluations=evaluations,
        seed=config.run.seed or 0,
    ), config


def _read_objectives(text: str) -> list[Metric]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OBJECTIVES:
            raise UsageError(did_you_mean(f"There is no objective {name!r}", name, OBJECTIVES), choices=OBJECTIVES)
    if names[0] != "ap" or len(names) > 2 or len(set(names)) < len(names):
        raise UsageError(f"--objective {text}: wanted ap, or ap and one other.", choices=["ap", "ap,latency"])
    return [OBJECTIVES[name] for name in names]


def _evaluations(config: Config, derived: Config, num_images: int, pruner: str) -> tuple[Config, int]:
    """(the settings with an interval of evaluations that a pruner can use, evaluations of a full trial)."""
    length = parse_duration(derived.run.max_duration)
    if pruner == "none":
        return config, 1
    if "eval_every" not in config.set_fields():
        value = math.ceil(length.value / RUNGS) if length.unit == "steps" else length.value / RUNGS
        config = config.replace(eval_every=str(Duration(float(f"{value:.6g}"), length.unit)))
    every = parse_duration(str(config.run.eval_every), "eval-every")
    if every.unit != length.unit and "minutes" in (every.unit, length.unit):
        raise ConfigError(
            f"--eval-every {config.run.eval_every} and a length of {derived.run.max_duration} have different units.",
            cause="a pruner compares trials after the same part of their length",
            fix="leave out --eval-every, or --pruner none",
        )
    if every.unit == length.unit:
        amount, every_amount = length.value, every.value
    else:  # in steps, as training counts them
        batch = derived.run.batch_size
        amount = length.value * (num_images / batch if length.unit == "epochs" else 1)
        every_amount = max(1, IntervalTrigger(every, num_images, batch).interval_steps)
    count = math.ceil(amount / every_amount - 1e-3) if every.value else 1
    if count < 3:
        what = f"A trial has {fmt.plural(count, 'evaluation')}: too few to prune."
        raise ConfigError(what, fix="a shorter --eval-every, none at all, or --pruner none")
    return config, count


def expected_cost(config: Config, spec: StudySpec, parallel: int) -> str:
    """What all trials take at the most on this machine, by `stoker plan`; a pruned one takes about a third."""
    length = config.run.max_duration
    total, rounds = spec.trials, math.ceil(spec.trials / parallel)
    if length is not None and parse_duration(length).unit == "minutes":
        minutes = parse_duration(length).value
        return f"expected: at most {total} trials of {minutes:g} min, {fmt.duration(60 * minutes * rounds)} in all"
    row = make_plan(config, on=("this",)).rows[0]
    if row.problem:
        raise ConfigError(f"A trial does not fit this machine: {row.problem}.")
    cost = "" if row.cost is None else f", {describe_cost(row.cost.scaled(total))}"
    shared = "" if parallel == 1 else f" on {parallel} machines like this one; workers of one machine share it"
    return (
        f"expected: at most {total} trials of {describe_duration(row.duration_s)}, "
        f"{describe_duration(row.duration_s.scaled(rounds))} in all{cost}{shared}"
    )


def run_workers(study: Study, parallel: int, say: Callable[[str], None]) -> None:
    """Workers as processes of this machine until the study has ended; one that was killed or crashed starts again.
    Raises StokerError where trials would go on failing; `Preempted` after a signal."""
    asked: list[str] = []

    def handle(signum: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(signum).name)

    workers: dict[int, subprocess.Popen[bytes]] = {}
    restarts = [0] * parallel
    shown = sum(trial.state.is_finished() for trial in study.trials())
    with handling_signals(("SIGTERM", "SIGINT"), handle):
        try:
            for k in range(parallel):
                workers[k] = _start_worker(study.folder, k, parallel)
            while workers:
                time.sleep(POLL_S)
                finished = sorted(
                    (t for t in study.trials() if t.state.is_finished()), key=lambda t: (t.datetime_complete, t.number)
                )
                for trial in finished[shown:]:
                    say(describe(trial))
                shown = len(finished)
                if asked:
                    raise Preempted(f"Stopped by {asked[0]}.", fix="the same command continues the search")
                ended = {k: code for k, worker in workers.items() if (code := worker.poll()) is not None}
                for k, code in ended.items():
                    del workers[k]
                    if code == 0:
                        continue
                    log = _worker_log(study.folder, k)
                    if code in FAILING_EXIT_CODES or restarts[k] >= MAX_RESTARTS:
                        fix = "correct what its log says; the same command continues"
                        raise StokerError(f"A worker ended with code {code}.", location=log, fix=fix)
                    restarts[k] += 1
                    say(f"worker {k} ended with code {code}: started again, see {log}")
                    workers[k] = _start_worker(study.folder, k, parallel)
        finally:
            for worker in workers.values():
                worker.terminate()
            for worker in workers.values():
                worker.wait()
    if any(not trial.state.is_finished() for trial in study.trials()) or len(study.trials()) < study.spec.trials:
        raise StokerError("Not all trials ended.", location=study.folder, fix="the same command continues the search")


def _worker_log(folder: Path, k: int) -> Path:
    return folder / f"worker-{k}.log"


def _start_worker(folder: Path, k: int, parallel: int) -> subprocess.Popen[bytes]:
    import torch

    env = dict(os.environ)
    gpus = torch.cuda.device_count()
    if gpus > 1:
        names = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        env["CUDA_VISIBLE_DEVICES"] = names[k % len(names)]
    env.setdefault("OMP_NUM_THREADS", str(max(1, host_cores() // parallel)))
    with open(_worker_log(folder, k), "ab", opener=regular_files.no_links) as log:
        command = [sys.executable, "-m", "stoker", "search", "--worker", str(folder)]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def launch_workers(folder: Path, request: SearchRequest, config: Config, say: Callable[[str], None]) -> None:
    """Submits the workers: one job array of Slurm, or as many jobs of a Ray cluster. Raises StokerError."""
    place = open_place(request.launcher)
    launch = dataclasses.replace(request.launch, run_dir=str(folder))
    on_cpu = config.run.device == "cpu"
    spec = make_spec(launch, place, request.options, data=str(config.data.data), settings=(), on_cpu=on_cpu)
    if spec.devices > 1 or spec.max_nodes > 1:
        raise UsageError("A trial has one device.", fix="--parallel for more workers, no --devices and --nodes")
    tasks = request.parallel if place.name == "slurm" else 1
    spec = dataclasses.replace(spec, arguments=("search", "--worker", str(folder)), tasks=tasks)
    for warning in check_launch(spec, place):
        say(f"warning: {warning}")
    first = submit(spec, place, launch)
    jobs = [first]
    for k in range(tasks, request.parallel):
        other = dataclasses.replace(spec, attempt=first.attempt + k)
        jobs.append(msgspec.structs.replace(first, id=place.submit(other), attempt=other.attempt))
        remember(jobs[-1])
    say(f"{place.name}: {', '.join(job.id for job in jobs)}: {fmt.plural(request.parallel, 'worker')} of {folder}")
    say(f"`stoker report {shlex.quote(str(folder))}` shows the study, also while it runs")


def summary(study: Study) -> list[str]:
    """What was best, against the defaults, and the command that trains it."""
    spec, trials = study.spec, study.trials()
    pruned = sum(trial.state == TrialState.PRUNED for trial in trials)
    failed = sum(trial.state == TrialState.FAIL for trial in trials)
    lines = [f"{len(trials)} trials: {pruned} pruned, {failed} failed"]
    best = best_trials(spec, trials)
    if not best:
        return [*lines, "no trial trained to its end within the limits"]
    default = trials[0] if trials[0].state == TrialState.COMPLETE else None
    if len(best) == 1 and best[0].number == 0:
        lines.append(f"the defaults won: no trial beats trial 0, AP {best[0].values[0]:.3f}")
    elif len(spec.objectives) == 1:
        against = "n/a" if default is None else f"{default.values[0]:.3f}"
        lines.append(f"best: trial {best[0].number}, AP {best[0].values[0]:.3f}; the defaults: {against}")
        lines.append("one seed each: train both with other seeds before you believe a difference (docs/tuning.md)")
    else:
        lines += [
            f"on the front: trial {trial.number}{' (the defaults)' if trial.number == 0 else ''}: "
            + ", ".join(f"{name} {value:.4g}" for name, value in zip(spec.objectives, trial.values, strict=True))
            for trial in best
        ]
    if best[0].number:
        lines.append(train_command(trial_config(study, best[0].number)))
    return lines
