"""Every reader of files, on mutations of valid ones: a StokerError or a result, in bounded memory and time.

The default suite takes a few mutations of each; `make test-slow` takes about two minutes.
"""

import gzip
import json
import os
import re
import shutil
import struct
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from stoker.config.settings import from_toml
from stoker.data.convert import TARGET_FORMATS, convert
from stoker.data.formats.tfrecord_bytes import write_record
from stoker.data.index import open_index
from stoker.data.validation.check import check_dataset
from stoker.inference.runtime import RUNTIMES
from stoker.launching.jobs import read_jobs
from stoker.migration.pipeline import import_pipeline
from stoker.models import build
from stoker.models.weights.model_file import ModelMetadata, load_model
from stoker.preflight.static import check_sources
from stoker.search.page import render_study, study_json
from stoker.search.study import JOURNAL, STUDY, Study, create
from stoker.search.worker import work
from stoker.training.checkpoint import read_rollbacks
from stoker.training.state import BatchSizes, read_sizes
from stoker_watch.diagnosis import reader
from stoker_watch.errors import StokerError
from stoker_watch.recording.hook.stoker_hook import clock
from stoker_watch.report.run_report import collect
from stoker_watch.report.runs_summary import summarize_runs
from stoker_watch.runs import records, schemas
from stoker_watch.runs.evaluation import read_evaluation
from stoker_watch.watch.hook_reader import HookReader
from tests.bounded import bounded
from tests.drawn import draw, run_stoker
from tests.fixtures import exported_files
from tests.fixtures.data_same_index import DAMAGED as EXPORTS
from tests.fixtures.data_same_index import DRAWN, WRITE
from tests.fixtures.training_checkpoint import newest, save
from tests.trainer.data.tfrecords import unframe
from tests.trainer.models.samples import settings_of
from tests.trainer.search.fake_worker import objective
from tests.trainer.search.test_search import make_spec
from tests.watch.report.runs import write_run

RECORDS = {
    records.EVENTS: schemas.Event,
    records.STEPS: schemas.StepWindow,
    records.DEVICES: schemas.DeviceSample,
    records.QUARANTINE: schemas.Quarantined,
}
FEW, MANY = 12, 130
"""Mutations per reader."""
NUMBERS = (
    b"-1",
    b"0",
    b"1e999",
    b"1e-999",
    b"9" * 25,
    b"-" + b"9" * 5000,
    b"0.5",
    b"NaN",
    b"2147483648",
    b"1" + b"0" * 18,
)
TOKENS = (
    *NUMBERS, b'"', b"'", b"{", b"}", b"[", b"]", b"<", b">", b"&x;", b"\0", b"\xff\xfe", b"\n", b",", b":", b"=",
    b"null", b"true", b'""', b"[]", b"{}", b"/dev/zero", b"../../..", b"[" * 3000, b'{"a":' * 3000, b"<a>" * 3000,
    b"item {" * 3000, b"- " * 3000, b"a" * 5000, b"\xf0\x9f\x98\x80", b"\\ud800", b"{a: &b [*b]}",
)  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.sampled_from(("flip", "insert", "cut", "truncate", "copy", "number", "value")),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 64),
        st.sampled_from(TOKENS),
    ),
    min_size=1,
    max_size=4,
)


METRICS = dict.fromkeys(("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"), 0.5)
METRICS |= dict.fromkeys(("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"), 0.5)
COUNTS = {
    "per_class": [{"name": "a", "ap": 0.5, "ap50": 0.5, "boxes": 9}],
    "num_images": 9,
    "boxes": 9,
    "detections": 9,
}
EVENTS = [
    ("started", {"output_offset": 5, "output_head": 7, "coverage": {"inside the job": "recorded: torch"}, "ranks": 2,
                 "job": {"pid": 4_000_000, "start_ticks": 9, "boot": "x"}, "price_per_device_hour": 2.5}),
    ("resumed", {"settings": {"workers": 4}, "measured": "train", "ranks": 2, "output_offset": 9}),
    ("info", {"facts": {"num_images": 9, "boxes": 200, "pretrained": ["coco"], "median_pixels": 3e6, "workers": 3,
                        "anchor_coverage": 0.2, "anchor_sizes": [32.0, 64.0], "recompiled": "f",
                        "predicted_step_s": 0.1, "predicted_step_error": 0.2,
                        "growth": [{"text": "a", "name": "b", "place": "c", "bytes": 1e9, "graph": True, "grown": 1e9}],
                        "mistakes": [{"kind": "anomaly", "place": "a.py:3", "line": "x", "step": 3}]}}),
    ("info", {"workers": 3, "kernels": {"convs": True, "loss": False}}),
    ("warning", {"not_finite": "total", "empty_inputs": ["a"], "storage": True, "alert_delivery": True}),
    ("evaluated", {"metrics": METRICS | COUNTS | {"per_class": []}}),
    ("checkpoint_saved", {"write_s": 0.5}),
    ("rolled_back", {"rollback_step": 10, "count": 1, "best_ap": 0.1, "lr": 0.01}),
    ("loss_spike", {"suggested_lr": 0.01}),
    ("out_of_memory", {"micro_batch_size": 2, "eval_batch_size": 2}),
    ("gpu_fault", {"gpu": 0, "xid": 79}),
    ("failed", {"exit_code": -9, "traceback": ["E"], "kernel": ["oom"], "pids": [7], "oom_kills": 1,
                "empty_inputs": ["a"], "handled_error": ["E"]}),
]  # fmt: skip
"""An event of each kind whose data something reads."""


def mutate(data: bytes, edits: list[tuple[str, float, int, bytes]]) -> bytes:
    """Edits bytes, and numbers and values where the file has any."""
    for kind, position, length, token in edits:
        start = int(position * len(data))
        if kind in ("number", "value"):
            pattern = rb"-?\d+(?:\.\d+)?" if kind == "number" else rb'"[^"\n]*"|-?\d+(?:\.\d+)?|\[[^\[\]]*\]|\{[^{}]*\}'
            matches = list(re.finditer(pattern, data))
            if matches:
                match = matches[int(position * len(matches))]
                data = data[: match.start()] + token + data[match.end() :]
        elif kind == "flip":
            data = data[:start] + bytes(byte ^ 1 << length % 8 for byte in data[start : start + 1]) + data[start + 1 :]
        elif kind == "insert":
            data = data[:start] + token + data[start:]
        elif kind == "cut":
            data = data[:start] + data[start + length :]
        elif kind == "truncate":
            data = data[:start]
        else:
            data = data[:start] + data[start : start + 8 * length] * 2 + data[start:]
    return data


DOCKERFILE = """# syntax=docker/dockerfile:1
ARG CUDA=12.4.1
FROM nvidia/cuda:${CUDA}-runtime-ubuntu22.04 AS base
ENV A=1 B="$A x" C=${A:-2}
RUN --mount=type=cache,target=/root/.cache apt-get update && \\
    pip install torch==2.4.0 'torchvision<0.20' -f https://x/y
COPY <<EOF /x
hello $A
EOF
FROM base
CMD ["python", "train.py"]
"""
PIPELINE = """model { ssd { num_classes: 3 feature_extractor { type: 'ssd_mobilenet_v2_keras' }
  image_resizer { fixed_shape_resizer { height: 300 width: 300 } } } }
train_config { batch_size: 8 num_steps: 100 optimizer { momentum_optimizer { learning_rate {
  cosine_decay_learning_rate { learning_rate_base: 0.04 total_steps: 100 warmup_steps: 10 } } } } }
train_input_reader { label_map_path: 'l' tf_record_input_reader { input_path: 't' } }
"""


class Reader(NamedTuple):
    file: Path
    """The file that is mutated."""
    read: Callable[[], Any]
    write: Callable[[Path, bytes], Any] = Path.write_bytes


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Reader]]:
    """Name → valid files, and what reads them."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CACHE_DIR", str(folder / "cache"))
        index = open_index(draw(folder / "coco", train=3, val=2))
        for name in set(TARGET_FORMATS) - {"coco"}:
            convert(index, folder / name, name)
    (folder / "csv").mkdir()
    (folder / "csv" / "train.csv").write_text(
        "filename,width,height,class,xmin,ymin,xmax,ymax\n"
        + "".join(f"{n}.jpg,64,48,cat,1,2,30,40\n" for n in range(4))
    )
    for name in EXPORTS:
        (folder / name).mkdir()
        WRITE[name](folder / name, DRAWN)
    shutil.copytree(folder / "tfrecord", folder / "gzip")
    shard = next((folder / "gzip").glob("*train*"))
    shard.with_name(f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    shard.unlink()

    def dataset(name: str, pattern: str, write: Callable[[Path, bytes], Any] = Path.write_bytes) -> list[Reader]:
        def read() -> None:
            check_dataset(folder / name, decode_images=False)
            open_index(folder / name, allow_outside=True)

        return [Reader(path, read, write) for path in sorted((folder / name).glob(pattern))[:2]]

    run = folder / "run"
    shutil.copytree(Path(__file__).parent / "watch/runs/run_of_0_2_0", run)
    bad = schemas.Quarantined(
        t=1.5e9, attempt=1, image_index=17, path="a.jpg", error="cut", sample_position=33, replaced_by=18
    )
    (run / records.QUARANTINE).write_bytes(msgspec.json.encode(bad) + b"\n")

    def read_run() -> None:
        for name, kind in RECORDS.items():
            list(records.read_lines(run, name, kind))
        records.is_finished(run)
        records.last_attempt(run)
        reader.read_run(run)

    told = folder / "told" / "run"
    write_run(told, samples=3, end=None)
    (told / "output.log").write_text("epoch 1\nValueError: no\n")
    lines = [{"t": 1.78e9 + n, "attempt": 1, "kind": kind, "step": n, "text": "it", "data": data}
             for n, (kind, data) in enumerate(EVENTS)]  # fmt: skip
    (told / records.EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def read_events() -> None:
        summary = summarize_runs(told.parent)
        assert not any(re.match(r"\w+(Error|Exception): ", row.error) for row in summary.unreadable)
        read_sizes(told, BatchSizes(8, 8))
        read_rollbacks(told)
        collect(told)

    def read_config() -> None:
        from_toml(run / records.CONFIG)
        reader.read_run(run)

    save(folder / "saved", 1, 2) if (folder / "saved").mkdir() is None else None
    model = {"settings": settings_of("retinanet_tiny_fpn", weights="none"), "class_names": ("a", "b")}
    metadata = ModelMetadata(**model, image_size=(64, 64), resize="letterbox").header()["stoker"]
    tensors = {name: t.contiguous() for name, t in build(model["settings"], 2).state_dict().items()}
    (folder / "header.json").write_text(metadata)
    model_path = folder / "model.safetensors"
    save_file(tensors, model_path, {"stoker": metadata})

    def write_header(path: Path, data: bytes) -> None:
        save_file(
            {"w": next(iter(tensors.values()))},
            path.with_name("card.safetensors"),
            {"stoker": data.decode(errors="replace")},
        )

    def write_model(path: Path, data: bytes) -> None:
        path.write_bytes(data + model_path_bytes[len(head) :])

    model_path_bytes = model_path.read_bytes()
    head = model_path_bytes[: 8 + int.from_bytes(model_path_bytes[:8], "little")]
    (folder / "head.safetensors").write_bytes(head)
    code, output = run_stoker("data", "pack", folder / "coco", folder / "packed", cwd=folder)
    assert code == 0, output
    jobs, states = folder / "launched", folder / "states"
    jobs.mkdir()
    states.mkdir()
    job = {"place": "local", "id": "1@0", "name": "a", "run": str(jobs), "t": 1.7e9, "log": f"{jobs}/launch.log"}
    (jobs / "launch.json").write_text(json.dumps([job]))
    head = {"pid": 4_000_000, "frameworks": ["torch 2"], "python": "3.11", "slots": clock.SLOTS}
    doubles = struct.pack(f"{len(clock.SLOTS) + clock.CPU_OFFSET}d", *range(len(clock.SLOTS) + clock.CPU_OFFSET))
    (states / "1.state").write_bytes(json.dumps(head).encode().ljust(clock.HEADER_BYTES) + doubles)

    def read_states() -> None:
        hook_reader = HookReader(states, devices=1, now_s=0.0)
        hook_reader.poll()
        hook_reader.next_windows(10.0, 10.0)
        hook_reader.status()

    texts = {"stoker": metadata, "iou_threshold": "0.5", "batch_size": "1", "threshold": "0.4"}
    (folder / "metadata.json").write_text(json.dumps(texts))

    def read_exported(path: Path) -> None:
        """Its metadata; the program of a .pt2 file is not loaded, and LiteRT need not be installed."""
        interpreter = types.SimpleNamespace(Interpreter=_NoInterpreter)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ai_edge_litert.interpreter", interpreter)
            RUNTIMES[path.suffix](path, num_threads=1)

    def exported(suffix: str) -> list[Reader]:
        """The metadata in a valid archive, and the archive itself."""
        path = exported_files.write_archive(folder / f"best{suffix}", json.dumps(texts))
        changed = folder / f"changed{suffix}"
        return [
            Reader(path, partial(read_exported, path)),
            Reader(
                folder / "metadata.json",
                partial(read_exported, changed),
                lambda _path, data: exported_files.write_archive(changed, data),
            ),
        ]

    def write_onnx(_path: Path, data: bytes) -> None:
        exported_files.write_onnx(folder / "changed.onnx", texts | {"stoker": data.decode(errors="replace")})

    def write_onnx_number(_path: Path, data: bytes) -> None:
        number = data.decode(errors="replace")
        exported_files.write_onnx(folder / "changed.onnx", texts | {"iou_threshold": number})

    (folder / "number.txt").write_text("0.5")
    read_onnx = partial(read_exported, folder / "changed.onnx")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "pipeline.config").write_text(PIPELINE)
    manifest = folder / "saved/checkpoints/step-00000002/manifest.json"

    def read_checkpoints() -> None:
        try:
            newest(folder / "saved")
        finally:  # where it was set aside
            damaged = manifest.parent.with_name(f"damaged-{manifest.parent.name}")
            if damaged.exists():
                damaged.rename(manifest.parent)

    study = folder / "study"
    create(study, make_spec(trials=6))
    work(study, objective)

    def read_study() -> None:
        study_json(Study(study))
        render_study(Study(study))

    return {
        "study": [Reader(study / name, read_study) for name in (STUDY, JOURNAL)],
        "coco": dataset("coco", "train/*.json"),
        "voc": dataset("voc", "Annotations/*.xml"),
        "yolo labels": dataset("yolo", "labels/train/*.txt"),
        "yolo description": dataset("yolo", "data.yaml"),
        "csv": dataset("csv", "*.csv"),
        **{name: dataset(name, pattern) for name, pattern in EXPORTS.items()},
        "label map": dataset("tfrecord", "*.pbtxt"),
        "tfrecord": dataset("tfrecord", "*train*"),
        "tfrecord payload": dataset("tfrecord", "*train*", _write_reframed),
        "gzip": dataset("gzip", "*.gz"),
        "config.toml": [Reader(run / records.CONFIG, read_config)],
        "records": [Reader(run / name, read_run) for name in RECORDS],
        "events": [Reader(told / records.EVENTS, read_events)],
        "evaluation": [Reader(run / records.EVALUATION, partial(read_evaluation, run))],
        "model metadata": [
            Reader(folder / "header.json", partial(load_model, folder / "card.safetensors"), write_header),
            Reader(folder / "head.safetensors", partial(load_model, folder / "head.safetensors"), write_model),
        ],
        ".pt2 metadata": exported(".pt2"),
        ".tflite metadata": exported(".tflite"),
        ".onnx metadata": [
            Reader(folder / "header.json", read_onnx, write_onnx),
            Reader(folder / "number.txt", read_onnx, write_onnx_number),
        ],
        "manifest": [Reader(manifest, read_checkpoints)],
        "packed index": dataset("packed", "*.arrow"),
        "launch.json": [Reader(jobs / "launch.json", partial(read_jobs, str(jobs)))],
        "hook state": [Reader(states / "1.state", read_states)],
        "Dockerfile": [
            Reader(
                folder / "Dockerfile",
                lambda: check_sources(dockerfile=folder / "Dockerfile", requirements=None, script=None),
            )
        ],
        "pipeline.config": [Reader(folder / "pipeline.config", partial(import_pipeline, folder / "pipeline.config"))],
    }


class _NoInterpreter:
    """LiteRT's interpreter of one image."""

    def __init__(self, _path: str, *, num_threads: int) -> None:
        pass

    def get_signature_runner(self) -> Any:
        return types.SimpleNamespace(get_input_details=lambda: {"images": {"shape": [1]}})


def _write_reframed(path: Path, data: bytes) -> None:
    """One record with these bytes and correct checksums: damage that only the parser can find."""
    with path.open("wb") as file:
        write_record(file, data)


def fuzz(readers: list[Reader], examples: int) -> None:
    assert readers
    originals = {reader.file: reader.file.read_bytes() for reader in readers}
    strategy = st.tuples(st.sampled_from(range(len(readers))), EDITS)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def check(example: tuple[int, list[tuple[str, float, int, bytes]]]) -> None:
        number, edits = example
        reader = readers[number]
        data = originals[reader.file]
        if reader.write is _write_reframed:
            data = next(unframe(data))
        try:
            reader.write(reader.file, mutate(data, edits))
            with bounded(seconds=20, megabytes=512):
                reader.read()
        except StokerError as error:
            json.dumps(str(error))
        finally:
            reader.file.write_bytes(originals[reader.file])

    check()


@pytest.mark.parametrize(
    "name",
    ["coco", "voc", "yolo labels", "yolo description", "csv", *EXPORTS, "label map", "tfrecord", "tfrecord payload",
     "gzip", "config.toml", "records", "events", "evaluation", "model metadata",
     ".pt2 metadata", ".tflite metadata", ".onnx metadata", "manifest",
     "packed index", "study", "launch.json", "hook state", "Dockerfile", "pipeline.config"],
)  # fmt: skip
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_files_end_in_a_result_or_a_stoker_error(
    sources: dict[str, list[Reader]], monkeypatch: pytest.MonkeyPatch, name: str, examples: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    fuzz(sources[name], examples)


HOSTILE = st.sampled_from(
    (None, True, -1, 0, 10**18, -(10**30), 10**400, 0.5, 1e300, -1e300, 1e-300, "", "text", "\0\x1b[31m", "9" * 5000,
     "/dev/zero", "../..", "</script>", [], [[]], [None] * 99, {}, {"a": 1}, {"ap": "x"}, [{"kind": 3}], [1, "a", {}])
)  # fmt: skip


def schema_values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values that the schema allows, mostly the extremes, in which any part may be something else."""
    found: st.SearchStrategy[Any]
    if isinstance(kind, msgspec.inspect.Metadata):
        found = schema_values(kind.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        found = st.one_of([schema_values(one) for one in kind.types])
    elif isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        low, high = (-1e300 if kind.ge is None else kind.ge), (1e300 if kind.le is None else kind.le)
        whole = isinstance(kind, msgspec.inspect.IntType)
        low, high = (max(low, -(2**62)), min(high, 2**62)) if whole else (low, high)
        found = st.sampled_from([int(n) if whole else float(n) for n in (low, high, min(high, max(low, 3)))])
    elif isinstance(kind, msgspec.inspect.StrType):
        found = st.sampled_from(("training", "worker", "", "a (a.py:3)", "recorded: torch", "x" * 300))
    elif isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        found = st.lists(schema_values(kind.item_type), max_size=3)
    elif isinstance(kind, msgspec.inspect.TupleType):
        found = st.tuples(*map(schema_values, kind.item_types)).map(list)
    elif isinstance(kind, msgspec.inspect.DictType):
        keys = st.sampled_from((*records.PHASES[:4], *records.INPUT_STAGES, "total", "inside the job", "kind", "place"))
        found = st.dictionaries(keys, schema_values(kind.value_type), max_size=3)
    elif isinstance(kind, msgspec.inspect.TypedDictType | msgspec.inspect.StructType):
        fields = {field.name: schema_values(field.type) for field in kind.fields}
        is_needed = {field.name: field.required for field in kind.fields}
        found = st.fixed_dictionaries(
            {name: value for name, value in fields.items() if is_needed[name]},
            optional={name: value for name, value in fields.items() if not is_needed[name]},
        )
    elif isinstance(kind, msgspec.inspect.BoolType):
        found = st.booleans()
    elif isinstance(kind, msgspec.inspect.NoneType):
        return st.none()
    else:
        assert isinstance(kind, msgspec.inspect.AnyType), kind
        return HOSTILE
    return st.integers(0, 24).flatmap(lambda number: found if number else HOSTILE)


def schema_lines(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """A line of records. Its time and attempt are mostly those of the run, else nothing is read of it."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {field.name: schema_values(field.type) for field in info.fields}
    fields |= {
        "t": st.one_of(st.sampled_from((1.78e9 + 5, 1.78e9 + 900)), fields["t"]),
        "attempt": st.one_of(st.just(1), fields["attempt"]),
    }
    if kind is schemas.Event:
        fields |= {"kind": st.sampled_from(records.EVENT_KINDS), "data": EVENT_DATA}
    return st.fixed_dictionaries(fields)


EVENT_DATA = schema_values(msgspec.inspect.type_info(schemas.EventData))
LINES = {
    **RECORDS, records.TRACES: schemas.TraceWindow, records.STACKS: schemas.StackWindow, records.PROBES: schemas.Probe,
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_lines_by_the_schema_with_other_types_and_extremes(tmp_path: Path, name: str, examples: int) -> None:
    """Of all kinds, in each file of a run: a result or an error that names the file."""
    run = tmp_path / "told" / "run"
    write_run(run, samples=3, end=None)
    (run / "output.log").write_text("epoch 1\nValueError: no\n")
    original = (run / name).read_bytes() if (run / name).exists() else b""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(schema_lines(LINES[name]), min_size=1, max_size=6))
    def check(lines: list[dict[str, Any]]) -> None:
        (run / name).write_bytes(original + "".join(json.dumps(line) + "\n" for line in lines).encode())
        readers: list[Callable[[Path], Any]] = [collect]
        if name == records.EVENTS:
            readers += [lambda run: read_sizes(run, BatchSizes(8, 8)), read_rollbacks]
        errors = []
        with bounded(seconds=20, megabytes=512):
            for read in readers:
                try:
                    read(run)
                except StokerError as error:
                    errors.append(str(error))
            summary = summarize_runs(run.parent)
        assert all(name in error for error in errors)
        assert not any(re.match(r"\w+(Error|Exception): ", row.error) for row in summary.unreadable)

    check()
