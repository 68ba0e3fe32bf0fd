"""TPUs, as seen without torch: slices that can be rented (`knowledge/tpus.toml`), the chips of this machine, and the
processes that use them. What computes on them is in `device.py`, telemetry in `recording/telemetry/tpu.py`.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stoker_watch.errors import UsageError
from stoker_watch.knowledge import read_toml

GOOGLE_VENDOR = "0x1ae0"
MAX_COMMAND_BYTES = 4096
LOCK_FILE = "tmp/libtpu_lockfile"
"""libtpu makes it when it opens the chips, below the root."""


class TpuSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice on one host."""

    name: str
    """v6e-8: the kind of chip, and how many."""
    chip: str
    chips: int
    topology: str
    machine_type: str
    vcpus: float
    memory_gb: float
    price: float
    """US dollars per hour of the machine, on demand."""
    gke: str
    """Value of the label cloud.google.com/gke-tpu-accelerator."""
    hbm_gib: float
    """Memory of a chip."""


@cache
def listed_slices() -> dict[str, TpuSlice]:
    table = read_toml("tpus.toml")
    slices = dict(table["slices"])
    columns = slices.pop("columns")
    result = {}
    for name, values in slices.items():
        row: dict[str, Any] = dict(zip(columns, values, strict=True))
        chip = table["chips"][row["chip"]]
        result[name] = TpuSlice(name=name, **row, gke=chip["gke"], hbm_gib=chip["hbm_gib"])
    return result


def find_slice(name: str) -> TpuSlice:
    """Raises UsageError for a name that is not in the table."""
    found = listed_slices().get(name.lower())
    if found is None:
        raise UsageError(f"There is no TPU slice {name!r} on one host in the table.", choices=list(listed_slices()))
    return found


def pci_chips(root: Path = Path("/")) -> list[str]:
    """The kind of each TPU chip on the PCI bus: v6e; `unknown` for one that is not in the table."""
    kinds = {row["pci"]: kind for kind, row in read_toml("tpus.toml")["chips"].items()}
    ids = [
        (folder / "device").read_text().strip()
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if (folder / "vendor").exists() and (folder / "vendor").read_text().strip() == GOOGLE_VENDOR
    ]
    known = [kinds[id] for id in ids if id in kinds]
    return known or ["unknown"] * sum(not id.startswith("0x004") for id in ids)  # 0x0042 is Google's network card


def device_files(root: Path = Path("/")) -> list[str]:
    """What libtpu opens: /dev/vfio/0 since v5e, /dev/accel0 before."""
    found = [*(root / "dev/vfio").glob("[0-9]*"), *(root / "dev").glob("accel[0-9]*")]
    return sorted("/" + str(path.relative_to(root)) for path in found)


def holders(root: Path = Path("/")) -> dict[int, str]:
    """Process → its command, of each that has a chip open, as far as this user may see it."""
    files, found = set(device_files(root)), {}
    for process in (root / "proc").glob("[0-9]*"):
        try:
            targets = {str(link.readlink()) for link in (process / "fd").iterdir()}
            if targets & files:
                with (process / "cmdline").open("rb") as file:  # a process may forge it, of any length
                    command = file.read(MAX_COMMAND_BYTES).replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(process.name)] = command
        except OSError:  # it has ended, or belongs to another user
            continue
    return found
