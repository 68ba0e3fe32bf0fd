"""What is done on the device, to whole batches: flip, colour, mosaic.

Fixed shapes, no host wait, uint8 channels last in and out. What is random comes from `Batch.draw`; what is off costs
nothing, since strengths and probabilities are numbers of the settings, not tensors. Crop and zoom happen earlier, on
the host: `geometry.py`.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from stoker.config.settings import DataSettings
from stoker.data.augment.geometry import MIN_SHARE, MIN_SIDE
from stoker.data.batch import Batch, Draw
from stoker.data.loading.samples import PADDING
from stoker.errors import ConfigError

GROUP = 4
"""Pictures that a mosaic is made of: positions 4g … 4g+3 of the stream, whatever the batch."""
MOSAIC_UNTIL = 0.9
"""Share of the training after which no mosaic is made: the last pictures look as those of use will. YOLOX (Ge et al.
2021, section 2) stops strong augmentation for the last 15 of 300 epochs; ours are shorter, and the rate falls late."""
CENTRE = (0.3, 0.7)
"""Where the four tiles of a mosaic meet, as a share of the canvas."""
TILE = (0.5, 0.8)
"""Scale of a tile, relative to its picture in the canvas. Down to 1/2 bilinear sampling reaches every pixel."""

YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
"""RGB to luma and two axes of chroma (NTSC 1953; Y is that of ITU-R BT.601)."""
LUMA = YIQ[0]
TURN: list[list[float]] = (np.linalg.inv(YIQ) @ ((0, 0, 0), (0, 0, -1), (0, 1, 0)) @ YIQ).tolist()
"""A quarter turn of the hue as a matrix on RGB: (I, Q) becomes (-Q, I), and Y is dropped."""


def augment_batch(batch: Batch, settings: DataSettings, progress: float) -> Batch:
    """All that the settings say, in the order flip, colour, mosaic: a tile has its picture's own flip and colour.

    progress: share of the training that is done, 0 … 1. Raises ConfigError where a mosaic is wanted of a batch whose
    size is not a multiple of 4.
    """
    if settings.flip > 0:
        batch = flip(batch, settings.flip)
    strengths = settings.brightness, settings.contrast, settings.saturation, settings.hue
    if max(strengths) > 0:
        batch = colour(batch, *strengths)
    if settings.mosaic > 0 and progress < MOSAIC_UNTIL:
        batch = mosaic(batch, settings.mosaic)
    return batch


def flip(batch: Batch, probability: float) -> Batch:
    """Mirrors, left to right within `content`, the pictures whose draw is below `probability`.

    Padding stays at the right. A gather along the rows of pixels: 1.5 ms for 16 × 3 × 320 × 320 on two cores;
    torch.flip with torch.where, which cannot spare the padding, takes 2.4 ms.
    """
    chosen = (batch.draw[:, Draw.FLIP] < probability)[:, None]
    pixels = batch.images.permute(0, 2, 3, 1)
    count, height, width, channels = pixels.shape
    content_width = batch.content[:, 1:].to(torch.int64)

    column = torch.arange(width, device=pixels.device)
    mirrored = content_width - 1 - column
    source = torch.where(chosen & (mirrored >= 0), mirrored, column)
    channel = torch.arange(channels, device=pixels.device)
    source = (source[:, :, None] * channels + channel).view(count, 1, width * channels)
    rows = pixels.reshape(count, height, width * channels)
    images = rows.gather(2, source.expand(count, height, width * channels)).view(pixels.shape).permute(0, 3, 1, 2)

    right_edge = content_width.to(batch.boxes.dtype)[:, :, None]
    x0, y0, x1, y1 = torch.split(batch.boxes, 1, dim=2)
    flipped = torch.cat((right_edge - x1, y0, right_edge - x0, y1), dim=2)
    boxes = torch.where((chosen & batch.valid)[:, :, None], flipped, batch.boxes)
    return batch._replace(images=images, boxes=boxes)


def factor(u: Tensor, strength: float) -> Tensor:
    """Uniform numbers [B] in [0, 1) → factors in [1 - strength, 1 + strength), at least 0; exactly 1 at strength 0."""
    return (1.0 + strength * (2.0 * u - 1.0)).clamp(min=0.0)


def colour(batch: Batch, brightness: float, contrast: float, saturation: float, hue: float) -> Batch:
    """Changes the colours of every picture within `content` by factors around 1 of these strengths, 0 for none.

    brightness scales; contrast scales the distance from the picture's mean grey; saturation scales the distance of a
    pixel from its own grey; hue turns it around the grey axis of YIQ by up to ± that share of a circle, which keeps
    its luma (torchvision's ColorJitter turns in HSV and does not). As in SSD's photometric distortion the strengths are
    drawn for each picture. All four in this order are one affine map of RGB, A p + o, cut off at 0 and 255 once, at
    the end. With L the matrix that takes a colour to its grey, A is b c (L + s cos t (1 - L) + s sin t TURN).

    The mean grey is that of every fourth row and column. 12 ms for 16 × 3 × 320 × 320 on one core.
    """
    draw, images = batch.draw, batch.images
    count, _, height, width = images.shape
    c = factor(draw[:, Draw.CONTRAST], contrast)
    scale = factor(draw[:, Draw.BRIGHTNESS], brightness)
    angle = 2.0 * math.pi * hue * (2.0 * draw[:, Draw.HUE] - 1.0)
    s = factor(draw[:, Draw.SATURATION], saturation)
    offset = (1.0 - c) * scale * _mean_grey(batch)
    scale = c * scale
    along, across = scale * s * torch.cos(angle), scale * s * torch.sin(angle)
    matrix = [[(scale - along) * luma + across * turn for luma, turn in zip(LUMA, row, strict=True)] for row in TURN]
    for channel in range(3):
        matrix[channel][channel] = matrix[channel][channel] + along

    out = torch.empty((count, height, width, 3), dtype=torch.uint8, device=images.device)
    for first in range(0, count, GROUP):  # by a few pictures: their planes stay in a processor's cache
        mine = slice(first, first + GROUP)
        planes = images[mine].permute(1, 0, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
        inside = _inside(batch.content[mine], height, width)
        for channel, row in enumerate(matrix):
            weights = [weight[mine, None, None] for weight in row]
            mixed = torch.addcmul(offset[mine, None, None], planes[0], weights[0])
            mixed.addcmul_(planes[1], weights[1]).addcmul_(planes[2], weights[2])
            out[mine, :, :, channel] = torch.where(inside, mixed.add_(0.5).clamp_(0.0, 255.0), planes[channel])
    return batch._replace(images=out.permute(0, 3, 1, 2))


def _inside(content: Tensor, height: int, width: int) -> Tensor:
    """bool [B, height, width]: the pixels of a canvas that belong to the picture."""
    rows = torch.arange(height, device=content.device) < content[:, :1]
    columns = torch.arange(width, device=content.device) < content[:, 1:]
    return rows[:, :, None] & columns[:, None, :]


def _mean_grey(batch: Batch) -> Tensor:
    """float32 [B]: the mean luma of every fourth row and column of the content."""
    some = batch.images[:, :, ::4, ::4].to(torch.float32)
    grey = LUMA[0] * some[:, 0] + LUMA[1] * some[:, 1] + LUMA[2] * some[:, 2]
    inside = _inside((batch.content + 3) // 4, grey.shape[1], grey.shape[2]).to(torch.float32)
    return (grey * inside).sum((1, 2)) / inside.sum((1, 2))


def mosaic(batch: Batch, probability: float) -> Batch:
    """Makes of a picture whose draw is below `probability` a 2 × 2 mosaic of itself and the three others of its group.

    Each of the four is scaled down by its own factor, laid with a corner at a drawn centre, and cut at the quadrant and
    the canvas (Bochkovskiy et al. 2020, YOLOv4, section 3.3). `content` becomes the canvas; `scale`, `size` and
    `image_id` stay those of the picture. Boxes follow; one that the cut leaves too little of is dropped by the rule of
    `place_boxes`. Where more boxes are left than there are slots, that mosaic is not made: none is lost in silence.

    Groups are of positions 4g … 4g+3 of the stream, so what comes out does not depend on the size of the batch.
    29 ms for 16 × 3 × 320 × 320 on one core. Raises ConfigError for a batch that is not a multiple of 4.
    """
    count, _, height, width = batch.images.shape
    if count % GROUP:
        raise ConfigError(
            f"--mosaic needs a multiple of {GROUP} pictures in each device's batch, not {count}.",
            fix=f"--batch {max(GROUP, count // GROUP * GROUP)} for each device, or --mosaic 0",
        )
    tiles = _Tiles(batch)
    boxes, labels, valid, fits = tiles.boxes(batch)
    made = fits & (batch.draw[:, Draw.MOSAIC] < probability)
    both = torch.empty((2 * count, height, width, 3), dtype=torch.uint8, device=made.device)
    both[:count] = batch.images.permute(0, 2, 3, 1)
    for first in range(0, count, GROUP):
        tiles.paint(batch, first, both[count + first : count + first + GROUP])
    # Whole pictures are picked: quicker than torch.where on bytes.
    pixels = both.index_select(0, torch.arange(count, device=made.device) + count * made)
    canvas = torch.stack([torch.full_like(batch.content[:, 0], side) for side in (height, width)], 1)
    return batch._replace(
        images=pixels.permute(0, 3, 1, 2),
        boxes=torch.where(made[:, None, None], boxes, batch.boxes),
        labels=torch.where(made[:, None], labels, batch.labels),
        valid=torch.where(made[:, None], valid, batch.valid),
        content=torch.where(made[:, None], canvas, batch.content),
    )


class _Tiles:
    """Where the tiles of the mosaic of each picture lie: quadrants 0 … 3 in rows, tile q of picture b is [b, q]."""

    def __init__(self, batch: Batch) -> None:
        count, _, *self.canvas = batch.images.shape
        each = torch.arange(count, device=batch.images.device)[:, None]
        quadrant = torch.arange(GROUP, device=batch.images.device)
        self.member = each // GROUP * GROUP + (each + quadrant) % GROUP
        """int64 [B, 4], the picture of the batch that a tile shows: in quadrant 0 itself."""
        scale = TILE[0] + (TILE[1] - TILE[0]) * batch.draw[:, Draw.TILES : Draw.TILES + GROUP]
        self.content = batch.content[self.member].to(torch.float32)
        """[B, 4, 2], height and width of what a tile shows."""
        self.length = (self.content * scale[:, :, None]).round().clamp(min=1.0)
        """[B, 4, 2], those of the whole tile, in whole pixels."""
        self.start, self.centre, shown = [], [], []
        for axis, side in enumerate(self.canvas):
            u = batch.draw[:, Draw.CENTRE_Y + axis, None]
            centre = (side * (CENTRE[0] + (CENTRE[1] - CENTRE[0]) * u)).round()
            far = ((quadrant // 2, quadrant % 2)[axis] == 1)[None]
            start = torch.where(far, centre, centre - self.length[..., axis])
            first = start.clamp(min=0.0)
            last = torch.where(far, (start + self.length[..., axis]).clamp(max=float(side)), centre)
            self.start.append(start)
            self.centre.append(centre)
            shown.append((first, last))
        (y0, y1), (x0, x1) = shown
        self.first, self.last = torch.stack((x0, y0) * 2, -1), torch.stack((x1, y1) * 2, -1)
        """[B, 4, 4], x, y, x, y in pixels of the canvas: the corners of what is left of a tile after the cut."""

    def boxes(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Boxes [B, M, 4], labels, valid of the mosaics, the valid ones first; and whether the M slots suffice, [B]."""
        count, slots = batch.valid.shape
        scale = (self.length / self.content).flip(2).repeat(1, 1, 2)[:, :, None]
        start = torch.stack((self.start[1], self.start[0]) * 2, -1)[:, :, None]
        moved = batch.boxes[self.member] * scale + start
        cut = torch.minimum(torch.maximum(moved, self.first[:, :, None]), self.last[:, :, None])
        whole, sides = moved[..., 2:] - moved[..., :2], cut[..., 2:] - cut[..., :2]
        uncut = (sides >= 0.999 * whole).all(-1)
        enough = (sides.prod(-1) >= MIN_SHARE * whole.prod(-1)) & (sides >= MIN_SIDE).all(-1)
        use = batch.valid[self.member] & (sides > 0).all(-1) & (uncut | enough)

        use = use.view(count, GROUP * slots)
        order = use.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :slots]
        valid = use.gather(1, order)
        labels = batch.labels[self.member].view(count, -1).gather(1, order)
        boxes = cut.reshape(count, -1, 4).gather(1, order[:, :, None].expand(count, slots, 4))
        boxes = torch.where(valid[:, :, None], boxes, 0.0)
        return boxes, torch.where(valid, labels, 0), valid, use.sum(1) <= slots

    def paint(self, batch: Batch, first: int, out: Tensor) -> None:
        """Writes the mosaics of the group that begins at picture `first`: out, uint8 [4, H, W, 3].

        The four pictures are laid one below the other, so that one bilinear sampling reads all of them.
        """
        mine = slice(first, first + GROUP)
        height, width = self.canvas
        pictures = batch.images[mine].permute(1, 0, 2, 3).to(torch.float32, memory_format=torch.contiguous_format)
        row = torch.arange(height, device=pictures.device, dtype=torch.float32)[None, :, None]
        column = torch.arange(width, device=pictures.device, dtype=torch.float32)[None, :, None]
        # Source coordinates by row for the tiles left and right of the centre, by column for those above and below.
        below = (row >= self.centre[0][mine, None]).expand(GROUP, height, 2)
        right = (column >= self.centre[1][mine, None]).expand(GROUP, width, 2)
        y, inside_y = self._source(0, mine, row)
        x, inside_x = self._source(1, mine, column)
        # From pixels to the sampler's coordinates: -1 … 1 from edge to edge.
        y = (y + height * (self.member[mine, None] - first) + 0.5) * (2.0 / (GROUP * height)) - 1.0
        x = (x + 0.5) * (2.0 / width) - 1.0
        by_row = [torch.where(below, some[:, :, 2:], some[:, :, :2]) for some in (y, inside_y)]
        by_column = [torch.where(right, some[:, :, 1::2], some[:, :, ::2]) for some in (x, inside_x)]

        left_or_right = right[:, None, :, 0]
        above_or_below = below[:, :, None, 0]
        y, inside_y = (torch.where(left_or_right, some[:, :, None, 1], some[:, :, None, 0]) for some in by_row)
        x, inside_x = (torch.where(above_or_below, some[:, None, :, 1], some[:, None, :, 0]) for some in by_column)
        sampled = functional.grid_sample(
            pictures.view(1, 3, GROUP * height, width),
            torch.stack((x, y), -1).view(1, GROUP * height, width, 2),
            padding_mode="border",
            align_corners=False,
        ).view(3, GROUP, height, width)
        inside = inside_y & inside_x
        for channel, padding in enumerate(PADDING):
            out[..., channel] = torch.where(inside, sampled[channel].add_(0.5), float(padding))

    def _source(self, axis: int, mine: slice, at: Tensor) -> tuple[Tensor, Tensor]:
        """Canvas pixels [1, n, 1] → coordinates in the picture of each tile [4, n, 4], and whether inside the tile.

        Inside they lie between the centres of the first and the last pixel, as tiles are never enlarged: what is beside
        the picture does not bleed in.
        """
        start, length = self.start[axis][mine, None], self.length[mine, None, :, axis]
        offset = at - start
        source = (offset + 0.5) * (self.content[mine, None, :, axis] / length) - 0.5
        return source, (offset >= 0) & (offset < length)
