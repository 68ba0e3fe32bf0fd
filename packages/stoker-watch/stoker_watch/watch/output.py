"""Progress from a training job's output: pure functions, a line in, `Progress` or None out; and windows of them.

Supported are the TF Object Detection API, Keras, torchvision's MetricLogger, Ultralytics, Lightning, the Hugging Face
Trainer, JSON, some 30 other programs (tests/watch/watch/test_log_lines.py has a line of each), plain `loss=`, `loss:`;
the patterns are in `knowledge/progress_lines.toml`. None of them matches prose: a loss counts only as a number after
its name, in a line that also has a step counter, or has only such pairs.
"""

import codecs
import dataclasses
import math
import re
from collections.abc import Callable

from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import StepWindow

MAX_LINE_LENGTH = 2048
"""The rest of a longer line is ignored."""
_MAX_PENDING_LENGTH = 4 * MAX_LINE_LENGTH
"""The same with colors and cursor movements, before the end of the line has come."""
MAX_LOSSES = 100
"""Losses of a window; a job with more names prints something else."""
MAX_FIRST_STEP = 100
"""A first counter above this is of a job that was resumed: the steps before it were not watched. The TF Object
Detection API prints its first line at step 100."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The values in one line; None if absent. Losses have the job's names; `total` is the whole loss."""

    step: int | None = None
    """Steps done; with `total_steps`, since the start of the epoch."""
    total_steps: int | None = None
    """Steps of an epoch, or of the run."""
    epoch: int | None = None
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """May hold NaN and infinity."""
    lr: float | None = None
    grad_norm: float | None = None
    img_per_s: float | None = None
    step_s: float | None = None
    """Seconds per step, as the job measured them."""
    input_wait_s: float | None = None
    """The part of `step_s` that waited for images."""
    is_bare_bar: bool = False
    """A progress bar without a loss: of training only if other lines say so."""
    loss_columns: tuple[str, ...] = ()
    """Names of the losses in the following lines (Ultralytics' header)."""


class LineSplitter:
    """Splits a stream of bytes into lines as displayed: a line that was overwritten (carriage return, backspaces) is a
    separate line; colors and cursor movements are removed."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The complete lines; final: also the last one, without its end."""
        text = self._rest + self._decoder.decode(data, final)
        parts = _BREAK.split(text)
        self._rest = "" if final else parts.pop()[:_MAX_PENDING_LENGTH]
        lines = [line for part in parts for line in _BAR.sub(r"\1\n", _CONTROL.sub("", part)).split("\n")]
        return [line[:MAX_LINE_LENGTH] for line in lines if line.strip()]


_BREAK = re.compile(r"[\r\n\b]+")
_BAR = re.compile(r"(\| ?\d{1,15}/\d{1,15} ?\[[^\]<]{0,100}<[^\]]{0,400}\])(?= *[A-Za-z{\[(])")
"""A bar of tqdm that is followed by other text in its line: tqdm ends no line before the job prints."""
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_SPACES = re.compile(r"\s{2,}|#011")
"""`#011` is a tab in the logs of SageMaker."""
_KEYWORD = re.compile(r"%|loss|epoch|step|learning_rate|train| rate,", re.IGNORECASE)
"""What every line of progress contains: most other lines end here."""

_TABLE = read_toml("progress_lines.toml")


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("NUMBER", _TABLE["number"]).replace("END", _TABLE["end"]))


LAYOUTS = {name: _compile(pattern) for name, pattern in _TABLE["layouts"].items()}
_PARTS = {name: _compile(pattern) for name, pattern in _TABLE["parts"].items()}


def parse_progress(line: str) -> Progress | None:
    """The progress in a line. Never raises."""
    line = _normalize(line)
    if _KEYWORD.search(line) is None:
        return None
    return next((progress for parser in PARSERS if (progress := parser(line)) is not None), None)


def _normalize(line: str) -> str:
    return _SPACES.sub(" ", line[:MAX_LINE_LENGTH])


class ProgressParser:
    """`parse_progress` with a state: Keras prints the same bar for evaluation as for training. If it prints `Epoch 1/3`
    before training, a bar that begins after the epoch's bar was full is not training; without that line (a `fit` of one
    epoch) the two cannot be distinguished, and all bars count."""

    def __init__(self) -> None:
        self._is_training: bool | None = None

    def read(self, line: str) -> Progress | None:
        line = _normalize(line)
        if LAYOUTS["keras_epoch"].match(line):
            self._is_training = True
        elif bar := LAYOUTS["keras_bar"].match(line):
            if self._is_training is False:
                return None
            if self._is_training and bar["step"] == bar["total"]:
                self._is_training = False
        return parse_progress(line)


def parse_number(text: str) -> float:
    """The value of a text that matches `number`; a comma is the decimal point of another locale."""
    return float(text.replace(",", "."))


def parse_dict(line: str) -> Progress | None:
    """A dict of numbers, or one line of it: the Hugging Face Trainer's, the TF Object Detection API's losses."""
    line = line.replace('"', "'")
    start = _PARTS["dict_start"].match(line)
    position = end = start.end() if start is not None else 0
    while (entry := _PARTS["dict_entry"].match(line, end)) is not None:
        end = entry.end()
    if end == position or not _PARTS["dict_end"].match(line, end):
        return None
    pairs = {name: parse_number(value) for name, value in _PARTS["dict_pair"].findall(line)}
    losses, grad_norm = _losses(pairs), _find_grad_norm(pairs)
    if grad_norm is not None and math.isnan(grad_norm) and losses.get("total") == 0:
        losses["total"] = grad_norm  # transformers logs 0 for NaN (TrainingArguments.logging_nan_inf_filter)
    step, epoch = _PARTS["dict_step"].search(line), _PARTS["dict_epoch"].search(line)
    if _PARTS["dict_summary"].search(line) or (not losses and _find_lr(pairs) is None):
        return None
    return Progress(
        step=int(step[1]) if step else None,
        total_steps=int(step[2]) if step and step[2] else None,
        epoch=int(epoch[1]) if step and epoch else None,
        losses=losses,
        lr=_find_lr(pairs),
        grad_norm=grad_norm,
    )


def parse_layout(line: str) -> Progress | None:
    """The progress in a line that has one of the LAYOUTS."""
    match = next((match for layout in LAYOUTS.values() if (match := layout.search(line)) is not None), None)
    if match is None:
        return None
    group: dict[str, str] = match.groupdict(default="")
    words = group.get("words", "")
    text = group.get("pairs_with_loss") or group.get("pairs") or words
    pairs = {name.lower(): parse_number(value) for name, value in _PARTS["word_pair"].findall(words)} | _pairs(text)
    pairs |= {name: parse_number(group[name]) for name in ("loss", "lr") if group.get(name)}
    numbered = enumerate(group.get("losses", "").split(), start=1)
    losses = _losses(pairs) | {f"loss_{n}": parse_number(value) for n, value in numbered}
    title, is_tqdm = group.get("title", "").strip(), "title" in group
    epoch = _read_count(group.get("epoch") or _first_group("epoch_word", title))
    if is_tqdm and not title:
        losses = losses or _plain_loss(pairs)
    if not losses and ("pairs_with_loss" in group or (title and epoch is None)):  # a download, a validation, predict
        return None
    counts_from_0 = "step_from_0" in group
    return Progress(
        step=int(group["step_from_0"]) + 1 if counts_from_0 else _read_count(group.get("step", "")),
        total_steps=_read_count(group.get("total", "")),
        epoch=epoch,
        losses=losses,
        lr=_find_lr(pairs),
        grad_norm=_find_grad_norm(pairs),
        img_per_s=_find_speed(text, pairs),
        step_s=_find_step_s(text, pairs, group.get("step_s", "")),
        input_wait_s=pairs.get("data") if counts_from_0 or words else None,
        is_bare_bar=is_tqdm and not losses and epoch is None,
        loss_columns=tuple(group.get("columns", "").split()),
    )


def _read_count(text: str) -> int | None:
    """None: there is none, or it is not known to the job either."""
    return int(text) if text.isdecimal() else None


def _first_group(part: str, text: str) -> str:
    match = _PARTS[part].search(text)
    return "" if match is None else match[1]


def _plain_loss(pairs: dict[str, float]) -> dict[str, float]:
    """The loss of a bar with `MSE=0.05`, if it has only one such number."""
    plain = [value for name, value in pairs.items() if _PARTS["plain_loss_name"].match(name)]
    return {"total": plain[0]} if len(plain) == 1 else {}


def _find_step_s(text: str, pairs: dict[str, float], in_layout: str) -> float | None:
    """Seconds per step. in_layout: the text at the place of the layout for it, if it has one."""
    if (found := _PARTS["step_time"].search(text)) is not None:
        return parse_number(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
    return parse_number(in_layout) if in_layout else pairs.get("time", pairs.get("batch"))


def parse_plain(line: str) -> Progress | None:
    """`step 100 loss=0.53 lr: 0.001`, `iter 100: loss 0.53`: a loss, with a counter or only with such pairs."""
    line = _PARTS["two_words"].sub(r"\1_\2", line)
    words = {name: parse_number(value) for name, value in _PARTS["loss_word"].findall(line)}
    lr_word = {name: parse_number(value) for name, value in _PARTS["lr_word"].findall(line)}
    pairs = words | lr_word | _pairs(line)
    losses = _losses(pairs)
    if not losses:
        return None
    counter, epoch = _PARTS["counter"].search(line), _PARTS["epoch_counter"].search(line)
    if not _PARTS["only_pairs"].match(line) and (
        (counter is None and epoch is None) or not (words or _PARTS["loss_value"].search(line))
    ):
        return None
    return Progress(
        step=int(counter[1]) if counter else None,
        total_steps=int(counter[2]) if counter and counter[2] else None,
        epoch=int(epoch[1]) if epoch else None,
        losses=losses,
        lr=_find_lr(pairs),
        grad_norm=_find_grad_norm(pairs),
        img_per_s=_find_speed(line, pairs),
    )


PARSERS: tuple[Callable[[str], Progress | None], ...] = (parse_layout, parse_dict, parse_plain)
"""In this order: the specific ones before the general one."""


def _pairs(text: str) -> dict[str, float]:
    text = _PARTS["two_words"].sub(r"\1_\2", text)
    return {name: parse_number(value) for name, value in _PARTS["pair"].findall(text)}


def _losses(pairs: dict[str, float]) -> dict[str, float]:
    """The training losses among the pairs; the whole loss is named `total`."""
    losses: dict[str, float] = {}
    for name, value in pairs.items():
        if _PARTS["loss_name"].match(name):
            losses["total" if _PARTS["total_loss_name"].match(name) else name.removeprefix("Loss/")] = value
    return losses


def _find_lr(pairs: dict[str, float]) -> float | None:
    """`lr` or `learning_rate`, else that of the first parameters."""
    names = [name for name in pairs if _PARTS["lr_name"].match(name)]
    return pairs[min(names, key=lambda name: not name.lower().startswith("l"))] if names else None


def _find_grad_norm(pairs: dict[str, float]) -> float | None:
    return next((value for name, value in pairs.items() if _PARTS["grad_norm_name"].match(name)), None)


def _find_speed(text: str, pairs: dict[str, float]) -> float | None:
    """Images per second."""
    speed = _PARTS["img_per_s"].search(text)
    return parse_number(speed[1]) if speed else pairs.get("img/s")


@dataclasses.dataclass(kw_only=True)
class ProgressWindows:
    """Adds up progress into windows of steps.jsonl: steps since the job's start, mean losses, speed.

    Jobs count differently: since the start of the run, or from 0 in each epoch; a line may also come twice. Here a
    counter that falls, or a new epoch, continues where the previous one ended. Phases come from the hook if it was
    loaded (`hook_reader.py`), else only from values of the job itself (torchvision's `data:` is `input_wait`); the rest
    is `unattributed`. start_s: Unix time of the job's start; devices: GPUs that it may use, at least 1."""

    attempt: int
    devices: int
    start_s: float
    step: int = 0
    """Steps since the start of the job's own count."""
    non_finite_loss: str | None = None
    """The first loss that was NaN or infinite."""
    _step_offset: int = 0
    _shown_step: int = 0
    _total_steps: int | None = None
    _epoch: int | None = None
    _bar: Progress | None = None
    _bar_total_steps: int | None = None
    _loss_columns: tuple[str, ...] = ()
    _window_step: int | None = None
    _losses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    _has_losses: bool = False
    """Whether there was any loss so far."""
    _lr: float | None = None
    _grad_norm: float | None = None
    _img_per_s: float | None = None
    _input_wait_fraction: float = 0.0
    _hook_step_offset: int | None = None

    def add(self, progress: Progress) -> None:
        if progress.is_bare_bar and progress.total_steps != self._bar_total_steps:
            self._bar = progress  # the losses that follow decide what it belongs to
            return
        if progress.loss_columns:
            self._loss_columns = progress.loss_columns
            return
        self._update_step(progress)
        self._add_losses(progress.losses)
        self._lr = self._lr if progress.lr is None else progress.lr
        self._grad_norm = self._grad_norm if progress.grad_norm is None else progress.grad_norm
        self._img_per_s = self._img_per_s if progress.img_per_s is None else progress.img_per_s
        if progress.input_wait_s is not None and progress.step_s:
            self._input_wait_fraction = min(1.0, progress.input_wait_s / progress.step_s)

    def has_new_progress(self) -> bool:
        """Whether there was progress since the last window."""
        return bool(self._losses) or (self._window_step is not None and self.step > self._window_step)

    def window(self, now_s: float, measured: StepWindow | None = None) -> StepWindow:
        """The window since the last one. measured: rank 0 from the hook, in the same time."""
        wall_s = max(0.0, now_s - self.start_s)
        previous_step = self.step if self._window_step is None else self._window_step
        steps = max(0, self.step - previous_step)
        window = measured or StepWindow(
            t=now_s, attempt=self.attempt, step=0, window_steps=0, num_images=0, wall_s=wall_s, devices=self.devices,
            phases={"unattributed": wall_s * self.devices},
        )  # fmt: skip
        window.t, window.attempt, window.wall_s, phases = now_s, self.attempt, wall_s, window.phases
        # its start is over, but the hook knows no steps of such a job
        if not window.step and (self.step or self._has_losses):
            phases["unattributed"] = phases.get("unattributed", 0.0) + phases.pop("startup", 0.0)
            window.thread_cpu_s = {}
        if self._input_wait_fraction and steps and "input_wait" not in phases and "unattributed" in phases:
            phases["input_wait"] = phases["unattributed"] * self._input_wait_fraction
            phases["unattributed"] -= phases["input_wait"]
        window.phases = {name: seconds for name, seconds in phases.items() if seconds > 0}
        num_images = round(self._img_per_s * wall_s) if steps and self._img_per_s else 0
        if window.step:  # the hook counts each step; the output may show every hundredth
            if self._hook_step_offset is None and self._window_step is not None:
                skipped = self.step - window.step
                self._hook_step_offset = skipped if skipped > MAX_FIRST_STEP else 0
            window.step += self._hook_step_offset or 0
            window.num_images = window.num_images or num_images
        else:
            window.step, window.window_steps, window.num_images = self.step, steps, num_images
            window.lr = None
        window.losses = {name: sum(values) / len(values) for name, values in self._losses.items()}
        window.lr = window.lr if self._lr is None else self._lr
        window.grad_norm = self._grad_norm
        self.start_s, self._window_step = now_s, self.step
        self._losses, self._grad_norm, self._img_per_s = {}, None, None
        return window

    def _update_step(self, progress: Progress) -> None:
        # a bar during a training is one of evaluation
        bar_done = self._bar_total_steps is None or self._shown_step == self._total_steps
        if progress.losses and self._bar is not None and progress.step is None and bar_done:
            # a dict with a loss after a bare bar: it is training
            progress = dataclasses.replace(progress, step=self._bar.step, total_steps=self._bar.total_steps)
            self._bar_total_steps, self._bar = progress.total_steps, None
        epoch, shown_step = progress.epoch, progress.step
        if epoch is not None and self._epoch is not None and epoch == self._epoch - 1:
            return  # a slower process of the job is still in the previous epoch
        restarts = epoch is not None and self._epoch is not None and epoch != self._epoch
        self._epoch = self._epoch if epoch is None else epoch
        if shown_step is not None and not restarts:
            # without an epoch, a counter that was full or falls far has restarted; a slower process falls by little
            restarts = (
                epoch is None
                and shown_step < self._shown_step
                and (self._shown_step == self._total_steps or shown_step * 2 < self._shown_step)
            )
        # a larger counter in a new epoch: the count continues through the epochs
        if restarts and (shown_step is None or shown_step <= self._shown_step):
            self._step_offset += max(self._shown_step, self._total_steps or 0) if self._shown_step else 0
            self._shown_step = 0
        if shown_step is None:
            return
        if self._window_step is None:
            self._window_step = 0 if shown_step <= MAX_FIRST_STEP else shown_step - 1
        self._total_steps = progress.total_steps
        self._shown_step = max(self._shown_step, shown_step)
        self.step = self._step_offset + self._shown_step

    def _add_losses(self, losses: dict[str, float]) -> None:
        if losses and len(self._loss_columns) == len(losses) and all(name.startswith("loss_") for name in losses):
            losses = dict(zip(self._loss_columns, losses.values(), strict=True))
            losses.setdefault("total", sum(losses.values()))
        self._has_losses |= bool(losses)
        for name, value in losses.items():
            if math.isfinite(value):
                if name in self._losses or len(self._losses) < MAX_LOSSES:
                    self._losses.setdefault(name, []).append(value)
            elif self.non_finite_loss is None:
                self.non_finite_loss = f"{name} is {value}"
