"""The study that the workers of a search share: which trial is next, what it tries, and when it is pruned.

Optuna's journal file has the trials, study.json what the search is. Nothing that is decided depends on time: trial k
sees the results of the rounds before its own only (`round` trials each, as many as there were workers at first), its
sampler is seeded with (seed, k), and a pruner compares with trials of earlier rounds. So a search that was killed and
continued tries what an undisturbed one tries, as far as its metrics are reproducible.

A worker holds a lock of its trial, which the kernel releases with the process; another worker takes the trial over,
with its number and its run folder (Optuna would give it a new number, and needs heartbeats, which journal files lack).
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import msgspec

from stoker.data.index import Index
from stoker.data.index_digest import digest_images
from stoker.search.space import LIMITS, Metric, Space
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, StorageError, UsageError, needs_package, writing
from stoker_watch.storage.local_files import write_atomic

with needs_package("optuna", "`stoker search`"):
    import optuna
    from optuna.distributions import distribution_to_json
    from optuna.pruners import BasePruner, HyperbandPruner, NopPruner, SuccessiveHalvingPruner
    from optuna.samplers import BaseSampler, RandomSampler, TPESampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import BaseJournalBackend
    from optuna.study import StudyDirection
    from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # multivariate TPE is meant

STUDY, JOURNAL, TRIALS, LOCKS, PAGE = "study.json", "journal.log", "trials", "locks", "report.html"
NAME = "search"
"""Name of the study in the journal."""
PRUNERS = ("none", "halving", "hyperband")
REDUCTION = 3
"""One of three trials at a rung goes on (Li et al., Hyperband, JMLR 2018, recommend 3 or 4)."""
RUNGS = 9
"""Evaluations of a trial where the user sets no interval: rungs are at 1/9 and 1/3 of it, so a pruned trial costs about
a third at the most."""
STARTUP_TRIALS = 10
"""Random trials before the sampler models anything: Optuna's default."""
MAX_STARTS = 10
"""After which a trial has failed: its workers ended before it did."""
RUNG_ATTRIBUTE = "completed_rung_"
MAX_SPEC_BYTES, MAX_JOURNAL_BYTES = 1 << 20, 1 << 23
"""Size of study.json, and of the journal, which has about 2 kB a trial and takes a hundred times its size in memory."""
TRIAL_BYTES, EVALUATION_BYTES = 1_000, 140
"""Bytes of the journal, measured: for a trial, besides its parameters; for each of its evaluations."""
_Count = Annotated[int, msgspec.Meta(ge=1, le=5_000)]
_DAMAGED = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, msgspec.DecodeError)


class StudySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a search is: study.json."""

    data: str
    digest: str
    """By `digest_data`."""
    settings: dict[str, Any]
    """Settings of all trials, as the user set them."""
    defaults: dict[str, Any]
    """What trial 0 tries: derived values, of the settings whose range contains them."""
    space: Space
    trials: _Count
    round: _Count
    objectives: Annotated[list[Metric], msgspec.Meta(min_length=1, max_length=2)]
    pruner: Literal["none", "halving", "hyperband"]
    evaluations: _Count
    """Evaluations of a full trial, for the pruner."""
    seed: int
    sampler: str = "tpe"
    """Studies of networks, by versions that searched them, have another one."""


class Claim(NamedTuple):
    """A trial that this worker holds; it ends with the file."""

    number: int
    lock: IO[str]


class Outcome(NamedTuple):
    metrics: Mapping[str, float]
    history: Sequence[float]
    """AP of each evaluation, ascending in step."""
    steps: int
    failure: str = ""
    pruned: bool = False


class _Attributes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `Study.finish` records of a trial."""

    metrics: dict[str, float] = {}
    steps: int = 0
    failure: str = ""
    rungs: dict[str, float] = {}


class _Entry(msgspec.Struct, frozen=True):
    """The types of a line of the journal, as far as they matter after Optuna has applied it."""

    state: int = 0
    params: dict[str, float] = {}
    values: list[float] | None = None
    value: float | None = None
    step: _Count = 1
    intermediate_value: float = 0.0
    intermediate_values: dict[str, float] = {}
    user_attr: _Attributes = _Attributes()
    user_attrs: _Attributes = _Attributes()
    system_attr: dict[Annotated[str, msgspec.Meta(pattern=f"^constraints:({'|'.join(LIMITS)})$")], float] = {}
    system_attrs: dict[str, float] = {}


class _Journal(BaseJournalBackend):
    """The journal file, in the format of Optuna's own backend, which follows links and writes to the file to read it. A
    line that a kill cut off is not read; the next writer removes it."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self._position = path, 0, 0

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines after those that were read: Optuna's storage asks for no others."""
        try:
            file = regular_files.open_file(self.path, max_bytes=MAX_JOURNAL_BYTES, flags=regular_files.NO_LINKS)
        except FileNotFoundError:  # no worker has begun
            return
        with file:
            file.seek(self._position)
            complete = itertools.takewhile(lambda line: line.endswith(b"\n"), file)
            for self.lines, line in enumerate(complete, start=log_number_from + 1):
                entry = json.loads(line)
                msgspec.convert(entry, _Entry)
                self._position += len(line)
                yield entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with (
            holding(self.path.with_suffix(".lock")),
            writing("The journal of the study cannot be written.", self.path),
            open(self.path, "ab+", opener=regular_files.no_links) as journal,
        ):
            journal.seek(0)
            data = journal.read()
            if not data.endswith(b"\n"):
                journal.truncate(data.rfind(b"\n") + 1)
            journal.write(b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs))
            journal.flush()
            os.fsync(journal.fileno())


class _Storage(JournalStorage):
    """Optuna's storage; a journal that it cannot read is a UsageError."""

    _backend: _Journal

    def _sync_with_backend(self) -> None:
        try:
            super()._sync_with_backend()
        except (*_DAMAGED, AssertionError, AttributeError, OSError) as error:
            location, cause = f"{self._backend.path}:{self._backend.lines}", str(error) or type(error).__name__
            raise UsageError("The journal of the study cannot be read.", location=location, cause=cause) from error


def open_lock(path: Path, *, wait: bool) -> IO[str] | None:
    """The file with its lock held; None: another process holds it. Raises StorageError where there are no locks."""
    with writing("The lock of the study cannot be written.", path):
        file = open(path, "a+", opener=regular_files.no_links)  # noqa: SIM115  # the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        file.close()
        what, fix = "The file system of the study has no locks.", "a study on a local disk or on NFS with locks"
        raise StorageError(what, location=path, cause=error.strerror, fix=fix) from error
    return file


@contextlib.contextmanager
def holding(path: Path) -> Iterator[None]:
    """Holds the lock of a file within the block; waits for it."""
    file = open_lock(path, wait=True)
    assert file is not None, "it waits"
    with file:
        yield


class Study:
    def __init__(self, folder: Path) -> None:
        """Writes nothing. Raises UsageError if there is none."""
        self.folder = folder
        self.spec = read_spec(folder)
        self._storage = _Storage(_Journal(folder / JOURNAL))

    @functools.cached_property
    def _optuna(self) -> optuna.Study:
        """Writes to the journal: for workers."""
        directions, sampler = _directions(self.spec), RandomSampler(seed=0)
        return optuna.create_study(
            storage=self._storage, study_name=NAME, directions=directions, sampler=sampler, load_if_exists=True
        )

    def trials(self) -> list[FrozenTrial]:
        """All trials that were begun, by number. Raises UsageError where the journal is damaged."""
        try:
            trials = self._storage.get_all_trials(self._storage.get_study_id_from_name(NAME))
        except KeyError:  # no worker has begun
            return []
        distributions = self.spec.space.distributions()
        for trial in trials:
            try:
                trial._validate()
                if trial.number >= self.spec.trials:
                    raise ValueError(f"the study has {self.spec.trials} trials")
                if trial.state == TrialState.COMPLETE and len(trial.values) != len(self.spec.objectives):
                    raise ValueError(f"values for {len(trial.values)} objectives")
                if any(distributions.get(name) != entry for name, entry in trial.distributions.items()):
                    raise ValueError("its parameters are not those of the space")
            except ValueError as error:
                what = f"Trial {trial.number} of the study is damaged."
                raise UsageError(what, location=self.folder / JOURNAL, cause=str(error)) from error
        return trials

    def run_dir(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:04d}"

    def claim(self) -> Claim | Literal["wait"] | None:
        """The next trial: one whose worker died, or a new one. "wait": its round has not begun; None: no trial."""
        spec, runs = self.spec, self.folder / TRIALS
        for path in (self.folder / LOCKS, runs, *runs.glob("*")):
            if path.is_symlink():
                fix = "put the folder itself there"
                raise UsageError("A study is not continued through links.", location=path, fix=fix)
        with holding(self.folder / LOCKS / "claim"):
            trials = self.trials()
            for trial in trials:
                lock = None if trial.state.is_finished() else self._lock(trial.number)
                if lock is None:
                    continue
                if self.trials()[trial.number].state.is_finished():  # its worker ended it just now, and left its lock
                    lock.close()
                    continue
                return self._start(Claim(trial.number, lock))
            number = len(trials)
            if number >= spec.trials:
                return None
            if not all(trial.state.is_finished() for trial in trials[: _round_start(spec, number)]):
                return "wait"
            lock = self._lock(number)
            assert lock is not None, "trials are begun under the lock of the study"
            params, distributions = propose(spec, trials, number), spec.space.distributions()
            known = {name: distributions[name] for name in params}
            self._optuna.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=known))
            return self._start(Claim(number, lock))

    def _lock(self, number: int) -> IO[str] | None:
        return open_lock(self.folder / LOCKS / f"{number:04d}", wait=False)

    def _start(self, claim: Claim) -> Claim:
        claim.lock.write(f"process {os.getpid()}\n")
        claim.lock.flush()
        return claim

    def starts(self, claim: Claim) -> int:
        """How many workers have begun the trial."""
        claim.lock.seek(0)
        return len(claim.lock.readlines())

    def is_pruned(self, number: int, history: Sequence[float]) -> bool:
        """Whether the trial, with these AP of its evaluations, is to stop."""
        return self.spec.pruner != "none" and bool(history) and _judge(self.spec, self.trials(), number, history)[0]

    def finish(self, claim: Claim, outcome: Outcome) -> None:
        """Records how a trial ended; once, also where the worker before died in the middle of it."""
        spec, frozen = self.spec, self.trials()[claim.number]
        trial = Trial(self._optuna, frozen._trial_id)
        trial.set_user_attr("steps", outcome.steps)
        trial.set_user_attr("metrics", dict(outcome.metrics))
        if outcome.failure:
            trial.set_user_attr("failure", outcome.failure)
            self._optuna.tell(claim.number, state=TrialState.FAIL)
        else:
            for name, limit in spec.space.limits.items():
                if name in outcome.metrics and f"constraints:{name}" not in frozen.system_attrs:
                    trial.set_constraint(name, outcome.metrics[name] - limit)
            if len(spec.objectives) == 1:
                for n in range(len(frozen.intermediate_values), len(outcome.history)):
                    trial.report(outcome.history[n], n + 1)
                if spec.pruner != "none":
                    rungs = _judge(spec, self.trials(), claim.number, outcome.history)[1]
                    trial.set_user_attr("rungs", rungs)
            if outcome.pruned:
                self._optuna.tell(claim.number, state=TrialState.PRUNED)
            else:
                self._optuna.tell(claim.number, [outcome.metrics[name] for name in spec.objectives])
        claim.lock.close()


def create(folder: Path, spec: StudySpec) -> StudySpec:
    """Makes a study, or checks that the one in the folder is the same search; its number of trials may grow. Returns
    what the study is from now on. Raises ConfigError."""
    if not (folder / STUDY).exists():
        if folder.exists() and any(folder.iterdir()):
            raise UsageError("The folder is not empty and has no study.", location=folder, fix="another --run-dir")
        _write_spec(folder, spec)
        return spec
    old, file, fix = read_spec(folder), folder / STUDY, "another --run-dir, or the command that began the study"
    if old.digest != spec.digest:
        cause = f"it was begun with {old.data}" if old.data != spec.data else "images or boxes of the data set changed"
        raise ConfigError("The study is of another data set.", location=file, cause=cause, fix=fix)
    if old.space != spec.space:
        raise ConfigError("The study has another space.", location=file, cause="; ".join(old.space.lines()), fix=fix)
    for name in ("settings", "objectives", "pruner", "seed"):
        if (before := getattr(old, name)) != (now := getattr(spec, name)):
            what = f"The study was begun with other {name}: {before}, not {now}."
            raise ConfigError(what, location=file, fix=fix)
    if spec.trials < old.trials and spec.trials < len(Study(folder).trials()):
        raise ConfigError(f"The study has more than {spec.trials} trials already.", location=file, fix=fix)
    spec = msgspec.structs.replace(old, trials=spec.trials)
    _write_spec(folder, spec)
    return spec


def digest_data(index: Index) -> str:
    """The digest of the images and boxes for training and validation."""
    return blake2b(digest_images(index, ("train", "val")).encode(), digest_size=16).hexdigest()


def read_spec(folder: Path) -> StudySpec:
    """Raises UsageError if the folder has no study."""
    try:
        data = regular_files.read_bytes(folder / STUDY, max_bytes=MAX_SPEC_BYTES, flags=regular_files.NO_LINKS)
        spec = msgspec.json.decode(data, type=StudySpec)
        if spec.sampler != "tpe":
            raise UsageError(
                "The study searched networks, which stoker does no longer.", location=folder / STUDY,
                fix="the version of stoker that began it; `stoker search --space` searches settings",
            )  # fmt: skip
        spec.space.distributions()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError("There is no study.", location=folder, fix="stoker search DATA --run-dir FOLDER") from error
    except (*_DAMAGED, OSError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UsageError("The study cannot be read.", location=folder / STUDY, cause=cause) from error
    return spec


def _write_spec(folder: Path, spec: StudySpec) -> None:
    """Raises ConfigError, before anything is written, for a study that could not be read again."""
    data = msgspec.json.format(msgspec.json.encode(spec))
    entries = [json.dumps(distribution_to_json(one)) for one in spec.space.distributions().values()]
    trial_bytes = TRIAL_BYTES + EVALUATION_BYTES * spec.evaluations + sum(len(entry) + 50 for entry in entries)
    if spec.trials > (largest := MAX_JOURNAL_BYTES // trial_bytes):
        cause = f"a trial takes about {trial_bytes:,} bytes of the journal, of which {MAX_JOURNAL_BYTES:,} are read"
        raise ConfigError(f"{spec.trials:,} trials are too many.", cause=cause, fix=f"--trials {largest}")
    try:
        msgspec.json.decode(data, type=StudySpec)
    except msgspec.ValidationError as error:
        raise ConfigError("The study is out of range.", location=folder, cause=str(error)) from error
    if len(data) > MAX_SPEC_BYTES:
        cause = f"{STUDY} would have {len(data):,} bytes; at most {MAX_SPEC_BYTES:,} are read"
        raise ConfigError("The study is too large.", location=folder, cause=cause)
    with writing("The study cannot be written.", folder):
        (folder / LOCKS).mkdir(parents=True, exist_ok=True)
        (folder / TRIALS).mkdir(exist_ok=True)
        write_atomic(folder / STUDY, data)


def propose(spec: StudySpec, trials: Sequence[FrozenTrial], number: int) -> dict[str, Any]:
    """What the trial tries: a function of the study, the number and the results of earlier rounds. trials: at least
    those before it."""
    if number == 0:
        return dict(spec.defaults)
    distributions = spec.space.distributions()
    before = {_point(trial.params) for trial in trials[:number]}
    for draw in itertools.count():  # in a space of choices, the best point again would teach nothing
        seed = random.Random(f"{spec.seed}/{number}/{draw}").getrandbits(32)
        tpe = TPESampler(multivariate=True, seed=seed, n_startup_trials=STARTUP_TRIALS)
        sampler = RandomSampler(seed=seed) if draw else tpe
        params = _rounds_before(spec, trials, number, sampler).ask(distributions).params
        if _point(params) not in before:
            break
    return params


def _judge(
    spec: StudySpec, trials: Sequence[FrozenTrial], number: int, history: Sequence[float]
) -> tuple[bool, dict[str, float]]:
    """(whether the pruner stopped a trial after one of these evaluations, its values at the rungs)."""
    study = _rounds_before(spec, trials, number, RandomSampler(seed=0))
    trial, pruned = study.ask(), False
    for n, value in enumerate(history):
        trial.report(value, n + 1)
        pruned = (trial.should_prune() and n + 1 < spec.evaluations) or pruned
    attributes = study.get_trials()[-1].system_attrs
    return pruned, {name: value for name, value in attributes.items() if name.startswith(RUNG_ATTRIBUTE)}


def _rounds_before(spec: StudySpec, trials: Sequence[FrozenTrial], number: int, sampler: BaseSampler) -> optuna.Study:
    """A study in memory with what trial `number` may know: results of earlier rounds, and the points that its own round
    tries; the next trial has this number."""
    directions, pruner = _directions(spec), _make_pruner(spec)
    study = optuna.create_study(study_name="search", directions=directions, sampler=sampler, pruner=pruner)
    for trial in trials[:number]:
        known = trial.number < _round_start(spec, number)
        state = trial.state if known else TrialState.RUNNING
        is_whole = set(trial.params) == set(spec.space.settings)
        if not is_whole and state != TrialState.RUNNING:
            # Defaults outside the space: a sampler of several settings together can learn nothing from them.
            state = TrialState.FAIL
        attributes = dict(trial.user_attrs.get("rungs", {})) if known else {}
        if known:
            attributes |= {f"constraints:{name}": value for name, value in trial.constraints.items()}
        study.add_trial(
            create_trial(
                state=state,
                values=trial.values if state in (TrialState.COMPLETE, TrialState.PRUNED) else None,
                params=trial.params if is_whole else {},
                distributions=trial.distributions if is_whole else {},
                system_attrs=attributes,
                intermediate_values=trial.intermediate_values if known else {},
            )
        )
    return study


def _make_pruner(spec: StudySpec) -> BasePruner:
    first = max(1, spec.evaluations // RUNGS)
    if spec.pruner == "halving":
        return SuccessiveHalvingPruner(min_resource=first, reduction_factor=REDUCTION)
    if spec.pruner == "hyperband":
        return HyperbandPruner(min_resource=first, max_resource=spec.evaluations, reduction_factor=REDUCTION)
    return NopPruner()


def _directions(spec: StudySpec) -> list[StudyDirection]:
    up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
    return [up if name == "ap" else down for name in spec.objectives]


def _round_start(spec: StudySpec, number: int) -> int:
    return number // spec.round * spec.round


def _point(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def full_trials(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Those that trained to the end within the limits."""
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return [trial for trial in done if all(value <= 0 for value in trial.constraints.values())]


def best_trials(spec: StudySpec, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The best one, the earliest of equals; with two objectives all that no other one dominates."""
    full = full_trials(trials)
    if len(spec.objectives) == 1:
        return sorted(full, key=lambda trial: (-trial.values[0], trial.number))[:1]

    def costs(trial: FrozenTrial) -> list[float]:
        return [-v if name == "ap" else v for name, v in zip(spec.objectives, trial.values, strict=True)]

    def dominates(a: FrozenTrial, b: FrozenTrial) -> bool:
        return costs(a) != costs(b) and all(x <= y for x, y in zip(costs(a), costs(b), strict=True))

    return [trial for trial in full if not any(dominates(other, trial) for other in full)]


def importances(spec: StudySpec, trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """Setting → its part of the differences of AP (PED-ANOVA: Watanabe et al., IJCAI 2023), the largest first; empty
    with less than four full trials."""
    known = [trial for trial in full_trials(trials) if set(trial.params) == set(spec.space.settings)]
    if len(known) < 4:
        return {}
    study = optuna.create_study(direction="maximize")
    study.add_trials([create_trial(value=t.values[0], params=t.params, distributions=t.distributions) for t in known])
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    return optuna.importance.get_param_importances(study, evaluator=evaluator)
