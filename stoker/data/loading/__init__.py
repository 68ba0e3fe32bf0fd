"""The stream of batches: the loader, its worker pool, prefetching, and the choice of decoder."""
