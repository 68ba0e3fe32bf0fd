"""`python -m stoker` is `stoker`."""

from stoker_watch.cli.app import main

main()
