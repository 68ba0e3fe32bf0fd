"""Videos and cameras by PyAV: real files, FFmpeg's test source in place of a camera, and files that are not videos."""

import json
import os
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stoker.inference import image_batches, video
from stoker.inference.video import read_frames, video_writer
from stoker_watch.errors import DataError, PreflightError, StorageError, UsageError
from tests.trainer.inference.test_results import double

av = pytest.importorskip("av", reason="the package av is not installed: pip install 'stoker[video]'")
TIMES = [0.0, 0.04, 0.08, 0.2, 0.3, 0.5, 0.54, 0.7]
TURNS = {  # clockwise turn → matrix of the track header (QuickTime File Format, Movie Header Atoms)
    0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0),
}  # fmt: skip


def pixels(n: int) -> np.ndarray[Any, Any]:
    """Black, 121 × 161, with a white box xyxy (10 n, 20, 10 n + 40, 60)."""
    image = np.zeros((121, 161, 3), np.uint8)
    image[20:60, 10 * n : 10 * n + 40] = 255
    return image


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    with video_writer(tmp_path / "clip.mp4") as write:
        for n, time_s in enumerate(TIMES):
            write(Image.fromarray(pixels(n)), time_s)
    return tmp_path / "clip.mp4"


def test_frames_have_their_pixels_and_times(clip: Path) -> None:
    frames = list(read_frames(clip))
    assert [frame.number for frame in frames] == list(range(8))
    assert [round(frame.time_s, 3) for frame in frames] == TIMES
    for frame in frames:
        assert frame.pixels.shape == (122, 162, 3), "H.264 has even sizes"
        assert np.abs(frame.pixels[:121, :161].astype(int) - pixels(frame.number)).mean() < 4
    assert [path.name for path in clip.parent.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize("turn", TURNS)
def test_a_turned_video_is_upright(turn: int, clip: Path) -> None:
    data = bytearray(clip.read_bytes())
    place = data.index(b"tkhd") + 44
    a, b, c, d = (value << 16 for value in TURNS[turn])
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip.write_bytes(data)
    frame = next(read_frames(clip))
    stored = np.zeros((122, 162, 3), np.uint8)
    stored[:121, :161] = pixels(0)
    assert np.abs(frame.pixels.astype(int) - np.rot90(stored, -turn // 90)).mean() < 4


def test_a_video_is_predicted_frame_by_frame(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = double()
    with pytest.raises(UsageError, match="stream=True"):
        model.predict(clip)
    found = list(model.predict([str(clip), pixels(0)], stream=True, batch_size=3))
    assert [(one.path, one.frame) for one in found] == [*((clip, n) for n in range(8)), (None, None)]
    for n, one in enumerate(found[:8]):
        assert one.boxes[0] == pytest.approx([10 * n, 20, 10 * n + 40, 60], abs=4)
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    clip.rename("in/clip.mp4")
    Image.fromarray(pixels(0)).save("in/clip.png")
    lines = list(model.predict_to_dir(["in"], Path("out"), save_txt=True, save_crop=True))
    assert lines == [
        "in/clip.png: lamp 1",
        "in/clip.mp4: 8 frames",
        "2 files with boxes and predictions.json written to out",
    ]
    image, entry = json.loads(Path("out/predictions.json").read_text())
    assert image["path"] == "in/clip.png"
    assert entry == {"path": "in/clip.mp4", "frames": 8, "results": "clip.mp4.jsonl"}
    rows = [json.loads(line) for line in Path("out/clip.mp4.jsonl").read_text().splitlines()]
    assert [(row["frame"], row["time_s"]) for row in rows] == list(enumerate(TIMES))
    assert [len(row["detections"]) for row in rows] == [1] * 8
    drawn = list(read_frames(Path("out/clip.mp4")))
    assert [round(frame.time_s, 3) for frame in drawn] == TIMES
    assert drawn[0].pixels.shape == (244, 324, 3), "enlarged, as a small image is"
    assert len(list(Path("out/labels").iterdir())) == 9
    assert len(list(Path("out/crops/lamp").iterdir())) == 9


def test_what_is_no_video_is_refused(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip.read_bytes()
    cases = {
        "playlist.mp4": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{clip}\n#EXT-X-ENDLIST\n".encode(),
        "concat.mkv": f"ffconcat version 1.0\nfile '{clip}'\n".encode(),
        "sdp.avi": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
        "empty.mov": b"",
        "half.mp4": data[: len(data) // 2],
        "noise.webm": bytes(range(256)) * 40,
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="video cannot be read"):
            list(read_frames(tmp_path / name))
    os.mkfifo(tmp_path / "pipe.mp4")
    for name in ("pipe.mp4", "gone.mp4"):
        with pytest.raises(DataError, match="video cannot be read"):
            list(read_frames(tmp_path / name))
    monkeypatch.setattr(video, "MAX_FRAME_PIXELS", 1000)
    with pytest.raises(DataError, match="162 × 122 pixels"):
        list(read_frames(clip))


def noisy(path: Path, codec: str, pixel_format: str, **options: str) -> Path:
    """40 frames of 160 × 120."""
    random = np.random.default_rng(0)
    with av.open(str(path), "w", options=options) as container:
        container.metadata["title"] = "a title"
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 160, 120, pixel_format
        for _ in range(40):
            frame = av.VideoFrame.from_ndarray(random.integers(0, 255, (120, 160, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("kind", ["mp4", "avi"])
def test_the_frames_before_the_damage_are_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"clip.{kind}"
    if kind == "mp4":
        noisy(path, "mpeg4", "yuv420p", movflags="faststart")
    else:
        noisy(path, "mjpeg", "yuvj420p")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    frames: list[int] = []
    with pytest.raises(DataError, match="video cannot be read"):
        frames.extend(frame.number for frame in read_frames(path))
    assert 20 <= len(frames) < 40
    with pytest.raises(DataError, match="1 of 1 files could not be read"):
        list(double().predict_to_dir([str(path)], tmp_path / "out", conf=0.1))
    (entry,) = json.loads((tmp_path / "out/predictions.json").read_text())
    assert entry["frames"] == len(frames) == len((tmp_path / f"out/{entry['results']}").read_text().splitlines())
    assert "damaged" in entry["error"] or "nvalid data" in entry["error"]
    assert len(list(read_frames(tmp_path / "out" / entry["results"].removesuffix(".jsonl")))) == len(frames)
    seen: list[int | None] = []
    with pytest.raises(DataError, match="video cannot be read"):
        seen.extend(one.frame for one in double().predict(path, stream=True))
    assert seen == frames


def test_what_pyav_raises_for_a_damaged_file_is_an_error_of_the_video(tmp_path: Path) -> None:
    data = noisy(tmp_path / "clip.mp4", "mpeg4", "yuv420p").read_bytes()
    unknown = tmp_path / "unknown.mp4"
    unknown.write_bytes(data.replace(b"mp4v", b"zzzz").replace(b"esds", b"zzzz"))
    with pytest.raises(DataError, match="video cannot be read"):
        list(read_frames(unknown))
    title = tmp_path / "title.mp4"
    title.write_bytes(data.replace(b"a title", b"\xff\xfe title"[:7]))
    assert len(list(read_frames(title))) == 40, "text that is not UTF-8 is no damage"
    sizes, empty = data.index(b"stsz"), tmp_path / "empty.mp4"
    empty.write_bytes(data[: sizes + 8] + struct.pack(">II", 1, 0x7FFFFFFF) + data[sizes + 16 :])
    with pytest.raises(DataError, match="no frame of it can be decoded"):
        list(read_frames(empty))


def test_a_video_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    for width in (16_390, 65_535):
        with pytest.raises(StorageError, match="video cannot be written"), video_writer(tmp_path / "wide.mp4") as write:
            write(Image.new("RGB", (width, 4)), 0.0)
    assert not list(tmp_path.iterdir())
    noisy(tmp_path / "wide.avi", "mjpeg", "yuvj420p")
    data = (tmp_path / "wide.avi").read_bytes()
    assert data.count(b"\xff\xc0\x00\x11\x08\x00\x78\x00\xa0") == 40, "height and width of each JPEG"
    (tmp_path / "wide.avi").write_bytes(data.replace(b"\x11\x08\x00\x78\x00\xa0", b"\x11\x08\x00\x08\x40\x10"))
    with pytest.raises(DataError, match="16400 ×"):
        list(read_frames(tmp_path / "wide.avi"))


def test_a_gap_that_mp4_has_no_number_for_becomes_shorter(tmp_path: Path) -> None:
    with video_writer(tmp_path / "clip.mp4") as write:
        for time_s in (0.0, 4e9, 8e9, 1e18, 1e18 + 4e9):
            write(Image.new("RGB", (64, 48)), time_s)
    assert [frame.time_s for frame in read_frames(tmp_path / "clip.mp4")] == [0, 3600, 7200, 10_800, 14_400]


def test_of_large_frames_few_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def frames() -> Iterator[np.ndarray[Any, Any]]:
        for n in range(40):
            taken.append(n)
            yield pixels(0)

    for limit, most in ((3 * pixels(0).nbytes, 10), (1 << 30, 40)):
        taken.clear()
        monkeypatch.setattr(image_batches, "MAX_HELD_BYTES", limit)
        predictions = double().predict(frames(), stream=True)
        first = next(iter(predictions))
        assert len(taken) <= most
        assert len([first, *predictions]) == 40


def test_a_video_that_ends_early_does_not_stop_the_others(clip: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(DataError, match="1 of 2 files"):
        list(double().predict_to_dir([str(tmp_path / "a.mp4"), str(clip)], tmp_path / "out"))
    entries = json.loads((tmp_path / "out/predictions.json").read_text())
    assert [entry["frames"] for entry in entries] == [0, 8]
    assert "error" in entries[0]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.mp4")) == ["clip.mp4"]


def test_a_camera_ends_with_ctrl_c_and_its_video_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg's test source is the camera: an endless device that is opened by its name and its format."""
    monkeypatch.setattr(video, "CAMERA_FORMAT", "lavfi")
    monkeypatch.setattr(video, "CAMERA_PREFIX", "testsrc2=size=160x120:rate=")
    model, seen = double(), []

    def interrupt(*_: object) -> None:
        seen.append(1)
        if len(seen) == 20:
            raise KeyboardInterrupt

    model._detector.register_forward_pre_hook(interrupt)  # type: ignore[attr-defined]
    lines = list(model.predict_to_dir(["testsrc2=size=160x120:rate=10"], tmp_path / "out", conf=0.1))
    assert len(seen) == 20
    (entry,) = json.loads((tmp_path / "out/predictions.json").read_text())
    assert entry["frames"] >= 8
    assert lines[0].endswith(f"{entry['frames']} frames")
    (written,) = (tmp_path / "out").glob("*.mp4")
    frames = list(read_frames(written))
    assert len(frames) == entry["frames"]
    assert Fraction(frames[1].time_s).limit_denominator(100) == Fraction(1, 10)


def test_without_pyav_the_package_is_named(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(PreflightError, match="pip install"):
        list(read_frames(clip))


def test_without_pyav_nothing_is_predicted(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(pixels(0)).save(clip.with_name("a.png"))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(PreflightError, match="A video needs the package av"):
        list(double().predict_to_dir([str(clip.with_name("a.png")), str(clip)], tmp_path / "out"))
    assert not (tmp_path / "out").exists()
