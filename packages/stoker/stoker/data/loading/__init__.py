"""The stream of batches: the loader, its worker pool and processes, prefetching, and the choice of decoder."""
