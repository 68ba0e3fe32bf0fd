"""Prints the result of `stoker data convert`: what was read, written and left out. The conversion itself is in
`stoker/data/convert/`."""

from typing import TextIO

from stoker.data.convert.writing import ConversionResult
from stoker.data.index import Index
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables

MAX_EXAMPLES = 5
"""Examples of images that were left out."""


def print_converted(index: Index, converted: ConversionResult, file: TextIO | None = None) -> None:
    """Prints the summary of a conversion of `index`."""
    lines = [*index.notes]
    for problem in index.problems:
        example = f", e.g. {problem.examples[0]}" if problem.examples else ""
        lines.append(f"{problem.count:,} × {problem.title}: {PROBLEM_KINDS[problem.kind].effect}{example}")
    splits = ", ".join(f"{split} {count:,}" for split, count in converted.num_images.items())
    lines += converted.notes
    if converted.skipped:
        lines.append(f"{fmt.plural(len(converted.skipped), 'image')} left out:")
        lines += [f"  {path}: {reason}" for path, reason in converted.skipped[:MAX_EXAMPLES]]
        if len(converted.skipped) > MAX_EXAMPLES:
            lines.append(f"  and {len(converted.skipped) - MAX_EXAMPLES:,} more")
    lines.append(
        f"{sum(converted.num_images.values()):,} images ({splits}), {converted.num_boxes:,} boxes,"
        f" {len(index.class_names)} classes"
    )
    lines.append(f"written: {converted.folder}")
    print_renderables([plain_text(line) for line in lines], file)
