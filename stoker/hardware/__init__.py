"""Devices (`device`), allowed host syncs (`host_sync`), cgroup limits (`cgroup`), how long threads of the CPU spin
(`spinning`), and list prices (`prices`)."""
