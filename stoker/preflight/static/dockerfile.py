"""Reads a Dockerfile into stages and the commands of their shells, each word with its line.

Line continuations with a backslash, comments between them, heredocs, the exec form and the values of ARG and ENV are
understood. The image is never built and no command is run. Time is linear in the size of the file. What the commands
mean is read in `image.py`.
"""

import bisect
import copy
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s*")
_FLAG = re.compile(r"--[a-z-]+(?:=\S*)?\s+")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
_SHELL_HEREDOC = re.compile(r"\s*(?:--\S+\s+)*(?:(?:/bin/)?(?:ba)?sh\b[^<]*)?<<")
"""A heredoc that a shell runs; every other one is the input of another program."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?::?-([^{}$]*))?\}|(\w+))")
_QUOTED = r"""'[^']*+'?|"(?:\\.|[^"\\])*+"?|\\."""
_WORD = re.compile(rf"(?P<word>(?:{_QUOTED}|[^\s'\"])++)", re.DOTALL)
_SHELL_TOKEN = re.compile(
    r"(?P<end>[;&|\n()])|(?P<redirection>\d*[<>][<>&-]*[ \t]*[^\s;&|()]*)|(?P<comment>\#[^\n]*)"
    rf"|(?P<word>(?:{_QUOTED}|\$\(|[^\s'\";&|()<>])++)",
    re.DOTALL,
)
"""Words, and what is between them: ends of commands, redirections with their target, comments."""
_QUOTES = re.compile(r"""'([^']*)'?|"((?:\\.|[^"\\])*)"?|\\(.)""", re.DOTALL)


class Word(NamedTuple):
    text: str
    line: int


class Copy(NamedTuple):
    """A COPY or ADD."""

    origin: str | None
    """Of `--from`."""
    sources: tuple[str, ...]
    target: str


@dataclass(frozen=True)
class Instruction:
    name: str
    """FROM, RUN, … in capitals."""
    text: str
    """Its arguments as one line, without continuations; heredocs follow it, line by line."""
    starts: tuple[int, ...]
    """Offsets in `text` at which a line of the file begins."""
    lines: tuple[int, ...]
    """The numbers of these lines."""

    @property
    def line(self) -> int:
        return self.lines[0]

    def words(self) -> list[Word]:
        """The words of the first line, or of the exec form `["pip", "install"]`, without their quotes."""
        return self.exec_form() or self._tokens(_WORD, len(self.text.partition("\n")[0]))

    def shell_words(self) -> list[Word]:
        """Those that a shell sees: without comments and redirections, with the word "\n" at each end of a command. Of
        heredocs only those that a shell runs."""
        head, _, body = self.text.partition("\n")
        return self._tokens(_SHELL_TOKEN, len(self.text) if body and _SHELL_HEREDOC.match(head) else len(head))

    def _tokens(self, pattern: re.Pattern[str], end: int) -> list[Word]:
        found = []
        for match in pattern.finditer(self.text, 0, end):
            line = self.lines[max(0, bisect.bisect_right(self.starts, match.start()) - 1)]
            if match.lastgroup == "word":
                found.append(Word(_QUOTES.sub(lambda part: part[1] or part[2] or part[3] or "", match[0]), line))
            elif match.lastgroup == "end":
                found.append(Word("\n", line))
        return found

    def exec_form(self) -> list[Word]:
        """Empty for every other form."""
        try:
            words = json.loads(self.text) if self.text.lstrip().startswith("[") else []
        except (ValueError, RecursionError):
            return []
        return [Word(word, self.line) for word in words] if all(isinstance(word, str) for word in words) else []


@dataclass
class Stage:
    """What one FROM begins."""

    image: str
    """As it is after substitution; it still has a `$` where a value is unknown."""
    name: str
    line: int
    variables: dict[str, str] = field(default_factory=dict)
    """ARG and ENV of the stage, as far as they are known at its end."""
    environment: dict[str, Word] = field(default_factory=dict)
    """ENV alone, with lines."""
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    """The simple commands of RUN, in order: words without operators and redirections."""
    copies: list[Copy] = field(default_factory=list)


def read_instructions(text: str) -> Iterator[Instruction]:
    """Raises nothing: what is no instruction is left out."""
    lines = [line.rstrip() for line in text.removeprefix("\ufeff").split("\n")]
    last_line_of = {line.strip(): index for index, line in enumerate(lines)}
    index = 0
    while index < len(lines):
        head: list[str] = []
        numbers: list[int] = []
        continued = True
        while continued and index < len(lines):
            line = lines[index]
            index += 1
            if line and not line.lstrip().startswith("#"):
                continued = line.endswith("\\")
                head.append(line.removesuffix("\\"))
                numbers.append(index)
            elif not head:
                break
        match = _INSTRUCTION.match(head[0]) if head else None
        if match is None:
            continue
        name, head[0] = match[1].upper(), head[0][match.end() :]
        words = "".join(head)
        body: list[str] = []
        for heredoc in _HEREDOC.finditer(words) if name in ("RUN", "COPY", "ADD") else ():
            while last_line_of.get(heredoc[2], -1) >= index:
                index += 1
                if lines[index - 1].strip() == heredoc[2]:
                    break
                body.append(lines[index - 1])
                numbers.append(index)
        lengths = [*map(len, head[:-1]), len(head[-1]) + 1, *(len(line) + 1 for line in body)]
        starts = itertools.accumulate(lengths[:-1], initial=0)
        yield Instruction(name, "\n".join([words, *body]), tuple(starts), tuple(numbers))


def read_stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile. A stage that begins with another one has what that one has: its variables, commands
    and copies, in front of its own."""
    stages: list[Stage] = []
    before: dict[str, str] = {}
    for instruction in read_instructions(text):
        name = instruction.name
        if name == "FROM":
            stages.append(_stage(instruction, before, stages))
        elif not stages:
            if name == "ARG":
                before |= {key: word.text for key, word in _assignments(instruction, before)}
        elif name == "ARG":
            for key, word in _assignments(instruction, stages[-1].variables):
                if word.text or key in before:
                    stages[-1].variables.setdefault(key, word.text or before[key])
        elif name == "ENV":
            stages[-1].environment |= dict(_assignments(instruction, stages[-1].variables))
            stages[-1].variables |= {key: word.text for key, word in stages[-1].environment.items()}
        elif name == "RUN":
            stages[-1].commands += run_commands(instruction, stages[-1].variables)
        elif name in ("COPY", "ADD"):
            words = [substitute(word.text, stages[-1].variables) for word in instruction.words()]
            origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
            *sources, target = [word for word in words if not word.startswith("--")] or [""]
            stages[-1].copies.append(Copy(origin, tuple(sources), target))
    return stages


def _stage(instruction: Instruction, before: dict[str, str], stages: list[Stage]) -> Stage:
    words = substitute(_FLAG.sub("", instruction.text), before).split()
    image = words[0] if words else ""
    name = words[2] if len(words) > 2 and words[1].lower() == "as" else str(len(stages))
    base = next((stage for stage in stages if stage.name.lower() == image.lower()), None)
    return Stage(image, name, instruction.line) if base is None else replace(copy.deepcopy(base), name=name)


def _assignments(instruction: Instruction, variables: dict[str, str]) -> list[tuple[str, Word]]:
    """The names and values of ARG and ENV. An ARG without a value has an empty one. `ENV NAME a value` is the
    old form."""
    words = instruction.words()
    if instruction.name == "ENV" and words and "=" not in words[0].text:
        value = " ".join(instruction.text.split(maxsplit=1)[1:]).strip().strip("\"'")
        return [(words[0].text, Word(substitute(value, variables), words[0].line))]
    pairs = ((word.text.partition("="), word.line) for word in words)
    return [(key, Word(substitute(value, variables), line)) for (key, _, value), line in pairs]


def substitute(text: str, variables: dict[str, str]) -> str:
    """The text with $NAME, ${NAME} and ${NAME:-default} replaced. What is unknown stays as it is."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name) or match[2] or variables.get(name, match[0])

    return _VARIABLE.sub(value, text)


def run_commands(instruction: Instruction, variables: dict[str, str]) -> list[tuple[Word, ...]]:
    """The simple commands of a RUN, with the values of ARG, ENV and the shell's own variables. Words in quotes stay
    whole, a variable alone is split into its words."""
    if words := instruction.exec_form():
        return [tuple(Word(substitute(word.text, variables), word.line) for word in words)]
    commands: list[tuple[Word, ...]] = []
    current: list[Word] = []
    known = dict(variables)
    for word in (*instruction.shell_words(), Word("\n", 0)):
        if word.text == "\n":
            if current and all(_ASSIGNMENT.match(part.text) for part in current):
                known |= dict(part.text.split("=", 1) for part in current)
            commands.append(tuple(current))
            current = []
        elif current or not word.text.startswith(("--mount=", "--network=", "--security=")):
            text = substitute(word.text, known)
            whole = re.fullmatch(r"\$(?:\w+|\{\w+\})", word.text) and text != word.text
            current += [Word(part, word.line) for part in (text.split() if whole else [text])]
    return [command for command in commands if command]
