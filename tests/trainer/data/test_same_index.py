"""The same boxes written in every format that is read give the same index. The files are written here, by hand."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.formats.finder import FORMATS
from stoker.data.index import open_index
from stoker_watch.errors import StokerError
from tests.fixtures.data_same_index import CLASSES, DAMAGED, DRAWN, WRITE, Drawn, content, drawings
from tests.trainer.data.examples import property_test
from tests.trainer.data.tfrecords import jpeg


def test_every_format_is_here() -> None:
    assert list(WRITE) == list(FORMATS)


@property_test(drawings(), few=3, many=20)
def test_the_same_boxes_are_the_same_index(tmp_path_factory: pytest.TempPathFactory, drawn: list[Drawn]) -> None:
    root = tmp_path_factory.mktemp("same")
    expected = [
        (
            item.split,
            item.name,
            [item.height, item.width],
            [[float(value) for value in box[1:]] for box in item.boxes],
            [CLASSES[box[0]] for box in item.boxes],
            [False] * len(item.boxes),
            jpeg(item.width, item.height, len(item.boxes)),
        )
        for item in drawn
    ]
    for name, write in WRITE.items():
        write(root / name, drawn)
        index = open_index(root / name)
        assert index.format == name
        assert index.class_names == CLASSES, name
        # a table of Open Images lists boxes only, so an image without boxes is not in it
        listed = expected if name != "openimages" else [image for image in expected if image[3]]
        assert content(index) == listed, name
        areas = [(x2 - x1) * (y2 - y1) for item in drawn for _, x1, y1, x2, y2 in item.boxes]
        order = np.concatenate(
            [np.arange(index.offsets[r], index.offsets[r + 1]) for s in index.splits for r in index.image_indices(s)]
        )
        assert index.area[order.astype(int)] == pytest.approx(areas, rel=1e-4), name
        kinds = {problem.kind for problem in index.problems}
        assert not [kind for kind in kinds if not re.search("class|copied|tiny|same", kind)], (name, index.problems)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    for name in DAMAGED:
        (root / name).mkdir()
        WRITE[name](root / name, DRAWN)
    return root


@pytest.mark.parametrize("name", DAMAGED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_damaged_bytes_of_exports_never_crash(name: str, exports: Path, data: st.DataObject) -> None:
    file = exports / name / DAMAGED[name]
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.sampled_from([0, 1, 1, 7, len(whole)]))
    new = data.draw(
        st.binary(max_size=4)
        | st.sampled_from([b'"', b"}", b"NaN", b"1e999", b"\0", b"\xff", b"<", b",", b"-", b"null"])
    )
    try:
        file.write_bytes(whole[:start] + new + whole[start + length :])
        with contextlib.suppress(StokerError):
            open_index(exports / name)
    finally:
        file.write_bytes(whole)
