"""Whole batches, bit for bit: against a plain implementation that makes one sample at a time, and a stored digest.

The plain implementation is written from the documentation of the stream and of the resize geometry. It imports neither
the code nor the constants that it checks. The digest was made when the loader still worked sample by sample; it leaves
the pixels out, as they depend on the versions of libjpeg and OpenCV.
"""

import hashlib

import cv2
import numpy as np
import pytest
import simplejpeg

from tests.trainer.data.loading import InMemoryIndex, stream

SEED, PROB, RANGE, COVERED, IMAGE_SIZE, MAX_BOXES = 3, 0.8, (0.5, 2.0), 0.5, (32, 64), 8
BATCHES, BATCH = 12, 4
DIGESTS = {
    "train": "554b54e60b45b9ea",
    "squash": "8a681d6ece902929",
    "plain": "5678d99086af58b2",
    "eval": "96d76d9ce6796411",
}
CASES = {
    "train": {"scale_jitter_prob": PROB, "scale_range": RANGE, "min_object_covered": COVERED},
    "squash": {"scale_jitter_prob": PROB, "scale_range": RANGE, "resize": "squash"},
    "plain": {"scale_jitter_prob": 0.0},
    "eval": {"train": False},
}


@pytest.fixture
def index(tmp_path):
    """Images of several sizes, some larger than twice the model input; boxes beyond the border, crowds, no boxes; a
    third of the images without a size in the annotations; an empty file, which is replaced."""
    made = InMemoryIndex(tmp_path, 13)
    rng = np.random.default_rng(5)
    for image_index, size in ((1, (150, 300)), (4, (200, 90)), (5, (64, 128)), (8, (33, 65))):
        cv2.imwrite(str(made.path(image_index)), rng.integers(0, 255, (*size, 3), np.uint8))
        made.original_size[image_index] = size
    made.boxes += rng.normal(0, 4, made.boxes.shape).astype(np.float32)
    made.crowd = rng.random(len(made.crowd)) < 0.2
    made.original_size[::3] = 0
    made.path(6).write_bytes(b"")
    return made


def uniforms(position, stream_number, count, bits, epoch_length=13):
    epoch, number = divmod(position, epoch_length)
    key, counter = np.array([SEED, stream_number], np.uint64), np.array([0, number, epoch, 0], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(count)
    return [(int(value) >> (64 - bits)) / 2**bits for value in raw]


def image_at(position, train):
    """The image of a position; -1: a filler. Image 6 cannot be read."""
    epoch, number = divmod(position, 13)
    if not train:
        return number if epoch == 0 and number != 6 else -1
    key, counter = np.array([SEED, 0], np.uint64), np.array([0, 0, epoch, 0], np.uint64)
    image_index = int(np.argsort(np.random.Philox(key=key, counter=counter).random_raw(13), kind="stable")[number])
    return next(k for k in (image_index, *(int(13 * u) for u in uniforms(position, 3, 64, 53))) if k != 6)


def window(length, scale, limit, offset, step):
    if round(length * scale) <= limit:
        return 0, length, max(1, round(length * scale))
    extent = max(step, int(limit / scale) // step * step)
    start = int(offset * ((length - extent) // step + 1)) * step
    return start, start + extent, max(1, min(limit, round(extent * scale)))


def placed(size, resize, factor=1.0, offsets=(0.0, 0.0)):
    """(y0, y1, resized height), (x0, x1, resized width)."""
    scales = [limit / length for limit, length in zip(IMAGE_SIZE, size, strict=True)]
    if resize == "letterbox":
        scales = [min(scales)] * 2
    scales = [scale * factor for scale in scales]
    step = next((d for d in (8, 4, 2) if all(scale * 0.93 * d <= 1 for scale in scales)), 1)
    return tuple(window(size[a], scales[a], IMAGE_SIZE[a], offsets[a], step) for a in (0, 1))


def shows_enough(window_yx, size, boxes):
    (y0, y1, _), (x0, x1, _) = window_yx
    if (y0, y1, x0, x1) == (0, size[0], 0, size[1]):
        return True
    seen, any_area = False, False
    for left, top, right, bottom in boxes:
        left, right = (min(max(v, 0.0), float(size[1])) for v in (left, right))
        top, bottom = (min(max(v, 0.0), float(size[0])) for v in (top, bottom))
        area = (right - left) * (bottom - top)
        any_area |= area > 0
        wide, high = min(right, x1) - max(left, x0), min(bottom, y1) - max(top, y0)
        seen |= area > 0 and max(wide, 0.0) * max(high, 0.0) >= COVERED * area
    return seen or not any_area


def place(case, position, size, boxes):
    changes = CASES[case]
    resize, u = changes.get("resize", "letterbox"), uniforms(position, 2, 31, 53)
    if changes.get("train", True) and u[0] < changes.get("scale_jitter_prob", 0.5):
        for n in range(1, 31, 3):
            factor = RANGE[0] * (RANGE[1] / RANGE[0]) ** u[n]
            at = placed(size, resize, factor, u[n + 1 : n + 3])
            if "min_object_covered" not in changes or shows_enough(at, size, boxes):
                return at
    return placed(size, resize)


def pixels_of(path, size, window_yx):
    (y0, y1, height), (x0, x1, width) = window_yx
    data = path.read_bytes()
    divisor = 1
    if path.suffix == ".jpg":
        reaches = [d for d in (8, 4, 2) if y1 - y0 >= height * 0.93 * d and x1 - x0 >= width * 0.93 * d]
        divisor = max(reaches, default=1)
        least = [-(-side // divisor) for side in size]
        image = simplejpeg.decode_jpeg(data, min_height=least[0], min_width=least[1])
    else:
        image = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    image = image[y0 // divisor : -(-y1 // divisor), x0 // divisor : -(-x1 // divisor)]
    while image.shape[0] > 2 * height or image.shape[1] > 2 * width:
        half = [
            -(-side // 2) if side > 2 * to else side for side, to in zip(image.shape, (height, width), strict=False)
        ]
        image = cv2.resize(image, half[::-1], interpolation=cv2.INTER_LINEAR)
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)


def expected_sample(index, case, position):
    """One sample as a dict of the fields of a batch."""
    sample = {
        "images": np.full((*IMAGE_SIZE, 3), (124, 116, 104), np.uint8),
        "boxes": np.zeros((MAX_BOXES, 4), np.float32),
        "labels": np.zeros(MAX_BOXES, np.int64),
        "valid": np.zeros(MAX_BOXES, bool),
        "resized_size": np.array(IMAGE_SIZE, np.int32),
        "scale": np.ones(2, np.float32),
        "original_size": np.array(IMAGE_SIZE, np.int32),
        "image_index": np.int64(-1),
        "rand": np.zeros(16, np.float32),
    }
    image_index = image_at(position, CASES[case].get("train", True))
    if image_index < 0:
        return sample
    size = cv2.imread(str(index.path(image_index))).shape[:2]
    rows = range(index.offsets[image_index], index.offsets[image_index + 1])
    boxes = [index.boxes[row].tolist() for row in rows]
    at = place(case, position, size, [box for box, row in zip(boxes, rows, strict=True) if not index.crowd[row]])
    (y0, y1, height), (x0, x1, width) = at
    scale_y, scale_x = height / (y1 - y0), width / (x1 - x0)
    sample["images"][:height, :width] = pixels_of(index.path(image_index), size, at)
    count = 0
    for row, box in zip(rows, boxes, strict=True):
        inside = [min(max(v, 0.0), float(size[1 - n % 2])) for n, v in enumerate(box)]
        moved = [(v - (x0, y0)[n % 2]) * (scale_x, scale_y)[n % 2] for n, v in enumerate(inside)]
        left, top, right, bottom = (
            np.float32(min(max(v, 0.0), float((width, height)[n % 2]))) for n, v in enumerate(moved)
        )
        wide, high, full = right - left, bottom - top, (moved[2] - moved[0], moved[3] - moved[1])
        keep = not index.crowd[row] and wide > 0 and high > 0
        if (y0, y1, x0, x1) != (0, size[0], 0, size[1]):
            uncut = wide >= 0.999 * full[0] and high >= 0.999 * full[1]
            keep = keep and (uncut or (wide * high >= 0.3 * (full[0] * full[1]) and wide >= 2 and high >= 2))
        if keep:
            sample["boxes"][count] = left, top, right, bottom
            sample["labels"][count], sample["valid"][count] = index.labels[row], True
            count += 1
    sample["resized_size"][:], sample["original_size"][:] = (height, width), size
    sample["scale"][:], sample["image_index"] = (scale_y, scale_x), np.int64(image_index)
    sample["rand"][:] = uniforms(position, 1, 16, 24)
    return sample


@pytest.mark.parametrize("case", CASES)
def test_batches_equal_a_plain_implementation_and_its_stored_digest(index, case):
    changes = {"batch_size": BATCH, "image_size": IMAGE_SIZE, "max_boxes": MAX_BOXES, "max_bad_fraction": 0.5}
    batches = stream(index, BATCHES, **changes, **{"scale_jitter_prob": 0.0} | CASES[case])
    digest = hashlib.sha256()
    for number, batch in enumerate(batches):
        for k in range(BATCH):
            expected = expected_sample(index, case, BATCH * number + k)
            for name, value in expected.items():
                actual = getattr(batch, name)[k].numpy()
                actual = actual.transpose(1, 2, 0) if name == "images" else actual
                assert actual.dtype == value.dtype, name
                assert np.array_equal(actual, value), (number, k, name)
                if name != "images":
                    digest.update(np.ascontiguousarray(actual).tobytes())
    assert len(batches) == (BATCHES if CASES[case].get("train", True) else 4)
    assert digest.hexdigest()[:16] == DIGESTS[case]
