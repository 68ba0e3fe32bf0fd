"""Object stores and addresses: what the rest of stoker knows of `gs://`, `s3://` and `https://`."""
