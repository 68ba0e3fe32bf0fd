"""Object stores and their URIs: access to `gs://`, `s3://` and `https://` for all other parts."""
