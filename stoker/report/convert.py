"""What `stoker data convert` did, in lines: what was read and written, and everything that is not in the new data set.
Not here: converting (`stoker/data/convert/`)."""

from typing import TextIO

from stoker.data.convert.writing import Converted
from stoker.data.index import Index
from stoker.data.validation.problems import KINDS
from stoker.report.console import plain_text, print_parts

SHOWN = 5
"""Examples of what was left out."""


def print_converted(index: Index, converted: Converted, file: TextIO | None = None) -> None:
    """Prints the summary of a conversion of `index`."""
    lines = [*index.notes]
    for found in index.problems:
        example = f", e.g. {found.examples[0]}" if found.examples else ""
        lines.append(f"{found.count:,} × {found.title}: {KINDS[found.kind].does}{example}")
    splits = ", ".join(f"{split} {count:,}" for split, count in converted.pictures.items())
    lines += converted.notes
    if converted.left_out:
        lines.append(f"{len(converted.left_out):,} pictures are left out:")
        lines += [f"  {path}: {why}" for path, why in converted.left_out[:SHOWN]]
        if len(converted.left_out) > SHOWN:
            lines.append(f"  and {len(converted.left_out) - SHOWN:,} more")
    lines.append(
        f"{sum(converted.pictures.values()):,} pictures ({splits}), {converted.boxes:,} boxes,"
        f" {len(index.class_names)} classes"
    )
    lines.append(f"written: {converted.folder}")
    print_parts([plain_text(line) for line in lines], file)
