"""`stoker import`: a training of the TensorFlow Object Detection API as a config.toml of stoker."""

from pathlib import Path


def import_pipeline(
    pipeline: Path,
    /,
    *,
    out: Path = Path("config.toml"),
    data: str | None = None,
    run: bool = False,
    run_dir: str | None = None,
    json: bool = False,
) -> None:
    """Imports a pipeline.config of the TensorFlow Object Detection API, without TensorFlow.

    Writes the settings, and reports each field of the file: carried over exactly, with a substitute, or not. See
    docs/from-tensorflow.md.

    Parameters
    ----------
    pipeline
        The pipeline.config of a training.
    out
        The file of settings to write; `stoker train --config` reads it.
    data
        Folder of the records, if they are not where the file says.
    run
        Train at once.
    run_dir
        Folder of the run, as for `stoker train`.
    json
        Print the report as JSON.
    """
    from stoker.errors import UsageError
    from stoker.migration.pipeline import import_pipeline as read_pipeline
    from stoker.migration.pipeline import print_import, write_config
    from stoker.printable import print_json, print_text

    config, report = read_pipeline(pipeline, data=data)
    write_config(config, report, out)
    if json:
        print_json(report)
    else:
        print_import(report)
        source = "" if config.data.data is not None else "DATA "
        print_text(f"written: {out}; `stoker train {source}--config {out}` trains with it")
    if not run:
        return
    if config.data.data is None:
        raise UsageError("What should be trained on?", cause="the file has no path of records", fix="--data FOLDER")
    from stoker.cli.train import train

    train(config=config, run_dir=run_dir)
