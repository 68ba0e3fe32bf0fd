"""What can be wrong with a data set: every kind, what training does about it, and how it is mended.

The readers (`formats/`) and the cleaning (`clean.py`) put what they meet into a `Problems`; the index keeps the counts
and a few examples, `stoker data check` (`check.py`) everything. Not here: errors that end the reading, which are
`DataError`s, and what is wrong inside the pictures (`check.py` finds it, with kinds from this table).
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

DEFAULT_MAX_BAD_FRACTION = 0.01
"""Share of the pictures that may be unusable, unless it is set."""
MAX_EXAMPLES = 5
"""Examples of a kind that the index keeps."""


class ProblemKind(NamedTuple):
    """A row of the table of what can be wrong."""

    title: str
    """In words, after a count: "3 boxes: zero size"."""
    unit: Literal["box", "image", "class", "file", "split"]
    action: Literal["fixed", "skipped", "refused", "kept"]
    effect: str
    """What training does, in words."""
    fix: str
    """What the user can do."""


PROBLEM_KINDS: dict[str, ProblemKind] = {
    # Of a box, found while reading (formats/).
    "no-box": ProblemKind("no box", "box", "skipped", "the annotation is left out", "give it a box, or delete it"),
    "malformed-box": ProblemKind("malformed box", "box", "skipped", "the box is left out", "give it four numbers"),
    "malformed-annotation": ProblemKind(
        "annotation that cannot be read", "box", "skipped", "it is left out", "correct or delete the entry"
    ),
    "text-for-number": ProblemKind(
        "number written as text", "box", "fixed", "read as the number it spells", "write numbers without quotes"
    ),
    "no-class": ProblemKind("object without a class", "box", "skipped", "the box is left out", "give it a class"),
    "unknown-class": ProblemKind(
        "class that the data set does not define", "box", "skipped", "the box is left out",
        "add the class to the list of classes, or correct the annotation",
    ),
    "unknown-image": ProblemKind(
        "box of a picture that is not listed, or was left out", "box", "skipped", "the box is left out",
        "list the picture, or delete the annotation",
    ),
    "malformed-row": ProblemKind(
        "line that cannot be read", "box", "skipped", "the line is left out", "correct or delete the line"
    ),
    "not-normalized": ProblemKind(
        "not within 0 … 1, where shares of the picture's width and height are meant", "box", "skipped",
        "the box is left out", "divide by the width and height of the picture",
    ),
    "box-of-unreadable-image": ProblemKind(
        "box in shares of a picture whose size cannot be read", "box", "skipped", "the box is left out",
        "restore the picture, or delete its annotations",
    ),
    "label-disagrees": ProblemKind(
        "label and text that name different classes", "box", "fixed", "the text decides where the label map has it",
        "write records and label map again from one source",
    ),
    # Of a box, found while cleaning (clean.py).
    "not-a-number": ProblemKind("not a number", "box", "skipped", "the box is left out", "correct or delete the box"),
    "negative-size": ProblemKind("negative size", "box", "skipped", "the box is left out", "swap its corners"),
    "zero-size": ProblemKind("zero size", "box", "skipped", "the box is left out", "correct or delete the box"),
    "outside": ProblemKind("outside the picture", "box", "skipped", "the box is left out", "correct or delete the box"),
    "not-in-pixels": ProblemKind(
        "within 0 … 1 where pixels are meant", "box", "skipped", "the box is left out",
        "multiply by the width and height of the picture",
    ),
    "duplicate-box": ProblemKind("drawn twice", "box", "fixed", "one of the copies is used", "delete the copies"),
    "reaches-outside": ProblemKind(
        "reaches outside the picture by more than a pixel", "box", "fixed", "clipped to the picture",
        "nothing, or correct the box",
    ),
    "tiny-box": ProblemKind(
        "less than a pixel wide or high", "box", "kept", "used as it is", "delete it: nothing can be seen there"
    ),
    # Of a picture, found while reading.
    "malformed-image": ProblemKind(
        "picture entry that cannot be read", "image", "skipped", "the picture is left out",
        "correct the entry, or delete it",
    ),
    "malformed-size": ProblemKind(
        "width or height that is no size", "image", "fixed", "the size is read from the picture",
        "correct width and height",
    ),
    "unreadable-annotations": ProblemKind(
        "annotation file that cannot be read", "image", "skipped", "the picture is left out",
        "correct or delete the file; an empty or truncated one comes from a copy that was cut short",
    ),
    "no-annotation-file": ProblemKind(
        "listed, but without an annotation file", "image", "skipped", "the picture is left out",
        "add the file or remove the line; a picture without objects has a file without objects",
    ),
    "copied-entry": ProblemKind("listed twice in the same words", "image", "fixed", "used once", "remove the copy"),
    "ambiguous-id": ProblemKind(
        "id that several pictures share", "image", "skipped", "these pictures are left out",
        "give every picture its own id: data sets were merged without new ones",
    ),
    "listed-twice": ProblemKind(
        "picture with several entries", "image", "skipped", "the picture is left out",
        "merge the entries, or restore the folders in the file names: data sets were merged",
    ),
    "two-annotation-files": ProblemKind(
        "annotation file about a picture that has another", "image", "skipped", "the file is left out",
        "add the picture that it is about, or delete the file",
    ),
    "in-two-splits": ProblemKind(
        "in more than one split, by its name", "image", "kept", "used in both: scores will flatter",
        "remove it from one of the splits",
    ),
    "no-label-file": ProblemKind(
        "without a label file", "image", "kept", "used as background: nothing is to be found there",
        "add an empty label file where that is meant, or annotate the picture",
    ),
    "shared-label-file": ProblemKind(
        "one of several with the same label file", "image", "kept", "its boxes are used for each of them",
        "give every picture a name and a label file of its own, or remove the copies",
    ),
    "damaged-record": ProblemKind(
        "record whose checksum is wrong", "image", "skipped", "the record is left out", "copy or write its file again"
    ),
    "not-an-example": ProblemKind(
        "record that is no tf.train.Example", "image", "skipped", "the record is left out", "write it again"
    ),
    "record-without-image": ProblemKind(
        "record without a picture that can be read", "image", "skipped", "the record is left out",
        "put an encoded JPEG or PNG into its image/encoded",
    ),
    "unequal-lists": ProblemKind(
        "record whose lists of corners and classes differ in length", "image", "skipped", "the record is left out",
        "write it again, with one entry per box in every list",
    ),
    "wrong-case-name": ProblemKind(
        "name that its file has in another case or spelling", "image", "fixed",
        "the one file that can be meant is used", "write the names as the files have them",
    ),
    # Of a picture, found in its file (check.py).
    "missing-image": ProblemKind(
        "does not exist", "image", "skipped", "left out, another takes its place",
        "restore the file, or correct its name in the annotations",
    ),
    "empty-image": ProblemKind(
        "has zero bytes", "image", "skipped", "left out, another takes its place", "copy the file again"
    ),
    "not-an-image": ProblemKind(
        "is no picture", "image", "skipped", "left out, another takes its place", "replace the file, or remove it"
    ),
    "damaged-image": ProblemKind(
        "truncated, damaged, or of a kind that is not read", "image", "skipped", "left out, another takes its place",
        "copy the file again, save it as JPEG or PNG, or remove it",
    ),
    "too-large-image": ProblemKind(
        "more pixels than are decoded", "image", "skipped", "left out, another takes its place",
        "cut it into tiles, or make it smaller",
    ),
    "unreadable-image": ProblemKind(
        "cannot be read from the disk", "image", "skipped", "left out, another takes its place",
        "check its permissions and the disk",
    ),
    "size-disagrees": ProblemKind(
        "has another size than its annotations say", "image", "skipped", "left out, another takes its place",
        "annotate the picture as it is, or store it as it was annotated",
    ),
    "misnamed-image": ProblemKind(
        "has the ending of another format", "image", "kept", "read as what it is", "rename the file"
    ),
    "same-image-in-two-splits": ProblemKind(
        "the same file content in more than one split", "image", "kept", "used in all: scores will flatter",
        "remove it from all but one of the splits",
    ),
    "copied-image": ProblemKind(
        "the same file content twice in a split", "image", "kept", "used as often as it is there",
        "remove the copies",
    ),
    "rotated-image": ProblemKind(
        "EXIF says to turn it", "image", "kept", "shown in the way whose size the annotations say", "nothing"
    ),
    "ambiguous-rotation": ProblemKind(
        "to be turned or mirrored, as EXIF says; its annotations do not tell if it was", "image", "kept",
        "shown as EXIF says", "store the picture upright, or say its width and height in the annotations",
    ),
    "gray-image": ProblemKind("grey", "image", "kept", "grey is repeated as red, green and blue", "nothing"),
    "cmyk-image": ProblemKind("CMYK", "image", "kept", "converted to RGB, slowly", "save it as RGB"),
    "deep-image": ProblemKind("more than 8 bits a channel", "image", "kept", "the upper 8 bits are used", "nothing"),
    "transparent-image": ProblemKind("has an alpha channel", "image", "kept", "alpha is not used", "save it without"),
    # Of files, classes and splits.
    "damaged-shard": ProblemKind(
        "damaged TFRecord file", "file", "skipped", "what cannot be found behind the damage is left out",
        "copy or write the file again",
    ),
    "truncated-shard": ProblemKind(
        "TFRecord file that ends within a record", "file", "skipped", "the last record is left out",
        "copy or write the file again",
    ),
    "empty-shard": ProblemKind(
        "TFRecord file of zero bytes", "file", "skipped", "it is left out; TensorFlow would wait for ever on it",
        "copy or write the file again, or delete it",
    ),
    "missing-shard": ProblemKind(
        "numbered TFRecord file that is not there", "file", "kept", "the others are used", "copy or write it again"
    ),
    "foreign-file": ProblemKind(
        "XML file that is no annotation", "file", "skipped", "it is not read", "move it out of the data folder"
    ),
    "label-without-image": ProblemKind(
        "label file without a picture", "file", "skipped", "it is not read",
        "add the picture, correct the name, or delete the file",
    ),
    "unlabeled-image": ProblemKind(
        "picture that no annotation names", "file", "kept", "it is not used",
        "annotate it, or add it without boxes to have it as background",
    ),
    "malformed-class": ProblemKind(
        "class entry that cannot be read", "class", "skipped", "its boxes are left out", "correct the entry"
    ),
    "copied-class": ProblemKind("class listed twice", "class", "fixed", "used once", "remove the copy"),
    "similar-class-names": ProblemKind(
        "classes that differ in case or spaces only", "class", "kept", "they are different classes",
        "give them one name, if they are one",
    ),
    "unused-class": ProblemKind(
        "class without a box", "class", "kept", "the model gets an output that learns nothing",
        "remove the class, or annotate it",
    ),
    "class-not-in-split": ProblemKind(
        "class without a box in a split that others have boxes of", "class", "kept",
        "not learned from, or not scored, there", "divide the pictures anew, so that every split has every class",
    ),
    "empty-split": ProblemKind(
        "split that training needs and that is absent or has no boxes", "split", "refused", "training does not start",
        "annotate it, or leave it out to have a part of the training pictures held back as validation",
    ),
    "split-without-boxes": ProblemKind("test split without boxes", "split", "kept", "it has no AP", "annotate it"),
    "unreadable-set": ProblemKind(
        "data set that cannot be read", "file", "refused", "training does not start", "see the message"
    ),
}  # fmt: skip
"""Everything that can be wrong, by id; a kind that is not here cannot be reported."""


@dataclass(frozen=True)
class Problem:
    """What was found of one kind."""

    kind: str
    """A key of KINDS."""
    count: int
    examples: tuple[str, ...]
    """Each names the place, file and line or id, and what is there: "a.jpg, annotation 7: [0, 0, 0, 5]"."""

    @property
    def title(self) -> str:
        return PROBLEM_KINDS[self.kind].title

    @property
    def drops_images(self) -> bool:
        """Whether it counts pictures that are not in the index."""
        return PROBLEM_KINDS[self.kind].unit == "image" and PROBLEM_KINDS[self.kind].action == "skipped"


@dataclass
class ProblemCollector:
    """Collects what is wrong while a data set is read: all counts, and the first `limit` examples of each kind."""

    max_examples: int = MAX_EXAMPLES
    _counts: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def remaining_examples(self, kind: str) -> int:
        """How many more examples of a kind are kept."""
        return self.max_examples - len(self._examples.get(kind, ()))

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """One more of a kind (`count` more, of which one is described). Raises KeyError for a kind not in KINDS."""
        PROBLEM_KINDS[kind]
        self._counts[kind] = self._counts.get(kind, 0) + count
        examples = self._examples.setdefault(kind, [])
        if len(examples) < self.max_examples:
            # a name of a file may be bytes that are no Unicode, which neither the index nor JSON can hold
            examples.append(example.encode(errors="backslashreplace").decode())

    def summarize(self, max_examples: int | None = None) -> tuple[Problem, ...]:
        """In the order of KINDS, each with at most so many of the examples."""
        return tuple(
            Problem(k, self._counts[k], tuple(self._examples[k][:max_examples]))
            for k in PROBLEM_KINDS
            if k in self._counts
        )


def max_bad_images(max_bad_fraction: float, num_images: int) -> int:
    """How many of some pictures may be unusable: the share `max_bad` of them; one, unless the share is zero."""
    return max(1, int(max_bad_fraction * num_images)) if max_bad_fraction > 0 else 0
