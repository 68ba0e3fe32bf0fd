"""The libraries of others read what `stoker data pack` writes, and stoker reads in place what they write.

`webdataset` runs in a Python of its own, that of STOKER_PEERS_PYTHON, else .peers (`make peers`); where it is
not there, its tests are skipped.
"""

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.data.index import Index, open_index
from stoker.data.packing import PackOptions, in_threads, pack
from tests.fixtures.data_convert import annotated, coco
from tests.trainer.data.tfrecords import jpeg

ROOT = Path(__file__).resolve().parents[3]
CANDIDATES = (os.environ.get("STOKER_PEERS_PYTHON", ""), str(ROOT / ".peers/bin/python"))
WAIT_S = 120


@functools.cache
def python_with(module: str) -> str | None:
    for python in CANDIDATES:
        if python and Path(python).exists():
            code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
            if subprocess.run([python, "-c", code], capture_output=True, timeout=WAIT_S, check=False).returncode == 0:
                return python
    return None


def run_peer(module: str, code: str, *arguments: str | Path) -> Any:
    """What the last line printed by a program says, as JSON."""
    python = python_with(module)
    if python is None:
        pytest.skip(f"{module} is not in the Python of the peers: uv pip install {module}")
    done = subprocess.run(
        [python, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def source(tmp_path: Path) -> Index:
    for split in ("train", "valid"):
        images = {
            f"{n}.jpg": (jpeg(40, 30, n), [annotated([1, 2, 10.5, 20], 1 + n % 3)] * (n % 2)) for n in range(1, 6)
        }
        coco(tmp_path / "source", images, split)
    return open_index(tmp_path / "source")


READ_WEBDATASET = """
import json, sys, hashlib, webdataset
samples = webdataset.WebDataset(sys.argv[1], shardshuffle=False)
print(json.dumps({
    s["__key__"]: [hashlib.sha256(s["jpg"]).hexdigest(), json.loads(s["json"])] for s in samples
}))
"""


@pytest.mark.slow
def test_webdataset_reads_what_is_packed(source: Index, tmp_path: Path) -> None:
    from hashlib import sha256

    pack(source, str(tmp_path / "out"), PackOptions(), run_shards=in_threads(1))
    found = run_peer("webdataset", READ_WEBDATASET, tmp_path / "out" / "train-{00000..00000}.tar")
    rows = source.image_indices("train").tolist()
    assert sorted(found) == [f"{row:09d}" for row in rows]
    for row in rows:
        digest, annotations = found[f"{row:09d}"]
        assert digest == sha256(source.read(row)).hexdigest()
        assert (annotations["file_name"], annotations["width"]) == (source.path(row).name, 40)
        own = slice(source.offsets[row], source.offsets[row + 1])
        names = [annotation["category"] for annotation in annotations["annotations"]]
        assert names == [source.class_names[label] for label in source.labels[own]]


WRITE_WEBDATASET = """
import json, sys, webdataset
with webdataset.ShardWriter(sys.argv[1] + "/train-%06d.tar", maxcount=2, verbose=0) as sink:
    for n in range(5):
        image = open(sys.argv[2], "rb").read()
        sink.write({"__key__": f"sample{n}", "jpg": image, "json": {"bboxes": [[1.5, 2, 10, 20]], "labels": [n % 2]}})
print("{}")
"""


@pytest.mark.slow
def test_what_webdataset_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(40, 30, 1))
    (tmp_path / "set").mkdir()
    run_peer("webdataset", WRITE_WEBDATASET, tmp_path / "set", tmp_path / "a.jpg")
    index = open_index(tmp_path / "set", val_fraction=0.4)
    assert (index.format, len(index), index.class_names) == ("webdataset", 5, ("0", "1"))
    assert index.boxes.tolist() == [[1.5, 2, 11.5, 22]] * 5
    assert [index.read(row) for row in range(5)] == [jpeg(40, 30, 1)] * 5
