"""The annotation formats. Each has `find(folder) -> Found | None`, which looks at names and reads nothing, and
`read(found) -> Columns`, which reads everything: `coco_files.py` and `coco.py` (with `categories.py`), `voc_files.py`
and `voc.py`. What they hand on is in `columns.py`; a new format is two such functions and a line in
`stoker/data/find.py`. Not here: dropping bad boxes and making splits (`stoker/data/clean.py`), the cached index
(`stoker/data/index.py`)."""
