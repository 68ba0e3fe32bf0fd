"""`stoker.measure` as callbacks of training frameworks: `lightning.py`, `huggingface.py`. A framework is imported only
when its callback is used; none is a dependency."""
