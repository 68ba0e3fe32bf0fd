"""What stoker/ opens by a name goes through `regular_files`, which refuses FIFOs, devices and endless files: a plain
`open(`, `read_text`, `read_bytes`, `mmap`, `zipfile`, `tarfile` or `safe_open` needs a reason below."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sources

READS = {
    "open", "read_text", "read_bytes", "mmap", "is_zipfile", "ZipFile", "TarFile", "is_tarfile", "fromfile", "memmap",
    "safe_open", "load_file",
}  # fmt: skip
OWN_CACHE = "a file of the user's own cache folder"
OWN_RUN = "a file that this process, or the one that it started, has written"
KERNEL = "a file of /proc, /sys or /dev, by a name of the code"
DESCRIPTOR = "the descriptor of an open file, or memory of the process"
HOOK = "runs in the watched job, without stoker; the folder is private to the job"
CHECKED = "regular_files has opened it before"
REASONS = {
    "cli/app.py": KERNEL,
    "data/formats/coco.py read_entries": DESCRIPTOR,
    "data/formats/tfrecord.py _read_shard": DESCRIPTOR,
    "data/formats/tfrecord_bytes.py unpack": DESCRIPTOR,
    "data/images/decode.py": DESCRIPTOR,
    "data/images/pixel_cache.py open_cache_file": OWN_CACHE,
    "data/images/pixel_cache.py is_unused": OWN_CACHE,
    "data/images/source.py _mirror_uri": OWN_CACHE,
    "data/loading/buffers.py": DESCRIPTOR,
    "data/loading/process_main.py": DESCRIPTOR,
    "data/packing.py read": OWN_RUN,
    "data/remote.py": OWN_CACHE,
    "data/validation/check.py": DESCRIPTOR,
    "data/validation/split.py": DESCRIPTOR,
    "diagnosis/termination.py boot_id": KERNEL,
    "diagnosis/termination.py _is_running": KERNEL,
    "export/programs.py": OWN_RUN,
    "export/write.py": OWN_RUN,
    "hardware/calibration.py": OWN_CACHE,
    "hardware/cgroup.py": KERNEL,
    "hardware/cuda_trial.py": KERNEL,
    "hardware/cpu.py": KERNEL,
    "hardware/tpu.py": KERNEL,
    "inference/predict.py": OWN_RUN,
    "inference/runtime.py _read_archive": "the reader of a file that the caller has opened as a model",
    "inference/video.py": "FFmpeg: cameras are devices; a file is opened by regular_files",
    "migration/pipeline.py write_config": "the user names the file with --out",
    "models/weights/hub.py": OWN_CACHE,
    "models/weights/load.py read_weights": CHECKED,
    "models/weights/model_file.py load_model": CHECKED,
    "planning/trace.py read_trace": OWN_CACHE,
    "recording/callbacks/": "no file",
    "recording/hook/": HOOK,
    "recording/remote_stacks.py": "memory and mapped files of the watched process, with checks of their own",
    "recording/run_writer.py": KERNEL,
    "recording/telemetry/machine.py": KERNEL,
    "training/trace.py _write_chrome": OWN_RUN,
    "knowledge/__init__.py": "a file of the package",
    "regular_files.py": "the one place",
    "report/console.py": KERNEL,
    "report/html.py _read_asset": "a file of the package",
    "storage/clients.py": "the user's own keys, or the address of a web server",
    "storage/local_files.py": "folders",
    "storage/store.py": OWN_CACHE,
    "storage/web.py": "an address of a web server",
    "training/bucket_run.py": OWN_RUN,
    "training/checkpoint.py _load": CHECKED,
    "training/evaluator.py": OWN_RUN,
    "training/local_ranks.py": OWN_RUN,
    "training/ranks.py read_reports": OWN_RUN,
    "training/run.py": KERNEL,
    "watch/hook_reader.py __init__": "a folder that this process has made",
    "watch/output_relay.py": OWN_RUN,
    "watch/recorder.py": OWN_RUN,
    "watch/watch.py": KERNEL,
}
"""File, with the function or without, or folder → why it may."""


def plain_calls(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, function, call) of what opens a file by its name without `regular_files`."""
    tree = ast.parse(source)
    own = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("stoker.", "stoker_watch."))
        for name in node.names
    } | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}  # where they are defined, they are seen
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, _, name = ast.unparse(node.func).rpartition(".")
        if name not in READS or called == "regular_files" or (not called and name in own - {"open", "mmap"}):
            continue
        words = ast.unparse(node)
        first = ast.unparse(node.args[0]) if node.args else ""
        is_own = "__file__" in called or "resources.files" in called or first in ("'xb'", "'x'")
        is_kernel = any(re.match(r"(Path\()?f?['\"]/proc/", text) for text in (called, first))
        if not (is_own or is_kernel or words.endswith("opener=regular_files.no_links)")):
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            yield node.lineno, max(around, key=lambda f: f.lineno).name if around else "", words


def unexplained(source: str, file: str) -> list[str]:
    return [
        f"{file}:{line}: {call[:90]}"
        for line, function, call in plain_calls(source)
        if not {file, f"{file} {function}", *(f"{parent}/" for parent in Path(file).parents)} & REASONS.keys()
    ]


def test_what_is_opened_goes_through_regular_files() -> None:
    files = list(sources.python_files())
    assert len(files) > 200
    found = [line for file, path in files for line in unexplained(path.read_text(), file)]
    assert not found, "\n".join(found)


def test_every_reason_has_its_file() -> None:
    assert [key for key in REASONS if not sources.find(key.split()[0])] == []


@pytest.mark.parametrize(
    "call",
    ["open(path)", "path.open()", "path.read_text()", "Path(name).read_bytes()", "mmap.mmap(fd, 0)", "os.open(path, 0)",
     "zipfile.ZipFile(path)", "zipfile.is_zipfile(path)", "tarfile.open(path)", "safe_open(path, 'pt')", "gzip.open(p)",
     "open(path, opener=other)", "(folder / '/proc/x').read_text()", "np.memmap(path)"],
)  # fmt: skip
@pytest.mark.parametrize("file", ["search/study.py", "runs/records.py", "data/formats/yolo.py", "diagnosis/reader.py"])
def test_a_plain_one_is_found(file: str, call: str) -> None:
    (path,) = sources.find(file)
    source = path.read_text()
    assert unexplained(source, file) == []
    assert len(unexplained(f"{source}\n\ndef added(path):\n    return {call}\n", file)) == 1


@pytest.mark.parametrize(
    "call",
    ["regular_files.read_text(path)", "open(path, 'ab', opener=regular_files.no_links)", "temporary.open('xb')",
     "Path(__file__).with_name('x').read_text()", "Path(f'/proc/{pid}/stat').read_text()"],
)  # fmt: skip
def test_what_is_safe_is_not_found(call: str) -> None:
    assert unexplained(call, "search/study.py") == []
