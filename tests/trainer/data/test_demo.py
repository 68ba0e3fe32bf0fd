"""The demo data set: deterministic, complete or absent, with correct annotations."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker.data import demo
from stoker.data.index import open_index, require_images


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not that of other tests, where the data set may be already."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "IMAGES_PER_SPLIT", {"train": 12, "valid": 6})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("small")
def test_demo_is_the_name_of_a_data_set(own_cache: Path) -> None:
    index = open_index("demo")
    assert index.class_names == demo.CLASSES
    assert {split: len(index.image_indices(split)) for split in index.splits} == {"train": 12, "val": 6}
    assert index.problems == ()
    assert require_images(index) == []
    assert index.root.is_relative_to(own_cache)
    with Image.open(index.path(0)) as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (demo.IMAGE_SIDE, demo.IMAGE_SIDE), "RGB")


@pytest.mark.usefixtures("small")
def test_it_is_generated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo.ensure_demo()

    def draw(*_: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(demo, "draw_split", draw)
    assert demo.ensure_demo() == first
    monkeypatch.setattr(demo, "VERSION", demo.VERSION + 1)
    with pytest.raises(AssertionError, match="drawn again"):
        demo.ensure_demo()


@pytest.mark.usefixtures("small")
def test_generation_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = files(demo.ensure_demo())
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "other"))
    assert one == files(demo.ensure_demo())
    assert len(one) == 12 + 6 + 2


@pytest.mark.usefixtures("small")
def test_kill_during_generation_leaves_no_complete_folder() -> None:
    script = (
        "import os, signal; from stoker.data import demo\n"
        "demo.IMAGES_PER_SPLIT = {'train': 12, 'valid': 6}; draw = demo.draw_split\n"
        "def die(folder, split, count):\n"
        "    draw(folder, split, count)\n"
        "    if split == 'valid': os.kill(os.getpid(), signal.SIGKILL)\n"
        "demo.draw_split = die; demo.ensure_demo()"
    )
    killed = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    place = Path(os.environ["STOKER_CACHE_DIR"]) / "demo-v1"
    assert not place.exists()
    assert demo.ensure_demo() == place
    assert len(open_index("demo")) == 18


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["train", "valid"]), st.integers(0, 10**6))
def test_boxes_are_inside_and_contain_the_visible_area(split: str, number: int) -> None:
    pixels, shapes = demo.draw_image(split, number)
    again, same = demo.draw_image(split, number)
    assert same == shapes
    np.testing.assert_array_equal(pixels, again)
    assert pixels.shape == (demo.IMAGE_SIDE, demo.IMAGE_SIDE, 3)
    assert len(shapes) <= demo.SHAPES_PER_IMAGE[1]
    for label, (x1, y1, x2, y2), area in shapes:
        assert 0 <= label < len(demo.CLASSES)
        assert 0 <= x1 < x2 <= demo.IMAGE_SIDE
        assert 0 <= y1 < y2 <= demo.IMAGE_SIDE
        box = (x2 - x1) * (y2 - y1)
        assert demo.MIN_VISIBLE_FRACTION * box < area <= box
        assert max(x2 - x1, y2 - y1) <= 2 * demo.RADIUS_RANGE[1] + 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 5))
def test_a_box_is_tight_around_its_shape(seed: int, label: int) -> None:
    mask = demo._draw_mask(np.random.default_rng(seed), label)
    x1, y1, x2, y2 = demo._bounding_box(mask)
    inside = mask[y1:y2, x1:x2]
    assert inside.sum() == mask.sum() > 20
    for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
        assert edge.any()


def test_shapes_overlap() -> None:
    shapes = [shape for number in range(100) for shape in demo.draw_image("train", number)[1]]
    circles = [area / ((x2 - x1) * (y2 - y1)) for label, (x1, y1, x2, y2), area in shapes if label == 0]
    assert max(circles) == pytest.approx(np.pi / 4, abs=0.1)
    assert sum(fraction < 0.6 for fraction in circles) >= 5
    assert min(circles) > demo.MIN_VISIBLE_FRACTION


def test_images_and_splits_differ() -> None:
    drawn = [demo.draw_image(split, number)[0] for split in ("train", "valid") for number in range(3)]
    assert len({image.tobytes() for image in drawn}) == len(drawn)
