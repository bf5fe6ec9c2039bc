"""Ask this machine for memory, and keep files on it."""
