"""Devices (`device`), forbidden host syncs (`host_sync`), cgroup limits (`cgroup`), and list prices (`prices`)."""
