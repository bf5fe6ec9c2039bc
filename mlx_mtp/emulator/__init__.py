"""Metal kernels on a Linux CPU: `metal_kernel` in the place of `mx.fast.metal_kernel`, with checks and counts.

It proves indexing, barriers, the order of sums, and traffic. It proves nothing about speed.
"""

from .errors import CompileError, KernelFault
from .kernel import MetalKernel, Options, metal_kernel
from .replace import emulated
from .traffic import BufferTraffic, Traffic

__all__ = [
    "BufferTraffic",
    "CompileError",
    "KernelFault",
    "MetalKernel",
    "Options",
    "Traffic",
    "emulated",
    "metal_kernel",
]
