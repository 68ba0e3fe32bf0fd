"""List prices of GPU machines of GCP and AWS, with their date, and the lookup of a machine.

A list price is not a bill: no discount, no commitment, no disk, no network; one region. The user can set the real price
(`--price-per-device-hour`). Spot prices are not here: they change daily to every few minutes, by zone, so what a run
was billed is in no file; `planning/machines.toml` has some of one day, for plans. Nothing here uses the network:
`profiling/telemetry/environment.py` records the machine type.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

AS_OF = "2025-06"
"""Date of the prices below, in US dollars per hour, on demand, Linux. AWS: aws.amazon.com/ec2/pricing, p4 and p5 after
the price cut of June 2025. GCP: cloud.google.com/compute/all-pricing and gpus-pricing. Each row was compared with
copies of the price lists in public repositories; copies of 2026 still have the same prices."""
CURRENCY = "USD"
REGIONS = {"AWS": "us-east-1", "GCP": "us-central1"}

_AWS: dict[str, tuple[str, dict[str, tuple[int, float]]]] = {
    "p3": ("V100", {"2xlarge": (1, 3.06), "8xlarge": (4, 12.24), "16xlarge": (8, 24.48)}),
    "p3dn": ("V100", {"24xlarge": (8, 31.212)}),
    "p4d": ("A100-40", {"24xlarge": (8, 21.957642)}),
    "p4de": ("A100-80", {"24xlarge": (8, 27.44705)}),
    "p5": ("H100", {"4xlarge": (1, 6.88), "48xlarge": (8, 55.04)}),
    "g4dn": ("T4", {"xlarge": (1, 0.526), "2xlarge": (1, 0.752), "4xlarge": (1, 1.204), "8xlarge": (1, 2.176),
                    "12xlarge": (4, 3.912), "16xlarge": (1, 4.352), "metal": (8, 7.824)}),
    "g5": ("A10G", {"xlarge": (1, 1.006), "2xlarge": (1, 1.212), "4xlarge": (1, 1.624), "8xlarge": (1, 2.448),
                    "12xlarge": (4, 5.672), "16xlarge": (1, 4.096), "24xlarge": (4, 8.144), "48xlarge": (8, 16.288)}),
    "g6": ("L4", {"xlarge": (1, 0.8048), "2xlarge": (1, 0.9776), "4xlarge": (1, 1.3232), "8xlarge": (1, 2.0144),
                  "12xlarge": (4, 4.6016), "16xlarge": (1, 3.3968), "24xlarge": (4, 6.6752), "48xlarge": (8, 13.3504)}),
    "g6e": ("L40S", {"xlarge": (1, 1.861), "2xlarge": (1, 2.24208), "4xlarge": (1, 3.00424), "8xlarge": (1, 4.52856),
                     "12xlarge": (4, 10.49264), "16xlarge": (1, 7.57719), "24xlarge": (4, 15.06559),
                     "48xlarge": (8, 30.13118)}),
}  # fmt: skip
"""Family → (GPU, size → (number of GPUs, price of the machine))."""

_GCP: dict[str, tuple[str, int, float]] = {
    "a2-highgpu-1g": ("A100-40", 1, 3.673385), "a2-highgpu-2g": ("A100-40", 2, 7.34677),
    "a2-highgpu-4g": ("A100-40", 4, 14.69354), "a2-highgpu-8g": ("A100-40", 8, 29.38708),
    "a2-megagpu-16g": ("A100-40", 16, 55.739504),
    "a2-ultragpu-1g": ("A100-80", 1, 5.068798), "a2-ultragpu-2g": ("A100-80", 2, 10.137596),
    "a2-ultragpu-4g": ("A100-80", 4, 20.275192), "a2-ultragpu-8g": ("A100-80", 8, 40.550383),
    "a3-highgpu-1g": ("H100", 1, 11.06125), "a3-highgpu-2g": ("H100", 2, 22.1225),
    "a3-highgpu-4g": ("H100", 4, 44.245), "a3-highgpu-8g": ("H100", 8, 88.49),
    "a3-megagpu-8g": ("H100", 8, 92.21427),
    "g2-standard-4": ("L4", 1, 0.706832), "g2-standard-8": ("L4", 1, 0.853624),
    "g2-standard-12": ("L4", 1, 1.000416), "g2-standard-16": ("L4", 1, 1.147208),
    "g2-standard-24": ("L4", 2, 2.000832), "g2-standard-32": ("L4", 1, 1.734377),
    "g2-standard-48": ("L4", 4, 4.001665), "g2-standard-96": ("L4", 8, 8.003331),
}  # fmt: skip
"""Machine type → (GPU, number of GPUs, price of the machine); a3-highgpu with local SSDs. A g2 costs 0.146792 for four
cores with 16 GiB, and 0.560040 per L4."""

_N1_CORE, _N1_GIB = 0.031611, 0.004237
_N1_GIB_PER_CORE = {"standard": 3.75, "highmem": 6.5, "highcpu": 0.9}
_N1_GPU = {"T4": 0.35, "V100": 2.48, "P100": 1.46, "P4": 0.60}
"""Price per GPU that is added to an n1 machine."""

_GPU_BY_WORD = (
    ("H100", "H100"), ("L40S", "L40S"), ("A10G", "A10G"), ("V100", "V100"), ("P100", "P100"),
    ("L4", "L4"), ("T4", "T4"), ("P4", "P4"),
)  # fmt: skip
"""(word in the driver's name of a GPU, name in this table)."""
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
    gpu = environment.get("gpu")
    gpus = gpu.get("gpus") if isinstance(gpu, dict) else None
    first_gpu = gpus[0] if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else {}
    memory = first_gpu.get("memory_bytes")
    gpu_name = match_gpu_name(str(first_gpu.get("name") or ""), memory if isinstance(memory, int) else None)
    count = len(gpus) if isinstance(gpus, list) else 0
    machine_type = environment.get("machine_type")
    if isinstance(machine_type, str) and (price := machine_price(machine_type, gpu_name, count)) is not None:
        return price
    cloud = next((cloud for word, cloud in _CLOUD_BY_FIRMWARE if word in str(machine_type)), None)
    return None if gpu_name is None else gpu_price_range(gpu_name, cloud)


def machine_price(machine_type: str, gpu: str | None = None, gpus: int = 0) -> Price | None:
    """The list price per device of a machine type, `p3.8xlarge` or `a2-highgpu-1g`. gpu, gpus: the GPUs that were added
    to an `n1-…`. None: not in the table."""
    machine_type = machine_type.strip().lower().rpartition("/")[2]
    if machine_type in _GCP:
        _, count, price = _GCP[machine_type]
        return _list_price("GCP", machine_type, price / count)
    family, _, size = machine_type.partition(".")
    if family in _AWS and size in _AWS[family][1]:
        count, price = _AWS[family][1][size]
        return _list_price("AWS", machine_type, price / count)
    n1 = re.fullmatch(r"n1-(standard|highmem|highcpu)-(\d{1,2})", machine_type)
    if n1 and gpu in _N1_GPU and gpus > 0:
        cores = int(n1[2])
        host = cores * (_N1_CORE + _N1_GIB_PER_CORE[n1[1]] * _N1_GIB)
        return _list_price("GCP", f"{machine_type} + {gpus} × {gpu}", host / gpus + _N1_GPU[gpu])
    return None


def gpu_price_range(gpu: str, cloud: str | None = None) -> Price | None:
    """The range of list prices per device over all machines of the table with such GPUs (for an n1, 4 to 16 cores per
    GPU). cloud: only AWS or GCP; None: both."""
    prices: dict[str, list[float]] = {name: [] for name in REGIONS if cloud in (None, name)}
    if "GCP" in prices:
        prices["GCP"] += [price / count for name, count, price in _GCP.values() if name == gpu]
        if gpu in _N1_GPU:
            per_core = _N1_CORE + _N1_GIB_PER_CORE["standard"] * _N1_GIB
            prices["GCP"] += [_N1_GPU[gpu] + cores * per_core for cores in (4, 16)]
    if "AWS" in prices:
        machines = [sizes for name, sizes in _AWS.values() if name == gpu]
        prices["AWS"] += [price / count for sizes in machines for count, price in sizes.values()]
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
    return next((gpu for word, gpu in _GPU_BY_WORD if word in words), None)


def _list_price(cloud: str, machine_type: str, price: float) -> Price:
    source = f"list price of {machine_type}, {cloud} {REGIONS[cloud]}, on demand, as of {AS_OF}"
    return Price(low=price, high=price, currency=CURRENCY, source=source)
