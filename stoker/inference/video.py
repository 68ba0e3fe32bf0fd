"""Frames of video files and cameras, and videos with boxes, by PyAV (FFmpeg); `pip install 'stoker[video]'`.

Only plain files in known containers are opened, never what a playlist names. `predict.py` runs the detector on frames.
"""

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from stoker import regular_files
from stoker.data.images.decode import Pixels
from stoker.data.images.source import display_path, resolve_stub
from stoker.errors import DataError, needs_package

VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".wmv", ".flv")
CAMERA_PREFIX = "/dev/video"
CAMERA_FORMAT = "v4l2"
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv"
"""FFmpeg's formats that are read: none that refers to other files or hosts, as playlists do."""
MAX_FRAME_PIXELS = 1 << 25
"""8K, 7,680 × 4,320. Some forty frames are in memory at once, with 100 MB each at this size."""
TIME_BASE = Fraction(1, 1000)
"""Unit of the times of frames that are written."""


class Frame(NamedTuple):
    """A frame of a video or camera; pixels: uint8 [h, w, 3] RGB, upright; number: from 0; time_s: from the start."""

    path: Path
    pixels: Pixels
    number: int
    time_s: float


def is_camera(path: Path) -> bool:
    return str(path).startswith(CAMERA_PREFIX)


def is_video(path: Path) -> bool:
    """Whether frames are read from it: a camera, or a file by its suffix."""
    return is_camera(path) or path.suffix.lower() in VIDEO_SUFFIXES


def import_av() -> Any:
    """PyAV. Raises PreflightError without it."""
    with needs_package("av", "A video"):
        import av
    return av


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of a video file, or those of a camera without end. Raises PreflightError without PyAV, DataError."""
    av = import_av()
    with contextlib.ExitStack() as stack:
        try:
            if is_camera(path):
                container = av.open(str(path), format=CAMERA_FORMAT)
            elif resolve_stub(path) is not None:
                raise OSError("videos in a bucket are not read: copy it to a disk")
            else:
                file = stack.enter_context(regular_files.open_file(path))
                container = av.open(file, options={"format_whitelist": CONTAINERS, "protocol_whitelist": ""})
            yield from _decode(stack.enter_context(container), path)
        except (OSError, av.FFmpegError) as error:
            cause = error.strerror or str(error)
            raise DataError("The video cannot be read.", location=display_path(path), cause=cause) from error


def _decode(container: Any, path: Path) -> Iterator[Frame]:
    if not container.streams.video:
        raise OSError("it has no video frames")
    stream, start_s = container.streams.video[0], None
    stream.thread_type = "AUTO"
    if stream.width * stream.height > MAX_FRAME_PIXELS:
        raise OSError(f"{stream.width} × {stream.height} pixels; at most {MAX_FRAME_PIXELS:,} are read")
    stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}  # also if the frames say something else
    for number, frame in enumerate(container.decode(stream)):
        start_s = frame.time if start_s is None else start_s
        time_s = number / float(stream.average_rate or 25) if frame.time is None else frame.time - (start_s or 0.0)
        upright = np.rot90(frame.to_ndarray(format="rgb24"), getattr(frame, "rotation", 0) // 90)
        yield Frame(path, np.ascontiguousarray(upright), number, time_s)


@contextlib.contextmanager
def video_writer(path: Path) -> Iterator[Callable[[Image.Image, float], None]]:
    """Gives a function that writes the next frame at its time in seconds, into an MP4 file: H.264 where this FFmpeg has
    it, else MPEG-4. Frames get the size of the first, in even numbers of pixels. What was written is kept after an
    exception. Raises PreflightError without PyAV."""
    av = import_av()
    partial, stream, last_time = path.with_name(f".{path.name}.partial"), None, -1
    partial.unlink(missing_ok=True)  # it may be a link
    container: Any = av.open(str(partial), "w", format="mp4")

    def write(image: Image.Image, time_s: float) -> None:
        nonlocal stream, last_time
        if stream is None:
            stream = container.add_stream("libx264" if "libx264" in av.codecs_available else "mpeg4", rate=25)
            stream.width, stream.height = image.width + image.width % 2, image.height + image.height % 2
            stream.pix_fmt, stream.codec_context.time_base = "yuv420p", TIME_BASE
        frame = av.VideoFrame.from_image(image.crop((0, 0, stream.width, stream.height)))
        frame.pts = last_time = max(last_time + 1, round(time_s / TIME_BASE))
        frame.time_base = TIME_BASE
        container.mux(stream.encode(frame))

    try:
        yield write
    finally:
        if stream is not None:
            container.mux(stream.encode(None))
        container.close()
        partial.replace(path) if stream is not None else partial.unlink(missing_ok=True)
