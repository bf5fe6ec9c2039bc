"""Metal kernels of the verify, one module per op: the reference in plain MLX ops, the launch, the public function.

The public function runs the kernel on Metal and the reference elsewhere. Bodies are in `kernels/*.metal`.
"""

from ._quantized import Quantized
from .verify_glu import verify_glu, verify_glu_ref
from .verify_qmm import verify_qmm, verify_qmm_ref

__all__ = ["Quantized", "verify_glu", "verify_glu_ref", "verify_qmm", "verify_qmm_ref"]
