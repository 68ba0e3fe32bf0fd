"""Where the programs are that stoker is measured beside: a Python of their own, made by `make peers` from peers.txt.

A peer that is not there, or does not start, is a row of n/a with the reason; nothing is installed from here.
"""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "STOKER_PEERS_PYTHON"
IMPORT_TIMEOUT_S = 60.0


def interpreter() -> Path:
    """The peers' Python, whether it is there or not."""
    return Path(os.environ.get(VARIABLE) or ROOT / ".peers" / "bin" / "python")


def missing(*modules: str) -> str | None:
    """Why a peer that needs these modules cannot be measured; None when it can. Each is imported, in one process."""
    python = interpreter()
    if not python.exists():
        return f"there is no {_shown(python)} (`make peers` makes it)"
    code = "\n".join(f"import {module}" for module in modules)
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"importing {', '.join(modules)} takes more than {IMPORT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def versions(*distributions: str) -> dict[str, str]:
    """Versions of what is installed for the peers, those that are there."""
    code = (
        "import sys\nfrom importlib.metadata import PackageNotFoundError, version\nfor name in sys.argv[1:]:\n"
        "    try:\n        print(name, version(name))\n    except PackageNotFoundError:\n        pass\n"
    )
    if not interpreter().exists():
        return {}
    done = subprocess.run([interpreter(), "-c", code, *distributions], stdout=subprocess.PIPE, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


def _shown(python: Path) -> str:
    return str(python.relative_to(ROOT)) if python.is_relative_to(ROOT) else f"Python where ${VARIABLE} says"
