"""The `stoker data` commands: check, describe, preview and convert a data set. Each imports its code when it runs."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from stoker.config.settings import DataSettings

data_app = App(
    name="data",
    sort_key=6,
    help="Checks a data set, describes it, shows it as the model gets it, converts it.",
    default_parameter=Parameter(negative=()),
    help_format="plaintext",
)

Format = Annotated[str | None, Parameter(help="Format of the annotations, where automatic detection is wrong.")]
Classes = Annotated[list[str] | None, Parameter(consume_multiple=True, help="Only these classes, in this order.")]
Data = Annotated[str, Parameter(help="Folder or file with labeled images, also in a bucket (gs://, s3://), or `demo`.")]


@data_app.command(sort_key=1)
def check(
    data: Data,
    /,
    *,
    format: Format = None,
    classes: Classes = None,
    annotations_only: bool = False,
    max_bad_fraction: float | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Names everything that is wrong with a data set, what training does about it, and how to fix it.

    Reads the annotations and decodes every image. Changes nothing. Exit code 4 if training would refuse the data set.

    Parameters
    ----------
    annotations_only
        Only check that the images exist, without opening them.
    max_bad_fraction
        Fraction of the images that may be unusable, as for training; default 0.01.
    workers
        Threads that read and decode images; default: the number of cores.
    json
        Print everything as JSON, with all locations.
    """
    from stoker.data.validation.check import check_dataset
    from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION
    from stoker.errors import DataError, UsageError
    from stoker.report.progress import progress_bar

    fraction = DEFAULT_MAX_BAD_FRACTION if max_bad_fraction is None else max_bad_fraction
    if not 0 <= fraction <= 1:
        raise UsageError(f"--max-bad-fraction {fraction} is out of range.", choices=["0 … 1"])
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers} is out of range.", choices=["1 or more"])
    with progress_bar("images") as on_progress:
        report = check_dataset(
            data,
            format=format,
            classes=classes or (),
            decode_images=not annotations_only,
            workers=workers,
            max_bad_fraction=fraction,
            progress=on_progress,
        )
    if json:
        import msgspec

        print(msgspec.json.encode(report).decode())
    else:
        from stoker.report.data_check import print_check

        print_check(report)
    if report.refusals:
        sys.exit(DataError.exit_code)


@data_app.command(sort_key=2)
def stats(
    data: Data,
    /,
    *,
    format: Format = None,
    classes: Classes = None,
    split: str | None = None,
    image_size: tuple[int, int] | None = None,
    model: str = "retinanet_resnet50_fpn",
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Counts images, classes, sizes and locations; shows how well image size and anchors fit them.

    Parameters
    ----------
    split
        train, val or test; default: all together.
    image_size
        Height and width to which images are resized; default: what training would choose.
    model
        The model whose anchors and image size are compared with the boxes.
    out
        Also draws everything into this image: .png, .jpg or .webp.
    json
        Print everything as JSON.
    """
    from stoker.data.anchor_fit import AnchorConfig
    from stoker.data.index import open_index
    from stoker.data.validation.stats import compute_stats
    from stoker.errors import UsageError
    from stoker.models import get_architecture
    from stoker.report.data_plot import check_output_path, draw_stats, save_image
    from stoker.report.data_stats import print_stats

    if image_size is not None and not all(32 <= side <= 8192 and side % 32 == 0 for side in image_size):
        raise UsageError(
            f"--image-size {image_size[0]} {image_size[1]} is not valid.", choices=["multiples of 32, 32 … 8192"]
        )
    arch = get_architecture(model)
    defaults = arch.defaults
    if "anchor_scales" not in defaults:  # those of SSD depend on the level
        cause = "it has no anchors, or their shapes differ between levels"
        fix = "name another: `--model retinanet_resnet50_fpn`"
        raise UsageError(f"The anchors of --model {model} cannot be compared with the boxes.", cause=cause, fix=fix)
    anchors = AnchorConfig(*(tuple(defaults[name]) for name in ("anchor_sizes", "anchor_scales", "aspect_ratios")))
    index = open_index(data, format=format, classes=classes or ())
    if out is not None:
        check_output_path(out, index)
    dataset_stats = compute_stats(
        index, data=data, split=split, image_size=image_size, side=arch.default_image_size, anchors=anchors, model=model
    )
    if json:
        import msgspec

        print(msgspec.json.encode(dataset_stats).decode())
    else:
        print_stats(dataset_stats)
    if out is not None:
        save_image(draw_stats(dataset_stats), out)
        if not json:
            print(f"drawn: {out}")


@data_app.command(sort_key=3)
def preview(
    data: Data,
    /,
    *,
    settings: Annotated[DataSettings, Parameter(name="*", group="Data")] = DataSettings(),  # noqa: B008  # frozen
    out: Path = Path("preview.jpg"),
    split: str = "train",
    count: int = 24,
    seed: int = 0,
    model: str | None = None,
    weights: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Shows images as the model gets them: a sheet with each image plain and augmented, with boxes and classes.

    Settings that are not set are derived as for training. Writes one file and changes nothing else.

    Parameters
    ----------
    out
        The sheet: .jpg, .png or .webp.
    split
        train, val or test.
    count
        Images on the sheet, 1 to 400.
    seed
        Decides order and augmentation, as in training.
    model
        The model to be trained; its recipe decides what is not set.
    weights
        The initial weights; they decide what is not set as well.
    epochs
        Length of the training: images that are seen often are augmented more.
    steps
        The same in optimizer steps.
    batch_size
        Images per optimizer step; it decides what is not set as well.
    """
    import dataclasses

    from stoker.config.durations import join_length
    from stoker.config.settings import Config, settings_table
    from stoker.config.settings import check as check_settings
    from stoker.data.index import open_index, require_images
    from stoker.data.preview import make_preview
    from stoker.hardware.cgroup import host_cores
    from stoker.hardware.device import select_device
    from stoker.report.data_plot import check_output_path, save_image
    from stoker.report.format import plural
    from stoker.report.terminal import print_settings
    from stoker.training.defaults.derive import derive_data

    overrides = {"model": model, "weights": weights, "batch_size": batch_size, "epochs": epochs, "steps": steps}
    user_config = Config(data=dataclasses.replace(settings, data=data)).replace(**join_length(overrides))
    check_settings(user_config)
    index = open_index(data, format=settings.format, val_fraction=settings.val_fraction, classes=settings.classes or ())
    check_output_path(out, index)
    image_indices = index.image_indices(split)
    require_images(index, (split,), max_bad_fraction=settings.max_bad_fraction)
    config, reasons = derive_data(user_config, index, select_device(None))
    sheet = make_preview(
        index,
        image_indices,
        config.data,
        seed=seed,
        num_images=count,
        workers=host_cores(),
        on_quarantine=lambda bad_image: print(
            f"stoker: bad image left out: {bad_image.source}: {bad_image.error}", file=sys.stderr
        ),
    )
    save_image(sheet, out)
    print_settings(row for row in settings_table(Config(data=config.data), reasons) if row[0] != "data")
    repeats = f", {count} times in all" if count > len(image_indices) else ""
    count_text = plural(min(count, len(image_indices)), "image")
    print(f"{out}: {count_text} of {split}{repeats}, each plain and as training would show it")


@data_app.command(sort_key=4)
def convert(
    data: Data,
    out: Path,
    /,
    *,
    to: Literal["coco", "voc", "yolo", "tfrecord"],
    format: Format = None,
    classes: Classes = None,
    val_fraction: float | None = None,
    shards: int = 1,
    hardlink: bool = False,
) -> None:
    """Writes a data set in another format: images, boxes, classes and splits.

    Boxes that training drops are dropped here, too, and images without a valid header; all are named. Image files are
    copied unchanged and not decoded: `stoker data check` finds damaged ones. The source is not changed.

    Parameters
    ----------
    out
        Folder for the new data set; it must not exist, or be empty.
    to
        Format to write.
    val_fraction
        Fraction of the images that becomes the validation split where the source has none; default 0.1.
    shards
        With --to tfrecord: files per split.
    hardlink
        Hard links instead of copies of the images: no disk space, but editing one changes both.
    """
    from stoker.data.convert.writing import convert as convert_data
    from stoker.data.index import open_index
    from stoker.report.convert import print_converted
    from stoker.report.progress import progress_bar

    index = open_index(data, format=format, classes=classes or (), val_fraction=val_fraction)
    with progress_bar("images") as on_progress:
        converted = convert_data(index, out, to, shards=shards, hardlink=hardlink, progress=on_progress)
    print_converted(index, converted)
