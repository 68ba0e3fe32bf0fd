"""`python -m stoker` is `stoker`."""

from stoker.cli import main

main()
