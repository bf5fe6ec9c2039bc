"""What `mlx-mtp bench` measures: every function here returns data or tables; the command line prints them."""
