"""What a line of a training job's output says about its progress: pure functions, a line in, `Progress` or None out.

Known are the TF Object Detection API, Keras, torchvision's MetricLogger, Ultralytics, Lightning, the Hugging Face
Trainer, and plain `loss=` or `loss:`; the patterns follow lines that these print. None of them matches prose: a loss
counts only as a number behind its name, in a line that also has a counter of steps or nothing but such pairs. `Lines`
makes lines of the bytes. What the numbers add up to is `progress_windows.py`.
"""

import codecs
import dataclasses
import re
from collections.abc import Callable, Iterator

LINE_LENGTH = 2048
"""Characters of a line that are looked at; the rest is passed over, so that no pattern takes long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What one line says. None: nothing. Names of losses are the job's own; `total` is the whole."""

    step: int | None = None
    """Steps done; with `of`, since the beginning of the epoch."""
    of: int | None = None
    """Steps of an epoch, or of the run."""
    epoch: int | None = None
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """May hold NaN and infinity."""
    rate: float | None = None
    grad_norm: float | None = None
    img_per_s: float | None = None
    step_s: float | None = None
    """Seconds per step, as the job measured them."""
    input_wait_s: float | None = None
    """Of these, waiting for pictures."""
    bar: bool = False
    """A bare progress bar: of training only where something else says so."""
    columns: tuple[str, ...] = ()
    """Names of the losses in the lines that follow (Ultralytics' header)."""


class Lines:
    """Cuts a stream of bytes into lines as a person saw them: a line that was written over (carriage return,
    backspaces) is one of its own; colours and cursor movements are taken out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """The lines that are whole now; final: also the last one, without an end."""
        text = self._rest + self._decoder.decode(data, final)
        parts = _BREAK.split(text)
        self._rest = "" if final else parts.pop()[-LINE_LENGTH:]
        return [line for part in parts if (line := _CONTROL.sub("", part)[:LINE_LENGTH]).strip()]


_BREAK = re.compile(r"[\r\n\b]+")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")

_NUMBER = r"[-+]?(?:\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?|\.\d+|nan|NaN|inf|Infinity)"
_END = r"(?![\w.]*\w)"
_PAIR = re.compile(rf"(?<![\w/])'?([A-Za-z][\w/.-]*)'?\s*[=:]\s*'?({_NUMBER}){_END}'?")


def parse(line: str) -> Progress | None:
    """The progress that a line tells. Never raises."""
    for parser in PARSERS:
        found = parser(line)
        if found is not None:
            return found
    return None


class Reader:
    """`parse`, with memory of one thing: Keras prints the same bar when it evaluates as when it trains. Where it says
    `Epoch 1/3` before it trains, a bar that begins after the epoch's was full is none of training; where it never says
    so (a `fit` of one epoch), the two cannot be told apart, and all count."""

    def __init__(self) -> None:
        self._trains: bool | None = None

    def read(self, line: str) -> Progress | None:
        if _KERAS_EPOCH.match(line):
            self._trains = True
        elif bar := _KERAS.match(line):
            if self._trains is False:
                return None
            if self._trains and bar[1] == bar[2]:
                self._trains = False
        return parse(line)


def number(text: str) -> float:
    """Of a text that fits `_NUMBER`; a comma is the decimal point of another locale."""
    return float(text.replace(",", "."))


_TF_STEP = re.compile(rf"\bStep (\d+) per-step time ({_NUMBER})s\b(.*)")


def tf_object_detection(line: str) -> Progress | None:
    found = _TF_STEP.search(line)
    if found is None:
        return None
    losses = _losses(_pairs(found[3]))
    return Progress(step=int(found[1]), step_s=number(found[2]), losses=losses)


_DICT = re.compile(
    rf"^(?:\S*INFO\S*?:(?:tensorflow:)?|[IW]\d{{4}} .*?\] )?\s*\{{?\s*"
    rf"(?:'[^']*'\s*:\s*(?:{_NUMBER}|'[^']*'|None)\s*,?\s*)+\}}?\s*$"
)


def dictionary(line: str) -> Progress | None:
    """A dict of numbers, or one line of it: the Hugging Face Trainer's, the TF Object Detection API's losses."""
    if "'" not in line or not _DICT.match(line):
        return None
    pairs = dict(_DICT_PAIR.findall(line))
    losses = {"total" if name in ("loss", "Loss/total_loss") else name.removeprefix("Loss/"): number(value)
              for name, value in pairs.items() if name == "loss" or name.startswith("Loss/")}  # fmt: skip
    rate, norm = (number(pairs[name]) if name in pairs else None for name in ("learning_rate", "grad_norm"))
    return Progress(losses=losses, rate=rate, grad_norm=norm) if losses or rate is not None else None


_DICT_PAIR = re.compile(rf"'([^']*)'\s*:\s*'?({_NUMBER})")

_KERAS = re.compile(r"^\s*(\d+)/(\d+|Unknown)\s+(?:\[[=>.]*\]|━+|(?=- \d+s -))\s?(.*)$")
_KERAS_TIME = re.compile(rf"({_NUMBER})(us|ms|s)/step")
_KERAS_EPOCH = re.compile(r"^Epoch (\d+)/(\d+)\s*$")


def keras(line: str) -> Progress | None:
    if epoch := _KERAS_EPOCH.match(line):
        return Progress(epoch=int(epoch[1]))
    found = _KERAS.match(line)
    if found is None:
        return None
    pairs = _pairs(found[3])
    losses = _losses(pairs)
    if not losses:  # predict, a download
        return None
    took = _KERAS_TIME.search(found[3])
    step_s = number(took[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[took[2]] if took else None
    of = int(found[2]) if found[2].isdecimal() else None
    return Progress(step=int(found[1]), of=of, losses=losses, step_s=step_s, rate=_rate(pairs))


_METRIC_LOGGER = re.compile(r"^\s*(?:\S+:)?\s*Epoch: \[(\d+)\]\s+\[\s*(\d+)/(\d+)\]\s+eta: (.*)$")


def torchvision(line: str) -> Progress | None:
    """MetricLogger's lines; `data:` is the wait for pictures of a step. They count steps from 0."""
    found = _METRIC_LOGGER.match(line)
    if found is None:
        return None
    pairs = _pairs(found[4])
    return Progress(
        step=int(found[2]) + 1, of=int(found[3]), epoch=int(found[1]), losses=_losses(pairs), rate=_rate(pairs),
        img_per_s=pairs.get("img/s"), step_s=pairs.get("time"), input_wait_s=pairs.get("data"),
    )  # fmt: skip


_YOLO = re.compile(
    rf"^\s*(\d+)/(\d+)\s+[\d.]+[GMK]B?\s+((?:{_NUMBER}\s+)+)(\d+)\s+(\d+):\s+\d+%\s*\S*\s*(\S+?\s+)?(\d+)/(\d+)\s"
)
_YOLO_HEADER = re.compile(r"^\s*Epoch\s+GPU_mem\s+((?:\w+\s+)+)Instances\s+Size\s*$")


def ultralytics(line: str) -> Progress | None:
    if header := _YOLO_HEADER.match(line):
        return Progress(columns=tuple(header[1].split()))
    found = _YOLO.match(line)
    if found is None:
        return None
    values = [number(text) for text in found[3].split()]
    losses = {f"loss_{n}": value for n, value in enumerate(values, start=1)}
    return Progress(step=int(found[7]), of=int(found[8]), epoch=int(found[1]), losses=losses)


_BAR = re.compile(
    r"^\s*(?:([^|]*?):)?\s*\d+%\s?\|[^|]*\|\s*(\d+)/(\d+)\s*"
    r"\[[^\]<]*<[^\],]*,\s*(?:\?|\S+?)\s?(?:it/s|s/it)(.*)\]"
)
_RICH = re.compile(r"^\s*Epoch (\d+)(?:/\d+)?\s+[━╸╺ ]+\s+(\d+)/(\d+)\s+\S+ • \S+\s+\S+\s*(.*)$")
_EPOCH_WORD = re.compile(r"\bepoch\b\D{0,3}(\d+)", re.IGNORECASE)


def bar(line: str) -> Progress | None:
    """A tqdm bar: Lightning's (its loss behind it), the Hugging Face Trainer's (bare); Lightning's rich bar."""
    if rich := _RICH.match(line):
        pairs = _pairs(rich[4])
        return Progress(step=int(rich[2]), of=int(rich[3]), epoch=int(rich[1]), losses=_losses(pairs))
    found = _BAR.match(line)
    if found is None:
        return None
    title, pairs = (found[1] or "").strip(), _pairs(found[4])
    losses = _losses(pairs)
    epoch = _EPOCH_WORD.search(title)
    if title and epoch is None and not losses:  # a download, a validation
        return None
    return Progress(
        step=int(found[2]), of=int(found[3]), epoch=int(epoch[1]) if epoch else None, losses=losses, rate=_rate(pairs),
        bar=not losses and epoch is None,
    )  # fmt: skip


_COUNTER = re.compile(
    r"(?<!\w)(?:global_?)?(?:steps?|iters?|iteration|batch|it)(?!\w)\s*[=:#]?\s*[\[(]?\s*(\d+)(?:\s*/\s*(\d+))?",
    re.IGNORECASE,
)
_EPOCH_COUNTER = re.compile(r"(?<!\w)epoch\s*[=:#]?\s*[\[(]?\s*(\d+)", re.IGNORECASE)
_ONLY_PAIRS = re.compile(rf"^\W*(?:[A-Za-z][\w/.-]*\s*[=:]\s*{_NUMBER}{_END}[\s,;|)(-]*)+$")
_MEASURED = re.compile(
    r"loss'?\s*(?:=|:\s*[-+]?(?:\d+[.,]\d|\d+[eE]|nan\b|inf\b))", re.IGNORECASE
)  # "the loss: 3 ships" is prose
_IMAGES = re.compile(rf"({_NUMBER})\s*(?:img|imgs|images|samples)/s(?:ec)?\b")


def plain(line: str) -> Progress | None:
    """`step 100 loss=0.53 lr: 0.001`: a loss, and a counter or nothing but pairs."""
    pairs = _pairs(line)
    losses = _losses(pairs)
    if not losses:
        return None
    counter, epoch = _COUNTER.search(line), _EPOCH_COUNTER.search(line)
    if not _ONLY_PAIRS.match(line) and ((counter is None and epoch is None) or not _MEASURED.search(line)):
        return None
    speed = _IMAGES.search(line)
    return Progress(
        step=int(counter[1]) if counter else None,
        of=int(counter[2]) if counter and counter[2] else None,
        epoch=int(epoch[1]) if epoch else None,
        losses=losses,
        rate=_rate(pairs),
        grad_norm=pairs.get("grad_norm"),
        img_per_s=number(speed[1]) if speed else pairs.get("img/s"),
    )


PARSERS: tuple[Callable[[str], Progress | None], ...] = (
    tf_object_detection, dictionary, keras, torchvision, ultralytics, bar, plain,
)  # fmt: skip
"""In this order: the particular before the general."""


def _pairs(text: str) -> dict[str, float]:
    return {name: number(value) for name, value in _PAIR.findall(text)}


def _losses(pairs: dict[str, float]) -> dict[str, float]:
    """Those of training among the pairs; the whole one is called `total`."""
    return dict(_named(pairs))


def _named(pairs: dict[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in pairs.items():
        if name.lower() in ("loss", "train_loss", "total_loss", "train/loss"):
            yield "total", value
        elif "loss" in name.lower() and not name.lower().startswith(("val", "eval", "test")):
            yield name, value


def _rate(pairs: dict[str, float]) -> float | None:
    return next((pairs[name] for name in ("learning_rate", "lr", "LR") if name in pairs), None)
