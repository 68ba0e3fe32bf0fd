"""Places of samples, added up over a run."""

import io
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.diagnosis.costs import divide_time
from stoker_watch.diagnosis.engine import CATALOG, run_rules
from stoker_watch.diagnosis.places.totals import MIN_SHARE, find_places, wilson
from stoker_watch.diagnosis.places.trees import MAX_NODES, place_trees
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.report.explain import explain_run, print_explanation
from stoker_watch.runs.schemas import LOOP_IN_STEP, Place
from tests.watch.diagnosis.built import STARTUP, T0, make_run

COPY = Place(line="train.py:53", function="update", call="copy.deepcopy", kind="python", samples=10)


def list_places(run: RunRecords) -> list[Any]:
    """The places of costs, the most costly first."""
    return [cost.place for cost in run.costs if cost.place is not None]


def window(number: int, *places: Place, **fields: object) -> dict[str, object]:
    """The line of ten seconds after the start."""
    kinds = {place.kind: place.samples / 40 for place in places}
    values = {"t": T0 + STARTUP + 10.0 * number, "samples": 40, "main_thread": kinds, "places": list(places)}
    return values | fields


def test_places_of_a_run_are_added_up_by_role_and_rank(tmp_path: Path) -> None:
    worker = Place(line="data.py:7", function="load", call="pandas.read_csv", leaf="read (pandas/io/c.py)",
                   kind="python", samples=30)  # fmt: skip
    compute = Place(kind="compute", samples=30)
    stacks = [
        window(1, COPY, compute),
        window(2, COPY, compute),
        window(4, COPY, compute),
        window(1, worker, Place(kind="idle", samples=10), role="worker", pid=8),
        window(0, Place(line="train.py:1", kind="other", samples=40)),
        window(1, Place(line="launch.py:1", kind="idle", samples=40), pid=6),
    ]
    run = read_run(make_run(tmp_path / "run", seconds=45, stacks=stacks))
    found = find_places(run, call="deepcopy")
    assert found is not None
    assert (found.samples, found.seconds, found.windows, found.bursts) == (30, 7.5, 3, 1)
    assert found.window_fraction == 1
    assert 0 < found.low_s < 7.5 < found.high_s < 12
    in_parser = find_places(run, "worker", leaf="pandas/")
    assert in_parser is not None
    assert (in_parser.line, in_parser.seconds) == ("data.py:7", 7.5)
    assert find_places(run, "worker", leaf="json/") is None
    assert all(place.line != "launch.py:1" for place in run.places), "it only waits for its children"
    assert [place.is_startup for place in run.places if place.line == "train.py:1"] == [True]
    assert run.place_totals == {("training", 0): 30.0, ("worker", 0): 10.0}, "after the start"
    assert run.stacks.samples == 120, "of processes that train"


@given(st.integers(1, 1000), st.floats(0, 1))
def test_an_interval_contains_the_fraction(count: int, fraction: float) -> None:
    low, high = wilson(fraction, count)
    assert low - 1e-9 <= fraction <= high + 1e-9
    assert 0 <= low <= high <= 1
    assert wilson(0.1, 100) == pytest.approx((0.0552, 0.1744), abs=1e-3)  # statsmodels proportion_confint, wilson


def own(part: str, function: str, samples: int, **fields: str) -> Place:
    return Place(part=part, function=function, samples=samples, **{"kind": "python"} | fields)


EVALUATION = own("evaluation", "detect (evaluation/evaluate.py:9)", 24, call="torch.topk")
STEP = own("training step", "backward (training/optim.py:1)", 16, kind="compute")
LOADS = own("loader", "decode_jpeg (data/images/decode.py:7)", 30)
WAITS_FOR_WORK = own("loader", "_next_task (data/loading/worker_pool.py:2)", 10, kind="idle")


def test_parts_of_stoker_are_shown_and_are_no_fault_of_the_user(tmp_path: Path) -> None:
    """Neither those that would be a heavy place in a program of the user, nor does a hang name them."""
    stacks = [window(n, EVALUATION, STEP) for n in range(1, 5)]
    stacks += [window(n, LOADS, WAITS_FOR_WORK, role="worker") for n in range(1, 5)]
    users = [Place(line="train.py:3", function="f", call="torch.topk", kind="python", samples=24), STEP]
    fractions = {"fractions": {"eval": 0.1, "input_wait": 0.02}, "seconds": 45}
    without = run_rules(read_run(make_run(tmp_path / "without", **fractions)))
    run = make_run(tmp_path / "run", **fractions, stacks=stacks)
    assert run_rules(read_run(run)) == without
    in_users = make_run(tmp_path / "users", **fractions, stacks=[window(n, *users) for n in range(1, 5)])
    assert "heavy_place" in {finding.id for finding in run_rules(read_run(in_users))}
    explanation = explain_run(run)
    assert [place.text() for place in explanation.places] == [
        "30 s (±3) decode_jpeg ← loader, in each loader worker",
        "24 s (±3) evaluation, mostly in detect (evaluation/evaluate.py:9)",
    ]
    printed = io.StringIO()
    print_explanation(explanation, printed)
    assert "Parts of stoker besides the training step" in printed.getvalue()


def test_the_tree_of_places_has_all_samples(tmp_path: Path) -> None:
    leaf = {"call": "copy.deepcopy", "kind": "python"}
    places = [
        Place(line="train.py:53", function="update", leaf="copy (a/copy.py)", samples=10, **leaf),
        Place(line="train.py:53", function="update", samples=10, **leaf),
        Place(line="train.py:9", function="main", kind="compute", samples=20),
    ]
    stacks = [window(n, *places) for n in (1, 2)] + [window(3, places[2], samples=20, wall_s=1.0)]
    stacks += [window(-1, places[2], samples=20), window(1, LOADS, WAITS_FOR_WORK, role="worker")]
    trees = place_trees(read_run(make_run(tmp_path / "run", seconds=45, stacks=stacks)))
    assert [tree.name for tree in trees] == ["training thread", "training thread, start", "each loader worker"]
    (root, start, workers) = trees
    assert (root.seconds, root.samples) == (21, 100)
    assert (root.low_s, root.high_s) == (pytest.approx(20.2, abs=0.1), pytest.approx(21))
    assert [(node.name, node.seconds, node.samples) for node in root.nodes] == [
        ("main (train.py:9)", 11, 60),
        ("update (train.py:53)", 10, 40),
    ], "by seconds, not by samples: windows have different rates"
    (copied,) = root.nodes[1].nodes
    assert (copied.name, copied.seconds, copied.kind) == ("copy.deepcopy", 10, "python")
    assert copied.low_s < 10 < copied.high_s
    assert [(node.name, node.seconds, node.nodes) for node in copied.nodes] == [("copy (a/copy.py)", 5, [])]
    assert start.seconds == 10
    assert [node.name for node in workers.nodes] == ["loader", "waits for work"]


def test_a_tree_leaves_out_what_is_too_small_to_draw(tmp_path: Path) -> None:
    small = [Place(line=f"train.py:{n}", function="f", kind="python", samples=n) for n in range(1, 41)]
    many = [window(1, Place(line="train.py:99", function="f", kind="python", samples=180), *small, samples=1000)]
    (tree,) = place_trees(read_run(make_run(tmp_path / "run", seconds=45, stacks=many)))
    assert len(tree.nodes) == MAX_NODES
    assert all(node.samples >= MIN_SHARE * tree.samples for node in tree.nodes)
    assert tree.samples == 1000


def test_a_place_without_samples_takes_no_time(tmp_path: Path) -> None:
    nothing = Place(line="train.py:3", function="f", kind="python", samples=0)
    stacks = [window(1, Place(line="train.py:9", function="main", kind="compute", samples=20), nothing)]
    (tree,) = place_trees(read_run(make_run(tmp_path / "run", seconds=45, stacks=stacks)))
    assert [node.name for node in tree.nodes] == ["main (train.py:9)"]


RECORDED = Path(__file__).with_name("stack_samples")
IDLE = {"cpu_core_utilization": [0.2] * 4, "process_cpu": 0.3, "threads_running": 0.4}
WAITS = {"external": True, "config": None, "num_images": 0, "seconds": 60, "host": lambda _: IDLE,
         "fractions": {"input_wait": 0.6}}  # fmt: skip


def recorded(name: str) -> list[dict[str, Any]]:
    """The lines of a real job from its first steps on, moved to the time of the run."""
    lines = [msgspec.json.decode(line) for line in (RECORDED / f"{name}.jsonl").read_bytes().splitlines()]
    start_t = next(line["t"] - line["wall_s"] for line in lines if "input_wait" in line["main_thread"])
    found = [
        line | {"t": line["t"] - start_t + T0 + STARTUP, "places": msgspec.convert(line["places"], list[Place])}
        for line in lines
    ]
    return [line for line in found if line["t"] - line["wall_s"] / 2 > T0 + STARTUP]


@pytest.mark.parametrize(
    ("name", "cause", "title"),
    [
        ("json_for_each_image", "heavy_place", "json.load, called at csv_job.py:9"),
        ("sleep_for_each_image", "heavy_place", "time.sleep, called at train.py:12"),
        ("workers_spawned_each_epoch", "workers_start_again", "started again for each epoch"),
    ],
)
def test_idle_cores_are_not_slow_storage_if_stacks_show_who_loads(
    name: str, cause: str, title: str, tmp_path: Path
) -> None:
    """Stacks of real jobs; all were said to have a storage that is too slow."""
    without = run_rules(read_run(make_run(tmp_path / "without", **WAITS)))
    assert without[0].id == "heavy_place", "the same records without stacks"
    assert CATALOG["slow_storage"].title in without[0].fix
    findings = run_rules(read_run(make_run(tmp_path / "run", **WAITS, stacks=recorded(name))))
    assert findings[0].id == cause
    assert title in findings[0].title
    assert (findings[0].confidence or 0) >= 0.7
    assert "slow_storage" not in {finding.id for finding in findings}


def test_workers_that_read_have_a_slow_storage(tmp_path: Path) -> None:
    reads = Place(line="data.py:9", function="load", call="open", kind="idle", samples=40)
    run = read_run(make_run(tmp_path / "run", **WAITS, stacks=[window(n, reads, role="worker") for n in (1, 2, 3)]))
    (finding, *_) = [finding for finding in run_rules(run) if finding.id == "slow_storage"]
    assert (finding.confidence or 0) >= 0.7


@pytest.mark.parametrize(
    ("loader", "process_cpu", "cause"),
    [
        (None, 0.3, "slow_storage"),
        (Place(line="data.py:9", function="load", call="time.sleep", kind="idle", samples=40), 0.3, "heavy_place"),
        (Place(line="data.py:9", function="load", call="urllib.request.urlopen", kind="idle", samples=40), 0.3,
         "slow_storage"),
        (None, 1.3, "too_few_workers"),
        (Place(line="data.py:9", function="load", call="image.filter", kind="decode", samples=40), 1.3,
         "too_few_workers"),
    ],
)  # fmt: skip
def test_tensorflows_own_threads_load_if_no_python_does(
    loader: Place | None, process_cpu: float, cause: str, tmp_path: Path
) -> None:
    """Threads of TensorFlow have no Python stacks. A py_function has, also one that sleeps."""
    fit = Place(line="train.py:9", function="main", call="model.fit", leaf="quick_execute (eager/execute.py)",
                kind="other", samples=40)  # fmt: skip
    roles = [("training", fit), *([] if loader is None else [("worker", loader)])]
    stacks = [window(n, place, role=role) for n in (1, 2, 3, 4, 5) for role, place in roles]
    coverage = {"coverage": {"inside the job": "recorded: Keras 3.15 on tensorflow in a process"}}
    host = IDLE | {"process_cpu": process_cpu}
    job = {**WAITS, "host": lambda _: host, "events": [("info", "", coverage)]}
    findings = run_rules(read_run(make_run(tmp_path / "run", **job, stacks=stacks)))
    assert findings[0].id == cause
    assert (findings[0].confidence or 0) >= 0.7


@pytest.mark.parametrize(("call", "first"), [("path.read_bytes", "slow_storage"), ("path.parse", "heavy_place")])
def test_a_line_that_reads_is_slow_storage(call: str, first: str, tmp_path: Path) -> None:
    """In the training thread, whose stacks show only that line."""
    line = Place(line="data.py:9", function="load", call=call, kind="input_wait", samples=26)
    stacks = [window(n, line, Place(kind="compute", samples=14)) for n in (1, 2, 3)]
    findings = run_rules(read_run(make_run(tmp_path / "run", **WAITS, stacks=stacks)))
    grave = [finding.id for finding in findings if finding.severity != "info"]
    assert grave == [first]


@pytest.mark.parametrize("role", ["training", "worker"])
def test_a_line_of_a_loader_that_decodes_nothing_is_no_decoding(role: str, tmp_path: Path) -> None:
    """A sampler, a collator for texts, a file that is parsed for each image: stacks of jobs of strangers."""
    line = Place(line="samplers.py:7", function="_draw", call="numpy.random.choice", samples=30,
                 kind="input_wait" if role == "training" else "python")  # fmt: skip
    rest = Place(kind="compute" if role == "training" else "idle", samples=10)
    stacks = [window(n, line, rest, role=role) for n in (1, 2, 3, 4)]
    if role == "worker":
        waits = Place(line="train.py:9", function="main", kind="input_wait", samples=24,
                      call="torch.utils.data.dataloader.__next__")  # fmt: skip
        stacks += [window(n, waits, Place(kind="compute", samples=16)) for n in (1, 2, 3, 4)]
    busy = {"process_cpu": 2.2, "cpu_core_utilization": [0.95] * 2, "cpu_limit_cores": 2.0}
    job = WAITS | {
        "host": lambda _: busy,
        "window": lambda _: {"thread_cpu_s": {"input_wait": 0.6 * (role == "training")}},
    }
    findings = run_rules(read_run(make_run(tmp_path / "run", **job, stacks=stacks)))
    grave = [(finding.id, finding.place) for finding in findings if finding.severity != "info"]
    assert grave == [("heavy_place", "samplers.py:7")]


def test_a_sampler_that_reads_all_images_comes_before_the_workers_that_start_in_its_time(tmp_path: Path) -> None:
    """Recorded of a YOLOS whose sampler opens all photos for their labels when an epoch begins: the clock of the starts
    of workers goes up to the first batch, and has what the sampler takes."""
    opens = Place(line="coco.py:39", function="__getitem__", call="__getitem__", leaf="load (PIL/ImageFile.py)",
                  samples=9, kind="decode", callers="main.py:36 < main.py:43")  # fmt: skip
    masks = Place(line="coco.py:102", function="__call__", samples=3, kind="decode",
                  callers="coco.py:42 < main.py:36 < main.py:43")  # fmt: skip
    resizes = Place(line="transforms.py:120", function="resize", call="torchvision.transforms.functional.resize",
                    samples=8, kind="decode", callers="coco.py:44 < main.py:36 < main.py:43")  # fmt: skip
    starts = {"thread_cpu_s": {"input_wait": 0.5}, "worker_starts": 1, "worker_start_s": 1.0}

    def first(*places: Place) -> tuple[str, str]:
        rest = Place(kind="compute", samples=40 - sum(place.samples for place in places))
        job = WAITS | {"window": lambda n: starts if n % 2 else {}, "facts": {"workers": 1}}
        run = make_run(tmp_path / f"run{len(places)}", **job, stacks=[window(n, *places, rest) for n in (1, 2, 3, 4)])
        found = run_rules(read_run(run))[0]
        return found.id, found.place

    assert first(opens, resizes, masks) == ("heavy_place", "main.py:36")
    assert first() == ("workers_start_again", "")


@pytest.mark.parametrize("workers", [1, 0])
def test_a_sampler_that_decodes_is_told_beside_the_workers(workers: int, tmp_path: Path) -> None:
    """Records of a job of a stranger, whose batch sampler opens each image for its shape."""
    line = Place(line="data.py:24", function="load", call="convert", leaf="load (PIL/ImageFile.py)", samples=30,
                 kind="decode", callers="samplers.py:18 < samplers.py:25")  # fmt: skip
    stacks = [window(n, line, Place(kind="compute", samples=10)) for n in (1, 2, 3, 4)]
    busy = {"process_cpu": 2.2, "cpu_core_utilization": [0.95] * 2, "cpu_limit_cores": 2.0}
    job = WAITS | {"host": lambda _: busy, "window": lambda _: {"thread_cpu_s": {"input_wait": 0.6}},
                   "facts": {"workers": workers}}  # fmt: skip
    first = run_rules(read_run(make_run(tmp_path / "run", **job, stacks=stacks)))[0]
    assert (first.id, first.place) == (("heavy_place", "data.py:24") if workers else ("slow_decode", ""))
    assert ("called from samplers.py:18 < samplers.py:25" in first.evidence_text) is bool(workers)
    assert first.fix.startswith("A sampler") is bool(workers)


@pytest.mark.parametrize(
    ("kind", "count", "is_sure"), [("decode", 4, True), ("decode", 3, False), ("python", 40, False)]
)
def test_decoding_in_workers_is_sure_from_few_samples_if_all_show_it(
    kind: str, count: int, is_sure: bool, tmp_path: Path
) -> None:
    """The CPU time alone says only that the workers compute. 4 of 4: at least 51 % with 95 % confidence."""
    busy = {"process_cpu": 3.7, "cpu_core_utilization": [0.95] * 4}
    place = Place(line="data.py:9", function="load", call="transform", kind=kind, samples=count)
    stacks = [window(1, place, role="worker", samples=count)]
    files = make_run(tmp_path / "run", **(WAITS | {"host": lambda _: busy}), stacks=stacks)
    found = [f for f in run_rules(read_run(files)) if f.id == "slow_decode" and f.severity != "info"]
    assert [(f.confidence or 0) >= 0.7 for f in found] == [True] * is_sure


@pytest.mark.parametrize(
    ("call", "found"),
    [("copy.deepcopy", ["heavy_place"]), ("numpy.histogram", ["heavy_place"]), ("torch.nn.Module.__call__", []),
     ("jax.numpy.histogram", [])],
)  # fmt: skip
def test_what_no_step_needs_is_a_place_though_torch_calls_it(call: str, found: list[str], tmp_path: Path) -> None:
    copied = Place(line="train.py:53", function="update", call=call, kind="compute", samples=30)
    rest = Place(line="train.py:50", function="train", kind="compute", samples=70)
    stacks = [window(n, copied, rest, samples=100, main_thread={"compute": 1.0}) for n in range(1, 5)]
    run = make_run(tmp_path / "run", seconds=45, stacks=stacks)
    assert [finding.id for finding in run_rules(read_run(run))] == found


@pytest.mark.parametrize(("call", "samples"), [("copy.deepcopy", 1), ("gc.collect", 2)])
def test_a_cheap_call_is_no_finding(call: str, samples: int, tmp_path: Path) -> None:
    cheap = Place(line="train.py:53", function="update", call=call, kind="python", samples=samples)
    rest = Place(line="train.py:50", function="train", kind="compute", samples=100 - samples)
    stacks = [window(n, cheap, rest, samples=100, main_thread={"compute": 1.0}) for n in range(1, 5)]
    assert run_rules(read_run(make_run(tmp_path / "run", seconds=45, stacks=stacks))) == []


@pytest.mark.parametrize(
    ("samples", "grows"),
    [([8, 12, 15, 21, 24, 31, 33, 40], True), ([40, 33, 31, 24, 21, 15, 12, 8], False), ([24] * 8, False),
     ([20, 31, 18, 30, 22, 33, 19, 30], False), ([16, 24, 30, 42], False)],
)  # fmt: skip
def test_a_line_that_takes_longer_and_longer_is_told_to_grow(samples: list[int], grows: bool, tmp_path: Path) -> None:
    stacks = []
    for number, count in enumerate(samples, 1):
        line = Place(line="train.py:53", function="update", call="copy.deepcopy", kind="python", samples=count)
        rest = Place(line="train.py:50", function="train", kind="compute", samples=100 - count)
        stacks.append(window(number, line, rest, samples=100, main_thread={"compute": 1.0}))
    run = make_run(tmp_path / "run", seconds=10 * len(samples) + 5, stacks=stacks)
    (finding,) = [found for found in run_rules(read_run(run)) if found.id == "heavy_place"]
    texts = [evidence.text for evidence in finding.evidence if "longer and longer" in evidence.text]
    assert len(texts) == grows
    assert ("metric.reset()" in finding.fix) == grows
    if grows:
        assert 3 < float(texts[0].split(": ")[1].split()[0]) < 7


def test_workers_that_start_once_are_no_finding(tmp_path: Path) -> None:
    imports = Place(line="train.py:1", function="<module>", call="import torch", kind="other", samples=40)
    waits = Place(kind="idle", samples=40)
    stacks = [window(1, imports, role="worker"), *(window(n, waits, role="worker") for n in (2, 3, 4))]
    found = run_rules(read_run(make_run(tmp_path / "run", **WAITS, stacks=stacks)))
    assert "workers_start_again" not in {finding.id for finding in found}


def test_workers_of_one_start_are_no_finding_however_many_they_are(tmp_path: Path) -> None:
    """Persistent workers, each started once; seen in turn while the training has begun."""
    imports = Place(line="train.py:1", function="<module>", call="import torch", kind="other", samples=40)
    once = [window(1 + n, imports, role="worker", pid=8 + n) for n in range(3)]
    again = [*once, window(4, imports, role="worker", pid=20), window(5, imports, role="worker", pid=21)]
    events = [("info", "", {"workers": 3})]
    for name, stacks, is_found in (("once", once, False), ("again", again, True)):
        found = run_rules(read_run(make_run(tmp_path / name, **WAITS, stacks=stacks, events=events)))
        assert ("workers_start_again" in {finding.id for finding in found}) == is_found


def test_workers_that_do_other_work_do_not_start_again(tmp_path: Path) -> None:
    parses = Place(line="data.py:4", function="load", call="pandas.read_csv", kind="other", samples=40)
    stacks = [window(n, parses, role="worker", pid=8 + n) for n in range(1, 5)]
    found = run_rules(read_run(make_run(tmp_path / "run", **WAITS, stacks=stacks)))
    assert [finding.id for finding in found][:1] == ["heavy_place"]
    assert "workers_start_again" not in {finding.id for finding in found}


HANGS = Path(__file__).with_name("recorded")


@pytest.mark.parametrize(
    ("name", "id", "title", "waiting"),
    [
        (
            "rank_in_recv",
            "hung",
            "rank 1 is stuck in here.recv at train.py:16",
            "rank 0 only waits for it, in loss.backward",
        ),
        (
            "lock_at_fork",
            "hang",
            "waits for the lock of `with LOCK` at train.py:13",
            "the training thread only waits for it",
        ),
    ],
)
def test_a_hang_names_who_is_stuck_and_where(name: str, id: str, title: str, waiting: str) -> None:
    """Records of `stoker watch`: two gloo ranks of which one reads from a socket; a worker that was forked while its
    parent held a lock."""
    findings = run_rules(read_run(HANGS / name))
    assert findings[0].id == id  # a job that lives, and one that was stopped
    assert title in findings[0].title
    assert waiting in findings[0].evidence_text
    assert findings[0].place == title.rpartition(" at ")[2]


def test_a_hang_names_the_calls_in_which_ranks_wait_for_each_other() -> None:
    """Records of `stoker watch`: rank 0 alone calls the model that DDP has wrapped, rank 1 has gone on."""
    findings = run_rules(read_run(HANGS / "ranks_wait_apart"))
    assert findings[0].id == "hung"
    assert (
        "rank 0 in model at ssd/engine/trainer.py:83, rank 1 in torch.distributed.reduce at ssd/engine/trainer.py:41"
        in findings[0].title
    )
    assert re.fullmatch(r"py-spy dump --pid \d+", findings[0].command or "")
    assert findings[0].command in findings[0].fix


def test_no_warning_is_below_seventy_percent(tmp_path: Path) -> None:
    """Idle cores, no stacks: what took the time is the finding, and each possible cause has what would tell."""
    (finding, *_) = run_rules(read_run(make_run(tmp_path / "run", **WAITS)))
    assert (finding.id, finding.severity) == ("heavy_place", "critical")
    assert "input_wait" in finding.title
    for text in (CATALOG["slow_storage"].title, "65%", "iostat"):
        assert text in finding.fix
    assert finding.confidence is None, "each possible cause has its own"


def test_a_line_of_the_training_thread_does_not_hide_a_wait_for_input(tmp_path: Path) -> None:
    """A copy between steps and a loader that is too slow are two faults."""
    rest = Place(line="train.py:50", function="train", kind="compute", samples=14)
    waits = Place(line="train.py:49", function="train", call="next", kind="input_wait", samples=16)
    stacks = [window(n, COPY, rest, waits) for n in range(1, 6)]
    host = {"process_cpu": None, "cpu_core_utilization": [], "threads_running": None}
    case = {**WAITS, "fractions": {"input_wait": 0.4}, "host": lambda _: host}
    found = {finding.id for finding in run_rules(read_run(make_run(tmp_path / "run", **case, stacks=stacks)))}
    assert {"heavy_place", "input_bound"} <= found


@pytest.mark.parametrize(("utilization", "is_found"), [(0.97, False), (0.3, True)])
def test_a_line_in_which_the_device_computes_costs_nothing(utilization: float, is_found: bool, tmp_path: Path) -> None:
    """A training thread that waits in its own way for a busy device."""
    sleeps = Place(line="train.py:17", function="train", call="time.sleep", kind="idle", samples=40)
    stacks = [window(n, sleeps) for n in range(1, 6)]
    case = {"external": True, "config": None, "seconds": 60, "gpus": 1, "gpu": lambda *_: {"utilization": utilization}}
    found = run_rules(read_run(make_run(tmp_path / "run", **case, stacks=stacks)))
    assert ("heavy_place" in {finding.id for finding in found}) is is_found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_thread_that_loads_by_itself_is_told_of_workers(workers: int, tmp_path: Path) -> None:
    parses = Place(line="data.py:9", function="load", call="json.load", kind="input_wait", samples=40)
    stacks = [window(n, parses) for n in range(1, 6)]
    case = {"external": True, "config": None, "seconds": 60, "fractions": {"input_wait": 0.4}}
    run = read_run(make_run(tmp_path / "run", **case, stacks=stacks))
    run.facts["workers"] = workers
    (finding,) = [finding for finding in run_rules(run) if finding.id == "heavy_place"]
    assert ("let workers of the loader do it" in finding.fix) is (workers == 0)


def test_why_shows_places_before_the_findings(tmp_path: Path) -> None:
    rest = Place(line="train.py:50", function="train", kind="compute", samples=30)
    run = make_run(tmp_path / "run", seconds=45, stacks=[window(n, COPY, rest) for n in range(1, 5)])
    explanation = explain_run(run)
    (place,) = explanation.places
    assert place.text() == "10 s (±3) copy.deepcopy ← train.py:53, throughout"
    shown = io.StringIO()
    print_explanation(explanation, shown, width=120)
    assert shown.getvalue().index(place.text()) < shown.getvalue().index("10 s in copy.deepcopy, called at train.py:53")
    assert msgspec.json.decode(msgspec.json.encode(explanation))["places"][0]["call"] == "copy.deepcopy"


ON_TWO = {"external": True, "config": None, "seconds": 45, "fractions": {"compute": 0.6, "comm": 0.4},
          "ranks": [{"compute": 0.6, "comm": 0.4}]}  # fmt: skip


def run_with_collective(run: Path, call: str, samples: int, lines: int) -> Path:
    """Two ranks that are in a call at train.py:66 in `samples` of 40 samples of each line of ten seconds."""
    make_run(run, **ON_TWO)
    collective = Place(line="train.py:66", function="train", call=call, kind="comm", samples=samples)
    rest = Place(line="train.py:53", function="train", call="model", kind="compute", samples=40 - samples)
    for name in (".", "ranks/0001"):
        with (run / name / "stacks.jsonl").open("ab") as file:
            for n in range(1, lines + 1):
                line = {"attempt": 1, "pid": 7 + len(name), "wall_s": 10.0, "frames": {}} | window(n, collective, rest)
                file.write(msgspec.json.encode(line) + b"\n")
    return run


@pytest.mark.parametrize(
    ("call", "samples", "is_named"),
    [("torch.distributed.all_gather_object", 12, True), ("torch.distributed.all_gather_object", 1, False),
     ("loss.backward", 12, False)],
)  # fmt: skip
def test_a_collective_of_the_jobs_own_is_named(call: str, samples: int, is_named: bool, tmp_path: Path) -> None:
    """Not the all-reduce in the backward pass, nor a line with one sample."""
    first = run_rules(read_run(run_with_collective(tmp_path / "run", call, samples, lines=2)))[0]
    assert first.id == "communication_bound"
    assert (first.place == "train.py:66") is is_named
    assert ("all_gather_object, called at train.py:66" in first.title) is is_named
    assert ("at this line" in first.fix) is is_named


def test_what_is_lost_in_a_collective_of_the_jobs_own_is_all_of_its_samples(tmp_path: Path) -> None:
    """The clock of the hook has only a part of them in `comm`."""
    run = run_with_collective(tmp_path / "run", "torch.distributed.all_reduce", 30, lines=4)
    first = run_rules(read_run(run))[0]
    assert first.place == "train.py:66"
    assert first.lost_device_s == pytest.approx(60, rel=0.05)


@pytest.mark.parametrize(("frameworks", "is_named"), [("torch", True), ("jax 0.10 and torch", False)])
def test_printing_tensors_on_a_cpu_is_a_place(frameworks: str, is_named: bool, tmp_path: Path) -> None:
    """On a device, and in JAX also on a CPU, the same call waits for the steps."""
    prints = Place(line="train.py:60", function="train", call="torch._tensor.__repr__", kind="sync", samples=10)
    steps = Place(line="train.py:53", function="train", call="loss.backward", kind="compute", samples=30)
    coverage = {"coverage": {"inside the job": f"recorded: {frameworks} in a process"}}
    stacks = [window(n, steps, prints) for n in (1, 2, 3, 4)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, events=[("info", "", coverage)],
                   stacks=stacks)  # fmt: skip
    assert ("train.py:60" in {place.line for place in list_places(read_run(run))}) is is_named


@pytest.mark.parametrize(("cores", "severity"), [(2.0, "critical"), (1.0, "info")])
def test_more_ranks_than_cores_wait_for_each_others_turn(cores: float, severity: str, tmp_path: Path) -> None:
    host = {"cpu_limit_cores": cores, "process_cpu": cores}
    findings = run_rules(read_run(make_run(tmp_path / "run", **ON_TWO, host=lambda _: host)))
    (finding,) = [finding for finding in findings if finding.id == "communication_bound"]
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "first"),
    [
        (0, 12, "straggler"),
        (0, 1, "communication_bound"),
        (12, 12, "communication_bound"),
        (11, 15, "communication_bound"),
    ],
)
def test_the_slow_rank_is_found_where_the_wait_is_hidden(rank_0: int, rank_1: int, first: str, tmp_path: Path) -> None:
    """Samples of 40 in a line of the rank's own; gloo waits inside of the backward pass. A line that takes little, or
    as much of every rank, or more of one by chance, is no slow rank."""
    run = make_run(tmp_path / "run", **ON_TWO)
    for name, samples in ((".", rank_0), ("ranks/0001", rank_1)):
        own_line = Place(line="train.py:48", function="step", call="sum", kind="idle", samples=samples)
        rest = Place(line="train.py:53", function="step", call="loss.backward", kind="compute", samples=40 - samples)
        places = [place for place in (own_line, rest) if place.samples]
        with (run / name / "stacks.jsonl").open("ab") as file:
            for n in range(1, 5):
                line = {"attempt": 1, "pid": 7 + len(name), "wall_s": 10.0, "frames": {}} | window(n, *places)
                file.write(msgspec.json.encode(line) + b"\n")
    findings = run_rules(read_run(run))
    assert findings[0].id == first
    if first == "straggler":
        assert findings[0].place == "train.py:48"
        assert "Rank 1 is slower" in findings[0].title
        assert "at this line" in findings[0].fix
        assert "throttled" not in findings[0].fix
        assert findings[0].lost_device_s == pytest.approx(2 * 40 * 12 / 40, rel=0.02), (
            "of both ranks: none computes meanwhile"
        )


def test_statements_of_the_slow_rank_one_after_the_other_count_together(tmp_path: Path) -> None:
    """Recorded of a loop whose rank 0 writes histograms of weights and of gradients, in two lines."""
    run = make_run(tmp_path / "run", **ON_TWO)
    for rank, name in enumerate((".", "ranks/0001")):
        fields = {"function": "train", "call": "writer.add_histogram", "kind": "python"}
        histograms = [
            Place(line=f"train.py:{line}", samples=samples, **fields) for line, samples in ((125, 9), (126, 7))
        ]
        step = Place(
            line="train.py:53", function="train", call="loss.backward", kind="compute", samples=40 - 16 * (not rank)
        )
        with (run / name / "stacks.jsonl").open("ab") as file:
            for n in range(1, 5):
                places = (step,) if rank else (step, *histograms)
                line = {"attempt": 1, "pid": 7 + rank, "wall_s": 10.0, "frames": {}} | window(n, *places)
                file.write(msgspec.json.encode(line) + b"\n")
    first = run_rules(read_run(run))[0]
    assert (first.id, first.place) == ("straggler", "train.py:125")
    assert first.lost_device_s == pytest.approx(2 * 40 * 16 / 40, rel=0.05)


def test_the_fix_of_a_slow_rank_that_the_clocks_show_is_about_its_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fractions={"comm": 0.4}, ranks=[{"comm": 0.02}], seconds=45)
    assert "throttled" in next(finding.fix for finding in run_rules(read_run(run)) if finding.id == "straggler")
    for rank, samples in ((0, 0), (1, 16)):
        sleep = Place(line="ddp.py:9", function="step", call="time.sleep", kind="idle", samples=samples)
        rest = Place(line="ddp.py:12", function="step", call="loss.backward", kind="compute", samples=40 - samples)
        places = [place for place in (sleep, rest) if place.samples]
        file = run / (f"ranks/{rank:04d}/stacks.jsonl" if rank else "stacks.jsonl")
        lines = [{"attempt": 1, "pid": 7 + rank, "frames": {}} | window(n, *places, wall_s=10.0) for n in range(1, 5)]
        file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    finding = next(finding for finding in run_rules(read_run(run)) if finding.id == "straggler")
    assert (finding.place, "throttled" in finding.fix, "at this line" in finding.fix) == ("ddp.py:9", False, True)
    assert "time.sleep" in finding.title


def test_ranks_on_cpus_that_exchange_too_much_are_not_told_to_take_gpus(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fractions={"comm": 0.4}, ranks=[{"comm": 0.4}], seconds=45)
    finding = next(finding for finding in run_rules(read_run(run)) if finding.id == "communication_bound")
    assert "fewer ranks" in finding.fix
    assert "NVLink" not in finding.fix


@pytest.mark.parametrize(("num_ranks", "own", "is_slow"), [(4, 4, True), (2, 4, False), (2, 5, True)])
def test_few_samples_name_a_slow_rank_if_chance_would_not(
    num_ranks: int, own: int, is_slow: bool, tmp_path: Path
) -> None:
    """All samples in a line are of one rank: by chance 1 of 256 with four ranks, 1 of 16 and of 32 with two."""
    run = make_run(tmp_path / "run", **(ON_TWO | {"ranks": [{"compute": 0.6, "comm": 0.4}] * (num_ranks - 1)}))
    for rank in range(num_ranks):
        samples = own if rank == 1 else 0
        own_line = Place(line="train.py:48", function="step", call="sum", kind="idle", samples=samples)
        rest = Place(line="train.py:53", function="step", call="loss.backward", kind="compute", samples=12 - samples)
        places = [place for place in (own_line, rest) if place.samples]
        line = {"attempt": 1, "pid": 7 + rank, "frames": {}} | window(4, *places, samples=12, wall_s=35.0)
        name = f"ranks/{rank:04d}/stacks.jsonl" if rank else "stacks.jsonl"
        (run / name).write_bytes(msgspec.json.encode(line) + b"\n")
    assert (run_rules(read_run(run))[0].id == "straggler") is is_slow


DECODE = {"kind": "decode", "function": "__call__"}


@pytest.mark.parametrize(
    ("place", "count", "is_named"),
    [
        (Place(line="augment.py:7", call="min", samples=0, **DECODE), 24, True),
        (Place(line="augment.py:7", call="min", samples=0, **DECODE), 1, False),
        (Place(line="data.py:9", call="cv2.imread", samples=0, **DECODE), 24, False),
        (Place(line="train.py:8", function="main", call="gc.collect", kind="gc", samples=0), 24, True),
        (Place(line="train.py:8", function="main", call="gc.collect", kind="gc", samples=0), 1, False),
        (Place(line="train.py:8", function="main", call="model.fit", leaf="quick_execute (eager/execute.py)",
               kind="other", samples=0), 36, False),
    ],
)  # fmt: skip
def test_own_code_in_the_transforms_is_a_place_and_a_decoder_is_none(
    place: Place, count: int, is_named: bool, tmp_path: Path
) -> None:
    """Also garbage collection, unless it is cheap; not the function of TensorFlow that runs a step."""
    places = [
        msgspec.structs.replace(place, samples=count),
        Place(line="train.py:3", kind="compute", samples=40 - count),
    ]
    fractions = {"input_wait": 0.6, "compute": 0.4} if place.kind == "decode" else {"host": 0.6, "compute": 0.4}
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, fractions=fractions,
                   stacks=[window(n, *places) for n in range(1, 5)])  # fmt: skip
    named = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place" and finding.place]
    assert [finding.place for finding in named] == [place.line] * is_named
    if place.kind == "gc" and is_named:
        assert named[0].lost_device_s == pytest.approx(0.6 * 45, rel=0.15), "of the clock between steps"


@pytest.mark.parametrize(("waited", "is_found"), [(0.5, True), (0.02, False)])
def test_a_function_of_another_thread_is_named_while_the_training_waits(
    waited: float, is_found: bool, tmp_path: Path
) -> None:
    """As one that tf.py_function calls: its loop has no call, and its lines are one place; the lost time is at most
    the wait."""
    parts = ((9, "python", 14, ""), (8, "sync", 6, "pixels.tolist"), (7, "python", 5, "min"))
    lines = [Place(line=f"data.py:{n}", function="denoise", kind=kind, samples=k, call=call)
             for n, kind, k, call in parts]  # fmt: skip
    works = [window(n, *lines, Place(kind="other", samples=15), role="thread") for n in (2, 3, 4)]
    trains = [window(n, Place(line="train.py:5", function="main", kind="compute", samples=40)) for n in (1, 2, 3, 4)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45,
                   fractions={"input_wait": waited, "compute": 1 - waited}, stacks=trains + works)  # fmt: skip
    named = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place" and finding.place]
    assert [(finding.place, finding.title.partition(" s in ")[2]) for finding in named] == [
        ("data.py:9", "denoise at data.py:9")
    ] * is_found
    for finding in named:
        assert 0.35 * 45 < (finding.lost_device_s or 0.0) <= waited * 45


def test_what_a_worker_does_ranks_by_the_wait_for_it(tmp_path: Path) -> None:
    """A checkpoint of five seconds costs more than ten of a worker for which nobody waits."""
    saves = Place(line="train.py:9", function="main", call="torch.save", kind="checkpoint", samples=5)
    loads = Place(line="data.py:7", function="load", call="image.astype", kind="decode", samples=10)
    stacks = [window(n, saves, Place(kind="compute", samples=35)) for n in (1, 2)]
    stacks += [window(n, loads, Place(kind="idle", samples=30), role="worker", pid=8) for n in (1, 2)]
    shown = []
    for input_wait in (0.01, 0.8):
        fractions = {"input_wait": input_wait, "checkpoint": 0.1, "compute": 0.9 - input_wait}
        run = make_run(tmp_path / str(input_wait), external=True, config=None, fractions=fractions, stacks=stacks)
        shown.append([place.line for place in list_places(read_run(run))])
    assert shown == [["train.py:9", "data.py:7"], ["data.py:7", "train.py:9"]]


@pytest.mark.parametrize(
    ("call", "ids"),
    [
        ("shutil.make_archive", ["heavy_place"]),
        ("torch.jit.trace", ["heavy_place"]),
        ("pycocotools.cocoeval.evaluate", ["evaluation_heavy"]),
    ],
)
def test_what_follows_an_evaluation_is_none(call: str, ids: list[str], tmp_path: Path) -> None:
    """The clock of evaluations goes up to the next step of training."""
    place = Place(line="train.py:180", function="fit_epoch", call=call, kind="python", samples=16)
    step = Place(line="train.py:9", function="train", kind="compute", samples=24)
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, fractions={"eval": 0.4, "compute": 0.6},
                   stacks=[window(n, place, step) for n in range(1, 5)])  # fmt: skip
    assert [finding.id for finding in run_rules(read_run(run))] == ids


def test_python_between_steps_names_its_lines(tmp_path: Path) -> None:
    """Several lines of which none is most of it, and an import that is none of them."""
    lines = [Place(line=f"train.py:{n}", function="main", call=call, kind="python", samples=3)
             for n, call in ((242, "pyplot.subplots"), (244, "axis.imshow"), (245, "figure.savefig"))]  # fmt: skip
    lines.append(Place(line="train.py:1", function="main", call="import torch", kind="python", samples=6))
    step = Place(line="train.py:3", function="main", kind="compute", samples=25)
    stacks = [window(n, *lines, step) for n in range(1, 5)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, stacks=stacks,
                   fractions={"host": 0.3, "compute": 0.7}, host=lambda _: {"process_cpu": 1.0})  # fmt: skip
    (found,) = [finding for finding in run_rules(read_run(run)) if finding.id == "python_bound"]
    assert "3.0 s in figure.savefig, called at train.py:245" in found.evidence_text
    assert "import torch" not in found.evidence_text


@pytest.mark.parametrize(
    ("of_caller", "title"),
    [(5, "10 s in iou at targets.py:18, of 15 s in what train.py:68 calls"), (0, "10 s in iou at targets.py:18")],
)
def test_a_function_that_a_loop_calls_is_told_with_the_whole_of_the_loop(
    of_caller: int, title: str, tmp_path: Path
) -> None:
    """A match of anchors in Python: its own lines, and those of the function that it calls for each pair."""
    lines = [Place(line=f"targets.py:{n}", function="iou", kind="python", samples=samples,
                   callers="targets.py:36 < train.py:68") for n, samples in ((18, 6), (20, 4))]  # fmt: skip
    lines.append(Place(line="targets.py:37", function="match", call="max", kind="python", samples=of_caller,
                       callers="train.py:68"))  # fmt: skip
    step = Place(line="train.py:80", function="main", kind="compute", samples=30 - of_caller)
    stacks = [window(n, *filter(lambda place: place.samples, lines), step) for n in range(1, 5)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, stacks=stacks,
                   fractions={"host": 0.4, "compute": 0.6}, host=lambda _: {"process_cpu": 1.0})  # fmt: skip
    (found,) = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place"]
    assert found.title == title
    assert found.place == "targets.py:18"


@pytest.mark.parametrize(("cores", "is_found"), [(1.9, False), (0.6, True)])
def test_waits_that_the_threads_of_the_process_explain_are_the_computing(
    cores: float, is_found: bool, tmp_path: Path
) -> None:
    """As of JAX on a CPU, whose compiled functions and values are waited for in C; not of a process that is idle."""
    places = [Place(line="mnist.py:90", call="next", kind="idle", samples=14),
              Place(line="mnist.py:98", call="jax._src.array.__format__", kind="sync", samples=10),
              Place(line="mnist.py:45", call="apply_fun", kind="compute", samples=16)]  # fmt: skip
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, fractions={"unattributed": 1.0},
                   num_images=0, host=lambda _: {"process_cpu": cores},
                   stacks=[window(n, *places) for n in range(1, 5)])  # fmt: skip
    assert ("host_device_syncs" in {finding.id for finding in run_rules(read_run(run))}) is is_found


def test_the_line_of_the_loop_is_no_place(tmp_path: Path) -> None:
    """`model.fit`: most samples of it run steps, in TensorFlow as a whole."""
    fit = {"line": "train.py:214", "function": "main", "call": "model.fit"}
    places = [
        Place(**fit, kind="other", leaf="quick_execute (eager/execute.py)", samples=20),
        Place(**fit, kind="python", leaf="fit (engine/training.py)", samples=10),
        Place(line="train.py:52", function="saved", call="figure.savefig", kind="python", samples=10),
    ]
    run = make_run(tmp_path / "run", external=True, config=None, stacks=[window(n, *places) for n in (1, 2)])
    assert [place.call for place in list_places(read_run(run))] == ["figure.savefig"]


def test_python_of_another_thread_is_named_where_the_training_thread_cannot_run(tmp_path: Path) -> None:
    """As a function of tf.py_function, for whose interpreter lock `model.fit` waits."""
    fit = Place(line="train.py:208", function="main", call="model.fit", kind="python", leaf="fit", samples=12)
    step = Place(line="train.py:208", function="main", call="model.fit", kind="other",
                 leaf="quick_execute (eager/execute.py)", samples=28)  # fmt: skip
    works = [window(n, Place(line="data.py:9", function="denoise", kind="python", samples=9),
                    Place(kind="other", samples=31), role="thread") for n in (1, 2, 3, 4)]  # fmt: skip
    stacks = [window(n, fit, step, main_thread={"python": 0.3, "other": 0.7}) for n in (1, 2, 3, 4)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=45, stacks=stacks + works,
                   fractions={"host": 0.3, "compute": 0.7}, host=lambda _: {"process_cpu": 1.0})  # fmt: skip
    (found,) = [finding for finding in run_rules(read_run(run)) if finding.id == "python_bound"]
    assert "denoise at data.py:9, in another thread, which holds the interpreter's lock" in found.evidence_text


@pytest.mark.parametrize(("starts", "seconds", "is_found"), [(1, 0.3, True), (1, 0.02, False), (0, 0.0, False)])
def test_workers_that_are_started_again_by_the_clock(
    starts: int, seconds: float, is_found: bool, tmp_path: Path
) -> None:
    """A loader each second, and so many seconds of it; a first start is none of them."""
    run = make_run(tmp_path / "run", external=True, config=None, fractions={"input_wait": 0.3},
                   window=lambda _: {"worker_starts": starts, "worker_start_s": seconds})  # fmt: skip
    ids = [finding.id for finding in run_rules(read_run(run))]
    assert (ids == ["workers_start_again"]) is is_found, "it explains the wait, if it is most of it"


@pytest.mark.parametrize(("seconds", "is_found"), [(12.0, True), (3.0, False)])
def test_two_starts_of_workers_are_enough_where_they_are_most_of_the_time(
    seconds: float, is_found: bool, tmp_path: Path
) -> None:
    """As of spawned ones that import torch and Lightning."""

    def at(s: int) -> dict[str, float]:
        return {"worker_starts": 1, "worker_start_s": seconds} if s in (20, 35) else {}

    run = make_run(tmp_path / "run", external=True, config=None, fractions={"input_wait": 0.6}, window=at)
    assert ("workers_start_again" in [finding.id for finding in run_rules(read_run(run))]) is is_found


@pytest.mark.parametrize(("seconds", "is_found"), [(10.0, False), (1.0, True)])
def test_a_wait_for_workers_that_start_once_more_is_no_slow_input(
    seconds: float, is_found: bool, tmp_path: Path
) -> None:
    """As after the first epoch of a healthy job, whose spawned workers import torch for some seconds."""
    run = make_run(tmp_path / "run", external=True, config=None, fractions={"input_wait": 0.3},
                   window=lambda s: {"worker_starts": 1, "worker_start_s": seconds} if s == 20 else {})  # fmt: skip
    assert bool([one for one in run_rules(read_run(run)) if one.severity != "info"]) is is_found


def test_a_wait_for_tensorflows_pipeline_is_no_place_and_its_function_is(tmp_path: Path) -> None:
    waits = Place(line="train.py:156", function="main", kind="input_wait", samples=25,
                  call="tensorflow.python.data.ops.iterator_ops.__next__")  # fmt: skip
    decodes = Place(line="data.py:52", function="samples", call="convert", kind="decode", samples=20)
    stacks = [window(n, waits, Place(kind="compute", samples=15)) for n in (1, 2, 3)]
    stacks += [window(n, decodes, Place(kind="other", samples=20), role="thread") for n in (1, 2, 3)]
    run = make_run(tmp_path / "run", external=True, config=None, fractions={"input_wait": 0.6}, stacks=stacks,
                   host=lambda _: {"process_cpu": 1.0})  # fmt: skip
    first = run_rules(read_run(run))[0]
    assert (first.id, first.place) == ("heavy_place", "data.py:52")


def test_a_place_names_who_called_it(tmp_path: Path) -> None:
    place = Place(line="train.py:97", function="tokenize", call="tokenizer", kind="python", samples=30,
                  callers="train.py:120 < train.py:156")  # fmt: skip
    stacks = [window(n, place, Place(kind="compute", samples=10)) for n in (1, 2, 3)]
    run = make_run(tmp_path / "run", external=True, config=None, fractions={"host": 0.7}, stacks=stacks)
    found = next(finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place")
    assert "called from train.py:120 < train.py:156" in found.evidence_text


@pytest.mark.parametrize(
    ("calls", "gap", "title"),
    [
        (["sklearn.metrics.f1_score", "sklearn.metrics.recall_score", "sklearn.metrics.roc_auc_score"], 2,
         "sklearn.metrics, called at train.py:60"),
        (["writer.add_scalar"] * 3, 1, "writer.add_scalar, called at train.py:60"),
        (["sklearn.metrics.f1_score", "sklearn.metrics.recall_score", "sklearn.metrics.roc_auc_score"], 40, ""),
        (["sklearn.metrics.f1_score", "json.dump", "copy.deepcopy"], 1, "train at train.py:60-62"),
    ],
)  # fmt: skip
def test_neighboring_lines_of_a_loop_with_calls_of_one_module_are_one_place(
    calls: list[str], gap: int, title: str, tmp_path: Path
) -> None:
    """Each line alone is too small to be one; lines far away, and calls of other modules, stay apart."""
    samples = (4, 3, 3)
    lines = [Place(line=f"train.py:{60 + n * gap}", function="train", call=call, kind="python", samples=count)
             for n, (call, count) in enumerate(zip(calls, samples, strict=True))]  # fmt: skip
    step = Place(line="train.py:50", function="train", call="model", kind="compute", samples=30)
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60,
                   fractions={"host": 0.25, "compute": 0.75}, stacks=[window(n, step, *lines) for n in range(1, 6)],
                   window=lambda _: {"thread_cpu_s": {"host": 2.5, "compute": 7.5}})  # fmt: skip
    named = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place" and finding.place]
    assert [finding.title.partition(" s in ")[2] for finding in named] == [title] * bool(title)
    for finding in named:
        assert finding.lost_device_s == pytest.approx(0.25 * 60, rel=0.15)


def test_a_function_with_a_little_of_the_step_in_it_is_one_place(tmp_path: Path) -> None:
    """Recorded of a graph network whose forward pass computes eigenvectors with two lines, and makes a tensor of them;
    of a training loop, which has more of the step, only lines one after the other are told together."""

    def found(steps: int) -> list[tuple[str, str, bool]]:
        fields = {"function": "encode", "kind": LOOP_IN_STEP}
        places = [
            Place(line="net.py:204", call="networkx.linalg.normalized_laplacian_matrix", samples=6, **fields),
            Place(line="net.py:205", call="numpy.linalg.eigh", samples=5, **fields),
            Place(line="net.py:207", function="encode", call="torch.from_numpy", kind="compute", samples=steps),
            Place(line="train.py:38", function="train", call="loss.backward", kind="compute", samples=29 - steps),
        ]
        run = make_run(tmp_path / f"run{steps}", external=True, config=None, seconds=60, fractions={"compute": 1.0},
                       stacks=[window(n, *places) for n in range(1, 6)])  # fmt: skip
        named = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place"]
        return [(one.place, f"{one.lost_device_s:.0f}", "encode at net.py:204-205" in one.title) for one in named]

    whole_s = f"{50 * 11 / 40:.0f}"
    assert found(1) == [("net.py:204", whole_s, False)]
    assert found(9) == [("net.py:204", whole_s, True)]


@pytest.mark.parametrize(
    ("lines", "step_line", "seconds", "title"),
    [((126, 127, 131), 110, 15, "train.py:126-131"), ((126, 127, 133), 110, 12, "train.py:126-127"),
     ((126, 127, 131), 129, 12, "train.py:126-127")],
)  # fmt: skip
def test_statements_one_after_the_other_in_a_training_step_are_told_together(
    lines: tuple[int, ...], step_line: int, seconds: int, title: str, tmp_path: Path
) -> None:
    """Recorded of a NeRF in Lightning that draws a figure in its training step, with a line for each axis."""
    calls = (("add_figure", 8), ("hist", 4), ("subplots", 3))
    fields = {"function": "training_step", "kind": "python", "callers": "train.py:173"}
    drawing = [Place(line=f"train.py:{line}", call=call, samples=samples, **fields)
               for line, (call, samples) in zip(lines, calls, strict=True)]  # fmt: skip
    step = Place(line=f"train.py:{step_line}", function="training_step", call="self", kind="compute", samples=25,
                 callers="train.py:173")  # fmt: skip
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"compute": 1.0},
                   stacks=[window(n, *drawing, step) for n in range(1, 5)])  # fmt: skip
    first = run_rules(read_run(run))[0]
    assert (first.id, first.place) == ("heavy_place", "train.py:126")
    assert f"training_step at {title}" in first.title
    assert first.lost_device_s == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(("in_loop", "found"), [(4, [("noise.py:36", "30")]), (20, [])])
def test_a_loop_over_pixels_with_operations_on_tensors_is_a_place_and_one_of_a_network_is_none(
    in_loop: int, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Recorded of salt and pepper noise, pixel by pixel, with `1 - x` of a tensor; a network with a loop over words."""
    places = [
        Place(line="noise.py:36", function="add", kind="python", samples=20 - in_loop // 2),
        Place(line="noise.py:36", function="add", call="torch._tensor.__rsub__", kind=LOOP_IN_STEP, samples=in_loop),
        Place(line="noise.py:33", function="add", call="random.randrange", kind="python", samples=2),
    ]
    step = Place(line="train.py:38", function="train", call="loss.backward", kind="compute",
                 samples=40 - sum(place.samples for place in places))  # fmt: skip
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"compute": 1.0},
                   stacks=[window(n, *places, step) for n in range(1, 6)])  # fmt: skip
    named = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place"]
    assert [(finding.place, f"{finding.lost_device_s:.0f}") for finding in named] == found


@pytest.mark.parametrize(("input_wait", "lost_s"), [(0.5, 0.5), (0.9, 0.75)])
def test_a_place_of_workers_costs_the_wait_for_them_but_no_more_than_its_time(
    input_wait: float, lost_s: float, tmp_path: Path
) -> None:
    """Three quarters of a worker's time: without it, the training would wait only where the rest took too long."""
    warp = Place(line="data.py:34", function="warp", call="scipy.ndimage.map_coordinates", kind="python", samples=30)
    rest = Place(line="data.py:9", function="load", call="PIL.Image.open", kind="decode", samples=10)
    stacks = [window(n, warp, rest, role="worker", pid=8) for n in range(1, 6)]
    stacks += [window(n, Place(kind="input_wait", samples=40)) for n in range(1, 6)]
    fractions = {"input_wait": input_wait, "compute": 1 - input_wait}
    run = read_run(make_run(tmp_path / "run", external=True, config=None, fractions=fractions, stacks=stacks))
    (finding,) = [finding for finding in run_rules(run) if finding.id == "heavy_place"]
    assert finding.lost_device_s == pytest.approx(lost_s * run.steady.device_s, rel=0.02)


def test_why_lists_neighboring_lines_with_calls_of_one_module_as_one(tmp_path: Path) -> None:
    """Recorded of U²-Net, which reads image and mask in two lines."""
    read = {"function": "__getitem__", "call": "skimage.io.imread", "kind": "decode"}
    places = [
        Place(line="data.py:255", samples=8, **read),
        Place(line="data.py:256", samples=4, **read),
        Place(line="data.py:41", function="resize", call="skimage.transform.resize", kind="decode", samples=8),
        Place(line="train.py:38", function="train", call="loss.backward", kind="compute", samples=20),
    ]
    phases = {"input_wait": 0.5, "compute": 0.5}
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions=phases,
                   stacks=[window(n, *places) for n in range(1, 6)])  # fmt: skip
    listed = [(place.line, round(place.seconds)) for place in explain_run(run).places]
    assert listed == [("data.py:255", 15), ("data.py:41", 10)]


def test_why_lists_calls_of_one_class_in_one_line_as_one(tmp_path: Path) -> None:
    """Recorded of PointNet: `next(iter(loader))` starts eight workers and ends them."""
    loader = {"line": "train.py:122", "function": "main", "kind": "input_wait"}
    places = [
        Place(call="torch.utils.data.dataloader.__iter__", samples=6, **loader),
        Place(call="torch.utils.data.dataloader.__del__", samples=5, **loader),
        Place(line="train.py:130", function="main", call="self.encode", kind="python", samples=4),
        Place(line="train.py:130", function="main", call="self.decode", kind="python", samples=3),
        Place(line="train.py:114", function="main", call="loss.backward", kind="compute", samples=22),
    ]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60,
                   stacks=[window(n, *places) for n in range(1, 6)])  # fmt: skip
    listed = [(place.call.rpartition(".")[2], round(place.seconds)) for place in explain_run(run).places]
    assert listed == [("__iter__", 14), ("encode", 5)]


@pytest.mark.parametrize(
    ("line", "samples", "is_named"), [("utils.py:122", 4, True), ("utils.py:122", 1, False), ("train.py:92", 4, False)]
)
def test_evaluations_name_the_places_that_may_be_in_them(
    line: str, samples: int, is_named: bool, tmp_path: Path
) -> None:
    """Recorded of a U-Net that draws the images of each evaluation; not lines of the training loop."""
    drawing = Place(line=line, function=line.partition(".")[0], call="numpy.mean", kind="python", samples=samples)
    step = Place(line="train.py:87", function="train", call="loss.backward", kind="compute", samples=40 - samples)
    run = make_run(tmp_path / "run", external=True, config=None, seconds=200, fractions={"eval": 0.3},
                   stacks=[window(n, drawing, step) for n in range(1, 20)])  # fmt: skip
    found = next(finding for finding in run_rules(read_run(run)) if finding.id == "evaluation_heavy")
    assert ("numpy.mean, called at utils.py:122" in found.evidence_text) == is_named
    assert "train.py" not in found.evidence_text


BATON = Place(line="data.py:82", function="read_sizes", call="baton.wait", kind="idle", samples=40)


@pytest.mark.parametrize(
    ("place", "seconds", "cores", "is_named"),
    [
        (BATON, 100, 0.01, True),
        (BATON, 40, 0.01, False),
        (BATON, 100, 1.2, False),
        (msgspec.structs.replace(BATON, call="urllib.request.urlopen"), 100, 0.01, False),
        (msgspec.structs.replace(BATON, call="subprocess.run"), 100, 0.01, False),
        (msgspec.structs.replace(BATON, kind="python"), 100, 0.01, False),
        (msgspec.structs.replace(BATON, line=""), 100, 0.01, False),
    ],
    ids=[
        "waits",
        "not for long",
        "its children compute",
        "downloads",
        "waits for a program",
        "computes",
        "no own line",
    ],
)
def test_a_hang_before_the_first_step_is_named(
    place: Place, seconds: int, cores: float, is_named: bool, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", external=True, config=None, seconds=0, startup=seconds + 20, losses=None,
                   num_images=0, host=lambda _: {"process_cpu": cores}, end=None,
                   stacks=[window(n, place) | {"t": T0 + 10.0 * n} for n in range(1, seconds // 10 + 1)])  # fmt: skip
    found = [finding for finding in run_rules(read_run(run)) if finding.id == "hung"]
    assert [finding.place for finding in found] == ["data.py:82"] * is_named
    for finding in found:
        assert "the training thread is stuck in baton.wait at data.py:82" in finding.title
        assert finding.lost_device_s == pytest.approx(seconds, abs=1)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_python_of_a_library_between_steps_is_info_and_that_of_own_lines_is_not(share: float, tmp_path: Path) -> None:
    """As metrics that a handler of ignite computes: no line of the job's own shows them."""
    own = Place(line="train.py:9", function="log", call="json.dumps", kind="python", samples=round(40 * share))
    fit = Place(line="train.py:50", function="main", call="trainer.run", kind="compute", samples=32)
    rest = Place(line="train.py:50", function="main", call="trainer.run", kind="python", samples=8 - own.samples)
    stacks = [window(n, *(place for place in (fit, own, rest) if place.samples)) for n in range(1, 7)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"host": 0.2}, stacks=stacks,
                   window=lambda _: {"thread_cpu_s": {"host": 0.2, "compute": 0.8}})  # fmt: skip
    found = {finding.id: finding.severity for finding in run_rules(read_run(run))}
    if share:
        assert "heavy_place" in found
    else:
        assert found.get("python_bound") == "info"


@pytest.mark.parametrize("line", ["train.py", "train.py:", "train.py:x", "train.py:²", "train.py:" + 5000 * "9"])
def test_a_broken_line_number_is_no_error(line: str, tmp_path: Path) -> None:
    step = Place(line="train.py:50", function="train", call="model", kind="compute", samples=20)
    broken = Place(line=line, function="train", call="json.dump", kind="python", samples=20)
    file = line.rpartition(":")[0]
    same_file = Place(line=f"{file}:50", function="train", call="model", kind="compute", samples=20)
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"host": 0.5},
                   stacks=[window(n, step, broken, same_file) for n in range(1, 6)])  # fmt: skip
    run_rules(read_run(run))


def test_the_same_call_in_two_functions_is_one_place(tmp_path: Path) -> None:
    """As `copy.deepcopy` of the data in an evaluation and in a validation; a call of the model's own is none."""
    copies = [
        Place(line=f"utils.py:{line}", function=name, call="copy.deepcopy", kind="python", callers=caller, samples=6)
        for name, line, caller in (("evaluate", 132, "main.py:126"), ("evaluate_valid", 179, "main.py:127"))
    ]
    step = Place(line="main.py:112", function="<module>", call="loss.backward", kind="compute", samples=20)
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"host": 0.4},
                   stacks=[window(n, *copies, step) for n in range(1, 6)])  # fmt: skip
    heavy = next(finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place")
    assert "in copy.deepcopy, called at utils.py:" in heavy.title
    assert heavy.lost_device_s == pytest.approx(40 * 12 / 32), "one window of five is the start"
    assert all(f"called at utils.py:{line}" in str(heavy.evidence) for line in (132, 179))


LEAVES = [("augment.py:403", "expand"), ("augment.py:578", "distort"), ("augment.py:611", "transform"),
          ("augment.py:623", "to_image"), ("data.py:37", "open")]  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "in_steps", "found"),
    [
        ([3, 3, 3, 1, 4], 0, ["what train.py:36 calls"]),
        ([3, 3, 3, 3, 0], 0, ["what data.py:53 calls"]),
        ([14, 1, 0, 0, 0], 0, ["cv2.expand, called at augment.py:403"]),
        ([1, 1, 0, 0, 0], 0, []),
        ([3, 3, 3, 3, 2], 6, []),
    ],
    ids=["of several", "the innermost", "one line is most", "it is cheap", "the step is in it"],
)
def test_what_a_line_calls_is_one_place_where_it_is_in_many_lines(
    samples: list[int], in_steps: int, found: list[str], tmp_path: Path
) -> None:
    """A sampler that loads all images before each epoch: transforms in many lines, decoders among them."""
    above = "train.py:36 < train.py:97 < train.py:175"
    callers = [f"data.py:53 < {above}"] * 4 + [above]
    places = [
        Place(line=line, function=function, call=f"cv2.{function}", kind=kind, callers=chain, samples=count)
        for (line, function), chain, kind, count in zip(
            LEAVES, callers, ("python", "decode", "python", "decode", "python"), samples, strict=True
        )
        if count
    ]
    steps = {"line": "train.py:149", "function": "train", "call": "loss.backward", "callers": "train.py:175"}
    places.append(Place(kind="compute", samples=40 - sum(samples) - in_steps, **steps))
    if in_steps:
        called = {"line": "model.py:9", "function": "forward", "callers": f"model.py:3 < data.py:53 < {above}"}
        places.append(Place(kind="compute", samples=in_steps, **called))
    stacks = [window(n, *places) for n in range(1, 5)]
    run = make_run(tmp_path / "run", seconds=45, fractions={"host": 0.3}, stacks=stacks)
    heavy = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place"]
    assert [finding.title.partition(" s in ")[2] for finding in heavy] == found
    if found and found[0].startswith("what"):
        assert heavy[0].place == found[0].split()[1]
        shown = explain_run(run).places[0]
        assert shown.text().partition(") ")[2].removesuffix(", throughout") == found[0]


@pytest.mark.parametrize(
    ("frameworks", "in_python", "steps", "is_found"),
    [
        ("compilations of jax 0.10.2", 6, 20, True),
        ("compilations of jax 0.10.2", 1, 20, False),
        ("compilations of jax 0.10.2", 6, 4, False),
        ("torch 2.15.0", 6, 20, False),
    ],
    ids=["samples are drawn", "a compiled function", "it computes most: the steps", "the clock's framework"],
)
def test_what_draws_samples_in_jax_is_one_place_with_what_it_computes(
    frameworks: str, in_python: int, steps: int, is_found: bool, tmp_path: Path
) -> None:
    """Single operations and compiled functions in turn, which no clock tells from the steps."""
    step = Place(line="train.py:122", function="<module>", call="jax._src.api.block_until_ready", kind="sync",
                 samples=steps)  # fmt: skip
    drawn = {"function": "complete", "callers": "train.py:131"}
    parts = [
        Place(line="utils.py:49", call="model.apply", kind="compute", samples=7, **drawn),
        Place(line="utils.py:49", call="model.apply", kind="compile", samples=3, **drawn),
        *(Place(line=f"utils.py:{line}", call="jax.numpy.where", kind="python", samples=in_python // 3 + (line == 50),
                **drawn) for line in (50, 55, 62)),
    ]  # fmt: skip
    stacks = [window(n, step, *(part for part in parts if part.samples)) for n in range(1, 6)]
    coverage = {"coverage": {"inside the job": f"recorded: {frameworks} in a process"}}
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"unattributed": 1.0},
                   events=[("info", "", coverage)], stacks=stacks, steps=0)  # fmt: skip
    records = read_run(run)
    named = [f for f in run_rules(records) if f.title.endswith(" s in what train.py:131 calls")]
    assert [finding.id for finding in named] == ["heavy_place"] * is_found
    for finding in named:
        assert finding.lost_device_s == pytest.approx(17 / 37 * records.steady.wall_s, rel=0.02)


@pytest.mark.parametrize(
    ("function", "samples", "is_found"),
    [("evaluate", 12, True), ("evaluate", 6, False), ("run_validation", 12, True), ("train_and_evaluate", 12, False)],
)
def test_an_evaluation_in_jax_is_known_by_its_name(function: str, samples: int, is_found: bool, tmp_path: Path) -> None:
    """Compiled functions only, as in the steps; one after each epoch is a small part of the time."""
    reads = "jax._src.array.__float__"
    step = Place(line="train.py:45", function="main", call=reads, callers="train.py:54", kind="sync",
                 samples=40 - samples)  # fmt: skip
    evaluation = Place(line="train.py:31", function=function, call=reads, kind="sync",
                       callers="train.py:48 < train.py:54", samples=samples)  # fmt: skip
    coverage = {"coverage": {"inside the job": "recorded: compilations of jax 0.10.2 in a process"}}
    stacks = [window(n, step, evaluation) for n in range(1, 6)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"unattributed": 1.0},
                   events=[("info", "", coverage)], stacks=stacks)  # fmt: skip
    titles = [finding.title for finding in run_rules(read_run(run)) if finding.severity != "info"]
    assert any(title.endswith("called at train.py:31") for title in titles) is is_found, titles


@pytest.mark.parametrize(("own", "is_one"), [(4, True), (1, False)], ids=["much besides", "it only writes"])
def test_a_function_that_writes_and_does_more_is_one_place(own: int, is_one: bool, tmp_path: Path) -> None:
    """Recorded of a diffusion model whose function for checkpoints writes them through to the disk, and reads them
    again for a checksum: the framework's writing is a half of it."""
    fields = {"function": "save_checkpoint", "callers": "train.py:219 < train.py:232"}
    writes = Place(line="train.py:280", call="torch.save", kind="checkpoint", samples=8, **fields)
    besides = [Place(line=f"train.py:{line}", call=call, kind="python", samples=own, **fields)
               for line, call in ((281, "os.fsync"), (283, "f.read"))]  # fmt: skip
    step = Place(line="train.py:155", function="step", call="backward", kind="compute", samples=32 - 2 * own)
    fractions = {"checkpoint": 0.2, "host": own / 20, "compute": 0.8 - own / 20}
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions=fractions,
                   stacks=[window(n, writes, *besides, step) for n in range(1, 6)])  # fmt: skip
    named = [finding for finding in run_rules(read_run(run)) if "save_checkpoint at" in finding.title]
    assert [finding.lost_device_s for finding in named] == [pytest.approx(60 * 0.4, rel=0.05)] * is_one


@pytest.mark.parametrize(("call", "is_found"), [("sample", True), ("lr_schedule", False)])
def test_what_is_drawn_in_jax_after_the_step_counts_with_its_compilations(
    call: str, is_found: bool, tmp_path: Path
) -> None:
    """Recorded of a GPT-2 in Flax that draws tokens by a function that is not compiled: its line is after the step of
    the loop, and the compilations of single operations are in the model."""
    step = Place(line="train.py:220", function="main", call="train_step", callers="train.py:260", kind="compute",
                 samples=22)  # fmt: skip
    after = Place(line="train.py:248", function="main", call=call, callers="train.py:260", kind="after step", samples=9)
    operations = [
        Place(line=f"model.py:{line}", function="__call__", call="jax.numpy.where", kind="compile", samples=3,
              callers="train.py:80 < train.py:248 < train.py:260") for line in (52, 117, 151)
    ]  # fmt: skip
    coverage = {"coverage": {"inside the job": "recorded: compilations of jax 0.10.2 in a process"}}
    stacks = [window(n, step, after, *operations) for n in range(1, 6)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"unattributed": 1.0},
                   events=[("info", "", coverage)], stacks=stacks, steps=0)  # fmt: skip
    named = [finding for finding in run_rules(read_run(run)) if finding.place == "train.py:248"]
    assert [finding.lost_device_s for finding in named] == [pytest.approx(60 * 18 / 40, rel=0.05)] * is_found


@pytest.mark.parametrize(
    ("drawn", "title"),
    [
        (7, "draw at train.py:54, of 26 s in what train.py:94 calls"),
        (1, "writer.add_figure, called at train.py:94, of 14 s in what train.py:94 calls"),
    ],
    ids=["drawn and encoded", "mostly encoded"],
)
def test_what_encodes_belongs_to_what_its_line_calls(drawn: int, title: str, tmp_path: Path) -> None:
    """A figure that matplotlib draws and TensorBoard encodes as PNG."""
    figure = {"function": "draw", "kind": "python", "callers": "train.py:94 < train.py:170", "samples": drawn}
    encodes = Place(line="train.py:94", function="train", call="writer.add_figure", kind="decode", samples=12,
                    leaf="_encode_tile (PIL/ImageFile.py)", callers="train.py:170")  # fmt: skip
    parts = [Place(line=f"train.py:{line}", call=call, **figure) for line, call in ((54, "subplots"), (63, "layout"))]
    step = Place(line="train.py:90", function="train", call="loss.backward", kind="compute", callers="train.py:170",
                 samples=28 - 2 * drawn)  # fmt: skip
    stacks = [window(n, encodes, *parts, step) for n in range(1, 5)]
    run = make_run(tmp_path / "run", seconds=45, fractions={"host": 0.5}, stacks=stacks)
    titles = [finding.title for finding in run_rules(read_run(run))]
    assert titles[0].partition(" s in ")[2] == title


@pytest.mark.parametrize(("numbers", "severity"), [((4,), "info"), ((2, 3), "info"), ((1, 3), "warning")])
def test_what_happened_once_in_a_short_run_is_info(numbers: tuple[int, ...], severity: str, tmp_path: Path) -> None:
    ends = Place(line="train.py:109", function="main", call="stop", kind="python", samples=40 // len(numbers))
    first, rest = Place(kind="compute", samples=40 - ends.samples), Place(kind="compute", samples=ends.samples)
    stacks = [window(n, first, ends if n in numbers else rest) for n in range(1, 6)]
    run = make_run(tmp_path / "run", seconds=60, fractions={"host": 0.2}, stacks=stacks)
    (heavy,) = [finding for finding in run_rules(read_run(run)) if finding.id == "heavy_place"]
    assert heavy.severity == severity


@pytest.mark.parametrize(
    ("waits", "phase", "found"),
    [(40, "input_wait", True), (39, "input_wait", False), (40, "eval", False)],
    ids=["all the time", "but for a forward pass", "in an evaluation"],
)
def test_a_loader_worker_that_never_ends_is_a_hang(waits: int, phase: str, found: bool, tmp_path: Path) -> None:
    """An image for which no crop exists: the worker tries for ever, in several functions below one line."""
    above = "crop.py:470 < data.py:53"
    tries = [
        Place(line=f"crop.py:{line}", function="f", kind="python", callers=f"crop.py:376 < {above}", samples=10)
        for line in (351, 353, 369)
    ]
    tries.append(Place(line="crop.py:470", function="crop", call="random.uniform", kind="python", callers="data.py:53",
                       samples=10))  # fmt: skip
    wait = Place(line="train.py:9", function="main", call="torch.utils.data.dataloader.__next__", kind="input_wait",
                 samples=waits)  # fmt: skip
    step = Place(line="train.py:12", function="main", call="model", kind="compute", samples=40 - waits)
    stacks = [window(n, wait, step) for n in range(1, 9)] + [
        window(n, *tries, role="worker", pid=8) for n in range(1, 9)
    ]
    silent = {"window_steps": 0, "phases": {phase: 1.0}}
    run = make_run(
        tmp_path / "run", seconds=85, external=True, config=None, end=None, stacks=stacks,
        window=lambda s: silent if s > 45 else {},
    )  # fmt: skip
    hung = [finding for finding in run_rules(read_run(run)) if finding.id == "hung"]
    assert bool(hung) == found
    if found:
        assert hung[0].title.endswith("a loader worker (process 8) is stuck in what crop.py:470 calls")
        assert hung[0].place == "crop.py:470"


def test_why_keeps_a_wait_beside_what_its_line_calls(tmp_path: Path) -> None:
    above = "train.py:50"
    places = [
        Place(line=f"log.py:{line}", function="log", call="json.dumps", kind="python", callers=above, samples=6)
        for line in (3, 30, 90)
    ]
    wait = Place(
        line=above, function="main", call="torch.utils.data.dataloader.__next__", kind="input_wait", samples=22
    )
    run = make_run(tmp_path / "run", seconds=45, stacks=[window(n, *places, wait) for n in range(1, 5)])
    texts = [place.text() for place in explain_run(run).places]
    assert [text.partition(") ")[2].partition(", throughout")[0] for text in texts] == [
        "torch.utils.data.dataloader.__next__ ← train.py:50", "json.dumps ← log.py:3"
    ]  # fmt: skip


def test_thousands_of_places_are_joined_in_time(tmp_path: Path) -> None:
    """Each of 40 lines a window is another one."""
    stacks = [
        window(n, *(
            Place(line=f"a.py:{40 * n + k}", function=f"f{k}", call="json.dumps", kind="python", samples=1,
                  callers=f"b.py:{k} < c.py:{n} < train.py:9")
            for k in range(40)
        ))
        for n in range(1, 51)
    ]  # fmt: skip
    run = read_run(make_run(tmp_path / "run", seconds=510, stacks=stacks))
    start_s = time.process_time()
    place = divide_time(run)[0].place
    assert place is not None
    assert (place.line, place.function) == ("train.py:9", "")
    assert time.process_time() - start_s < 2


@pytest.mark.parametrize(("samples", "is_heavy"), [(16, True), (2, False)])
def test_checkpoints_that_no_clock_has_timed_are_found_by_their_place(
    samples: int, is_heavy: bool, tmp_path: Path
) -> None:
    """As in a job of JAX, whose loop has no hook."""
    saved = {"line": "train.py:98", "function": "save", "call": "flax.training.checkpoints.save_checkpoint"}
    saves = Place(kind="checkpoint", samples=samples, **saved)
    step = Place(line="train.py:50", function="train", call="p_step", kind="compute", samples=40 - samples)
    stacks = [window(n, saves, step) for n in range(1, 7)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=60, fractions={"unattributed": 1.0},
                   stacks=stacks)  # fmt: skip
    heavy = [finding for finding in run_rules(read_run(run)) if finding.id == "checkpoint_heavy"]
    assert bool(heavy) == is_heavy
    if heavy:
        assert "save_checkpoint, called at train.py:98" in str(heavy[0].evidence)
        assert heavy[0].lost_device_s == pytest.approx(60 * samples / 40, rel=0.1)


@pytest.mark.parametrize("has_steps", [False, True])
def test_a_job_without_a_step_shows_where_it_was(has_steps: bool, tmp_path: Path) -> None:
    """As one that prepares data, or trains without a known framework."""
    places = [Place(line="prepare.py:9", function="main", call="hashlib.sha256", kind="python", samples=15),
              Place(line="prepare.py:9", function="main", call="hashlib.sha256", kind="compute", samples=3),
              Place(line="prepare.py:4", function="read", kind="other", samples=2)]  # fmt: skip
    stacks = [{"t": T0 + 10 * n, "samples": 20, "main_thread": {"python": 1.0}, "places": places} for n in (1, 2, 3)]
    run = make_run(tmp_path / "run", external=True, config=None, seconds=30, steps=8 * has_steps, losses=None,
                   window=lambda _: {"step": 8 * has_steps, "phases": {"unattributed": 1.0}},
                   stacks=stacks)  # fmt: skip
    explanation = explain_run(run)
    shown = [place.text() for place in explanation.places]
    if not has_steps:
        assert shown == ["27 s (±2) hashlib.sha256 ← prepare.py:9", "3 s (±2) read prepare.py:4"]
    output = io.StringIO()
    print_explanation(explanation, output, width=120)
    assert ("no step of a training was seen" in output.getvalue()) is not has_steps


def test_an_interval_of_nothing_is_everything() -> None:
    assert wilson(0.5, 0) == (0.0, 1.0)
    assert wilson(-3.0, 10)[0] == 0.0
    assert wilson(3.0, 10)[1] == 1.0


def test_a_wait_for_a_thread_costs_where_the_thread_is(tmp_path: Path) -> None:
    """A future whose thread blocks in a program; and the same thread while the training waits for nothing."""
    waits = Place(line="train.py:9", function="train", call="POOL.submit(keep).result", kind="idle", samples=20)
    steps = Place(line="train.py:12", function="train", call="model", kind="compute", samples=20)
    blocked = Place(line="train.py:3", function="keep", call="subprocess.run", kind="idle", samples=20)
    idle = Place(kind="other", samples=20)
    for name, places, is_found in (("waits", (waits, steps), True), ("goes_on", (steps, steps), False)):
        stacks = []
        for number in range(1, 5):
            stacks += [window(number, *places), window(number, blocked, idle, role="thread")]
        job = {"external": True, "config": None, "fractions": {"host": 0.5} if is_found else {}, "stacks": stacks}
        run = read_run(make_run(tmp_path / name, seconds=45, **job))
        found = [finding for finding in run_rules(run) if finding.place == "train.py:3"]
        assert bool(found) is is_found
        if is_found:
            assert found[0].lost_device_s == pytest.approx(0.5 * 45, rel=0.1)
            assert "the training thread waits for it in POOL.submit(keep).result, called at train.py:9" in (
                found[0].evidence_text
            )
            assert all(finding.place != "train.py:9" for finding in run_rules(run))


@pytest.mark.parametrize(("demanded", "part"), [(3.0, 1 / 3), (2.2, 0.2 / 2.2), (2.0, 0.0)])
def test_workers_cost_what_they_take_of_the_cores_of_steps(tmp_path: Path, demanded: float, part: float) -> None:
    """Two cores; the training process uses 1.2 of them, its workers 0.8. What all demand beyond two cores is missing in
    steps, as far as it is the demand of the workers, which have 40 % of each."""
    steps = Place(line="train.py:12", function="train", call="model", kind="compute", samples=40)
    parse = Place(line="data.py:7", function="annotate", call="json.load", kind="python", samples=40)
    stacks = [line for n in range(1, 5) for line in (window(n, steps), window(n, parse, role="worker", pid=8))]
    host = {"cpu_core_utilization": [1.0, 1.0], "process_cpu": 2.0, "threads_running": demanded}
    job = {
        "external": True, "config": None, "stacks": stacks, "host": lambda _: host,
        "window": lambda _: {"process_cpu_s": 1.2}, "events": [("info", "2 workers", {"workers": 2})],
    }  # fmt: skip
    run = read_run(make_run(tmp_path / "run", seconds=45, **job))
    costs = [cost for cost in run.costs if cost.phase == "cpu_wait"]
    assert sum(cost.seconds for cost in costs) == pytest.approx(part * 45, rel=0.05)
    assert sum(cost.seconds for cost in run.costs) == pytest.approx(45 + STARTUP)
    found = [finding for finding in run_rules(run) if finding.place == "data.py:7"]
    assert bool(found) is (part > 0.1)
    if found:
        assert f"their threads demanded {demanded:.2f} and got 2.00" in found[0].evidence_text
