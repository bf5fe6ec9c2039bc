"""Run one model on several machines: each rank holds a part of every layer, and all decode the same tokens."""
