"""Ask this machine for memory, keep files on it, say its errors."""
