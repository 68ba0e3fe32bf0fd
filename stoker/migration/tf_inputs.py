"""The input readers of a pipeline.config: where records and label maps are, as one data set of stoker.

The API names files. One file per split is named here too (`--train`, `--val`). Of several files or patterns, stoker
reads the folder and tells the splits by their names (docs/tfrecord.md); then the named files are looked up in what it
would read there, and each difference is a row of the report.
"""

import posixpath
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path, PurePosixPath

from stoker.data.formats.finder import detect_layout
from stoker.data.formats.folders import split_from_name
from stoker.data.formats.tables import DatasetLayout, SplitFiles
from stoker.data.formats.tfrecord import recognize
from stoker.data.formats.tfrecord_bytes import read_label_map
from stoker.errors import DataError
from stoker.migration.fields import FieldAccount
from stoker.migration.text_format import Message
from stoker.storage.uri import is_uri

PLACEHOLDER = "PATH_TO_BE_CONFIGURED"
RECORDS = "tf_record_input_reader"
API_MAX_BOXES = 100


def read_inputs(account: FieldAccount, pipeline: Message, model: Message, data: str | None) -> None:
    """Rows and settings of the readers. data: where the records are, if not where the file says."""
    train, evals = pipeline.child("train_input_reader"), pipeline.children("eval_input_reader")
    train_files = _paths(train)
    eval_files = [path for reader in evals for path in _paths(reader)]
    label_maps = [reader.text("label_map_path") for reader in (train, *evals) if reader.has("label_map_path")]
    source = data or _find_source(train_files, eval_files, label_maps)
    account.settings |= {"format": "tfrecord"} | ({} if source is None else {"data": source})
    named = None if source is None else _name_files(source, train_files, eval_files, is_moved=data is not None)
    if named is not None and source is not None:
        first = Path(source) / named[0]
        is_here = is_uri(source) or first.is_file()
        note = "" if is_here else "not on this machine; `stoker import --data DIR` names another folder"
        account.exact(train.child(RECORDS), "input_path", {"data": source, "train": named[0]}, note)
        with_path = [reader for reader in evals if _paths(reader)]
        for reader, name in zip(with_path, named[1:], strict=True):
            account.exact(reader.child(RECORDS), "input_path", {"val": name}, note)
        layout = recognize(first.resolve()) if first.is_file() else None
    else:
        layout = _find_layout(source)
        _read_paths(account, train.child(RECORDS), "train", source, layout)
        for reader in evals:
            _read_paths(account, reader.child(RECORDS), "val", source, layout)
        _warn_about_other_records(account, train_files + eval_files, layout)
    for reader in (train, *evals):
        _read_label_map(account, reader, source, layout, num_classes=int(model.number("num_classes", 0)))
    _warn_about_clipping(account, pipeline.child("train_config"), train)


def _paths(reader: Message) -> list[str]:
    """The paths of records; without empty ones."""
    return [path for path in reader.child(RECORDS).texts("input_path") if path]


def _find_source(train_files: list[str], eval_files: list[str], label_maps: list[str]) -> str | None:
    """The folder of the files; in a bucket that of the label map too, if it is one above: the rest is not copied."""
    if not train_files or PLACEHOLDER in train_files[0]:
        return None
    records = [path for path in (*train_files, *eval_files) if PLACEHOLDER not in path]
    source = _common_folder(records)
    if source is not None and is_uri(source) and label_maps:
        wider = _common_folder([*records, label_maps[0]])
        if wider == posixpath.dirname(source):
            return wider
    return source


def _common_folder(paths: list[str]) -> str | None:
    """The folder of all paths; None if they have none in common."""
    folders = [posixpath.dirname(path) or "." for path in paths]
    schemes = {folder.partition("://")[0] if is_uri(folder) else "" for folder in folders}
    if len(schemes) > 1:
        return None
    scheme = schemes.pop()
    try:
        common = posixpath.commonpath([folder.partition("://")[2] if scheme else folder for folder in folders])
    except ValueError:  # absolute and relative ones
        return None
    if scheme:
        return f"{scheme}://{common}" if common else None
    return None if common == "/" else common or "."


def _name_files(source: str, train_files: list[str], eval_files: list[str], *, is_moved: bool) -> list[str] | None:
    """The only file of each split, relative to `source`; None if there are several, patterns, or no such file."""
    paths = [*train_files, *eval_files]
    if len(train_files) != 1 or len(eval_files) > 1 or any(map(has_magic, paths)):
        return None
    if not is_moved:
        return [posixpath.relpath(path.partition("://")[2], source.partition("://")[2]) if is_uri(source)
                else posixpath.relpath(path, source) for path in paths]  # fmt: skip
    names = [PurePosixPath(path).name for path in paths]
    if is_uri(source):
        return names
    found = [[path for pattern in (name, f"*/{name}") for path in Path(source).glob(pattern)] for name in names]
    return [candidates[0].relative_to(source).as_posix() for candidates in found] if all(found) else None


def _find_layout(source: str | None) -> DatasetLayout | None:
    """What stoker would read; None if it is not on this machine, or nothing is found there."""
    if source is None or is_uri(source) or not Path(source).exists():
        return None
    try:
        return detect_layout(Path(source), "tfrecord")
    except DataError:
        return None


def _matches(part: SplitFiles, pattern: str) -> bool:
    """Whether a path of the file means this shard: by its name, as the folder may have moved."""
    return fnmatchcase(part.annotations.name, PurePosixPath(pattern).name)


def _read_paths(
    account: FieldAccount, reader: Message, wanted: str, source: str | None, layout: DatasetLayout | None
) -> None:
    if not reader.has("input_path"):
        return
    paths = [path for path in reader.texts("input_path") if path]
    if not paths:
        account.drop(reader, "input_path", "it is empty: `stoker import --data DIR`, or `stoker train DIR`")
        return
    name = ", ".join(PurePosixPath(path).name for path in paths)
    if source is None:
        reason = "a placeholder" if PLACEHOLDER in paths[0] else "the files have no folder in common"
        account.drop(reader, "input_path", f"{reason}: `stoker import --data DIR`, or `stoker train DIR`")
        return
    settings = {"data": source}
    if layout is None:
        splits = {split_from_name(PurePosixPath(path).name) for path in paths}
        checked = (
            f"{source} is not on this machine" if is_uri(source) or not Path(source).exists() else "no records there"
        )
        checked = f"; not checked: {checked}"
    else:
        parts = [part for part in layout.parts if any(_matches(part, path) for path in paths)]
        splits, checked = {part.split for part in parts}, ""
        if not parts:
            account.drop(
                reader, "input_path", f"there is no such file in {source}; the data set is what stoker finds there"
            )
            return
    if splits == {wanted} or (wanted == "train" and splits <= {"train", None}):
        account.exact(reader, "input_path", settings, f"the {wanted} split{checked}")
    elif wanted == "val" and splits == {"test"}:
        note = (
            f"its name makes it the test split: a tenth of the training images is held out for validation instead, and "
            f"`stoker eval RUN --split test` scores {name}{checked}"
        )
        account.substitute(reader, "input_path", settings, note)
        account.trap("eval-is-test", reader.lines.get("input_path"), f"{name}: {note}")
    elif wanted == "val":
        note = f"the name of {name} has no split, so its images would be trained on: call it val.record{checked}"
        account.drop(reader, "input_path", note)
        account.trap("eval-is-trained-on", reader.lines.get("input_path"), note)
    else:
        account.drop(reader, "input_path", f"the name of {name} makes it another split: call it train.record{checked}")


def _warn_about_other_records(account: FieldAccount, named: list[str], layout: DatasetLayout | None) -> None:
    if layout is None:
        return
    others = [
        part.annotations.name
        for part in layout.parts
        if part.split in ("train", None) and not any(_matches(part, path) for path in named)
    ]
    if others:
        text = f"{', '.join(others[:5])} in {layout.root} would be trained on too, and the file does not name them"
        account.trap("other-records", None, text)


def _read_label_map(
    account: FieldAccount, reader: Message, source: str | None, layout: DatasetLayout | None, *, num_classes: int
) -> None:
    if not reader.has("label_map_path"):
        return
    name = PurePosixPath(reader.text("label_map_path")).name
    found = next((path for path in layout.metadata_files if path.name == name), None) if layout is not None else None
    if layout is None:
        note = "found by itself if it is in the folder of the records or the one above"
        if source is None:
            account.drop(reader, "label_map_path", f"the place of the data is not known; {note}")
        else:
            account.exact(reader, "label_map_path", note=note)
    elif found is None:
        reason = f"{name} is not near the records: copy it next to them, else classes come from the records"
        account.drop(reader, "label_map_path", reason)
    else:
        account.exact(reader, "label_map_path", note=f"found by itself: {found}")
    if not reader.path.startswith("train"):
        return
    text = (
        "the text of a box overrides its label id, in the API and here; where they disagree, "
        "`stoker data check` lists the boxes (label-disagrees)"
    )
    account.trap("text-over-label", reader.lines.get("label_map_path"), text)
    count = len(read_label_map(found).names) if found is not None else num_classes
    if count != num_classes:
        text = f"num_classes is {num_classes}, and {found} has {count} classes: {count} are trained"
        account.trap("number-of-classes", None, text)


def _warn_about_clipping(account: FieldAccount, train_config: Message, reader: Message) -> None:
    """Boxes beyond the limit are dropped without a message there."""
    owner = next((m for m in (reader, train_config) if m.has("max_number_of_boxes")), reader)
    limit = int(owner.number("max_number_of_boxes", API_MAX_BOXES))
    text = (
        f"of an image with more than {limit} boxes, the API silently drops the rest (max_number_of_boxes); stoker "
        "trains on all boxes"
    )
    account.trap("max-number-of-boxes", owner.lines.get("max_number_of_boxes"), text)
