"""Share modules between ports: MTP heads, layers that roll back, and sites where kernels may run."""
