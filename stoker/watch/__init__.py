"""`stoker watch -- CMD…`: runs a training job that stoker did not write, unchanged, and records an ordinary run folder.

`watch.py` starts the job and waits for it; `output_relay.py` carries its output, and outlives the watcher; `output.py`
reads steps and losses out of single lines of it, `progress_windows.py` makes windows of them. Nothing here is loaded
into the job.
"""
