"""Run Metal kernels on a Linux CPU: `metal_kernel` in the place of `mx.fast.metal_kernel`, with checks and counts.

It proves indexing, barriers, the order of sums, and traffic. It proves nothing about speed.
"""
# ruff: noqa: F401 what is imported here is what callers import from here

from .kernel import MetalKernel, emulated, metal_kernel
from .launch import BufferTraffic, Traffic
from .options import CompileError, EmulatorOptions, KernelFault

Options = EmulatorOptions  # as callers write it: emulator.Options(order="reverse")
