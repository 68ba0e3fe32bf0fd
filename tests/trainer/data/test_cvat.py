"""CVAT XML: the layouts of its exports, shapes that are not boxes, videos, and files that cannot be used."""

from pathlib import Path

import pytest

from stoker.data.index import open_index, require_images
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError
from tests.fixtures.data_cvat import boxes_by_image, split_of
from tests.trainer.data.exports import cvat_box, cvat_file, cvat_image, save_images


def test_an_export_with_subfolders_and_shapes_of_all_kinds(tmp_path: Path) -> None:
    save_images(tmp_path / "images" / "sub" / "dir" / "x.jpg", tmp_path / "images" / "b.jpg")
    shapes = (
        cvat_box("car", 10.5, 20, 60, 50)
        + cvat_box("boat", 40, 40, 80, 60, rotation=90)
        + '<polygon label="boat" points="10,10;50.5,20;30,70.25" z_order="0"></polygon>'
        + '<ellipse label="car" cx="50" cy="30" rx="20" ry="10"></ellipse>'
        + '<mask label="car" rle="3, 5" left="5" top="6" width="7" height="8"></mask>'
        + '<polyline label="boat" points="1,2;3,4"></polyline><points label="boat" points="1,2"></points>'
        + '<tag label="night" source="manual"></tag>'
        + '<skeleton label="person"><points label="1" points="1,1"></points></skeleton>'
    )
    text = cvat_file(cvat_image("sub/dir/x.jpg", shapes) + cvat_image("b.jpg"))
    (tmp_path / "annotations.xml").write_text(text)
    index = open_index(tmp_path, val_fraction=0.5)
    assert index.format == "cvat"
    assert boxes_by_image(index) == {
        "images/sub/dir/x.jpg": [
            ("car", [10.5, 20, 60, 50]),
            ("boat", [50, 30, 70, 70]),
            ("boat", [10, 10, 50.5, 70.25]),
            ("car", [30, 20, 70, 40]),
            ("car", [5, 6, 12, 14]),
        ],
        "images/b.jpg": [],
    }
    assert index.original_size.tolist() == [[100, 200]] * 2
    notes = "; ".join(index.notes)
    for part in (
        "1 × rotated box: the box around it is used", "1 × polygon: the box", "1 × ellipse: the box",
        "1 × polyline, which has no box", "1 × points, which has", "1 × skeleton", "1 × image without shapes",
    ):  # fmt: skip
        assert part in notes, part
    assert "tag" not in notes
    assert not any("Pascal VOC" in note for note in index.notes)
    assert open_index(tmp_path / "annotations.xml", val_fraction=0.5).boxes.tolist() == index.boxes.tolist()


def test_a_project_with_subsets(tmp_path: Path) -> None:
    names = {"Train": "train", "Validation": "val", "Test": "test"}
    content = ""
    for number, subset in enumerate(names):
        save_images(tmp_path / "images" / subset / "img0.jpg")
        content += cvat_image("img0.jpg", cvat_box("car", 10 * number, 4, 90, 50), subset=subset)
    (tmp_path / "annotations.xml").write_text(cvat_file(content))
    index = open_index(tmp_path)
    assert index.splits == ("train", "val", "test")
    for number, (subset, split) in enumerate(names.items()):
        (image,) = index.image_indices(split).tolist()
        assert index.path(image) == tmp_path / "images" / subset / "img0.jpg"
        assert index.boxes[index.offsets[image]].tolist() == [10 * number, 4, 90, 50]


def write_per_split_files(root: Path) -> None:
    for split in ("train", "val"):
        save_images(root / "images" / f"{split}.jpg")
        (root / "annotations").mkdir(exist_ok=True)
        text = cvat_file(cvat_image(f"{split}.jpg", cvat_box("car", 4, 4, 90, 50)))
        (root / "annotations" / f"{split}.xml").write_text(text)


def write_several_files_per_split(root: Path) -> None:
    write_per_split_files(root)
    save_images(root / "images" / "more.jpg")
    text = cvat_file(cvat_image("more.jpg", cvat_box("car", 4, 4, 90, 50)))
    (root / "annotations" / "train_2.xml").write_text(text)


def write_split_folders(root: Path) -> None:
    for split in ("train", "val"):
        save_images(root / split / "images" / f"{split}.jpg")
        text = cvat_file(cvat_image(f"{split}.jpg", cvat_box("car", 4, 4, 90, 50)))
        (root / split / "annotations.xml").write_text(text)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_per_split_files, {"train.jpg": "train", "val.jpg": "val"}),
        (write_several_files_per_split, {"train.jpg": "train", "more.jpg": "train", "val.jpg": "val"}),
        (write_split_folders, {"train.jpg": "train", "val.jpg": "val"}),
    ],
)
def test_splits_of_files_and_folders(tmp_path: Path, write: object, expected: dict[str, str]) -> None:
    assert callable(write)
    write(tmp_path)
    index = open_index(tmp_path)
    assert split_of(index) == expected
    assert require_images(index) == []


def test_a_folder_per_task(tmp_path: Path) -> None:
    for number in range(3):
        save_images(tmp_path / f"task_{number}" / "images" / "same.jpg")
        text = cvat_file(cvat_image("same.jpg", cvat_box("car", number, 4, 90, 50)))
        (tmp_path / f"task_{number}" / "annotations.xml").write_text(text)
    index = open_index(tmp_path, val_fraction=0.4)
    assert boxes_by_image(index) == {
        f"task_{n}/images/same.jpg": [("car", [float(n), 4.0, 90.0, 50.0])] for n in range(3)
    }


def test_an_image_of_two_tasks(tmp_path: Path) -> None:
    """Identical entries are one; entries that differ are left out, because no one knows which is right."""
    save_images(*(tmp_path / "images" / name for name in ("a.jpg", "b.jpg", "c.jpg")))
    images = [cvat_image(name, cvat_box("car", 4, 4, 90, 50)) for name in ("a.jpg", "b.jpg", "c.jpg")]
    (tmp_path / "one.xml").write_text(cvat_file("".join(images)))
    other = cvat_image("b.jpg", cvat_box("car", 5, 4, 90, 50))
    (tmp_path / "two.xml").write_text(cvat_file(images[0] + other))
    problems = ProblemCollector()
    index = open_index(tmp_path, problems=problems, val_fraction=0.5)
    assert sorted(boxes_by_image(index)) == ["images/a.jpg", "images/c.jpg"]
    counts = {problem.kind: (problem.count, problem.examples[0]) for problem in problems.summarize()}
    assert counts["copied-entry"] == (1, "two.xml, image 'a.jpg': a.jpg, as one.xml, image 'a.jpg'")
    assert counts["listed-twice"] == (1, "b.jpg: one.xml, image 'b.jpg', two.xml, image 'b.jpg'")


def track(label: str, *boxes: str) -> str:
    return f'<track id="0" label="{label}" source="manual">{"".join(boxes)}</track>'


def track_box(frame: int, x: float, outside: int = 0) -> str:
    return (
        f'<box frame="{frame}" keyframe="1" outside="{outside}" occluded="0" xtl="{x}" ytl="4" xbr="90" ybr="50"'
        ' z_order="0"></box>'
    )


def test_a_video_with_its_frames(tmp_path: Path) -> None:
    save_images(*(tmp_path / "images" / f"frame_{n:06d}.PNG" for n in (0, 3, 6)))
    tracks = track("car", track_box(0, 1), track_box(3, 2), track_box(6, 3, outside=1)) + track("boat", track_box(3, 9))
    (tmp_path / "annotations.xml").write_text(cvat_file(tracks, original_size=True))
    index = open_index(tmp_path, val_fraction=0.5)
    assert boxes_by_image(index) == {
        "images/frame_000000.PNG": [("car", [1, 4, 90, 50])],
        "images/frame_000003.PNG": [("car", [2, 4, 90, 50]), ("boat", [9, 4, 90, 50])],
    }
    assert index.original_size.tolist() == [[100, 200]] * 2


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (track("car", track_box(0, 1)), ["of a video", "frame_000000.png", "ffmpeg", "CVAT for images 1.1"]),
        (
            "".join(f'<track id="0" label="a" task_id="{n}">{track_box(0, 1)}</track>' for n in (1, 2)),
            ["several videos", "2 tasks", "export each task on its own"],
        ),
        (cvat_image("a.jpg", cvat_box("car", 1, 2, 3, 4))[:-12], ["not valid XML", "annotations.xml:2"]),
        ("", ["No image has annotations that can be read"]),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str, parts: list[str]) -> None:
    save_images(tmp_path / "a.jpg")
    (tmp_path / "annotations.xml").write_text(cvat_file(content))
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    for part in parts:
        assert part in str(raised.value)


def test_shapes_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    save_images(*(tmp_path / "images" / name for name in ("a.jpg", "b.jpg")))
    shapes = (
        cvat_box("car", 4, 4, 90, 50)
        + cvat_box("", 4, 4, 90, 50)
        + '<box label="car" xtl="1" ytl="2" xbr="3"></box><box label="car" xtl="x" ytl="2" xbr="3" ybr="4"></box>'
        + '<polygon label="car" points="1,2;3"></polygon><polygon label="car"></polygon>'
    )
    images = cvat_image("a.jpg", shapes) + cvat_image("b.jpg", cvat_box("car", 4, 4, 90, 50)) + cvat_image("")
    (tmp_path / "annotations.xml").write_text(cvat_file(images))
    problems = ProblemCollector()
    index = open_index(tmp_path, problems=problems)
    assert len(index.boxes) == 2
    found = {problem.kind: problem for problem in problems.summarize()}
    assert found["malformed-box"].count == 4
    assert found["malformed-box"].examples[0] == "annotations.xml, image 'a.jpg', shape 3: there is no ybr"
    assert found["no-class"].examples == ("annotations.xml, image 'a.jpg', shape 2",)
    assert found["malformed-image"].count == 1
    assert sum(index.bad_boxes.values()) == 5
