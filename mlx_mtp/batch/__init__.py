"""Decode several sequences in shared passes and one cache pool; each has the tokens that it has alone."""
