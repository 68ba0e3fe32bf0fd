"""`stoker tune`: does what the policy asks for, trial by trial, and writes what it found.

Each trial is a line of probes.jsonl in the folder of the tuning, written again when its state changes; the newest line
counts. What to try, and what a measurement means, is in `policy.py`; processes and windows are in `trials.py`.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import RenderableType

from stoker.config.settings import Config, from_fields, from_toml, to_toml
from stoker.data.images.pixel_cache import MAX_FACTOR, CachedImageSpec, collect_cache_inputs
from stoker.data.index import Index
from stoker.data.index_digest import digest_images
from stoker.data.validation.suggestions import suggest
from stoker.hardware.device import Device
from stoker.models import MODELS, get_architecture
from stoker.training import start
from stoker.training.cluster import Devices
from stoker.training.defaults.derive import derive_for_plan, total_steps
from stoker.tuning import policy
from stoker.tuning.levers import Changes, Facts, Lever, choose_levers
from stoker.tuning.policy import BOUNDS, CONFIRM, DONE, Action, Context
from stoker.tuning.trials import COMMAND, TrialError, TrialProcess, TrialRecords, compare, measure_in_turn, new_probe
from stoker_watch import regular_files
from stoker_watch.diagnosis.termination import is_held
from stoker_watch.durations import parse_duration
from stoker_watch.errors import DataError, UsageError
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.report import format as fmt
from stoker_watch.report.console import print_renderables, table
from stoker_watch.report.explain import explain_run
from stoker_watch.runs import records
from stoker_watch.runs.records import CONFIG, FINDINGS, PROBES
from stoker_watch.runs.schemas import Probe
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import display_path, is_uri

FIRST = "first.toml"
"""The file of the settings that the tuning began with."""
LOG = "trials.log"
TRIAL_SHARE = 0.2
"""Fraction of the budget that one trial may take, before it is judged by the pairs that it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What the command asks for. target: a data set or a run; config: settings of the user, without `target`; devices:
    of this machine that train together."""

    target: str
    config: Config = Config()  # noqa: RUF009  # frozen
    budget_s: float = 600.0
    levers: tuple[str, ...] = ()
    allow_accuracy: bool = False
    out: Path | None = None
    devices: int = 1
    command: tuple[str, ...] = COMMAND


class TuneResult(msgspec.Struct, kw_only=True):
    folder: str
    machine: str
    config: str
    """File of the settings that are fastest."""
    end: str
    trials: list[Probe]
    changes: dict[str, Any]
    """What the settings in `config` change; empty: the first settings are the fastest, or nothing was confirmed."""
    confirmation: Probe | None
    findings: list[Finding]


def tune(request: TuneRequest, on_progress: Callable[[str], None]) -> TuneResult:
    """Measures until no change pays or the budget is spent, or continues that. on_progress: called with lines of text.
    Raises UsageError for an unknown lever, too short a budget, a folder of other settings; DataError for a folder of
    other data; what `stoker train` raises for the data and settings. All before anything is measured."""
    if request.budget_s < policy.MIN_BUDGET_S:
        what = f"--budget: {request.budget_s:.0f} s are too short for one measurement."
        cause = f"the bounds, one trial and the confirmation take {policy.MIN_BUDGET_S} s on a small model"
        raise UsageError(what, cause=cause, fix="--budget 10min")
    levers = choose_levers(request.levers, allow_accuracy=request.allow_accuracy)
    resolved = resolve(request)
    context = Context(levers, collect_facts(resolved, request), resolved.config.set_fields(), request.budget_s)
    with open_folder(request, resolved, context.facts, on_progress) as known:
        with contextlib.closing(Runner(context, known, request, on_progress)) as runner:
            end = runner.run()
        changes, confirmation = policy.final_changes(known.lines, context)
        trials, folder = known.newest(), known.path
        target = folder / CONFIG
        config = resolved.config.replace(**policy.restore_types(changes))
        reasons = {name: reason for name, reason in resolved.reasons.items() if name not in changes}
        write_atomic(target, to_toml(config, reasons).encode())
        findings = make_findings(trials, context, changes, target)
        write_atomic(folder / FINDINGS, msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
    return TuneResult(
        folder=display_path(folder), machine=context.facts.machine, config=display_path(target), end=end,
        trials=trials, changes=changes, confirmation=confirmation, findings=findings,
    )  # fmt: skip


def resolve(request: TuneRequest) -> start.ResolvedRun:
    """The settings that the tuning begins with, of a run or derived for a data set."""
    path = Path(request.target)
    config = request.config
    if request.devices < 1:
        raise UsageError(f"--devices {request.devices} is out of range.", choices=["1 or more"])
    if config.run.sync == "auto":
        fix = "leave it out: the lever sync tries methods"
        raise UsageError("--sync auto measures its own link when a training starts.", fix=fix)
    devices = Devices(request.devices, request.devices)
    if not is_uri(request.target) and (path / CONFIG).is_file():
        if is_held(path):
            raise UsageError("The run is still running: trials would use its device.", location=path)
        stored, reasons = from_toml(path / CONFIG)
        if config.set_fields():
            raise UsageError("--config is for a data set; a run has its own settings.", location=path)
        resolved = start.resolve_run(stored, None, devices=devices)
        resolved = dataclasses.replace(resolved, reasons={**resolved.reasons, **reasons})
    else:
        resolved = start.resolve_run(config.replace(data=request.target), None, devices=devices)
    run = resolved.config.run
    if request.devices > 1 and run.shard:
        what = "A model that is divided among devices cannot be tuned."
        cause = "each process of a trial has the whole model"
        raise UsageError(what, cause=cause, fix="leave out --shard")
    return resolved


def collect_facts(resolved: start.ResolvedRun, request: TuneRequest) -> Facts:
    config, index, device = resolved.config, resolved.index, resolved.device
    train = index.image_indices("train")
    architecture = get_architecture(config.model.model)
    steps = total_steps(parse_duration(config.run.max_duration), len(train), config.run.batch_size)
    recipe = derive_for_plan(Config().replace(data=config.data.data, model=config.model.model), index, device)[0]
    digest = blake2b(digest_images(index, ("train", "val")).encode(), digest_size=8).hexdigest()
    several = f"{request.devices} × " if request.devices > 1 else ""
    divisor, allow_accuracy = architecture.size_divisor, request.allow_accuracy
    suggested = suggest(index, config.set_fields(), multiple=divisor) if allow_accuracy else ()
    return Facts(
        machine=f"{several}{device.name}, {host_cores()} cores, torch {torch.__version__}",
        data=digest,
        devices=request.devices,
        device_kind=device.kind,
        cores=max(1, host_cores() // request.devices),
        best_precision=device.best_precision()[0],
        num_images=len(train),
        epochs=None if steps is None else steps * config.run.batch_size / len(train),
        cache_kinds=_cache_kinds(config, index),
        recipe_batch_size=recipe.run.batch_size,
        recipe_optimizer_is_sgd=config.optim.optimizer == "sgd",
        size_divisor=divisor,
        smaller_models=_smaller_models(config, index, device) if allow_accuracy else {},
        suggestions={found.lever: found.changes for found in suggested},
    )


def _cache_kinds(config: Config, index: Index) -> list[str]:
    """The kinds of caches with room for all decoded images, without blurring the crops."""
    data, train = config.data, index.image_indices("train")
    spec = CachedImageSpec.for_augmentation(
        data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
    )
    max_scale = data.scale_range[1] if data.scale_jitter_prob > 0 else 1.0
    inputs = collect_cache_inputs(index, train, spec, max_scale=max_scale, epochs=None)
    if inputs.num_images < len(train) or (inputs.is_downscaled and max_scale > MAX_FACTOR):
        return []
    has_disk = inputs.network_file_system is None and inputs.cached_bytes <= inputs.free_disk_bytes
    has_memory = 2 * inputs.cached_bytes <= inputs.free_memory_bytes
    return ["disk"] * has_disk + ["ram"] * has_memory


def _smaller_models(config: Config, index: Index, device: Device) -> dict[str, Changes]:
    """Models of the family with fewer parameters → the settings that differ, the largest first."""
    now = get_architecture(config.model.model)
    smaller = [row for row in MODELS.items() if row[1].family == now.family and row[1].num_params < now.num_params]
    found = {}
    for name, _ in sorted(smaller, key=lambda row: -row[1].num_params):
        user = Config().replace(data=config.data.data, model=name, image_size=config.data.image_size)
        fields = derive_for_plan(user, index, device)[0].model
        own = dataclasses.asdict(fields)
        found[name] = {key: value for key, value in own.items() if getattr(config.model, key) != value}
    return found


@contextlib.contextmanager
def open_folder(
    request: TuneRequest,
    resolved: start.ResolvedRun,
    facts: Facts,
    on_progress: Callable[[str], None],
    prefix: str = "tune",
) -> Iterator[TrialRecords]:
    """A new folder, or that of the tuning which a kill interrupted, locked. Raises UsageError, DataError."""
    name = Path(request.target.rstrip("/")).stem or "data"
    folder = request.out or Path("runs") / f"{prefix}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    with records.locked(folder) as is_ours, contextlib.closing(TrialRecords(folder, facts)) as trials:
        if is_ours is False:
            raise UsageError("Another process tunes here.", location=folder, fix="wait for its end, or give --out")
        first, text = folder / FIRST, to_toml(resolved.config, {})
        machines, fix = {line.machine for line in trials.lines}, "give another folder: --out DIR"
        if not first.exists() or not trials.lines:
            write_atomic(first, text.encode())
        elif any(line.data != facts.data for line in trials.lines):
            cause = "images or boxes have changed since, or --out names the folder of another data set"
            raise DataError("The trials of this folder are of other data.", location=folder, cause=cause, fix=fix)
        elif regular_files.read_text(first) != text:
            raise UsageError("The trials of this folder began with other settings.", location=first, fix=fix)
        else:
            if others := machines - {facts.machine}:
                names = ", ".join(sorted(others))
                on_progress(f"trials on another machine do not count here ({names}): measuring anew")
            if facts.machine in machines:
                on_progress(f"continuing {display_path(folder)}")
        yield trials


class Runner:
    """The trials of a tuning, one after the other."""

    def __init__(
        self, context: Context, trials: TrialRecords, request: TuneRequest, on_progress: Callable[[str], None]
    ) -> None:
        self.context, self.records, self.request, self.on_progress = context, trials, request, on_progress
        self._base: TrialProcess | None = None
        self._largest_batch = max(context.facts.recipe_batch_size, context.settings["batch_size"])

    def run(self) -> str:
        """Does trials until the policy is done; returns the reason for the end."""
        while True:
            action = policy.next_action(self.records.lines, self.context)
            if action.kind == DONE:
                return action.reason
            probe = new_probe(
                action.kind, trial=action.trial, state="planned", changes=action.changes, fraction=action.fraction
            )
            if action.reason:
                probe = self.records.write(probe, state="unavailable", reason=action.reason)
            else:
                probe = self.records.run(self.records.write(probe), functools.partial(self._measure, action))
            self.on_progress(describe(probe, self.context))

    def close(self) -> None:
        self._replace_base(None)

    def _measure(self, action: Action) -> dict[str, Any]:
        """Measures; returns the fields of a trial's last line. Raises TrialError."""
        if action.kind == BOUNDS:
            return self._measure_bounds()
        now = policy.assess(self.records.newest(), self.context)
        assert now is not None
        lever, changes = self.context.lever(action.kind), policy.restore_types(action.changes)
        settings = now.settings | changes
        if lever is not None and policy.is_interval(lever):
            windows = [(seconds, seconds) for seconds in now.seconds]
            return _summarize(policy.with_events(windows, now.settings, settings, now, self.context.facts), 0, {})
        if lever is not None and policy.is_suggestion(lever):
            return self._prove_ap(changes, now)
        until_s = time.monotonic() + TRIAL_SHARE * self.context.budget_s
        if action.kind == CONFIRM:  # in new processes, since what was measured in one may be its own luck
            self._replace_base(None)
            closing, before = contextlib.closing, dict(self.context.settings)
            with closing(self._start(before)) as first, closing(self._start(settings)) as final:
                found = compare(first, final, until_s=until_s)
            pairs = policy.with_events(found.pairs, before, settings, now, self.context.facts)
            return _summarize(pairs, found.steps, found.phases) | {"kept": False, "reason": ""}
        assert lever is not None
        return self._try(lever, now, settings, until_s)

    def _measure_bounds(self) -> dict[str, Any]:
        """Measures whole steps, steps on one batch, and loading alone."""
        base = self._start_base(self.context.settings)
        base.warm_up()
        depth = base.batch_size * (base.ready.prefetch_depth + 1)
        found = measure_in_turn(base.step, base.train_after_steps, unit=base.batch_size, until_s=0.0)
        base.ask("load", depth)  # what was loaded ahead
        images = max(depth, found.steps * base.batch_size // len(found.pairs))
        load = base.ask("load", max(images, base.requested), steady=True)
        bounds = {
            "step": statistics.median(step for step, _ in found.pairs),
            "train": statistics.median(train for _, train in found.pairs),
            "load": load.seconds / load.images,
            "eval": base.ask("eval").seconds,
            "checkpoint": base.ask("checkpoint").seconds,
        }
        pairs = [(train, step) for step, train in found.pairs]
        return _summarize(pairs, found.steps, found.phases, bounds=bounds) | {"kept": False}

    def _try(self, lever: Lever, now: policy.Situation, after: dict[str, Any], until_s: float) -> dict[str, Any]:
        before = now.settings
        base = self._start_base(before)
        with contextlib.ExitStack() as stack:
            candidate = stack.enter_context(contextlib.closing(self._start(after)))
            if lever.tolerance is not None:
                reason = self._compare_training(lever, base, candidate, now)
                if reason:
                    return {"state": "failed", "reason": reason}
            found = compare(self._start_base(before), candidate, until_s=until_s)
            values = _summarize(found.pairs, found.steps, found.phases)
            if values["kept"] and lever.tolerance is None:
                pair_s = 1 / values["before_img_per_s"] + 1 / values["after_img_per_s"]
                stack.close()  # the candidate: its memory is for the trainings
                return values | self._measure_ap(before, after, pair_s)
            if values["kept"]:
                stack.pop_all()  # it goes on
                self._replace_base(candidate)
            return values

    def _prove_ap(self, changes: Changes, now: policy.Situation) -> dict[str, Any]:
        """AP with and without a suggestion, which comes after what is faster. Raises TrialError."""
        known, _ = policy.final_changes(self.records.lines, self.context)
        before = {**self.context.settings, **policy.restore_types(known)}
        after = {**before, **changes}
        more = math.prod(after["image_size"]) / math.prod(before["image_size"])
        found = self._measure_ap(before, after, now.bounds.bounds["train"] * (1 + more))
        kept = found["ap_gain"][1] > 0
        reason = "" if kept else "the interval of its gain in AP is not above 0"
        return {"state": "passed", "kept": kept, "reason": reason, **found}

    def _measure_ap(self, before: dict[str, Any], after: dict[str, Any], pair_s: float) -> dict[str, Any]:
        """AP of trainings on the same number of images, of each seed. pair_s: seconds of an image in one training and
        in the other. Raises TrialError."""
        self._replace_base(None)
        images = policy.AP_SHARE * self.context.budget_s / pair_s / policy.AP_SEEDS
        if images < 10 * max(before["batch_size"], after["batch_size"]):
            raise TrialError("the budget has no room for the six trainings that measure AP", unavailable=True)
        pairs = []
        for seed in range(policy.AP_SEEDS):
            ap = []
            for settings in (before | {"seed": seed}, after | {"seed": seed}):
                steps = int(images / settings["batch_size"])
                digest = blake2b(msgspec.json.encode([settings, steps], order="sorted"), digest_size=6).hexdigest()
                ap.append(train_briefly(settings, steps, self.records.path / f"ap-{digest}", self.request.devices))
            pairs.append((ap[0], ap[1]))
        means = tuple(statistics.fmean(values) for values in zip(*pairs, strict=True))
        return {"ap": means, "ap_pairs": pairs, "ap_gain": policy.measure_gain(pairs)}

    def _compare_training(
        self, lever: Lever, base: TrialProcess, candidate: TrialProcess, now: policy.Situation
    ) -> str:
        """Why the candidate is another training; empty: it is the same."""
        group = math.gcd(base.micro_batch_size, candidate.micro_batch_size)
        images = policy.num_compared(lever, self._largest_batch, statistics.median(now.seconds))
        if policy.compares_means(lever) and not candidate.settings["compile"]:  # a compiled step has one size
            while group % 2 == 0 and images // group < policy.MIN_GROUPS:
                group //= 2
        lr = 0.1 * self.context.settings["lr"]
        if not base.is_fresh and (images, group, lr) not in base.compared:  # it is past its first images
            self._replace_base(None)
            base = self._start_base(base.settings)
        before, after = (process.first_images(images, group, lr)[lever.compare] for process in (base, candidate))
        if base.batch_size != candidate.batch_size:  # the updates differ, the losses before them do not
            before, after = before[: len(before) // 2], after[: len(after) // 2]
        return policy.why_another_training(lever, before, after)

    def _start(self, settings: dict[str, Any]) -> TrialProcess:
        request = self.request
        return TrialProcess(settings, self.records.path / LOG, request.command, request.budget_s, request.devices)

    def _start_base(self, settings: Any) -> TrialProcess:
        """The process with these settings that is running, or a new one."""
        if self._base is None or self._base.has_failed or self._base.settings != dict(settings):
            self._replace_base(None)
            self._base = self._start(dict(settings))
        return self._base

    def _replace_base(self, process: TrialProcess | None) -> None:
        if self._base is not None:
            self._base.close()
        self._base = process


def train_briefly(settings: dict[str, Any], steps: int, run: Path, devices: int = 1) -> float:
    """The AP of a training of so many steps, which continues what a kill interrupted. Raises TrialError."""
    short = settings | {"max_duration": str(steps), "eval_every": "0", "patience": 0}
    short["warmup_steps"] = max(1, steps // 20)
    run.mkdir(parents=True, exist_ok=True)
    file = run.with_suffix(".toml")
    write_atomic(file, to_toml(from_fields(short), {}).encode())
    while is_held(run):  # the process that a killed tuning started goes on
        time.sleep(1.0)
    if not records.is_finished(run):
        command = [sys.executable, "-m", "stoker", "train", "--config", str(file), "--run-dir", str(run)]
        command += ["--devices", str(devices)] if devices > 1 else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            text = f"the training that measures AP ended with exit code {done.returncode}: {done.stderr[-200:]}"
            raise TrialError(text)
    return explain_run(run).ap or 0.0


def _summarize(pairs: list[tuple[float, float]], steps: int, phases: dict[str, float], **more: Any) -> dict[str, Any]:
    """The fields of a trial that was measured."""
    speed = policy.summarize_speed(pairs)
    kept = speed["ratio_low"] > policy.MIN_RATIO
    reason = "" if kept else "its interval is not above 1"
    return {"state": "passed", "pairs": pairs, "phases": phases, "steps": steps, "kept": kept, "reason": reason,
            **speed, **more}  # fmt: skip


def describe_changes(changes: Changes, settings: dict[str, Any] | Any) -> str:
    """`workers 1 → 4`."""
    return ", ".join(f"{name} {settings.get(name)} → {value}" for name, value in changes.items())


def describe(probe: Probe, context: Context) -> str:
    if probe.probe == BOUNDS:
        return describe_bounds(probe)
    what = describe_changes(probe.changes, context.settings) if probe.changes else probe.probe
    if probe.probe == CONFIRM:
        what = "all together, in new processes"
    if probe.state != "passed":
        return f"{what}: {probe.state}: {probe.reason}"
    verdict = "" if probe.probe == CONFIRM else ", kept" if probe.kept else ", not kept"
    speed = f", {probe.ratio:.2f} times ({probe.ratio_low:.2f} … {probe.ratio_high:.2f})" if probe.pairs else ""
    return f"{what}: {(speed + describe_gain(probe)).removeprefix(', ')}{verdict}"


def describe_gain(probe: Probe) -> str:
    """What a change does to AP, with its interval; empty: it was not measured."""
    if probe.ap is None or probe.ap_gain is None:
        return ""
    gain, low, high = probe.ap_gain
    return (
        f", AP {probe.ap[0]:.3f} → {probe.ap[1]:.3f}, by {gain:+.3f} (95 %: {low:+.3f} … {high:+.3f}, "
        f"{len(probe.ap_pairs)} seeds)"
    )


def describe_bounds(probe: Probe) -> str:
    if probe.state != "passed":
        return f"the first settings: {probe.state}: {probe.reason}"
    speed = {name: 1 / probe.bounds[name] for name in ("train", "step", "load")}
    where = "loading is" if speed["load"] < speed["step"] else "the steps are"
    return (
        f"{speed['train']:.1f} img/s now; {speed['step']:.1f} without loading, {speed['load']:.1f} without steps: "
        f"{where} the limit; perfect loading would make it {probe.ratio:.2f} times as fast"
    )


def make_findings(trials: Sequence[Probe], context: Context, changes: Changes, config: Path) -> list[Finding]:
    """A finding for each change that was measured: verified, or refuted."""
    findings = []
    for trial in trials:
        lever = context.lever(trial.probe)
        if lever is None or trial.state != "passed":
            continue
        is_in = trial.kept and set(trial.changes) <= set(changes)
        text, what = describe(trial, context), describe_changes(trial.changes, context.settings)
        effect, value = f"trains {trial.ratio:.2f} times as fast", trial.ratio
        if policy.is_suggestion(lever) and trial.ap_gain:
            effect, value = "raises AP", trial.ap_gain[0]
        findings.append(
            Finding(
                id=lever.cause,
                severity="warning" if is_in else "info",
                title=f"{what} {effect}." if is_in else f"{what} does not pay here.",
                evidence=[Evidence(text=text, value=value, source=PROBES)],
                fix=f"train with {config}" if is_in else "",
                command=f"stoker train --config {config}" if is_in else None,
                confidence=0.95,
                probe_result=f"{'confirmed' if is_in else 'refuted'} by {text}",
                config_patch=trial.changes if is_in else {},
            )
        )
    return findings


def print_result(result: TuneResult) -> None:
    """Prints the table of all trials, and what to do with the result."""
    rows: list[tuple[str, ...]] = []
    for trial in result.trials:
        names = ", ".join(f"{name} {value}" for name, value in trial.changes.items())
        what = {BOUNDS: "headroom: without loading", CONFIRM: "confirmation, all together"}.get(trial.probe, names)
        if trial.state != "passed":
            rows.append((what or trial.probe, "", "", "", "", f"{trial.state}: {trial.reason}"))
            continue
        verdict = "" if trial.probe in (BOUNDS, CONFIRM) else "kept" if trial.kept else "not kept"
        speed = ("", "", "", "")
        if trial.pairs:
            interval = f"{trial.ratio_low:.2f} … {trial.ratio_high:.2f}"
            before, after = fmt.number(trial.before_img_per_s), fmt.number(trial.after_img_per_s)
            speed = (before, after, f"{trial.ratio:.2f}", interval)
        rows.append((what, *speed, verdict + describe_gain(trial)))
    heads = ("tried", "img/s before", "after", "ratio", "95 % interval", "")
    lines: list[RenderableType] = ["", table(*heads, right=(1, 2, 3), rows=rows), "", f"The end: {result.end}."]
    confirmation = result.confirmation
    if result.changes and confirmation is not None and confirmation.ratio_low > 1:
        lines.append(
            f"{result.config} has the result: {confirmation.ratio:.2f} times the images per second in new processes "
            f"(95 %: {confirmation.ratio_low:.2f} to {confirmation.ratio_high:.2f}). "
            f"`stoker train --config {result.config}` trains with it."
        )
    elif result.changes:
        lines.append(f"{result.config} has the suggestions that raised AP; nothing faster was confirmed.")
    elif confirmation is not None:
        reason = confirmation.reason or f"{confirmation.ratio_low:.2f} … {confirmation.ratio_high:.2f} times"
        lines.append(f"Nothing is kept: the confirmation did not find the result faster ({reason}).")
    else:
        lines.append(f"The first settings are the best that was found; {result.config} has them.")
    lines.append(f"Measured on {result.machine}; on another machine, tune again.")
    print_renderables(lines)
