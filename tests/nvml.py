"""A stub of NVIDIA's driver library without a GPU, for tests and `benchmarks/diagnosis/`: compilation and scenes.

    scene = Scene(folder / "scene").say("-1", count=1).say("0", utilization=97, memory_used=10**9)
    subprocess.Popen(command, env=os.environ | scene.variables(driver_library(folder)))
    scene.at(5.0).say("0", xid=79)

The values are simulated and were never compared with a real GPU: published numbers from it must say so. The variables
are for the watcher only, before it starts; CUDA_VISIBLE_DEVICES is not changed. The keys: `nvml_stub.c`.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("watch") / "recording/nvml_stub.c"
NAME = "libnvidia-ml.so.1"


def driver_library(folder: Path) -> Path | None:
    """The folder of a libnvidia-ml.so.1 that answers from a file; None without Linux or a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    warnings = ["-Wall", "-Wextra", "-Werror"]
    target = folder / NAME
    command = [compiler, "-O1", *warnings, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", target, SOURCE, "-lpthread"]
    subprocess.run(command, check=True)
    return folder


class Scene:
    """The file that the stub reads; lines are appended meanwhile. Seconds count from the creation of this object."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.path = path
        self.start_s = time.time()
        self._at = ""
        path.write_text(text)

    def at(self, after_s: float) -> "Scene":
        """The following lines are valid from then on."""
        self._at = f"@{after_s:.3f} "
        return self

    def say(self, gpu: str | int, /, **values: object) -> "Scene":
        """gpu: a number, "*", "-1" (the driver), "0.1" (a slice). A double underscore in a key is a dot: gpm__2."""
        lines = [f"{self._at}{gpu} {key.replace('__', '.')} {value}\n" for key, value in values.items()]
        with self.path.open("a") as file:
            file.write("".join(lines))
        return self

    def variables(self, library: Path) -> dict[str, str]:
        """Variables for the environment of a process."""
        known = os.environ.get("LD_LIBRARY_PATH")
        folders = f"{library}:{known}" if known else str(library)
        return {"LD_LIBRARY_PATH": folders, "NVML_STUB": str(self.path), "NVML_STUB_START": repr(self.start_s)}
