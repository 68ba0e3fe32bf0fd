"""Pretrained weights and model files: where they are (`hub`), loading them (`load`), our own files (`model_file`)."""
