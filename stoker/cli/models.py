"""The commands that use a trained model: `eval`, `predict`, `export`; and `models`, the list of architectures."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stoker.cli.quick_import import quick_imports
from stoker.printable import print_json, print_text


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
    json: bool = False,
) -> None:
    """Evaluates a run's best weights: the twelve COCO metrics, and AP by class.

    Parameters
    ----------
    run
        Folder of a run, or a .safetensors or .onnx file that stoker saved.
    data
        Data set; default: the one the run was trained on.
    split
        train, val or test.
    format
        coco, voc, yolo, tfrecord or csv, where automatic detection is wrong.
    allow_outside
        Read images that DATA names outside its folder: by absolute paths, `..` or links.
    batch_size
        Images per forward pass.
    device
        cpu, cuda …; default: the accelerator that torch finds, else the CPU.
    json
        Print the metrics as JSON.
    """
    with quick_imports():
        from stoker.inference.model import load
        from stoker.report.terminal import print_metrics

    metrics = load(run, device=device).evaluate(
        data, split=split, format=format, allow_outside=allow_outside, batch_size=batch_size
    )
    if json:
        print_json(metrics)
    else:
        print_metrics(metrics)


def predict(
    run: str,
    images: Annotated[list[str], Parameter(consume_multiple=True)],
    /,
    *,
    conf: float | None = None,
    iou: float | None = None,
    classes: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    max_det: int | None = None,
    agnostic_nms: bool = False,
    out: Path = Path("predictions"),
    save_txt: bool = False,
    save_crop: bool = False,
    device: str | None = None,
    tile: int | None = None,
    tile_overlap: float | None = None,
) -> None:
    """Detects objects; writes the images and videos with boxes drawn, and predictions.json.

    Parameters
    ----------
    run
        Folder of a run, a .safetensors or .onnx file that stoker saved, or a model with COCO weights by its name, such
        as retinanet_resnet50_fpn.
    images
        Files, folders or patterns such as 'shots/*.jpg', also in a bucket (gs://, s3://) or at a URL; videos; a camera
        by its number.
    conf
        Minimum score of a detection, 0 … 1; default: the one with the best F1 in the run's evaluation, else 0.3.
    iou
        IoU threshold of NMS; default: the model's own.
    classes
        Detect only these, by name or label.
    max_det
        Maximum number of detections in an image; default: 100, more with --classes, --agnostic-nms or --tile.
    agnostic_nms
        Of overlapping boxes of different classes, keep only the best.
    out
        Folder for the results; the original images are never changed.
    save_txt
        Also write YOLO label files, into OUT/labels.
    save_crop
        Also write each object as an image, into OUT/crops.
    device
        cpu, cuda …; default: the accelerator that torch finds, else the CPU.
    tile
        Also run the model on tiles of this side in pixels: for small objects in large images.
    tile_overlap
        Minimum overlap of neighboring tiles as a fraction of their side; 0 … 0.9, default 0.2.
    """
    with quick_imports():
        from stoker.inference.model import load

    model = load(run, device=device)
    if conf is None:
        print_text(f"{model.weights}: minimum score {model.conf:g} ({model.conf_origin}); --conf changes it")
    for line in model.predict_to_dir(
        images, out, conf=conf, iou=iou, classes=classes, max_det=max_det, agnostic_nms=agnostic_nms,
        save_txt=save_txt, save_crop=save_crop, tile=tile, tile_overlap=tile_overlap,
    ):  # fmt: skip
        print_text(line)


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
    images: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
) -> None:
    """Writes a trained model as a file that needs no stoker, and checks it against the PyTorch model.

    Normalization, decoding and NMS are inside the file. If its detections differ from the model's, it is deleted.
    docs/export.md says how to run it, and what is made of an ONNX file for TensorRT and Core ML.

    Parameters
    ----------
    run
        Folder of a run, or a .safetensors file that stoker saved.
    format
        onnx, openvino, litert (TensorFlow Lite) or torch (torch.export).
    out
        Name of the file; default: that of the weights, with .onnx, .xml, .tflite or .pt2.
    batch_size
        Images per call: dynamic (any number; 1 in LiteRT) or a fixed number.
    conf
        Minimum score of a detection; an input of the file can change it.
    iou
        IoU threshold of NMS; an input of an ONNX file can change it. 1: no NMS.
    max_detections
        Maximum number of detections of an image.
    opset
        ONNX operator set, 18 … 21.
    images
        Images for the check; default: images of the run's validation split.
    """
    from stoker.errors import UsageError

    if batch_size != "dynamic" and not batch_size.isdecimal():
        raise UsageError(f"--batch-size {batch_size!r} is not a number of images.", choices=["dynamic", "1 or more"])
    from stoker.export.write import export_model

    for line in export_model(
        run, format=format, out=out, batch_size=None if batch_size == "dynamic" else int(batch_size), conf=conf,
        iou=iou, max_detections=max_detections, opset=opset, images=images or (),
    ):  # fmt: skip
        print_text(line)


def list_models(name: str | None = None, /, *, json: bool = False) -> None:
    """Lists the architectures of `--model`: purpose, cost, available weights.

    Parameters
    ----------
    name
        One of them, to be shown in full.
    json
        Print everything as JSON.
    """
    from stoker.printable import print_json
    from stoker.report.models import find_model, print_model, print_models, read_models

    if json:
        print_json(read_models() if name is None else find_model(name))
    elif name is None:
        print_models()
    else:
        print_model(name)
