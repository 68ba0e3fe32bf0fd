"""The `stoker data` commands: check, describe, preview, convert, pack and split a data set."""

import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from stoker.config.settings import Config, DataSettings, check_config, from_fields
from stoker_watch.cli import described, show
from stoker_watch.printable import print_text

PREVIEW = Path("preview.jpg")
"""The sheet of `preview` without --out; a later one gets the next free number."""

data_app = App(
    name="data",
    sort_key=6,
    help="Checks a data set, describes it, shows it as the model gets it, converts, packs or splits it.",
    default_parameter=Parameter(negative=()),
    help_format="plaintext",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the annotations are read, as for `stoker train`."""

    format: str | None = None
    """Format of the annotations, where automatic detection is wrong."""
    classes: tuple[str, ...] = ()
    """Only these classes, in this order."""
    allow_outside: bool = False
    """Read images that the data set names outside its folder: by absolute paths, `..` or links."""
    train: str | None = None
    """Annotation file of the training split, where DATA does not tell."""
    val: str | None = None
    """Annotation file of the validation split."""
    splits: str | None = None
    """Folder of lists, as `stoker data split` writes it."""

    def settings(self, data: str, **others: Any) -> Config:
        """With other settings. Raises ConfigError."""
        config = from_fields({"data": data, **dataclasses.asdict(self), "classes": self.classes or None, **others})
        check_config(config)
        return config


HowToRead = Annotated[Reading, Parameter(name="*", group="Annotations")]
READING = Reading()


@data_app.command(sort_key=1)
@described
def check(
    data: str,
    /,
    *,
    reading: HowToRead = READING,
    annotations_only: bool = False,
    max_bad_fraction: float | None = None,
    max_bad_boxes: float | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Names everything that is wrong with a data set, what training does about it, and how to fix it.

    Reads the annotations, decodes every image and compares packed shards with their checksums. Changes nothing. Exit
    code 4 if training would refuse the data set, or a packed shard has changed.
    """
    from stoker.data.index import split_options
    from stoker.data.validation.check import check_dataset
    from stoker.data.validation.problems import DEFAULT_MAX_BAD_BOXES, DEFAULT_MAX_BAD_FRACTION
    from stoker.report.dataset import print_check
    from stoker_watch.errors import DataError, UsageError
    from stoker_watch.report.console import progress_bar

    settings = reading.settings(data, max_bad_fraction=max_bad_fraction, max_bad_boxes=max_bad_boxes).data
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers} is out of range.", choices=["1 or more"])
    with progress_bar("images") as on_progress:
        report = check_dataset(
            data,
            format=reading.format,
            classes=reading.classes,
            allow_outside=reading.allow_outside,
            decode_images=not annotations_only,
            workers=workers,
            max_bad_fraction=DEFAULT_MAX_BAD_FRACTION if max_bad_fraction is None else max_bad_fraction,
            max_bad_boxes=DEFAULT_MAX_BAD_BOXES if max_bad_boxes is None else max_bad_boxes,
            splits=split_options(settings),
            progress=on_progress,
        )
    show(report.as_dict() if json else report, print_check, json=json)
    if report.has_failed:
        sys.exit(DataError.exit_code)


@data_app.command(sort_key=2)
@described
def stats(
    data: str,
    /,
    *,
    reading: HowToRead = READING,
    split: str | None = None,
    image_size: tuple[int, int] | None = None,
    model: str | None = None,
    latency_ms: float | None = None,
    json: bool = False,
) -> None:
    """Counts images, classes, sizes and locations; shows how well image size and anchors fit them.

    Model and image size are those that `stoker train DATA` takes, unless they are set. Downloads nothing. Exit code 4
    if training would refuse the data set.
    """
    from stoker.data.index import find_refusals, open_index_of
    from stoker.data.validation.stats import compute_stats
    from stoker.hardware.selection import select_device
    from stoker.models.table import check_image_size
    from stoker.report.dataset import print_stats
    from stoker.training.defaults.derive import derive_for_plan, derive_model_input
    from stoker_watch.errors import DataError, UsageError

    user_config = reading.settings(data, image_size=image_size, model=model)
    check_image_size(user_config)
    index = open_index_of(user_config.data)
    refusals = tuple(find_refusals(index))
    if "train" not in index.splits:
        raise refusals[0]
    device = select_device(None)
    model_input = derive_model_input(user_config, index, device)
    if latency_ms is not None:
        from stoker.inference.latency import make_latency_meter

        if not latency_ms > 0:
            raise UsageError(f"--latency-ms {latency_ms:g} is not a time above 0.", fix="--latency-ms 20")
        meter = make_latency_meter(derive_for_plan(user_config, index, device)[0], len(index.class_names), device)
        model_input = dataclasses.replace(model_input, latency_ms=meter, max_latency_ms=latency_ms)
    dataset_stats = compute_stats(index, model_input, data=data, split=split)
    dataset_stats.refusals = tuple(error.what for error in refusals)
    show(dataset_stats, print_stats, json=json)
    if refusals:
        sys.exit(DataError.exit_code)


@data_app.command(sort_key=3)
@described
def preview(
    data: str,
    /,
    *,
    settings: Annotated[DataSettings, Parameter(name="*", group="Data")] = DataSettings(),  # noqa: B008  # frozen
    out: Path = PREVIEW,
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
    """
    from stoker.config.settings import settings_table
    from stoker.data.index import open_index_of, require_images
    from stoker.evaluation.draw import IMAGE_SUFFIXES, save_image
    from stoker.hardware.selection import select_device
    from stoker.inference.preview import make_preview
    from stoker.report.dataset import check_output_path
    from stoker.report.terminal import print_settings
    from stoker.training.defaults.derive import derive_data
    from stoker_watch.durations import join_length
    from stoker_watch.hardware.cgroup import host_cores
    from stoker_watch.report.format import plural

    overrides = {"model": model, "weights": weights, "batch_size": batch_size, "epochs": epochs, "steps": steps}
    user_config = Config(data=dataclasses.replace(settings, data=data)).replace(**join_length(overrides))
    check_config(user_config)
    index = open_index_of(user_config.data)
    check_output_path(out, index, IMAGE_SUFFIXES)
    image_indices = index.image_indices(split)
    require_images(index, (split,), max_bad_fraction=settings.max_bad_fraction, max_bad_boxes=settings.max_bad_boxes)
    config, reasons = derive_data(user_config, index, select_device(None))

    def warn(bad: Any) -> None:
        print_text(f"stoker: bad image left out: {bad.source}: {bad.error}", file=sys.stderr)

    sheet = make_preview(
        index, image_indices, config.data, seed=seed, num_images=count, workers=host_cores(), on_quarantine=warn
    )
    if out == PREVIEW:  # not asked for by this name: an earlier sheet stays
        numbered = (out.with_stem(f"{out.stem}-{number}") for number in itertools.count(2))
        out = next(path for path in itertools.chain([out], numbered) if not path.exists())
    save_image(sheet, out)
    print_settings(row for row in settings_table(Config(data=config.data), reasons) if row[0] != "data")
    repeats = f", {count} times in all" if count > len(image_indices) else ""
    count_text = plural(min(count, len(image_indices)), "image")
    print_text(f"{out}: {count_text} of {split}{repeats}, each plain and as training would show it")


@data_app.command(sort_key=4)
@described
def convert(
    data: str,
    out: Path,
    /,
    *,
    to: Literal["coco", "voc", "yolo", "tfrecord"] | None = None,
    via: Literal["datumaro"] | None = None,
    reading: HowToRead = READING,
    val_fraction: float | None = None,
    shards: int = 1,
    hardlink: bool = False,
) -> None:
    """Writes a data set in another format: images, boxes, classes and splits.

    Boxes that training drops are dropped here, too, and images without a valid header; all are named. Image files are
    copied unchanged and not decoded: `stoker data check` finds damaged ones. The source is not changed.
    """
    from stoker.data.convert import TARGET_FORMATS, convert_via_datumaro
    from stoker.data.convert import convert as convert_data
    from stoker.data.index import open_index_of
    from stoker.report.dataset import print_converted
    from stoker_watch.errors import UsageError
    from stoker_watch.report.console import progress_bar

    if via is not None:
        if to not in (None, "coco"):
            raise UsageError(f"--via {via} writes COCO.", fix=f"leave out --to {to}, and convert its result")
        print_text("Datumaro runs in an environment of its own; the first time, it is downloaded.", file=sys.stderr)
        for line in convert_via_datumaro(Path(data), out, reading.format):
            print_text(line)
        return
    if to is None:
        raise UsageError("--to is missing.", choices=TARGET_FORMATS, fix="--to coco")
    settings = reading.settings(data, val_fraction=val_fraction).data
    index = open_index_of(settings)
    with progress_bar("images") as on_progress:
        converted = convert_data(index, out, to, shards=shards, hardlink=hardlink, progress=on_progress)
    print_converted(index, converted)


@data_app.command(sort_key=5)
@described
def pack(
    data: str,
    dest: str,
    /,
    *,
    reading: HowToRead = READING,
    val_fraction: float | None = None,
    image_size: tuple[int, int] | None = None,
    quality: int | None = None,
    shard_mib: int | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Writes a data set as shards for streaming: WebDataset archives with an index, to train from a bucket.

    Images that training would skip are left out and named. The same command continues after a kill, makes lost shards
    again, and does nothing when all is there. The source is not changed.
    """
    from stoker.data.index import open_index_of
    from stoker.data.packing import DEFAULT_QUALITY, DEFAULT_SHARD_MIB, PackOptions, in_threads
    from stoker.data.packing import pack as pack_data
    from stoker.report.dataset import print_packed
    from stoker_watch.errors import UsageError
    from stoker_watch.hardware.cgroup import host_cores
    from stoker_watch.report.console import progress_bar

    if quality is not None and image_size is None:
        raise UsageError("--quality needs --image-size: else images keep their bytes.", fix="add --image-size 640")
    height, width = image_size or (None, None)
    for flag, value, low, high in (
        ("--image-size", height, 16, 65_535),
        ("--image-size", width, 16, 65_535),
        ("--quality", quality, 1, 100),
        ("--shard-mib", shard_mib, 1, 4096),
        ("--workers", workers, 1, 1024),
    ):
        if value is not None and not low <= value <= high:
            raise UsageError(f"{flag} {value} is out of range.", choices=[f"{low} to {high:,}"])
    options = PackOptions(
        shard_mib=shard_mib or DEFAULT_SHARD_MIB, image_size=image_size, quality=quality or DEFAULT_QUALITY
    )
    index = open_index_of(reading.settings(data, val_fraction=val_fraction).data)
    run_shards = in_threads(workers or host_cores())
    with progress_bar("images") as on_progress:
        packed = pack_data(index, dest, options, run_shards=run_shards, progress=on_progress)
    show(packed, print_packed, json=json)


@data_app.command(sort_key=6)
@described
def split(
    data: str,
    out: Path,
    /,
    *,
    reading: HowToRead = READING,
    val_fraction: float = 0.1,
    test_fraction: float | None = None,
    group_by: str | None = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Makes new splits as lists of images: stratified by class, with near-duplicates in the same split.

    The data set is not changed. `stoker train DATA --splits OUT` uses the lists.
    """
    from stoker.data.index import open_index_of
    from stoker.data.validation.split import make_splits
    from stoker.report.dataset import print_new_splits
    from stoker_watch.hardware.cgroup import host_cores
    from stoker_watch.report.console import progress_bar

    index = open_index_of(reading.settings(data).data)
    with progress_bar("images") as on_progress:
        new = make_splits(
            index, out, val_fraction=val_fraction, test_fraction=test_fraction, group_by=group_by, seed=seed,
            workers=host_cores(), progress=on_progress,
        )  # fmt: skip
    show(new, functools.partial(print_new_splits, data, str(out)), json=json)
