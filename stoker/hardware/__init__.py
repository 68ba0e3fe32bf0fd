"""Devices (`device`), forbidden host syncs (`host_sync`), limits of the container (`cgroup`), and list prices
(`prices`)."""
