"""Image files: reading their bytes, headers, decoding, and the cache of decoded images."""
