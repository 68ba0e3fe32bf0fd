"""Devices (`device`), whether there is a GPU and it works (`cuda_trial`), limits of the CPU and memory (`cgroup`),
measured steps (`calibration`), what exchanges between devices cost (`exchange_cost`), and list prices (`prices`)."""
