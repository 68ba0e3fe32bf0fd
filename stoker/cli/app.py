"""The command line: one function per command, which imports what it needs when it runs.

So `stoker --help` and `stoker why` start at once, also where torch is absent. Errors of the exception tree become a
message and their exit code; anything else is a bug and keeps its traceback.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from stoker.cli.data import data_app
from stoker.cli.runs import report, why
from stoker.cli.flag_names import translate
from stoker.config.durations import join_length
from stoker.config.settings import Config
from stoker.errors import StokerError
from stoker.monitor.options import MonitoringOptions

app = App(
    name="stoker",
    help="Trains object detectors on cloud GPUs at full utilisation, and says where every GPU-second went.",
    version_flags=["--version"],
    help_epilogue="Start with `stoker train demo`, then `stoker train FOLDER`. Exit codes: 0 done, 2 usage, 3 pre-"
    "flight failed, 4 data, 5 out of memory, 6 diverged, 7 hung, 75 saved and stopped: run me again.",
    default_parameter=Parameter(negative=()),
    help_format="plaintext",  # markdown would cost a tenth of a second at every start
    suppress_keyboard_interrupt=False,  # said by `main`
)
app.command(data_app)
app.command(why, sort_key=2)
app.command(report, sort_key=5)


@app.command(sort_key=1)
def train(
    data: str | None = None,
    /,
    *,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(group="Run")] = None,
    steps: Annotated[int | None, Parameter(group="Run")] = None,
    max_time: Annotated[str | None, Parameter(group="Run")] = None,
    run_dir: Annotated[str | None, Parameter(group="Run")] = None,
    resume: Annotated[str | None, Parameter(group="Run")] = None,
    trace: Annotated[bool, Parameter(group="Run", negative="")] = False,
    log_format: Annotated[Literal["text", "json"], Parameter(group="Monitoring")] = "text",
    monitor: Annotated[MonitoringOptions, Parameter(name="*", group="Monitoring")] = MonitoringOptions(),  # noqa: B008  # frozen
) -> None:
    """Trains a detector. What is not set is derived from the data and the device, and printed with its reason.

    The same command again continues an unfinished run, and starts a new one after a finished one.

    Parameters
    ----------
    data
        Folder or file with labelled pictures (COCO JSON, Pascal VOC, YOLO, TFRecord, CSV), also in a bucket (gs://,
        s3://), or `demo`: pictures that stoker draws itself.
    epochs
        Length of training in epochs.
    steps
        Length of training in optimizer steps.
    max_time
        Length of training as a time: `30min`, `2h`.
    run_dir
        Folder of the run; default `runs/<data>-<model>-<n>`. With gs://… or s3://… it is kept in a bucket, and any
        machine can continue it.
    resume
        An unfinished run to continue with its own settings; DATA is not needed then.
    trace
        Keep the few steps that are profiled every few minutes as Chrome traces too.
    log_format
        json: one JSON object a line on stdout, for cloud logging; what a person reads goes to stderr.
    """
    from stoker.profiling.telemetry.host import process_start_s
    from stoker.training.loop import train as train_loop

    length = join_length({"epochs": epochs, "steps": steps, "max_time": max_time, "max_duration": config.run.max_duration})
    user_config = config.replace(**length) if data is None else config.replace(data=data, **length)
    started_s = process_start_s()
    result = train_loop(
        user_config, run_dir=run_dir, resume=resume, started_s=started_s, trace=trace, monitor=monitor, log_format=log_format
    )
    if log_format == "json":
        return  # its last line says that it is finished

    from stoker.report.terminal import print_metrics
    from stoker.storage.run_uri import display_path

    print_metrics(result.metrics)
    location = display_path(result.run)
    print(f"results: {location} (`stoker why {location}` says where the time went)")
    print(f"`stoker report {location}` shows all of it on one page")
    print(f"AP50 {0.0 if result.metrics.ap50 is None else result.metrics.ap50:.3f}")


@app.command(name="eval", sort_key=3)
def evaluate(
    run: str,
    data: str | None = None,
    /,
    *,
    split: str = "val",
    format: str | None = None,
    batch_size: int = 8,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Scores a run's best weights: the twelve COCO numbers, and AP by class.

    Parameters
    ----------
    run
        Folder of a run, or a .safetensors or .onnx file that stoker saved.
    data
        Data set; default: the one the run was trained on.
    split
        train, val or test.
    format
        coco, voc, yolo, tfrecord or csv, where stoker's own finding is wrong.
    batch
        Pictures per forward pass.
    device
        cpu, cuda …; default: the accelerator that torch finds, else the cpu.
    json
        Print the numbers as JSON.
    """
    import msgspec

    from stoker.inference.model import load
    from stoker.report.terminal import print_metrics

    metrics = load(run, device=device).evaluate(data, split=split, format=format, batch_size=batch_size)
    if json:
        print(msgspec.json.encode(metrics).decode())
    else:
        print_metrics(metrics)


@app.command(sort_key=4)
def predict(
    run: str,
    images: Annotated[list[str], Parameter(consume_multiple=True)],
    /,
    *,
    conf: float = 0.3,
    iou: float | None = None,
    out: Path = Path("predictions"),
    device: str | None = None,
    tile: int | None = None,
    tile_overlap: float | None = None,
) -> None:
    """Finds objects in pictures; writes the pictures with boxes drawn, and predictions.json.

    Parameters
    ----------
    run
        Folder of a run, or a .safetensors or .onnx file that stoker saved.
    pictures
        Files, folders or patterns such as 'shots/*.jpg', also in a bucket (gs://, s3://).
    conf
        Least score of a box, 0 … 1.
    iou
        Of two boxes of a class that overlap more than this, the weaker is dropped; default: the model's own.
    out
        Folder for the results; the originals are never touched.
    device
        cpu, cuda …; default: the accelerator that torch finds, else the cpu.
    tile
        Shows pictures larger than this many pixels also in tiles of that side: for small objects in large pictures.
    overlap
        Share of its side that a tile has in common with the next, at least; 0 … 0.9, default 0.2.
    """
    from stoker.inference.model import load

    model = load(run, device=device)
    for line in model.predict_to_dir(images, out, conf=conf, iou=iou, tile=tile, tile_overlap=tile_overlap):
        print(line)


@app.command(sort_key=5)
def export(
    run: str,
    /,
    *,
    onnx: bool = False,
    out: Path | None = None,
    batch_size: str = "dynamic",
    conf: float = 0.05,
    iou: float | None = None,
    max_detections: int = 100,
    opset: int = 18,
    images: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
) -> None:
    """Writes a trained model as an ONNX file that needs no stoker; kept only when it finds what the model finds.

    Normalisation, decoding and suppression are inside. docs/onnx.md says how to run it.

    Parameters
    ----------
    run
        Folder of a run, or a .safetensors file that stoker saved.
    onnx
        The format; the only one so far.
    out
        Name of the file; default: that of the weights, with .onnx.
    batch
        Pictures per call: dynamic (any number) or a fixed number.
    conf
        Least score of a box; whoever runs the file can give another.
    iou
        Of two boxes of a class that overlap more than this, the weaker is dropped; whoever runs it can give another. 1:
        the file suppresses nothing.
    max_detections
        Most boxes of a picture.
    opset
        ONNX operator set, 18 … 21.
    pictures
        What the file is compared with the model on; default: pictures of the run's validation split.
    """
    from stoker.errors import UsageError

    if not onnx:
        raise UsageError("Which format?", choices=["--onnx"], fix=f"stoker export {run} --onnx")
    if batch_size != "dynamic" and not batch_size.isdecimal():
        raise UsageError(f"--batch-size {batch_size!r} is no number of pictures.", choices=["dynamic", "1 or more"])
    from stoker.export.onnx import export_onnx

    fixed_batch_size = None if batch_size == "dynamic" else int(batch_size)
    for line in export_onnx(run, out=out, batch_size=fixed_batch_size, conf=conf, iou=iou, max_detections=max_detections,
                            opset=opset, images=images or ()):  # fmt: skip
        print(line)


@app.command(sort_key=2, usage="Usage: stoker watch [--run DIR] -- CMD ARGS… | stoker watch [--run DIR] --pid N")
def watch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    pid: Annotated[int | None, Parameter(group="Run")] = None,
    run_dir: Annotated[str | None, Parameter(group="Run")] = None,
    hook: Annotated[bool, Parameter(group="Run", negative="--no-hook")] = True,
    monitor: Annotated[MonitoringOptions, Parameter(name="*", group="Monitoring")] = MonitoringOptions(),  # noqa: B008  # frozen
) -> None:
    """Runs any training job unchanged and records it, for `stoker why` and `stoker report`.

    Its output, exit code, terminal and signals stay as they are, and it goes on
    when `stoker watch` is killed. Recorded are what driver and kernel say each
    second, and the steps, losses and rates that its output tells: of the TF Object
    Detection API, Keras, torchvision, Ultralytics, Lightning, Hugging Face Trainer,
    and plain `loss=` or `loss:`. Python processes that use torch or Keras are
    timed from the inside, by `PYTHONPATH` alone; the stacks of all are sampled from
    outside. With `--pid` the job runs already, and is only looked at: its output is
    read where it goes into a file, and Ctrl-C ends the watching. Linux only.

    Parameters
    ----------
    command
        The job, behind `--`.
    pid
        Number of a process that runs already, instead of a command.
    run_dir
        Folder of the run; default `runs/watch-<script or program>-<n>`.
    hook
        Time the job from the inside; `--no-hook` leaves its environment as it is.
    """
    from stoker.errors import UsageError
    from stoker.watch.attach import attach
    from stoker.watch.watch import watch as watch_job

    if pid is not None and command:
        raise UsageError("--pid is of a job that runs, and behind `--` one is started.", fix="give one of the two")
    if pid is not None:
        sys.exit(attach(pid, run_dir, monitor))
    sys.exit(watch_job(list(command), run_dir, hook=hook, monitor=monitor))


@app.command(sort_key=6)
def models(name: str | None = None, /, *, json: bool = False) -> None:
    """Lists the architectures that `--model` takes: what each is for, what it costs, which weights there are.

    Parameters
    ----------
    name
        One of them, to be shown in full.
    json
        Print everything as JSON.
    """
    from stoker.report.models import as_json, print_model, print_models

    if json:
        print(as_json(name))
    elif name is None:
        print_models()
    else:
        print_model(name)


def main() -> None:
    """The entry point; never returns."""
    if sys.stdout is None:  # started without one (`>&-`): what is printed goes nowhere
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process
    try:
        code = _run()
        sys.stdout.flush()  # whoever does not take the output is noticed here, not when Python exits
    except BrokenPipeError:
        from stoker.report.terminal import redirect_to_devnull

        for stream in (sys.stdout, sys.stderr):
            redirect_to_devnull(stream)
        code = 141  # the reader wants no more of it (`| head`): as SIGPIPE ends other programs
    sys.exit(code)


def _run() -> int:
    """Runs the command that was asked for; the exit code."""
    try:
        arguments, notes = translate(sys.argv[1:])
        for note in notes:
            print(f"stoker: {note}", file=sys.stderr)
        app(arguments)
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(f"stoker: interrupted {error}".rstrip(), file=sys.stderr)
        return 130
    except SystemExit as system_exit:  # the parser's own, after its message
        return system_exit.code if isinstance(system_exit.code, int) else int(system_exit.code is not None)
    return 0
