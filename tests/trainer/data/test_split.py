"""Splits: every class in every split, groups together, the same result everywhere; and the lists of `data split`."""

import io
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from stoker.data.index import Index, open_index
from stoker.data.validation.clean import SplitOptions, stratify
from stoker.data.validation.split import difference_hash, find_groups, group_by_name, make_splits
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError, UsageError
from tests.drawn import draw


@given(
    st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=2, max_size=60),
    st.sampled_from([(0.9, 0.1), (0.7, 0.2, 0.1), (0.5, 0.5)]),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_class_has_about_its_fraction(
    classes: list[set[int]], fractions: tuple[float, ...], seed: int, grouped: bool
) -> None:
    names = [f"{n}.jpg" for n in range(len(classes))]
    images = np.array([n for n, own in enumerate(classes) for _ in sorted(own)], np.int64)
    labels = np.array([label for own in classes for label in sorted(own)], np.int32)
    groups = [n // 3 for n in range(len(classes))] if grouped else None
    splits = stratify(images, labels, names, fractions, seed=seed, groups=groups)
    assert splits.tolist() == stratify(images, labels, names, fractions, seed=seed, groups=groups).tolist()
    assert set(splits.tolist()) <= set(range(len(fractions)))
    if grouped:
        assert all(splits[n] == splits[n - n % 3] for n in range(len(classes)))
        return
    # Sechidis et al. 2011: the split that lacks most images of the rarest class gets the next one, so that class,
    # which is assigned first, is off by less than one image; of independent images no class is off by many
    per_class = np.array(
        [[np.sum(splits[images[labels == label]] == s) for label in range(5)] for s in range(len(fractions))]
    )
    wanted = np.outer(fractions, np.bincount(labels, minlength=5))
    present = np.flatnonzero(np.bincount(labels, minlength=5))
    if len(present):
        totals = np.bincount(labels, minlength=5)
        none = sum(not own for own in classes)
        rarest = present[totals[present].argmin()]
        if not none or totals[rarest] <= none:
            ties = present[totals[present] == totals[rarest]]
            assert np.abs(per_class - wanted)[:, ties].max(0).min() <= 1


def hash_of(name: str, seed: int) -> float:
    text = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    key = seed.to_bytes(8, "big") if seed else b""
    return int.from_bytes(blake2b(text, digest_size=8, key=key).digest(), "big") / 2**64


def stratify_image_by_image(
    image_index: NDArray[np.int64],
    labels: NDArray[np.int32],
    names: Sequence[str],
    fractions: Sequence[float],
    *,
    seed: int = 0,
    groups: Sequence[int] | None = None,
) -> NDArray[np.int8]:
    """What drew the split of runs that exist, in plain Python."""
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
        group: (-len(images), min((hash_of(names[image], seed), image) for image in images))
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


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 9)), max_size=60),
    st.sampled_from([(0.9, 0.1), (0.85, 0.15), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3)]),
    st.integers(0, 3),
    st.booleans(),
)
def test_runs_that_exist_keep_their_split(
    drawn: list[tuple[list[int], int]], fractions: tuple[float, ...], seed: int, grouped: bool
) -> None:
    """A run stores no split, it is drawn again when it continues: images and labels in the order of a table."""
    names = [("Zu\u0308rich-" if n % 7 == 0 else "a-") + f"{n}.jpg" for n in range(len(drawn))]
    images = np.array([n for n, (own, _) in enumerate(drawn) for _ in own], np.int64)
    labels = np.array([label for own, _ in drawn for label in own], np.int32)
    groups = [group for _, group in drawn] if grouped else None
    splits = stratify(images, labels, names, fractions, seed=seed, groups=groups)
    assert (
        splits.tolist() == stratify_image_by_image(images, labels, names, fractions, seed=seed, groups=groups).tolist()
    )


def test_a_large_set_keeps_its_split() -> None:
    rng = np.random.default_rng(7)
    images = np.sort(rng.integers(0, 3000, 20_000))
    labels = (rng.random(20_000) ** 3 * 80).astype(np.int32)
    names = [f"{n:012d}.jpg" for n in range(3000)]
    for fractions, groups in (((0.9, 0.1), None), ((0.7, 0.2, 0.1), rng.integers(0, 900, 3000).tolist())):
        splits = stratify(images, labels, names, fractions, groups=groups)
        assert splits.tolist() == stratify_image_by_image(images, labels, names, fractions, groups=groups).tolist()


def test_a_rare_class_is_in_both_splits() -> None:
    """One class has 10 of 300 images: a hash of the names leaves it out of the validation split of many sets."""
    images = np.arange(300)
    labels = np.where(images % 30 == 0, 1, 0).astype(np.int32)
    for prefix in "abcdefgh":
        held = stratify(images, labels, [f"{prefix}{n}.jpg" for n in images], (0.9, 0.1)) == 1
        assert held.sum() == 30
        assert held[labels == 1].sum() == 1


def test_the_order_of_the_images_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    names = [f"{n}.jpg" for n in range(80)]
    labels = rng.integers(0, 3, 80).astype(np.int32)
    held = stratify(np.arange(80), labels, names, (0.8, 0.2))
    order = rng.permutation(80)
    shuffled = stratify(np.arange(80), labels[order], [names[i] for i in order], (0.8, 0.2))
    assert shuffled.tolist() == held[order].tolist()
    assert stratify(np.arange(80), labels, names, (0.8, 0.2), seed=1).tolist() != held.tolist()


def scene(seed: int, side: int = 160) -> Image.Image:
    """Blurred noise: a texture as large as the image, as photographs have it."""
    pixels = np.random.default_rng(seed).integers(0, 255, (12, 16, 3), np.uint8)
    return Image.fromarray(pixels).resize((side * 4 // 3, side), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, quality: int = 90) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def test_near_duplicates_are_found_and_others_are_not() -> None:
    originals = [scene(seed) for seed in range(12)]
    variants = [
        encoded(originals[0], 30),
        encoded(originals[1].resize((80, 60))),
        encoded(originals[2].point(lambda value: min(255, value + 12))),
        encoded(originals[3].filter(ImageFilter.GaussianBlur(1))),
    ]
    files = [*map(encoded, originals), *variants]
    hashes = {n: bits for n, data in enumerate(files) if (bits := difference_hash(data)).size}
    assert find_groups(len(files), hashes) == [*range(12), 0, 1, 2, 3]
    flat = difference_hash(encoded(Image.new("RGB", (64, 64), (9, 9, 9))))
    assert flat.size == 0  # images without content are not duplicates of each other


def test_names_are_grouped_by_a_pattern() -> None:
    assert group_by_name(["a_1.jpg", "b_1.jpg", "a_2.jpg", "c.jpg"], r"^([ab])_") == [0, 1, 0, 2]
    assert group_by_name(["s1/a.jpg", "s2/a.jpg", "s1/b.jpg"], r"^[^/]+") == [0, 1, 0]
    with pytest.raises(UsageError, match="matches no image"):
        group_by_name(["a.jpg"], "scene")
    with pytest.raises(UsageError, match="not a regular expression"):
        group_by_name(["a.jpg"], "(")


def names_of(index: Index, split: str) -> set[str]:
    return {index.path(image_index).name for image_index in index.image_indices(split).tolist()}


def test_lists_are_written_and_used(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", train=30, val=6, side=64)
    (folder / "train" / "train-1.jpg").write_bytes((folder / "train" / "train-0.jpg").read_bytes())
    (folder / "train" / "train-2.jpg").write_bytes(b"no image")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    index = open_index(folder)
    new = make_splits(index, tmp_path / "out", val_fraction=0.25, test_fraction=0.25, seed=3)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert new.num_images == sum(split.num_images for split in new.splits.values()) == 36
    assert new.num_unreadable == 1
    again = open_index(folder, splits=SplitOptions(lists=tmp_path / "out"))
    assert {name: len(again.image_indices(name)) for name in again.splits} == {
        name: split.num_images for name, split in new.splits.items()
    }
    for split in new.splits:
        lines = (tmp_path / "out" / f"{split}.txt").read_text().splitlines()
        assert {line.rpartition("/")[2] for line in lines} == names_of(again, split)
        assert all(count for count in new.splits[split].boxes_by_class.values())
    together = [split for split in again.splits if {"train-0.jpg", "train-1.jpg"} & names_of(again, split)]
    assert len(together) == 1
    assert np.array_equal(np.sort(again.boxes, axis=0), np.sort(index.boxes, axis=0))

    (tmp_path / "out" / "train.txt").write_text("train/train-3.jpg\ntrain/nowhere.jpg\n")
    fewer = open_index(folder, splits=SplitOptions(lists=tmp_path / "out"))
    assert names_of(fewer, "train") == {"train-3.jpg"}
    assert {problem.kind: problem.count for problem in fewer.problems}["not-in-a-split"] == len(
        names_of(again, "train")
    ) - 1
    assert any("1 of " in note and "lines" in note and "name no image" in note for note in fewer.notes)
    (tmp_path / "out" / "val.txt").write_text("train/train-3.jpg\n")
    with pytest.raises(DataError, match="in the lists of two splits"):
        open_index(folder, splits=SplitOptions(lists=tmp_path / "out"))
    with pytest.raises(DataError, match="name no image of the data set"):
        open_index(folder, splits=SplitOptions(lists=tmp_path))


def test_a_test_split_is_kept(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", train=12, val=6, side=64)
    (folder / "valid").rename(folder / "test")
    index = open_index(folder)
    kept = make_splits(index, tmp_path / "a", val_fraction=0.25, group_by=r"train-(1)\d")
    assert (kept.kept_test, kept.splits["test"].num_images) == (True, 6)
    assert (kept.num_groups, kept.num_grouped_images) == (1, 2)
    pooled = make_splits(index, tmp_path / "b", val_fraction=0.2, test_fraction=0.0)
    assert (pooled.kept_test, set(pooled.splits)) == (False, {"train", "val"})
    for out, message in ((folder / "new", "in the folder of the data set"), (tmp_path / "a", "not an empty folder")):
        with pytest.raises(UsageError, match=message):
            make_splits(index, out, val_fraction=0.1)
    with pytest.raises(UsageError, match="leave no image for training"):
        make_splits(index, tmp_path / "c", val_fraction=0.6, test_fraction=0.4)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = draw(tmp_path / "set", train=20, val=5, side=64)

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    code, output = run("data", "split", folder, tmp_path / "out", "--val-fraction", "0.2")
    assert code == 0
    assert "val: 5 of 25 images (20 %)" in output
    assert f"stoker train {folder} --splits {tmp_path / 'out'}" in output
    code, output = run("data", "check", folder, "--splits", tmp_path / "out")
    assert (code, "train 20, val 5" in output) == (0, True)
    code, output = run("data", "split", folder, tmp_path / "json", "--json")
    assert json.loads(output)["splits"]["train"]["num_images"] == 22 or code == 0
