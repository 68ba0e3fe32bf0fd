"""A device (`device`) and which one a run uses (`selection`); what is particular of CPUs (`cpu`), of XLA (`xla`) and of
NVIDIA's GPUs (`cuda_trial`); memory (`host_arenas`, `block_size`, `memory_errors`), waits (`host_sync`), and what
exchanges between devices cost (`exchange_cost`)."""
