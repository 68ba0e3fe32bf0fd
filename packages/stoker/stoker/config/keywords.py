"""The settings as keyword arguments. Type checkers and editors read `keywords.pyi`, which is generated from
`settings.py` by `python -m tests.trainer.config.test_surface`."""

from typing import Any, TypedDict, get_type_hints

from stoker.config.settings import SECTION_OF, SECTIONS


def _kinds() -> dict[str, Any]:
    """Name → type of each keyword; `epochs`, `steps` and `max_time` set `max_duration`."""
    fields = {name: kind for section in SECTIONS.values() for name, kind in get_type_hints(section).items()}
    kinds = {name: kind for name, kind in fields.items() if name in SECTION_OF and name != "data"}
    return kinds | {"image_size": int | tuple[int, int], "epochs": float, "steps": int, "max_time": str}


Settings = TypedDict("Settings", _kinds(), total=False)  # type: ignore[misc]
Settings.__doc__ = "What `stoker.train` takes, by the names of its flags; a setting that is not given is derived."
