"""`stoker data pack --on ray` on a real Ray cluster of two nodes on this machine: one is lost while it packs; into a
folder, and into S3.

Ray is an optional extra: `uv pip install 'stoker[ray]'`.
"""

import hashlib
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stoker.data.formats.webdataset import INDEX_FILE, read_info
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.fixtures.data_convert import annotated, coco
from tests.watch.storage.servers import Server, apply, s3_server

ray = pytest.importorskip("ray", reason="uv pip install 'stoker[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PYTHONPATH = os.pathsep.join([str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")]).strip(":")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that runs no tasks, and two nodes of one CPU."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server


def tree(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def pack(folder: Path, out: Path | str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "stoker", "data", "pack", "source", str(out), "--shard-mib", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_lost_node_repeats_its_shards_and_the_checksums_are_the_same(cluster: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = {}
    for number in range(40):
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (700, 900, 3), np.uint8)).save(data, "JPEG", quality=95)
        images[f"{number}.jpg"] = data.getvalue(), [annotated([10, 20, 300, 200], 1 + number % 3)]
    coco(tmp_path / "source", images)
    whole, out = tmp_path / "whole", tmp_path / "out"
    local = pack(tmp_path, whole, "--image-size", "600")
    assert local.wait() == 0, local.stdout and local.stdout.read()
    nodes = cluster.list_all_nodes()[1:]
    process = pack(tmp_path, out, "--image-size", "600", "--on", "ray", "--address", cluster.address)
    lost = []

    def lose_a_node() -> None:
        while process.poll() is None and len(list(out.glob("*.tar"))) < 2:
            time.sleep(0.02)
        lost.append(len(list(out.glob("*.tar"))))
        cluster.remove_node(nodes[0], allow_graceful=False)

    thread = threading.Thread(target=lose_a_node)
    thread.start()
    output, _ = process.communicate()
    thread.join()
    assert process.returncode == 0, output
    num_shards = len(read_info(whole / INDEX_FILE).shards)
    assert lost[0] < num_shards > 5
    assert tree(out) == tree(whole)
    assert f"in {num_shards} shards" in output
    again = pack(tmp_path, out, "--image-size", "600", "--on", "ray", "--address", cluster.address)
    assert "already packed" in again.communicate()[0]


def test_into_a_bucket_the_checksums_are_the_same(
    server: Server, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes write into S3; they have the variables of the server, as on a real cluster those of an account."""
    images = {}
    for number in range(24):
        data = io.BytesIO()
        noise = np.random.default_rng(number).integers(0, 255, (400, 500, 3), np.uint8)
        Image.fromarray(noise).save(data, "JPEG", quality=95)
        images[f"{number}.jpg"] = data.getvalue(), [annotated([10, 20, 300, 200], 1 + number % 3)]
    coco(tmp_path / "source", images)
    local = pack(tmp_path, tmp_path / "whole")
    assert local.wait() == 0, local.stdout and local.stdout.read()
    served = server.bucket()
    apply(monkeypatch, served.environment)
    cluster = request.getfixturevalue("cluster")  # its nodes get the variables of this process
    destination = f"{served.uri}/some/packed"
    process = pack(tmp_path, destination, "--on", "ray", "--address", cluster.address)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    store = open_store(parse_uri(served.uri))
    found = {
        info.key.removeprefix("some/packed/"): hashlib.sha256(store.read(info.key)).hexdigest()
        for info in store.list("some/packed")
    }
    assert found == tree(tmp_path / "whole")
    assert len(found) > 3
    lost = "some/packed/train-00001.tar"
    store.delete(lost)
    again = pack(tmp_path, destination, "--on", "ray", "--address", cluster.address)
    assert "were finished by an earlier start, and kept" in again.communicate()[0]
    assert hashlib.sha256(store.read(lost)).hexdigest() == found["train-00001.tar"]


def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    data = io.BytesIO()
    Image.new("RGB", (40, 30)).save(data, "JPEG")
    coco(tmp_path / "source", {f"{n}.jpg": (data.getvalue(), [annotated([1, 2, 9, 9])]) for n in range(4)})
    process = pack(tmp_path, tmp_path / "out", "--on", "ray", "--address", "127.0.0.1:1")
    output, _ = process.communicate()
    assert process.returncode == 3, output
    assert "The Ray cluster cannot be reached" in output
