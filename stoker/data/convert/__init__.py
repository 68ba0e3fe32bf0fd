"""Writes a data set of any format as COCO JSON, Pascal VOC, YOLO or TFRecord: images, boxes, classes, splits.

`writing.py` converts an index: it names and reads each image, passes it to the writer of the format (`coco.py`,
`voc.py`, `yolo.py`, `tfrecord.py`) and renames the finished folder. `item.py` has the types that writers use.
Not here: reading (`stoker/data/formats/`), the command (`stoker/cli/data.py`).
"""
