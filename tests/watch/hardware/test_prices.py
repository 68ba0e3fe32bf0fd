"""List prices: what is looked up by machine, by GPU, and what is not guessed."""

import pytest

from stoker_watch.hardware import prices
from stoker_watch.hardware.prices import (
    gpu_price_range,
    machine_price,
    match_gpu_name,
    price_from_environment,
    user_price,
)


@pytest.mark.parametrize(("machine", "gpus", "each"), [
    ("p3.2xlarge", 0, 3.06), ("p3.16xlarge", 0, 3.06), ("g4dn.12xlarge", 0, 0.978), ("P4D.24xlarge", 0, 2.744705),
    ("a2-highgpu-8g", 0, 3.673385), ("projects/1/machineTypes/g2-standard-4", 0, 0.706832),
    ("n1-standard-8", 1, 0.379996 + 0.35), ("n1-highmem-8", 2, 0.473212 / 2 + 0.35),
])  # fmt: skip
def test_known_machine_has_one_price(machine: str, gpus: int, each: float) -> None:
    """Computed by hand from the clouds' price pages."""
    found = machine_price(machine, "T4", gpus)
    assert found is not None
    assert found.low == found.high == pytest.approx(each, rel=1e-5)
    assert found.is_exact
    assert prices.AS_OF in found.source
    assert "list price" in found.source


@pytest.mark.parametrize("machine", ["", "c5.large", "p3.3xlarge", "n1-standard-8", "a2-highgpu-3g", "H100", "p3"])
def test_unknown_machine_has_no_price(machine: str) -> None:
    assert machine_price(machine) is None


def test_the_cheapest_machine_costs_more_with_more_gpus() -> None:
    """Catches a slip in the table; all sizes of an a2 or a3 cost the same for a GPU."""
    aws, gcp = prices._LIST.machines["AWS"], prices._LIST.machines["GCP"]
    for family in {name.partition(".")[0] for name in aws}:
        cheapest: dict[int, float] = {}
        for machine in (machine for name, machine in aws.items() if name.startswith(family + ".")):
            cheapest[machine.gpus] = min(machine.price, cheapest.get(machine.gpus, machine.price))
        in_order = [cheapest[count] for count in sorted(cheapest)]
        assert in_order == sorted(set(in_order))
    for family in ("a2-highgpu", "a2-ultragpu", "a3-highgpu"):
        each = [machine.price / machine.gpus for name, machine in gcp.items() if name.startswith(family)]
        assert max(each) == pytest.approx(min(each), rel=1e-3)


def test_a_g2_costs_what_its_cores_and_its_gpus_cost() -> None:
    for name, machine in prices._LIST.machines["GCP"].items():
        if name.startswith("g2-standard-"):
            cores = int(name.rpartition("-")[2])
            assert machine.price == pytest.approx(cores / 4 * 0.146792036 + machine.gpus * 0.56004024, abs=1e-6), name


@pytest.mark.parametrize(("name", "gib", "known"), [
    ("NVIDIA A100-SXM4-40GB", 40, "A100-40"), ("NVIDIA A100-SXM4-80GB", 80, "A100-80"),
    ("NVIDIA A100 80GB PCIe", None, "A100-80"), ("Tesla T4", 15, "T4"), ("Tesla V100-SXM2-16GB", 16, "V100"),
    ("NVIDIA L4", 23, "L4"), ("NVIDIA L40S", 45, "L40S"), ("NVIDIA A10G", 23, "A10G"),
    ("NVIDIA H100 80GB HBM3", 80, "H100"),
    ("NVIDIA T400", 4, None), ("NVIDIA L40", 45, None), ("NVIDIA GeForce RTX 4090", 24, None), ("", None, None),
])  # fmt: skip
def test_names_of_gpus(name: str, gib: int | None, known: str | None) -> None:
    assert match_gpu_name(name, None if gib is None else gib * 2**30) == known


def environment(name: str, machine: object = None, count: int = 1) -> dict[str, object]:
    return {"machine_type": machine, "gpu": {"gpus": [{"name": name, "memory_bytes": 15 * 2**30}] * count}}


def test_price_of_an_environment() -> None:
    exact = price_from_environment(environment("Tesla T4", "g4dn.xlarge"))
    assert exact is not None
    assert exact.low == exact.high == 0.526
    both, gcp, aws = (
        price_from_environment(environment("Tesla T4", machine))
        for machine in (None, "Google Compute Engine", "HVM domU")
    )
    assert both is not None
    assert gcp is not None
    assert aws is not None
    assert both.low <= min(gcp.low, aws.low) < max(gcp.high, aws.high) <= both.high
    assert "AWS" in aws.source
    assert "GCP" not in aws.source
    assert gpu_price_range("T4", "GCP") == gcp
    with_n1 = price_from_environment(environment("Tesla T4", "n1-standard-8", count=4))
    assert with_n1 is not None
    assert with_n1.is_exact


ODD: list[dict[str, object]] = [
    {}, {"gpu": None}, {"gpu": []}, {"gpu": {"gpus": []}}, {"gpu": {"gpus": [None]}}, {"gpu": {"gpus": "T4"}},
    {"machine_type": 3}, environment("NVIDIA X9000"),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_unknown_environment_has_no_price(odd: dict[str, object]) -> None:
    assert price_from_environment(odd) is None


def test_user_price() -> None:
    assert user_price(0.0, "--price-per-device-hour") is None
    price = user_price(3.6, "--price-per-device-hour")
    assert price is not None
    assert price.cost(1000.0) == (1.0, 1.0)
