"""Measurements of `mlx-mtp bench`: functions here return data or tables, which the command line prints."""
