"""Predict the bytes and instructions of a pass, its time on a chip, and the distance of measured times."""
