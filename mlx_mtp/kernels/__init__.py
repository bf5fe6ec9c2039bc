"""Metal kernels of the verify, one module per op: the reference in plain MLX ops, the launch, the public function.

The public function runs the kernel on Metal and the reference elsewhere. Bodies are in `kernels/*.metal`.
"""
