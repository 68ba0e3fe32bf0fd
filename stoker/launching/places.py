"""The places that `stoker launch` knows. Each is imported when it is used."""

import importlib

from stoker.errors import UsageError, nearest
from stoker.launching.spec import Place

PLACES = {
    "local": "stoker.launching.local:Local",
    "slurm": "stoker.launching.slurm:Slurm",
    "k8s": "stoker.launching.kubernetes:Kubernetes",
    "vertex": "stoker.launching.vertex:Vertex",
    "gcp-batch": "stoker.launching.gcp_batch:GcpBatch",
    "ray": "stoker.launching.ray:Ray",
}
ALIASES = {"kubernetes": "k8s", "vertex-ai": "vertex", "batch": "gcp-batch"}


def open_place(name: str) -> Place:
    """The place of this name. Raises UsageError, with the nearest name, if there is none."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PLACES:
        near = nearest(key, [*PLACES, *ALIASES])
        raise UsageError(
            f"There is no place {name!r} to launch at" + (f"; did you mean {near!r}?" if near else "."), choices=PLACES
        )
    module, _, kind = PLACES[key].partition(":")
    place: Place = getattr(importlib.import_module(module), kind)()
    return place
