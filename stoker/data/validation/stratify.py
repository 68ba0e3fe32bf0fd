"""Splits images so that every class has its fraction in every split: iterative stratification.

Sechidis, Tsoumakas and Vlahavas 2011, "On the Stratification of Multi-Label Data", algorithm 1: the images of the
rarest class are assigned first, each to the split that still lacks most images of this class. Images of a group stay
together. Ties are decided by a hash of the image names, so the result depends on names, classes and seed only. Used for
the validation split that stoker draws itself (`clean.py`) and by `stoker data split` (`split.py`).
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def hash_to_unit_interval(name: str, seed: int = 0) -> float:
    """A number in [0, 1) that depends on text and seed alone; composed and decomposed Unicode (macOS) give the same."""
    text = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    key = seed.to_bytes(8, "big") if seed else b""
    return int.from_bytes(blake2b(text, digest_size=8, key=key).digest(), "big") / 2**64


def stratify(
    image_index: NDArray[np.int64],
    labels: NDArray[np.int32],
    names: Sequence[str],
    fractions: Sequence[float],
    *,
    seed: int = 0,
    groups: Sequence[int] | None = None,
) -> NDArray[np.int8]:
    """[R], the split of each image: an index into `fractions`, which add up to 1.

    image_index, labels: [K], image and class of each box. names: [R]. groups: [R], images with the same number get the
    same split. Images without boxes are a class of their own.
    """
    num_images = len(names)
    groups = range(num_images) if groups is None else groups
    images_of_group: dict[int, list[int]] = {}
    for image, group in enumerate(groups):
        images_of_group.setdefault(group, []).append(image)
    no_box = int(labels.max(initial=-1)) + 1
    classes_of_image: list[set[int]] = [set() for _ in range(num_images)]
    for image, label in zip(image_index.tolist(), labels.tolist(), strict=True):
        classes_of_image[image].add(label)
    counts_of_group = {
        group: Counter(label for image in images for label in classes_of_image[image] or {no_box})
        for group, images in images_of_group.items()
    }
    order_of_group = {
        group: (-len(images), min((hash_to_unit_interval(names[image], seed), image) for image in images))
        for group, images in images_of_group.items()
    }
    groups_of_class: dict[int, list[int]] = {}
    for group in sorted(images_of_group, key=order_of_group.__getitem__):
        for label in counts_of_group[group]:
            groups_of_class.setdefault(label, []).append(group)

    remaining = np.zeros(no_box + 1, np.int64)
    for counts in counts_of_group.values():
        for label, count in counts.items():
            remaining[label] += count
    wanted_of_class = np.outer(np.array(fractions), remaining).astype(np.float64)
    wanted = np.array(fractions) * num_images
    split_of_group: dict[int, int] = {}
    while (remaining > 0).any():
        rarest = int(np.where(remaining > 0, remaining, np.iinfo(np.int64).max).argmin())
        for group in groups_of_class[rarest]:
            if group in split_of_group:
                continue
            lacking = wanted_of_class[:, rarest]
            candidates = np.flatnonzero(lacking >= lacking.max() - 1e-9)
            split = int(candidates[wanted[candidates].argmax()])
            split_of_group[group] = split
            wanted[split] -= len(images_of_group[group])
            for label, count in counts_of_group[group].items():
                wanted_of_class[split, label] -= count
                remaining[label] -= count
    return np.array([split_of_group[group] for group in groups], np.int8)
