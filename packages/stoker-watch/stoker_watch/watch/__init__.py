"""`stoker watch -- CMD…`: runs a training job that stoker did not write, without changes, and records a run folder.

`watch.py` starts the job and waits for it, or records a running one; `output_relay.py` forwards its output and survives
the watcher; `recorder.py` writes the records; `output.py` reads steps and losses from its lines; `hook_reader.py` reads
what `stoker_watch/recording/hook/` measures, the only part that is loaded into the job."""
