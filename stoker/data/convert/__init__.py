"""A data set of any format written anew as COCO JSON, Pascal VOC, YOLO or TFRecord: images, boxes, classes, splits.

`writing.py` is the way from an index to a folder: it names and reads each image, hands it to the writer of the format
(`coco.py`, `voc.py`, `yolo.py`, `tfrecord.py`) and moves the finished folder into place. What a writer gets is in
`item.py`. Not here: reading (`stoker/data/formats/`), the command (`stoker/cli/data.py`)."""
