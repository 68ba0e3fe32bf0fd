"""`stoker.measure` as callbacks of training frameworks: `lightning.py`, `huggingface.py`. Neither framework is loaded
before its callback is asked for, and none is a dependency."""
