"""Run one model on several machines: each rank computes a part of every layer, and all decode the same tokens."""
