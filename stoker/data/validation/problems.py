"""What can be wrong with a data set: every kind, what training does about it, and how it is mended.

The readers (`formats/`) and the cleaning (`clean.py`) put what they meet into a `Problems`; the index keeps the counts
and a few examples, `stoker data check` (`check.py`) everything. Not here: errors that end the reading, which are
`DataError`s, and what is wrong inside the pictures (`check.py` finds it, with kinds from this table).
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

MAX_BAD = 0.01
"""Share of the pictures that may be unusable, unless it is set."""
FEW = 5
"""Examples of a kind that the index keeps."""


class Kind(NamedTuple):
    """A row of the table of what can be wrong."""

    title: str
    """In words, after a count: "3 boxes: zero size"."""
    unit: Literal["box", "picture", "class", "file", "split"]
    action: Literal["fixed", "skipped", "refused", "kept"]
    does: str
    """What training does, in words."""
    fix: str
    """What the user can do."""


KINDS: dict[str, Kind] = {
    # Of a box, found while reading (formats/).
    "no-box": Kind("no box", "box", "skipped", "the annotation is left out", "give it a box, or delete it"),
    "malformed-box": Kind("malformed box", "box", "skipped", "the box is left out", "give it four numbers"),
    "malformed-annotation": Kind(
        "annotation that cannot be read", "box", "skipped", "it is left out", "correct or delete the entry"
    ),
    "text-for-number": Kind(
        "number written as text", "box", "fixed", "read as the number it spells", "write numbers without quotes"
    ),
    "no-class": Kind("object without a class", "box", "skipped", "the box is left out", "give it a class"),
    "unknown-class": Kind(
        "class that the data set does not define", "box", "skipped", "the box is left out",
        "add the class to the list of classes, or correct the annotation",
    ),
    "unknown-picture": Kind(
        "box of a picture that is not listed, or was left out", "box", "skipped", "the box is left out",
        "list the picture, or delete the annotation",
    ),
    "malformed-row": Kind(
        "line that cannot be read", "box", "skipped", "the line is left out", "correct or delete the line"
    ),
    "not-normalised": Kind(
        "not within 0 … 1, where shares of the picture's width and height are meant", "box", "skipped",
        "the box is left out", "divide by the width and height of the picture",
    ),
    "unplaced-box": Kind(
        "box in shares of a picture whose size cannot be read", "box", "skipped", "the box is left out",
        "restore the picture, or delete its annotations",
    ),
    "label-disagrees": Kind(
        "label and text that name different classes", "box", "fixed", "the text decides where the label map has it",
        "write records and label map again from one source",
    ),
    # Of a box, found while cleaning (clean.py).
    "not-a-number": Kind("not a number", "box", "skipped", "the box is left out", "correct or delete the box"),
    "negative-size": Kind("negative size", "box", "skipped", "the box is left out", "swap its corners"),
    "zero-size": Kind("zero size", "box", "skipped", "the box is left out", "correct or delete the box"),
    "outside": Kind("outside the picture", "box", "skipped", "the box is left out", "correct or delete the box"),
    "not-in-pixels": Kind(
        "within 0 … 1 where pixels are meant", "box", "skipped", "the box is left out",
        "multiply by the width and height of the picture",
    ),
    "duplicate-box": Kind("drawn twice", "box", "fixed", "one of the copies is used", "delete the copies"),
    "reaches-outside": Kind(
        "reaches outside the picture by more than a pixel", "box", "fixed", "clipped to the picture",
        "nothing, or correct the box",
    ),
    "tiny-box": Kind(
        "less than a pixel wide or high", "box", "kept", "used as it is", "delete it: nothing can be seen there"
    ),
    # Of a picture, found while reading.
    "malformed-picture": Kind(
        "picture entry that cannot be read", "picture", "skipped", "the picture is left out",
        "correct the entry, or delete it",
    ),
    "malformed-size": Kind(
        "width or height that is no size", "picture", "fixed", "the size is read from the picture",
        "correct width and height",
    ),
    "unreadable-annotations": Kind(
        "annotation file that cannot be read", "picture", "skipped", "the picture is left out",
        "correct or delete the file; an empty or truncated one comes from a copy that was cut short",
    ),
    "no-annotation-file": Kind(
        "listed, but without an annotation file", "picture", "skipped", "the picture is left out",
        "add the file or remove the line; a picture without objects has a file without objects",
    ),
    "copied-entry": Kind("listed twice in the same words", "picture", "fixed", "used once", "remove the copy"),
    "ambiguous-id": Kind(
        "id that several pictures share", "picture", "skipped", "these pictures are left out",
        "give every picture its own id: data sets were merged without new ones",
    ),
    "listed-twice": Kind(
        "picture with several entries", "picture", "skipped", "the picture is left out",
        "merge the entries, or restore the folders in the file names: data sets were merged",
    ),
    "two-annotation-files": Kind(
        "annotation file about a picture that has another", "picture", "skipped", "the file is left out",
        "add the picture that it is about, or delete the file",
    ),
    "in-two-splits": Kind(
        "in more than one split, by its name", "picture", "kept", "used in both: scores will flatter",
        "remove it from one of the splits",
    ),
    "no-label-file": Kind(
        "without a label file", "picture", "kept", "used as background: nothing is to be found there",
        "add an empty label file where that is meant, or annotate the picture",
    ),
    "shared-label-file": Kind(
        "one of several with the same label file", "picture", "kept", "its boxes are used for each of them",
        "give every picture a name and a label file of its own, or remove the copies",
    ),
    "damaged-record": Kind(
        "record whose checksum is wrong", "picture", "skipped", "the record is left out", "copy or write its file again"
    ),
    "not-an-example": Kind(
        "record that is no tf.train.Example", "picture", "skipped", "the record is left out", "write it again"
    ),
    "record-without-picture": Kind(
        "record without a picture that can be read", "picture", "skipped", "the record is left out",
        "put an encoded JPEG or PNG into its image/encoded",
    ),
    "unequal-lists": Kind(
        "record whose lists of corners and classes differ in length", "picture", "skipped", "the record is left out",
        "write it again, with one entry per box in every list",
    ),
    "wrong-case-name": Kind(
        "name that its file has in another case or spelling", "picture", "fixed",
        "the one file that can be meant is used", "write the names as the files have them",
    ),
    # Of a picture, found in its file (check.py).
    "missing-picture": Kind(
        "does not exist", "picture", "skipped", "left out, another takes its place",
        "restore the file, or correct its name in the annotations",
    ),
    "empty-picture": Kind(
        "has zero bytes", "picture", "skipped", "left out, another takes its place", "copy the file again"
    ),
    "not-a-picture": Kind(
        "is no picture", "picture", "skipped", "left out, another takes its place", "replace the file, or remove it"
    ),
    "damaged-picture": Kind(
        "truncated, damaged, or of a kind that is not read", "picture", "skipped", "left out, another takes its place",
        "copy the file again, save it as JPEG or PNG, or remove it",
    ),
    "too-large-picture": Kind(
        "more pixels than are decoded", "picture", "skipped", "left out, another takes its place",
        "cut it into tiles, or make it smaller",
    ),
    "unreadable-picture": Kind(
        "cannot be read from the disk", "picture", "skipped", "left out, another takes its place",
        "check its permissions and the disk",
    ),
    "size-disagrees": Kind(
        "has another size than its annotations say", "picture", "skipped", "left out, another takes its place",
        "annotate the picture as it is, or store it as it was annotated",
    ),
    "misnamed-picture": Kind(
        "has the ending of another format", "picture", "kept", "read as what it is", "rename the file"
    ),
    "same-picture-in-two-splits": Kind(
        "the same file content in more than one split", "picture", "kept", "used in all: scores will flatter",
        "remove it from all but one of the splits",
    ),
    "copied-picture": Kind(
        "the same file content twice in a split", "picture", "kept", "used as often as it is there",
        "remove the copies",
    ),
    "rotated-picture": Kind(
        "EXIF says to turn it", "picture", "kept", "shown in the way whose size the annotations say", "nothing"
    ),
    "ambiguous-rotation": Kind(
        "to be turned or mirrored, as EXIF says; its annotations do not tell if it was", "picture", "kept",
        "shown as EXIF says", "store the picture upright, or say its width and height in the annotations",
    ),
    "grey-picture": Kind("grey", "picture", "kept", "grey is repeated as red, green and blue", "nothing"),
    "cmyk-picture": Kind("CMYK", "picture", "kept", "converted to RGB, slowly", "save it as RGB"),
    "deep-picture": Kind("more than 8 bits a channel", "picture", "kept", "the upper 8 bits are used", "nothing"),
    "transparent-picture": Kind("has an alpha channel", "picture", "kept", "alpha is not used", "save it without"),
    # Of files, classes and splits.
    "damaged-shard": Kind(
        "damaged TFRecord file", "file", "skipped", "what cannot be found behind the damage is left out",
        "copy or write the file again",
    ),
    "truncated-shard": Kind(
        "TFRecord file that ends within a record", "file", "skipped", "the last record is left out",
        "copy or write the file again",
    ),
    "empty-shard": Kind(
        "TFRecord file of zero bytes", "file", "skipped", "it is left out; TensorFlow would wait for ever on it",
        "copy or write the file again, or delete it",
    ),
    "missing-shard": Kind(
        "numbered TFRecord file that is not there", "file", "kept", "the others are used", "copy or write it again"
    ),
    "foreign-file": Kind(
        "XML file that is no annotation", "file", "skipped", "it is not read", "move it out of the data folder"
    ),
    "label-without-picture": Kind(
        "label file without a picture", "file", "skipped", "it is not read",
        "add the picture, correct the name, or delete the file",
    ),
    "unlabelled-picture": Kind(
        "picture that no annotation names", "file", "kept", "it is not used",
        "annotate it, or add it without boxes to have it as background",
    ),
    "malformed-class": Kind(
        "class entry that cannot be read", "class", "skipped", "its boxes are left out", "correct the entry"
    ),
    "copied-class": Kind("class listed twice", "class", "fixed", "used once", "remove the copy"),
    "similar-class-names": Kind(
        "classes that differ in case or spaces only", "class", "kept", "they are different classes",
        "give them one name, if they are one",
    ),
    "unused-class": Kind(
        "class without a box", "class", "kept", "the model gets an output that learns nothing",
        "remove the class, or annotate it",
    ),
    "class-not-in-split": Kind(
        "class without a box in a split that others have boxes of", "class", "kept",
        "not learned from, or not scored, there", "divide the pictures anew, so that every split has every class",
    ),
    "empty-split": Kind(
        "split that training needs and that is absent or has no boxes", "split", "refused", "training does not start",
        "annotate it, or leave it out to have a part of the training pictures held back as validation",
    ),
    "split-without-boxes": Kind("test split without boxes", "split", "kept", "it has no AP", "annotate it"),
    "unreadable-set": Kind(
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
        return KINDS[self.kind].title

    @property
    def loses_pictures(self) -> bool:
        """Whether it counts pictures that are not in the index."""
        return KINDS[self.kind].unit == "picture" and KINDS[self.kind].action == "skipped"


@dataclass
class Problems:
    """Collects what is wrong while a data set is read: all counts, and the first `limit` examples of each kind."""

    limit: int = FEW
    _counts: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def room(self, kind: str) -> int:
        """How many more examples of a kind are kept."""
        return self.limit - len(self._examples.get(kind, ()))

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """One more of a kind (`count` more, of which one is described). Raises KeyError for a kind not in KINDS."""
        KINDS[kind]
        self._counts[kind] = self._counts.get(kind, 0) + count
        examples = self._examples.setdefault(kind, [])
        if len(examples) < self.limit:
            # a name of a file may be bytes that are no Unicode, which neither the index nor JSON can hold
            examples.append(example.encode(errors="backslashreplace").decode())

    def found(self, examples: int | None = None) -> tuple[Problem, ...]:
        """In the order of KINDS, each with at most so many of the examples."""
        return tuple(
            Problem(k, self._counts[k], tuple(self._examples[k][:examples])) for k in KINDS if k in self._counts
        )


def tolerated(max_bad: float, pictures: int) -> int:
    """How many of some pictures may be unusable: the share `max_bad` of them; one, unless the share is zero."""
    return max(1, int(max_bad * pictures)) if max_bad > 0 else 0
