"""Learn what pays on this machine: how much to draft, which kernels to use, whether to replay graphs."""
