"""Measure on this machine which draft length, kernels and replay of graphs are fastest."""
