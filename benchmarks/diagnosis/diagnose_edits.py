"""Edits of programs that are not kept here: by line numbers and a digest, so that a table quotes none of their code.

Used by `diagnose_programs.py`; the head of `programs/judging.toml` has the rule in words.
"""

import functools
import hashlib
from dataclasses import dataclass

import msgspec


class Edit(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A change of the lines `first` to `last` of a file as its makers wrote it."""

    file: str
    first: int
    last: int
    digest: str
    """The first 12 hex digits of the SHA-256 of these lines, joined by line breaks, as UTF-8."""
    how: str
    """"before", "after", "replace", or "A:B": from column A (from 0) of the first line up to B of the last."""
    text: str

    def span(self, original: str) -> tuple[int, int, str]:
        """Start and end of what it replaces in the file, and what comes there. Raises ValueError for other lines."""
        lines = original.split("\n")
        chosen = lines[self.first - 1 : self.last]
        found = hashlib.sha256("\n".join(chosen).encode()).hexdigest()[:12]
        if found != self.digest or not chosen:
            raise ValueError(
                f"{self.file}: lines {self.first} to {self.last} are not those that the edit is for "
                f"(their SHA-256 begins with {found}, not {self.digest}): is it the program's commit?"
            )
        start = sum(len(line) + 1 for line in lines[: self.first - 1])
        end = start + len("\n".join(chosen))
        indent = chosen[0][: len(chosen[0]) - len(chosen[0].lstrip(" \t"))]
        text = self.text.replace("\n", "\n" + indent)
        if self.how == "before":
            return start, start, indent + text + "\n"
        if self.how == "after":
            return end, end, "\n" + indent + text
        if self.how == "replace":
            return start + len(indent), end, text
        first, last = map(int, self.how.split(":"))
        return start + first, end - len(chosen[-1]) + last, text


@dataclass(frozen=True)
class Changed:
    """A file of a program and its edits."""

    name: str
    original: str
    edits: list[Edit]

    @functools.cached_property
    def spans(self) -> list[tuple[int, int, str, Edit]]:
        """What each edit changes, in the order of the file; of two texts at one line, the later edit's is nearer."""
        spans = [(*edit.span(self.original), edit) for edit in self.edits]
        before = [span for span in spans if span[3].how != "after"]
        after = [span for span in reversed(spans) if span[3].how == "after"]
        return sorted(before + after, key=lambda span: span[1])

    @property
    def text(self) -> str:
        parts, done = [], 0
        for start, end, text, edit in self.spans:
            if start < done:
                raise ValueError(f"{self.name}: two edits change the same text of line {edit.first}")
            parts += [self.original[done:start], text]
            done = end
        return "".join((*parts, self.original[done:]))

    def line(self, number: int, inserted: int | None = None) -> int:
        """Where a line of the original is now, or the `inserted`-th line of the last edit of this line."""
        lines = self.original.split("\n")
        if not 1 <= number <= len(lines):
            raise ValueError(f"{self.name}: no line {number}, there are {len(lines)}")
        edit = next((edit for edit in reversed(self.edits) if edit.first == number), None)
        if inserted and (edit is None or inserted > edit.text.count("\n") + 1):
            raise ValueError(f"{self.name}: no edit of line {number} has {inserted} lines")
        end_of_line, moved = len("\n".join(lines[:number])), 0
        for start, end, text, changed in self.spans:
            if inserted and changed is edit:
                return self.original.count("\n", 0, start) + moved + inserted + (edit.how == "after")
            if end < end_of_line or (end == end_of_line and changed.how != "after"):
                moved += text.count("\n") - self.original.count("\n", start, end)
        return number + moved
