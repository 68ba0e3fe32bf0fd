"""`python -m stoker_watch` is `stoker`."""

from stoker_watch.cli.app import main

main()
