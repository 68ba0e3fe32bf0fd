"""Two and four ranks on slow links: efficiency, exposed exchange and loss of every method of `--sync`, and the model.

Each rank is a process (gloo) in a network namespace of its own; virtual Ethernet connects them to a bridge, and
`tc tbf` limits what each sends and receives. "loopback" is the same without a limit. Needs root, `ip` and `tc`.

The steps are those of `stoker train` (`ddp.py`) of a real detector, on random images of 64 px. There are fewer cores
than ranks, so the device is emulated: a rank sleeps STEP_S per step, a third in the forward pass and the rest in the
backward pass, between the layers; the exchange of gradients goes on meanwhile, as on a GPU. Its length varies from step
to step by SPREAD. One process alone has the same sleeps: efficiency is its time per step, divided by that of the ranks,
which do N times as many images. "none" is the same number of ranks without any exchange: what they take from each other
on shared cores, which the model is given. Exposed exchange is `comm` of the ledger.

--model fits `hardware/exchange_cost.py` to a part of the measurements, reports its error on the others, and draws the
curves to 512 devices of docs/devices.md. --convergence METHOD SEED trains BCCD on two ranks and adds one row.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import child_environment
from benchmarks.report import Bar, Report, options, publish

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/scaling-cpu.json"
MODEL, CLASSES = "ember_n", 3
STEP_S, SPREAD = 0.15, 0.05
RATES_MBIT = {"50 Mbit/s": 50, "1 Gbit/s": 1000, "loopback": 0}
LAYOUTS = {"2 ranks": (2, 1), "4 ranks": (4, 1), "2 machines of 2 ranks": (2, 2)}
"""Name → machines, ranks on each."""
METHODS = ("plain", "plain:1", "plain:5", "bf16", "every:8", "auto")
STEPS = 5
HELD_BACK = ("4 ranks", "2 machines of 2 ranks")
"""Layouts that the model is not fitted to."""
SEEDS = (0, 1, 2)


# The network


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Network:
    """Namespaces st0, st1 …, each with the address 10.77.0.N, on a bridge in the namespace sthub."""

    def __init__(self, machines: int) -> None:
        self.machines = machines

    def __enter__(self) -> "Network":
        self.__exit__()
        run("ip", "netns", "add", "sthub")
        run("ip", "-n", "sthub", "link", "add", "br0", "type", "bridge")
        run("ip", "-n", "sthub", "link", "set", "br0", "up")
        for number in range(self.machines):
            name = f"st{number}"
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}")
            run("ip", "-n", name, "link", "set", f"port{number}", "netns", "sthub")
            run("ip", "-n", "sthub", "link", "set", f"port{number}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("sthub", *(f"st{number}" for number in range(8))):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def limit(self, mbit: int) -> None:
        """What each machine sends and receives; 0: no limit."""
        for number in range(self.machines):
            for namespace, device in ((f"st{number}", "eth0"), ("sthub", f"port{number}")):
                command = ["tc", "-n", namespace, "qdisc"]
                subprocess.run([*command, "del", "dev", device, "root"], check=False, capture_output=True)
                if mbit:
                    burst = f"{max(32, mbit // 8)}kb"
                    run(*command, "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", burst,
                        "latency", "200ms")  # fmt: skip


# A rank


class EmulatedDevice:
    """Sleeps in the forward and in the backward pass of a model, as long as a device would compute."""

    def __init__(self, model: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._modules = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        self._step_s = STEP_S
        self._count = self._expected_count = len(self._modules)
        """Outputs of layers in a forward pass; some layers have several."""
        for module in self._modules:
            module.register_forward_hook(self._in_forward)

    def begin(self) -> None:
        self._step_s = max(0.0, self._random.gauss(STEP_S, SPREAD * STEP_S))
        self._expected_count, self._count = self._count, 0
        time.sleep(self._step_s / 3)

    def _in_forward(self, module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        if hasattr(output, "register_hook") and output.requires_grad:
            output.register_hook(self._in_backward)
            self._count += 1

    def _in_backward(self, gradient: Any) -> None:
        del gradient
        time.sleep(2 / 3 * self._step_s / self._expected_count)


def measure_method(ranks: Any, method: str, steps: int) -> dict[str, float]:
    """Seconds of a step of the slowest rank, exposed exchange and loss after the steps."""
    import torch

    from stoker.config.settings import OptimSettings
    from stoker.config.sync_method import parse_sync
    from stoker.hardware.device import Device
    from stoker.models import build
    from stoker.training.ddp import Ddp, Periodic
    from stoker.training.optim import OptimizerStep
    from stoker.training.parallel import SingleProcess
    from stoker.training.state import Signals
    from stoker_watch.recording.ledger import Ledger
    from tests.trainer.models.samples import make_batch, settings_of
    from tests.trainer.training.parallels import ignore, make_setup, step_of

    cpu = Device(torch.device("cpu"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = build(settings_of(MODEL, backbone_norm="bn"), CLASSES).train()
    optim = OptimSettings(
        optimizer="adamw", lr=1e-3, backbone_lr_mult=1.0, momentum=0.9, weight_decay=0.0, lr_scheduler="constant",
        warmup_steps=0, clip_grad_norm=10.0, ema_decay=0.9, grad_accum_steps=1, max_skipped_steps=20,
    )  # fmt: skip
    optimizer = OptimizerStep(model, optim, cpu, precision="fp32")
    emulated, ledger = EmulatedDevice(model, ranks.rank), Ledger(cpu.make_clock(), start_s=time.perf_counter())
    setup = make_setup(model, optimizer, ranks, cpu)
    if method == "none":
        parallel = SingleProcess(setup, ignore)
    else:
        sync = parse_sync(method)
        parallel = Periodic(setup, ignore, sync) if sync.is_local else Ddp(setup, ignore, sync)
    batches = [make_batch((3, 2), (64, 64), CLASSES, seed=1000 * ranks.rank + number) for number in range(4)]
    parallel.warm_up(lambda: batches[0])

    def step(number: int) -> None:
        emulated.begin()
        with ledger.compute(is_redo=False):
            step_of(parallel, batches[number % 4], 1e-3)
        parallel.agree(Signals())

    first = 3
    if method.startswith("every"):
        first, steps = 8, 8 * -(-steps // 8)
    durations = []
    with parallel.timing_waits(ledger):
        for number in range(first):
            step(number)
        ledger.window(0.0)
        ranks.barrier()
        start_s = time.perf_counter()
        for number in range(first, first + steps):
            step_start_s = time.perf_counter()
            step(number)
            durations.append(time.perf_counter() - step_start_s)
        elapsed_s = time.perf_counter() - start_s
        breakdown = ledger.window(0.0)
    phases = {} if breakdown is None else breakdown.phases
    losses = setup.loss_accumulator.read(setup.loss_accumulator.take(), first + steps).losses
    own = (elapsed_s / steps, phases.get("comm", 0.0) / steps, losses["total"])
    values = [own] if ranks.alone else ranks.gather_all(own)
    return {
        "step_s": max(value[0] for value in values),
        "exposed_s": statistics.mean(value[1] for value in values),
        "loss": values[0][2],
        "slowest_step_s": max(durations),
        "gradient_bytes": sum(weight.nbytes for weight in optimizer.weights()),
    }


def choose(ranks: Any) -> tuple[str, str]:
    """(method, reason) of `--sync auto`, which measures link and compression as a training does; the step is that of
    the emulated device."""
    import torch

    from stoker.hardware.device import Device
    from stoker.models import build
    from stoker.training.defaults import sync_choice
    from tests.trainer.models.samples import settings_of

    model = build(settings_of(MODEL, backbone_norm="bn"), CLASSES)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    measured = sync_choice.measure_exchange(weights, STEP_S, Device(torch.device("cpu")), ranks)
    result: tuple[str, str] = ranks.share(lambda: sync_choice.decide(measured))
    return result


def serve_rank() -> None:
    """A rank: measures what its standard input asks for, a JSON line each, until it ends."""
    sys.path.insert(0, str(ROOT))
    from stoker.training.cluster import find_place
    from stoker.training.ranks import Ranks

    ranks = Ranks(find_place())
    ranks.connect()
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["method"] == "link":
            import torch

            from stoker.hardware.device import Device
            from stoker.preflight import network

            found = network.measure(Device(torch.device("cpu")), 2.0)
            answer: dict[str, Any] = {"latency_s": found.latency_s, "bytes_per_s": found.bytes_per_s}
        elif asked["method"] == "auto":
            chosen, reason = choose(ranks)
            answer = measure_method(ranks, chosen, asked["steps"]) | {"chosen": chosen, "reason": reason}
        else:
            answer = measure_method(ranks, asked["method"], asked["steps"])
        if ranks.is_main:
            print(json.dumps(answer), flush=True)


class RankProcesses:
    """The ranks of a layout."""

    def __init__(self, machines: int, per_machine: int) -> None:
        self.count = machines * per_machine
        self._processes = []
        for rank in range(self.count):
            environment = child_environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
            if self.count > 1:
                environment |= {
                    "RANK": str(rank), "WORLD_SIZE": str(self.count), "LOCAL_RANK": str(rank % per_machine),
                    "LOCAL_WORLD_SIZE": str(per_machine), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29611",
                }  # fmt: skip
                command = ["ip", "netns", "exec", f"st{rank // per_machine}", *command]
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def ask(self, method: str, steps: int = STEPS) -> dict[str, Any]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"method": method, "steps": steps}) + "\n")
            process.stdin.flush()
        assert self._processes[0].stdout is not None
        line = self._processes[0].stdout.readline()
        if not line:
            raise RuntimeError(f"the ranks ended while {method} was measured")
        result: dict[str, Any] = json.loads(line)
        return result


def measure_layout(
    layout: str, rates: dict[str, int], methods: tuple[str, ...], steps: int
) -> Iterator[dict[str, Any]]:
    """Rows of one layout."""
    machines, per_machine = LAYOUTS[layout]
    with Network(machines) as network, RankProcesses(machines, per_machine) as processes:
        yield {"layout": layout, "rate": "", "method": "none", **processes.ask("none", 4 * steps)}
        for rate, mbit in rates.items():
            network.limit(mbit)
            yield {"layout": layout, "rate": rate, "method": "link", **processes.ask("link")}
            for method in methods:
                yield {"layout": layout, "rate": rate, "method": method, **processes.ask(method, steps)}


# The model


def model_cost(row: dict[str, Any], link: Any, compute_s: float, fitted: dict[str, float]) -> float:
    """Seconds of a step, as `hardware/exchange_cost.py` has them. link: of a message on the network; compute_s: a step
    of as many ranks without any exchange."""
    from stoker.config.sync_method import parse_sync
    from stoker.hardware.exchange_cost import Workload, step_cost

    machines, per_machine = LAYOUTS[row["layout"]]
    work = Workload(
        compute_s=compute_s,
        gradient_bytes=row["gradient_bytes"],
        spread=SPREAD,
        cast_s=fitted["cast_s"],
    )
    return step_cost(work, link, machines * per_machine, parse_sync(row["method"])).total_s


def link_of(rows: list[dict[str, Any]], layout: str, rate: str) -> Any:
    """A message of a ring, by the all-reduces of a layout: 2 (N - 1) messages, 2 (N - 1)/N of the bytes."""
    from stoker.hardware.exchange_cost import DeviceLink

    row = next(r for r in rows if (r["layout"], r["rate"], r["method"]) == (layout, rate, "link"))
    machines, per_machine = LAYOUTS[layout]
    n = machines * per_machine
    return DeviceLink(row["latency_s"] / (2 * (n - 1)), 2 * (n - 1) / n * row["bytes_per_s"])


def fit_model(rows: list[dict[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(fitted numbers, rows with measured and predicted times). Fitted to the rows that are not HELD_BACK:
    casts. The link is that of two ranks, also for four."""
    fitted = {"cast_s": 0.0}
    compute_s = {row["layout"]: row["step_s"] for row in rows if row["method"] == "none"}
    modeled = [method for method in METHODS if method != "auto"]
    measured = [row for row in rows if row["method"] in modeled and row["layout"] in LAYOUTS]
    links = {(row["layout"], row["rate"]): link_of(rows, "2 ranks", row["rate"]) for row in measured}

    def predict(row: dict[str, Any]) -> float:
        return model_cost(row, links[row["layout"], row["rate"]], compute_s[row["layout"]], fitted)

    def error(methods: tuple[str, ...]) -> float:
        used = [row for row in measured if row["layout"] not in HELD_BACK and row["method"] in methods]
        return sum((predict(row) / row["step_s"] - 1) ** 2 for row in used)

    for name, methods, steps in (("cast_s", ("bf16",), 200),):
        scores = []
        for k in range(steps):
            fitted[name] = k * 0.0005
            scores.append((error(methods), fitted[name]))
        fitted[name] = min(scores)[1]
    table = [
        {
            "layout": row["layout"], "rate": row["rate"], "method": row["method"], "step, s": row["step_s"],
            "model, s": predict(row), "error": predict(row) / row["step_s"] - 1,
            "fitted": row["layout"] not in HELD_BACK,
        }
        for row in measured
    ]  # fmt: skip
    return fitted, table


CURVES: dict[str, tuple[float, float, bool]] = {
    "50 Mbit/s, 1 ms": (50e6 / 8, 1e-3, False),
    "1 Gbit/s, 0.1 ms": (1e9 / 8, 1e-4, False),
    "25 Gbit/s, 50 us": (25e9 / 8, 50e-6, True),
}
CURVE_METHODS = ("plain", "bf16", "every:8")
DEVICES = tuple(2**k for k in range(10))


def efficiency_curves() -> list[dict[str, Any]]:
    """Efficiency of RetinaNet-R50 (136 MB of gradients, 0.25 s a step) by the model, at 2 % spread."""
    from stoker.config.sync_method import parse_sync
    from stoker.hardware.exchange_cost import DeviceLink, Workload, step_cost

    work = Workload(compute_s=0.25, gradient_bytes=136e6, spread=0.02, cast_s=0.001)
    rows = []
    for name, (bandwidth, latency_s, has_tree) in CURVES.items():
        for method in CURVE_METHODS:
            link = DeviceLink(latency_s, bandwidth, has_tree)
            values = [work.compute_s / step_cost(work, link, n, parse_sync(method)).total_s for n in DEVICES]
            rows.append({"link": name, "method": method, "efficiency": values})
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The curves, one panel for each link, as SVG."""
    width, height, left, top = 250, 180, 46, 30
    colors = dict(zip(CURVE_METHODS, ("#444", "#1f77b4", "#d62728"), strict=True))
    parts = []
    for panel, link in enumerate(CURVES):
        x0 = left + panel * (width + 34)
        parts.append(f'<text x="{x0 + width / 2}" y="18" text-anchor="middle">{link}</text>')
        parts.append(f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>')
        for fraction in (0, 0.5, 1):
            y = top + height * (1 - fraction)
            parts.append(f'<text x="{x0 - 4}" y="{y + 4}" text-anchor="end">{fraction:.0%}</text>')
        for k, n in enumerate(DEVICES):
            if k % 3 == 0:
                x = x0 + width * k / (len(DEVICES) - 1)
                parts.append(f'<text x="{x:.0f}" y="{top + height + 15}" text-anchor="middle">{n}</text>')
        for row in (row for row in rows if row["link"] == link):
            points = " ".join(
                f"{x0 + width * k / (len(DEVICES) - 1):.1f},{top + height * (1 - value):.1f}"
                for k, value in enumerate(row["efficiency"])
            )
            color = colors[row["method"]]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    for k, (method, color) in enumerate(colors.items()):
        parts.append(f'<text x="{left + k * 110}" y="{top + height + 36}" fill="{color}">{method}</text>')
    whole = left + len(CURVES) * (width + 34)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {top + height + 46}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>' + "".join(parts)
        + "</svg>\n"
    )  # fmt: skip


# Convergence


def converge(method: str, seed: int, steps: int, data: Path) -> dict[str, Any]:
    """AP of a training on two ranks of this machine, with the same images for every method."""
    from stoker_watch.runs.records import EVENTS, read_lines
    from stoker_watch.runs.records import STEPS as WINDOWS
    from stoker_watch.runs.schemas import Event, StepWindow

    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "stoker", "train", str(data), "--device", "cpu", "--devices", "2", "--model",
            "retinanet_tiny_fpn", "--weights", "none", "--image-size", "128", "128", "--batch-size", "16",
            "--grad-accum-steps", "1", "--steps", str(steps), "--precision", "fp32", "--eval-every", "0",
            "--checkpoint-every", "0", "--workers", "1", "--seed", str(seed), "--sync", method, "--no-compile",
            "--run-dir", f"{folder}/run",
        ]  # fmt: skip
        start_s = time.perf_counter()
        environment = child_environment() | {"OMP_NUM_THREADS": "1", "STOKER_CACHE_DIR": f"{folder}/cache"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        run = Path(folder) / "run"
        aps = [e.data["metrics"]["ap"] for e in read_lines(run, EVENTS, Event) if e.kind == "evaluated"]
        ap50 = [e.data["metrics"].get("ap50") for e in read_lines(run, EVENTS, Event) if e.kind == "evaluated"]
        windows = [w for w in read_lines(run, WINDOWS, StepWindow) if w.window_steps]
        last = [w for w in windows if w.step > 0.8 * steps]
        loss = sum(w.losses["total"] * w.window_steps for w in last) / sum(w.window_steps for w in last)
    return {
        "part": "convergence", "method": method, "seed": seed, "steps": steps, "ap": aps[-1], "ap50": ap50[-1],
        "loss of the last fifth": loss, "seconds": time.perf_counter() - start_s,
    }  # fmt: skip


# The report


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())["parts"] if RESULTS.exists() else {}


def save(content: dict[str, Any], parts: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(content | {"parts": parts}, indent=2, ensure_ascii=False) + "\n")


def summarize(parts: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[Bar]]:
    """Rows and bars of all that was measured so far."""
    rows = [row for name in ("alone", *LAYOUTS) for row in parts.get(name, [])]
    alone_s = parts["alone"][0]["step_s"] if "alone" in parts else None
    shown, bars = [], []
    for row in rows:
        if row["method"] == "link":
            shown.append({"what": f"{row['layout']}, {row['rate']}: link", **row})
            continue
        efficiency = None if alone_s is None else alone_s / row["step_s"]
        what = ", ".join(filter(None, (row["layout"], row["rate"])))
        shown.append({**row, "what": f"{what}: {row['method']}", "efficiency": efficiency})
    by_name = {row["what"]: row for row in shown}
    slow = "2 ranks, 50 Mbit/s"
    if f"{slow}: auto" in by_name and f"{slow}: plain" in by_name:
        ratio = by_name[f"{slow}: plain"]["step_s"] / by_name[f"{slow}: auto"]["step_s"]
        bars.append(Bar.at_least("50 Mbit/s, 2 ranks: images/s of what auto picks / plain", ratio, 3.0))
    if "alone" in parts and "2 ranks" in parts and "4 ranks" in parts:
        fitted, table = fit_model(rows)
        held = [abs(row["error"]) for row in table if not row["fitted"]]
        bars.append(Bar.at_most("model: median error on held-back points", statistics.median(held), 0.2))
        bars.append(Bar.at_most("model: largest error on held-back points", max(held), 0.2))
        shown += [{"what": f"model: {row['layout']}, {row['rate']}: {row['method']}", **row} for row in table]
        shown.append({"what": "model: fitted", **fitted})
    found = parts.get("convergence", [])
    plain = [row["ap"] for row in found if row["method"] == "plain"]
    for method in dict.fromkeys(row["method"] for row in found):
        aps = [row["ap"] for row in found if row["method"] == method]
        shown.append({"what": f"convergence: {method}", "n": len(aps), "ap": statistics.mean(aps), "min": min(aps),
                      "max": max(aps)})  # fmt: skip
        if method != "plain" and len(plain) == len(aps) == len(SEEDS):
            noise = max(2 * statistics.stdev(plain), 0.01)
            lost = statistics.mean(plain) - statistics.mean(aps)
            bars.append(Bar.at_most(f"convergence: AP that {method} loses, / noise of plain", lost / noise, 1.0))
    return shown, bars


def measure(arguments: argparse.Namespace) -> Report:
    sys.path.insert(0, str(ROOT))
    parts = load()
    steps = 4 if arguments.quick else STEPS
    if arguments.layout == "alone":
        with RankProcesses(1, 1) as processes:
            row = {"layout": "1 process", "rate": "", "method": "none", **processes.ask("none", 2 * steps)}
        parts["alone"] = [row]
    elif arguments.layout:
        rates = {arguments.rate: RATES_MBIT[arguments.rate]} if arguments.rate else RATES_MBIT
        found = parts.setdefault(arguments.layout, [])
        for row in measure_layout(arguments.layout, rates, tuple(arguments.methods or METHODS), steps):
            found[:] = [r for r in found if (r["rate"], r["method"]) != (row["rate"], row["method"])] + [row]
            print(row["rate"], row["method"], f"{row.get('step_s', 0):.3f} s", file=sys.stderr)
            if RESULTS.exists() and not arguments.quick:  # so that an interrupted run is not lost
                save(json.loads(RESULTS.read_text()), parts)
    if arguments.convergence:
        method, seed = arguments.convergence
        found = parts.setdefault("convergence", [])
        found[:] = [row for row in found if (row["method"], row["seed"]) != (method, int(seed))]
        found.append(converge(method, int(seed), arguments.train_steps, arguments.data))
    if arguments.model:
        parts["curves"] = efficiency_curves()
        draw(parts["curves"], ROOT / "docs/images/scaling.svg")
    rows, bars = summarize(parts)
    report = Report(
        what=f"{MODEL} on ranks with an emulated device, {STEP_S} s a step, in network namespaces",
        n=1, rows=rows, bars=bars, packages=("torch",),
    )  # fmt: skip
    if arguments.quick:
        return report
    report.write(RESULTS)
    save(json.loads(RESULTS.read_text()), parts)
    return report


def parser() -> argparse.ArgumentParser:
    result = options(__doc__)
    result.add_argument("--layout", choices=("alone", *LAYOUTS), help="measure this one")
    result.add_argument("--rate", choices=tuple(RATES_MBIT), help="at this rate only")
    result.add_argument("--methods", nargs="+", help="these methods only")
    result.add_argument("--model", action="store_true", help="draw the curves of the fitted model")
    result.add_argument("--convergence", nargs=2, metavar=("METHOD", "SEED"), help="train and add the AP")
    result.add_argument("--train-steps", type=int, default=400)
    data = Path(os.environ.get("STOKER_TEST_DATA", "data")) / "bccd/BCCD"
    result.add_argument("--data", type=Path, default=data, help="folder of BCCD (shenggan/BCCD_Dataset)")
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve_rank()
    else:
        publish(measure, parser())
