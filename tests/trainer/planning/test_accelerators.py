"""The table of accelerators, and the present CPU."""

import pytest
import torch

from stoker.hardware.device import Device
from stoker.planning.machines import GPUS, find_accelerator, identify, measure_cpu
from stoker_watch.errors import UsageError

DRIVER_NAMES = {
    "Tesla T4": "t4", "Tesla P100-PCIE-16GB": "p100", "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla V100-PCIE-16GB": "v100-16",
    "Tesla V100-SXM2-32GB": "v100-32", "Tesla V100-SXM3-32GB-H": "v100-32", "NVIDIA A10G": "a10g", "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s", "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA A100 80GB PCIe": "a100-80", "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA GeForce RTX 5090": "rtx5090",
}  # fmt: skip
"""As nvidia-smi prints them."""


def test_every_gpu_of_the_table_has_a_name_that_the_driver_reports() -> None:
    assert {name: getattr(identify(name), "key", None) for name in DRIVER_NAMES} == DRIVER_NAMES
    assert set(DRIVER_NAMES.values()) == set(GPUS)


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L40", "NVIDIA A10", "NVIDIA GH200 480GB", "Quadro RTX 4000", "NVIDIA GeForce RTX 3090 Ti", "Tesla P4",
     "NVIDIA T400", "NVIDIA GeForce RTX 4090 D", "AMD Instinct MI300X", ""],
)  # fmt: skip
def test_other_gpus_are_not_taken_for_one_of_them(name: str) -> None:
    assert identify(name) is None


@pytest.mark.parametrize("key", GPUS)
def test_figures_are_plausible(key: str) -> None:
    gpu = GPUS[key]
    assert gpu.key == key
    assert gpu.source
    assert 1e12 < gpu.flops["fp32"] < 1e15
    assert 1e11 < gpu.bandwidth < 1e13
    assert 14 * 2**30 < gpu.memory_bytes < 200 * 2**30
    if "fp16" not in gpu.flops:  # no tensor cores
        assert gpu.precision() == "fp32"
        return
    assert gpu.flops["fp16"] >= 1.9 * gpu.flops["fp32"]
    # Operations per byte at which arithmetic and memory take equally long: NVIDIA's GPUs since Volta have 75 to 410.
    assert 60 < gpu.flops["fp16"] / gpu.bandwidth < 450
    assert gpu.precision() == ("bf16" if "tf32" in gpu.flops else "fp16")


def test_convolutions_in_fp32_use_tf32_and_matrix_products_do_not() -> None:
    a100, t4 = GPUS["a100-40"], GPUS["t4"]
    assert a100.peak_flops("fp32", is_convolution=True) == a100.flops["tf32"]
    assert a100.peak_flops("fp32", is_convolution=False) == a100.flops["fp32"]
    assert t4.peak_flops("fp32", is_convolution=True) == t4.flops["fp32"]
    assert t4.peak_flops("fp16", is_convolution=False) == t4.flops["fp16"]


def test_an_unknown_accelerator_is_refused_with_the_choices() -> None:
    assert find_accelerator("H100") is GPUS["h100"]
    with pytest.raises(UsageError) as caught:
        find_accelerator("h300")
    assert "a100-40" in str(caught.value)


def test_the_present_cpu_is_measured() -> None:
    cpu = measure_cpu()
    assert cpu.matches(Device(torch.device("cpu")).name)
    assert cpu.threads == torch.get_num_threads()
    assert cpu.flops["fp32"] > 1e8
    assert cpu.bandwidth > 1e8
    assert cpu.memory_bytes > 2**28
