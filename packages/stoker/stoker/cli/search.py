"""`stoker search`, and its workers. Imports its code when it runs."""

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from stoker.cli.train import join_settings
from stoker.config.settings import Config
from stoker.launching.spec import LaunchRequest, PlaceOptions
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
    space: Annotated[Path | None, Parameter(group=_SEARCH)] = None,
    trials: Annotated[int, Parameter(group=_SEARCH)] = 50,
    parallel: Annotated[int, Parameter(group=_SEARCH)] = 1,
    objective: Annotated[str, Parameter(group=_SEARCH)] = "ap",
    pruner: Annotated[str | None, Parameter(group=_SEARCH)] = None,
    launcher: Annotated[str, Parameter(group=_SEARCH)] = "local",
    dry_run: Annotated[bool, Parameter(group=_SEARCH, negative="")] = False,
    worker: Annotated[Path | None, Parameter(group=_SEARCH, show=False)] = None,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(group="Run")] = None,
    steps: Annotated[int | None, Parameter(group="Run")] = None,
    max_time: Annotated[str | None, Parameter(group="Run")] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group="Run")] = None,
    launch: Annotated[LaunchRequest, Parameter(name="*", group="Launch")] = LaunchRequest(),  # noqa: B008  # frozen
    options: Annotated[PlaceOptions, Parameter(name="*", group="Place")] = PlaceOptions(),  # noqa: B008  # frozen
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
    from stoker.search.start import SearchRequest
    from stoker.search.start import search as run_search

    settings = join_settings(config, config_file, data, epochs=epochs, steps=steps, max_time=max_time)
    request = SearchRequest(
        config=settings,
        space=space,
        trials=trials,
        parallel=parallel,
        objective=objective,
        pruner=pruner,
        launcher=launcher,
        launch=launch,
        options=options,
        dry_run=dry_run,
    )
    run_search(request, print_text)
