"""`python -m mlx_mtp`."""

from .cli import main

main()
