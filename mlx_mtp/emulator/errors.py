"""Name what goes wrong with an emulated kernel."""


class KernelFault(RuntimeError):
    """A kernel did what Metal leaves undefined; the message names kernel, thread, address and source line."""


class CompileError(RuntimeError):
    """A kernel does not compile, or needs what the emulator does not have."""
