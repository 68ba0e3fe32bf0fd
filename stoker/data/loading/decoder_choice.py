"""Whether the device decodes the pictures: chosen by measurement, once, before a run begins.

`decide` measures both decoders on a sample of the run's own pictures; `choose` is a pure function of the numbers. The
decision is a setting like any other (`--decoder`), written to config.toml: a continued run measures nothing. Decoding
on the device: `decode_device.py`. A cache of decoded pictures excludes it: what the host decodes fills the cache, and
with the cache nothing is decoded twice.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.data.augment import geometry
from stoker.data.images import decode
from stoker.data.images.decode_device import Encoded, fill, is_ordinary, why_not
from stoker.data.images.headers import header_of
from stoker.errors import DataError, ObjectMissing
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device

if TYPE_CHECKING:
    from stoker.data.index import Index

SAMPLE = 64
"""Pictures that are tried, from all over the training split."""
LIMIT_S = 5.0
"""Seconds after which no further one is decoded on the host."""
GAIN = 1.1
"""How many times as fast the device's decoding must make training, at least: what is measured at the start of a run is
not more exact, and a file whose coded pixels are damaged is only noticed by the host."""

HERE = Path()
"""Stands for a picture's path in errors that nobody sees."""

Decoder = Literal["host", "nvjpeg"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds are of one picture, on average."""

    host_s: float
    """A core's, decoding and resizing."""
    cores: int
    """That can decode beside the thread that issues the steps."""
    step_s: float
    """The device's, training."""
    device_s: float | None = None
    """The device's, decoding and resizing what it takes; None: it takes none."""
    share: float = 0.0
    """Of the pictures, those that it takes."""
    tried: int = 0
    """Pictures that were measured."""


def choose(m: Measured) -> tuple[Decoder, str]:
    """Who decodes, and why.

    The device, where the host's cores cannot feed the steps and training becomes faster by it, even if decoding and
    steps fully shared the device's time (its JPEG engines, where it has some, work beside).
    """
    host_per_s, step_per_s = m.cores / m.host_s, 1 / m.step_s
    cores = "1 core decodes" if m.cores == 1 else f"{m.cores} cores decode"
    said = f"{cores} {host_per_s:,.0f} pictures/s, steps take {step_per_s:,.0f}/s"
    if host_per_s >= step_per_s:
        return "host", said
    if m.device_s is None or m.share == 0:
        return "host", f"{said}; but none of {m.tried} pictures is a JPEG that nvJPEG takes"
    together = 1 / (m.step_s + m.share * m.device_s)
    rest = host_per_s / (1 - m.share) if m.share < 1 else together
    reached = min(together, rest)
    said += f"; nvJPEG decodes {1 / m.device_s:,.0f}/s"
    if m.share < 1:
        said += f" of the {100 * m.share:.0f} % that it takes"
    if reached < GAIN * host_per_s:
        return "host", f"{said}, which would leave {reached:,.0f}/s: nothing to gain"
    return "nvjpeg", f"{said}: with it training reaches {reached:,.0f}/s or more"


def decide(
    index: "Index",
    rows: NDArray[np.int64],
    device: Device,
    *,
    canvas: tuple[int, int],
    resize: str,
    batch: int,
    step_s: Callable[[], float],
) -> tuple[Decoder, str]:
    """`choose` for a data set and a device. step_s: measures a step, seconds a picture; called where it matters.

    Raises StorageError where a bucket cannot be read.
    """
    if device.is_cpu:
        return "host", "training is on the CPU"
    if (why := why_not(device)) is not None:
        return "host", f"nvJPEG cannot be had: {why}"
    pictures = _sample(index, rows, canvas, resize)
    host_s = _host_seconds(pictures, canvas)
    if host_s is None:
        return "host", "no picture could be measured"
    taken = [picture for picture in pictures if is_ordinary(picture.data, picture.header)]
    device_s, done = _device_seconds(taken, device, canvas, batch)
    return choose(
        Measured(
            host_s=host_s,
            cores=max(1, host_cores() - 1),
            step_s=step_s(),
            device_s=device_s,
            share=done / len(pictures),
            tried=len(pictures),
        )
    )


def _sample(index: "Index", rows: NDArray[np.int64], canvas: tuple[int, int], resize: str) -> list[Encoded]:
    """Pictures from all over `rows`, each to be shown whole. What cannot be used is left out: training will say so."""
    found = []
    for row in rows[np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(np.int64)].tolist():
        try:
            data = index.read(row)
            header = header_of(data, index.path(row))
        except (DataError, ObjectMissing, OSError):
            continue
        placement = geometry.place(header.size, canvas, resize)
        found.append(Encoded(data, header, placement.region, placement.content))
    return found


def _host_seconds(pictures: Sequence[Encoded], canvas: tuple[int, int]) -> float | None:
    """Of a core, for one of `pictures`; None where none can be decoded."""
    out = np.empty((*canvas, 3), np.uint8)
    took_s: list[float] = []
    began_s = time.perf_counter()
    for picture in [*pictures[:1], *pictures]:
        start_s = time.perf_counter()
        height, width = picture.content
        try:
            decode.decode_into(
                picture.data, HERE, region=picture.region, out=out[:height, :width], header=picture.header
            )
        except DataError:
            continue
        took_s.append(time.perf_counter() - start_s)
        if time.perf_counter() - began_s > LIMIT_S:
            break
    counted = took_s[1:] or took_s  # the first one warms up
    return sum(counted) / len(counted) if counted else None


def _device_seconds(
    pictures: Sequence[Encoded], device: Device, canvas: tuple[int, int], batch: int
) -> tuple[float | None, int]:
    """(seconds of the device for one of `pictures`, in batches, None where it takes none; how many it takes)."""
    stream = device.make_stream()
    batches = [dict(enumerate(pictures[at : at + batch])) for at in range(0, len(pictures), batch)]
    done = len(pictures)
    with stream.issue():
        images = torch.empty((min(batch, SAMPLE), *canvas, 3), dtype=torch.uint8, device=device.torch_device)
        for some in batches[:1]:
            fill(images, some, stream)  # what happens once
        stream.wait()
        began_s = time.perf_counter()
        for some in batches:
            done -= len(fill(images, some, stream))
        stream.wait()
        took_s = time.perf_counter() - began_s
    return (took_s / done if done else None), done
