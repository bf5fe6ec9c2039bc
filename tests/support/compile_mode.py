"""Set the mode of `mx.compile`, of which Python's interface offers only on and off."""

import ctypes
from pathlib import Path

import mlx.core as mx

NO_FUSE, ENABLED = 2, 3  # of mlx::core::CompileMode


def set_mode(mode: int) -> None:
    (library,) = (Path(mx.__file__).parent / "lib").glob("libmlx.[ds]*")
    ctypes.CDLL(str(library))._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(ctypes.c_int(mode))
