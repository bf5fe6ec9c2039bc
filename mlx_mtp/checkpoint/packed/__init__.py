"""Load released packed weights (NVFP4, MXFP8, AWQ, GPTQ, compressed-tensors) in MLX's formats, at the files' size."""
