"""Read, check, inspect and convert checkpoints."""
