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
    no_pictures: bool = False,
    max_bad: float | None = None,
    threads: int | None = None,
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
    no_pictures
        Only look whether the pictures exist, without opening them.
    max_bad
        Share of the pictures that may be unusable, as for training; default 0.01.
    threads
        Threads that read and decode pictures; default: the cores.
    json
        Print everything, all places included, as JSON.
    """
    from stoker.data.validation.check import check as check_data
    from stoker.data.validation.problems import MAX_BAD
    from stoker.errors import DataError, UsageError
    from stoker.report.progress import progress

    share = MAX_BAD if max_bad is None else max_bad
    if not 0 <= share <= 1:
        raise UsageError(f"--max-bad {share} is out of range.", choices=["0 … 1"])
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is out of range.", choices=["1 or more"])
    with progress("pictures") as moved:
        report = check_data(
            data,
            format=format,
            classes=classes or (),
            pictures=not no_pictures,
            threads=threads,
            max_bad=share,
            progress=moved,
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
    canvas: tuple[int, int] | None = None,
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
    canvas
        Height and width to which pictures are to be resized; default: what training would choose.
    model
        Whose anchors, and size of canvas, the boxes are compared with.
    out
        Draws it all into this picture, too: .png, .jpg or .webp.
    json
        Print everything as JSON.
    """
    from stoker.data.anchor_fit import Anchors
    from stoker.data.index import open_index
    from stoker.data.validation.stats import gather
    from stoker.errors import UsageError
    from stoker.models import architecture
    from stoker.report.data_plot import check_out, draw_stats, save_picture
    from stoker.report.data_stats import print_stats

    if canvas is not None and not all(32 <= side <= 8192 and side % 32 == 0 for side in canvas):
        raise UsageError(f"--canvas {canvas[0]} {canvas[1]}: not a canvas.", choices=["multiples of 32, 32 … 8192"])
    row = architecture(model)
    defaults = row.defaults
    if "anchor_scales" not in defaults:  # SSD's depend on the level
        cause = "it has no anchors, or not the same shapes of them at every level"
        fix = "name another: `--model retinanet_resnet50_fpn`"
        raise UsageError(f"The anchors of --model {model} cannot be compared with the boxes.", cause=cause, fix=fix)
    own = Anchors(*(tuple(defaults[name]) for name in ("anchor_sizes", "anchor_scales", "anchor_ratios")))
    index = open_index(data, format=format, classes=classes or ())
    if out is not None:
        check_out(out, index)
    found = gather(
        index, data=data, split=split, canvas=canvas, side=row.canvas_side, anchors=own, model=model
    )  # fmt: skip
    if json:
        import msgspec

        print(msgspec.json.encode(found).decode())
    else:
        print_stats(found)
    if out is not None:
        save_picture(draw_stats(found), out)
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
    for_: Annotated[str | None, Parameter(name="--for")] = None,
    batch: int | None = None,
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

    from stoker.config.settings import Config, check, rows_of
    from stoker.data.index import open_index, require_pictures
    from stoker.data.preview import preview as make_sheet
    from stoker.hardware.device import host_cores, pick
    from stoker.report.data_plot import check_out, save_picture
    from stoker.report.format import plural
    from stoker.report.terminal import print_settings
    from stoker.training.defaults.derive import derive_data

    chosen = {"model": model, "weights": weights, "for_": for_, "batch": batch}
    asked = Config(data=dataclasses.replace(settings, data=data)).replace(**chosen)
    check(asked)
    index = open_index(data, format=settings.format, val_fraction=settings.val_fraction, classes=settings.classes or ())
    check_out(out, index)
    rows = index.rows(split)
    require_pictures(index, (split,), max_bad=settings.max_bad)
    config, reasons = derive_data(asked, index, pick(None))
    sheet = make_sheet(
        index,
        rows,
        config.data,
        seed=seed,
        count=count,
        threads=host_cores(),
        on_quarantine=lambda bad: print(f"stoker: picture left out: {bad.place}: {bad.error}", file=sys.stderr),
    )
    save_picture(sheet, out)
    print_settings(row for row in rows_of(Config(data=config.data), reasons) if row[0] != "data")
    again = f", {count} times in all" if count > len(rows) else ""
    shown = plural(min(count, len(rows)), "picture")
    print(f"{out}: {shown} of {split}{again}, each plain and as training would show it")


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
    link: bool = False,
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
    link
        Hard links instead of copies of pictures: no room is taken, but editing one changes both.
    """
    from stoker.data.convert.writing import convert as convert_data
    from stoker.data.index import open_index
    from stoker.report.convert import print_converted
    from stoker.report.progress import progress

    index = open_index(data, format=format, classes=classes or (), val_fraction=val_fraction)
    with progress("pictures") as moved:
        converted = convert_data(index, out, to, shards=shards, link=link, progress=moved)
    print_converted(index, converted)
