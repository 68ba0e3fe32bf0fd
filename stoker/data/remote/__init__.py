"""Data sets in buckets and on web servers: a local mirror with annotations and image placeholders (`resolve.py`)."""
