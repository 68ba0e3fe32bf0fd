"""Picture names that annotations write otherwise than the disk does, matched where only one file can be meant.

Annotations made on Windows or macOS say `IMG_1.JPG` for a file `img_1.jpg`, write é as one character where the disk has
two (NFC and NFD), `%20` for a space, or leave a space at the end. `mend` sets right what a format's reader has read,
for all formats at once; a reader that looks for files itself, to choose a folder, asks `alike`. Names that are right
cost one listing of their folder. Not here: pictures that are under another name altogether (`index.require_pictures`).
"""

import os
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from stoker.data.formats.tables import Columns, by_folder
from stoker.data.validation.problems import Problems


def mend(columns: Columns, root: Path, problems: Problems) -> None:
    """Gives pictures the names of their files, in place, where they differ as above; each is a problem, and fixed."""
    files = np.ones(len(columns.names), np.bool_) if columns.span is None else columns.span[:, 1] == 0
    for number, in_folder in by_folder(columns.folder, np.flatnonzero(files)):
        rows, text = in_folder.tolist(), columns.folders[number]
        folder = existing(root / text)
        if folder is None:
            continue
        if folder != root / text:
            columns.folders[number] = os.path.relpath(folder, root) if folder.is_relative_to(root) else str(folder)
            problems.add("wrong-case-name", f"{text}/: the folder is {folder.name}/", len(rows))
        found = resolve(folder, [columns.names[row] for row in rows])
        for row in rows if found else ():
            said = columns.names[row]
            if said in found:
                columns.names[row] = found[said]
                problems.add("wrong-case-name", f"{os.path.join(text, said)!r}: the file is {found[said]!r}")


def resolve(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Of the `names` that are no file in `folder`, those for which one file there can be meant → that file's name.

    A file that another name stands for already cannot be meant. Raises OSError where the folder cannot be listed.
    """
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        present = {entry.name for entry in entries}
    wanted = set(names)
    absent = wanted - present
    free = present - wanted
    found: dict[str, str] = {}
    for key in (_folded, _unquoted):
        if not absent or not free:
            break
        files, said = _by_key(free, key), _by_key(absent, key)
        same = {said[k][0]: files[k][0] for k in said.keys() & files.keys() if len(said[k]) == len(files[k]) == 1}
        # macOS finds a name in any case and form by itself: nothing to mend there.
        found |= {name: file for name, file in same.items() if not (folder / name).is_file()}
        absent, free = absent - same.keys(), free - set(same.values())
    return found


def existing(folder: Path) -> Path | None:
    """A folder, or the one that can be meant where parts of its path are written otherwise; None: there is none."""
    if folder.is_dir():
        return folder
    if folder == folder.parent:
        return None
    above = existing(folder.parent)
    if above is None:
        return None
    inner = resolve(above, [folder.name]).get(folder.name, folder.name)
    return above / inner if (above / inner).is_dir() else None


def alike(folder: Path, names: Iterable[str]) -> int:
    """How many of the names, with "/" between folders, can mean a file below `folder` though they are not its name."""
    inside: dict[str, list[str]] = {}
    for name in names:
        head, _, tail = name.rpartition("/")
        inside.setdefault(head, []).append(tail)
    places = {head: existing(folder / head) for head in inside}
    return sum(
        len(resolve(place, inside[head])) + sum((place / tail).is_file() for tail in inside[head])
        for head, place in places.items()
        if place is not None
    )


def _by_key(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()


def _unquoted(name: str) -> str:
    return _folded(unquote(name))
