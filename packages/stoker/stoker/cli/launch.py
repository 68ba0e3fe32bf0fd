"""`stoker launch`: the same training on this machine, a cluster or a cloud. `status`, `logs`, `cancel`: of its jobs."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from stoker.cli.quick_import import quick_imports
from stoker.cli.train import flags_of, join_settings, train
from stoker.config.flag_names import translate
from stoker.config.settings import Config, check_config
from stoker.launching.spec import PLACES, LaunchPlace, LaunchRequest, LaunchSpec, PlaceOptions, open_place
from stoker_watch.cli import PARAMETER, described
from stoker_watch.errors import UsageError
from stoker_watch.printable import print_json, print_text, printable

launch_app = App(
    name="launch",
    sort_key=1,
    default_parameter=Parameter(negative=()),
    help_format="plaintext",
    usage="Usage: stoker launch WHERE DATA [settings of stoker train]… | stoker launch status|logs|cancel RUN",
)
Run = Annotated[str, Parameter(help="Folder of the run, or its URI, as `stoker launch` printed it.")]


@launch_app.default
@described
def launch(
    where: str | None = None,
    data: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *settings: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    request: Annotated[LaunchRequest, Parameter(name="*", group="Launch")] = LaunchRequest(),  # noqa: B008  # frozen
    options: Annotated[PlaceOptions, Parameter(name="*", group="Place")] = PlaceOptions(),  # noqa: B008  # frozen
    dry_run: bool = False,
) -> None:
    """Submits a training, which is requeued and resumed when it is preempted.

    The same command with the same --run-dir, also at another place, continues the run.
    """
    from stoker.launching.elastic import SETTINGS
    from stoker.launching.jobs import submit
    from stoker.launching.request import (
        check_launch,
        is_started,
        make_spec,
        refuse_control_characters,
        refuse_settings_of_run,
    )

    if where is None:
        raise UsageError("Where should it be launched?", choices=PLACES, fix="stoker launch local demo")
    place = open_place(where)
    if data is not None and data.startswith("-"):  # a flag of the training: there is no DATA
        settings, data = (data, *settings), None
    refuse_control_characters(request, options, data, settings)
    settings, config = _read_settings(data, settings, has_files=place.reach != "containers")
    chosen = config.set_fields()
    if request.resume is not None:
        refuse_settings_of_run(request.resume, chosen, settings)
        if place.reach != "containers" and is_started(request.resume):
            from stoker.training.extension import extended_settings

            extended_settings(Path(request.resume), config, request.resume)
    batch = {name: chosen[name] for name in SETTINGS if name in chosen}
    on_cpu = chosen.get("device") == "cpu"
    spec = make_spec(request, place, options, data=data, settings=settings, on_cpu=on_cpu, batch=batch)
    warnings = check_launch(spec, place)
    if request.resume is None and is_started(spec.run_dir):
        if place.reach != "containers":  # they have other paths of the data
            from stoker.training.run_selection import refuse_other_settings, with_absolute_paths

            refuse_other_settings(Path(spec.run_dir), with_absolute_paths(config), f"stoker launch {where}")
    elif chosen.keys() - {"data"} and request.resume is None:
        warnings += _check_settings(config, spec, place)
    for warning in warnings:
        print_text(f"stoker: warning: {warning}", file=sys.stderr)
    if place.name in ("k8s", "gcp-batch"):
        print_text(f"stoker: /dev/shm of {spec.shm_gib:g} GiB is for NCCL; loader workers use none", file=sys.stderr)
    if dry_run:
        print_text(f"# {place.file.format(name=spec.name)}", file=sys.stderr)
        print("\n".join(map(printable, place.render(spec).split("\n"))), end="")
        return
    job = submit(spec, place, request)
    print_text(f"{place.name} job {job.id}: {spec.run_dir}")
    print_text(f"`stoker launch status {spec.run_dir}`, also logs and cancel; `stoker why {spec.run_dir}`")


def _read_settings(data: str | None, settings: tuple[str, ...], *, has_files: bool) -> tuple[tuple[str, ...], Config]:
    """(the settings with translated flags of other tools, what they and their file set), as `stoker train` would read
    them. Raises CycloptsError for a flag or an argument that it does not have. has_files: the job sees the files of
    this machine."""
    app = App(name="stoker train", default_parameter=PARAMETER, help_format="plaintext")
    app.default(train)
    words, notes = translate(["train", *settings], lambda _: flags_of(app))
    for note in notes:
        print_text(f"stoker: {note}", file=sys.stderr)
    typed = [*(() if data is None else (data,)), *words[1:]]
    _, bound, _ = app.parse_args(typed, exit_on_error=False, print_error=False)
    found = bound.arguments
    if data is None and "data" in found:
        what = f"DATA comes before the settings, and {found['data']!r} is behind one."
        raise UsageError(what, fix="stoker launch WHERE DATA [settings of stoker train]")
    file = found.get("config_file")
    if file is not None and not has_files and not file.exists():
        file = None  # the image may have it
    if "monitor" in found:
        found["monitor"].validate()
    length = {name: found.get(name) for name in ("epochs", "steps", "max_time")}
    config = join_settings(found.get("config", Config()), file, data, **length)
    check_config(config)
    return tuple(words[1:]), config


def _check_settings(config: Config, spec: LaunchSpec, place: LaunchPlace) -> list[str]:
    """Refuses what `stoker train` would refuse there. Returns a warning if torch, which is needed, is absent."""
    try:
        with quick_imports():
            from stoker.planning.settings import refuse_settings
            from stoker.training.cluster import Devices
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return ["the settings of the training are checked there only: torch is not installed here"]
    devices = Devices(spec.devices * spec.max_nodes, spec.devices)
    refuse_settings(config, devices, sees_files=place.reach != "containers")
    return []


@launch_app.command(sort_key=1)
@described
def status(run: Run, /, *, json: bool = False) -> None:
    """Says what the newest job of a run does."""
    from stoker.launching.jobs import last_job, read_jobs
    from stoker_watch.secrets import mask_secrets, without_secrets

    job = last_job(run)
    state = open_place(job.place).status(job)
    if json:
        print_json({"job": job, "status": without_secrets(dataclasses.asdict(state)), "jobs": read_jobs(run)})
        return
    nodes = f" on {', '.join(state.nodes)}" if state.nodes else ""
    restarts = f", requeued {state.restarts} times" if state.restarts else ""
    code = f", exit code {state.exit_code}" if state.exit_code else ""
    text = f"{job.place} job {job.id}: {state.state}{nodes}{restarts}{code}: {mask_secrets(state.text)}"
    print_text(text, newlines=True)


@launch_app.command(sort_key=2)
@described
def logs(run: Run, /, *, follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False) -> None:
    """Prints what the newest job of a run has printed."""
    from stoker.launching.jobs import last_job
    from stoker_watch.secrets import mask_secrets

    job = last_job(run)
    for line in open_place(job.place).logs(job, follow=follow):
        print_text(mask_secrets(line))


@launch_app.command(sort_key=3)
def cancel(run: Run, /) -> None:
    """Asks the newest job of a run, or all of a search, to save and end, for good, and waits until that is done. The
    run can be continued."""
    from stoker.launching.jobs import cancel as cancel_job
    from stoker.launching.jobs import launched_jobs, newest_jobs
    from stoker_watch.secrets import mask_secrets

    for job in newest_jobs(launched_jobs(run)):
        state = cancel_job(job)
        print_text(f"{job.place} job {job.id}: {state.state}: {mask_secrets(state.text)}", newlines=True)
    print_text(f"`stoker launch WHERE --resume {run}` continues the run")
