"""Run Metal kernels on a Linux CPU: `metal_kernel` replaces `mx.fast.metal_kernel`, with checks and counts.

It verifies indexing, barriers, the order of sums, and traffic. It shows nothing about speed.
"""
# ruff: noqa: F401 re-exports for callers

from .kernel import MetalKernel, emulated, metal_kernel
from .launch import BufferTraffic, Traffic
from .options import CompileError, EmulatorOptions, KernelFault

Options = EmulatorOptions  # callers write emulator.Options(order="reverse")
