"""docs/add-a-format.md, step by step: its file, its row, its check; then the data set is checked and converted."""

import importlib.util
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from stoker.config.settings import DataSettings
from stoker.data.convert import convert
from stoker.data.formats import finder
from stoker.data.formats.folders import format_texts
from stoker.data.index import open_index
from stoker.data.validation.check import check_dataset

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "add-a-format.md").read_text()
FILE, ROW, CHECK = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data set of the page, with the format as it would be in the package and in the table."""
    path = tmp_path / "image_boxes.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("stoker.data.formats.image_boxes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stoker.data.formats.image_boxes", module)
    spec.loader.exec_module(module)
    rows = eval("{" + ROW + "}", {**vars(finder), "image_boxes": module})
    assert list(rows) == ["image-boxes"]
    monkeypatch.setitem(finder.FORMATS, "image-boxes", rows["image-boxes"])
    monkeypatch.chdir(tmp_path)
    exec(compile(CHECK, "docs/add-a-format.md", "exec"), {})
    return tmp_path / "boxes_set"


def test_the_data_set_of_the_page_is_read_checked_and_converted(dataset: Path) -> None:
    report = check_dataset(dataset)
    assert (report.format, report.num_usable_images, report.num_usable_boxes) == ("image-boxes", 2, 2)
    assert {item.kind: item.count for item in report.items}["malformed-box"] == 2
    convert(open_index(dataset), dataset.parent / "coco", "coco")
    assert open_index(dataset.parent / "coco").boxes.tolist() == [[4.0, 2.0, 40.0, 30.0]] * 2


def test_a_changed_label_file_is_read_again(dataset: Path) -> None:
    file = dataset / "train" / "_annotations.txt"
    file.write_text(file.read_text().replace("4,2,40", "5,2,40"))
    assert open_index(dataset).boxes.tolist()[0] == [5.0, 2.0, 40.0, 30.0]


def test_the_setting_and_the_texts_have_the_names_of_the_table() -> None:
    assert set(get_args(get_type_hints(DataSettings)["format"])) == set(finder.FORMATS)
    assert list(format_texts().expected) == list(finder.FORMATS)


@pytest.mark.parametrize("name", finder.FORMATS)
def test_a_format_is_one_file_in_the_order_of_a_reader(name: str) -> None:
    row = finder.FORMATS[name]
    module = inspect.getmodule(row.read)
    recognize = row.recognize.func if isinstance(row.recognize, partial) else row.recognize  # of two similar formats
    functions = [recognize, row.read, *([] if row.write is None else [row.write])]
    assert {inspect.getmodule(function) for function in functions} == {module}
    assert [function.__name__ for function in functions[:2]] == ["recognize", "read"]
    lines = [inspect.getsourcelines(function)[1] for function in functions]
    assert lines == sorted(lines)
