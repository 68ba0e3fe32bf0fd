"""Determines the class of each box of a TFRecord data set, from its label, its text and a label map.

As in the TensorFlow Object Detection API, the text decides if the label map has it, else the label. Of several label
maps, the one that agrees with the records is used. Not here: finding label maps (`tfrecord_files.py`), reading one
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
from stoker.data.formats.tfrecord_files import is_in_sibling_dir
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

NO_LABEL = -(2**63)
NO_TEXT = -1
NO_CLASS = -1


class ClassAssignment(NamedTuple):
    names: list[str]
    ids: list[int]
    labels: NDArray[np.int32]
    """[K], index into `names`, or NO_CLASS."""
    notes: list[str]


class LabelTextPair(NamedTuple):
    """A label and a text that some boxes have in common."""

    label: int
    """NO_LABEL if the record has none."""
    text: str | None
    num_boxes: int
    first_box: int
    """Index of the first of these boxes."""


@dataclass
class _PairAssignment:
    """The class of each pair, and the problems."""

    labels: list[int] = field(default_factory=list)
    problems: list[tuple[str, LabelTextPair, str]] = field(default_factory=list)
    """(kind of problem, pair, description)"""

    def add(self, label: int, pair: LabelTextPair, kind: str | None = None, description: str = "") -> None:
        self.labels.append(label)
        if kind is not None:
            self.problems.append((kind, pair, description))


def assign_classes(
    label: NDArray[np.int64],
    text_index: NDArray[np.int32],
    texts: Sequence[str],
    *,
    label_map_paths: Sequence[Path],
    root: Path,
    problems: ProblemCollector,
    describe_box: Callable[[int], str],
) -> ClassAssignment:
    """The class of each box.

    label [K]: image/object/class/label or NO_LABEL; text_index [K]: index into `texts` or NO_TEXT; label_map_paths:
    label maps that may belong to the records below `root`; describe_box: the location of a box, for messages. Raises
    DataError if a label map cannot be read or if several fit.
    """
    pairs, pair_index = _group_pairs(label, text_index, texts)
    chosen, notes = _choose_label_map(pairs, label_map_paths, root)
    if chosen is not None:
        names, ids, assignment = chosen.names, chosen.ids, _assign_by_map(pairs, chosen)
    elif texts:
        names, ids, assignment = _assign_by_text(pairs, sorted(set(texts)))
        notes.append("no label map: the classes are the texts in the records, sorted")
    else:
        names, ids, assignment = _assign_by_label(pairs)
        if names:
            notes.append(
                "no label map and no texts in the records: the classes are named after their labels;"
                " a label_map.pbtxt next to the records sets their names"
            )
    for kind, pair, description in assignment.problems:
        problems.add(kind, f"{describe_box(pair.first_box)}: {description}", pair.num_boxes)
    return ClassAssignment(names, ids, np.array(assignment.labels, np.int32)[pair_index], notes)


def _group_pairs(
    label: NDArray[np.int64], text_index: NDArray[np.int32], texts: Sequence[str]
) -> tuple[list[LabelTextPair], NDArray[np.int64]]:
    """The different pairs of label and text, and the index of each box's pair [K]."""
    values, label_number = np.unique(label, return_inverse=True)
    codes, first, pair_index, counts = np.unique(
        label_number * (len(texts) + 1) + text_index + 1, return_index=True, return_inverse=True, return_counts=True
    )
    pairs = []
    for code, first_box, count in zip(codes.tolist(), first.tolist(), counts.tolist(), strict=True):
        number, text_number = divmod(code, len(texts) + 1)
        pairs.append(
            LabelTextPair(int(values[number]), texts[text_number - 1] if text_number else None, count, first_box)
        )
    return pairs, pair_index


def _choose_label_map(
    pairs: list[LabelTextPair], paths: Sequence[Path], root: Path
) -> tuple[LabelMap | None, list[str]]:
    """The label map to use, or None, and notes about it."""
    is_sibling = bool(paths) and is_in_sibling_dir(paths[0], root)
    distinct: dict[tuple[object, ...], LabelMap] = {}
    for path in paths:
        try:
            candidate = label_map.read(path)
        except DataError:
            if is_sibling:  # perhaps of another data set; a note tells which map is used
                continue
            raise
        distinct.setdefault((*candidate.ids, *candidate.names, *candidate.index_by_name.items()), candidate)
    label_maps = list(distinct.values())
    if not label_maps:
        return None, []
    fitting = [candidate for candidate in label_maps if not _assign_by_map(pairs, candidate).problems]
    if len(label_maps) == 1 and not is_sibling:
        fitting = label_maps
    if len(fitting) == 1:
        others = [candidate.path.name for candidate in label_maps if candidate is not fitting[0]]
        more = f"; {', '.join(others[:5])} do not fit the records" if others else ""
        return fitting[0], [f"classes from {fitting[0].path}{more}"]
    if is_sibling:
        return None, [
            f"label maps in folders next to the records are not used: {len(fitting)} of {len(label_maps)} fit them"
        ]
    raise DataError(
        f"There are {len(label_maps)} different label maps, and {len(fitting) or 'none'} of them fit the records.",
        location=root,
        choices=[str(candidate.path) for candidate in label_maps],
        fix="leave the correct one with the records and move the others away",
    )


def _assign_by_map(pairs: list[LabelTextPair], class_map: LabelMap) -> _PairAssignment:
    assignment = _PairAssignment()
    class_index_by_key = {class_id: class_index for class_index, class_id in enumerate(class_map.ids)}
    for pair in pairs:
        by_label = class_index_by_key.get(pair.label)
        by_text = None if pair.text is None else class_map.index_by_name.get(pair.text)
        description = f"label {pair.label}" + (
            "" if by_label is None else f" is {class_map.names[by_label]!r} in {class_map.path.name}"
        )
        if by_text is not None:
            if pair.label == NO_LABEL or by_label == by_text:
                assignment.add(by_text, pair)
            else:
                assignment.add(by_text, pair, "label-disagrees", f"{description}, its text is {pair.text!r}")
        elif by_label is not None:
            if pair.text is None:
                assignment.add(by_label, pair)
            else:
                assignment.add(
                    by_label, pair, "label-disagrees", f"{description}, its text {pair.text!r} is not in the map"
                )
        else:
            assignment.add(NO_CLASS, pair, *_describe_unassigned(pair, f"not in {class_map.path.name}"))
    return assignment


def _assign_by_text(pairs: list[LabelTextPair], names: list[str]) -> tuple[list[str], list[int], _PairAssignment]:
    """Without a label map. A box without a text gets the class of the boxes with the same label."""
    class_index_by_key = {name: class_index for class_index, name in enumerate(names)}
    indices_by_label: dict[int, set[int]] = {}
    for pair in pairs:
        if pair.text is not None and pair.label > BACKGROUND:
            indices_by_label.setdefault(pair.label, set()).add(class_index_by_key[pair.text])
    index_by_label = {label: next(iter(indices)) for label, indices in indices_by_label.items() if len(indices) == 1}
    assignment = _PairAssignment()
    for pair in pairs:
        if pair.text is not None:
            assignment.add(class_index_by_key[pair.text], pair)
        elif pair.label in index_by_label:
            assignment.add(index_by_label[pair.label], pair)
        else:
            assignment.add(NO_CLASS, pair, *_describe_unassigned(pair, "a label that no box with a text has"))
    ids = {class_index: label for label, class_index in index_by_label.items()}
    one_to_one = len(index_by_label) == len(indices_by_label) == len(ids) == len(names)
    return names, [ids[class_index] if one_to_one else class_index + 1 for class_index in range(len(names))], assignment


def _assign_by_label(pairs: list[LabelTextPair]) -> tuple[list[str], list[int], _PairAssignment]:
    ids = sorted({pair.label for pair in pairs if pair.label > BACKGROUND})
    class_index_by_key = {class_id: class_index for class_index, class_id in enumerate(ids)}
    assignment = _PairAssignment()
    for pair in pairs:
        if pair.label in class_index_by_key:
            assignment.add(class_index_by_key[pair.label], pair)
        else:
            assignment.add(NO_CLASS, pair, *_describe_unassigned(pair, "labels begin at 1"))
    return [f"class {class_id}" for class_id in ids], ids, assignment


def _describe_unassigned(pair: LabelTextPair, reason: str) -> tuple[str, str]:
    """Kind of problem and description, for boxes whose class cannot be determined."""
    text = "" if pair.text is None else f", text {pair.text!r}"
    if pair.label == NO_LABEL and not text:
        return "no-class", "neither a label nor a text"
    if pair.label == BACKGROUND and not text:
        return "no-class", "label 0, which is TensorFlow's background"
    label = "no label" if pair.label == NO_LABEL else f"label {pair.label}"
    return "unknown-class", f"{label}{text}: {reason}"
