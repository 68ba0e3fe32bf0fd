"""`stoker data stats`: numbers of data sets whose truth is known, from the arrays to the screen and the drawing."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from stoker.data.anchor_fit import AnchorConfig, best_image_size
from stoker.data.index import open_index
from stoker.data.validation.stats import GRID_SIZE, DatasetStats, ModelInput, compute_stats
from stoker.report.dataset import print_stats
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError, UsageError

PAPER = AnchorConfig((32.0, 64.0, 128.0, 256.0, 512.0), (1.0, 2 ** (1 / 3), 2 ** (2 / 3)), (0.5, 1.0, 2.0))


def write(
    folder: Path,
    boxes: list[list[tuple[float, float, float, float]]],
    *,
    size: tuple[int, int] = (800, 800),
    split: str = "train",
    labels: int = 1,
    crowd: set[tuple[int, int]] = frozenset(),  # type: ignore[assignment]
    sized: bool = True,
) -> Path:
    """A COCO split: boxes (x, y, width, height) of each image; classes in turn."""
    split_dir = folder / split
    split_dir.mkdir(parents=True)
    images, annotations = [], []
    for n, some in enumerate(boxes):
        if sized:
            (split_dir / f"{n}.png").touch()  # not opened: its size is in the annotations
        else:
            Image.new("RGB", size[::-1]).save(split_dir / f"{n}.png")
        images.append({"id": n, "file_name": f"{n}.png"} | ({"width": size[1], "height": size[0]} if sized else {}))
        annotations += [
            {
                "id": 1000 * n + k, "image_id": n, "category_id": 1 + k % labels, "bbox": list(box),
                "iscrowd": int((n, k) in crowd), "area": box[2] * box[3],
            }
            for k, box in enumerate(some)
        ]  # fmt: skip
    categories = [{"id": 1 + n, "name": f"class {n}"} for n in range(labels)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (split_dir / "_annotations.coco.json").write_text(json.dumps(document))
    return folder


def stats_of(data: Path, *, split: str | None = None, image_size: tuple[int, int] | None = None) -> DatasetStats:
    """With the anchors of the paper and an input of at most 800² pixels."""
    index = open_index(data)
    sizes = index.original_size if split is None else index.original_size[index.image_indices(split)]
    best, reason = best_image_size(sizes, 800)
    model_input = ModelInput(
        model="a model", anchors=PAPER, image_size=image_size or best, image_size_reason=reason, side=800,
        set_flags=() if image_size is None else (f"--image-size {image_size[0]} {image_size[1]}",),
    )  # fmt: skip
    return compute_stats(index, model_input, data=str(data), split=split)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stoker", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), out, error


def of_shapes(shapes: np.ndarray) -> list[list[tuple[float, float, float, float]]]:
    return [[(10.0, 20.0, float(w), float(h))] for w, h in shapes if w <= 780 and h <= 770]


def test_boxes_of_anchor_shapes_are_covered(tmp_path):
    shapes = of_shapes(PAPER.anchor_wh())
    write(tmp_path, shapes * 2)
    found = stats_of(tmp_path)
    assert found.image_size == (800, 800)
    assert found.anchors[0].all == {"0.5": 1.0, "0.4": 1.0}
    assert set(found.anchors[0].by_size) == {"small", "medium", "large"}
    assert [one.name for one in found.anchors] == ["a model's default"]
    assert found.flags == ""
    half = stats_of(tmp_path, image_size=(32, 32))  # on it they are a 25th
    assert half.anchors[0].all["0.5"] < 0.5
    assert half.flags.startswith("--image-size 32 32 --anchor-sizes ")
    assert half.anchors[1].all["0.5"] > half.anchors[0].all["0.5"] + 0.02


def test_fraction_of_boxes_without_a_matching_anchor(tmp_path):
    """Three of four are 32 × 32, the smallest anchor; the fourth, 8 × 8, is a 16th of it."""
    write(tmp_path, [[(0, 0, 32, 32), (50, 50, 32, 32), (100, 0, 32, 32), (200, 200, 8, 8)]] * 5)
    found = stats_of(tmp_path)
    assert found.anchors[0].all == {"0.5": 0.75, "0.4": 0.75}
    assert found.anchors[0].by_size == {"small": {"0.5": 0.0, "0.4": 0.0}, "medium": {"0.5": 1.0, "0.4": 1.0}}
    assert found.fraction_by_area == {"small": 0.25, "medium": 0.75, "large": 0.0}
    assert found.anchors[1].all == {"0.5": 1.0, "0.4": 1.0}


def test_counts(tmp_path):
    crowd = {(0, 2)}
    write(
        tmp_path,
        [[(0, 0, 10, 10)] * 1 + [(20, 20, 40, 10), (0, 0, 50, 50)], [], [(5, 5, 20, 20)]],
        labels=2,
        crowd=crowd,
    )
    write(tmp_path, [[(0, 0, 100, 100)]], labels=2, split="valid")
    found = stats_of(tmp_path)
    assert [
        (s.split, s.num_images, s.num_images_without_boxes, s.num_boxes, s.num_crowd_boxes) for s in found.splits
    ] == [
        ("train", 3, 1, 3, 1),
        ("val", 1, 0, 1, 0),
    ]
    assert [(c.num_boxes, c.box_fraction, c.num_images, c.by_split) for c in found.classes] == [
        (3, 0.75, 3, {"train": 2, "val": 1}),
        (1, 0.25, 1, {"train": 1, "val": 0}),
    ]
    assert found.sqrt_box_area.count == sum(found.sqrt_box_area.counts) == 4
    assert (found.sqrt_box_area.min, found.sqrt_box_area.max, found.sqrt_box_area.median) == (10, 100, 20)
    assert found.aspect_ratios.min == 0.25
    assert sum(found.boxes_per_image.counts) == 4
    assert found.boxes_per_image.max == 3
    assert [(s.height, s.width, s.num_images) for s in found.image_sizes] == [(800, 800, 4)]
    only = stats_of(tmp_path, split="val")
    assert [s.split for s in only.splits] == ["val"]
    assert only.sqrt_box_area.count == 1
    with pytest.raises(DataError, match="no test split"):
        stats_of(tmp_path, split="test")


def test_box_heatmap(tmp_path):
    """A box over the left half of every other image, one over the bottom right quarter of all."""
    left, corner = (0, 0, 400, 800), (400, 400, 400, 400)
    write(tmp_path, [[left, corner], [corner]])
    places = np.array(stats_of(tmp_path).box_heatmap)
    middle = GRID_SIZE // 2
    assert places[:, :middle] == pytest.approx(1 / 3)
    assert places[middle:, middle:] == pytest.approx(2 / 3)
    assert (places[:middle, middle:] == 0).all()


def test_sizes_missing_in_the_annotations_are_read(tmp_path):
    write(tmp_path, [[(0, 0, 100, 50)]] * 3, size=(200, 400), sized=False)
    (tmp_path / "train" / "2.png").write_bytes(b"no image")
    found = stats_of(tmp_path)
    assert found.num_unknown_sizes == 1
    assert [(s.height, s.width, s.num_images) for s in found.image_sizes] == [(200, 400, 2)]
    assert found.image_size == (192, 384) or found.image_size[1] == 2 * found.image_size[0]
    assert found.sqrt_box_area.count == 2
    assert "--image-size" in found.flags  # a training does not look into the images first


def test_split_without_boxes(tmp_path, capsys):
    write(tmp_path, [[(0, 0, 10, 10)]])
    write(tmp_path, [[], []], split="test")
    found = stats_of(tmp_path, split="test")
    assert found.sqrt_box_area.median is None
    assert found.anchors[0].all == {}
    print_stats(found)
    assert "n/a" in capsys.readouterr().out


def test_json(tmp_path, capsys):
    write(tmp_path / "set", [[(0, 0, 10, 10), (5, 5, 300, 100)]] * 4, labels=2)
    code, out, _ = run(capsys, "data", "stats", str(tmp_path / "set"), "--json")
    assert code == 0
    found = msgspec.json.decode(out, type=DatasetStats)
    assert found.classes[0].name == "class 0"


def test_text(tmp_path, capsys):
    write(tmp_path / "the set", [[(0, 0, 10, 10), (5, 5, 300, 100)]] * 4, labels=2)
    code, out, _ = run(
        capsys, "data", "stats", str(tmp_path / "the set"), "--classes", "class 1", "--image-size", "640", "640",
        "--model", "retinanet_resnet50_fpn",
    )  # fmt: skip
    assert code == 0
    assert "image size 640x640, letterbox: set by --image-size" in out
    assert "class 1" in out
    assert "class 0" not in out
    assert f"recommended: stoker train '{tmp_path / 'the set'}' --model retinanet_resnet50_fpn --image-size 640" in out
    assert "half a stride away" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--image-size", "100", "100"], "multiples of 32"),
        (["--model", "nothing"], "retinanet"),
    ],
)
def test_invalid_arguments(tmp_path, capsys, options, says):
    code, _, error = run(capsys, "data", "stats", str(write(tmp_path / "set", [[(0, 0, 10, 10)]])), *options)
    assert code == UsageError.exit_code
    assert says in error


def test_images_of_the_data_set_are_not_overwritten(tmp_path, capsys):
    write(tmp_path / "set", [[(0, 0, 10, 10)]] * 2)
    (tmp_path / "set" / "own.png").write_bytes(b"mine")
    (tmp_path / "link.png").symlink_to(tmp_path / "set" / "own.png")
    for out in (tmp_path / "set" / "own.png", tmp_path / "link.png"):
        code, _, error = run(capsys, "data", "preview", str(tmp_path / "set"), "--out", str(out))
        assert code == UsageError.exit_code
        assert "in the folder of the dataset" in error
    assert (tmp_path / "set" / "own.png").read_bytes() == b"mine"
