"""The annotation formats: COCO JSON, Pascal VOC, YOLO, TFRecord and CSV.

Each format has two functions: `find(folder) -> DatasetLayout | None` in `<format>_files.py` looks at file names, and
`read(layout, problems) -> AnnotationTable` in `<format>.py` reads everything. Both types are in `tables.py`. A new
format is two such functions and a row of `FORMATS` in `detect.py`: docs/add-a-format.md. Not here: dropping bad boxes
and assigning splits (`stoker/data/validation/clean.py`), the cached index (`stoker/data/index.py`), writing data sets
(`stoker/data/convert/`).
"""
