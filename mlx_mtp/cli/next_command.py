"""State, below a result of `verify-lossless`, `doctor` or `bench decode`, the command for the next question."""

from collections.abc import Mapping
from shlex import join
from typing import Any

ON = ("mtp", "vision")  # switches that are on by default
LOADING = ("model", "config_from", "gguf_plan", "gguf_exact", "trust_remote_code", "adapter_path", "mtp", "mtp_path")
LOADING += ("draft_model", "draft_vocab", "vision", "vision_path")  # options of all three commands


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
    """Return a command line with the options of `flags` that state what is loaded, then `more` words.

    --kernels is repeated unless it is in `more`, or for `doctor`, which checks all kernels.
    """
    kernels = ["--kernels", flags["kernels"]] if flags.get("kernels") else []
    repeated = [] if name == "doctor" or "--kernels" in more else kernels
    return join(["mlx-mtp", *name.split(), *loading_words(flags), *repeated, *more])


def loading_words(flags: Mapping[str, Any]) -> list[str]:
    """Return the words of the options among `flags` that state what is loaded, without those with default values."""
    words: list[str] = []
    for name in LOADING:
        flag, value = f"--{name.replace('_', '-')}", flags.get(name)
        if name in ON:
            words += [f"--no-{name}"] if value is False else []
        elif value is True:
            words.append(flag)
        elif value:
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag, str(each)]
    return words
