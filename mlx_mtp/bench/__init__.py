"""Measure what `mlx-mtp bench` reports: every function here returns data or tables; the command line prints them."""
