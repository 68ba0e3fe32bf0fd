"""`stoker search`, and its workers. Imports its code when it runs."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from stoker.cli.train import join_settings
from stoker.search import SearchRequest
from stoker_watch.cli import described
from stoker_watch.errors import needs_package
from stoker_watch.printable import print_text

_SEARCH = Group("Search", sort_key=0)
"""Before the settings of a training."""


@described
def search(
    data: str | None = None,
    /,
    *,
    request: Annotated[SearchRequest, Parameter(name="*", group=_SEARCH)] = SearchRequest(),  # noqa: B008  # frozen
    worker: Annotated[Path | None, Parameter(show=False)] = None,
    epochs: Annotated[float | None, Parameter(group="Run")] = None,
    steps: Annotated[int | None, Parameter(group="Run")] = None,
    max_time: Annotated[str | None, Parameter(group="Run")] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group="Run")] = None,
) -> None:
    """Searches settings that train a better model: many trainings, which Optuna chooses and prunes.

    Prints the space and the expected cost before it starts. The same command again
    continues the search; trial 0 has the defaults, so that it can say when they win.
    """
    with needs_package("optuna", "`stoker search`"):
        import optuna  # noqa: F401  # the message, before anything else fails
    if worker is not None:
        from stoker.search.worker import work

        work(worker)
        return
    from stoker.search.start import search as run_search

    config = join_settings(request.config, config_file, data, epochs=epochs, steps=steps, max_time=max_time)
    run_search(dataclasses.replace(request, config=config), print_text)
