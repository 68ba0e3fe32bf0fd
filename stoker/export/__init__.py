"""A trained detector as an ONNX file (`graph`), running it (`runtime`), and the check that it detects what the model
detects (`parity`). The command is `onnx`.
"""
