"""Terminal output as strings: plain lines, live lines, tables, and output errors."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.report.terminal import Screen, print_metrics
from stoker_watch.report import format as fmt
from stoker_watch.report.console import supports_cursor
from stoker_watch.runs.evaluation import COCO_SUMMARY, ClassMetrics, Metrics
from stoker_watch.runs.schemas import StepWindow


def window(**changes: object) -> StepWindow:
    fields: dict[str, object] = {
        "t": 0.0, "attempt": 1, "step": 1200, "window_steps": 20, "num_images": 320, "wall_s": 2.0, "devices": 2,
        "phases": {"compute": 3.7, "input_wait": 0.3}, "losses": {"total": 1.2341, "class": 0.8, "box": 0.4341},
        "lr": 0.0021, **changes,
    }  # fmt: skip
    return StepWindow(**fields)  # type: ignore[arg-type]


def metrics(**changes: object) -> Metrics:
    numbers: dict[str, object] = {name: n / 100 + 0.3 for n, name in enumerate(COCO_SUMMARY)}
    classes = [
        ClassMetrics(name="car", ap=0.25, ap50=0.5, boxes=1200),
        ClassMetrics(name="bus", ap=0.5, ap50=0.75, boxes=31),
        ClassMetrics(name="tram", ap=None, ap50=None, boxes=0),
    ]
    numbers |= {"ap_small": None, "per_class": classes, "num_images": 500, "boxes": 1231, "detections": 9000, **changes}
    return Metrics(**numbers)  # type: ignore[arg-type]


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def plain(file: io.StringIO, clock: Clock | None = None) -> Screen:
    return Screen(file, live=False, clock=clock or Clock())


def test_plain_lines_of_a_run() -> None:
    file, clock = io.StringIO(), Clock()
    with plain(file, clock) as screen:
        screen.note("runs/demo-tiny-1: 1,000 images")
        screen.settings(
            [
                ("batch_size", 16, "the largest that fits"),
                ("lr", 0.01, None),
                ("image_size", (320, 320), "images are 320 × 240"),
            ]
        )
        screen.progress(window(), fraction_done=0.1334, total_steps=9000, eta_s=755.0, memory=(11 * 2**30, 140 * 2**30))
        screen.warning("3 images cannot be read")
        screen.evaluated(1200, metrics())
        screen.note("AP50 0.310")
        screen.note("results in runs/demo-tiny-1")
    assert (
        file.getvalue()
        == """\
runs/demo-tiny-1: 1,000 images
setting     value    reason
batch_size  16       the largest that fits
lr          0.01     set by you
image_size  320 320  images are 320 × 240
step 1,200/9,000 (13 %) · loss 1.23 (class 0.8, box 0.434) · lr 0.0021 · 160 img/s · \
device busy 92 % · memory 11.0 of 140.0 GiB · ETA 12 min 35 s
warning: 3 images cannot be read
evaluated at step 1,200: AP 0.300 · AP50 0.310 · AP75 0.320 · small n/a · medium 0.340 · large 0.350 · AR100 0.380
AP50 0.310
results in runs/demo-tiny-1
"""
    )


def test_plain_progress_omits_unknown_values() -> None:
    file = io.StringIO()
    bare = window(losses={}, lr=None, wall_s=0.0, skipped_steps=1)
    with plain(file) as screen:
        screen.progress(bare, fraction_done=0.5, total_steps=None, eta_s=None, memory=None)
    assert file.getvalue() == "step 1,200 (50 %) · 1 step skipped\n"


def test_no_time_is_left_out_of_the_progress_before_a_step_was_timed() -> None:
    file = io.StringIO()
    with plain(file) as screen:
        screen.progress(window(step=1), fraction_done=0.004, total_steps=250, eta_s=0.0, memory=None)
    assert file.getvalue().startswith("step 1/250 (0.4 %) · loss")
    assert "ETA" not in file.getvalue()


def test_plain_progress_comes_at_most_every_ten_seconds_and_events_at_once() -> None:
    file, clock = io.StringIO(), Clock()
    with plain(file, clock) as screen:
        for second in range(25):
            clock.now = float(second)
            screen.progress(window(step=second), fraction_done=0, total_steps=None, eta_s=None, memory=None)
            if second == 5:
                screen.note("saved")
    assert [line.split(" (")[0] for line in file.getvalue().splitlines()] == ["step 0", "saved", "step 10", "step 20"]


def test_plain_lines_have_no_control_characters_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    file, evil = io.StringIO(), "a\x1b[2Jb\rc\x07[bold]d[/bold]:smile:"
    with plain(file) as screen:
        screen.note(evil)
        screen.warning(evil)
        screen.settings([(evil, evil, evil)])
        screen.progress(
            window(losses={"total": 1.0, evil: 1.0}), fraction_done=0, total_steps=None, eta_s=None, memory=None
        )
        screen.note(evil)
    print_metrics(metrics(per_class=[ClassMetrics(name=evil, ap=0.1, ap50=0.1, boxes=1)]), file)
    text = file.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert text.count("[bold]d[/bold]:smile:") == 8


def live(monkeypatch: pytest.MonkeyPatch, **environment: str) -> tuple[Terminal, Screen]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color"} | environment).items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    return file, Screen(file, width=100)


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_live_lines_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file, screen = live(monkeypatch)
    assert screen.is_live
    with screen:
        screen.progress(window(), fraction_done=0.5, total_steps=2400, eta_s=8.0, memory=(2**30, 2**34))
        lines = [line.rstrip() for line in visible(file.getvalue()).splitlines()]
        assert lines == [
            "step 1,200/2,400  ━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━  50 %  ETA 8 s",
            "loss 1.23 (class 0.8, box 0.434) · lr 0.0021 · 160 img/s · device busy 92 % · memory 1.0 of 16.0 GiB",
        ]
        screen.warning("3 images [cannot] be read")
        assert "warning: 3 images [cannot] be read" in visible(file.getvalue())
        assert "\x1b[1;33mwarning: " in file.getvalue()
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_the_terminal_is_restored_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    file, screen = live(monkeypatch)

    def run() -> None:
        with screen:
            screen.progress(window(), fraction_done=0.5, total_steps=2400, eta_s=8.0, memory=None)
            assert "\x1b[?25h" not in file.getvalue()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_no_color_disables_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    file, screen = live(monkeypatch, NO_COLOR="1")
    with screen:
        screen.warning("careful")
        screen.settings([("batch_size", 16, "fits")])
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", file.getvalue())
    assert "warning: careful" in visible(file.getvalue())


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    file, screen = live(monkeypatch, TERM="dumb")
    with screen:
        screen.progress(window(), fraction_done=0.5, total_steps=2400, eta_s=8.0, memory=None)
    assert not screen.is_live
    assert "\x1b" not in file.getvalue()
    assert file.getvalue().startswith("step 1,200/2,400 (50 %)")


def test_a_file_is_not_a_terminal(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert not supports_cursor(file)


def test_settings_of_the_user_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    file, screen = live(monkeypatch)
    with screen:
        screen.settings([("batch_size", 16, None), ("hflip", True, "default"), ("aspect_ratios", (0.5, 1.0), "paper")])
    assert [line.rstrip() for line in visible(file.getvalue()).splitlines()] == [
        "setting        value  reason",
        "batch_size     16     set by you",
        "hflip          yes    default",
        "aspect_ratios  0.5 1  paper",
    ]
    assert "\x1b[1mbatch_size" in file.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize("act", [
    'screen.note("x" * 100000)',
    'screen.progress(StepWindow(t=0, attempt=1, step=1, window_steps=1, num_images=1, wall_s=1, devices=1, phases={}), '
    'fraction_done=0, total_steps=1, eta_s=None, memory=None)',
])  # fmt: skip
def test_an_output_error_does_not_end_the_process(act: str) -> None:
    """The disk of the log is full: the process continues, keeps the error, and exits with 0."""
    code = f"""
import sys
from stoker_watch.runs.schemas import StepWindow
from stoker.report.terminal import Screen
with Screen() as screen:
    {act}
    {act}
assert screen.last_error is not None
sys.stderr.write("continued")
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, env=environment,
                              text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "continued")


def test_printing_works_after_the_reader_of_the_pipe_has_gone() -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as file:
        with Screen(file) as screen:
            os.close(reads)
            screen.note("without a reader")
        assert isinstance(screen.last_error, BrokenPipeError)
        print("this raises nothing", file=file, flush=True)


def test_characters_outside_of_the_encoding_do_not_end_the_process() -> None:
    code = 'from stoker.report.terminal import Screen\nwith Screen() as s: s.note("a · b")'
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a ? b\n", "")


def test_coco_metrics_and_classes() -> None:
    file = io.StringIO()
    print_metrics(metrics(missing=2), file)
    assert (
        file.getvalue()
        == """\
500 images (2 more could not be read), 1,231 boxes, 9,000 detections

AP         0.300  AR 1       0.360
AP50       0.310  AR 10      0.370
AP75       0.320  AR 100     0.380
AP small   n/a    AR small   0.390
AP medium  0.340  AR medium  0.400
AP large   0.350  AR large   0.410

class     AP   AP50  boxes
bus    0.500  0.750     31
car    0.250  0.500  1,200
tram     n/a    n/a      0
"""
    )


@pytest.mark.parametrize(("text", "wanted"), [
    (fmt.number(None), "n/a"), (fmt.number(0.0), "0"), (fmt.number(0.0021304), "0.00213"), (fmt.number(45.67), "45.7"),
    (fmt.number(999.7), "1,000"), (fmt.number(12345.6), "12,346"), (fmt.number(float("nan")), "nan"),
    (fmt.number(float("inf")), "inf"), (fmt.number(1.5e-7), "1.5e-07"),
    (fmt.count(None), "n/a"), (fmt.count(118287), "118,287"), (fmt.metric(0.8314), "0.831"), (fmt.metric(None), "n/a"),
    (fmt.percentage(None), "n/a"), (fmt.percentage(0), "0 %"), (fmt.percentage(1e-6), "<0.01 %"),
    (fmt.percentage(0.0004), "0.04 %"),
    (fmt.percentage(0.042), "4.2 %"), (fmt.percentage(0.0996), "10 %"), (fmt.percentage(0.614), "61 %"),
    (fmt.percentage(0.9997), "99.9 %"), (fmt.percentage(1), "100 %"),
    (fmt.duration(None), "n/a"), (fmt.duration(0), "0 s"), (fmt.duration(0.00002), "<0.001 s"),
    (fmt.duration(0.254), "0.25 s"), (fmt.duration(8.12), "8.1 s"), (fmt.duration(9.97), "10 s"),
    (fmt.duration(59.6), "1 min 00 s"), (fmt.duration(185), "3 min 05 s"), (fmt.duration(3599.7), "1 h 00 min"),
    (fmt.duration(8040), "2 h 14 min"), (fmt.duration(273600), "3 d 04 h"),
    (fmt.size(None), "n/a"), (fmt.size(512), "512 B"), (fmt.size(1536), "1.5 KiB"), (fmt.size(2**20 - 1), "1.0 MiB"),
    (fmt.size(10.2 * 2**30), "10.2 GiB"), (fmt.size(5 * 2**40), "5.0 TiB"),
    (fmt.memory(2**29, 2**30), "0.5 of 1.0 GiB"), (fmt.memory(2**20, 2**29), "1.0 of 512.0 MiB"),
    (fmt.cost(None), "n/a"), (fmt.cost(0), "0.00"), (fmt.cost(0.0042), "0.0042"), (fmt.cost(1234.5), "1,234.50"),
    (fmt.cost(7.3e-6), "<0.0001"), (fmt.cost(0.0001), "0.0001"),
    (fmt.plural(1, "step"), "1 step"), (fmt.plural(2000, "step"), "2,000 steps"),
    (fmt.plural(3, "box", "boxes"), "3 boxes"),
])  # fmt: skip
def test_formatted_numbers(text: str, wanted: str) -> None:
    assert text == wanted
