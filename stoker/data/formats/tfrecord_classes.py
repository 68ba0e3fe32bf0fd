"""Which class each box of a TFRecord data set has, from its label, its text and a label map.

As in the TensorFlow Object Detection API the text decides where the label map has it, else the label. Of several label
maps the one is taken that says what the records say. Not here: finding label maps (`tfrecord_files.py`), reading one
(`label_map.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats import label_map
from stoker.data.formats.label_map import BACKGROUND, LabelMap
from stoker.data.formats.tfrecord_files import is_beside
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

NO_LABEL = -(2**63)
NO_TEXT = -1
NO_CLASS = -1


class Classes(NamedTuple):
    names: list[str]
    ids: list[int]
    labels: NDArray[np.int32]
    """[K], place of each box in `names`, or NO_CLASS."""
    notes: list[str]


class Pair(NamedTuple):
    """What the records say of some boxes."""

    label: int
    """Or NO_LABEL."""
    text: str | None
    boxes: int
    """How many."""
    first: int
    """The first of the boxes."""


@dataclass
class _Verdict:
    """What becomes of each pair, and what is wrong with it."""

    label: list[int] = field(default_factory=list)
    wrong: list[tuple[str, Pair, str]] = field(default_factory=list)
    """(kind of problem, pair, what is there)"""

    def add(self, label: int, pair: Pair, kind: str | None = None, what: str = "") -> None:
        self.label.append(label)
        if kind is not None:
            self.wrong.append((kind, pair, what))


def resolve(
    label: NDArray[np.int64],
    text: NDArray[np.int32],
    texts: Sequence[str],
    *,
    maps: Sequence[Path],
    root: Path,
    problems: Problems,
    place: Callable[[int], str],
) -> Classes:
    """The class of each box.

    label [K]: image/object/class/label or NO_LABEL; text [K]: places in `texts` or NO_TEXT; maps: label maps that may
    belong to the records below `root`; place: where a box is, in words, for problems. Raises DataError when a label map
    cannot be read or when several fit.
    """
    pairs, which = _pairs(label, text, texts)
    chosen, notes = _choose(pairs, maps, root)
    if chosen is not None:
        names, ids, verdict = chosen.names, chosen.ids, _by_map(pairs, chosen)
    elif texts:
        names, ids, verdict = _by_text(pairs, sorted(set(texts)))
        notes.append("no label map: the classes are the texts in the records, sorted")
    else:
        names, ids, verdict = _by_label(pairs)
        if names:
            notes.append(
                "no label map and no texts in the records: the classes are called after their labels;"
                " a label_map.pbtxt beside the records names them"
            )
    for kind, pair, what in verdict.wrong:
        problems.add(kind, f"{place(pair.first)}: {what}", pair.boxes)
    return Classes(names, ids, np.array(verdict.label, np.int32)[which], notes)


def _pairs(
    label: NDArray[np.int64], text: NDArray[np.int32], texts: Sequence[str]
) -> tuple[list[Pair], NDArray[np.int64]]:
    """The different things that boxes say of their class, and which of them each box [K] says."""
    values, label_number = np.unique(label, return_inverse=True)
    codes, first, which, counts = np.unique(
        label_number * (len(texts) + 1) + text + 1, return_index=True, return_inverse=True, return_counts=True
    )
    pairs = []
    for code, at, count in zip(codes.tolist(), first.tolist(), counts.tolist(), strict=True):
        number, text_number = divmod(code, len(texts) + 1)
        pairs.append(Pair(int(values[number]), texts[text_number - 1] if text_number else None, count, at))
    return pairs, which


def _choose(pairs: list[Pair], paths: Sequence[Path], root: Path) -> tuple[LabelMap | None, list[str]]:
    """The label map to believe, or None, and notes about it."""
    beside = bool(paths) and is_beside(paths[0], root)
    different: dict[tuple[object, ...], LabelMap] = {}
    for path in paths:
        try:
            one = label_map.read(path)
        except DataError:
            if beside:  # of another data set, perhaps; which map was taken, if any, is told
                continue
            raise
        different.setdefault((*one.ids, *one.names, *one.keys.items()), one)
    maps = list(different.values())
    if not maps:
        return None, []
    fitting = [one for one in maps if not _by_map(pairs, one).wrong]
    if len(maps) == 1 and not beside:
        fitting = maps
    if len(fitting) == 1:
        others = [one.path.name for one in maps if one is not fitting[0]]
        more = f"; {', '.join(others[:5])} do not fit the records" if others else ""
        return fitting[0], [f"classes from {fitting[0].path}{more}"]
    if beside:
        return None, [f"label maps in folders beside the records are not used: {len(fitting)} of {len(maps)} fit them"]
    raise DataError(
        f"There are {len(maps)} different label maps, and {len(fitting) or 'none'} of them fit the records.",
        place=root,
        choices=[str(one.path) for one in maps],
        fix="leave the right one with the records and move the others away",
    )


def _by_map(pairs: list[Pair], one: LabelMap) -> _Verdict:
    verdict = _Verdict()
    place_of = {number: place for place, number in enumerate(one.ids)}
    for pair in pairs:
        by_label = place_of.get(pair.label)
        by_text = None if pair.text is None else one.keys.get(pair.text)
        said = f"label {pair.label}" + ("" if by_label is None else f" is {one.names[by_label]!r} in {one.path.name}")
        if by_text is not None:
            if pair.label == NO_LABEL or by_label == by_text:
                verdict.add(by_text, pair)
            else:
                verdict.add(by_text, pair, "label-disagrees", f"{said}, its text is {pair.text!r}")
        elif by_label is not None:
            if pair.text is None:
                verdict.add(by_label, pair)
            else:
                verdict.add(by_label, pair, "label-disagrees", f"{said}, its text {pair.text!r} is not in the map")
        else:
            verdict.add(NO_CLASS, pair, *_without_class(pair, f"not in {one.path.name}"))
    return verdict


def _by_text(pairs: list[Pair], names: list[str]) -> tuple[list[str], list[int], _Verdict]:
    """Without a label map; a box without a text has the class whose label it shares."""
    place_of = {name: place for place, name in enumerate(names)}
    places: dict[int, set[int]] = {}
    for pair in pairs:
        if pair.text is not None and pair.label > BACKGROUND:
            places.setdefault(pair.label, set()).add(place_of[pair.text])
    single = {label: next(iter(found)) for label, found in places.items() if len(found) == 1}
    verdict = _Verdict()
    for pair in pairs:
        if pair.text is not None:
            verdict.add(place_of[pair.text], pair)
        elif pair.label in single:
            verdict.add(single[pair.label], pair)
        else:
            verdict.add(NO_CLASS, pair, *_without_class(pair, "a label that no box with a text has"))
    ids = {place: label for label, place in single.items()}
    one_to_one = len(single) == len(places) == len(ids) == len(names)
    return names, [ids[place] if one_to_one else place + 1 for place in range(len(names))], verdict


def _by_label(pairs: list[Pair]) -> tuple[list[str], list[int], _Verdict]:
    ids = sorted({pair.label for pair in pairs if pair.label > BACKGROUND})
    place_of = {number: place for place, number in enumerate(ids)}
    verdict = _Verdict()
    for pair in pairs:
        if pair.label in place_of:
            verdict.add(place_of[pair.label], pair)
        else:
            verdict.add(NO_CLASS, pair, *_without_class(pair, "labels begin at 1"))
    return [f"class {number}" for number in ids], ids, verdict


def _without_class(pair: Pair, why: str) -> tuple[str, str]:
    """Kind of problem and what is there, of boxes whose class cannot be told."""
    text = "" if pair.text is None else f", text {pair.text!r}"
    if pair.label == NO_LABEL and not text:
        return "no-class", "neither a label nor a text"
    if pair.label == BACKGROUND and not text:
        return "no-class", "label 0, which is TensorFlow's background"
    label = "no label" if pair.label == NO_LABEL else f"label {pair.label}"
    return "unknown-class", f"{label}{text}: {why}"
