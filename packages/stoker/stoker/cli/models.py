"""The commands that use a trained model: `eval`, `predict`, `export`; and `models`, the list of architectures."""

from pathlib import Path

from stoker.cli.quick_import import quick_imports
from stoker_watch.cli import described, show
from stoker_watch.printable import print_json, print_text


@described
def evaluate(
    run: str,
    data: str | None = None,
    /,
    *,
    split: str = "val",
    format: str | None = None,
    allow_outside: bool = False,
    batch_size: int = 8,
    device: str | None = None,
    trust_file: bool = False,
    json: bool = False,
) -> None:
    """Evaluates a run's best weights: the twelve COCO metrics, and AP by class."""
    with quick_imports():
        from stoker.inference.model import load
        from stoker.report.terminal import print_metrics

    metrics = load(run, device=device, trust_file=trust_file).evaluate(
        data, split=split, format=format, allow_outside=allow_outside, batch_size=batch_size
    )
    show(metrics, print_metrics, json=json)


@described
def predict(
    run: str,
    images: list[str],
    /,
    *,
    conf: float | None = None,
    iou: float | None = None,
    classes: list[str] | None = None,
    max_det: int | None = None,
    agnostic_nms: bool = False,
    out: Path = Path("predictions"),
    save_txt: bool = False,
    save_crop: bool = False,
    device: str | None = None,
    trust_file: bool = False,
    tile: int | None = None,
    tile_overlap: float | None = None,
) -> None:
    """Detects objects; writes the images and videos with boxes drawn, and predictions.json."""
    with quick_imports():
        from stoker.inference.model import load
        from stoker.inference.predict import INPUT_SUFFIXES, find_images

    paths = find_images(images, exclude_dir=out, suffixes=INPUT_SUFFIXES)  # before weights are downloaded
    model = load(run, device=device, trust_file=trust_file)
    if conf is None:
        print_text(f"{model.weights}: minimum score {model.conf:g} ({model.conf_origin}); --conf changes it")
    for line in model.predict_to_dir(
        list(map(str, paths)), out, conf=conf, iou=iou, classes=classes, max_det=max_det, agnostic_nms=agnostic_nms,
        save_txt=save_txt, save_crop=save_crop, tile=tile, tile_overlap=tile_overlap,
    ):  # fmt: skip
        print_text(line)


@described
def export(
    run: str,
    /,
    *,
    format: str = "onnx",
    out: Path | None = None,
    batch_size: str = "dynamic",
    conf: float = 0.05,
    iou: float | None = None,
    max_detections: int = 100,
    opset: int = 18,
    images: list[str] | None = None,
) -> None:
    """Writes a trained model as a file that needs no stoker, and checks it against the PyTorch model.

    Normalization, decoding and NMS are inside the file. If its detections differ from the model's, it is deleted.
    docs/export.md says how to run it, and what is made of an ONNX file for TensorRT and Core ML.
    """
    from stoker_watch.errors import UsageError

    if batch_size != "dynamic" and not batch_size.isdecimal():
        raise UsageError(f"--batch-size {batch_size!r} is not a number of images.", choices=["dynamic", "1 or more"])
    from stoker.export.write import export_model

    for line in export_model(
        run, format=format, out=out, batch_size=None if batch_size == "dynamic" else int(batch_size), conf=conf,
        iou=iou, max_detections=max_detections, opset=opset, images=images or (),
    ):  # fmt: skip
        print_text(line)


@described
def list_models(*names: str, json: bool = False) -> None:
    """Lists the architectures of `--model`: purpose, cost, available weights. One name: its details; several: a
    comparison."""
    from stoker.report.models import describe_model, print_comparison, print_model, print_models, read_models

    if json:
        found = [describe_model(name) for name in names] or read_models()
        print_json(found[0] if len(names) == 1 else found)
    elif not names:
        print_models()
    elif len(names) == 1:
        print_model(names[0])
    else:
        print_comparison(names)
