"""Translate config.json into the fields of a family, and apply values that the family's implementation ignores."""
