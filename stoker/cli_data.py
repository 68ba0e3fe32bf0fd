"""The `stoker data` commands: look at a data set, write it anew. As in `cli.py`, each imports what it needs."""

from cyclopts import App, Parameter

data_app = App(
    name="data",
    sort_key=6,
    help="Looks at a data set: what is wrong with it, what is in it, how it is shown to the model; converts it.",
    default_parameter=Parameter(negative=()),
    help_format="plaintext",
)
