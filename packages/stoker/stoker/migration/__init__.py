"""Brings a training that was set up for another tool to stoker: `stoker import pipeline.config`, without TensorFlow.

`text_format.py` reads the file into a tree, `fields.py` accounts for every field of it, the `tf_*.py` modules decide
what each becomes here, `pipeline.py` puts them together and prints the report.
"""
