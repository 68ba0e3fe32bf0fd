"""`stoker plan`: what a training needs and costs on machines that need not be here."""

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from stoker.cli.quick_import import quick_imports
from stoker.cli.train import join_settings
from stoker.config.durations import parse_time_s
from stoker.config.settings import Config

_PLAN = Group("Plan", sort_key=0)
"""Before the settings of a training."""


def plan(
    data: str,
    /,
    *,
    on: Annotated[tuple[str, ...], Parameter(consume_multiple=True, group=_PLAN)] = (),
    gpus: Annotated[tuple[int, ...], Parameter(consume_multiple=True, group=_PLAN)] = (),
    spot: Annotated[bool, Parameter(group=_PLAN, negative="")] = False,
    by: Annotated[str | None, Parameter(group=_PLAN)] = None,
    budget: Annotated[float | None, Parameter(group=_PLAN)] = None,
    prices: Annotated[Path | None, Parameter(group=_PLAN)] = None,
    svg: Annotated[Path | None, Parameter(group=_PLAN)] = None,
    html: Annotated[Path | None, Parameter(group=_PLAN)] = None,
    json: Annotated[bool, Parameter(group=_PLAN, negative="")] = False,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(group="Run")] = None,
    steps: Annotated[int | None, Parameter(group="Run")] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group="Run")] = None,
) -> None:
    """Predicts memory, duration and cost of a training on named machines, and recommends one.

    Nothing is trained or rented. Settings are those of `stoker train`.

    Parameters
    ----------
    data
        Data set, as for `stoker train`.
    on
        Machines: a2-highgpu-1g, g2-standard-8, g5.xlarge …, or `this`; default: this one, and all of the table
        with one GPU.
    gpus
        Numbers of GPUs; default: those of the named machines, else one.
    spot
        Also spot machines, with the rework that preemptions are expected to cost.
    by
        Time in which the training has to be done: 90min, 6h, 2d.
    budget
        US dollars that it may cost.
    prices
        TOML file with your own prices and machines (docs/plan.md).
    svg
        Write the drawing of cost against time.
    html
        Write a page with the drawing and all machines.
    json
        Print everything as JSON.
    epochs
        Length of training in epochs.
    steps
        Length of training in optimizer steps.
    config_file
        Settings from a config.toml; flags override them.
    """
    from stoker.errors import ConfigError

    with quick_imports():
        from stoker.planning.plan import make_plan, to_dict
        from stoker.planning.recommend import Limits
        from stoker.planning.views import print_plan, write_drawing
    from stoker.printable import print_json, print_text

    user_config = join_settings(config, config_file, data, epochs=epochs, steps=steps)
    if budget is not None and not 0 < budget < 1e9:
        raise ConfigError(f"--budget {budget:g}: wanted US dollars above 0.")
    limits = Limits(by_s=None if by is None else parse_time_s(by, "--by"), budget=budget)
    result = make_plan(user_config, on=on, gpus=gpus, spot=spot, limits=limits, prices=prices)
    for path, as_html in ((svg, False), (html, True)):
        if path is not None:
            write_drawing(result, path, as_html=as_html)
    if json:
        print_json(to_dict(result))
        return
    print_plan(result)
    for path in filter(None, (svg, html)):
        print_text(f"written: {path}")
