"""The tree of a protobuf text: the same as protobuf's own parser reads, with lines, within bounds."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.migration.text_format import MAX_BYTES, MAX_DEPTH, Message, read_message
from stoker_watch.errors import ConfigError

SPACES = st.sampled_from([" ", "\n", "  # a } comment\n", "\t"])
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name not in ("true", "false"))
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8),
)


def read(tmp_path: Path, text: str) -> Message:
    file = tmp_path / "pipeline.config"
    file.write_text(text, encoding="utf-8")
    return read_message(file)


def as_values(message: Message) -> dict[str, list[Any]]:
    """The tree without lines."""
    return {
        **message.scalars,
        **{name: [as_values(child) for child in group] for name, group in message.messages.items()},
    }


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + text_format.text_encoding.CEscape(value.encode(), as_utf8=True) + '"'
    return repr(value)


@st.composite
def texts(draw: st.DrawFn, depth: int = 0) -> tuple[str, dict[str, list[Any]]]:
    """(text in one of its many spellings, the values)."""
    values: dict[str, list[Any]] = {}
    out = ""
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        if depth < 3 and draw(st.booleans()):
            inside, inner = draw(texts(depth + 1))
            opening, closing = draw(st.sampled_from(["{}", "<>"]))
            out += f"{name}{draw(st.sampled_from(['', ':']))}{draw(SPACES)}{opening}{draw(SPACES)}{inside}{closing}"
            values[name] = [inner]
        else:
            values[name] = draw(st.lists(SCALARS, min_size=1, max_size=3))
            if draw(st.booleans()):
                out += f"{name}:{draw(SPACES)}[{', '.join(map(written, values[name]))}]"
            else:
                out += draw(SPACES).join(f"{name}: {written(value)}" for value in values[name])
        out += draw(st.sampled_from(["", ",", ";"])) + draw(SPACES)
    return out, values


@settings(max_examples=40)
@given(texts())
def test_every_spelling_gives_the_same_tree(tmp_path_factory: pytest.TempPathFactory, case: tuple[str, dict[str, Any]]):
    text, values = case
    assert as_values(read(tmp_path_factory.getbasetemp(), text)) == values


def test_it_agrees_with_protobuf_on_a_real_message(tmp_path: Path):
    """protobuf's description of its own messages: 1,400 lines, nested five deep."""
    original = descriptor_pb2.FileDescriptorProto()
    descriptor_pb2.DESCRIPTOR.CopyToProto(original)
    text = text_format.MessageToString(original)
    tree = read(tmp_path, text)

    def check(message: Any, read_one: Message) -> None:
        fields = message.ListFields()
        assert {field.name for field, _ in fields} == {*read_one.scalars, *read_one.messages}
        for field, value in fields:
            values = value if isinstance(value, list) or hasattr(value, "append") or hasattr(value, "add") else [value]
            if field.message_type is not None:
                for part, child in zip(values, read_one.messages[field.name], strict=True):
                    check(part, child)
            elif field.enum_type is not None:
                names = [field.enum_type.values_by_number[number].name for number in values]
                assert read_one.scalars[field.name] == names
            else:
                assert read_one.scalars[field.name] == list(values)

    check(original, tree)


def test_paths_and_lines(tmp_path: Path):
    tree = read(tmp_path, "a {\n  b { c: 1 }\n  b {\n    c: 2 }\n}\n[x.y.ext] { d: 'e' }\nf: 'one' \"two\"\n")
    found = [(owner.join(name), owner.lines.get(name)) for owner, name in tree.leaves()]
    assert found == [("f", 7), ("a.b.c", 2), ("a.b[1].c", 4), ("[x.y.ext].d", 6)]
    assert tree.text("f") == "onetwo"
    assert tree.child("absent").line is None


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a {\n b: 1\n", ":2", "missing"),
        ("a: 1\n}", ":2", "Expected identifier"),
        ("a 1", ":1", "expected ':'"),
        ("a: [1 2]", ":1", "expected ','"),
        ("a: 'x", ":1", "missing ending quote"),
        ("a {" * (MAX_DEPTH + 2), ":1", "nested"),
        ("a: 1\n" * (MAX_BYTES // 5 + 1), "pipeline.config", "bytes"),
        ("a: 'é'".encode("latin-1").decode("latin-1") + "\x00\x01: 2", ":1", "Expected identifier"),
        ("a {\n b:\n c: 2\n}", ":2", "b has no value"),
        ("a: “x”", ":1", 'straight quotes in the whole file: a: "x"'),
        ("\n<!DOCTYPE html>\n<html lang='en'>", ":2", "web page"),
    ],
    ids=["open", "closed twice", "no colon", "list", "string", "deep", "large", "binary", "no value", "quotes", "page"],
)
def test_what_is_no_text_is_refused_with_its_line(tmp_path: Path, text: str, place: str, words: str):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert place in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(("text", "read_field"), [("a: 'x'", "number"), ("a: 3", "flag"), ("a: true", "number")])
def test_a_value_of_the_wrong_kind_names_its_line(tmp_path: Path, text: str, read_field: str):
    with pytest.raises(ConfigError, match=r"a is .*\n.*config:1"):
        getattr(read(tmp_path, text), read_field)("a", 1)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_message(tmp_path / "none.config")
