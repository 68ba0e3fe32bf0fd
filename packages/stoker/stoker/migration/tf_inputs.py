"""The input readers of a pipeline.config: where records and label maps are, as one data set of stoker.

The API names files. One file per split is named here too (`--train`, `--val`). Of several files or patterns, stoker
reads the folder and tells the splits by their names (docs/data.md): what these names mean is in the report.
"""

import posixpath
from glob import escape, has_magic
from pathlib import Path, PurePosixPath

from stoker.data.formats.folders import split_from_name
from stoker.migration.fields import FieldAccount
from stoker.migration.text_format import Message
from stoker_watch.storage.uri import is_uri

PLACEHOLDER = "PATH_TO_BE_CONFIGURED"
RECORDS = "tf_record_input_reader"
API_MAX_BOXES = 100


def read_inputs(account: FieldAccount, pipeline: Message, data: str | None) -> None:
    """Rows and settings of the readers. data: where the records are, if not where the file says."""
    train, evals = pipeline.child("train_input_reader"), pipeline.children("eval_input_reader")
    train_files = _paths(train)
    eval_files = [path for reader in evals for path in _paths(reader)]
    label_maps = [reader.text("label_map_path") for reader in (train, *evals) if reader.has("label_map_path")]
    source = data or _find_source(train_files, eval_files, label_maps)
    account.settings |= {"format": "tfrecord"} | ({} if source is None else {"data": source})
    names = None if source is None else _name_files(source, train_files, eval_files, is_moved=data is not None)
    if names is not None and source is not None:
        is_here = is_uri(source) or (Path(source) / names[0]).is_file()
        note = "" if is_here else "not on this machine; `stoker import --data DIR` names another folder"
        settings = {"data": source, "train": names[0]}
        account.carry(train.child(RECORDS), "input_path", "exact", settings, note)
        for reader, name in zip((reader for reader in evals if _paths(reader)), names[1:], strict=True):
            account.carry(reader.child(RECORDS), "input_path", "exact", {"val": name}, note)
    else:
        for reader, wanted in ((train, "train"), *((reader, "val") for reader in evals)):
            _read_paths(account, reader.child(RECORDS), wanted, source)
    for reader in (train, *evals):
        if reader.has("label_map_path"):
            _read_label_map(account, reader, source)
    if train.has("label_map_path"):
        account.trap("text-over-label", train.lines.get("label_map_path"))
    owner = next((m for m in (train, pipeline.child("train_config")) if m.has("max_number_of_boxes")), train)
    count = int(owner.number("max_number_of_boxes", API_MAX_BOXES))
    account.trap("max-number-of-boxes", owner.lines.get("max_number_of_boxes"), count=count)


def _paths(reader: Message) -> list[str]:
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
    try:
        common = posixpath.commonpath(folders)
    except ValueError:  # absolute and relative ones
        return None
    if any(map(is_uri, folders)):
        return common.replace(":/", "://", 1) if ":/" in common else None  # commonpath joins by single slashes
    return None if common == "/" else common or "."


def _name_files(source: str, train_files: list[str], eval_files: list[str], *, is_moved: bool) -> list[str] | None:
    """The only file of each split, relative to `source`; None if there are several, patterns, or no such file."""
    paths = [*train_files, *eval_files]
    if len(train_files) != 1 or len(eval_files) > 1 or any(map(has_magic, paths)):
        return None
    if not is_moved:
        return [posixpath.relpath(path, source) for path in paths]
    names = [PurePosixPath(path).name for path in paths]
    if is_uri(source):
        return names
    found = [[path for pattern in (name, f"*/{name}") for path in Path(source).glob(pattern)] for name in names]
    return [candidates[0].relative_to(source).as_posix() for candidates in found] if all(found) else None


def _read_label_map(account: FieldAccount, reader: Message, source: str | None) -> None:
    """The row of a label map, which is not named here but found (`formats/tfrecord.py`)."""
    name, root = PurePosixPath(reader.text("label_map_path")).name, Path(source or "")
    if source is not None and not is_uri(source) and root.is_dir():
        folders, patterns = (root, root.absolute().parent), (escape(name), f"*/{escape(name)}")
        if name and any(next(folder.glob(pattern), None) for folder in folders for pattern in patterns):
            account.carry(reader, "label_map_path", "exact", {}, "found by itself, near the records")
        else:
            reason = f"{name} is not near the records: copy it next to them, else classes come from the records"
            account.drop(reader, "label_map_path", reason)
    else:
        note = "not checked; found by itself if it is in the folder of the records or the one above"
        account.carry(reader, "label_map_path", "substitute", {}, note)


def _read_paths(account: FieldAccount, reader: Message, wanted: str, source: str | None) -> None:
    """The row of several files or patterns: which split their names mean."""
    if not reader.has("input_path"):
        return
    paths = [path for path in reader.texts("input_path") if path]
    names = ", ".join(PurePosixPath(path).name for path in paths)
    splits = {split_from_name(PurePosixPath(path).name) for path in paths}
    line = reader.lines.get("input_path")
    if source is None or not paths:
        reason = "it is empty, a placeholder, or the files have no folder in common"
        account.drop(reader, "input_path", f"{reason}: `stoker import --data DIR`, or `stoker train DIR`")
    elif splits == {wanted} or (wanted == "train" and splits <= {"train", None}):
        account.carry(reader, "input_path", "exact", {"data": source}, f"by its name the {wanted} split")
    elif wanted == "val" and splits == {"test"}:
        note = account.trap("eval-is-test", line, names=names)
        account.carry(reader, "input_path", "substitute", {"data": source}, note)
    elif wanted == "val":
        account.drop(reader, "input_path", account.trap("eval-is-trained-on", line, names=names))
    else:
        account.drop(reader, "input_path", f"the name of {names} makes it another split: call it train.record")
