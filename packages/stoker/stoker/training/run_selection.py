"""Which run a command trains: a new one, or the unfinished one that the same command started. Its folder and lock.

Runs are compared by the settings that the user set, not by derived ones; config.toml tells which are which. The files
of the folder are in `stoker_watch/runs/records.py`; what is built from its settings is in `start.py`.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.config.settings import PER_ATTEMPT, Config, flag_of, format_flags, from_toml, to_toml
from stoker.data.formats.finder import data_file_suffixes, root_of_files
from stoker.training.extension import extended_settings, make_run_finished
from stoker.training.state import Extension
from stoker.training.supervisor import read_restart
from stoker_watch.errors import ConfigError, RunFinished, StokerError, StorageError, UsageError, make_error, writing
from stoker_watch.recording.telemetry.environment import describe
from stoker_watch.runs import records
from stoker_watch.runs.records import CONFIG, EVENTS, RunFolder, is_finished, locked, read_lines, sign_lock
from stoker_watch.runs.schemas import Event
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import display_path, expand_variables, is_uri, parse_uri, to_run_uri

RUNS_DIR = Path("runs")
NO_LOCKS_NOTE = "this storage has no locks: a second process could train the same run"


def find_meant_run(user_config: Config, resume: str | None) -> tuple[Config, str | None, list[str]]:
    """(the settings, the run to continue, messages): a run as DATA, or without DATA a model within a run, as peers
    continue one, is `--resume RUN`."""
    fields = user_config.set_fields()
    data = fields.get("data")
    if resume is None and data is not None and _is_own_run(Path(data)):
        return user_config.replace(data=None), data, [f"{data} is a run: it is continued, as with --resume {data}"]
    model = fields.get("model") if data is None else None
    if resume is None and model is not None:
        for folder in (Path(model), *Path(model).parents):
            if _is_own_run(folder):
                text = f"--model {model} is in a run, which is continued, as with --resume {folder}"
                return user_config.replace(model=None), str(folder), [text]
    return user_config, resume, []


def _is_own_run(folder: Path) -> bool:
    return (folder / EVENTS).exists() and (folder / CONFIG).exists()


def choose_run(
    user_config: Config, name: str | None, resume: str | None, stack: contextlib.ExitStack
) -> tuple[Path | None, Config, list[str]]:
    """(the unfinished run to continue or None, the user's settings when it was started, messages). name: --run-dir;
    resume: --resume; local folders, for a run in a bucket its working copy. The lock is held in `stack`. Raises
    RunFinished if the named run is finished, UsageError if it has other settings or is trained by another process."""
    if resume is not None:
        path = records.open_run(resume)
        if name is not None:
            raise UsageError(
                "--resume names the run.",
                cause=f"given as well: --run-dir {name}",
                fix=f"stoker train --resume {resume}",
            )
        refuse_others_run(path, display_path(path))
        changes = extended_settings(path, user_config, display_path(path))
        started = _read_user_config(path).replace(**user_config.of_attempt(), **changes)
        return path, started, _lock_run(path, stack)
    if "data" not in user_config.set_fields():
        choices = ("a folder", "an annotation file", "demo")
        raise UsageError("What should be trained on?", choices=choices, fix="stoker train demo")
    if name is not None:
        path = Path(expand_variables(name))
        if not (path / EVENTS).exists():
            if run := next(path.glob(f"*/{EVENTS}"), None):
                fix = f"--run-dir {path / 'NAME'}, or none: that makes a new folder"
                raise UsageError(
                    "This folder holds runs, and is none itself.", location=path, cause=f"{run.parent} is one", fix=fix
                )
            return None, user_config, []
        refuse_other_settings(path, user_config, "stoker train")
        return path, user_config, _lock_run(path, stack)
    messages, others, now = list[str](), list[str](), user_config.set_fields()
    for path in reversed(_find_runs(user_config)):
        try:
            before = _read_user_config(path).set_fields()
        except ConfigError:  # of another version
            continue
        if changed := _changed(before, now):
            is_free = before.get("data") == now.get("data") and not is_finished(path) and _is_free(path)
            if is_free and not others:
                flags = ", ".join(f"--{flag_of(name)}" for name in changed)
                others.append(
                    f"{path} is unfinished and has other {flags}: starting a new run; --resume {path} continues it"
                )
            continue
        if is_finished(path):
            _refuse_run_of_this_command(path)
            messages.append(f"{path} has the same settings and is finished: starting a new run")
            continue
        try:
            acquired = stack.enter_context(locked(path))
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            messages.append(f"{path} has the same settings and {reason}: starting a new run")
            continue
        if acquired is not False:
            sign_lock(path)
            return path, user_config, [] if acquired else [NO_LOCKS_NOTE]
        messages.append(f"{path} has the same settings and is being trained: starting a new run")
    return None, user_config, (messages + others)[:1]


def refuse_other_settings(path: Path, user_config: Config, command: str) -> None:
    """Raises RunFinished if the run `path` is finished, UsageError if it was started with other settings. user_config:
    what the user set, with absolute paths; command: continues a run by its `--resume`."""
    location = display_path(path)
    refuse_finished(path, user_config, location)
    if (difference := _difference(path, user_config)) is not None:
        fix = f"`{command} --resume {location}`, or another --run-dir"
        raise UsageError("The run was started with other settings.", location=location, cause=difference, fix=fix)


def refuse_finished(path: Path, user_config: Config, location: object) -> None:
    """Raises RunFinished if the run `path` is finished, UsageError if it is and had other settings. user_config: what
    the user set, with absolute paths. location: what the error names."""
    other_folder = "another --run-dir, or none: that makes a new folder"
    refuse_others_run(path, location, other_folder)
    if not is_finished(path):
        return
    difference = _difference(path, user_config)
    if difference is not None:
        what = "The run is finished, with other settings."
        fix = f"`stoker train --resume {location}` with a longer length trains it further; or {other_folder}"
        raise UsageError(what, location=location, cause=difference, fix=fix)
    raise make_run_finished(location)


def refuse_others_run(path: Path, location: object, fix: str = "start the job's own command again") -> None:
    """Raises UsageError if the run `path` was not trained by stoker."""
    if (path / EVENTS).exists() and not (path / CONFIG).exists():
        raise UsageError(
            "This run is of another program, which stoker watched or measured.", location=location, fix=fix
        )


def find_finished(user_config: Config, name: str | None, resume: str | None) -> RunFinished | None:
    """The end of the named run, where this machine sees it; None also for what all ranks are to say together. The
    arguments are those of `choose_run`, also URIs."""
    from stoker_watch.storage.store import fetch_files  # needed for runs in a bucket only

    location = name if resume is None else resume
    if location is None:
        return None
    try:
        uri = to_run_uri(location)
        path = Path(expand_variables(location)) if uri is None else fetch_files(uri, (CONFIG,))
        if resume is not None:
            extended_settings(path, user_config, uri or path)
        else:
            refuse_finished(path, with_absolute_paths(user_config), uri or path)
    except RunFinished as error:
        return error
    except StokerError:
        return None
    return None


def _difference(path: Path, user_config: Config) -> str | None:
    """Which settings the run `path` was started with, if they are not these; those of PER_ATTEMPT may be others."""
    started, now = _read_user_config(path).set_fields(), user_config.set_fields()
    names = [name for name in _changed(started, now) if name not in PER_ATTEMPT]
    if not names:
        return None
    return f"it was started with {format_flags(started, names)}; now it is {format_flags(now, names)}"


def _changed(started: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that only one of the two has, or that differ."""
    return [name for name in {**started, **now} if started.get(name) != now.get(name)]


def _is_free(path: Path) -> bool:
    """Whether a run can be written, and no other process is known to train it."""
    with contextlib.suppress(OSError), locked(path) as acquired:
        return acquired is not False
    return False


def _refuse_run_of_this_command(path: Path) -> None:
    """Raises RunFinished if an earlier attempt of this command, before a restart, finished the run `path`."""
    restart = read_restart()
    if restart is None:
        return
    if any(event.kind == "finished" and event.t >= restart.since for event in read_lines(path, EVENTS, Event)):
        raise make_error(RunFinished, "run-is-finished", path, reason=restart.reason)


def _lock_run(path: Path, stack: contextlib.ExitStack) -> list[str]:
    """Holds the run's lock in `stack`; returns messages."""
    fix = "check its permissions and that its disk is not read-only; or continue a copy of it"
    with writing("The run's folder cannot be written.", display_path(path), fix=fix):
        acquired = stack.enter_context(locked(path))
    if acquired is False:
        holder = records.holder_of_lock(path)
        cause = None if holder is None else f"{holder} holds its lock"
        fix = "wait for it, end it, or train into another --run-dir"
        raise UsageError("Another process is training this run.", location=display_path(path), cause=cause, fix=fix)
    sign_lock(path)
    return [] if acquired else [NO_LOCKS_NOTE]


def open_run_folder(
    config: Config,
    reasons: dict[str, str],
    path: Path | None,
    name: str | None,
    stack: contextlib.ExitStack,
    messages: list[str],
    num_ranks: int = 1,
    extension: Extension | None = None,
) -> RunFolder:
    """The run's folder, locked and ready to write: of the run `path`, or a new one, called `name` if given. Appends to
    `messages`. num_ranks: processes that train together; extension: begun by this attempt, with `config`'s length.
    Raises StorageError if it cannot be written."""
    restart = read_restart()
    try:
        if path is None:
            if name is None:
                path = records.make_run(RUNS_DIR, f"{_dataset_name(config)}-{config.model.model}")
            else:
                path = Path(expand_variables(name))
                path.mkdir(parents=True, exist_ok=True)
            messages += _lock_run(path, stack)
            write_atomic(path / CONFIG, to_toml(config, reasons).encode(), private=True)
        if extension is not None:  # before its event: a kill between both leaves a run that is still finished
            write_atomic(path / CONFIG, to_toml(config, reasons).encode(), private=True)
        folder = RunFolder(path, records.last_attempt(path) + 1)
        stack.callback(folder.close)
        environment = describe(dirs={"run": path, "data": config.data.data})
        write_atomic(path / records.ENVIRONMENT, json.dumps(environment, indent=2).encode(), private=True)
        text = f"attempt {folder.attempt}"
        data: dict[str, Any] = {} if num_ranks == 1 else {"ranks": num_ranks}
        first = from_toml(path / CONFIG)[0].of_attempt()
        changed = {name: value for name, value in config.of_attempt().items() if value != first.get(name)}
        if changed:
            text = f"{text}, with {' '.join(f'--{flag_of(name)} {value}' for name, value in sorted(changed.items()))}"
            data["settings"] = changed
        if extension is not None:
            text = f"{text}, extended from step {extension.step:,} on"
            messages.append(extension.describe(config))
            data["extended"] = msgspec.to_builtins(extension)
        if restart is not None:
            text = f"{text}, restart {restart.number} of {restart.limit} after {restart.reason}"
            data |= {"restart": msgspec.to_builtins(restart)}
        folder.event("started" if folder.attempt == 1 else "resumed", text, **data)
    except OSError as error:
        location = path or name or RUNS_DIR
        fix = "make room, or the folder writable, or name another one: --run-dir DIR"
        raise StorageError(
            "The run's folder cannot be written.", location=location, cause=str(error), fix=fix
        ) from error
    return folder


def write_diagnosis(folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Writes findings.json, however the run ended."""
    from stoker_watch.diagnosis.engine import (  # compiles patterns of logs; not needed at the start
        diagnose,
        write_findings,
    )

    try:
        write_findings(folder.path, diagnose(folder.path))
    except OSError as error:
        warn(f"{records.FINDINGS} could not be written: {error}")


def _read_user_config(path: Path) -> Config:
    """The user's settings when the run was started: those without a reason."""
    config, reasons = from_toml(path / CONFIG)
    return config.replace(**dict.fromkeys(reasons))


def with_absolute_paths(user_config: Config) -> Config:
    """The settings with absolute paths of the data and the weights file, so that the run can continue from anywhere.
    URIs stay. Environment variables are expanded here: the data of a run must not change with a variable, and two
    commands that mean the same are the same run. Raises ConfigError if a variable is not set."""
    changes = {}
    fields = user_config.set_fields()
    data, weights = fields.get("data"), fields.get("weights")
    files: dict[str, str] = {name: fields[name] for name in ("train", "val", "splits") if name in fields}
    if data is None and "train" in files:
        data = changes["data"] = str(root_of_files([files[name] for name in ("train", "val") if name in files]))
    for name, text in files.items():
        inside = Path(data or "") / text
        changes[name] = str(inside.absolute()) if inside.exists() and not Path(text).exists() else _to_absolute(text)
    if data not in (None, "demo"):
        changes["data"] = _to_absolute(data)
    if weights not in (None, "coco", "imagenet", "none"):
        changes["weights"] = _to_absolute(weights)
    return user_config.replace(**changes)


def _to_absolute(text: str) -> str:
    text = expand_variables(text)
    if is_uri(text):
        return str(parse_uri(text))
    return str(Path(text).absolute()) if Path(text).exists() else text


def _dataset_name(config: Config) -> str:
    if is_uri(config.data.data):
        uri = parse_uri(config.data.data)
        is_file = uri.name.lower().endswith(data_file_suffixes())
        name = uri.parent.name if is_file else uri.name
    else:
        path = Path(config.data.data)
        name = path.resolve().parent.name if path.is_file() else path.resolve().name
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name.lower()) or "data"


def _find_runs(user_config: Config) -> list[Path]:
    """Runs on the same data set, with any model, oldest first."""
    paths = [p for p in RUNS_DIR.glob(f"{_dataset_name(user_config)}-*-*") if (p / EVENTS).exists()]
    return sorted(paths, key=lambda p: (p / CONFIG).stat().st_mtime if (p / CONFIG).exists() else 0.0)
