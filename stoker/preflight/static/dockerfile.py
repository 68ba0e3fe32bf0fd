"""Reads a Dockerfile into stages and the commands of their shells, each word with its line.

Line continuations, comments between them, heredocs, the exec form and the values of ARG and ENV are understood. The
image is never built and no command is run. Time is linear in the size of the file. What the commands mean is read in
`image.py`.
"""

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_DIRECTIVE = re.compile(r"#\s*escape\s*=\s*([\\`])\s*", re.IGNORECASE)
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s*")
_FLAG = re.compile(r"--[a-z-]+(?:=\S*)?\s+")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(?:'([A-Za-z_]\w*)'|\"([A-Za-z_]\w*)\"|([A-Za-z_]\w*))")
_SHELL_HEREDOC = re.compile(r"\s*(?:--\S+\s+)*(?:(?:/bin/)?(?:ba)?sh\b[^<]*)?<<")
"""A heredoc that a shell runs; every other one is the input of another program."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?:(:?[-+])([^{}$]*))?\}|(\w+))")
_SEPARATORS = frozenset(";&|\n()")


@dataclass(frozen=True)
class Word:
    text: str
    line: int


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

    def line_at(self, offset: int) -> int:
        return self.lines[max(0, bisect.bisect_right(self.starts, offset) - 1)]


@dataclass
class Stage:
    """What one FROM begins."""

    image: str
    """As it is after substitution; it still has a `$` where a value is unknown."""
    name: str
    line: int
    variables: dict[str, str]
    """ARG and ENV of the stage, as far as they are known at its end."""
    environment: dict[str, Word] = field(default_factory=dict)
    """ENV alone, with lines."""
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    """The simple commands of RUN, in order: words without operators and redirections."""
    copies: list[tuple[str | None, tuple[str, ...], str, int]] = field(default_factory=list)
    """COPY and ADD: (--from, sources, target, line)."""
    workdir: str = "/"


def read_instructions(text: str) -> Iterator[Instruction]:
    """Raises nothing: what is no instruction is left out."""
    lines = [line.rstrip() for line in text.removeprefix("\ufeff").split("\n")]
    last_line_of = {line.strip(): index for index, line in enumerate(lines)}
    escape = "\\"
    index = 0
    while index < len(lines) and lines[index].startswith("#"):
        if match := _DIRECTIVE.fullmatch(lines[index]):
            escape = match[1]
        index += 1
    while index < len(lines):
        head: list[str] = []
        numbers: list[int] = []
        continued = True
        while continued and index < len(lines):
            line = lines[index]
            index += 1
            if line and not line.lstrip().startswith("#"):
                continued = line.endswith(escape)
                head.append(line.removesuffix(escape))
                numbers.append(index)
            elif not head:
                break
        match = _INSTRUCTION.match(head[0]) if head else None
        if match is None:
            continue
        name, head[0] = match[1].upper(), head[0][match.end() :]
        words = "".join(head)
        body: list[str] = []
        if name in ("RUN", "COPY", "ADD"):
            for groups in _HEREDOC.findall(words):
                delimiter = "".join(groups)
                while last_line_of.get(delimiter, -1) >= index:
                    index += 1
                    if lines[index - 1].strip() == delimiter:
                        break
                    body.append(lines[index - 1])
                    numbers.append(index)
        starts = list(itertools.accumulate((len(part) for part in head[:-1]), initial=0))
        starts += [len(words) + 1 + offset for offset in _offsets(body)]
        yield Instruction(name, "\n".join([words, *body]), tuple(starts), tuple(numbers))


def _offsets(lines: list[str]) -> list[int]:
    """At which character each line begins."""
    return list(itertools.accumulate((len(line) + 1 for line in lines[:-1]), initial=0)) if lines else []


def read_stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile. A stage that begins with another one has what that one has: its variables, commands
    and copies, in front of its own."""
    stages: list[Stage] = []
    before: dict[str, str] = {}
    for instruction in read_instructions(text):
        name = instruction.name
        if name == "FROM":
            stages.append(_stage(instruction, before, stages))
            continue
        if not stages:
            if name == "ARG":
                before |= {key: word.text for key, word in _assignments(instruction, before)}
            continue
        stage = stages[-1]
        if name == "ARG":
            for key, word in _assignments(instruction, stage.variables):
                if word.text or key in before:
                    stage.variables.setdefault(key, word.text or before[key])
        elif name == "ENV":
            for key, word in _assignments(instruction, stage.variables):
                stage.environment[key] = word
                stage.variables[key] = word.text
        elif name == "WORKDIR":
            target = substitute(instruction.text.strip(), stage.variables)
            stage.workdir = target if target.startswith("/") else f"{stage.workdir.rstrip('/')}/{target}"
        elif name == "RUN":
            stage.commands += run_commands(instruction, stage.variables)
        elif name in ("COPY", "ADD"):
            _copy(instruction, stage)
    return stages


def _stage(instruction: Instruction, before: dict[str, str], stages: list[Stage]) -> Stage:
    words = substitute(_FLAG.sub("", instruction.text), before).split()
    image = words[0] if words else ""
    name = words[2] if len(words) > 2 and words[1].lower() == "as" else str(len(stages))
    base = next((stage for stage in stages if stage.name.lower() == image.lower()), None)
    if base is None:
        return Stage(image, name, instruction.line, {})
    return Stage(
        base.image,
        name,
        base.line,
        dict(base.variables),
        dict(base.environment),
        list(base.commands),
        list(base.copies),
        base.workdir,
    )


def _assignments(instruction: Instruction, variables: dict[str, str]) -> list[tuple[str, Word]]:
    """The names and values of ARG and ENV. An ARG without a value has an empty one. `ENV NAME a value` is the
    old form."""
    words = list(_words(instruction, 0, len(instruction.text)))
    if instruction.name == "ENV" and words and "=" not in words[0].text:
        value = instruction.text.split(maxsplit=1)[1:]
        text = substitute(value[0].strip().strip("\"'") if value else "", variables)
        return [(words[0].text, Word(text, words[0].line))]
    known = dict(variables)
    found = []
    for word in words:
        key, _, value_text = word.text.partition("=")
        value_text = substitute(value_text, variables if instruction.name == "ENV" else known)
        known[key] = value_text
        found.append((key, Word(value_text, word.line)))
    return found


def _copy(instruction: Instruction, stage: Stage) -> None:
    origin = None
    words = [
        word.text for word in _exec_form(instruction) or _words(instruction, 0, len(instruction.text.split("\n")[0]))
    ]
    while words and words[0].startswith("--"):
        if words[0].startswith("--from="):
            origin = words[0].removeprefix("--from=")
        words.pop(0)
    words = [substitute(word, stage.variables) for word in words]
    if len(words) > 1:
        target = words[-1] if words[-1].startswith("/") else f"{stage.workdir.rstrip('/')}/{words[-1]}"
        stage.copies.append((origin, tuple(words[:-1]), target, instruction.line))


def substitute(text: str, variables: dict[str, str]) -> str:
    """The text with $NAME, ${NAME}, ${NAME:-default} and ${NAME:+other} replaced. What is unknown stays as it is."""
    if "$" not in text:
        return text

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if name is None:
            return match[0]
        known = variables.get(name)
        if match[2] and match[2][-1] == "-":
            return known if known or (known == "" and match[2] == "-") else match[3]
        if match[2]:
            return match[3] if known or (known == "" and match[2] == "+") else ""
        return match[0] if known is None else known

    return _VARIABLE.sub(value, text)


def run_commands(instruction: Instruction, variables: dict[str, str]) -> list[tuple[Word, ...]]:
    """The simple commands of a RUN, with the values of ARG, ENV and the shell's own variables. A `#` begins a comment,
    `>` drops its target; words in quotes stay whole, a variable alone is split into its words."""
    words = _exec_form(instruction)
    if words:
        return [tuple(Word(substitute(word.text, variables), word.line) for word in words)]
    commands: list[tuple[Word, ...]] = []
    current: list[Word] = []
    known = dict(variables)
    head, _, body = instruction.text.partition("\n")
    end = len(instruction.text) if body and _SHELL_HEREDOC.match(head) else len(head)
    for word in (*_words(instruction, 0, end, shell=True), Word("\n", 0)):
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


def _exec_form(instruction: Instruction) -> list[Word]:
    """The words of `RUN ["pip", "install"]`; empty for every other form."""
    text = instruction.text.strip()
    if not text.startswith("["):
        return []
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [Word(word, instruction.line) for word in words] if all(isinstance(word, str) for word in words) else []


def _words(instruction: Instruction, start: int, end: int, *, shell: bool = False) -> Iterator[Word]:
    """The words of a text, without their quotes. shell: also ends of commands, as the word "\n"; without comments and
    redirections."""
    text = instruction.text
    index = start
    while index < end:
        character = text[index]
        if shell and character in _SEPARATORS:
            yield Word("\n", instruction.line_at(index))
            index += 1
        elif character.isspace():
            index += 1
        elif shell and character == "#":
            found = text.find("\n", index, end)
            index = end if found < 0 else found
        else:
            first = index
            parts: list[str] = []
            redirected = False
            while index < end and not text[index].isspace():
                character = text[index]
                if character in "\"'":
                    close = _closing_quote(text, index, end)
                    parts.append(text[index + 1 : close])
                    index = close + 1
                elif character == "\\" and index + 1 < end:
                    parts.append(text[index + 1])
                    index += 2
                elif shell and character in "<>":
                    redirected = True
                    break
                elif shell and character in _SEPARATORS and not text.startswith("$(", index - 1):
                    break
                else:
                    parts.append(character)
                    index += 1
            word = "".join(parts)
            if redirected:
                if word and not word.isdigit():
                    yield Word(word, instruction.line_at(first))
                index = _after_redirection(text, index, end)
            else:
                yield Word(word, instruction.line_at(first))


def _closing_quote(text: str, start: int, end: int) -> int:
    """The offset of the quote that closes the one at `start`, or the end."""
    if text[start] == "'":
        found = text.find("'", start + 1, end)
        return end if found < 0 else found
    index = start + 1
    while index < end and text[index] != '"':
        index += 2 if text[index] == "\\" else 1
    return min(index, end)


def _after_redirection(text: str, index: int, end: int) -> int:
    """The offset behind `>target`, `>&2`, `<<EOF` and the like."""
    while index < end and text[index] in "<>&-":
        index += 1
    while index < end and text[index] in " \t":
        index += 1
    while index < end and not text[index].isspace() and text[index] not in _SEPARATORS:
        index += 1
    return index
