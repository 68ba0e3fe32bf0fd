"""Data sets: annotations and images, from files to batches.

`formats/` reads annotations and `index.py` keeps them as columns in one memory-mapped file, never as an object per
sample. `images/` reads and decodes image files, `geometry.py` and `augment.py` change them, `loading/` makes batches
with threads or processes. `validation/` checks data sets, `convert.py` and `packing.py` write them, `remote.py` mirrors
buckets. Not here: the detector (`stoker.models`) and its metrics (`stoker.evaluation.evaluate`).
"""
