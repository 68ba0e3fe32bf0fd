"""Writes a data set of any format in another: images, boxes, classes, splits.

`writing.py` names and reads each image of an index, passes it to the writer of the format (`write` in the table of
formats) and renames the finished folder. `packing.py` makes shards. Not here: the writers (`stoker/data/formats/`), the
command (`stoker/cli/data.py`).
"""
