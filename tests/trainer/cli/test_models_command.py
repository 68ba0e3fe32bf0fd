"""`stoker models`, and docs/models.md, which `python -m tests.trainer.cli.test_models_command` writes."""

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


def page() -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        "The architectures that `--model` accepts; `stoker models` prints the same table, `stoker models NAME` a model",
        "with the URLs of its weights. Without `--model`: [which-model.md](which-model.md). How to add one:",
        "[add-a-model.md](add-a-model.md).",
        "",
        "GFLOPs are those of convolutions and matrix products (a multiplication and an addition are two operations),",
        "per image, with the square image size of the table and 80 classes; those of the optimizer, which do not grow",
        "with the batch, are left out. Memory is the peak of a training step in bf16 with the recipe's batch size and",
        "the default settings, predicted by counting tensors; the driver, cuDNN and fragmentation need more. The image",
        "size depends on the data: FLOPs and memory grow with its area.",
        "",
        "| model | use case | parameters | image size | GFLOPs | training | memory, batch size | weights |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    lines += [
        f"| `{m.name}` | {m.use_case} | {m.parameters / 1e6:.1f} M | {m.image_size[0]} | {fmt.number(m.gflop)} | "
        f"{fmt.number(m.training_gflop)} | {m.memory_gib:.2g} GiB, {m.batch_size} | {', '.join(m.weights) or 'none'} |"
        for m in sorted(report.read_models(), key=lambda some: some.gflop)
    ]
    lines += [
        "",
        *LICENSES.splitlines(),
        "",
        *DEIM.splitlines(),
        "",
        "## Less memory",
        "",
        "`--activation-checkpointing` keeps only the input of each stage, block and head, and computes the rest again",
        "in the backward pass, with the same result. For RetinaNet-R50 with frozen BatchNorm and 32 images of",
        f"800 × 800 in bf16, the predicted peak is {PEAKS[0]} GiB instead of {PEAKS[1]}",
        "(`tests/trainer/models/test_memory.py`). A batch that does not fit is split into micro-batches in any case;",
        "this option is for images of which not even one fits.",
        "",
        "`--auto-batch` measures batch sizes on the device, for at most a minute, and takes the smallest within 3 % of",
        "the best time per image; the learning rate is scaled with it. `--dry-run` only shows the times.",
        "",
        "## Settings of each model",
        "",
        "The settings of an architecture in addition to those of every run ([settings.md](settings.md)), with reasons.",
    ]
    for m in report.read_models():
        lines += ["", f"### {m.name}", "", "| setting | default | reason |", "|---|---|---|"]
        lines += [
            f"| `{key}` | {report.format_default(value)} | {reason} |" for key, (value, reason) in m.settings.items()
        ]
    return "\n".join(lines) + "\n"


DEIM = """\
## DEIM's recipe for D-FINE

DEIM (arXiv 2412.04234) trains D-FINE with more boxes per image and another class loss:
`stoker train DATA --model dfine_s --class-loss mal --mosaic 0.5 --mixup 0.5`. Mixup ends after half of the training,
mosaics after nine tenths. EMA, the smaller learning rate of the backbone and the clipping of gradients are in all
sizes' recipes (`stoker/knowledge/recipes.toml`). DEIMv2 has its class loss by default. DEIM's copies of objects are not
there, nor was its gain measured here.

DEIMv2 is computed as its authors' code does, not as in transformers 5.23, which projects and normalizes the points of
the maps, embeds the boxes in every layer and has ReLU in the heads
(`tests/trainer/models/test_published_names.py`)."""
LICENSES = """\
## Pretrained weights and their licenses

`--weights NAME` takes `objects365+coco` (trained on Objects365, then on COCO), `coco`, `objects365`, `imagenet` (the backbone
only), `none`, a file, or a run (its best weights); without it, the first of these that the model has. A class that the
weights have too, by name, keeps its part of the class head; the others start with random values, and the output says which. Files of Hugging Face are safetensors, no pickle; `huggingface_hub` downloads them into its cache, so what you set
for it applies: `HF_HOME`, `HF_ENDPOINT` (a mirror), `HF_HUB_OFFLINE`, tokens. Where a download fails, the message names the file,
its URL and a folder to put it in: `STOKER_WEIGHTS_DIR` has `OWNER--REPOSITORY.safetensors`. The SHA-256 of a download is checked
against the one that the server states; a mirror that states another one is not noticed.

stoker distributes no weights: they come from their publishers under these terms. A license of code is not always one of weights.

| weights | publisher | license of the weights | where that is stated |
|---|---|---|---|
| torchvision's, `coco` and `imagenet` | download.pytorch.org | not stated for each file; the code has BSD-3-Clause | torchvision's README, "Pre-trained Model License": they may have terms of their own, derived from the data set |
| D-FINE: `coco` N 15.3 MB, S 41.5 MB, M 78.7 MB, L 126 MB, X 252 MB; `objects365`, `objects365+coco` S to X | `ustc-community` on Hugging Face | Apache-2.0 | the page of each repository; D-FINE's authors state it for the files of COCO alone, and list those with Objects365 apart ([D-FINE, issue 357](https://github.com/Peterande/D-FINE/issues/357)), whose site names academic use: where that matters, `--weights coco` |
| DEIMv2 with HGNetv2: `coco`, Pico 6.3 MB | `Intellindust` on Hugging Face | not stated: only the license of the code is, Apache-2.0 | `Intellindust-AI-Lab/DEIMv2` on GitHub, LICENSE |
| RF-DETR N to L: `coco` | `Roboflow` on Hugging Face | Apache-2.0 | documentation of `rfdetr`, table of the models |

Left out: DEIMv2 S to X, whose backbone is DINOv3 (Meta's DINOv3 license, not Apache); RF-DETR XL and 2XL (PML 1.0, with a paid
plan); ECDet of EdgeCrafter (non-commercial since August 2026); YOLO26, YOLO11 and YOLO-Master (AGPL-3.0).
Weights of ImageNet for D-FINE, DEIMv2 and RF-DETR: those of COCO include the backbone."""  # noqa: E501


PEAKS = (3.8, 8.5)
"""GiB with and without checkpointing, as tests/trainer/models/test_memory.py has them."""


def test_the_page_is_current():
    hint = "python -m tests.trainer.cli.test_models_command writes it"
    assert page() == PAGE.read_text(), hint


def test_each_publisher_of_weights_is_listed_with_its_license():
    table = [line for line in LICENSES.splitlines() if line.startswith("| ")]
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
    assert all(model.licenses.keys() == model.weights.keys() for model in report.read_models())


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
    PAGE.write_text(page())
