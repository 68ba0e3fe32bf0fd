"""The lookup of a machine in the list prices of GCP and AWS (`knowledge/prices.toml`).

A list price is not a bill: no discount, no commitment, no disk, no network; one region. The user can set the real price
(`--price-per-device-hour`). Spot prices are not here: they change daily to every few minutes, by zone. Nothing here
uses the network: `recording/telemetry/environment.py` records the machine type.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker_watch.knowledge import read_toml


class _ListedMachine(msgspec.Struct, frozen=True, array_like=True):
    gpu: str
    gpus: int
    price: float
    """That of the whole machine, per hour."""


class _N1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of an n1 machine of GCP, to which GPUs are added."""

    core: float
    gib: float
    gib_per_core: dict[str, float]
    gpus: dict[str, float]


class _PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    as_of: str
    currency: str
    regions: dict[str, str]
    machines: dict[str, dict[str, _ListedMachine]]
    """Cloud → machine type → machine."""
    n1: _N1


_LIST = msgspec.convert(read_toml("prices.toml"), _PriceList)
AS_OF, CURRENCY, REGIONS = _LIST.as_of, _LIST.currency, _LIST.regions
_GPUS = {machine.gpu for machines in _LIST.machines.values() for machine in machines.values()} | _LIST.n1.gpus.keys()
"""Names in this table. Except for the two A100, each is a word in the driver's name of the GPU."""
_CLOUD_BY_FIRMWARE = (("Google", "GCP"), ("HVM domU", "AWS"), ("Amazon", "AWS"))
"""Firmware strings that name the cloud but not the machine type; older AWS machines are Xen."""


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Price per device-hour, from `low` to `high`; both are equal when the machine is known."""

    low: float
    high: float
    currency: str = ""
    """Empty for a price that the user gave."""
    source: str
    """Where the price comes from, for users."""

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def cost(self, device_s: float) -> tuple[float, float]:
        """Minimum and maximum cost of `device_s` device-seconds."""
        return device_s * self.low / 3600, device_s * self.high / 3600


def user_price(price_per_device_hour: float, source: str) -> Price | None:
    """A price given by the user; None for 0, which means unknown."""
    if price_per_device_hour <= 0:
        return None
    return Price(low=price_per_device_hour, high=price_per_device_hour, source=source)


def price_from_environment(environment: Mapping[str, Any]) -> Price | None:
    """The list price of the machine of a run, by its environment.json: by machine type if that is known, else the range
    over all machines of the table with such GPUs. None: no GPU, or a GPU that is not in the table."""
    gpus = list_gpus(environment)
    first_gpu = gpus[0] if gpus and isinstance(gpus[0], dict) else {}
    memory = first_gpu.get("memory_bytes")
    gpu_name = match_gpu_name(str(first_gpu.get("name") or ""), memory if isinstance(memory, int) else None)
    machine_type = environment.get("machine_type")
    if isinstance(machine_type, str) and (price := machine_price(machine_type, gpu_name, len(gpus))) is not None:
        return price
    cloud = next((cloud for word, cloud in _CLOUD_BY_FIRMWARE if word in str(machine_type)), None)
    return None if gpu_name is None else gpu_price_range(gpu_name, cloud)


def list_gpus(environment: Mapping[str, Any]) -> list[Any]:
    """What environment.json says of each GPU, which may be damaged."""
    gpu = environment.get("gpu")
    gpus = gpu.get("gpus") if isinstance(gpu, dict) else None
    return gpus if isinstance(gpus, list) else []


def machine_price(machine_type: str, gpu: str | None = None, gpus: int = 0) -> Price | None:
    """The list price per device of a machine type, `p3.8xlarge` or `a2-highgpu-1g`. gpu, gpus: the GPUs that were added
    to an `n1-…`. None: not in the table."""
    machine_type = machine_type.strip().lower().rpartition("/")[2]
    for cloud, machines in _LIST.machines.items():
        if (machine := machines.get(machine_type)) is not None:
            return _list_price(cloud, machine_type, machine.price / machine.gpus)
    n1 = re.fullmatch(r"n1-(standard|highmem|highcpu)-(\d{1,2})", machine_type)
    if n1 and gpu in _LIST.n1.gpus and gpus > 0:
        host = int(n1[2]) * _n1_price_per_core(n1[1])
        return _list_price("GCP", f"{machine_type} + {gpus} × {gpu}", host / gpus + _LIST.n1.gpus[gpu])
    return None


def _n1_price_per_core(family: str) -> float:
    return _LIST.n1.core + _LIST.n1.gib_per_core[family] * _LIST.n1.gib


def gpu_price_range(gpu: str, cloud: str | None = None) -> Price | None:
    """The range of list prices per device over all machines of the table with such GPUs (for an n1, 4 to 16 cores per
    GPU). cloud: only AWS or GCP; None: both."""
    prices = {
        name: [machine.price / machine.gpus for machine in machines.values() if machine.gpu == gpu]
        for name, machines in _LIST.machines.items()
        if cloud in (None, name)
    }
    if "GCP" in prices and gpu in _LIST.n1.gpus:
        prices["GCP"] += [_LIST.n1.gpus[gpu] + cores * _n1_price_per_core("standard") for cores in (4, 16)]
    all_prices = [price for cloud_prices in prices.values() for price in cloud_prices]
    if not all_prices:
        return None
    regions_text = " and ".join(f"{name} {REGIONS[name]}" for name, cloud_prices in prices.items() if cloud_prices)
    source = f"list prices of machines with {gpu} GPUs, {regions_text}, on demand, as of {AS_OF}"
    return Price(low=min(all_prices), high=max(all_prices), currency=CURRENCY, source=source)


def match_gpu_name(name: str, memory_bytes: int | None = None) -> str | None:
    """The name of a GPU in this table, by the driver's name; the two A100 differ by memory. None: not in the table."""
    words = re.split(r"[^A-Za-z0-9]+", name.upper())
    if "A100" in words:
        return "A100-80" if "80GB" in words or (memory_bytes or 0) > 60 * 2**30 else "A100-40"
    return next((gpu for gpu in _GPUS if gpu in words), None)


def _list_price(cloud: str, machine_type: str, price: float) -> Price:
    source = f"list price of {machine_type}, {cloud} {REGIONS[cloud]}, on demand, as of {AS_OF}"
    return Price(low=price, high=price, currency=CURRENCY, source=source)
