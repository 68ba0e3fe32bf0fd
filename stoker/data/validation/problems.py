"""What can be wrong with a data set: every kind of problem, what training does about it, and how to fix it.

The readers (`formats/`) and the cleaning (`clean.py`) add what they meet to a `ProblemCollector`. The index keeps the
counts and a few examples; `stoker data check` (`check.py`) shows everything. Not here: errors that end the reading
(they are `DataError`s), and the search for problems inside image files (`check_images.py`, with kinds from this table).
"""

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

DEFAULT_MAX_BAD_FRACTION = 0.01
"""Fraction of the images that may be unusable, by default."""
DEFAULT_MAX_BAD_BOXES = 0.01
"""Fraction of the boxes that may be left out, by default; the same as of the images. Of the five sets in shared/data,
BCCD has most bad boxes, 2 of 4,888 (0.04 %); a public set with a wrong list of classes had 96 of 116 (83 %) in its
validation split."""
MAX_EXAMPLES = 5
"""Examples of a kind that the index keeps."""


class ProblemKind(NamedTuple):
    """A row of the table."""

    title: str
    """Follows a count: "3 boxes: zero size"."""
    unit: Literal["box", "image", "class", "file", "split"]
    action: Literal["fixed", "skipped", "refused", "kept"]
    effect: str
    """What training does, in words."""
    fix: str
    """What the user can do."""


LEFT_OUT = "left out, replaced by another image"
PACK_AGAIN = "the same `stoker data pack` again, which makes only what is missing; or copy it again"
PROBLEM_KINDS: dict[str, ProblemKind] = {
    # Boxes, found while reading (formats/).
    "no-box": ProblemKind("no box", "box", "skipped", "the annotation is left out", "add a box, or delete it"),
    "malformed-box": ProblemKind("malformed box", "box", "skipped", "the box is left out", "write four numbers"),
    "malformed-annotation": ProblemKind(
        "annotation that cannot be read", "box", "skipped", "the annotation is left out", "correct or delete the entry"
    ),
    "text-for-number": ProblemKind(
        "number written as text", "box", "fixed", "the text is read as a number", "write numbers without quotes"
    ),
    "no-class": ProblemKind("object without a class", "box", "skipped", "the box is left out", "add its class"),
    "unknown-class": ProblemKind(
        "class that the data set does not define", "box", "skipped", "the box is left out",
        "add the class to the list of classes, or correct the annotation",
    ),
    "unknown-image": ProblemKind(
        "box of an image that is not listed, or was left out", "box", "skipped", "the box is left out",
        "list the image, or delete the annotation",
    ),
    "malformed-row": ProblemKind(
        "line that cannot be read", "box", "skipped", "the line is left out", "correct or delete the line"
    ),
    "not-normalized": ProblemKind(
        "not within 0 … 1, where coordinates relative to the image size are expected", "box", "skipped",
        "the box is left out", "divide by the width and height of the image",
    ),
    "box-of-unreadable-image": ProblemKind(
        "relative box of an image whose size cannot be read", "box", "skipped", "the box is left out",
        "restore the image, or delete its annotations",
    ),
    "label-disagrees": ProblemKind(
        "label and text name different classes", "box", "fixed", "the text is used where the label map has it",
        "write records and label map again from one source",
    ),
    # Boxes, found while cleaning (clean.py).
    "not-a-number": ProblemKind("not a number", "box", "skipped", "the box is left out", "correct or delete the box"),
    "negative-size": ProblemKind("negative size", "box", "skipped", "the box is left out", "swap its corners"),
    "zero-size": ProblemKind("zero size", "box", "skipped", "the box is left out", "correct or delete the box"),
    "outside": ProblemKind("outside the image", "box", "skipped", "the box is left out", "correct or delete the box"),
    "not-in-pixels": ProblemKind(
        "within 0 … 1 where pixels are expected", "box", "skipped", "the box is left out",
        "multiply by the width and height of the image",
    ),
    "duplicate-box": ProblemKind("duplicate box", "box", "fixed", "one of the copies is used", "delete the copies"),
    "reaches-outside": ProblemKind(
        "extends outside the image by more than a pixel", "box", "fixed", "clipped to the image",
        "nothing, or correct the box",
    ),
    "tiny-box": ProblemKind(
        "less than a pixel wide or high", "box", "kept", "used as it is", "delete it: nothing is visible there"
    ),
    # Images, found while reading.
    "malformed-image": ProblemKind(
        "image entry that cannot be read", "image", "skipped", "the image is left out", "correct or delete the entry"
    ),
    "malformed-size": ProblemKind(
        "width or height that is not a size", "image", "fixed", "the size is read from the image file",
        "correct width and height",
    ),
    "unreadable-annotations": ProblemKind(
        "annotation file that cannot be read", "image", "skipped", "the image is left out",
        "correct or delete the file; an empty or truncated one comes from a copy that was interrupted",
    ),
    "no-annotation-file": ProblemKind(
        "listed, but without an annotation file", "image", "skipped", "the image is left out",
        "add the file or remove the line; an image without objects has a file without objects",
    ),
    "copied-entry": ProblemKind("identical entry twice", "image", "fixed", "used once", "remove the copy"),
    "ambiguous-id": ProblemKind(
        "id of several images", "image", "skipped", "these images are left out",
        "give every image its own id: data sets were merged without new ids",
    ),
    "listed-twice": ProblemKind(
        "image with several entries", "image", "skipped", "the image is left out",
        "merge the entries, or restore the folders in the file names: data sets were merged",
    ),
    "two-annotation-files": ProblemKind(
        "annotation file of an image that has another one", "image", "skipped", "the file is left out",
        "add the image that it belongs to, or delete the file",
    ),
    "in-two-splits": ProblemKind(
        "in more than one split, by its name", "image", "kept", "used in both: scores are too high",
        "remove it from one of the splits",
    ),
    "no-label-file": ProblemKind(
        "without a label file", "image", "kept", "used as background: an image without objects",
        "add an empty label file if it has no objects, or annotate it",
    ),
    "shared-label-file": ProblemKind(
        "one of several with the same label file", "image", "kept", "the boxes are used for each of them",
        "give every image a name and a label file of its own, or remove the copies",
    ),
    "no-box-left": ProblemKind(
        "image whose boxes are all left out", "image", "skipped", "the image is left out: it is not background",
        "correct its boxes; the kinds of boxes that are left out tell why",
    ),
    "damaged-record": ProblemKind(
        "record with a wrong checksum", "image", "skipped", "the record is left out", "copy or write its file again"
    ),
    "not-an-example": ProblemKind(
        "record that is not a tf.train.Example", "image", "skipped", "the record is left out", "write it again"
    ),
    "record-without-image": ProblemKind(
        "record without a readable image", "image", "skipped", "the record is left out",
        "put an encoded JPEG or PNG into its image/encoded",
    ),
    "unequal-lists": ProblemKind(
        "record whose lists of corners and classes differ in length", "image", "skipped", "the record is left out",
        "write it again, with one entry per box in every list",
    ),
    "wrong-case-name": ProblemKind(
        "name that its file has in another case or spelling", "image", "fixed", "the one file that matches is used",
        "write the names as the files have them",
    ),
    # Images, found in their files (check_images.py).
    "outside-path": ProblemKind(
        "outside the data set's folder, by an absolute path, `..` or a link", "image", "refused",
        "training does not start", "move it into the folder, or allow such paths with --allow-outside",
    ),
    "missing-image": ProblemKind(
        "does not exist", "image", "skipped", LEFT_OUT, "restore the file, or correct its name in the annotations"
    ),
    "empty-image": ProblemKind("has zero bytes", "image", "skipped", LEFT_OUT, "copy the file again"),
    "not-an-image": ProblemKind("not an image", "image", "skipped", LEFT_OUT, "replace the file, or remove it"),
    "damaged-image": ProblemKind(
        "truncated, damaged, or of an unsupported format", "image", "skipped", LEFT_OUT,
        "copy the file again, save it as JPEG or PNG, or remove it",
    ),
    "too-large-image": ProblemKind(
        "more pixels than the decoder accepts", "image", "skipped", LEFT_OUT, "cut it into tiles, or make it smaller"
    ),
    "unreadable-image": ProblemKind(
        "cannot be read from the disk", "image", "skipped", LEFT_OUT, "check its permissions and the disk"
    ),
    "size-disagrees": ProblemKind(
        "its size differs from the annotations", "image", "skipped", LEFT_OUT,
        "annotate the image as it is, or store it as it was annotated",
    ),
    "misnamed-image": ProblemKind(
        "has the file extension of another format", "image", "kept", "read by its content", "rename the file"
    ),
    "same-image-in-two-splits": ProblemKind(
        "the same file content in more than one split", "image", "kept", "used in all: scores are too high",
        "remove it from all but one of the splits",
    ),
    "copied-image": ProblemKind(
        "the same file content twice in a split", "image", "kept", "each copy is used", "remove the copies"
    ),
    "rotated-image": ProblemKind(
        "has an EXIF rotation", "image", "kept", "rotated so that its size matches the annotations", "nothing"
    ),
    "ambiguous-rotation": ProblemKind(
        "has an EXIF rotation, and its annotations do not tell whether it was applied", "image", "kept",
        "rotated as EXIF says", "store the image upright, or add its width and height to the annotations",
    ),
    "gray-image": ProblemKind("grayscale", "image", "kept", "gray is repeated as red, green and blue", "nothing"),
    "cmyk-image": ProblemKind("CMYK", "image", "kept", "converted to RGB, slowly", "save it as RGB"),
    "deep-image": ProblemKind("more than 8 bits per channel", "image", "kept", "the upper 8 bits are used", "nothing"),
    "transparent-image": ProblemKind("has an alpha channel", "image", "kept", "alpha is ignored", "save it without"),
    # Files, classes and splits.
    "damaged-shard": ProblemKind(
        "damaged shard", "file", "skipped", "records that cannot be found after the damage are left out",
        "copy or write the file again",
    ),
    "truncated-shard": ProblemKind(
        "shard that ends too early", "file", "skipped", "what is missing is left out",
        "copy or write the file again",
    ),
    "empty-shard": ProblemKind(
        "shard of zero bytes", "file", "skipped", "it is left out; TensorFlow would wait forever on it",
        "copy or write the file again, or delete it",
    ),
    "missing-shard": ProblemKind(
        "shard that does not exist", "file", "kept", "the others are used", "copy or write it again"
    ),
    "missing-packed-shard": ProblemKind(
        "packed shard that does not exist", "file", "refused", "training does not start", PACK_AGAIN
    ),
    "cut-packed-shard": ProblemKind(
        "packed shard with another size", "file", "refused", "training does not start", PACK_AGAIN
    ),
    "changed-packed-shard": ProblemKind(
        "packed shard with another checksum", "file", "kept", "what can be decoded is used, and may be wrong",
        f"delete it, then: {PACK_AGAIN}",
    ),
    "foreign-file": ProblemKind(
        "XML file that is not an annotation", "file", "skipped", "it is not read", "move it out of the data folder"
    ),
    "label-without-image": ProblemKind(
        "label file without an image", "file", "skipped", "it is not read",
        "add the image, correct the name, or delete the file",
    ),
    "unlabeled-image": ProblemKind(
        "image that no annotation names", "file", "kept", "it is not used",
        "annotate it, or list it without boxes to use it as background",
    ),
    "not-in-a-split": ProblemKind(
        "annotated image that is in no list of a split", "file", "kept", "it is not used",
        "add it to a list; or delete the lists, to use all images",
    ),
    "malformed-class": ProblemKind(
        "class entry that cannot be read", "class", "skipped", "its boxes are left out", "correct the entry"
    ),
    "copied-class": ProblemKind("class listed twice", "class", "fixed", "used once", "remove the copy"),
    "similar-class-names": ProblemKind(
        "classes that differ in case or spaces only", "class", "kept", "they are different classes",
        "give them one name if they are one class",
    ),
    "unused-class": ProblemKind(
        "class without a box", "class", "kept", "the model has an output that learns nothing",
        "remove the class, or annotate it",
    ),
    "class-not-in-split": ProblemKind(
        "class without a box in a split, with boxes in others", "class", "kept", "not trained, or not evaluated, there",
        "split the images again, so that every split has every class",
    ),
    "empty-split": ProblemKind(
        "split that training needs and that is absent or has no boxes", "split", "refused", "training does not start",
        "annotate it, or leave it out: part of the training images is then used for validation",
    ),
    "split-without-boxes": ProblemKind("test split without boxes", "split", "kept", "it has no AP", "annotate it"),
    "unreadable-set": ProblemKind(
        "data set that cannot be read", "file", "refused", "training does not start", "see the message"
    ),
}  # fmt: skip
"""By id. `ProblemCollector.add` refuses an id that is not in this table."""


@dataclass(frozen=True)
class Problem:
    """The problems of one kind in a data set."""

    kind: str
    """A key of `PROBLEM_KINDS`."""
    count: int
    examples: tuple[str, ...]
    """Each has file and line, or file and id, and the content: "a.jpg, annotation 7: [0, 0, 0, 5]"."""

    @property
    def title(self) -> str:
        return PROBLEM_KINDS[self.kind].title

    @property
    def drops_images(self) -> bool:
        """Whether it counts images that are not in the index."""
        return PROBLEM_KINDS[self.kind].unit == "image" and PROBLEM_KINDS[self.kind].action == "skipped"

    @property
    def is_bad_image(self) -> bool:
        """Whether it counts images that `--max-bad-fraction` limits; `--max-bad-boxes` limits those without boxes."""
        return self.drops_images and self.kind != "no-box-left"

    @property
    def drops_boxes(self) -> bool:
        """Whether it counts boxes that are left out though their image may be used."""
        kind = PROBLEM_KINDS[self.kind]
        return kind.unit == "box" and kind.action == "skipped" and self.kind != "box-of-unreadable-image"


@dataclass
class ProblemCollector:
    """Collects problems while a data set is read: all counts, and the first `max_examples` examples of each kind."""

    max_examples: int = MAX_EXAMPLES
    _counts: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def remaining_examples(self, kind: str) -> int:
        """How many more examples of a kind are kept."""
        return self.max_examples - len(self._examples.get(kind, ()))

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """Adds `count` problems of a kind, one of them described. Raises KeyError for a kind not in the table."""
        PROBLEM_KINDS[kind]
        self._counts[kind] = self._counts.get(kind, 0) + count
        examples = self._examples.setdefault(kind, [])
        if len(examples) < self.max_examples:
            # a file name may have bytes that are not Unicode, which neither the index nor JSON can hold
            examples.append(example.encode(errors="backslashreplace").decode())

    def clear(self) -> None:
        """Forgets everything, before the data set is read again."""
        self._counts.clear()
        self._examples.clear()

    def summarize(self, max_examples: int | None = None) -> tuple[Problem, ...]:
        """In the order of the table, each with at most `max_examples` examples."""
        return tuple(
            Problem(k, self._counts[k], tuple(self._examples[k][:max_examples]))
            for k in PROBLEM_KINDS
            if k in self._counts
        )


def max_bad_images(max_bad_fraction: float, num_images: int) -> int:
    """How many of `num_images` images (or boxes) may be unusable, rounded up: at least one, unless the fraction is
    zero."""
    return max(1, math.ceil(round(max_bad_fraction * num_images, 9))) if max_bad_fraction > 0 else 0


def count_of_all(count: int, total: int, noun: str) -> str:
    """A part as people read it: "28 of 405 images (7 %)"."""
    percent = 100 * count / max(1, total)
    digits = 0 if percent >= 1 or count == 0 else 2
    return f"{count:,} of {total:,} {noun} ({percent:.{digits}f} %)"
