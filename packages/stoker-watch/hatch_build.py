"""Copies plotly.min.js and its license out of plotly, which need not be installed where stoker-watch is."""

import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    """The hook for wheels and editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        plotly = metadata.distribution("plotly")
        for file in plotly.files or ():
            if file.name == "plotly.min.js":
                shutil.copyfile(str(file.locate()), Path(self.root, "stoker_watch/report/page/plotly.min.js"))
            elif file.name.startswith("LICENSE"):
                shutil.copyfile(str(file.locate()), Path(self.root, "LICENSE.plotly"))
