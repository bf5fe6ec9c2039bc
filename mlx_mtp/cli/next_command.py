"""State, below a result of `verify-lossless`, `doctor` or `bench decode`, the command for the next question."""

from collections.abc import Mapping
from shlex import join
from typing import Any


def after_verify(diverged: bool, flags: Mapping[str, Any]) -> str:
    """Return the line below a verdict of `verify-lossless`, which names the next command. flags: the command's."""
    if diverged:
        return f"Next: {_command('doctor', flags)}  checks each kernel"
    return f"Next: {_command('bench decode', flags, '--quick')}  measures the speed with and without drafts"


def after_doctor(good: bool, flags: Mapping[str, Any]) -> str:
    """Return the line below a verdict of `doctor` on kernels and a model. good: nothing is wrong."""
    if not good:
        return f"Next: {_command('verify-lossless', flags, '--kernels', 'off')}  checks the text without our kernels"
    check, speed = _command("verify-lossless", flags), _command("bench decode", flags, "--quick")
    return f"Next: {check}  checks the text; {speed}  measures the speed by kind of prompt"


def after_bench(different: bool, flags: Mapping[str, Any]) -> str:
    """Return the line below a result of `bench decode`; "" for random weights. different: texts differ."""
    if flags["config"]:
        return ""
    check = f"Next: {_command('verify-lossless', flags)}"
    if different:
        return f"{check}  judges whether rounding explains the differences"
    return f"{check}  checks the text; {_command('doctor', flags)}  times each kernel"


def _command(name: str, flags: Mapping[str, Any], *more: str) -> str:
    """Return a command line with the same --model and, unless it is `doctor`, --draft-model, and `more` words."""
    given = ("model",) if name == "doctor" else ("model", "draft_model")
    options = [word for key in given if flags.get(key) for word in (f"--{key.replace('_', '-')}", flags[key])]
    return join(["mlx-mtp", *name.split(), *options, *more])
