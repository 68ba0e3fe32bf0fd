"""Frames of video files and cameras, and videos with boxes, by PyAV (FFmpeg); `pip install 'stoker[video]'`.

Only plain files in known containers are opened, never what a playlist names. `predict.py` runs the detector on frames.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from stoker.data.images.decode import Pixels
from stoker.data.images.source import display_path, resolve_stub
from stoker_watch import regular_files
from stoker_watch.errors import DataError, StokerError, StorageError, needs_package

VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".wmv", ".flv")
CAMERA_PREFIX = "/dev/video"
CAMERA_FORMAT = "v4l2"
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv"
"""FFmpeg's formats that are read: none that refers to other files or hosts, as playlists do."""
MAX_FRAME_PIXELS, MAX_SIDE = 1 << 25, 16_384
"""8K, 7,680 × 4,320, 100 MB a frame; the longest side that H.264's encoder writes."""
MAX_BUFFERED_PIXELS = 3840 * 2160
"""The encoder looks at 40 frames together, of 8K in 6 GB. Larger frames are written one by one."""
MAX_GAP_S = 3600
"""Between two frames that are written: MP4 has 32 bits for it, in units of 1/16,000 s."""
TIME_BASE = Fraction(1, 1000)
"""Unit of the times of frames that are written."""


class VideoFrame(NamedTuple):
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


class _VideoFile(io.FileIO):
    """What FFmpeg reads: a damaged file makes it seek to places that no file has, and PyAV would print a traceback."""

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return super().seek(offset, whence)
        except OSError:
            return -1


def read_frames(path: Path) -> Iterator[VideoFrame]:
    """The frames of a video file, or those of a camera without end. Raises PreflightError without PyAV; DataError, also
    after the last frame if there was none, or if a part of the file was damaged."""
    av = import_av()
    with contextlib.ExitStack() as stack:
        try:
            if is_camera(path):
                container = av.open(str(path), format=CAMERA_FORMAT)
            elif resolve_stub(path) is not None:
                raise OSError("videos in a bucket are not read: copy it to a disk")
            else:
                file = stack.enter_context(_VideoFile(regular_files.open_fd(path)))
                options = {"format_whitelist": CONTAINERS, "protocol_whitelist": ""}
                container = av.open(file, options=options, metadata_errors="replace")
            yield from _decode(stack.enter_context(container), path)
        except StokerError:
            raise
        except Exception as error:  # a damaged file makes PyAV raise what has no common base, also AttributeError
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DataError("The video cannot be read.", location=display_path(path), cause=cause) from error


def _decode(container: Any, path: Path) -> Iterator[VideoFrame]:
    if not container.streams.video:
        raise OSError("it has no video frames")
    stream, start_s, number, num_damaged = container.streams.video[0], None, 0, 0
    if stream.codec_context is None:
        raise OSError("FFmpeg has no decoder for it")
    stream.thread_type = "AUTO"
    _require_size(stream.width, stream.height)
    stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}  # also if the frames say something else
    for packet in container.demux(stream):
        num_damaged += packet.is_corrupt and container.format.name != "mpegts"  # where two were joined, FFmpeg says so
        for frame in packet.decode():
            _require_size(frame.width, frame.height)
            start_s = frame.time if start_s is None else start_s
            time_s = number / float(stream.average_rate or 25) if frame.time is None else frame.time - (start_s or 0.0)
            upright = np.rot90(frame.to_ndarray(format="rgb24"), getattr(frame, "rotation", 0) // 90)
            yield VideoFrame(path, np.ascontiguousarray(upright), number, time_s)
            number += 1
    if not number:
        raise OSError("no frame of it can be decoded")
    if num_damaged:
        raise OSError(f"{num_damaged:,} of its packets are damaged or cut off")


def _require_size(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS or max(width, height) > MAX_SIDE:
        limit = f"at most {MAX_FRAME_PIXELS:,}, with sides up to {MAX_SIDE:,}, are read"
        raise OSError(f"{width} × {height} pixels; {limit}")


@contextlib.contextmanager
def video_writer(path: Path) -> Iterator[Callable[[Image.Image, float], None]]:
    """Gives a function that writes the next frame at its time in seconds, into an MP4 file: H.264 where this FFmpeg has
    it, else MPEG-4. Frames get the size of the first, in even numbers of pixels. What was written is kept after an
    exception; a gap of more than MAX_GAP_S becomes shorter. Raises PreflightError without PyAV, StorageError."""
    av = import_av()
    partial, last_time = path.with_name(f".{path.name}.partial"), -1
    partial.unlink(missing_ok=True)  # it may be a link
    stream: Any = None
    container: Any = av.open(str(partial), "w", format="mp4")

    def write(image: Image.Image, time_s: float) -> None:
        nonlocal stream, last_time
        if stream is None:
            stream = container.add_stream("libx264" if "libx264" in av.codecs_available else "mpeg4", rate=25)
            stream.width, stream.height = image.width + image.width % 2, image.height + image.height % 2
            stream.pix_fmt, stream.codec_context.time_base = "yuv420p", TIME_BASE
            if stream.width * stream.height > MAX_BUFFERED_PIXELS:
                stream.options = {"tune": "zerolatency"}
        frame = av.VideoFrame.from_image(image.crop((0, 0, stream.width, stream.height)))
        frame.pts = max(last_time + 1, round(min(time_s, float(last_time * TIME_BASE) + MAX_GAP_S) / TIME_BASE))
        frame.time_base = TIME_BASE
        container.mux(stream.encode(frame))
        last_time = frame.pts

    try:
        try:
            yield write
        finally:
            try:
                if last_time >= 0:
                    container.mux(stream.encode(None))
            finally:
                container.close()
                partial.replace(path) if last_time >= 0 else partial.unlink(missing_ok=True)
    except av.FFmpegError as error:
        cause = error.strerror or str(error)
        raise StorageError("The video cannot be written.", location=path, cause=cause) from error
