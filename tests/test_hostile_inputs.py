"""Small inputs that expand, special files in place of plain ones, and odd numbers: each command ends with an error that
names the file, or goes on without it, in 60 s and 1.5 GB of memory."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stoker_watch.runs.records import CONFIG, ENVIRONMENT, EVENTS
from tests.drawn import draw
from tests.fixtures.special_files import replace_by
from tests.trainer.data.tfrecords import jpeg
from tests.watch.report.runs import write_run

pytestmark = pytest.mark.slow
MEMORY_BYTES, SECONDS = 3 << 29, 60
GIB = 1 << 30
Command = Callable[..., tuple[int, str]]


MEASURED = """
import atexit, pathlib, re, resource, runpy, sys
def write_peak():
    status = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path(peak).write_text(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1])
peak, limit, *sys.argv[1:] = sys.argv[1:]
atexit.register(write_peak)
resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
runpy.run_module("stoker", run_name="__main__")
"""


@pytest.fixture
def stoker(tmp_path: Path) -> Command:
    """Runs a command; its memory is measured, and the limit only protects the machine: under a limit near the allowed
    one, a file that expands would be a failed allocation, which reads like a damaged file."""

    def run(*arguments: object) -> tuple[int, str]:
        peak = tmp_path / "peak"
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, peak, str(4 * MEMORY_BYTES), *map(str, arguments)],
            cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert "Traceback" not in output, output[-3000:]
        assert "MemoryError" not in output, output[-3000:]
        assert done.returncode in (0, 1, 2, 3, 4), output[-3000:]
        assert int(peak.read_text()) * 1024 < MEMORY_BYTES, output[-3000:]
        return done.returncode, output

    return run


# Data sets


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
OBJECTS = pa.struct([("bbox", pa.list_(pa.list_(pa.float32()))), ("category", pa.list_(pa.int64()))])


def parquet(path: Path, images: pa.Array, objects: pa.Array, *, use_dictionary: bool = True) -> None:
    path.parent.mkdir(parents=True)
    table = pa.table({"image": images, "objects": objects})
    pq.write_table(table, path, compression="zstd", row_group_size=len(table), use_dictionary=use_dictionary)


def some_objects(count: int) -> pa.Array:
    return pa.array([{"bbox": [[1, 2, 9, 9]], "category": [0]}] * count, OBJECTS)


def images_of(data: list[bytes], names: list[str]) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array(data, pa.binary()), pa.array(names)], fields=list(IMAGE))


def write_expanding(path: Path, way: str) -> None:
    image, count = jpeg(40, 30, 1), 120_000_000
    if way == "one image in many rows":
        parquet(path, images_of([image + bytes(24 << 20)] * 80, ["a.jpg"] * 80), some_objects(80))
    elif way == "boxes without end":
        lists = pa.ListArray.from_arrays([0, count], pa.array(memoryview(bytes(8 * count)).cast("q")))
        boxes = pa.ListArray.from_arrays([0, 1], pa.ListArray.from_arrays([0, 4], pa.array([1.0] * 4, pa.float32())))
        objects = pa.StructArray.from_arrays([boxes, lists], fields=list(OBJECTS))
        parquet(path, images_of([image], ["a.jpg"]), objects)
    elif way == "a name without end":
        parquet(path, images_of([image] * 64, ["x" * (24 << 20)] * 64), some_objects(64))
    elif way == "a page that expands":
        parquet(path, images_of([image + bytes(500_000_000)], ["a.jpg"]), some_objects(1), use_dictionary=False)
    elif way == "rows without values":
        images = pa.StructArray.from_arrays([pa.nulls(5_000_000, field.type) for field in IMAGE], fields=list(IMAGE))
        parquet(path, images, pa.nulls(5_000_000, OBJECTS))
    else:  # a class name in many boxes
        kind = pa.struct([OBJECTS.field("bbox"), ("category", pa.list_(pa.string()))])
        labels = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * (1 << 18)]))
        categories = pa.ListArray.from_arrays([0, 20_000], labels)
        boxes = pa.ListArray.from_arrays([0, 1], pa.ListArray.from_arrays([0, 4], pa.array([1.0] * 4, pa.float32())))
        objects = pa.StructArray.from_arrays([boxes, categories], names=[field.name for field in kind])
        parquet(path, images_of([image], ["a.jpg"]), objects)


@pytest.mark.parametrize(
    "way",
    ["one image in many rows", "boxes without end", "a name without end", "a page that expands", "rows without values",
     "a class name in many boxes"],
)  # fmt: skip
def test_a_parquet_file_that_expands_is_refused(stoker: Command, tmp_path: Path, way: str) -> None:
    path = tmp_path / "set" / "data" / "train-00000-of-00001.parquet"
    write_expanding(path, way)
    assert path.stat().st_size < 500_000
    code, output = stoker("data", "check", tmp_path / "set")
    assert code == 4, output
    assert path.name in output
    copies = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert copies < 200 << 20


def test_large_images_in_one_page_are_read(stoker: Command, tmp_path: Path) -> None:
    """What does not become smaller may be large: 300 MB of images in one page of one row group."""
    path = tmp_path / "set" / "data" / "train-00000-of-00001.parquet"
    noise = os.urandom(30 << 20)
    images = [jpeg(40, 30, k) + noise[k:] for k in range(10)]
    parquet(path, images_of(images, [f"{k}.jpg" for k in range(10)]), some_objects(10), use_dictionary=False)
    code, output = stoker("data", "check", tmp_path / "set")
    assert code == 0, output
    assert "training would use 10 of 10 images" in output


def test_a_packed_index_with_compressed_buffers_is_refused(stoker: Command, tmp_path: Path) -> None:
    draw(tmp_path / "plain")
    code, output = stoker("data", "pack", tmp_path / "plain", tmp_path / "packed")
    assert code == 0, output
    (index,) = (tmp_path / "packed").glob("stoker-index.arrow")
    with pa.ipc.open_file(index) as reader:
        schema, table = reader.schema, reader.read_all()
    count = 300_000_000
    offsets = [0, *[count // 4] * table.num_rows]
    boxes = pa.FixedSizeListArray.from_arrays(pa.array(memoryview(bytes(4 * count)).cast("f")), 4)
    table = table.set_column(schema.names.index("boxes"), "boxes", pa.LargeListArray.from_arrays(offsets, boxes))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(index), schema, options=options) as writer:
        writer.write_batch(table.cast(schema).combine_chunks().to_batches()[0])
    del boxes, table
    assert index.stat().st_size < 10_000_000
    code, output = stoker("data", "check", tmp_path / "packed")
    assert code == 4, output
    assert index.name in output


@pytest.mark.parametrize(
    "header", [{"size": "1e9"}, {"size": "-5"}, {"mtime": "nan"}, {"uid": "x"}, {"size": "9" * 5000}]
)
def test_a_tar_with_odd_numbers_in_its_pax_headers_is_reported(
    stoker: Command, tmp_path: Path, header: dict[str, str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (("a.jpg", jpeg(40, 30, 1)), ("a.json", b'{"bboxes": [[1, 2, 9, 9]], "labels": ["x"]}')):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(data), header
            tar.addfile(info, io.BytesIO(data))
    (folder / "train-000000.tar").write_bytes(buffer.getvalue())
    stoker("data", "check", folder)


# Scripts and settings of others


def test_a_dockerfile_whose_variables_expand(stoker: Command, tmp_path: Path) -> None:
    lines = ["FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04", "ENV A0=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]
    lines += [f"ENV A{n}={'$A' + str(n - 1) if n else ''}{('$A' + str(n - 1)) * 31}" for n in range(1, 11)]
    (tmp_path / "Dockerfile").write_text("\n".join([*lines, "RUN echo $A10", "FROM $A10", 'CMD ["python", "$A10"]']))
    stoker("check", "--dockerfile", "Dockerfile")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000, "nan", "0x" + "f" * 5000])
@pytest.mark.parametrize("field", ["num_steps", "learning_rate", "num_classes", "batch_size"])
def test_odd_numbers_in_a_pipeline_config(stoker: Command, tmp_path: Path, field: str, number: str) -> None:
    values = {"num_steps": "10", "learning_rate": "0.01", "num_classes": "3", "batch_size": "8"} | {field: number}
    (tmp_path / "pipeline.config").write_text(
        f"model {{ ssd {{ num_classes: {values['num_classes']} "
        "feature_extractor { type: 'ssd_mobilenet_v2_keras' } } }\n"
        f"train_config {{ batch_size: {values['batch_size']} num_steps: {values['num_steps']} optimizer {{ "
        "momentum_optimizer { learning_rate { constant_learning_rate { learning_rate: "
        f"{values['learning_rate']} }} }} }} }} }}\n"
        "train_input_reader { label_map_path: 'l' tf_record_input_reader { input_path: 't' } }\n"
    )
    code, output = stoker("import", "pipeline.config")
    assert code == 0 or "pipeline.config" in output, output


# Run folders


def a_run(path: Path) -> Path:
    return write_run(path, samples=3, environment={"argv": ["stoker", "train"]}, settings="")


@pytest.mark.parametrize(
    "name", [ENVIRONMENT, CONFIG, EVENTS, "output.log", "steps.jsonl", "launch.json", "dataset.json"]
)
@pytest.mark.parametrize("kind", ["zero", "fifo", "folder", "sparse"])
def test_special_files_in_a_run_folder(stoker: Command, tmp_path: Path, name: str, kind: str) -> None:
    run = a_run(tmp_path / "run")
    replace_by(kind, run / name, size_bytes=20 * GIB)
    stoker("why", run)


def test_a_report_of_a_run_with_special_files(stoker: Command, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    for name in ("environment.json", "output.log", "dataset.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to("/dev/zero")
    code, output = stoker("report", run)
    assert code == 0, output
    assert (run / "report.html").stat().st_size < 20 << 20


def test_secrets_of_an_exception_do_not_leave_the_output_of_a_job(stoker: Command, tmp_path: Path) -> None:
    secrets = ["hunter2Xk9", "Zx81mQ0aa", "tok3nValue77", "ghp_" + "a1B2" * 9]
    text = f"postgres://me:{secrets[0]}@db/x api_key={secrets[1]} Authorization: Bearer {secrets[2]} {secrets[3]}"
    (tmp_path / "job.py").write_text(f"print('loading', {text!r}, flush=True)\nraise ConnectionError({text!r})\n")
    command = [sys.executable, "-m", "stoker", "watch", "--", sys.executable, "job.py", "--pat", secrets[0]]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=SECONDS, check=False)
    (run,) = (path.parent for path in tmp_path.rglob(EVENTS))
    assert secrets[0] in (run / "output.log").read_text()
    with (run / EVENTS).open("a") as file:  # of another program
        file.write(json.dumps({"t": 1.9e9, "attempt": 1, "kind": "failed", "text": text, "data": {"x": [text]}}) + "\n")
    outputs = [stoker(*command, run)[1] for command in (("why",), ("why", "--json"), ("report",), ("report", "--json"))]
    page = run / "report.html"
    assert page.stat().st_mode & 0o777 == 0o600
    assert "ConnectionError" in outputs[0], outputs[0]
    own = (run / EVENTS).read_text().splitlines()[:-1]
    for shown in (*outputs, page.read_text(), *own, (run / ENVIRONMENT).read_text()):
        assert not any(secret in shown for secret in secrets)


@pytest.mark.parametrize("code", ['"x"', "1e400", "[1]", "9" * 5000, "null", "true"])
def test_an_event_with_an_odd_exit_code(stoker: Command, tmp_path: Path, code: str) -> None:
    run = a_run(tmp_path / "run")
    line = f'{{"t": 1780000900.0, "attempt": 1, "kind": "failed", "text": "x", "data": {{"exit_code": {code}}}}}\n'
    (run / EVENTS).write_text((run / EVENTS).read_text() + line)
    stoker("why", run)


def test_a_checkpoint_that_is_a_deflated_zip_is_not_expanded(tmp_path: Path) -> None:
    from stoker_watch.runs.records import CHECKPOINTS
    from tests.bounded import bounded
    from tests.fixtures.training_checkpoint import newest, save

    run = tmp_path / "run"
    run.mkdir()
    save(run, 1, 2)
    path = run / CHECKPOINTS / "step-00000002" / "state.pt"
    large = io.BytesIO()
    torch.save({"moments": [torch.zeros(200_000_000)]}, large)
    packed = io.BytesIO()
    with zipfile.ZipFile(large) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    del large
    path.write_bytes(packed.getvalue())
    manifest = json.loads(path.with_name("manifest.json").read_bytes())
    manifest["files"]["state.pt"] = {
        "size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()
    }  # fmt: skip
    path.with_name("manifest.json").write_text(json.dumps(manifest))
    with bounded(seconds=30, megabytes=400):
        loaded, said = newest(run)
    assert loaded is not None
    assert loaded.step == 1
    assert "torch.save compresses nothing" in str(said)


def test_weights_in_a_deflated_zip_are_refused(tmp_path: Path) -> None:
    from stoker.models.weights.load import read_weights
    from stoker_watch.errors import WeightsError

    plain = io.BytesIO()
    torch.save({"weight": torch.zeros(1_000_000)}, plain)
    path = tmp_path / "weights.pth"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    with pytest.raises(WeightsError, match="compresses nothing"):
        read_weights(path)
    path.write_bytes(plain.getvalue())
    assert read_weights(path).tensors["weight"].numel() == 1_000_000
