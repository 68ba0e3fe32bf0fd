"""The annotation formats: `finder.py` finds the data set in a folder, and a file per format reads it.

Each format has the same functions, in the order of its file: `recognize` looks at names and first bytes and returns a
`DatasetLayout`, `read` reads everything into an `AnnotationTable` (both types are in `tables.py`); some have a writer.
A new format is such a file and a row of `FORMATS` in `finder.py`: docs/add-a-format.md. Not here: dropping bad boxes
and assigning splits (`stoker/data/validation/clean.py`), the cached index (`stoker/data/index.py`), conversion
(`stoker/data/convert.py`).
"""
