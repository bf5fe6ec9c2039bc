"""Decode several texts at once, each as it would be alone: their rows share every pass, their caches a pool."""
