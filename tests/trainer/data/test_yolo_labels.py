"""The label file of an image: the same stem first, then the only one that fits; shared label files are reported."""

import unicodedata
from pathlib import Path

from hypothesis import strategies as st

from stoker.data.formats.yolo import match_labels
from stoker.data.index import open_index
from tests.fixtures.data_yolo import flat, kinds, label, make_image
from tests.trainer.data.examples import property_test

STEMS = st.text("aAbBéÉ", min_size=1, max_size=2)


@property_test(
    st.sets(STEMS, max_size=12), st.sets(STEMS, max_size=12), st.sampled_from(["NFC", "NFD"]), few=25, many=300
)
def test_a_label_of_the_same_stem_is_preferred_and_none_of_another_image_used(
    images: set[str], labels: set[str], form: str
) -> None:
    labels = {unicodedata.normalize(form, stem) for stem in labels}
    matches = match_labels([f"{stem}.jpg" for stem in images], [f"{stem}.txt" for stem in labels])
    for stem in images:
        label_name = matches.get(f"{stem}.jpg")
        if stem in labels:
            assert label_name == f"{stem}.txt"
        elif label_name is not None:
            other = label_name.removesuffix(".txt")
            assert unicodedata.normalize("NFC", other).casefold() == stem.casefold()
            assert other not in images


def test_a_name_in_the_same_case_comes_first(tmp_path: Path) -> None:
    for stem, row in (("A", "0 0.5 0.5 0.2 0.2"), ("a", "1 0.5 0.5 0.4 0.4"), ("other", "0 0.5 0.5 0.6 0.6")):
        make_image(tmp_path / "images" / f"{stem}.jpg", format="JPEG")
        label(tmp_path / "labels" / f"{stem}.txt", row + "\n")
    make_image(tmp_path / "images" / "OTHER.jpg", format="JPEG")  # the label of `other` is not its own
    index = open_index(tmp_path)
    matches = {
        index.path(row).name: index.labels[index.offsets[row] : index.offsets[row + 1]].tolist() for row in range(4)
    }
    assert matches == {"A.jpg": [0], "a.jpg": [1], "other.jpg": [0], "OTHER.jpg": []}
    assert kinds(index)["no-label-file"] == "images/OTHER.jpg"


def test_a_label_file_of_several_images_is_reported(tmp_path: Path) -> None:
    root = flat(tmp_path)
    make_image(root / "images" / "twin.jpg", format="JPEG")
    make_image(root / "images" / "twin.png")
    label(root / "labels" / "twin.txt")
    index = open_index(root)
    shared = next(problem for problem in index.problems if problem.kind == "shared-label-file")
    assert shared.examples == ("images/twin.jpg: labels/twin.txt", "images/twin.png: labels/twin.txt")
