"""What `stoker check`, telemetry and `launch k8s --tpu` know of TPUs, on folders and programs that stand for a TPU VM.
No TPU was ever there."""

import os
import re
import stat
from pathlib import Path

import pytest
import yaml

from stoker.launching.kubernetes import Kubernetes
from stoker.launching.request import check_launch, make_spec
from stoker.launching.spec import LaunchRequest, PlaceOptions, open_place
from stoker.preflight.tpu import check_tpu, concerns_tpu
from stoker_watch.errors import UsageError
from stoker_watch.hardware.tpu import holders, listed_slices, pci_chips
from stoker_watch.recording.telemetry import tpu as telemetry
from stoker_watch.recording.telemetry.tpu import TpuSampler, parse_tpu_info

TPU_INFO = """\
Libtpu version: 0.0.19.dev20250721+nightly
Accelerator type: v6e

TPU Chips

| Chip        | Type         | Devices | PID     |
|-------------|--------------|---------|---------|
| /dev/vfio/0 | TPU v6e chip | 1       | 1469584 |
| /dev/vfio/1 | TPU v6e chip | 1       | 1469584 |

TPU Runtime Utilization

| Chip | HBM Usage (GiB)       | Duty cycle |
|------|-----------------------|------------|
| 0    | 18.45 GiB / 31.25 GiB |    100.00% |
| 1    | 10.40 GiB / 31.25 GiB |     12.50% |

TensorCore Utilization

| Core ID | TensorCore Utilization |
|---------|------------------------|
| 0       | 13.60%                 |
| 1       | 14.81%                 |

TPU Buffer Transfer Latency

| Buffer Size  | P50          | P90          | P95          | P999         |
|--------------|--------------|--------------|--------------|--------------|
| 8MB+         | 108978.82 us | 164849.81 us | 177366.42 us | 212419.07 us |
"""
"""As the README of tpu-info 0.14 shows it, with two chips."""


def make_vm(root: Path, *, chips: int = 4, device: str = "0x006f", driver: bool = True) -> Path:
    for number in range(chips):
        folder = root / f"sys/bus/pci/devices/0000:00:0{number + 4}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{device}\n")
        if driver:
            (root / "dev/vfio").mkdir(parents=True, exist_ok=True)
            (root / f"dev/vfio/{number}").touch()
    for name, vendor, id in (("0000:00:01.0", "0x8086", "0x1237"), ("0000:00:03.0", "0x1ae0", "0x0042")):
        folder = root / f"sys/bus/pci/devices/{name}"  # a bridge, and Google's network card
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor)
        (folder / "device").write_text(id)
    return root


def hold(root: Path, pid: int, target: str) -> None:
    (root / f"proc/{pid}/fd").mkdir(parents=True)
    (root / f"proc/{pid}/fd/5").symlink_to(target)
    (root / f"proc/{pid}/cmdline").write_bytes(b"python\0train.py\0")


def ids(root: Path, device: str | None = "tpu", **options: object) -> list[tuple[str, str]]:
    options.setdefault("is_installed", lambda _: True)
    return [(f.id, f.severity) for f in check_tpu(device=device, root=root, **options)]  # type: ignore[arg-type]


def test_a_tpu_vm_without_a_problem(tmp_path: Path):
    root = make_vm(tmp_path)
    assert pci_chips(root) == ["v6e"] * 4
    (finding,) = check_tpu(device="tpu", root=root, is_installed=lambda _: True)
    assert (finding.id, finding.severity) == ("tpu", "ok")
    assert "4 × TPU v6e" in finding.title


def test_a_machine_without_a_tpu(tmp_path: Path):
    root = make_vm(tmp_path, chips=0)
    assert pci_chips(root) == []
    assert ids(root) == [("tpu_missing", "blocker")]
    assert not concerns_tpu(None, root)
    assert not concerns_tpu("cpu", make_vm(tmp_path / "tpu"))
    assert concerns_tpu("tpu:0", root)


def test_problems_of_a_tpu_vm(tmp_path: Path):
    root = make_vm(tmp_path, driver=False)
    assert ids(root) == [("tpu_driver_missing", "blocker")]
    assert ids(root, is_installed=lambda name: name != "libtpu")[1] == ("tpu_library_missing", "blocker")


def test_it_is_used_only_if_it_is_named(tmp_path: Path):
    root = make_vm(tmp_path)
    assert concerns_tpu(None, root)
    assert ids(root, None) == [("accelerator_untested", "blocker")]


def test_another_process_has_it(tmp_path: Path):
    root = make_vm(tmp_path)
    hold(root, 71, "/dev/vfio/2")
    hold(root, 72, "/dev/null")
    assert holders(root) == {71: "python train.py"}
    (finding,) = check_tpu(device="tpu", root=root, is_installed=lambda _: True)
    assert finding.id == "tpu_held"
    assert finding.fix.endswith("kill 71")


def test_a_lock_file_that_was_left(tmp_path: Path):
    root = make_vm(tmp_path)
    (root / "tmp").mkdir()
    (root / "tmp/libtpu_lockfile").touch()
    assert ids(root) == [("tpu_lock_left", "warning")]


def test_values_of_tpu_info():
    first, second = parse_tpu_info(TPU_INFO)
    assert (first.index, first.utilization, first.tensor_active) == (0, 1.0, pytest.approx(0.136))
    assert first.memory_used_bytes == round(18.45 * 1024**3)
    assert (second.utilization, second.memory_total_bytes) == (0.125, round(31.25 * 1024**3))
    boxes = TPU_INFO.replace("|", "│")  # as rich draws tables on a terminal
    assert parse_tpu_info(boxes) == [first, second]
    assert parse_tpu_info(re.sub(r"100\.00%", "N/A", TPU_INFO))[0].utilization is None
    assert parse_tpu_info("No TPU chips found.") == []


def run_sampler(root: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> TpuSampler:
    program = root / "bin/tpu-info"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    sampler = TpuSampler(root)
    assert sampler.sample() == []  # starts the program, and does not wait
    assert sampler._process is not None
    sampler._process.wait(60)
    return sampler


def test_a_program_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "output").write_text(TPU_INFO)
    sampler = run_sampler(make_vm(tmp_path), f"cat {tmp_path}/output", monkeypatch)
    assert [sample.index for sample in sampler.sample()] == [0, 1]
    assert sampler.reason is None
    assert sampler.sample() == []  # not the same values again
    assert sampler._process is None  # nor a new run before its time


def test_a_program_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sampler = run_sampler(make_vm(tmp_path), "echo no libtpu; exit 3", monkeypatch)
    assert sampler.sample() == []
    assert sampler.reason == "tpu-info has no values (exit code 3): no libtpu"


def test_a_program_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = make_vm(tmp_path) / "tpu-info"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(telemetry, "TIMEOUT_S", -1.0)
    sampler = TpuSampler(tmp_path)
    sampler.sample()
    assert sampler.sample() == []
    assert "did not end" in str(sampler.reason)
    assert sampler._process is None


def launch(**request: object) -> tuple[dict, list[str]]:
    place = open_place("k8s")
    options = {"run_dir": "gs://bucket/run", "image": "registry.example/stoker:1", **request}
    spec = make_spec(
        LaunchRequest(**options),  # type: ignore[arg-type]
        place, PlaceOptions(), data="gs://bucket/data", settings=("--epochs", "3"), on_cpu=False,
    )  # fmt: skip
    warnings = check_launch(spec, place)
    (document,) = yaml.safe_load_all(Kubernetes().render(spec))
    return document, warnings


@pytest.mark.parametrize(("name", "chips", "topology"), [("v6e-8", 8, "2x4"), ("v5e-1", 1, "1x1")])
def test_a_job_on_gke(name: str, chips: int, topology: str):
    job, warnings = launch(tpu=name, spot=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["google.com/tpu"] == chips
    assert not any("nvidia" in key for key in container["resources"]["limits"])
    kind = {"v6e-8": "tpu-v6e-slice", "v5e-1": "tpu-v5-lite-podslice"}[name]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": kind,
        "cloud.google.com/gke-tpu-topology": topology,
        "cloud.google.com/gke-spot": "true",
    }
    assert {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert container["args"][:6] == ["train", "gs://bucket/data", "--epochs", "3", "--device", "tpu"]
    assert any("would be idle" in warning for warning in warnings) == (chips > 1)
    validate = pytest.importorskip("kubernetes_validate", reason="uv pip install kubernetes-validate").validate
    for version in ("1.29", "1.37"):
        validate(job, version, strict=True)


@pytest.mark.parametrize(
    "request_", [{"tpu": "v6e-16"}, {"tpu": "v6e-1", "gpu": "nvidia-l4"}, {"tpu": "v6e-1", "devices": 4}]
)
def test_what_a_launch_refuses(request_: dict):
    with pytest.raises(UsageError):
        launch(**request_)


def test_other_places_have_no_tpus():
    place = open_place("slurm")
    with pytest.raises(UsageError, match="has no TPUs"):
        make_spec(LaunchRequest(tpu="v6e-1"), place, PlaceOptions(), data="demo", settings=(), on_cpu=False)


def test_the_price_of_a_slice_is_that_of_its_chips():
    for tpu in listed_slices().values():
        assert tpu.name == f"{tpu.chip}-{tpu.chips}"
        assert tpu.machine_type.endswith(f"-{tpu.chips}t")
        assert tpu.price == pytest.approx(tpu.chips * {"v5e": 1.2, "v6e": 2.7}[tpu.chip])
