"""Flip, color, mosaic: boxes stay with their pixels, padding stays padding, what is off changes nothing. Accelerators
process the whole batch at once, with as many operators for 32 images as for 4."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.config.settings import DataSettings
from stoker.data import augment
from stoker.data.augment import (
    MOSAIC_END_FRACTION,
    AtOnce,
    augment_batch,
    color_jitter,
    horizontal_flip,
    mixup,
    mosaic,
)
from stoker.data.batch import NUM_RAND, PAD_COLOR, Batch, RandSlot
from stoker.data.index import open_index
from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
from stoker.hardware.device import Device
from stoker_watch.errors import ConfigError
from tests import drawn
from tests.batches import batch_of, batches
from tests.host_sync import ForbidHostSync


def same(a, b, atol=0.0):
    return all(
        torch.equal(x, y) if name != "boxes" else torch.allclose(x, y, rtol=0, atol=atol)
        for name, x, y in zip(Batch._fields, a, b, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(batches())
def test_flip_with_probability_zero_changes_nothing(batch):
    assert same(horizontal_flip(batch, 0.0), batch)


@settings(max_examples=40, deadline=None)
@given(batches(), st.floats(0, 1))
def test_flip_mirrors_the_chosen_images_and_nothing_else(batch, probability):
    turned = horizontal_flip(batch, probability)
    for k in range(len(batch.images)):
        width = int(batch.resized_size[k, 1])
        expected, boxes = batch.images[k].clone(), batch.boxes[k].clone()
        if batch.rand[k, 0] < probability:
            expected[:, :, :width] = batch.images[k][:, :, :width].flip(2)
            use = batch.valid[k]
            boxes[use, 0], boxes[use, 2] = width - batch.boxes[k][use, 2], width - batch.boxes[k][use, 0]
        assert torch.equal(turned.images[k], expected)
        assert torch.equal(turned.boxes[k], boxes)
    assert (turned.boxes[~batch.valid] == 0).all()
    assert turned.images.is_contiguous(memory_format=torch.channels_last)


@settings(max_examples=40, deadline=None)
@given(batches(), st.floats(0, 1))
def test_flipping_twice_is_the_identity(batch, probability):
    assert same(horizontal_flip(horizontal_flip(batch, probability), probability), batch, atol=1e-5)


def test_flip_has_no_data_dependent_part():
    """One graph without a break: nothing in it asks a tensor for its value."""
    batch = batch_of(np.zeros((2, 8, 8, 3), np.uint8), np.zeros((2, 3, 4), np.float32), [(8, 8), (4, 6)])
    # (as a tuple: torch 2.11 loses fields of a named tuple that leaves a compiled function)
    explained = torch.compile(lambda some: tuple(horizontal_flip(some, 0.5)), fullgraph=True, backend="eager")(batch)
    assert same(explained, horizontal_flip(batch, 0.5))
    with torch.device("meta"):
        meta = Batch(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in batch))
    assert horizontal_flip(meta, 0.5).images.shape == batch.images.shape


# Everything together.

OFF = DataSettings(hflip=0.0, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, mosaic=0.0, mixup=0.0)
ALL = DataSettings(hflip=0.5, brightness=0.2, contrast=0.2, saturation=0.3, hue=0.05, mosaic=0.7, mixup=0.5)
SEEDS = st.integers(0, 2**32 - 1)
CORNERS = [(255 * (n & 1), 255 * (n >> 1 & 1), 255 * (n >> 2)) for n in range(8)]
"""Eight colors, one for each rectangle of a group; a pixel nearer to one of them than to gray belongs to it."""


def painted(seed, *, count=4, image_size=(96, 128), noise=False):
    """Gray images of random sizes with a rectangle in each half: label 2 k and 2 k + 1 in the k-th of each group."""
    rng = np.random.default_rng(seed)
    resized_size = np.stack([rng.integers(side // 2, side + 1, count) for side in image_size], 1)
    pixels = np.full((count, *image_size, 3), PAD_COLOR, np.uint8)
    boxes, labels = np.zeros((count, 8, 4), np.float32), np.zeros((count, 8), np.int64)
    for k, (height, width) in enumerate(resized_size):
        pixels[k, :height, :width] = rng.integers(0, 256, (height, width, 3)) if noise else 128
        for n in range(2):
            left, right = n * width // 2, (n + 1) * width // 2
            x0, y0 = rng.integers(left, right - 8), rng.integers(0, height - 8)
            x1, y1 = rng.integers(x0 + 8, right + 1), rng.integers(y0 + 8, height + 1)
            labels[k, n] = k % 4 * 2 + n
            pixels[k, y0:y1, x0:x1] = CORNERS[labels[k, n]]
            boxes[k, n] = x0, y0, x1, y1
    draw = torch.from_numpy(rng.random((count, NUM_RAND)).astype(np.float32))
    return batch_of(pixels, boxes, resized_size, labels, boxes.sum(-1) > 0, draw)


def seen(image, label):
    """Edges xyxy and number of the pixels [3, H, W] that have the color of a label; no edges where there are none."""
    distance = (image.permute(1, 2, 0).numpy().astype(int) - CORNERS[label]).__abs__().max(-1)
    ys, xs = np.nonzero(distance < 64)
    return (None if len(xs) == 0 else (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)), len(xs)


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_a_colored_rectangle_is_where_its_box_says(seed):
    before = painted(seed)
    batch = augment_batch(before, dataclasses.replace(OFF, hflip=0.5, mosaic=0.8), 0.0)
    for k in range(4):
        height, width = batch.resized_size[k].tolist()
        use = batch.valid[k]
        actual = dict(zip(batch.labels[k][use].tolist(), batch.boxes[k][use].tolist(), strict=True))
        assert actual
        for label, box in actual.items():
            edges, _ = seen(batch.images[k], label)
            assert edges == pytest.approx(box, abs=1.5)
            assert 0 <= box[0] < box[2] <= width
            assert 0 <= box[1] < box[3] <= height
        assert (batch.boxes[k][~batch.valid[k]] == 0).all()
        assert (batch.labels[k][~batch.valid[k]] == 0).all()
        assert (batch.valid[k].int().diff() <= 0).all()  # the valid ones come first
        if batch.rand[k, RandSlot.MOSAIC] >= 0.8:
            assert len(actual) == 2
            assert torch.equal(batch.resized_size[k], before.resized_size[k])
            continue
        assert (height, width) == batch.images.shape[2:]
        for label in range(8):
            edges, visible = seen(batch.images[k], label)
            member, slot = divmod(label, 2)
            scale = 0.5 + 0.3 * float(batch.rand[k, RandSlot.TILE_SCALES + (member - k) % 4])
            x0, y0, x1, y1 = before.boxes[member, slot].tolist()
            share = visible / (scale * (x1 - x0) * scale * (y1 - y0))
            if share > 0.55 and min(edges[2] - edges[0], edges[3] - edges[1]) > 3:
                assert label in actual
            if share < 0.1:
                assert label not in actual


@settings(max_examples=40, deadline=None)
@given(batches(), st.floats(0, 1))
def test_all_that_is_off_changes_nothing(batch, progress):
    assert augment_batch(batch, OFF, progress) is batch


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.sampled_from([8, 12]))
def test_it_does_not_matter_how_the_stream_is_cut_into_batches(seed, count):
    whole = painted(seed, count=count, image_size=(32, 64), noise=True)
    parts = [augment_batch(Batch(*(t[n : n + 4] for t in whole)), ALL, 0.5) for n in range(0, count, 4)]
    assert same(augment_batch(whole, ALL, 0.5), Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))))


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_invalid_boxes_stay_invalid(seed):
    batch = painted(seed)
    hidden = batch._replace(valid=torch.zeros_like(batch.valid))
    assert not augment_batch(hidden, ALL, 0.0).valid.any()
    empty = hidden._replace(boxes=torch.zeros_like(batch.boxes))
    assert (augment_batch(empty, ALL, 0.0).boxes == 0).all()


@pytest.mark.parametrize(("count", "at_once"), [(4, None), (8, None), (8, AtOnce(8, 3))])
def test_nothing_in_it_waits(count, at_once):
    batch = painted(1, count=count)
    with ForbidHostSync():
        batch = augment_batch(batch, ALL, 0.0, at_once)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert [tensor.dtype for tensor in batch] == [tensor.dtype for tensor in painted(1)]
    with torch.device("meta"):
        meta = Batch(*(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in batch))
    assert [t.shape for t in augment_batch(meta, ALL, 0.0)] == [t.shape for t in batch]


# The whole batch at once, as on accelerators.


def test_accelerators_process_the_whole_batch_at_once():
    shape = (32, 3, 8, 8)
    assert augment.default_at_once(torch.empty(shape, device="meta")) == (32, 3)
    assert augment.default_at_once(torch.empty(shape)) == (4, 1)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from([4, 12]))
def test_the_whole_batch_at_once_gives_the_same(seed, count):
    batch = painted(seed, count=count, image_size=(33, 60), noise=True)
    whole, groups = augment_batch(batch, ALL, 0.0, AtOnce(count, 3)), augment_batch(batch, ALL, 0.0)
    assert (whole.images.int() - groups.images.int()).abs().max() <= 1  # a sum may be rounded differently
    assert same(whole._replace(images=groups.images), groups)
    assert whole.images.stride() == groups.images.stride()


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched, apart from those that make views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_operators(batch, at_once):
    augment_batch(batch, ALL, 0.0, at_once)  # makes the constants of this shape
    with Operators() as operators:
        augment_batch(batch, ALL, 0.0, at_once)
    return operators.counts


def test_the_operators_on_an_accelerator_do_not_grow_with_the_batch():
    small, large = painted(0, count=4, image_size=(32, 48)), painted(0, count=32, image_size=(32, 48))
    whole = count_operators(large, AtOnce(32, 3))
    assert whole == count_operators(small, AtOnce(4, 3))
    assert whole.total() <= 205
    assert count_operators(large, None).total() > 2 * whole.total()  # as on a CPU: so the count can fail


@pytest.mark.slow
def test_the_whole_batch_at_once_is_one_graph():
    batch = painted(2, image_size=(32, 48), noise=True)
    graphs = CompileCounter()
    torch._dynamo.reset()
    # (as a tuple: torch 2.11 loses fields of a named tuple that leaves a compiled function)
    compiled = torch.compile(lambda b: tuple(augment_batch(b, ALL, 0.0, AtOnce(4, 3))), fullgraph=True, backend=graphs)
    assert same(Batch(*compiled(batch)), augment_batch(batch, ALL, 0.0, AtOnce(4, 3)))
    assert graphs.frame_count == 1


# Color.


def yiq(pixels):
    return pixels @ np.array(augment.RGB_TO_YIQ).T


def colored(batch, k, strengths):
    """The content of image k, float [h, w, 3], by the four steps one after the other."""
    height, width = batch.resized_size[k].tolist()
    pixels = batch.images[k, :, :height, :width].permute(1, 2, 0).numpy().astype(np.float64)
    draws = batch.rand[k, RandSlot.BRIGHTNESS : RandSlot.HUE + 1].numpy().astype(np.float64)
    brightness, contrast, saturation = 1 + np.array(strengths[:3]) * (2 * draws[:3] - 1)
    mean = (brightness * pixels[::4, ::4] @ augment.LUMA_WEIGHTS).mean()
    pixels = mean + contrast * (brightness * pixels - mean)
    gray = (pixels @ augment.LUMA_WEIGHTS)[..., None]
    luma, i, q = np.moveaxis(yiq(gray + saturation * (pixels - gray)), -1, 0)
    angle = 2 * np.pi * strengths[3] * (2 * draws[3] - 1)
    turned = np.stack([luma, np.cos(angle) * i - np.sin(angle) * q, np.sin(angle) * i + np.cos(angle) * q], -1)
    return np.clip(turned @ np.linalg.inv(augment.RGB_TO_YIQ).T, 0, 255)


STRENGTHS = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))


@settings(max_examples=40, deadline=None)
@given(batches(), STRENGTHS, st.booleans())
def test_color_is_its_four_steps_in_one_and_spares_the_padding(batch, strengths, whole_batch):
    changed = color_jitter(batch, *strengths, at_once=AtOnce(len(batch.images), 3) if whole_batch else None)
    for k in range(len(batch.images)):
        height, width = batch.resized_size[k].tolist()
        actual = changed.images[k, :, :height, :width].permute(1, 2, 0).numpy()
        assert np.abs(actual - colored(batch, k, strengths)).max() <= 0.51
        padding = torch.ones(batch.images.shape[2:], dtype=torch.bool)
        padding[:height, :width] = False
        assert torch.equal(changed.images[k][:, padding], batch.images[k][:, padding])
    assert changed.images.is_contiguous(memory_format=torch.channels_last)
    assert same(changed._replace(images=batch.images), batch)


@settings(max_examples=40, deadline=None)
@given(batches(), STRENGTHS)
def test_color_by_a_factor_of_one_is_the_identity(batch, strengths):
    batch = batch._replace(rand=torch.full_like(batch.rand, 0.5))
    assert same(color_jitter(batch, *strengths), batch)
    assert same(color_jitter(batch, 0.0, 0.0, 0.0, 0.0), batch)


def test_what_each_color_setting_does():
    pixels = np.array([[[100, 50, 20], [30, 90, 60]]], np.uint8)[None]
    batch = batch_of(pixels, np.zeros((1, 1, 4), np.float32), [(1, 2)], rand=torch.full((1, NUM_RAND), 0.75))

    def pixel(*strengths):
        return color_jitter(batch, *strengths).images[0, :, 0, 0].tolist()

    assert pixel(0.4, 0, 0, 0) == [120, 60, 24]
    assert pixel(0, 0.4, 0, 0) == [round(1.2 * value - 0.2 * 61.53) for value in (100, 50, 20)]
    assert pixel(0, 0, 0.4, 0) == [round(1.2 * value - 0.2 * 61.53) for value in (100, 50, 20)]
    batch = batch._replace(rand=torch.ones_like(batch.rand))  # half a turn mirrors a color at its gray
    assert pixel(0, 0, 0, 0.5) == [round(2 * 61.53 - value) for value in (100, 50, 20)]


# Mosaic.


def test_a_mosaic_shows_the_four_images_of_its_group():
    batch = mosaic(painted(3), 1.0)
    corners = [(0, 0), (0, -1), (-1, 0), (-1, -1)]
    plain = np.arange(4)[:, None] * 40 + np.zeros((4, 3))
    pixels = np.broadcast_to(plain[:, None, None], (4, 64, 64, 3)).astype(np.uint8)
    flat = batch_of(pixels, np.zeros((4, 1, 4), np.float32), [(64, 64)] * 4, rand=torch.full((4, NUM_RAND), 0.5))
    made = mosaic(flat, 1.0)
    for k in range(4):
        assert [int(made.images[k, 0, 31 + (y == -1), 31 + (x == -1)]) for y, x in corners] == [
            40 * ((k + q) % 4) for q in range(4)
        ]
    assert torch.equal(made.image_index, flat.image_index)
    assert batch.resized_size.tolist() == [[96, 128]] * 4


def test_the_rest_around_the_tiles_is_padding():
    pixels = np.zeros((4, 64, 64, 3), np.uint8)
    draw = torch.full((4, NUM_RAND), 0.5)
    draw[:, RandSlot.TILE_SCALES :] = 0.0  # half as large
    batch = batch_of(pixels, np.zeros((4, 1, 4), np.float32), [(20, 64)] * 4, rand=draw)
    image = mosaic(batch, 1.0).images[0]
    assert (image[:, 22:42] == 0).all()
    for part in (image[:, :22], image[:, 42:]):
        assert (part.permute(1, 2, 0) == torch.tensor(PAD_COLOR, dtype=torch.uint8)).all()


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_padding_does_not_bleed_into_the_tiles(seed):
    batch = painted(seed)
    white = batch.images.clone()
    for image, (height, width) in zip(white, batch.resized_size.tolist(), strict=True):
        image[:, :height, :width] = 255
    image = mosaic(batch._replace(images=white), 1.0).images
    padding = torch.tensor(PAD_COLOR, dtype=torch.uint8).view(1, 3, 1, 1)
    assert ((image == 255).all(1) | (image == padding).all(1)).all()


def test_max_boxes_of_mosaics_is_twice_that_of_an_image():
    index = SimpleNamespace(offsets=np.array([0, 9, 20]))
    assert [compute_max_boxes(index, np.arange(2), mosaic=share) for share in (0.0, 0.1)] == [16, 24]


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_a_mosaic_with_more_boxes_than_max_boxes_is_not_made(seed):
    rng = np.random.default_rng(seed)
    batch = painted(seed)
    corner = rng.integers(0, 40, (4, 8, 2))
    crowded = np.concatenate([corner, corner + 4], -1).astype(np.float32)
    batch = batch._replace(boxes=torch.from_numpy(crowded), valid=torch.ones_like(batch.valid))
    made = mosaic(batch, 1.0)
    for k in range(4):
        if torch.equal(made.resized_size[k], batch.resized_size[k]) and torch.equal(made.boxes[k], batch.boxes[k]):
            assert torch.equal(made.images[k], batch.images[k])
        else:
            assert made.resized_size[k].tolist() == [96, 128]
    wide = batch._replace(
        **{
            name: torch.cat([tensor, torch.zeros_like(tensor).repeat(1, 3, *[1] * (tensor.dim() - 2))], 1)
            for name, tensor in (("boxes", batch.boxes), ("labels", batch.labels), ("valid", batch.valid))
        }
    )
    need = mosaic(wide, 1.0).valid.sum(1)
    assert ((made.resized_size == torch.tensor([96, 128])).all(1) | (need > 8)).all()
    assert torch.equal(made.boxes[need > 8], batch.boxes[need > 8])


def test_the_end_of_training_has_no_mosaics():
    batch, only = painted(5), dataclasses.replace(OFF, mosaic=1.0)
    assert not same(augment_batch(batch, only, MOSAIC_END_FRACTION - 1e-9), batch)
    assert augment_batch(batch, only, MOSAIC_END_FRACTION) is batch


def test_mixup_shows_two_images_and_their_boxes():
    before = painted(5)
    made = mixup(before, 1.0)
    assert made.valid.sum(1).tolist() == [4] * 4
    for k in range(4):
        wanted = sorted(before.labels[k ^ n, m].item() for n in range(2) for m in range(2))
        assert sorted(made.labels[k, made.valid[k]].tolist()) == wanted
        height, width = before.resized_size[[k, k ^ 1]].amax(0).tolist()
        assert made.resized_size[k].tolist() == [height, width]
        share = (made.images[k].float() - before.images[k]) / (before.images[k ^ 1].float() - before.images[k])
        seen = share[(before.images[k ^ 1].int() - before.images[k].int()).abs() > 60]
        assert ((seen > 0.43) & (seen < 0.57)).all()
        assert len(seen) > 500
    assert same(mixup(before, 1e-9), before)
    full = before._replace(valid=torch.ones_like(before.valid))
    assert same(mixup(full, 1.0), full)  # max_boxes would not do


def test_mixup_is_of_the_first_half_of_training_and_of_mosaics():
    batch, only = painted(5), dataclasses.replace(OFF, mosaic=1e-9, mixup=1.0)
    assert not same(augment_batch(batch, only, 0.499), batch)
    assert same(augment_batch(batch, only, 0.5), batch)
    assert augment_batch(batch, dataclasses.replace(only, mosaic=0.0), 0.0) is batch


def test_a_mosaic_needs_whole_groups():
    with pytest.raises(ConfigError, match="multiple of 4"):
        mosaic(painted(0, count=6), 0.5)


def test_threads_and_the_size_of_the_batch_change_nothing(tmp_path):
    index = open_index(drawn.draw(tmp_path, train=10, val=2))
    image_indices = index.image_indices("train")

    def stream(batch_size, workers):
        spec = LoaderSpec(
            device=Device(torch.device("cpu")),
            batch_size=batch_size,
            image_size=(64, 96),
            resize="letterbox",
            scale_jitter_prob=0.7,
            scale_range=(0.5, 2.0),
            min_object_covered=0.5,
            max_boxes=compute_max_boxes(index, image_indices, mosaic=0.7),
            seed=5,
            workers=workers,
        )
        with Loader(index, image_indices, spec) as loader:
            parts = [[t.clone() for t in augment_batch(next(loader), ALL, 0.0)] for _ in range(24 // batch_size)]
        return Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    first = stream(4, 1)
    assert same(first, stream(8, 3))
    assert same(first, stream(12, 2))
    assert (first.resized_size == torch.tensor([64, 96])).all(1).any()
