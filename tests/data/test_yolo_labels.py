"""Which label file is whose: that of an image's own name first, then one that can be meant; shared ones are said."""

import unicodedata
from pathlib import Path

from hypothesis import strategies as st

from stoker.data.formats.yolo_files import match_labels
from stoker.data.index import open_index
from tests.data.examples import property_test
from tests.data.test_yolo import flat, kinds, label, make_image

STEMS = st.text("aAbBéÉ", min_size=1, max_size=2)


@property_test(
    st.sets(STEMS, max_size=12), st.sets(STEMS, max_size=12), st.sampled_from(["NFC", "NFD"]), few=25, many=300
)
def test_a_label_of_the_own_name_is_taken_and_none_of_another_image(
    images: set[str], labels: set[str], form: str
) -> None:
    labels = {unicodedata.normalize(form, stem) for stem in labels}
    found = match_labels([f"{stem}.jpg" for stem in images], [f"{stem}.txt" for stem in labels])
    for stem in images:
        taken = found.get(f"{stem}.jpg")
        if stem in labels:
            assert taken == f"{stem}.txt"
        elif taken is not None:
            other = taken.removesuffix(".txt")
            assert unicodedata.normalize("NFC", other).casefold() == stem.casefold()
            assert other not in images


def test_a_name_in_the_same_case_comes_first(tmp_path: Path) -> None:
    for stem, row in (("A", "0 0.5 0.5 0.2 0.2"), ("a", "1 0.5 0.5 0.4 0.4"), ("other", "0 0.5 0.5 0.6 0.6")):
        make_image(tmp_path / "images" / f"{stem}.jpg", format="JPEG")
        label(tmp_path / "labels" / f"{stem}.txt", row + "\n")
    make_image(tmp_path / "images" / "OTHER.jpg", format="JPEG")  # the label of `other` is not its own
    index = open_index(tmp_path)
    found = {
        index.path(row).name: index.labels[index.offsets[row] : index.offsets[row + 1]].tolist() for row in range(4)
    }
    assert found == {"A.jpg": [0], "a.jpg": [1], "other.jpg": [0], "OTHER.jpg": []}
    assert kinds(index)["no-label-file"] == "images/OTHER.jpg"


def test_a_label_file_of_several_images_is_said(tmp_path: Path) -> None:
    root = flat(tmp_path)
    make_image(root / "images" / "twin.jpg", format="JPEG")
    make_image(root / "images" / "twin.png")
    label(root / "labels" / "twin.txt")
    index = open_index(root)
    shared = next(problem for problem in index.problems if problem.kind == "shared-label-file")
    assert shared.examples == ("images/twin.jpg: labels/twin.txt", "images/twin.png: labels/twin.txt")
