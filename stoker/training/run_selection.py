"""Which run a command trains: a new one, or the unfinished one that the same command began. Its folder, its lock.

Runs are told apart by what the user asked for, not by what was derived from it: config.toml says which is which. What
is in the folder is `folder.py`; what is built from it `start.py`.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from stoker.config.settings import Config, from_toml, to_toml
from stoker.data.formats.detect import endings_of_files
from stoker.diagnosis.rules import diagnose, write_findings
from stoker.errors import ConfigError, StorageError, UsageError
from stoker.profiling.telemetry.environment import describe
from stoker.runs.records import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    FINDINGS,
    RunFolder,
    is_finished,
    last_attempt,
    locked,
    make_run,
    open_run,
)
from stoker.storage.local_files import write_whole
from stoker.storage.run_uri import shown
from stoker.storage.uri import expand, is_address, parse

RUNS = Path("runs")
NO_LOCKS = "this storage has no locks: nothing keeps a second process from training the same run"


def choose(
    asked: Config, name: str | None, resume: str | None, stack: contextlib.ExitStack
) -> tuple[Path | None, Config, list[str]]:
    """(the unfinished run to continue or None, what was asked for when it began, lines to say).

    name: --run; resume: --resume; folders of this machine, of a run in a bucket its working copy. The run is held in
    `stack`. Raises UsageError when the run that was named is finished, was started by another command, or is being
    trained by another process.
    """
    if resume is not None:
        if asked.set_fields() or name is not None:
            raise UsageError("--resume takes its settings from the run.", fix="leave out the other flags")
        path = open_run(resume)
        if is_finished(path):
            place = shown(path)
            raise UsageError(
                "The run is finished: there is nothing to resume.", place=place, fix=f"`stoker why {place}`"
            )
        return path, _asked_of(path), _hold(path, stack)
    if "data" not in asked.set_fields():
        choices = ("a folder", "a file of annotations", "demo")
        raise UsageError("What should be trained on?", choices=choices, fix="stoker train demo")
    if name is not None:
        path = Path(expand(name))
        if not (path / EVENTS).exists():
            return None, asked, []
        place = shown(path)
        if is_finished(path):
            fix = "another --run, or none: a new folder is made then"
            raise UsageError("The run is finished.", place=place, fix=fix)
        if _asked_of(path) != asked:
            cause = f"it was started with {_words(_asked_of(path))}; now it is {_words(asked)}"
            fix = f"`stoker train --resume {place}`, or another --run"
            raise UsageError("The run was started with other settings.", place=place, cause=cause, fix=fix)
        return path, asked, _hold(path, stack)
    said = []
    for path in reversed(_runs_of(asked)):
        if not _has_settings(path, asked):
            continue
        if is_finished(path):
            said.append(f"{path} had the same settings and is finished: starting a new run")
            continue
        held = stack.enter_context(locked(path))
        if held is not False:
            return path, asked, [] if held else [NO_LOCKS]
        said.append(f"{path} has the same settings and is being trained: starting a new run")
    return None, asked, said[:1]


def _hold(path: Path, stack: contextlib.ExitStack) -> list[str]:
    """Holds the run in `stack`; returns what there is to say about it."""
    held = stack.enter_context(locked(path))
    if held is False:
        raise UsageError("Another process is training this run.", place=shown(path))
    return [] if held else [NO_LOCKS]


def open_folder(
    config: Config,
    reasons: dict[str, str],
    path: Path | None,
    name: str | None,
    stack: contextlib.ExitStack,
    said: list[str],
) -> RunFolder:
    """The run's folder, held and ready to write: of the run `path`, or a new one, called `name` if that is given.

    What there is to say about holding it is added to `said`. Raises StorageError when it cannot be written.
    """
    try:
        if path is None:
            path = _new_run(config, name)
            said += _hold(path, stack)
            write_whole(path / CONFIG, to_toml(config, reasons).encode())
        folder = RunFolder(path, last_attempt(path) + 1)
        stack.callback(folder.close)
        environment = describe(folders={"run": path, "data": config.data.data})
        write_whole(path / ENVIRONMENT, json.dumps(environment, indent=2).encode())
        folder.event("started" if folder.attempt == 1 else "resumed", f"attempt {folder.attempt}")
    except OSError as error:
        place = path or name or RUNS
        fix = "make room or name another folder: --run DIR"
        raise StorageError("The run's folder cannot be written.", place=place, cause=str(error), fix=fix) from error
    return folder


def conclude(folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Writes the diagnosis, however the run ended."""
    try:
        write_findings(folder.path, diagnose(folder.path))
    except OSError as error:
        warn(f"{FINDINGS} could not be written: {error}")


def _new_run(config: Config, name: str | None) -> Path:
    if name is not None:
        path = Path(expand(name))
        path.mkdir(parents=True, exist_ok=True)
        return path
    return make_run(RUNS, f"{_data_name(config)}-{config.model.model}")


def _asked_of(path: Path) -> Config:
    """What the user had set when the run was started: the settings without a reason."""
    config, reasons = from_toml(path / CONFIG)
    return config.replace(**dict.fromkeys(reasons))


def _has_settings(path: Path, asked: Config) -> bool:
    """Whether the run was started with `asked`; a run of another version of stoker was not."""
    try:
        return (path / CONFIG).exists() and _asked_of(path) == asked
    except ConfigError:
        return False


def with_absolute_paths(asked: Config) -> Config:
    """`asked` with its data and its weights file named from the root, so that the run can continue from anywhere.

    Addresses stay; environment variables are replaced here: what a run was trained on must not change with a variable,
    and two commands that mean the same are the same run. Raises ConfigError where one is not set.
    """
    changes = {}
    data, weights = asked.data.data, asked.model.weights
    if data not in (None, "demo"):
        changes["data"] = _named_from_root(data)
    if weights not in (None, "coco", "imagenet", "none"):
        changes["weights"] = _named_from_root(weights)
    return asked.replace(**changes)


def _named_from_root(text: str) -> str:
    text = expand(text)
    if is_address(text):
        return str(parse(text))
    return str(Path(text).absolute()) if Path(text).exists() else text


def _words(config: Config) -> str:
    return " ".join(f"--{name.rstrip('_')} {value}" for name, value in config.set_fields().items())


def _data_name(config: Config) -> str:
    if is_address(config.data.data):
        address = parse(config.data.data)
        is_file = address.name.lower().endswith(endings_of_files())
        name = address.parent.name if is_file else address.name
    else:
        path = Path(config.data.data)
        name = path.resolve().parent.name if path.is_file() else path.resolve().name
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name.lower()) or "data"


def _runs_of(asked: Config) -> list[Path]:
    """Runs of the asked data set, whatever their model, oldest first."""
    paths = [p for p in RUNS.glob(f"{_data_name(asked)}-*-*") if (p / EVENTS).exists()]
    return sorted(paths, key=lambda p: (p / CONFIG).stat().st_mtime if (p / CONFIG).exists() else 0.0)
