"""Transcode GGUF files for the commands, with an announcement, a progress bar and a report of the types."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from click import Choice, option

gguf_options = (
    option("--config-from", help="For a GGUF file: directory or repository with config.json and tokenizer."),
    option(
        "--gguf-plan",
        type=Choice(["packed", "affine", "exact", "small"]),
        help="For a GGUF file: keep IQ4_NL, IQ4_XS and Q6_K for our kernels (packed), transcode them to MLX's groups "
        "(affine, also named exact), or store them and types without an equivalent in fewer bits (small).  "
        "[default: packed]",
    ),
    option("--gguf-exact", is_flag=True, help="For a GGUF file: scales and values in float32, as in the file."),
)


def convert_gguf(flags: dict[str, Any]) -> None:
    """Convert the file of --gguf to the new directory of --mlx-path; print its contents and the path written."""
    from .progress import bar, loading, shows_progress

    shown = shows_progress(quiet=False)
    with loading(shown=shown):
        from ..checkpoint.gguf.convert import prepare, transcode
        from ..checkpoint.gguf.report import announcement, as_text

        prepared = prepare(
            flags["gguf"], _options(flags), config_from=flags["config_from"], heads_from=flags["mtp_path"]
        )
    new = flags["mlx_path"] or "mlx_model"
    click.echo(as_text(prepared))
    click.echo(announcement(prepared, new), err=True)
    began = time.monotonic()
    with bar(shown=shown, of_bytes=True, left=True) as update:
        path = transcode(prepared, new, partial(update, "Transcoding"))
    click.echo(f"wrote      {path}, {time.monotonic() - began:.0f} s")


def transcoded(file: str, flags: dict[str, Any]) -> Path:
    """Return the checkpoint of a GGUF file in the cache folder; create it if there is none.

    flags: of the command. With `quiet` nothing is announced and no bar shown; those not in `flags` have defaults.
    """
    from ..checkpoint.gguf.cached import cached
    from .progress import bar, shows_progress

    shown = shows_progress(quiet=bool(flags.get("quiet")))
    announce = None if flags.get("quiet") else _announce
    with bar(shown=shown, of_bytes=True, left=True) as update:
        given: Any = {"config_from": flags.get("config_from"), "progress": partial(update, "Transcoding")}
        return cached(file, _options(flags), announce=announce, **given)


def _announce(prepared: Any, place: Path) -> None:
    from ..checkpoint.gguf.report import announcement, as_text
    from .terminal import print_above

    print_above(f"{as_text(prepared)}\n{announcement(prepared, place)}")


def _options(flags: dict[str, Any]) -> Any:
    from ..checkpoint.gguf.plan import GGUFOptions

    given = {"plan": flags.get("gguf_plan"), "float32": flags.get("gguf_exact"), "dtype": flags.get("dtype")}
    return GGUFOptions(**{name: value for name, value in given.items() if value})
