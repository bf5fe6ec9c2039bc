"""Predict what a pass has to read and multiply, what that takes on a chip, and how far times are from it."""
