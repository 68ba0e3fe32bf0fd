"""Cleaning of annotations: drops boxes that cannot be used, makes the splits, checks classes and splits.

Nothing is dropped or split silently: every kind of bad box is counted with examples, every choice becomes a note.
`stratify` splits images so that every class has its fraction in every split, also for `stoker data split`
(`split.py`): iterative stratification, Sechidis, Tsoumakas and Vlahavas 2011, "On the Stratification of Multi-Label
Data", algorithm 1. The images of the rarest class are assigned first, each to the split that still lacks most images of
this class. Images of a group stay together. Ties are decided by a hash of the image names, so the result depends on
names, classes and seed only. Not here: reading (`formats/`), writing the index (`index_cache.py`).
"""

import os
import unicodedata
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.tables import SPLITS, UNASSIGNED, AnnotationTable
from stoker.data.validation.problems import ProblemCollector, count_of_all
from stoker_watch import regular_files
from stoker_watch.errors import DataError, UsageError, make_error, nearest

TRAIN, VAL, TEST = range(3)
DROPPED_BOX_KINDS = (
    "not-a-number", "placeholder-box", "negative-size", "zero-size", "outside", "not-in-pixels", "duplicate-box"
)  # fmt: skip
"""Kinds of boxes that are dropped, in the order of the tests."""
REPORTED_BOX_KINDS = ("reaches-outside", "tiny-box")
"""Kinds of boxes that are kept and reported."""
OUTSIDE_TOLERANCE_PX = 1.0
"""Pixels that a box may extend outside without a report: rounding, and the 1-based corners of Pascal VOC."""
MIN_IMAGE_SIDE = 32
"""A box within the first pixel of an image of at least this side, in pixels, has relative coordinates."""
MAX_MISSING_FRACTION = 0.1
"""Fraction of the images that may be missing for the others to be split without them; more are a wrong path."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How the splits of a data set are made where it has none of its own."""

    val_fraction: float = 0.1
    """Fraction of the images that becomes the validation split."""
    user_set: bool = False
    """Whether the user set `val_fraction`; a note then tells that it is not used when the source has its own split."""
    method: Literal["stratified", "hash"] = "stratified"
    lists: Path | None = None
    """A folder with train.txt, val.txt, test.txt, as `stoker data split` writes it; replaces the source's splits."""
    files: tuple[tuple[str, str], ...] = ()
    """Splits and their annotation files, in place of those in the data folder."""


def keep_classes(table: AnnotationTable, classes: tuple[str, ...]) -> AnnotationTable:
    """Returns the data set with these classes only, in this order: boxes of others are left out, their images stay.
    Empty: all. Raises UsageError for a class that the data set does not have, or that is named twice."""
    if not classes:
        return table
    for position, name in enumerate(classes):
        if name not in table.class_names:
            hint = f"; did you mean {closest!r}?" if (closest := nearest(name, table.class_names)) else "."
            raise make_error(UsageError, "no-such-class", choices=table.class_names[:100], name=name, hint=hint)
        if name in classes[:position]:
            raise UsageError(f"--classes {name}: named twice.", fix="name every class once")
    label_map = np.array([classes.index(name) if name in classes else -1 for name in table.class_names], np.int32)
    labels = label_map[table.labels]
    keep = labels >= 0
    has_kept_box = np.bincount(table.image_index[keep], minlength=len(table.file_names)) > 0
    had_box = np.bincount(table.image_index, minlength=len(table.file_names)) > 0
    note = (
        f"only the classes {', '.join(classes)}: {np.count_nonzero(keep):,} of {keep.size:,} boxes;"
        f" {np.count_nonzero(had_box & ~has_kept_box):,} images that have only others are background"
    )
    return replace(
        _keep_boxes(replace(table, labels=labels), keep),
        class_names=list(classes),
        category_ids=[table.category_ids[table.class_names.index(name)] for name in classes],
        notes=[*table.notes, note],
    )


def _keep_boxes(table: AnnotationTable, keep: NDArray[np.bool_]) -> AnnotationTable:
    """Returns the table with some of its boxes. keep: [K]."""
    columns = ("image_index", "boxes", "labels", "crowd", "area", "box_id")
    return replace(table, **{name: getattr(table, name)[keep] for name in columns})


def drop_degenerate_boxes(table: AnnotationTable, problems: ProblemCollector) -> AnnotationTable:
    """Drops boxes without area (in float32), without area inside the image, with coordinates of 0 … 1 where pixels are
    expected, and duplicates: the same corners and class in the same image. Others stay as annotated, also where they
    extend over the edge. Sets the area to width × height where the source has none."""
    with np.errstate(over="ignore", invalid="ignore"):
        xyxy = table.boxes.astype(np.float32)
        x1, y1, x2, y2 = xyxy.T
        height, width = table.original_size[table.image_index].T
        outside = (x2 <= 0) | (y2 <= 0) | ((x1 >= width) & (width > 0)) | ((y1 >= height) & (height > 0))
        # COCO's -1, -1, -1, -1 are x, y, width and height; in other tables they are corners, perhaps of a unit image
        placeholder = (x1 == -1) & (y1 == -1) & (((x2 == -1) & (y2 == -1)) | ((x2 == -2) & (y2 == -2)))
        placeholder |= (width > 0) & (x1 == -width) & (x2 == -width) & (y1 == -height) & (y2 == -height)
        large = (np.maximum(height, width) >= MIN_IMAGE_SIDE) | (height == 0)
        tests = (
            ~(np.isfinite(x1) & np.isfinite(y1) & np.isfinite(x2) & np.isfinite(y2)),
            placeholder,
            (x2 < x1) | (y2 < y1),
            (x2 == x1) | (y2 == y1),
            outside,
            large & (x1 >= 0) & (y1 >= 0) & (x2 <= 1) & (y2 <= 1),
            _find_duplicates(table, xyxy),
        )
        reaches_outside = (x1 < -OUTSIDE_TOLERANCE_PX) | (y1 < -OUTSIDE_TOLERANCE_PX)
        reaches_outside |= (x2 > width + OUTSIDE_TOLERANCE_PX) & (width > 0)
        reaches_outside |= (y2 > height + OUTSIDE_TOLERANCE_PX) & (height > 0)
        tiny = (x2 - x1 < 1) | (y2 - y1 < 1)
    _report_boxes(table, np.select(tests, range(len(tests)), default=-1), DROPPED_BOX_KINDS, problems)
    keep = ~np.logical_or.reduce(tests)
    bad_boxes = np.logical_or.reduce(tests[: DROPPED_BOX_KINDS.index("duplicate-box")])
    num_bad_boxes = np.bincount(table.image_index[bad_boxes], minlength=len(table.file_names))
    for kind, test in zip(REPORTED_BOX_KINDS, (reaches_outside, tiny), strict=True):
        _report_boxes(table, np.where(keep & test, 0, -1), (kind,), problems)
    kept = _keep_boxes(table, keep)
    box_area = np.prod(kept.boxes[:, 2:] - kept.boxes[:, :2], axis=1)
    return replace(
        kept,
        area=np.where(np.isfinite(kept.area) & (kept.area >= 0), kept.area, box_area),
        num_bad_boxes=num_bad_boxes + (0 if table.num_bad_boxes is None else table.num_bad_boxes),
    )


def drop_images_without_boxes_left(
    table: AnnotationTable, problems: ProblemCollector
) -> tuple[AnnotationTable, dict[str, int]]:
    """Drops the images that had boxes and lost all of them: they are not background. Also returns the number of boxes
    that they lost, by the split that the source has for them. Raises DataError if no image is left."""
    assert table.num_bad_boxes is not None
    has_box = np.bincount(table.image_index, minlength=len(table.file_names)) > 0
    is_lost = (table.num_bad_boxes > 0) & ~has_box
    for image_index in np.flatnonzero(is_lost).tolist():
        problems.add("no-box-left", f"{table.image_path(image_index)}: {table.num_bad_boxes[image_index]} left out")
    if len(is_lost) and is_lost.all():
        location = f"{table.image_path(0)} and all others"
        raise make_error(DataError, "no-image-left", location, cause=problems.describe())
    lost_in = [int(table.num_bad_boxes[is_lost & (table.split == number)].sum()) for number in range(len(SPLITS))]
    return drop_images(table, is_lost), dict(zip(SPLITS, lost_in, strict=True))


def drop_images(table: AnnotationTable, is_dropped: NDArray[np.bool_]) -> AnnotationTable:
    """Returns the table without some images and their boxes. is_dropped: [R]."""
    if not is_dropped.any():
        return table
    keep = ~is_dropped
    new_index = np.cumsum(keep) - 1
    table = _keep_boxes(table, keep[table.image_index])
    return replace(
        table,
        folder_index=table.folder_index[keep],
        file_names=[name for name, kept in zip(table.file_names, keep.tolist(), strict=True) if kept],
        split=table.split[keep],
        original_size=table.original_size[keep],
        image_id=table.image_id[keep],
        byte_range=None if table.byte_range is None else table.byte_range[keep],
        num_bad_boxes=None if table.num_bad_boxes is None else table.num_bad_boxes[keep],
        image_index=new_index[table.image_index],
    )


def drop_missing_images(
    table: AnnotationTable, is_missing: NDArray[np.bool_], problems: ProblemCollector
) -> AnnotationTable:
    """Drops the few images without a file before a split is drawn, so that they are not concentrated in it by chance.
    is_missing: [R]. If there are more than MAX_MISSING_FRACTION, all stay, and training refuses the data set."""
    if not 0 < np.count_nonzero(is_missing) <= MAX_MISSING_FRACTION * len(is_missing):
        return table
    for image_index in np.flatnonzero(is_missing).tolist():
        problems.add("missing-image", table.image_path(image_index))
    return drop_images(table, is_missing)


def draws_split(table: AnnotationTable) -> bool:
    """Returns whether stoker draws the validation split itself: the source has none, and images to draw from."""
    present_splits = set(table.split.tolist())
    return VAL not in present_splits and not present_splits.isdisjoint((TRAIN, UNASSIGNED))


def _report_boxes(
    table: AnnotationTable, box_kind: NDArray[np.int64], kind_names: tuple[str, ...], problems: ProblemCollector
) -> None:
    """Counts each kind and describes as many as are kept. box_kind: [K], index into `kind_names`, -1 for none."""
    for kind_index, name in enumerate(kind_names):
        boxes = np.flatnonzero(box_kind == kind_index).tolist()
        num_described = min(len(boxes), max(1, problems.remaining_examples(name)))
        for box in boxes[: num_described - 1]:
            problems.add(name, _describe_box(table, box))
        if boxes:
            problems.add(name, _describe_box(table, boxes[num_described - 1]), len(boxes) - num_described + 1)


def _find_duplicates(table: AnnotationTable, xyxy: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Returns [K], whether an equal box of the same image and class comes before this one. Hashes find the few
    candidates, in 0.1 s for COCO's 860,001 boxes; a sort by all six columns takes ten times that."""
    bits = (xyxy + np.float32(0)).view(np.uint32).astype(np.uint64)  # turns -0 into 0
    multipliers = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)
    hashes = (bits * multipliers).sum(1) + table.labels.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    hashes = hashes * np.uint64(2) + table.crowd + table.image_index.astype(np.uint64) * np.uint64(0xA0761D6478BD642F)
    ordered = np.sort(hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    is_duplicate = np.zeros(len(xyxy), np.bool_)
    seen_keys: set[tuple[object, ...]] = set()
    for box in np.flatnonzero(np.isin(hashes, repeated)).tolist() if len(repeated) else ():
        key = (
            int(table.image_index[box]), int(table.labels[box]), bool(table.crowd[box]), *table.boxes[box].tolist()
        )  # fmt: skip
        is_duplicate[box] = key in seen_keys
        seen_keys.add(key)
    return is_duplicate


def _describe_box(table: AnnotationTable, box: int) -> str:
    xyxy_text = ", ".join(f"{value:g}" for value in table.boxes[box])
    return f"{table.image_path(table.image_index[box])}, {table.box_id_kind} {table.box_id[box]}: [{xyxy_text}]"


def assign_splits(table: AnnotationTable, options: SplitOptions) -> AnnotationTable:
    """Assigns every image to a split. Splits of the source stay; images without one train. Without a validation split,
    a part of the training images becomes it: stratified by class, or by a hash of the name (it stays when others are
    added)."""
    notes = list(table.notes)
    split = table.split.copy()
    present_splits = set(split.tolist())
    if draws_split(table):
        image_indices = np.flatnonzero((split == UNASSIGNED) | (split == TRAIN))
        is_val = _choose_val_images(table, image_indices, options)
        split[image_indices] = np.where(is_val, VAL, TRAIN)
        if is_val.any():
            missing_split = "no splits" if UNASSIGNED in present_splits else "no validation split"
            how = "stratified by class" if options.method == "stratified" else "by a hash of the file name"
            num_val, num_images = int(np.count_nonzero(is_val)), is_val.size
            notes.append(
                f"{missing_split}: {count_of_all(num_val, num_images, 'images')} held out for validation, {how}"
            )
        else:
            notes.append("no validation split, and a single image cannot be split")
    elif UNASSIGNED in present_splits:
        is_train = split == UNASSIGNED
        split[is_train] = TRAIN
        count = count_of_all(int(np.count_nonzero(is_train)), len(split), "images")
        notes.append(f"{count} are in no split: they are used for training")
    elif TRAIN not in present_splits:
        notes.append(
            f"no training split: the data set has only {' and '.join(SPLITS[k] for k in sorted(present_splits))}"
        )
    elif options.user_set:
        notes.append(f"val_fraction {options.val_fraction:.3g} is not used: the data set has its own validation split")
    return replace(table, split=split, notes=notes)


def _choose_val_images(
    table: AnnotationTable, image_indices: NDArray[np.int64], options: SplitOptions
) -> NDArray[np.bool_]:
    """Returns [N], which of some images are held out for validation."""
    names = [table.file_names[image_index] for image_index in image_indices.tolist()]
    position = np.full(len(table.file_names), -1, np.int64)
    position[image_indices] = np.arange(len(image_indices))
    box_position = position[table.image_index]
    used = (box_position >= 0) & ~table.crowd
    return _hold_out(names, box_position[used], table.labels[used], options)


def _hold_out(
    names: list[str], box_position: NDArray[np.int64], labels: NDArray[np.int32], options: SplitOptions
) -> NDArray[np.bool_]:
    """Returns [N]: at least one and not all, counted among the images with boxes if at least two have boxes (a split
    without boxes is useless), else among all. box_position, labels: [K], image and class of each box."""
    has_boxes = np.bincount(box_position, minlength=len(names)) > 0
    is_val: NDArray[np.bool_]
    if options.method == "hash":
        is_val = hash_to_unit_interval(names) < options.val_fraction
    else:
        fractions = (1 - options.val_fraction, options.val_fraction)
        is_val = stratify(box_position, labels, names, fractions) == 1
    candidates = np.flatnonzero(has_boxes) if np.count_nonzero(has_boxes) > 1 else np.arange(len(names))
    if candidates.size > 1 and (is_val[candidates].all() or not is_val[candidates].any()):
        hash_values = hash_to_unit_interval([names[image] for image in candidates.tolist()])
        is_all = bool(is_val[candidates[0]])
        is_val[candidates[hash_values.argmax() if is_all else hash_values.argmin()]] = not is_all
    if np.count_nonzero(has_boxes) == 1:
        is_val &= ~has_boxes
    return is_val


def assign_listed_splits(
    table: AnnotationTable, root: Path, folder: Path, problems: ProblemCollector
) -> AnnotationTable:
    """Assigns the images to the splits whose lists (train.txt, val.txt, test.txt) name them, by their paths relative to
    the root; the others are left out. Raises DataError if the lists name none of the images."""
    names = [os.path.relpath(root / table.image_path(i), root) for i in range(len(table.file_names))]
    known = set(names)
    split_by_name: dict[str, int] = {}
    num_listed = 0
    for split_index, name in enumerate(SPLITS):
        file = folder / f"{name}.txt"
        if not file.is_file():
            continue
        text = regular_files.read_text(file, encoding="utf-8-sig", errors="surrogateescape")
        lines = [line.strip() for line in text.splitlines()]
        entries = [_as_listed(line, known) for line in lines if line and not line.startswith("#")]
        num_listed += len(entries)
        if entries and name != "test" and known.isdisjoint(entries):
            cause = f"its first line is {entries[0]!r}; the images are called {', '.join(names[:2])}, …"
            raise make_error(DataError, "lists-name-no-image", file, cause=cause, root=root)
        for entry in entries:
            if split_by_name.setdefault(entry, split_index) != split_index:
                other = SPLITS[split_by_name[entry]]
                raise make_error(DataError, "image-in-two-lists", f"{file}: {entry}", other=other, name=name)
    split = np.array([split_by_name.get(name, UNASSIGNED) for name in names], np.int8)
    seen: set[str] = set()
    for image_index, name in enumerate(names):
        if name in seen:  # in two splits of the source
            split[image_index] = UNASSIGNED
        seen.add(name)
    if not (split != UNASSIGNED).any():
        cause = f"{num_listed:,} lines; the images are called {', '.join(names[:2])}, …"
        cause = cause if num_listed else "there is no train.txt, val.txt or test.txt, or they are empty"
        raise make_error(DataError, "lists-name-no-image", folder, cause=cause, root=root)
    for name in sorted(seen - split_by_name.keys()):
        problems.add("not-in-a-split", name)
    num_absent = len(split_by_name.keys() - seen)
    notes = [*table.notes, f"splits: those of the lists in {folder}"]
    if num_absent:
        notes.append(f"{count_of_all(num_absent, num_listed, 'lines')} of the lists in {folder} name no image")
    return replace(drop_images(table, split == UNASSIGNED), split=split[split != UNASSIGNED], notes=notes)


def _as_listed(line: str, known: Container[str]) -> str:
    path = os.path.normpath(line)
    return path if path in known or "\\" not in line else os.path.normpath(line.replace("\\", "/"))


def check_splits_and_classes(table: AnnotationTable, problems: ProblemCollector, *, allow_empty: bool = False) -> None:
    """Finds problems of classes and splits. Crowd boxes do not count: they are neither training targets nor evaluated.
    Raises DataError when the training split has no boxes, unless `allow_empty`."""
    labels, box_split = table.labels[~table.crowd], table.split[table.image_index[~table.crowd]]
    if not allow_empty and (table.split == TRAIN).any() and not (box_split == TRAIN).any():
        location = f"{table.image_path(int(np.flatnonzero(table.split == TRAIN)[0]))} and all others"
        raise make_error(DataError, "no-training-boxes", location, cause=problems.describe())
    for split_index, name in enumerate(SPLITS):
        num_images = int((table.split == split_index).sum())
        if split_index != TEST and not (box_split == split_index).any():
            problems.add("empty-split", f"{name}: {num_images:,} images, no box")
        elif num_images and not (box_split == split_index).any():
            problems.add("split-without-boxes", f"{name}: {num_images:,} images")
    _check_classes(table.class_names, labels, box_split, problems)
    _check_splits(table, problems)


def _check_splits(table: AnnotationTable, problems: ProblemCollector) -> None:
    """Finds images that are in more than one split."""
    keys = list(zip(table.folder_index.tolist(), table.file_names, strict=True))
    if len(set(keys)) == len(keys):
        return
    indices_by_key: dict[tuple[int, str], list[int]] = {}
    for image_index, key in enumerate(keys):
        indices_by_key.setdefault(key, []).append(image_index)
    for indices in indices_by_key.values():
        if len(indices) > 1:
            names = [SPLITS[table.split[image_index]] for image_index in indices]
            problems.add("in-two-splits", f"{table.image_path(indices[0])}: {', '.join(names)}")


def _check_classes(
    class_names: list[str], labels: NDArray[np.int32], box_split: NDArray[np.int8], problems: ProblemCollector
) -> None:
    """Finds similar, unused and absent classes. labels, box_split: [K], without crowd boxes."""
    names_by_key: dict[str, list[str]] = {}
    for name in class_names:
        names_by_key.setdefault(" ".join(name.split()).casefold(), []).append(name)
    for names in names_by_key.values():
        if len(names) > 1 or names[0] != names[0].strip():
            problems.add("similar-class-names", ", ".join(map(repr, names)))
    num_classes = len(class_names)
    per_split = np.stack(
        [np.bincount(labels[box_split == split_index], minlength=num_classes) for split_index in range(len(SPLITS))]
    )
    used = per_split.sum(0) > 0
    for label in np.flatnonzero(~used).tolist():
        problems.add("unused-class", class_names[label])
    for split_index in np.flatnonzero(per_split.sum(1)).tolist():
        for label in np.flatnonzero(used & (per_split[split_index] == 0)).tolist():
            problems.add("class-not-in-split", f"{class_names[label]}: not in {SPLITS[split_index]}")


def hash_to_unit_interval(names: Sequence[str], seed: int = 0) -> NDArray[np.float64]:
    """[N], numbers in [0, 1) that depend on text and seed alone; composed and decomposed Unicode give the same."""
    key = seed.to_bytes(8, "big") if seed else b""
    texts = (
        name.encode() if name.isascii() else unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
        for name in names
    )
    digests = b"".join([blake2b(text, digest_size=8, key=key).digest() for text in texts])
    return np.frombuffer(digests, ">u8").astype(np.float64) / 2**64


def stratify(
    image_index: NDArray[np.int64],
    labels: NDArray[np.int32],
    names: Sequence[str],
    fractions: Sequence[float],
    *,
    seed: int = 0,
    groups: Sequence[int] | None = None,
) -> NDArray[np.int8]:
    """Returns [R], the split of each image: an index into `fractions`, which add up to 1.

    image_index, labels: [K], image and class of each box. names: [R]. groups: [R], images with the same number get the
    same split. Images without boxes are a class of their own. A run does not store its split: for the same names,
    classes and seed it must stay the same in all versions, so that runs can be continued.
    """
    num_images = len(names)
    group_of_image = np.arange(num_images) if groups is None else np.unique(groups, return_inverse=True)[1]
    group_sizes = np.bincount(group_of_image)
    num_groups = len(group_sizes)
    # Large groups first, then in the order of the smallest hash of their images.
    by_hash = np.argsort(hash_to_unit_interval(names, seed), kind="stable")
    first_by_hash = np.unique(group_of_image[by_hash], return_index=True)[1]
    order = np.lexsort((first_by_hash, -group_sizes))

    # The pairs of a group and a class that it has, with the number of its images that have the class.
    no_box = int(labels.max(initial=-1)) + 1
    num_classes = no_box + 1
    without_box = np.flatnonzero(np.bincount(image_index, minlength=num_images) == 0)
    keys = np.concatenate([image_index * num_classes + labels, without_box * num_classes + no_box])
    keys = np.sort(keys, kind="stable")  # almost sorted; the hash table of np.unique takes ten times as long
    keys = keys[np.diff(keys, prepend=-1) > 0]
    place = np.empty(num_groups, np.int64)
    place[order] = np.arange(num_groups)
    keys = np.sort(place[group_of_image[keys // num_classes]] * num_classes + keys % num_classes)
    is_first = np.diff(keys, prepend=-1) > 0
    counts = np.diff(np.flatnonzero(is_first), append=len(keys))
    pair_place, pair_class = np.divmod(keys[is_first], num_classes)
    starts = np.searchsorted(pair_place, np.arange(num_groups + 1))
    pairs_by_class = np.argsort(pair_class.astype(np.min_scalar_type(num_classes)), kind="stable")
    class_starts = np.cumsum(np.bincount(pair_class + 1, minlength=num_classes + 1))

    remaining = np.bincount(pair_class, counts, minlength=num_classes).astype(np.int64)
    wanted_of_class = np.outer(np.array(fractions), remaining).astype(np.float64)
    wanted = [fraction * num_images for fraction in fractions]
    split_of_place = np.full(num_groups, -1, np.int8)
    sizes_by_place = group_sizes[order]
    while (remaining > 0).any():
        rarest = int(np.where(remaining > 0, remaining, np.iinfo(np.int64).max).argmin())
        pairs = pairs_by_class[class_starts[rarest] : class_starts[rarest + 1]]
        pairs = pairs[split_of_place[pair_place[pairs]] < 0]
        places = pair_place[pairs]
        chosen = _assign_greedily(
            wanted_of_class[:, rarest].tolist(), wanted, counts[pairs].tolist(), sizes_by_place[places].tolist()
        )
        split_of_place[places] = chosen
        # all pairs of these groups: from starts[place] up to starts[place + 1]
        lengths = starts[places + 1] - starts[places]
        own = np.repeat(starts[places + 1] - np.cumsum(lengths), lengths) + np.arange(lengths.sum())
        taken = np.bincount(
            np.repeat(chosen, lengths) * num_classes + pair_class[own], counts[own], len(fractions) * num_classes
        ).reshape(-1, num_classes)
        wanted_of_class -= taken
        remaining -= taken.sum(0).astype(np.int64)
    return split_of_place[place[group_of_image]]


def _assign_greedily(
    lacking: list[float], wanted: list[float], counts: Sequence[int], sizes: Sequence[int]
) -> NDArray[np.int64]:
    """The split of each of some groups: the one that lacks most images of a class, of those the one that wants most
    images. lacking: images of the class that each split still lacks; wanted: of any class, which is updated. counts,
    sizes: images of each group with the class, and in all. The only loop in Python: each choice depends on the last."""
    chosen = []
    splits = range(len(lacking))
    for count, size in zip(counts, sizes, strict=True):
        least = max(lacking) - 1e-9
        best = -1
        for split in splits:
            if lacking[split] >= least and (best < 0 or wanted[split] > wanted[best]):
                best = split
        chosen.append(best)
        lacking[best] -= count
        wanted[best] -= size
    return np.array(chosen, np.int64)
