"""Determines the class of each box of a TFRecord data set, from its label, its text and a label map.

As in the TensorFlow Object Detection API, the text decides if the label map has it, else the label. Of several label
maps, the one that agrees with the records is used. Not here: finding label maps (`tfrecord_files.py`), reading one
(`label_map.py`).
"""

from collections.abc import Callable, Sequence
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


class _Assignment(NamedTuple):
    """The class of a pair."""

    label: int
    """Index into the class names, or NO_CLASS."""
    problem_kind: str | None = None
    description: str = ""


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
        names, ids, assignments = chosen.names, chosen.ids, _assign_by_map(pairs, chosen)
    elif texts:
        names, ids, assignments = _assign_by_text(pairs, sorted(set(texts)))
        notes.append("no label map: the classes are the texts in the records, sorted")
    else:
        names, ids, assignments = _assign_by_label(pairs)
        if names:
            notes.append(
                "no label map and no texts in the records: the classes are named after their labels;"
                " a label_map.pbtxt next to the records sets their names"
            )
    for pair, assignment in zip(pairs, assignments, strict=True):
        if assignment.problem_kind is not None:
            example = f"{describe_box(pair.first_box)}: {assignment.description}"
            problems.add(assignment.problem_kind, example, pair.num_boxes)
    labels = np.array([assignment.label for assignment in assignments], np.int32)
    return ClassAssignment(names, ids, labels[pair_index], notes)


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
    fitting = [
        candidate
        for candidate in label_maps
        if not any(assignment.problem_kind for assignment in _assign_by_map(pairs, candidate))
    ]
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


def _assign_by_map(pairs: list[LabelTextPair], label_map: LabelMap) -> list[_Assignment]:
    index_by_id = {class_id: class_index for class_index, class_id in enumerate(label_map.ids)}
    assignments = []
    for pair in pairs:
        by_label = index_by_id.get(pair.label)
        by_text = None if pair.text is None else label_map.index_by_name.get(pair.text)
        described = f"label {pair.label}"
        if by_label is not None:
            described += f" is {label_map.names[by_label]!r} in {label_map.path.name}"
        if by_text is not None and by_label != by_text and pair.label != NO_LABEL:
            described += f", its text is {pair.text!r}"
            assignments.append(_Assignment(by_text, "label-disagrees", described))
        elif by_text is not None:
            assignments.append(_Assignment(by_text))
        elif by_label is not None and pair.text is not None:
            described += f", its text {pair.text!r} is not in the map"
            assignments.append(_Assignment(by_label, "label-disagrees", described))
        elif by_label is not None:
            assignments.append(_Assignment(by_label))
        else:
            assignments.append(_unassigned(pair, f"not in {label_map.path.name}"))
    return assignments


def _assign_by_text(pairs: list[LabelTextPair], names: list[str]) -> tuple[list[str], list[int], list[_Assignment]]:
    """Without a label map. A box without a text gets the class of the boxes with the same label."""
    index_by_name = {name: class_index for class_index, name in enumerate(names)}
    indices_by_label: dict[int, set[int]] = {}
    for pair in pairs:
        if pair.text is not None and pair.label > BACKGROUND:
            indices_by_label.setdefault(pair.label, set()).add(index_by_name[pair.text])
    index_by_label = {label: next(iter(indices)) for label, indices in indices_by_label.items() if len(indices) == 1}
    assignments = []
    for pair in pairs:
        class_index = index_by_label.get(pair.label) if pair.text is None else index_by_name[pair.text]
        if class_index is None:
            assignments.append(_unassigned(pair, "no box with a text has this label"))
        else:
            assignments.append(_Assignment(class_index))
    ids = {class_index: label for label, class_index in index_by_label.items()}
    one_to_one = len(index_by_label) == len(indices_by_label) == len(ids) == len(names)
    return (
        names,
        [ids[class_index] if one_to_one else class_index + 1 for class_index in range(len(names))],
        assignments,
    )


def _assign_by_label(pairs: list[LabelTextPair]) -> tuple[list[str], list[int], list[_Assignment]]:
    ids = sorted({pair.label for pair in pairs if pair.label > BACKGROUND})
    index_by_id = {class_id: class_index for class_index, class_id in enumerate(ids)}
    assignments = [
        _Assignment(index_by_id[pair.label]) if pair.label in index_by_id else _unassigned(pair, "labels begin at 1")
        for pair in pairs
    ]
    return [f"class {class_id}" for class_id in ids], ids, assignments


def _unassigned(pair: LabelTextPair, reason: str) -> _Assignment:
    """Boxes whose class cannot be determined."""
    text = "" if pair.text is None else f", text {pair.text!r}"
    if pair.label == NO_LABEL and not text:
        return _Assignment(NO_CLASS, "no-class", "neither a label nor a text")
    if pair.label == BACKGROUND and not text:
        return _Assignment(NO_CLASS, "no-class", "label 0, which is TensorFlow's background")
    label = "no label" if pair.label == NO_LABEL else f"label {pair.label}"
    return _Assignment(NO_CLASS, "unknown-class", f"{label}{text}: {reason}")
