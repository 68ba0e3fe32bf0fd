"""What `stoker data convert` did, in lines: what was read and written, and everything that is not in the new data set.
Not here: converting (`stoker/data/convert/`)."""

from typing import TextIO

from stoker.data.convert.writing import ConversionResult
from stoker.data.index import Index
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker.report.console import plain_text, print_renderables

MAX_EXAMPLES = 5
"""Examples of what was left out."""


def print_converted(index: Index, converted: ConversionResult, file: TextIO | None = None) -> None:
    """Prints the summary of a conversion of `index`."""
    lines = [*index.notes]
    for problem in index.problems:
        example = f", e.g. {problem.examples[0]}" if problem.examples else ""
        lines.append(f"{problem.count:,} × {problem.title}: {PROBLEM_KINDS[problem.kind].effect}{example}")
    splits = ", ".join(f"{split} {count:,}" for split, count in converted.num_images.items())
    lines += converted.notes
    if converted.skipped:
        lines.append(f"{len(converted.skipped):,} pictures are left out:")
        lines += [f"  {path}: {reason}" for path, reason in converted.skipped[:MAX_EXAMPLES]]
        if len(converted.skipped) > MAX_EXAMPLES:
            lines.append(f"  and {len(converted.skipped) - MAX_EXAMPLES:,} more")
    lines.append(
        f"{sum(converted.num_images.values()):,} pictures ({splits}), {converted.num_boxes:,} boxes,"
        f" {len(index.class_names)} classes"
    )
    lines.append(f"written: {converted.folder}")
    print_renderables([plain_text(line) for line in lines], file)
