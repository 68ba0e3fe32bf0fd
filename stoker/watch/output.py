"""Parses progress from single lines of a training job's output: pure functions, a line in, `Progress` or None out.

Supported are the TF Object Detection API, Keras, torchvision's MetricLogger, Ultralytics, Lightning, the Hugging Face
Trainer, and plain `loss=` or `loss:`; the patterns follow lines that these print. None of them matches prose: a loss
counts only as a number after its name, in a line that also has a step counter, or has only such pairs. `LineSplitter`
makes lines from bytes. `progress_windows.py` adds the values up.

Any bytes may come, so the time is proportional to their number: patterns are for lines whose runs of spaces are one
space, all repeats are bounded, and what can be divided in one way only is not divided again (possessive repeats).
"""

import codecs
import dataclasses
import re
from collections.abc import Callable, Iterator

MAX_LINE_LENGTH = 2048
"""The rest of a longer line is ignored."""
_MAX_PENDING_LENGTH = 4 * MAX_LINE_LENGTH
"""The same with colors and cursor movements, before the end of the line has come."""


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
        return [line for part in parts if (line := _CONTROL.sub("", part)[:MAX_LINE_LENGTH]).strip()]


_BREAK = re.compile(r"[\r\n\b]+")
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
_SPACES = re.compile(r"\s{2,}+")
_KEYWORD = re.compile(r"%|loss|epoch|step|learning_rate", re.IGNORECASE)
"""What every line of progress contains: most other lines end here."""

_NUMBER = r"[-+]?(?:\d{1,20}+(?:[.,]\d{1,25}+)?(?:[eE][-+]?\d{1,4})?|\.\d{1,25}|nan|NaN|inf|Infinity)"
_NUMBER_END = r"(?!\.{0,20}\w)"
_PAIR = re.compile(rf"(?<![\w/])'?([A-Za-z][\w/.-]{{0,80}}+)'?\s?[=:]\s?'?({_NUMBER}){_NUMBER_END}'?")


def parse_progress(line: str) -> Progress | None:
    """The progress in a line. Never raises."""
    line = _normalize(line)
    if _KEYWORD.search(line) is None:
        return None
    for parser in PARSERS:
        progress = parser(line)
        if progress is not None:
            return progress
    return None


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
        if _KERAS_EPOCH.match(line):
            self._is_training = True
        elif bar := _KERAS.match(line):
            if self._is_training is False:
                return None
            if self._is_training and bar[1] == bar[2]:
                self._is_training = False
        return parse_progress(line)


def parse_number(text: str) -> float:
    """The value of a text that matches `_NUMBER`; a comma is the decimal point of another locale."""
    return float(text.replace(",", "."))


_TF_STEP = re.compile(rf"\bStep (\d{{1,15}}) per-step time ({_NUMBER})s\b(.*)")


def parse_tf_object_detection(line: str) -> Progress | None:
    match = _TF_STEP.search(line)
    if match is None:
        return None
    losses = _losses(_pairs(match[3]))
    return Progress(step=int(match[1]), step_s=parse_number(match[2]), losses=losses)


_DICT_START = re.compile(r"(?:\S{0,80}INFO\S{0,80}?:(?:tensorflow:)?|[IW]\d{4} .{0,200}?\] )?\s?\{?\s?(?=')")
_DICT_ENTRY = re.compile(rf"'[^']{{0,200}}+'\s?:\s?(?:{_NUMBER}|'[^']{{0,200}}+'|None)\s?,?\s?")
_DICT_END = re.compile(r"\}?\s?$")


def parse_dict(line: str) -> Progress | None:
    """A dict of numbers, or one line of it: the Hugging Face Trainer's, the TF Object Detection API's losses."""
    start = _DICT_START.match(line)
    position = end = start.end() if start is not None else 0
    while (entry := _DICT_ENTRY.match(line, end)) is not None:
        end = entry.end()
    if end == position or not _DICT_END.match(line, end):
        return None
    pairs = dict(_DICT_PAIR.findall(line))
    losses = {
        "total" if name in ("loss", "Loss/total_loss") else name.removeprefix("Loss/"): parse_number(value)
        for name, value in pairs.items()
        if name == "loss" or name.startswith("Loss/")
    }
    lr, grad_norm = (parse_number(pairs[name]) if name in pairs else None for name in ("learning_rate", "grad_norm"))
    return Progress(losses=losses, lr=lr, grad_norm=grad_norm) if losses or lr is not None else None


_DICT_PAIR = re.compile(rf"'([^']{{0,200}}+)'\s?:\s?'?({_NUMBER})")

_KERAS = re.compile(r"^\s?(\d{1,15})/(\d{1,15}|Unknown)\s(?:\[[=>.]{0,200}+\]|━{1,200}+|(?=- \d{1,15}s -))\s?(.*)$")
_KERAS_TIME = re.compile(rf"(?<!\d)({_NUMBER})(us|ms|s)/step")
_KERAS_EPOCH = re.compile(r"^Epoch (\d{1,15})/(\d{1,15})\s?$")


def parse_keras(line: str) -> Progress | None:
    if epoch := _KERAS_EPOCH.match(line):
        return Progress(epoch=int(epoch[1]))
    match = _KERAS.match(line)
    if match is None:
        return None
    pairs = _pairs(match[3])
    losses = _losses(pairs)
    if not losses:  # predict, a download
        return None
    step_time = _KERAS_TIME.search(match[3])
    step_s = parse_number(step_time[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[step_time[2]] if step_time else None
    total_steps = int(match[2]) if match[2].isdecimal() else None
    return Progress(step=int(match[1]), total_steps=total_steps, losses=losses, step_s=step_s, lr=_find_lr(pairs))


_METRIC_LOGGER = re.compile(r"^\s?(?:\S{1,100}:)?\s?Epoch: \[(\d{1,15})\]\s\[\s?(\d{1,15})/(\d{1,15})\]\seta: (.*)$")


def parse_torchvision(line: str) -> Progress | None:
    """MetricLogger's lines; `data:` is the wait for the images of a step. Steps count from 0."""
    match = _METRIC_LOGGER.match(line)
    if match is None:
        return None
    pairs = _pairs(match[4])
    return Progress(
        step=int(match[2]) + 1,
        total_steps=int(match[3]),
        epoch=int(match[1]),
        losses=_losses(pairs),
        lr=_find_lr(pairs),
        img_per_s=pairs.get("img/s"),
        step_s=pairs.get("time"),
        input_wait_s=pairs.get("data"),
    )


_YOLO = re.compile(
    rf"^\s?(\d{{1,15}})/(\d{{1,15}})\s[\d.]{{1,20}}[GMK]B?\s((?:{_NUMBER}\s){{1,20}})(\d{{1,15}})\s(\d{{1,15}}):"
    r"\s\d{1,3}%\s?\S{0,100}\s?(\S{1,100}?\s)?(\d{1,15})/(\d{1,15})\s"
)
_YOLO_HEADER = re.compile(r"^\s?Epoch\sGPU_mem\s((?:\w{1,40}\s){1,20})Instances\sSize\s?$")


def parse_ultralytics(line: str) -> Progress | None:
    if header := _YOLO_HEADER.match(line):
        return Progress(loss_columns=tuple(header[1].split()))
    match = _YOLO.match(line)
    if match is None:
        return None
    values = [parse_number(text) for text in match[3].split()]
    losses = {f"loss_{n}": value for n, value in enumerate(values, start=1)}
    return Progress(step=int(match[7]), total_steps=int(match[8]), epoch=int(match[1]), losses=losses)


_BAR = re.compile(
    r"^\s?(?:([^|]{0,200}?):)?\s?\d{1,3}%\s?\|[^|]{0,500}+\|\s?(\d{1,15})/(\d{1,15})\s?"
    r"\[[^\]<]{0,100}+<[^\],]{0,100}+,\s?(?:\?|\S{1,40}?)\s?(?:it/s|s/it)(.*)\]"
)
_RICH = re.compile(
    r"^\s?Epoch (\d{1,15})(?:/-?\d{1,15})?\s[━╸╺ ]{1,200}+(\d{1,15})/(\d{1,15})\s\S{1,40} • \S{1,40}\s\S{1,40}\s?(.*)$"
)
_EPOCH_WORD = re.compile(r"\bepoch\b\D{0,3}(\d{1,15})", re.IGNORECASE)


def parse_bar(line: str) -> Progress | None:
    """A tqdm bar of Lightning (followed by its loss) or of the Hugging Face Trainer (bare); Lightning's rich bar."""
    if rich := _RICH.match(line):
        pairs = _pairs(rich[4])
        return Progress(step=int(rich[2]), total_steps=int(rich[3]), epoch=int(rich[1]), losses=_losses(pairs))
    match = _BAR.match(line)
    if match is None:
        return None
    title, pairs = (match[1] or "").strip(), _pairs(match[4])
    losses = _losses(pairs)
    epoch = _EPOCH_WORD.search(title)
    if title and epoch is None and not losses:  # a download, a validation
        return None
    return Progress(
        step=int(match[2]),
        total_steps=int(match[3]),
        epoch=int(epoch[1]) if epoch else None,
        losses=losses,
        lr=_find_lr(pairs),
        is_bare_bar=not losses and epoch is None,
    )


_COUNTER = re.compile(
    r"(?<!\w)(?:global_?)?(?:steps?|iters?|iteration|batch|it)(?!\w)\s?[=:#]?\s?[\[(]?\s?(\d{1,15})(?!\d)"
    r"(?:\s?/\s?(\d{1,15})(?!\d))?",
    re.IGNORECASE,
)
_EPOCH_COUNTER = re.compile(r"(?<!\w)epoch\s?[=:#]?\s?[\[(]?\s?(\d{1,15})(?!\d)", re.IGNORECASE)
_ONLY_PAIRS = re.compile(
    rf"^\W{{0,40}}+(?:[A-Za-z][\w/.-]{{0,80}}+\s?[=:]\s?{_NUMBER}{_NUMBER_END}[\s,;|)(-]{{0,20}}+)++$"
)
_LOSS_VALUE = re.compile(
    r"loss'?\s?(?:=|:\s?[-+]?(?:\d+[.,]\d|\d+[eE]|nan\b|inf\b))", re.IGNORECASE
)  # "the loss: 3 ships" is prose
_IMG_PER_S = re.compile(rf"(?<!\d)({_NUMBER})\s?(?:img|imgs|images|samples)/s(?:ec)?\b")


def parse_plain(line: str) -> Progress | None:
    """`step 100 loss=0.53 lr: 0.001`: a loss, with a counter or only with such pairs."""
    pairs = _pairs(line)
    losses = _losses(pairs)
    if not losses:
        return None
    counter, epoch = _COUNTER.search(line), _EPOCH_COUNTER.search(line)
    if not _ONLY_PAIRS.match(line) and ((counter is None and epoch is None) or not _LOSS_VALUE.search(line)):
        return None
    speed = _IMG_PER_S.search(line)
    return Progress(
        step=int(counter[1]) if counter else None,
        total_steps=int(counter[2]) if counter and counter[2] else None,
        epoch=int(epoch[1]) if epoch else None,
        losses=losses,
        lr=_find_lr(pairs),
        grad_norm=pairs.get("grad_norm"),
        img_per_s=parse_number(speed[1]) if speed else pairs.get("img/s"),
    )


PARSERS: tuple[Callable[[str], Progress | None], ...] = (
    parse_tf_object_detection, parse_dict, parse_keras, parse_torchvision, parse_ultralytics, parse_bar, parse_plain,
)  # fmt: skip
"""In this order: the specific ones before the general one."""


def _pairs(text: str) -> dict[str, float]:
    return {name: parse_number(value) for name, value in _PAIR.findall(text)}


def _losses(pairs: dict[str, float]) -> dict[str, float]:
    """The training losses among the pairs; the whole loss is named `total`."""
    return dict(_iter_losses(pairs))


def _iter_losses(pairs: dict[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in pairs.items():
        if name.lower() in ("loss", "train_loss", "total_loss", "train/loss"):
            yield "total", value
        elif "loss" in name.lower() and not name.lower().startswith(("val", "eval", "test")):
            yield name, value


def _find_lr(pairs: dict[str, float]) -> float | None:
    return next((pairs[name] for name in ("learning_rate", "lr", "LR") if name in pairs), None)
