"""Devices (`device`), whether there is a GPU and it works (`cuda_trial`), what exchanges between devices cost
(`exchange_cost`), errors of exhausted memory (`memory_errors`)."""
