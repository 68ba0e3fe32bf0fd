"""TFRecord: records are read as written, all damage is detected, the correct label map is chosen."""

import contextlib
import gzip
import shutil
from pathlib import Path

import pytest
from hypothesis import strategies as st

from stoker.data.formats import tfrecord_bytes
from stoker.data.formats.tfrecord_bytes import label_map_text, looks_like_label_map, masked_crc, read_label_map
from stoker.data.index import Index, open_index, require_images
from stoker_watch.errors import DataError, StokerError
from tests.trainer.data.examples import property_test
from tests.trainer.data.tfrecords import (
    Box,
    crc32c,
    example,
    feature,
    field,
    frame,
    image_features,
    jpeg,
    label_map,
    masked,
    write,
)

CAT: Box = ("cat", 1, 0.1, 0.2, 0.5, 0.6)
DOG: Box = ("dog", 2, 0.0, 0.0, 1.0, 1.0)


COMMON_KINDS = ("unused-class", "class-not-in-split", "split-without-boxes", "empty-split")
"""Kinds that data sets of a few boxes usually have."""


def kinds(index: Index) -> dict[str, int]:
    return {problem.kind: problem.count for problem in index.problems if problem.kind not in COMMON_KINDS}


def test_the_dice(real_data: Path) -> None:
    index = open_index(real_data / "dice")
    assert index.format == "tfrecord"
    assert index.class_names == ("one", "two", "three", "four", "five", "six")
    assert index.category_ids == (1, 2, 3, 4, 5, 6)
    assert (len(index), len(index.boxes), index.problems) == (250, 1795, ())
    assert {split: len(index.image_indices(split)) for split in index.splits} == {"train": 179, "val": 21, "test": 50}
    assert any("dice_label_map.pbtxt" in note for note in index.notes)
    assert require_images(index) == []
    assert index.path(0).name == "IMG_20191208_111228.jpg"
    shard = index.path(0).parent
    assert index.read(0) in shard.read_bytes()
    assert index.read(0).startswith(b"\xff\xd8")
    assert index.read(0).endswith(b"\xff\xd9")
    assert open_index(shard).format == "tfrecord"


def test_the_checksum_is_crc32c_masked() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value in catalogues of CRCs
    for data in (b"", b"123456789", bytes(range(256))):
        assert masked_crc(data).to_bytes(4, "little") == masked(data)


def test_the_bytes_of_an_example() -> None:
    """Against bytes put together by hand from the encoding's description."""
    written = tfrecord_bytes.encode_example({"b": [300, -1], "a": [b"xy", b""], "none": []})
    first = bytes.fromhex("0a0161 1208 0a06 0a027879 0a00")
    second = bytes.fromhex("0a0162 1210 1a0e 0a0c ac02 ffffffffffffffffff01")
    entries = b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in (first, second))
    assert written == b"\x0a" + bytes([len(entries)]) + entries


keys = st.text(max_size=40)
lists = st.one_of(
    st.lists(st.binary(max_size=200), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
)


@property_test(st.dictionaries(keys, lists, max_size=8), st.booleans(), st.booleans(), few=20, many=300)
def test_every_example_is_read_back(features: dict[str, list[object]], packed: bool, odd: bool) -> None:
    if odd:  # value before key, fields that the messages do not have
        entries = (
            field(2, feature(v, packed=packed)) + b"\x18\x05" + field(1, k.encode()) + field(9, b"?")
            for k, v in features.items()
        )
        record = b"\x1d\0\0\0\0" + field(1, b"".join(field(1, entry) + b"\x29" + bytes(8) for entry in entries))
    else:
        record = example(features, packed=packed)
    read = tfrecord_bytes.Example(record)
    kinds = {bytes: "bytes_list", float: "float_list", int: "int64_list"}
    for key, values in features.items():
        assert list(read.values(key.encode(), kinds[type(values[0])])) == values


def test_unusual_layouts_of_entries_are_read() -> None:
    key, value = field(1, b"k"), field(2, feature([5]))
    for entry in (
        key + value, value + key, key + value + b"\x18\x07", field(3, b"x") + key + value,
        field(1, b"j") + key + value,
    ):  # fmt: skip
        record = field(1, field(1, entry))
        assert list(tfrecord_bytes.Example(record).values(b"k", "int64_list")) == [5]
    in_pieces = field(3, field(1, b"\x05")) + field(3, b"\x08\x06")
    replaced = field(1, field(1, b"x")) + feature([7])  # of a oneof the last one counts
    for content, values in ((in_pieces, [5, 6]), (replaced, [7])):
        example = tfrecord_bytes.Example(field(1, field(1, key + field(2, content))))
        assert list(example.values(b"k", "int64_list")) == values
        with pytest.raises(tfrecord_bytes.MalformedExample, match="contains integers, not floats"):
            example.values(b"k", "float_list")


@property_test(st.binary(max_size=60), few=60, many=1000)
def test_random_bytes_are_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(tfrecord_bytes.MalformedExample):
        tfrecord_bytes.Example(data).values(b"", "int64_list")


def test_the_index_has_the_content_of_the_records(tmp_path: Path) -> None:
    label_map(tmp_path / "label_map.pbtxt", "cat", "dog")
    write(
        tmp_path / "train.record",
        image_features(
            "a/b.jpg", [CAT, DOG], image__source_id=[b"7"],
            image__object__is_crowd=[0, 1], image__object__area=[5.0, 6.0], image__object__difficult=[1, 0],
        ),
        example(image_features("c.jpg", image__source_id=[b"9"])),
        example(image_features("d.jpg", [DOG], size=None, image__source_id=[b"8"]), packed=False),
        image_features("d.jpg", [CAT], image__source_id=[b"3"], image__object__group_of=[1]),
        image_features(None, [(None, 2, 0.5, 0.5, 0.75, 0.75)], image__source_id=[b"4"]),
    )  # fmt: skip
    write(tmp_path / "val.record", image_features("..", [("cat", None, 0, 0, 1, 1)]))
    index = open_index(tmp_path)
    assert index.class_names == ("cat", "dog")
    assert index.offsets.tolist() == [0, 2, 2, 3, 4, 5, 6]
    assert index.labels.tolist() == [0, 1, 1, 0, 1, 0]
    assert index.boxes[:2].tolist() == [pytest.approx([20, 20, 100, 60]), [0, 0, 200, 100]]
    assert index.crowd.tolist() == [False, True, False, True, False, False]
    assert index.area[:3].tolist() == [5, 6, 200 * 100]
    assert index.original_size.tolist() == [[100, 200]] * 6
    names = [index.path(row).name for row in range(6)]
    assert names == ["b.jpg", "c.jpg", "d.jpg", "d (record 4).jpg", "record 5", "record 1"]
    assert [index.path(row).parent.name for row in (0, 5)] == ["train.record", "val.record"]
    assert index.splits == ("train", "val")
    assert all(index.read(row) == jpeg(200, 100) for row in range(6))
    assert not kinds(index)
    assert any("1 boxes around groups" in note for note in index.notes)


def test_numeric_source_ids_are_the_image_ids(tmp_path: Path) -> None:
    images = [image_features(f"{n}.jpg", [CAT], image__source_id=[str(n * n).encode()]) for n in range(4)]
    write(tmp_path / "a.tfrecord", *images)
    assert open_index(tmp_path).image_id.tolist() == [0, 1, 4, 9]
    write(tmp_path / "a.tfrecord", *images, images[0])
    assert open_index(tmp_path).image_id.tolist() == [0, 1, 2, 3, 4]


THREE = b"".join(frame(example(image_features(f"{n}.jpg", [CAT]))) for n in range(3))


def shard_of_three(folder: Path) -> Path:
    shard = folder / "train.record"
    shard.write_bytes(THREE)
    return shard


@property_test(st.data(), few=12, many=300)
def test_every_flipped_byte_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    shard = shard_of_three(folder)
    content = bytearray(shard.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    shard.write_bytes(content)
    index = None
    try:
        index = open_index(folder)
    except DataError as error:
        messages = str(error)
    if index is None:
        assert "train.record" in messages
    else:
        assert kinds(index).keys() & {"damaged-record", "damaged-shard", "truncated-shard"}
        assert len(index) < 3
        assert any("train.record @ byte" in problem.examples[0] for problem in index.problems)


@property_test(st.data(), few=8, many=100)
def test_every_truncation_is_detected_except_between_records(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    shard = shard_of_three(folder)
    content = shard.read_bytes()
    record = len(content) // 3
    cut = data.draw(st.integers(1, len(content) - 1))
    shard.write_bytes(content[:cut])
    if cut < record:
        with pytest.raises(DataError, match="No record can be used"):
            open_index(folder)
    else:
        index = open_index(folder)
        assert len(index) == cut // record
        assert (kinds(index) == {"truncated-shard": 1}) == (cut % record > 0)


def test_damage_loses_one_record_or_the_rest_of_the_file(tmp_path: Path) -> None:
    shard = shard_of_three(tmp_path)
    content = bytearray(shard.read_bytes())
    record = len(content) // 3
    content[record + 40] ^= 1
    shard.write_bytes(content)
    index = open_index(tmp_path)
    assert kinds(index) == {"damaged-record": 1}
    assert index.problems[0].examples == (f"train.record @ byte {record:,}, record 2",)
    assert [index.path(row).name for row in range(2)] == ["0.jpg", "2.jpg"]
    content[record] ^= 1
    shard.write_bytes(content)
    index = open_index(tmp_path)
    assert kinds(index) == {"damaged-shard": 1}
    assert f"record 2: the checksum of its length is wrong; the {2 * record:,} bytes" in index.problems[0].examples[0]


def test_unusable_records_are_reported(tmp_path: Path) -> None:
    unequal = image_features("u.jpg", [CAT, DOG]) | {"image/object/class/label": [1]}
    write(
        tmp_path / "train.record",
        image_features("good.jpg", [CAT]),
        b"\x0a\xff",
        image_features("none.jpg", [CAT], image__encoded=[]),
        image_features("page.jpg", [CAT], image__encoded=[b"<html><body>404"]),
        unequal,
        image_features("typed.jpg", [CAT]) | {"image/object/class/label": [1.0]},
        image_features("better.jpg", [DOG]),
    )
    index = open_index(tmp_path)
    assert len(index) == 2
    assert kinds(index) == {"not-an-example": 2, "record-without-image": 2, "unequal-lists": 1}
    messages = "\n".join(example for problem in index.problems for example in problem.examples)
    assert "record 3: it has no image/encoded" in messages
    assert "record 4: it is a web page" in messages
    assert "image/object/class/label has 1" in messages
    assert "contains floats, not integers" in messages


def test_empty_and_missing_shards_are_reported(tmp_path: Path) -> None:
    for number in (0, 1, 4):
        write(tmp_path / f"train.record-{number:05d}-of-00006", image_features(f"{number}.jpg", [CAT]))
    (tmp_path / "train.record-00002-of-00006").touch()
    index = open_index(tmp_path)
    assert len(index) == 3
    assert kinds(index) == {"empty-shard": 1, "missing-shard": 1}
    messages = {problem.kind: problem.examples[0] for problem in index.problems}
    assert messages["empty-shard"].endswith("train.record-00002-of-00006")
    assert "2 of 6 are missing, numbers 00003, 00005" in messages["missing-shard"]
    for number in (0, 1, 4):
        (tmp_path / f"train.record-{number:05d}-of-00006").write_bytes(b"")
    with pytest.raises(DataError, match="zero bytes"):
        open_index(tmp_path)


def test_one_file_and_patterns(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in range(2):
            write(tmp_path / f"{split}.record-{number:05d}-of-00002", image_features(f"{split}{number}.jpg", [CAT]))
    assert len(open_index(tmp_path)) == 4
    assert len(open_index(tmp_path / "train.record-00001-of-00002")) == 1
    both = open_index(tmp_path / "train.record*")
    assert sorted(both.path(row).name for row in range(len(both))) == ["train0.jpg", "train1.jpg"]
    assert len(open_index(tmp_path / "val.record-?????-of-00002")) == 2
    with pytest.raises(DataError, match="does not exist"):
        open_index(tmp_path / "test.record*")


@pytest.mark.parametrize("names", [("train", "valid", "test"), ("Training", "val", "testing")])
def test_split_folders_with_a_map_each(tmp_path: Path, names: tuple[str, str, str]) -> None:
    for name in names:
        write(tmp_path / name / "dice.tfrecord", image_features(f"{name}.jpg", [CAT]))
        label_map(tmp_path / name / "dice_label_map.pbtxt", "cat", "dog")
    index = open_index(tmp_path)
    assert index.splits == ("train", "val", "test")
    assert index.class_names == ("cat", "dog")


def test_gzip_shards_are_unpacked_into_the_cache(tmp_path: Path, own_cache: Path) -> None:
    shard = shard_of_three(tmp_path)
    packed = tmp_path / "val.record.gz"
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    shutil.copy(packed, tmp_path / "test.record.gz")
    before = packed.read_bytes()
    index = open_index(tmp_path)
    row = int(index.image_indices("val")[0])
    assert index.read(row) == jpeg(200, 100)
    assert own_cache in index.path(row).parents
    (note,) = [note for note in index.notes if "compressed" in note]
    assert note == f"2 files are compressed: unpacked into {own_cache / 'shards'}, {2 * shard.stat().st_size:,} bytes"
    assert packed.read_bytes() == before
    shutil.rmtree(own_cache / "shards")  # a cache may be deleted at any time
    again = open_index(tmp_path)
    assert again.read(row) == jpeg(200, 100)


def test_damaged_gzip_is_skipped_and_reported(tmp_path: Path) -> None:
    packed = gzip.compress(shard_of_three(tmp_path).read_bytes())
    (tmp_path / "val.record").write_bytes(packed[: len(packed) // 2])
    index = open_index(tmp_path)
    assert kinds(index) == {"damaged-shard": 1}
    assert "val.record" in index.problems[0].examples[0]


def test_texts_in_the_map_decide_the_class(tmp_path: Path) -> None:
    label_map(tmp_path / "label_map.pbtxt", "cat", "dog")
    boxes: list[Box] = [
        ("cat", 1, 0, 0, 0.5, 0.1),
        ("dog", 1, 0, 0, 0.5, 0.2),
        ("kat", 2, 0, 0, 0.5, 0.3),
        ("", 2, 0, 0, 0.5, 0.4),
        ("cow", 9, 0, 0, 0.5, 0.5),
        ("", 0, 0, 0, 0.5, 0.6),
    ]
    write(tmp_path / "train.record", image_features("a.jpg", boxes), image_features("b.jpg", [CAT]))
    index = open_index(tmp_path)
    assert index.labels.tolist() == [0, 1, 1, 1, 0]
    assert kinds(index) == {"label-disagrees": 2, "unknown-class": 1, "no-class": 1}
    messages = "\n".join(example for problem in index.problems for example in problem.examples)
    assert (
        "train.record, record 1 (a.jpg), object 2: label 1 is 'cat' in label_map.pbtxt, its text is 'dog'" in messages
    )
    assert "object 5: label 9, text 'cow': not in label_map.pbtxt" in messages
    assert "TensorFlow's background" in messages


def test_without_a_map_texts_are_the_classes(tmp_path: Path) -> None:
    only_label: Box = ("", 2, 0, 0, 1, 0.5)
    write(
        tmp_path / "train.record",
        image_features("a.jpg", [("zebra", 2, 0, 0, 1, 1), CAT]),
        image_features("b.jpg", [only_label]),
    )
    write(tmp_path / "val.record", image_features("c.jpg", [CAT]))
    index = open_index(tmp_path)
    assert index.class_names == ("cat", "zebra")
    assert index.category_ids == (1, 2)
    assert index.labels.tolist() == [1, 0, 1, 0]
    assert any("no label map" in note for note in index.notes)


def test_eval_is_the_validation_split_of_a_file_and_no_folder(tmp_path: Path) -> None:
    """The TensorFlow Object Detection API's eval_input_reader; `eval/` is where its evaluation writes logs."""
    write(tmp_path / "train.record", image_features("a.jpg", [CAT]), image_features("b.jpg", [CAT]))
    write(tmp_path / "eval.record", image_features("c.jpg", [CAT]))
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "events.out.tfevents.1").write_bytes(b"")
    index = open_index(tmp_path)
    assert {split: len(index.image_indices(split)) for split in index.splits} == {"train": 2, "val": 1}


def test_without_map_and_texts_the_labels_are_the_classes(tmp_path: Path) -> None:
    write(tmp_path / "train.record", *(image_features(f"{n}.jpg", [(None, n, 0, 0, 1, 1)]) for n in (3, 1, 0, 1)))
    index = open_index(tmp_path)
    assert index.class_names == ("class 1", "class 3")
    assert kinds(index) == {"no-class": 1, "no-box-left": 1}
    assert any("label_map.pbtxt" in note for note in index.notes)


def test_the_map_that_fits_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "records"
    write(folder / "train.record", image_features("a.jpg", [CAT, DOG]), image_features("b.jpg", [CAT]))
    label_map(tmp_path / "set" / "other set" / "map.pbtxt", "cat", "dog", "emu", "cow")
    assert open_index(folder).class_names == ("cat", "dog")
    label_map(tmp_path / "set" / "training" / "map.pbtxt", "dog", "cat")
    assert open_index(folder).class_names == ("cat", "dog")  # a map next to the folder that does not fit is not used
    label_map(tmp_path / "set" / "annotations" / "map.pbtxt", "cat", "dog", "cow")
    assert open_index(folder).class_names == ("cat", "dog", "cow")
    label_map(folder / "a.pbtxt", "dog", "cat")
    label_map(folder / "b.pbtxt", "cat", "dog", "emu")
    index = open_index(folder)
    assert index.class_names == ("cat", "dog", "emu")
    assert any("b.pbtxt" in note and "a.pbtxt do not fit" in note for note in index.notes)
    label_map(folder / "c.pbtxt", "cat", "dog")
    with pytest.raises(DataError) as error:
        open_index(folder)
    assert [Path(choice).name for choice in error.value.choices] == ["a.pbtxt", "b.pbtxt", "c.pbtxt"]
    (folder / "a.pbtxt").write_text("node { name: 'x' }")  # a graph, not a label map
    (folder / "b.pbtxt").unlink()
    assert open_index(folder).class_names == ("cat", "dog")


@property_test(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=12), min_size=1, max_size=6, unique=True),
    few=15,
    many=200,
)
def test_every_label_map_is_read_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    path = tmp_path_factory.mktemp("map") / "label_map.pbtxt"
    path.write_bytes(label_map_text(names).encode())
    assert looks_like_label_map(path)
    read = read_label_map(path)
    assert (read.names, read.ids) == (names, list(range(1, len(names) + 1)))


@pytest.mark.parametrize(
    ("text", "ids", "names"),
    [
        ("item{id:2,name:'b'};item{name:\"a\";id:1}", [1, 2], ["a", "b"]),
        ("# a: 'b' {\nitem: <\n name: '/m/0' # why\n id: 0x10 display_name: 'b' ' c'\n>", [16], ["b c"]),
        ("item { id: 0 name: 'background' } item { id: 1 name: 'x' }", [1], ["x"]),
        ("item { id: 1 name: 'x' } item [{ id: 2 name: 'y' }, { id: 3 name: 'z' }]", [1, 2, 3], ["x", "y", "z"]),
        ("item { id: 3 name: 'b\\'\\303\\251\\t\\u00e9' keypoints { id: 4 label: 'n' } f: ['a', {}] g: -inf }", [3],
         ["b'é\té"]),
        ("\ufeffpad: -1.5 [some.ext]: 3 item { id: 1 name: 'x' }", [1], ["x"]),
    ],
)  # fmt: skip
def test_label_maps_as_people_write_them(tmp_path: Path, text: str, ids: list[int], names: list[str]) -> None:
    path = tmp_path / "m.pbtxt"
    path.write_text(text, encoding="utf-8")
    read = read_label_map(path)
    assert (read.ids, read.names) == (ids, names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("item { name: 'x' }", ["m.pbtxt:1", "no id"]),
        ("# item {\nitem { id: 1 comment: 'item {' }", ["m.pbtxt:2", "no name"]),
        ("item { id: 0 name: 'x' }", ["m.pbtxt:1", "the id 0", "background"]),
        ("item { id: 1 name: 'x' }\nitem { id: 1 name: 'y' }", ["m.pbtxt:1 and line 2", "the id 1"]),
        ("item { id: 1 name: 'x' }\nitem { id: 2 name: 'x' }", ["m.pbtxt:1 and line 2", "called 'x'"]),
        ("item {\n id: 1\n name: x }", ["m.pbtxt:3", "Expected string"]),
        ("item { id: one name: 'x' }", ["m.pbtxt:1", "Couldn't parse integer: one"]),
        ("item { id: 1 name: 'x'", ["m.pbtxt:1", 'Expected "}"']),
        ("item { id: 1 name: 'x\n' }", ["m.pbtxt:1", "missing ending quote"]),
        ("item { id: 1 name: '\\377' }", ["m.pbtxt:1", "'utf-8' codec can't decode byte 0xff"]),
        ("item { id: 1 name: 'x' }\n" + "a {" * 3000, ["nested too deeply"]),
        ("", ["no classes"]),
    ],
)
def test_wrong_label_maps_are_refused_with_their_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "m.pbtxt"
    path.write_text(text)
    with pytest.raises(StokerError) as error:
        read_label_map(path)
    for word in words:
        assert word in str(error.value)


def test_a_changed_shard_or_map_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "train.record", image_features("a.jpg", [CAT]), image_features("b.jpg", [CAT]))
    assert open_index(tmp_path).class_names == ("cat",)
    label_map(tmp_path / "label_map.pbtxt", "cat", "dog")
    assert open_index(tmp_path).class_names == ("cat", "dog")
    label_map(tmp_path / "label_map.pbtxt", "cat", "horse")
    assert open_index(tmp_path).class_names == ("cat", "horse")
    with (tmp_path / "train.record").open("ab") as file:
        file.write(frame(example(image_features("c.jpg", [CAT]))))
    assert len(open_index(tmp_path)) == 3


def test_a_record_file_of_another_program_gives_way(tmp_path: Path) -> None:
    (tmp_path / "notes.record").write_text("first record of the day")
    with pytest.raises(DataError, match="No record can be used") as error:
        open_index(tmp_path)
    assert "notes.record @ byte 0, record 1: it does not begin like a TFRecord" in str(error.value)
    (tmp_path / "labels.csv").write_text("filename,width,height,class,xmin,ymin,xmax,ymax\na.jpg,9,9,x,1,2,3,4\n")
    (tmp_path / "a.jpg").write_bytes(jpeg(9, 9))
    assert open_index(tmp_path).format == "csv"
