"""A trained detector as an ONNX file (`graph`) or a file of another runtime (`programs`), and the check that it detects
what the model detects (`parity`). The command is `write`; `inference/runtime.py` runs the files.
"""
