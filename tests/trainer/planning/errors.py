"""Writes stoker/knowledge/plan_errors.toml: what `stoker plan` predicts for every step of which benchmarks/results has
a time, or of which others published a speed. `python -m tests.trainer.planning.errors`, some minutes, after the
fractions of assumptions.toml or the results have changed."""

import json
import tempfile
from pathlib import Path

from benchmarks.diagnosis.plan import CALIBRATION, HELD_OUT, SECOND_HELD_OUT, make_spec, trace
from stoker.planning.machines import Accelerator
from stoker.planning.predict import CPU, step_time
from tests.trainer.planning.test_published import PUBLISHED, predict

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "stoker/knowledge/plan_errors.toml"
RUNS = {"plan-cpu": "EPYC", "plan-busy-cpu": "EPYC, load 15", "plan-first-cpu": "Xeon, load 13"}
"""File in benchmarks/results → its machine."""
EARLIER_METHOD = ("plan-first-cpu", "faster_rcnn_mobilenet_v3_large_fpn, 256 px, batch 2")
"""Its fit had another fraction of matrix products, which was then changed because of it."""
HEAD = """\
# How far `stoker plan` was off: seconds of a step as predicted, and as measured or published. Its bands are
# computed of these rows (`learn_error` in stoker/planning/predict.py): for a device without a measured step those
# of `cpu` or `gpu`, else of `other_model` or `same_model`. Written by
# `python -m tests.trainer.planning.errors`. A row: [what, predicted s, actual s].

"""
SECTIONS = {
    "cpu": ("The fractions of assumptions.toml against benchmarks/results/plan*-cpu.json.", "{rows} steps on CPUs"),
    "gpu": (
        "The same against what others published (docs/plan.md). Two are whole trainings, what a GPU did at least.",
        "{rows} published speeds on V100, A100 and H100",
    ),
    "other_model": (
        "With fractions fitted to two other models on the same CPU.",
        "{rows} steps of other models on CPUs",
    ),
    "same_model": ("The fit at the steps that it was fitted to.", "{rows} steps of the same models on CPUs"),
}


def collect() -> dict[str, list[tuple[str, float, float]]]:
    cases = [*CALIBRATION, *HELD_OUT, *SECOND_HELD_OUT]
    found_traces = trace(*((make_spec(case), case.batch, 0) for case in cases))
    traces = {case.label: found for case, found in zip(cases, found_traces, strict=True)}
    rows: dict[str, list[tuple[str, float, float]]] = {name: [] for name in SECTIONS}
    for name, machine in RUNS.items():
        found = {row["what"]: row for row in json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]}
        peaks = [
            found[f"CPU, {what}"]["measured"] * 1e9
            for what in ("matrix product of one thread, GFLOP/s", "copy of one thread, GB/s")
        ]
        cpu = Accelerator(
            key="cpu", name="", flops={"fp32": peaks[0]}, bandwidth=peaks[1], memory_bytes=0, is_cpu=True, source=""
        )
        for what, row in found.items():
            if not what.startswith("time, "):
                continue
            group, label = what.removeprefix("time, ").rsplit(": ", 1)
            predicted_s = step_time(traces[label], cpu, CPU, precision="fp32").total_s
            rows["cpu"].append((f"{machine}: {label}", predicted_s, row["measured"]))
            if (name, label) != EARLIER_METHOD:
                section = "same_model" if group == "calibration" else "other_model"
                rows[section].append((f"{machine}: {label}", row["predicted"], row["measured"]))
    for case in PUBLISHED:
        with tempfile.TemporaryDirectory() as folder:
            predicted = predict(case, Path(folder))
        height, width = case.size
        what = f"{case.accelerator}, {case.precision}: {case.model}, {width}×{height}, batch {case.batch_size}"
        rows["gpu"].append((what, predicted.step_s, case.batch_size / case.img_per_s))
    return rows


def main() -> None:
    text = HEAD
    for name, rows in collect().items():
        comment, of = SECTIONS[name]
        lines = "".join(f'    ["{what}", {predicted:.4g}, {actual:.4g}],\n' for what, predicted, actual in rows)
        text += f'# {comment}\n[{name}]\nof = "{of}"\nrows = [\n{lines}]\n\n'
    FILE.write_text(text.rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
