"""Keep what the layers know of a text, roll it back, and store it in files."""
