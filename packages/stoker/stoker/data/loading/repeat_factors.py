"""Repeat-factor sampling for classes that few images have (LVIS, Gupta et al. 2019, arXiv 1908.03195, section 5).

The factor of a class that a fraction f of the images has is max(1, sqrt(t / f)), that of an image the largest of its
classes. Here, unlike there, an epoch has as many samples as there are images, whatever the factors: an image is in it
(its factor / mean factor) times on average, rounded down or up, so some epochs leave out common images.
"""

import numpy as np
from numpy.typing import NDArray

from stoker.data import geometry
from stoker.data.index import Index, boxes_of


def class_fractions(index: Index, image_indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns [C], the fraction of the images that have a box of each class, without crowd boxes."""
    image, label = _image_classes(index, image_indices)
    pairs = np.unique(np.stack([image, label]), axis=1)
    return np.bincount(pairs[1], minlength=len(index.class_names)) / max(1, len(image_indices))


def repeat_factors(index: Index, image_indices: NDArray[np.int64], thresh: float) -> NDArray[np.float64]:
    """Returns [N], the factor of each image, 1 or more; 1 without boxes."""
    fractions = class_fractions(index, image_indices)
    of_class = np.sqrt(np.maximum(1.0, thresh / np.maximum(fractions, 1e-12)))
    factors = np.ones(len(image_indices))
    image, label = _image_classes(index, image_indices)
    np.maximum.at(factors, image, of_class[label])
    return factors


def repeated_order(factors: NDArray[np.float64], seed: int, epoch: int) -> NDArray[np.int64]:
    """int64 [N], the places in `image_indices` of an epoch's samples: a systematic sample with one random offset."""
    count = len(factors)
    offset = geometry.random_uniform(seed, epoch, [0], geometry.RandomStream.REPEAT, 1)[0, 0]
    ends = np.cumsum(factors)
    places = np.searchsorted(ends, (np.arange(count) + offset) * (ends[-1] / count), side="right")
    order: NDArray[np.int64] = np.minimum(places, count - 1)[geometry.epoch_order(seed, epoch, count)]
    return order


def _image_classes(index: Index, image_indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns (place in `image_indices`, label) of each box that is no crowd."""
    boxes, image = boxes_of(index, image_indices)
    keep = ~index.crowd[boxes]
    return image[keep], index.labels[boxes[keep]]
