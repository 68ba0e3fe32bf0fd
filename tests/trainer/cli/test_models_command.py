"""`stoker models`, and the table of docs/models.md, which `python -m tests.trainer.cli.test_models_command` writes."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.models import MODELS
from stoker.report import models as report
from stoker_watch.cli.app import app
from stoker_watch.errors import ConfigError
from stoker_watch.report import format as fmt

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


START = "<!-- table: python -m tests.trainer.cli.test_models_command writes it -->\n"
END = "<!-- end of table -->\n"


def table() -> str:
    """The table of all models in docs/models.md."""
    lines = [
        "| model | use case | parameters | image size | GFLOPs | training | memory, batch size | weights |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| `{m['name']}` | {m['use_case']} | {m['parameters'] / 1e6:.1f} M | {m['image_size'][0]} | "
        f"{fmt.number(m['gflop'])} | {fmt.number(m['training_gflop'])} | "
        f"{m['memory_gib']:.2g} GiB, {m['batch_size']} | {', '.join(m['weights']) or 'none'} |"
        for m in sorted(report.read_models(), key=lambda some: some["gflop"])
    ]
    return "\n".join(lines) + "\n"


PEAKS = (3.8, 8.5)
"""GiB with and without checkpointing, as tests/trainer/models/test_memory.py has them."""


def test_the_table_is_current():
    hint = "python -m tests.trainer.cli.test_models_command writes it"
    assert START + table() + END in PAGE.read_text(), hint


def test_the_page_has_the_measured_peaks():
    text = " ".join(PAGE.read_text().split())
    assert f"the predicted peak is {PEAKS[0]} GiB instead of {PEAKS[1]}" in text


def test_each_publisher_of_weights_is_listed_with_its_license():
    section = PAGE.read_text().partition("\n## Pretrained weights and their licenses\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    for row in MODELS.values():
        for url in row.urls.values():
            _, _, host, owner, *_ = url.split("/")
            publisher = f"`{owner}` on Hugging Face" if host == "huggingface.co" else host
            assert any(publisher in line for line in table), url


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    app(["models", *arguments], result_action="return_value")
    return capsys.readouterr().out


def test_the_table_has_every_model(capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys).splitlines()
    for name, row in MODELS.items():
        (line,) = (line for line in lines if line.split() and line.split()[0] == name)
        for part in (f"{row.num_params / 1e6:.1f} M", row.description, *row.urls):
            assert part in line


def test_it_fits_a_narrow_terminal():
    out = io.StringIO()
    report.print_models(out, width=100)
    assert max(map(len, out.getvalue().splitlines())) <= 120  # the legend is not wrapped


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_full(name: str, capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, name)
    row = MODELS[name]
    assert f"{row.num_params:,}" in text
    for part in (*row.urls.values(), *row.reasons.values(), row.recipe):
        assert part in text
    for setting in row.defaults:
        assert f"--{setting.replace('_', '-')} " in text


def test_several_are_compared(capsys: pytest.CaptureFixture[str]):
    names = ("rf_detr_n", "deimv2_pico", "ember_n")
    table, _, uses = shown(capsys, *names).partition("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == list(names)
    row = {line[:16].strip(): line[16:] for line in rows}
    assert row["parameters"].split() == ["30.4", "M", "1.5", "M", "2.4", "M"]
    assert row["image size"].split() == ["384", "640", "640"]
    for quantity in ("GFLOP", "GFLOP, training", "memory"):
        assert all(char.isdigit() for char in row[quantity].split()[0].replace(".", ""))
    assert row["weights"].split() == ["coco", "coco", "none"]
    licenses = [text.strip() for text in re.split(" {2,}", row["their license"].strip())]
    assert licenses == ["Apache-2.0", "not stated; code Apache-2.0", "n/a"]
    assert all(MODELS[name].description in uses for name in names)
    assert [model["name"] for model in json.loads(shown(capsys, *names, "--json"))] == list(names)


def test_every_file_of_weights_has_a_license():
    assert all(model["licenses"].keys() == model["weights"].keys() for model in report.read_models())


def test_json(capsys: pytest.CaptureFixture[str]):
    assert [some["name"] for some in json.loads(shown(capsys, "--json"))] == list(MODELS)
    one = json.loads(shown(capsys, "retinanet_tiny_fpn", "--json"))
    assert one["memory_gib"] == MODELS["retinanet_tiny_fpn"].cost.memory_gib


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'retinanet_tiny_fpn'") as caught:
        report.print_model("retinanet_tinny_fpn")
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="did you mean 'deimv2_pico'"):
        report.print_comparison(["dfine_n", "deimv2_pica"])


def test_it_needs_no_torch():
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from stoker_watch.cli.app import app\n"
        "app(['models'], result_action='return_value')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "retinanet_resnet50_fpn" in done.stdout


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(before + START + table() + END + rest.split(END)[1])
