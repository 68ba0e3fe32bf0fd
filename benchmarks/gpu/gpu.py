"""How fast whole training steps are on a GPU, eager and compiled, how much memory they take, and what they wait for.

A step includes the copy of its batch from pinned memory and the augmentation (gpu_case.py). Unattended, in a limited
time: every measurement is a part, a process of its own with a limit, the most important first. What it measures is
appended to a file of JSON lines at once (`--lines`; default: next to the results file), and so is how it failed. Peak
memory is compared with what the fake accelerator of the tests predicts for the same step.

`--kit A`, `B` or `C`: nine minutes each, for a machine that is at hand for a short while (docs/benchmarks.md). Default:
everything but tests and trainings. `--goal [FILE …]` measures nothing: it prints the table of goals of what was
measured before. `--device cpu` runs all with tiny shapes; its numbers mean nothing.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import gpu_results
from benchmarks.processes import LINES, ROOT, record, run_part
from benchmarks.report import Report, options, publish, table

HEADLINE = gpu_results.HEADLINE
CASES: dict[str, dict[str, Any]] = {
    HEADLINE: {"classes": 80, "batch": 32, "image_size": (800, 800), "goal": 500},
    "ember_n": {"classes": 80, "batch": 64, "image_size": (640, 640), "optimizer": "muon", "goal": 2500},
    "faster_rcnn_resnet50_fpn": {"classes": 80, "batch": 16, "image_size": (800, 1344), "goal": 262},
    "retinanet_resnext50_32x4d_fpn": {"classes": 264, "batch": 32, "image_size": (800, 800), "goal": 312},
    "ember_s": {"classes": 80, "batch": 64, "image_size": (640, 640), "optimizer": "muon"},
    "ember_m": {"classes": 80, "batch": 32, "image_size": (640, 640), "optimizer": "muon"},
    "fcos_resnet50_fpn": {"classes": 80, "batch": 32, "image_size": (800, 800)},
    "ssd300_vgg16": {"classes": 80, "batch": 64, "image_size": (300, 300)},
    "ssdlite320_mobilenet_v3_large": {"classes": 80, "batch": 128, "image_size": (320, 320), "optimizer": "adamw"},
    "retinanet_mobilenet_v2_fpn": {"classes": 80, "batch": 128, "image_size": (320, 320), "optimizer": "adamw"},
}
"""Fields of `gpu_case.Case` by model; the headline case first. The goals are for an H200."""
RX50 = "retinanet_resnext50_32x4d_fpn"
OTHERS = [model for model in CASES if model != HEADLINE]
KITS = ("A", "B", "C")
KIT_S, SETUP_S = 540.0, 50.0
"""Of a whole command of the kit; of that, at most until gpu.py starts and after its last part."""
CPU_FACTOR = 10
"""How much longer a part may take with tiny shapes, on a CPU that others use too."""
LEAST_S = 15.0
"""A part is not begun with less."""
CACHE_BYTES = 16 * 2**20
"""Of the packed caches; a larger file does not come back from the machine."""
ALONE = ("tests/trainer/gpu/test_nvml.py", "tests/trainer/gpu/test_ledger.py")
"""They measure the GPU's load or time."""


@dataclasses.dataclass(frozen=True)
class Part:
    """command: what this process's Python runs; it ends at limit_s. rest: only if time is left after the others."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    rest: bool = False


def plan(name: str | None, device: str, *, tiny: bool, work: Path, bccd: Path) -> list[Part]:
    """The parts of a command of the kit, or of the whole benchmark. work: for runs; bccd: a data set, which may be
    absent."""

    def case(model: str, how: str, limit_s: float, rest: bool = False) -> Part:
        request = {"how": how, "device": device, "tiny": tiny, "case": {"model": model, **CASES[model]}}
        return Part(f"{model}, {how}", limit_s, ("benchmarks/gpu/gpu_case.py", json.dumps(request)), rest)

    def predicted(models: Sequence[str], limit_s: float) -> Part:
        cases = [{"model": model, **CASES[model]} for model in models]
        request = {"how": "predicted", "device": "cpu", "tiny": tiny, "cases": cases}
        return Part("predicted memory", limit_s, ("benchmarks/gpu/gpu_case.py", json.dumps(request)), rest=True)

    def loop(model: str, limit_s: float) -> Part:
        more = ("--device", device, "--only", model, "--compile", *(("--quick",) if tiny else ()))
        return Part(f"{model}, loader in the loop", limit_s, ("benchmarks/steps/end_to_end.py", *more))

    def tests(name: str, limit_s: float, *more: str) -> Part:
        pytest = ("-m", "pytest", "-vv", "--tb=short", "-rfE", "--timeout", "100", "--timeout-method", "thread")
        more = ("--continue-on-collection-errors", "-p", "benchmarks.gpu.gpu_tests", *more)
        return Part(name, limit_s, (*pytest, *more))

    def training(name: str, limit_s: float, data: str, *more: str) -> list[Part]:
        run = ("--device", device, "--run-dir", str(work / name))
        return [
            Part(name, limit_s, ("-m", "stoker", "train", data, *run, *more)),
            Part(f"why of {name}", 15, ("-m", "stoker", "why", str(work / name))),
        ]

    request = json.dumps({"how": "machine", "device": device, "tiny": tiny})
    machine = Part("machine", 60, ("benchmarks/gpu/gpu_case.py", request))
    headline = [
        case(HEADLINE, "convolutions", 65),
        case(HEADLINE, "compiled", 150),
        case(HEADLINE, "compiled fused", 120),
        case(HEADLINE, "choice", 90),
        case(HEADLINE, "profile", 80, rest=True),
        *(case(HEADLINE, how, 60, rest=True) for how in ("eager", "eager fused")),
        *(case(HEADLINE, how, 90, rest=True) for how in ("graph", "graph fused")),
        *(case(HEADLINE, f"compiled fused {which}", 90, rest=True) for which in ("convs", "loss")),
        case(HEADLINE, f"compiled{gpu_results.ALL_ENGINES}", 200, rest=True),
    ]
    together = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / "trainer" / "gpu").glob("test_*.py")
        if str(path.relative_to(ROOT)) not in ALONE
    )
    kits = {
        "A": [machine, *headline],
        "B": [
            machine,
            loop(HEADLINE, 200),
            loop("ember_n", 200),
            *(case(model, "eager", 60, rest=True) for model in OTHERS[:3]),
            *(case(model, "compiled", 150, rest=True) for model in OTHERS[:3]),
            *(case(RX50, how, 120, rest=True) for how in ("compiled fused", "choice")),
            *(case(model, "eager", 60, rest=True) for model in OTHERS[3:5]),
            predicted([HEADLINE, *OTHERS[:5]], 45),
        ],
        "C": [
            machine,
            tests("tests", 180, "-n", "0" if tiny else "6", "--dist", "worksteal", *together),
            tests("tests, alone", 40, "-n", "0", *ALONE),
            *training("demo", 60, "demo", "--model", "retinanet_tiny_fpn", "--weights", "none", "--steps",
                      "4" if tiny else "300"),
            *training("bccd", 120, str(bccd), "--model", "ember_s", "--weights", "none",
                      *(("--steps", "2", "--batch-size", "4", "--image-size", "128", "128") if tiny
                        else ("--max-time", "1min"))),
        ],
    }  # fmt: skip
    if name is not None:
        return [part for part in kits[name] if bccd.is_dir() or not part.name.endswith("bccd")]
    return [
        *(dataclasses.replace(part, rest=False) for part in kits["A"]),
        *(dataclasses.replace(part, rest=False) for part in kits["B"][1:] if part.name != "predicted memory"),
        predicted(list(CASES), 120),
        *(case(model, how, 120) for model in OTHERS[5:] for how in ("eager", "compiled")),
        *(case(model, "compiled", 120) for model in OTHERS[3:5]),
        *(case(model, how, 120) for model in OTHERS for how in ("profile", "graph")),
        *(case(model, "eager graph", 120) for model in CASES),
        loop("ssdlite320_mobilenet_v3_large", 180),
    ]


@dataclasses.dataclass
class GpuReport(Report):
    """A report that is shown as the table of goals; its rows have too many columns for a terminal."""

    results: gpu_results.Results = dataclasses.field(default_factory=gpu_results.Results)

    def show(self) -> None:
        print(gpu_results.goals(self.results))
        print(f"\n{table([dataclasses.asdict(bar) for bar in self.bars])}")


def run(arguments: argparse.Namespace) -> Report:
    report = GpuReport("Training steps on a GPU, random images", 7, ("torch", "torchvision"))
    if arguments.goal is not None:
        files = arguments.goal or sorted(gpu_results.RESULTS.glob("gpu-*.jsonl"))
        return conclude(report, files)
    device = arguments.device
    tiny = device == "cpu" or arguments.quick
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="stoker-gpu-") as temporary:
        work = Path(temporary)
        if arguments.lines is not None and arguments.lines.exists():
            raise RuntimeError(f"{arguments.lines} has the lines of an earlier run: move it away")
        lines = arguments.lines or (arguments.json or work / "gpu").with_suffix(".jsonl")
        lines.unlink(missing_ok=True)
        log = lines.with_suffix(".log")
        lines.parent.mkdir(parents=True, exist_ok=True)
        os.environ[LINES] = str(lines.resolve())
        if device == "cpu":  # a rehearsal: Triton reads it when it is imported
            os.environ["TRITON_INTERPRET"] = "1"
        parts = plan(arguments.kit, device, tiny=tiny, work=work, bccd=arguments.bccd)
        names = arguments.only or [""]
        parts = [part for part in parts if any(name in part.name for name in names)]
        if not parts:
            raise RuntimeError(f"no part has {' or '.join(names)} in its name")
        for part in sorted(parts, key=lambda part: part.rest):
            limit_s = min(part.limit_s * (CPU_FACTOR if tiny else 1), ends - time.monotonic())
            if limit_s >= LEAST_S:
                result = run_part([sys.executable, *part.command], limit_s, log)
            else:
                result = {"exit": "not begun", "s": 0.0, "error": "no time was left"}
            record(part=part.name, limit_s=round(limit_s), **result)
            print(f"{part.name}: exit {result['exit']}, {result['s']:.0f} s {result.get('error', '')}", flush=True)
            if part.command[:2] == ("-m", "stoker"):
                print("\n".join(f"    {line}" for line in result.get("output", ())), flush=True)
            conclude(report, [lines]).write(arguments.json)
        if all(part["exit"] != 0 for part in conclude(report, [lines]).results.parts):
            report.show()
            raise RuntimeError("every part failed")
        if arguments.kit and (folder := os.environ.get("STOKER_KIT_CACHE")):
            pack(Path(folder), lines.with_name("cache.tar.gz"))
        return conclude(report, [lines])


def conclude(report: GpuReport, files: Sequence[Path]) -> GpuReport:
    report.results = gpu_results.read(file for file in files if file.exists())
    report.rows, report.bars = gpu_results.rows(report.results)
    return report


def pack(cache: Path, packed: Path) -> None:
    """Writes compiled programs into one file, which may be carried to another machine, unless it gets too large."""
    with tarfile.open(packed, "w:gz", compresslevel=3) as tar:
        for name in ("compiled", "triton"):
            if (cache / name).is_dir():
                tar.add(cache / name, name)
    size = packed.stat().st_size
    if size > CACHE_BYTES:
        packed.unlink()
    print(f"compiled programs: {size / 2**20:.1f} MiB packed{', too large to be kept' if size > CACHE_BYTES else ''}")


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--device", default="cuda", help="default: cuda")
    made.add_argument("--kit", choices=KITS, help="the parts of this command of the kit only")
    made.add_argument("--only", nargs="+", metavar="TEXT", help="parts with one of these texts in their names only")
    made.add_argument("--minutes", type=float, default=1e6, help="parts that do not fit are left out or cut")
    made.add_argument("--lines", type=Path, metavar="FILE", help="append what is measured to this file")
    made.add_argument("--goal", type=Path, nargs="*", metavar="FILE",
                      help="lines to read; default: benchmarks/results/gpu-*.jsonl")  # fmt: skip
    made.add_argument("--bccd", type=Path, default=ROOT / ".kit" / "bccd", help="data set that C trains on")
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so ends the measurement that runs
    publish(run, parser())
