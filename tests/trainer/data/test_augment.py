"""Placement and randomness: boxes stay with their pixels and inside the content; a crop shows an object."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data import geometry
from stoker.data.augment import horizontal_flip
from stoker.data.geometry import RandomStream, compute_resize_geometry, sample_resize_geometry, transform_boxes
from stoker.data.images.decode import decode_into
from tests.batches import batch_of

SIDES = st.integers(1, 3000)
IMAGE_SIZES = st.tuples(st.integers(1, 20), st.integers(1, 20)).map(lambda sides: (sides[0] * 32, sides[1] * 32))
RESIZES = st.sampled_from(["letterbox", "squash"])
UNIT = st.floats(0, 1, exclude_max=True)


@st.composite
def geometries(draw):
    zoom, at = draw(st.floats(0.2, 5)), draw(st.tuples(UNIT, UNIT))
    return compute_resize_geometry(
        draw(st.tuples(SIDES, SIDES)), draw(IMAGE_SIZES), draw(RESIZES), scale_factor=zoom, window_offset=at
    )


def boxes_in(height, width, count, seed):
    """[count, 4] xyxy, some of them partly outside the image."""
    rng = np.random.default_rng(seed)
    corners = rng.uniform(-0.2, 1.2, (count, 2, 2)) * (width, height)
    return np.concatenate([corners.min(1), corners.max(1)], 1).astype(np.float32)


def transform(boxes, geom, max_boxes=16, crowd=None):
    """boxes, labels and valid of one image, whose labels are 1, 2, …"""
    crowd = np.zeros(len(boxes), bool) if crowd is None else crowd
    rows = (np.array([row], np.int64) for row in (geom.source_size, geom.region, geom.resized_size))
    transformed, keep = transform_boxes(boxes.astype(np.float64), crowd, np.zeros(len(boxes), np.int64), *rows)
    out_boxes, labels, count = np.zeros((max_boxes, 4), np.float32), np.zeros(max_boxes, np.int64), keep.sum()
    out_boxes[:count], labels[:count] = transformed[keep], np.flatnonzero(keep) + 1
    return out_boxes, labels, np.arange(max_boxes) < count


# Randomness.


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 10**9), st.sampled_from(RandomStream))
def test_uniforms_are_a_pure_function_in_range(seed, epoch, index, stream):
    def uniform(seed, epoch, index, stream=stream, count=16):
        return geometry.random_uniform(seed, epoch, [index], stream, count)[0]

    first = uniform(seed, epoch, index)
    assert np.array_equal(first, uniform(seed, epoch, index))
    assert np.array_equal(first[:3], uniform(seed, epoch, index, count=3))
    assert ((first >= 0) & (first < 1)).all()
    for other in ((seed ^ 1, epoch, index), (seed, epoch + 1, index), (seed, epoch, index + 1)):
        assert not np.array_equal(first, uniform(*other))
    assert len({uniform(seed, epoch, index, s, 1)[0] for s in RandomStream}) == len(RandomStream)
    together = geometry.random_uniform(seed, epoch, [index + 1, index, index], stream, 5)
    assert np.array_equal(together[1:], [first[:5]] * 2)


def test_randomness_is_the_same_on_every_machine():
    """Known values: a checkpoint made elsewhere, or by another NumPy, must go on with the same stream."""
    assert geometry.random_uniform(7, 3, [11], RandomStream.SCALE_JITTER, 2).tolist() == [KNOWN_UNIFORMS]
    assert geometry.device_rand(7, 3, [11], 2).tolist() == [KNOWN_DRAWS]
    assert geometry.epoch_order(7, 3, 8).tolist() == KNOWN_ORDER


KNOWN_UNIFORMS = [0.46418848909122323, 0.6008720934932621]
KNOWN_DRAWS = [0.5088379979133606, 0.8377248644828796]
KNOWN_ORDER = [2, 4, 0, 6, 7, 5, 1, 3]


def test_device_draws_stay_below_one_in_float32():
    draws = geometry.device_rand(0, 0, range(2000), 64)
    assert draws.dtype == np.float32
    assert draws.max() < 1
    assert draws.min() >= 0
    assert abs(draws.mean() - 0.5) < 0.005
    # The largest raw number: a float64 just below 1 would round up.
    assert np.float32((2**64 - 1) >> 40) * np.float32(2.0**-24) < 1


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 100), st.integers(1, 500))
def test_order_is_a_permutation(seed, epoch, count):
    actual = geometry.epoch_order(seed, epoch, count)
    assert sorted(actual) == list(range(count))
    if count > 20:
        assert not np.array_equal(actual, geometry.epoch_order(seed, epoch + 1, count))


# Placement.


@settings(max_examples=50, deadline=None)
@given(geometries())
def test_the_region_is_inside_the_image(geom):
    x0, y0, x1, y1 = geom.region
    assert 0 <= x0 < x1 <= geom.source_size[1]
    assert 0 <= y0 < y1 <= geom.source_size[0]
    assert min(geom.resized_size) >= 1


@settings(max_examples=50, deadline=None)
@given(st.tuples(SIDES, SIDES), IMAGE_SIZES, RESIZES, st.floats(0.2, 5), st.tuples(UNIT, UNIT))
def test_the_resized_image_fits_and_fills(size, image_size, resize, zoom, at):
    geom = compute_resize_geometry(size, image_size, resize, scale_factor=zoom, window_offset=at)
    height, width = geom.resized_size
    assert height <= image_size[0]
    assert width <= image_size[1]
    scale_y, scale_x = geom.scale
    if zoom >= 1 and min(size) >= 32:
        # A letterbox fills at least one side, but for a source pixel (or the step of the DCT); squash fills both.
        gaps = (image_size[0] - height) / max(scale_y, 1), (image_size[1] - width) / max(scale_x, 1)
        assert (min if resize == "letterbox" else max)(gaps) <= 2
    if resize == "letterbox" and min(size) >= 32:
        # One scale for both axes, but for the rounding of the content to whole pixels (at least one).
        wanted = min(image_size[0] / size[0], image_size[1] / size[1]) * zoom
        x0, y0, x1, y1 = geom.region
        assert abs(height - max(1, (y1 - y0) * wanted)) <= 0.5 + 1e-6
        assert abs(width - max(1, (x1 - x0) * wanted)) <= 0.5 + 1e-6


@settings(max_examples=50, deadline=None)
@given(st.tuples(SIDES, SIDES), IMAGE_SIZES, RESIZES)
def test_without_zoom_the_whole_image_is_shown(size, image_size, resize):
    geom = compute_resize_geometry(size, image_size, resize)
    assert not geom.is_cropped
    assert geom == sample_resize_geometry(
        size, image_size, resize, scale_jitter_prob=0.0, scale_range=(0.5, 2), u=np.zeros(4)
    )
    if resize == "squash":
        assert geom.resized_size == image_size


def test_zoom_is_log_uniform_between_its_ends():
    def resized_size(u):
        return sample_resize_geometry(
            (640, 640), (640, 640), "squash", scale_jitter_prob=1.0, scale_range=(0.25, 1.0), u=np.array(u)
        ).resized_size

    assert resized_size([0.5, 0, 0, 0]) == (160, 160)
    assert resized_size([0.5, 0.5, 0, 0]) == (320, 320)
    assert resized_size([0.5, 0.99999, 0, 0]) == (640, 640)


def test_a_window_can_lie_at_both_ends():
    first = compute_resize_geometry(
        (400, 600), (320, 320), "letterbox", scale_factor=2.0, window_offset=(0.0, 0.0)
    ).region
    last = compute_resize_geometry(
        (400, 600), (320, 320), "letterbox", scale_factor=2.0, window_offset=(0.9999, 0.9999)
    ).region
    assert first[:2] == (0, 0)
    assert last[2:] == (600, 400)


# Crops that show an object.


def drawn(seed, boxes, overlap, *, zoom=(0.5, 4.0)):
    u = geometry.resize_geometry_rand(seed, 0, [0])[0]
    how = {"scale_jitter_prob": 1.0, "scale_range": zoom, "u": u, "min_object_covered": overlap, "boxes": boxes}
    return sample_resize_geometry((600, 800), (320, 320), "letterbox", **how)


def some_boxes(count, seed):
    """[count, 4] xyxy, of which one at least lies inside the image."""
    return np.concatenate([boxes_in(600, 800, count - 1, seed), [[690, 490, 750, 540]]]).astype(np.float32)


def shares(boxes, geom):
    """Fraction of each box's area inside the image that a placement shows."""
    whole = np.clip(boxes, 0, np.array([800, 600, 800, 600]))
    x0, y0, x1, y1 = geom.region
    kept = np.clip(whole, (x0, y0, x0, y0), (x1, y1, x1, y1))
    return (kept[:, 2:] - kept[:, :2]).prod(1) / np.maximum(1e-9, (whole[:, 2:] - whole[:, :2]).prod(1))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0.01, 1))
def test_a_crop_shows_enough_of_one_object(seed, count, overlap):
    boxes = some_boxes(count, seed)
    geom = drawn(seed, boxes, overlap)
    assert not geom.is_cropped or shares(boxes, geom).max() >= overlap - 1e-6


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_first_window_that_shows_enough_is_taken(seed):
    boxes = some_boxes(2, seed)
    first = drawn(seed, boxes, 0.0)
    assert first == drawn(seed, [], 0.7) == drawn(seed, np.zeros((0, 4), np.float32), 0.7)
    actual = drawn(seed, boxes, 0.7)
    assert (actual == first) == (not first.is_cropped or shares(boxes, first).max() >= 0.7)


def test_windows_are_drawn_again_a_few_times():
    speck = np.array([[300, 250, 310, 260]], np.float32)
    kinds = [drawn(seed, speck, 1.0, zoom=(5.0, 6.0)).is_cropped for seed in range(200)]
    assert 20 < sum(kinds) < 180  # both: a window was found, and the whole image after TRIES
    once = [shares(speck, drawn(seed, [], 1.0, zoom=(5.0, 6.0)))[0] >= 1 for seed in range(200)]
    assert sum(once) < sum(kinds) / 3


# Boxes on the host.


@settings(max_examples=50, deadline=None)
@given(geometries(), st.integers(0, 16), st.integers(0, 2**32 - 1))
def test_boxes_stay_inside_the_image_and_keep_their_labels(geom, count, seed):
    original = boxes_in(*geom.source_size, count, seed)
    boxes, labels, valid = transform(original, geom)
    height, width = geom.resized_size
    assert boxes.shape == (16, 4)
    assert (boxes >= 0).all()
    assert (boxes[:, [0, 2]] <= width).all()
    assert (boxes[:, [1, 3]] <= height).all()
    assert (boxes[valid][:, 2:] > boxes[valid][:, :2]).all()
    assert (boxes[~valid] == 0).all()
    assert (labels[~valid] == 0).all()
    assert (np.diff(labels[valid]) > 0).all()  # in their order
    # The way back: what was not cut is the original box.
    scale = np.array([geom.scale[1], geom.scale[0]] * 2)
    offset = np.array(geom.region[:2] * 2)
    for box, label in zip(boxes[valid], labels[valid], strict=True):
        back = box / scale + offset
        visible = np.clip(original[label - 1], geom.region[:2] * 2, geom.region[2:] * 2)
        assert back == pytest.approx(visible, abs=1e-3 * max(geom.source_size) + 1e-3)


@settings(max_examples=50, deadline=None)
@given(st.tuples(SIDES, SIDES), IMAGE_SIZES, RESIZES, st.integers(0, 2**32 - 1))
def test_a_plain_resize_loses_no_box(size, image_size, resize, seed):
    rng = np.random.default_rng(seed)
    corners = np.sort(rng.uniform(0.05, 0.95, (9, 2, 2)), axis=1) * (size[1], size[0])
    corners[:, 1] += 0.04 * np.array([size[1], size[0]])
    _, _, valid = transform(corners.reshape(9, 4).astype(np.float32), compute_resize_geometry(size, image_size, resize))
    assert valid.sum() == 9


def test_what_a_crop_leaves_out():
    geom = geometry.ResizeGeometry((100, 200), (100, 0, 200, 100), (100, 100))  # the right half
    boxes = np.array(
        [
            [10, 10, 90, 90],  # outside
            [69, 0, 109, 100],  # keeps 9 of 40 columns
            [60, 0, 120, 90],  # keeps a third
            [98.5, 0, 101.5, 50],  # keeps half, 1.5 pixels wide
            [150, 50, 151, 51],  # tiny, and uncut
            [150, 50, 190, 300],  # hangs out of the image: judged by what is inside it
        ],
        np.float32,
    )
    actual, labels, valid = transform(boxes, geom)
    assert labels[valid].tolist() == [3, 5, 6]
    assert actual[0].tolist() == [0, 0, 20, 90]
    assert actual[2].tolist() == [50, 50, 90, 100]


def test_crowd_boxes_are_not_valid():
    boxes = np.array([[0, 0, 10, 10], [5, 5, 20, 20]], np.float32)
    actual, labels, valid = transform(
        boxes, compute_resize_geometry((32, 32), (32, 32), "squash"), crowd=np.array([True, False])
    )
    assert valid.tolist() == [True] + [False] * 15
    assert labels[0] == 2
    assert actual[1:].sum() == 0


# Pixels.


def red_frame(image):
    """xyxy of the red pixels of [h, w, 3], as edges."""
    ys, xs = np.nonzero((image[..., 0] > 127) & (image[..., 1] < 127))
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


@pytest.mark.parametrize("resize", ["letterbox", "squash"])
@pytest.mark.parametrize("zoom", [0.4, 1.0, 1.7])
@pytest.mark.parametrize("size", [(120, 200), (900, 700), (2000, 3000)])
@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_pixels_follow_their_box(resize, zoom, size, kind, tmp_path):
    import cv2

    pixels = np.full((*size, 3), 255, np.uint8)
    box = np.array([size[1] * 0.4, size[0] * 0.45, size[1] * 0.55, size[0] * 0.6]).round()
    x0, y0, x1, y1 = box.astype(int)
    pixels[y0:y1, x0:x1] = (255, 0, 0)
    path = tmp_path / f"a.{kind}"
    assert cv2.imwrite(str(path), pixels[..., ::-1])

    geom = compute_resize_geometry(size, (320, 320), resize, scale_factor=zoom, window_offset=(0.5, 0.5))
    image_size = np.zeros((320, 320, 3), np.uint8)
    height, width = geom.resized_size
    decode_into(path.read_bytes(), path, region=geom.region, out=image_size[:height, :width])
    boxes, labels, valid = transform(box[None].astype(np.float32), geom)
    assert np.abs(red_frame(image_size) - boxes[0]).max() <= 1.0

    turned = horizontal_flip(
        batch_of(image_size[None], boxes[None], [geom.resized_size], labels[None], valid[None]), 1.0
    )
    image = turned.images[0].permute(1, 2, 0).numpy()
    assert np.abs(red_frame(image) - turned.boxes[0, 0].numpy()).max() <= 1.0
