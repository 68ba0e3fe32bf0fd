"""The `stoker data` commands: look at a data set, write it anew. As in `cli.py`, each imports what it needs."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

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
        Folder or file with labelled pictures, or `demo`.
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
    from stoker.data.check import check as check_data
    from stoker.data.problems import MAX_BAD
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
