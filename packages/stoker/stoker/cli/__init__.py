"""The commands of the trainer, one module for each group; `commands.py` adds them to the app, which is
`stoker_watch/cli/app.py`. Each imports its code when it runs."""
