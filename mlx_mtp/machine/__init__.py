"""Query this machine's memory, cache files on it, and format errors."""
