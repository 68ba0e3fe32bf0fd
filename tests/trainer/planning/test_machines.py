"""The table of machines, the user's file of prices, and how a machine is named."""

from pathlib import Path

import pytest
import torch

from stoker.hardware.device import Device
from stoker.knowledge import read_toml
from stoker.planning.machines import (
    GPUS,
    THIS_MACHINE,
    Machine,
    choose_machines,
    describe_prices,
    links,
    listed_machines,
    read_prices,
    this_machine,
)
from stoker_watch.errors import ConfigError, UsageError
from stoker_watch.hardware import prices
from tests.trainer.planning.jobs import machine

LISTED = listed_machines()


@pytest.mark.parametrize("listed", LISTED.values(), ids=LISTED)
def test_a_row_is_complete(listed: Machine) -> None:
    assert listed.accelerator in GPUS
    assert listed.source
    assert (listed.gpus == 1) == (listed.link == "none")
    assert listed.link in links()
    assert 2 <= listed.vcpus / listed.gpus <= 64
    assert 10 <= listed.memory_gib / listed.gpus <= 600
    assert 1 <= listed.network_gbit <= 3600
    assert listed.price is not None
    assert listed.spot_price is None, "it has no date"


def test_gpus_are_those_of_the_price_table() -> None:
    keys = {"V100": "v100-", "A10G": "a10g", "H100": "h100"}
    for name, row in prices._LIST.machines["AWS"].items():
        listed = LISTED[name]
        assert listed.gpus == row.gpus
        assert listed.accelerator.startswith(keys.get(row.gpu, row.gpu.lower())), listed.name
        assert listed.price == pytest.approx(row.price)
    for name, row in prices._LIST.machines["GCP"].items():
        assert (LISTED[name].accelerator, LISTED[name].gpus) == (row.gpu.lower(), row.gpus)
        assert LISTED[name].price == pytest.approx(row.price)


def test_a_gpu_that_is_added_to_an_n1_costs_its_price() -> None:
    """n1-standard-8: 0.379996 an hour; a T4 0.35, a V100 2.48 (docs of GCP)."""
    assert LISTED["n1-standard-8+t4"].price == pytest.approx(0.729996, rel=1e-4)
    assert LISTED["n1-standard-32+4xv100"].price == pytest.approx(4 * 0.379996 + 4 * 2.48, rel=1e-4)


def test_links_are_ordered_as_their_generations() -> None:
    speed = {key: link.gb_per_s.expected for key, link in links().items()}
    assert speed["nvlink4"] > speed["nvlink3"] > speed["nvlink2"] > speed["pcie4"] > speed["pcie3"]
    assert all(link.gb_per_s.low <= link.gb_per_s.expected <= link.gb_per_s.high for link in links().values())


@pytest.mark.parametrize(("name", "expected"), [
    ("a2-highgpu-1g", "a2-highgpu-1g"), ("A2-HIGHGPU-1G", "a2-highgpu-1g"), ("G5.xlarge", "g5.xlarge"),
    ("projects/1/zones/z/machineTypes/g2-standard-8", "g2-standard-8"), ("n1-standard-16+2xT4", "n1-standard-16+2xt4"),
])  # fmt: skip
def test_a_machine_is_found_by_its_name(name: str, expected: str) -> None:
    assert [m.name for m in choose_machines([name, expected], machines=LISTED)] == [expected]


@pytest.mark.parametrize(("name", "near", "choice"), [
    ("a2-highgpu-1", "a2-highgpu-1g", "a2-ultragpu-1g"), ("g2-standard-6", "g2-standard-", "g2-standard-96"),
    ("p4d.24xl", "p4d.24xlarge", "p4d.24xlarge"), ("tpu-v4", "", "a2-highgpu-1g"),
])  # fmt: skip
def test_an_unknown_machine_names_the_nearest(name: str, near: str, choice: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_machines([name], machines=LISTED)
    assert near in str(caught.value)
    assert choice in caught.value.choices
    assert "--prices" in str(caught.value)


def test_without_names_all_are_chosen() -> None:
    own = machine(name=THIS_MACHINE)
    assert [m.name for m in choose_machines([], machines=LISTED, this=own)] == [THIS_MACHINE, *LISTED]
    assert [m.name for m in choose_machines([], machines=LISTED)] == list(LISTED)


def test_this_machine() -> None:
    own = this_machine(Device(torch.device("cpu")), 0.0)
    assert own is not None
    assert (own.accelerator, own.gpus, own.price) == ("cpu", 1, None)
    assert own.vcpus >= 1
    assert own.memory_gib > 0.1


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.toml"
    path.write_text(text)
    return path


def test_the_users_prices(tmp_path: Path) -> None:
    path = write(tmp_path, """
["a2-highgpu-1g"]
price = 2.5
[box]
accelerator = "l40s"
gpus = 2
vcpus = 32
memory_gib = 256
price = 3
spot_price = 1.25
""")  # fmt: skip
    table = read_prices(path, LISTED)
    assert table["a2-highgpu-1g"].price == 2.5
    assert table["a2-highgpu-1g"].vcpus == 12
    assert table["a2-highgpu-1g"].source == str(path)
    box = table["box"]
    assert (box.accelerator, box.gpus, box.link, box.price) == ("l40s", 2, "pcie4", 3)
    assert box.spot_price is not None
    assert box.spot_price.expected == 1.25
    assert LISTED["a2-highgpu-1g"].price != 2.5
    assert len(table) == len(LISTED) + 1


@pytest.mark.parametrize(("text", "words"), [
    ("[a2-highgpu-1g]\nprce = 2.5\n", "unknown field `prce`"),
    ("[a2-highgpu-1g]\nprice = '2.5'\n", "got `str` - at `$.price`"),
    ("[a2-highgpu-1g]\n\nprice = -1\n", ">= 0.0 - at `$.price`"),
    ("[a2-highgpu-1g]\nprice = nan\n", "at `$.price`"),
    ("[a2-highgpu-1g]\nprice = true\n", "got `bool`"),
    ("[a2-highgpu-1g]\ngpus = 1.5\n", "at `$.gpus`"),
    ("[a2-highgpu-1g]\nvcpus = 0\n", ">= 1"),
    ("[a2-highgpu-1g]\nlink = 3\n", "at `$.link`"),
    ("[p3.2xlarge]\nprice = 2\n", "in quotes"),
    ("price = 2\n", "[price] is not a machine"),
    ("# mine\n[box]\nprice = 3\n", "lacks accelerator, gpus, vcpus, memory_gib"),
    ("[a2-highgpu-9g]\nprice = 3\n", "a2-highgpu-"),
    ("[a2-highgpu-1g]\naccelerator = 'a100'\n", "a100-40"),
    ("[a2-highgpu-1g]\nlink = 'infiniband'\n", "nvlink3"),
    ("[this]\nprice = 1\n", "--price-per-device-hour"),
    ("[a2-highgpu-1g\nprice = 3\n", "at line 1"),
])  # fmt: skip
def test_an_error_in_the_file_names_machine_and_key(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_prices(path, LISTED)
    assert caught.value.location == str(path)
    assert words in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_prices(tmp_path / "none.toml", LISTED)


PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
START, END = (
    "<!-- machines: python -m tests.trainer.planning.test_machines writes them -->\n",
    "<!-- end of machines -->\n",
)


def machines_table() -> str:
    """The table of docs/plan.md."""
    lines = ["| machine | GPUs | vCPU | memory, GiB | local SSD, GB | network, Gbit/s | link | $/h |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for m in LISTED.values():
        price = "n/a" if m.price is None else f"{m.price:.4g}"
        link = "" if m.gpus == 1 else m.link
        lines.append(
            f"| {m.name} | {m.gpus} × {m.accelerator} | {m.vcpus:g} | {m.memory_gib:g} | {m.ssd_gb:g} "
            f"| {m.network_gbit:g} | {link} | {price} |"
        )
    sources = [f"{key.upper()}: {text}" for key, text in read_toml("machines.toml")["sources"].items()]
    lines += [
        "",
        f"Prices: {describe_prices()}. Sources of the rest:",
        *(f"- {s}" for s in sources),
    ]
    lines += ["", "| link | GB/s, low to high | source |", "|---|---|---|"]
    for key, link in links().items():
        if key != "none":
            speed = link.gb_per_s
            lines.append(f"| {key}: {link.name} | {speed.low:g}, {speed.expected:g}, {speed.high:g} | {link.source} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert START + machines_table() + END in text, "python -m tests.trainer.planning.test_machines writes it"


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + machines_table() + END + rest.split(END)[1])
