"""Benchmarks by subject: `python -m benchmarks` lists and runs them. docs/benchmarks.md has their results."""
