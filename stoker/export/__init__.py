"""A trained detector as an ONNX file (`graph`), and the check that it detects what the model detects (`parity`). The
command is `onnx`; `inference/runtime.py` runs the file.
"""
