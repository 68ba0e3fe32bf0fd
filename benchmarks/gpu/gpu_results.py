"""Reads what gpu.py measured: lines of JSON, as rows and bars, and as the table of goals of docs/benchmarks.md.

A line says what was measured and how: a window of steps (`img/s`), other findings of the same process, or how a part
ended (`part`). Predictions and anchors are here with their sources; every measured figure comes from the lines.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Bar

GIB = 2**30
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 of the SXM parts, from NVIDIA's data sheets."""
MEMORY_GOAL, LOADER_GOAL = 0.1, 0.97
HEADLINE = "retinanet_resnet50_fpn"
CONVOLUTIONS_MS = (51, 71)
"""Predicted for the convolutions of a step of HEADLINE: 27.1 TFLOP at 530 and 380 TFLOP/s."""
KERNELS = {(False, False): "", (True, True): " fused", (True, False): " fused convs", (False, True): " fused loss"}
"""What follows the name of a way to compute, by the switches of `stoker/training/make_step.py`: fused
convolutions, and Triton kernels for matching and loss (RetinaNet only)."""
ALL_ENGINES = " all engines"
"""What follows the name of a way to compute where cuDNN tries all engines for each convolution, not at most 10."""
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Goal:
    """A row of the table of goals. how: the first of these that was measured, before all one that counts (`counting`).
    goal, predicted: images/s.

    predicted, with the least and the most: by the roofline of an H200, from bytes and FLOPs on the fake accelerator. Of
    fused kernels: less 137 GB (eager) or 27 GB (compiled) at 4.8 TB/s (docs/decisions/0018-fused-kernels.md).
    """

    what: str
    how: tuple[str, ...]
    text: str
    goal: float | None = None
    predicted: tuple[int, ...] = ()
    anchor: str = "–"

    @property
    def prediction(self) -> str:
        middle, *band = self.predicted or ("–",)
        return f"{middle} ({band[0]}–{band[1]})" if band else str(middle)


GOALS = (
    Goal(HEADLINE, ("eager",), "RetinaNet-R50, 800×800, batch 32, eager", predicted=(295, 265, 317)),
    Goal(HEADLINE, ("eager fused",), "the same, eager, fused kernels", predicted=(400, 347, 442)),
    Goal(HEADLINE, ("compiled",), "the same, compiled", 500, (415, 355, 457), "428: the MLPerf record's efficiency"),
    Goal(HEADLINE, ("compiled fused", "compiled fused convs", "compiled fused loss"),
         "the same, compiled, fused kernels", 500, (447, 379, 497), "428"),
    Goal(HEADLINE, ("graph",), "the same, compiled, as a CUDA graph", 500, (420,), "428"),
    Goal(HEADLINE, ("graph fused",), "the same, compiled, fused kernels, as a CUDA graph", 500, (453,), "428"),
    Goal("retinanet_resnext50_32x4d_fpn", ("compiled", "compiled fused", "eager"),
         "RetinaNet-RX50, 264 classes, 800×800, batch 32", 312, anchor="312: MLPerf record, per H200"),
    Goal("ember_n", ("compiled", "eager"), "`ember_n`, 640×640, batch 64", 2500),
    Goal("faster_rcnn_resnet50_fpn", ("compiled", "eager"), "Faster R-CNN-R50, 800×1344, batch 16", 262),
)  # fmt: skip
HOWS = (
    *(base + suffix for base in ("eager", "compiled", "graph", "eager graph") for suffix in KERNELS.values()),
    f"compiled{ALL_ENGINES}",
)


@dataclass
class Results:
    """found: by (what, how); rates: images per second of each window, likewise; parts: how each ended; convolutions,
    tests: their lines."""

    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    convolutions: list[dict[str, Any]] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)

    def median(self, what: str, how: str) -> float | None:
        rates = self.rates.get((what, how))
        return statistics.median(rates) if rates else None

    def get(self, what: str, how: str, name: str) -> Any:
        return self.found.get((what, how), {}).get(name)


def read(paths: Iterable[Path]) -> Results:
    """The lines of some files; the last one may be torn."""
    results = Results()
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")
        for line in lines[:-1]:  # after the last line end: nothing, or a torn line
            add(results, json.loads(line))
    return results


def add(results: Results, line: dict[str, Any]) -> None:
    if "part" in line:
        results.parts.append(line)
    elif "test" in line:
        results.tests.append(line)
    elif "convolution" in line:
        results.convolutions.append(line)
    else:
        key = line.pop("what"), line.pop("how")
        for name, kind in (("img/s", key[1]), ("eager img/s", f"beside {key[1]}")):
            if name in line:
                results.rates.setdefault((key[0], kind), []).append(line.pop(name))
        results.found.setdefault(key, {}).update(line)


def rows(results: Results) -> tuple[list[dict[str, Any]], list[Bar]]:
    """A row for each model, each part that failed, each convolution and each kernel, and the bars."""
    machine = results.found.get(("machine", "machine"))
    made: list[dict[str, Any]] = [] if machine is None else [{"what": "machine", **machine}]
    bars: list[Bar] = []
    hows = (*HOWS, "profile", "choice", "predicted", "real loader")
    models = dict.fromkeys(what for what, how in results.found if how in hows)
    for model in models:
        row, more = model_row(results, model)
        made.append(row)
        bars += more
    made += [{"what": f"{line['part']}: failed", **line} for line in results.parts if line["exit"] != 0]
    made += [{**line, "what": f"convolution {line['convolution']}"} for line in results.convolutions]
    for model in models:
        for how in ("compiled", "compiled fused", "eager"):
            profiled = results.get(model, "profile", how) or {}
            for kind in ("kernel", "gap"):
                made += [{"what": f"{model}, {how}, {kind}", **entry} for entry in profiled.get(f"{kind}s", ())]
    return made, bars


def model_row(results: Results, model: str) -> tuple[dict[str, Any], list[Bar]]:
    row: dict[str, Any] = {"what": model}
    bars: list[Bar] = []
    cases = [found["case"] for (what, _), found in results.found.items() if what == model and "case" in found]
    case = cases[0] if cases else {}
    row |= {name: case[name] for name in ("classes", "image_size", "batch", "precision", "optimizer") if name in case}
    for how in (*HOWS, "real loader", "cached batch"):
        if rates := results.rates.get((model, how)):
            row |= {f"{how} img/s": statistics.median(rates), f"{how} min": min(rates), f"{how} max": max(rates)}
            if case.get("goal") is not None and how in HOWS and counts(results, model, how):
                bars.append(Bar.at_least(f"{model}, {how}: img/s", statistics.median(rates), case["goal"]))
        waits = results.get(model, how, "waits")
        if waits is not None:
            row[f"{how} waits"] = waits
            bars.append(Bar.at_most(f"{model}, {how}: steps that wait", waits, 0))
        for name in ("wait", "compile_s", "graphs", "skipped"):
            if (value := results.get(model, how, name)) is not None:
                row[f"{how} {name}"] = value
    if (ratio := speedup(results, model)) is not None:
        row["speedup"] = ratio
    if (choice := results.get(model, "choice", "choice")) is not None:
        row["choice"] = choice
    if (flops := results.get(model, "eager", "flops")) is not None:
        best = max((value for name, value in row.items() if name.endswith(" img/s")), default=0.0)
        row |= {"GFLOP per image": flops / 1e9, "TFLOP/s": flops * best / 1e12}
        device = results.get(model, "eager", "device") or ""
        if peaks := [peak for name, peak in PEAK_FLOPS.items() if name in device]:
            row["fraction of peak"] = flops * best / peaks[0]
    if (error := results.get(model, "predicted", "error")) is not None:
        row["prediction error"] = error
    if (predicted := results.get(model, "predicted", "predicted bytes")) is not None:
        row["predicted GiB"] = predicted / GIB
    for how in HOWS:
        if (peak := results.get(model, how, "peak bytes")) is not None:
            row[f"{how} peak GiB"] = peak / GIB
            row[f"{how} reserved GiB"] = results.get(model, how, "reserved bytes") / GIB
            if predicted is not None and how == "eager":
                apart = abs(peak / predicted - 1)
                bars.append(Bar.at_most(f"{model}: peak memory apart from predicted", apart, MEMORY_GOAL))
    if (ratio := loader_ratio(results, model)) is not None:
        bars.append(Bar.at_least(f"{model}: img/s, real loader / cached batch", ratio, LOADER_GOAL))
    return row, bars


def speedup(results: Results, model: str) -> float | None:
    """The compiled step beside the eager one of the same process, in turn."""
    compiled, eager = results.median(model, "compiled"), results.median(model, "beside compiled")
    return None if compiled is None or eager is None else compiled / eager


def counting(results: Results, what: str, base: str) -> str:
    """`base` with the kernels that a training of `what` chooses on this device, if that was measured; else with
    separate operators, since nothing says that the results of others are right."""
    exact = base + chosen_kernels(results, what)
    return exact if (what, exact) in results.rates else base


def chosen_kernels(results: Results, what: str) -> str:
    """Of KERNELS. Separate operators where no choice was measured."""
    chosen = results.get(what, "choice", "kernels")
    return "" if chosen is None else KERNELS[chosen["convs"], chosen["loss"]]


def counts(results: Results, what: str, how: str) -> bool:
    return ALL_ENGINES not in how and how == counting(results, what, how.partition(" fused")[0])


def loader_ratio(results: Results, model: str) -> float | None:
    real, cached = results.median(model, "real loader"), results.median(model, "cached batch")
    return None if real is None or cached is None else real / cached


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *lines))


def goal_table(results: Results) -> str:
    """The table of docs/benchmarks.md."""
    lines = []
    for goal in GOALS:
        how, measured = measured_of(results, goal)
        if measured is None:
            text = short = "not measured"
        else:
            rates = results.rates[goal.what, how]
            text = f"{measured:,.0f} ({min(rates):,.0f}–{max(rates):,.0f}, n = {len(rates)}{extra(results, goal, how)})"
            missing = None if goal.goal is None else goal.goal - measured
            short = "–" if missing is None else f"{missing:,.0f} img/s" if missing > 0 else "met"
            if not counts(results, goal.what, how):
                short = "does not count"
        lines.append(
            [goal.text, text, goal.prediction, goal.anchor, "–" if goal.goal is None else f"{goal.goal:,.0f}", short]
        )
    return markdown(("step, img/s on one H200", "measured", "predicted", "anchor", "goal", "falls short by"), lines)


def extra(results: Results, goal: Goal, how: str) -> str:
    """What a reader must know of a figure: another way to compute it, shapes that are not those of the goal."""
    text = f", {how}" if len(goal.how) > 1 else ""
    return text + (", **tiny shapes**" if results.get(goal.what, how, "tiny") else "")


def measured_of(results: Results, goal: Goal) -> tuple[str, float | None]:
    measured = [how for how in goal.how if (goal.what, how) in results.rates]
    first = next((how for how in measured if counts(results, goal.what, how)), (measured or goal.how)[0])
    return first, results.median(goal.what, first)


NOTHING = """Nothing was measured yet. On a GPU machine, in the project's root: `OUT=results bash .kit/gpu-first.sh A`,
then B and C (docs/benchmarks.md); with the project's environment: `make bench-gpu`. Then `benchmarks/gpu/gpu.py --goal
FILE …` with their files."""


def goals(results: Results) -> str:
    """The table of goals, and in words what falls short, by how much, and in which part of the step."""
    text = [machine_line(results), "", goal_table(results), ""]
    if not results.rates and not results.parts:
        return "\n".join([*text[2:], NOTHING])
    text += [f"- {line}" for line in kernel_lines(results)]
    for goal in GOALS:
        text += short_fall(results, goal)
    for goal in GOALS:
        how, measured = measured_of(results, goal)
        if measured is not None and goal.predicted and not min(goal.predicted) <= measured <= max(goal.predicted):
            word = "slower" if measured < min(goal.predicted) else "faster"
            text.append(
                f"- {goal.what}, {how}: {measured:,.0f} img/s, predicted {goal.prediction}: {word} than predicted."
            )
    text += [f"- {line}" for line in (*convolution_lines(results), *other_lines(results))]
    return "\n".join(text)


def machine_line(results: Results) -> str:
    found = results.found.get(("machine", "machine"), {})
    return (
        ", ".join(f"{name} {value}" if name != "device" else str(value) for name, value in found.items())
        or "machine unknown"
    )


def short_fall(results: Results, goal: Goal) -> list[str]:
    """A line about a goal that is not met, and one for each part of the step, if the step was profiled. None where
    other kernels count."""
    how, rate = measured_of(results, goal)
    if rate is None or goal.goal is None or rate >= goal.goal or not counts(results, goal.what, how):
        return []
    batch = results.get(goal.what, how, "case")["batch"]
    step_ms, allowed_ms = 1e3 * batch / rate, 1e3 * batch / goal.goal
    lines = [
        f"- **{goal.what}, {how}** takes {step_ms:.1f} ms a step; {goal.goal:,.0f} img/s allow {allowed_ms:.1f} ms: "
        f"{step_ms - allowed_ms:.1f} ms too long ({rate / goal.goal:.0%} of the goal)."
    ]
    profiled = results.get(goal.what, "profile", how.replace("graph", "compiled"))
    if profiled is None:
        return [*lines, "  Not profiled: which part of the step is too long is not known."]
    total_ms = sum(profiled["ms by group"].values())
    for name, ms in sorted(profiled["ms by group"].items(), key=lambda item: -item[1]):
        expected = (
            f", predicted {CONVOLUTIONS_MS[0]}–{CONVOLUTIONS_MS[1]}"
            if (name, goal.what) == ("convolutions", HEADLINE)
            else ""
        )
        lines.append(f"  - {name}: {ms:.1f} ms of kernels a step ({ms / total_ms:.0%}{expected})")
    if profiled["idle"] is not None:
        lines.append(f"  - the device is idle for {profiled['idle']:.0%} of the profiled time")
    return lines


def kernel_lines(results: Results) -> list[str]:
    """Separate operators and fused kernels side by side, and which of them counts."""
    lines = []
    for what in dict.fromkeys(what for what, how in results.rates if " fused" in how):
        for base in ("eager", "compiled", "graph"):
            hows = [base + suffix for suffix in KERNELS.values() if (what, base + suffix) in results.rates]
            if not any(" fused" in how for how in hows):
                continue
            rates = ", ".join(f"{how} {results.median(what, how):,.0f} img/s" for how in hows)
            exact, counted = base + chosen_kernels(results, what), counting(results, what, base)
            word = "" if exact == counted else f" {exact} was not measured."
            lines.append(f"{what}: {rates}. **{counted}** counts.{word}")
        choice = results.get(what, "choice", "choice") or "not measured, so separate operators count"
        lines.append(f"{what}: what a training on this device chooses: {choice}.")
    return lines


def convolution_lines(results: Results) -> list[str]:
    """How long the largest convolutions of the headline step take, whether its goal is possible with them, and whether
    more of cuDNN's engines make the step faster."""
    lines = []
    some, every = (results.median(HEADLINE, f"compiled{suffix}") for suffix in ("", ALL_ENGINES))
    if some and every:
        first_s = results.get(HEADLINE, f"compiled{ALL_ENGINES}", "first_s")
        lines.append(
            f"With all of cuDNN's engines tried, the compiled step reaches {every:,.0f} img/s, with at most 10 of them "
            f"{some:,.0f}; the first step then takes {first_s:.0f} s."
        )
    tflop = results.get(HEADLINE, "convolutions", "TFLOP of the step")
    case = results.get(HEADLINE, "convolutions", "case")
    goal = next(goal.goal for goal in GOALS if goal.what == HEADLINE and goal.goal)
    for benchmark in (True, False):
        some = [line for line in results.convolutions if line["what"] == HEADLINE and line["benchmark"] is benchmark]
        if some and tflop and case:
            ms, part = sum(line["step_ms"] for line in some), sum(line["tflop"] for line in some)
            all_ms, allowed_ms = ms * tflop / part, 1e3 * case["batch"] / goal
            lines.append(
                f"The {len(some)} largest convolutions ({part / tflop:.0%} of the arithmetic of all) take {ms:.1f} ms "
                f"a step with cudnn.benchmark {'on' if benchmark else 'off'}, {part / ms * 1e3:.0f} TFLOP/s; all at "
                f"that rate {all_ms:.1f} ms, where {goal:,.0f} img/s allow {allowed_ms:.1f} ms for the whole step."
            )
            if benchmark and all_ms > allowed_ms:
                lines[-1] += " **So the goal is out of reach with these convolutions.**"
    if (product := results.get(HEADLINE, "convolutions", "matmul TFLOP/s")) is not None:
        copy = results.get(HEADLINE, "convolutions", "copy TB/s")
        lines.append(f"This device reaches {product:.0f} TFLOP/s in a bf16 matrix product and copies {copy:.2f} TB/s.")
    return lines


def other_lines(results: Results) -> list[str]:
    """Speedup, loader, memory, waits, tests, and parts that failed."""
    lines = []
    for model in dict.fromkeys(what for what, _ in results.found):
        if (ratio := speedup(results, model)) is not None:
            compile_s = results.get(model, "compiled", "compile_s")
            lines.append(f"{model}: compiled {ratio:.2f} times as fast as eager, compiled in {compile_s:.0f} s.")
        if (ratio := loader_ratio(results, model)) is not None:
            made = "compiled" if results.get(model, "real loader", "compiled") else "**not compiled**"
            fused = results.get(model, "real loader", "kernels") or {}
            made += f", fused: {', '.join(name for name, on in fused.items() if on) or 'nothing'}"
            word = "met" if ratio >= LOADER_GOAL else "**missed**"
            lines.append(
                f"{model}: with the real loader {ratio:.1%} of a cached batch, {made}; goal {LOADER_GOAL:.0%}: {word}."
            )
        predicted, peak = results.get(model, "predicted", "predicted bytes"), results.get(model, "eager", "peak bytes")
        if predicted is not None and peak is not None:
            word = "" if abs(peak / predicted - 1) <= MEMORY_GOAL else " **More than 10 % apart.**"
            lines.append(f"{model}: peak memory {peak / GIB:.1f} GiB, predicted {predicted / GIB:.1f}.{word}")
        lines += [
            f"{model}, {how}: **the step waits for the device**: {results.get(model, how, 'wait')}"
            for how in HOWS
            if results.get(model, how, "waits")
        ]
    if results.tests:
        counts = {
            word: sum(one["outcome"] == word for one in results.tests) for word in ("passed", "failed", "skipped")
        }
        lines.append("tests/trainer/gpu: " + ", ".join(f"{count} {word}" for word, count in counts.items()) + ".")
        lines += [f"**failed**: {one['test']}: {one['error']}" for one in results.tests if one["outcome"] == "failed"]
    for part in results.parts:
        if part["exit"] != 0:
            cause = part.get("error") or " / ".join(part.get("output", [])[-2:])
            frames = "".join(f"; {frame}" for frame in part.get("frames", ())[-2:])
            lines.append(f"**{part['part']}** ended with {part['exit']}: {cause}{frames}")
    return lines
