"""`stoker search`: hyper-parameter search on Optuna. `space.py`: what is searched; `study.py`: the shared study, which
trial is next and what it tries; `worker.py`: one worker; `start.py`: the command; `page.py`: the report."""
