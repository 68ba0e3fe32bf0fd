"""The annotation formats. Each has `find(folder) -> Found | None`, which looks at names and reads nothing, in
`<format>_files.py`, and `read(found, problems) -> Columns`, which reads everything, in `<format>.py`: COCO JSON, Pascal
VOC, YOLO, TFRecord (with `tf_example.py` and `label_map.py`), CSV. What they hand on is in `tables.py`; a new format
is two such functions and a row in `stoker/data/formats/detect.py`. Not here: dropping bad boxes and making splits
(`stoker/data/validation/clean.py`), the cached index (`stoker/data/index.py`), writing data sets
(`stoker/data/convert/`)."""
