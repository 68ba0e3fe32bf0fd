"""Prints the result of `stoker data pack`. The packing itself is in `stoker/data/convert/packing.py`."""

from statistics import fmean
from typing import TextIO

from stoker.data.convert.packing import PackResult
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables

MAX_EXAMPLES = 5
"""Examples of images that were left out."""


def print_packed(packed: PackResult, file: TextIO | None = None) -> None:
    """Prints the summary: what is there, its size before and after, the quality, and what was left out."""
    splits = ", ".join(f"{split} {count:,}" for split, count in packed.num_images.items())
    shards = fmt.plural(len(packed.info.shards), "shard")
    if packed.was_packed:
        lines = [f"already packed: {packed.destination}; nothing was written"]
    else:
        lines = [f"packed: {packed.destination}"]
        if packed.num_kept:
            lines.append(f"{packed.num_kept:,} of {shards} were finished by an earlier start, and kept")
    lines.append(f"{sum(packed.num_images.values()):,} images ({splits}) in {shards}")
    before, after = packed.info.source_bytes, sum(shard.size_bytes for shard in packed.info.shards)
    lines.append(f"size of the images before {fmt.size(before)}, of the shards {fmt.size(after)}")
    if packed.psnr_db:
        lines.append(
            f"{packed.num_encoded:,} images were encoded again: mean PSNR {fmean(packed.psnr_db):.1f} dB"
            f" ({fmt.plural(len(packed.psnr_db), 'image')} measured, against the resized image)"
        )
    if packed.skipped:
        lines.append(f"{fmt.plural(len(packed.skipped), 'image')} left out:")
        lines += [f"  {name}: {reason}" for name, reason in packed.skipped[:MAX_EXAMPLES]]
        if len(packed.skipped) > MAX_EXAMPLES:
            lines.append(f"  and {len(packed.skipped) - MAX_EXAMPLES:,} more")
    lines.append(f"train from it: stoker train {packed.destination}")
    print_renderables([plain_text(line) for line in lines], file)
