"""What is known of machines without a framework: limits of the CPU and memory (`cgroup`), list prices (`prices`),
measured steps (`calibration`), TPUs (`tpu`)."""
