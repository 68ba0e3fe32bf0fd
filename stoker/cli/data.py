"""The `stoker data` commands: look at a data set, write it anew. As in `app.py`, each imports what it needs."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from stoker.config.settings import DataSettings

data_app = App(
    name="data",
    sort_key=6,
    help="Looks at a data set: what is wrong with it, what is in it, how it is shown to the model; converts it.",
    default_parameter=Parameter(negative=()),
    help_format="plaintext",
)


@data_app.command(sort_key=1)
def check(
    data: str,
    /,
    *,
    format: str | None = None,
    classes: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    annotations_only: bool = False,
    max_bad_fraction: float | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Names everything that is wrong with a data set, what training does about it, and how to mend it.

    Reads the annotations and decodes every picture. Changes nothing. Exit code 4 where training would refuse.

    Parameters
    ----------
    data
        Folder or file with labelled pictures, also in a bucket (gs://, s3://), or `demo`.
    format
        How the annotations are written, where stoker's own finding is wrong.
    classes
        Only these classes.
    annotations_only
        Only check that the images exist, without opening them.
    max_bad_fraction
        Fraction of the images that may be unusable, as for training; default 0.01.
    workers
        Threads that read and decode images; default: the number of cores.
    json
        Print everything, all places included, as JSON.
    """
    from stoker.data.validation.check import check_dataset as check_data
    from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION
    from stoker.errors import DataError, UsageError
    from stoker.report.progress import progress_bar

    fraction = DEFAULT_MAX_BAD_FRACTION if max_bad_fraction is None else max_bad_fraction
    if not 0 <= fraction <= 1:
        raise UsageError(f"--max-bad-fraction {fraction} is out of range.", choices=["0 … 1"])
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers} is out of range.", choices=["1 or more"])
    with progress_bar("pictures") as on_progress:
        report = check_data(
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
    data: str,
    /,
    *,
    format: str | None = None,
    classes: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    split: str | None = None,
    image_size: tuple[int, int] | None = None,
    model: str = "retinanet_resnet50_fpn",
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Counts what is in a data set: pictures, classes, sizes, places; says how canvas and anchors fit them.

    Parameters
    ----------
    data
        Folder or file with labelled pictures, also in a bucket (gs://, s3://), or `demo`.
    format
        How the annotations are written, where stoker's own finding is wrong.
    classes
        Only these classes.
    split
        train, val or test; default: all, together.
    image_size
        Height and width to which pictures are to be resized; default: what training would choose.
    model
        Whose anchors, and size of canvas, the boxes are compared with.
    out
        Draws it all into this picture, too: .png, .jpg or .webp.
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
            f"--image-size {image_size[0]} {image_size[1]}: not a canvas.", choices=["multiples of 32, 32 … 8192"]
        )
    arch = get_architecture(model)
    defaults = arch.defaults
    if "anchor_scales" not in defaults:  # SSD's depend on the level
        cause = "it has no anchors, or not the same shapes of them at every level"
        fix = "name another: `--model retinanet_resnet50_fpn`"
        raise UsageError(f"The anchors of --model {model} cannot be compared with the boxes.", cause=cause, fix=fix)
    anchors = AnchorConfig(*(tuple(defaults[name]) for name in ("anchor_sizes", "anchor_scales", "aspect_ratios")))
    index = open_index(data, format=format, classes=classes or ())
    if out is not None:
        check_output_path(out, index)
    dataset_stats = compute_stats(
        index, data=data, split=split, image_size=image_size, side=arch.default_image_size, anchors=anchors, model=model
    )  # fmt: skip
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
    data: str,
    /,
    *,
    settings: Annotated[DataSettings, Parameter(name="*", group="Data")] = DataSettings(),  # noqa: B008  # frozen
    out: Path = Path("preview.jpg"),
    split: str = "train",
    count: int = 24,
    seed: int = 0,
    model: str | None = None,
    weights: str | None = None,
    for_: Annotated[str | None, Parameter(name="--max-duration")] = None,
    batch_size: int | None = None,
) -> None:
    """Shows pictures as the model gets them: a sheet of each plain, and augmented beside it, with boxes and classes.

    What is not set is derived as for training; a file is written, nothing else changes.

    Parameters
    ----------
    data
        Folder or file with labelled pictures, also in a bucket (gs://, s3://), or `demo`.
    out
        The sheet: .jpg, .png or .webp.
    split
        train, val or test.
    count
        Pictures on the sheet, 1 to 400.
    seed
        Decides order and augmentation, as in training.
    model
        The model to be trained, whose recipe decides what is not set.
    weights
        The weights it would start from, likewise.
    for_
        How long it would be trained: pictures that are seen often are varied more.
    batch
        Pictures of a step, likewise.
    """
    import dataclasses

    from stoker.config.settings import Config, check, settings_table
    from stoker.data.index import open_index, require_images
    from stoker.data.preview import make_preview as make_sheet
    from stoker.hardware.device import host_cores, select_device
    from stoker.report.data_plot import check_output_path, save_image
    from stoker.report.format import plural
    from stoker.report.terminal import print_settings
    from stoker.training.defaults.derive import derive_data

    overrides = {"model": model, "weights": weights, "max_duration": for_, "batch_size": batch_size}
    user_config = Config(data=dataclasses.replace(settings, data=data)).replace(**overrides)
    check(user_config)
    index = open_index(data, format=settings.format, val_fraction=settings.val_fraction, classes=settings.classes or ())
    check_output_path(out, index)
    image_indices = index.image_indices(split)
    require_images(index, (split,), max_bad_fraction=settings.max_bad_fraction)
    config, reasons = derive_data(user_config, index, select_device(None))
    sheet = make_sheet(
        index,
        image_indices,
        config.data,
        seed=seed,
        num_images=count,
        workers=host_cores(),
        on_quarantine=lambda bad_image: print(
            f"stoker: picture left out: {bad_image.source}: {bad_image.error}", file=sys.stderr
        ),
    )
    save_image(sheet, out)
    print_settings(row for row in settings_table(Config(data=config.data), reasons) if row[0] != "data")
    repeats = f", {count} times in all" if count > len(image_indices) else ""
    count_text = plural(min(count, len(image_indices)), "picture")
    print(f"{out}: {count_text} of {split}{repeats}, each plain and as training would show it")


@data_app.command(sort_key=4)
def convert(
    data: str,
    out: Path,
    /,
    *,
    to: Literal["coco", "voc", "yolo", "tfrecord"],
    format: str | None = None,
    classes: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    val_fraction: float | None = None,
    shards: int = 1,
    hardlink: bool = False,
) -> None:
    """Writes a data set anew in another format: pictures, boxes, classes and splits.

    Boxes that training leaves out are left out here, too, and pictures that have no sound header; all are named. Pixels
    are copied as they are, unlooked at: `stoker data check` finds damaged ones. The source is not changed.

    Parameters
    ----------
    data
        Folder or file with labelled pictures, also in a bucket (gs://, s3://), or `demo`.
    out
        Folder for the new data set; it must not exist, or be empty.
    to
        Format to write.
    format
        How the source is written, where stoker's own finding is wrong.
    classes
        Only these classes, in this order.
    val_fraction
        Share of the pictures that becomes the validation split where the source has none; default 0.1.
    shards
        With --to tfrecord: files per split.
    hardlink
        Hard links instead of copies of pictures: no room is taken, but editing one changes both.
    """
    from stoker.data.convert.writing import convert as convert_data
    from stoker.data.index import open_index
    from stoker.report.convert import print_converted
    from stoker.report.progress import progress_bar

    index = open_index(data, format=format, classes=classes or (), val_fraction=val_fraction)
    with progress_bar("pictures") as on_progress:
        converted = convert_data(index, out, to, shards=shards, hardlink=hardlink, progress=on_progress)
    print_converted(index, converted)
