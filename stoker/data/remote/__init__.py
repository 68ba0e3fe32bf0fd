"""Data sets in buckets and on web servers, mirrored into the cache folder."""
