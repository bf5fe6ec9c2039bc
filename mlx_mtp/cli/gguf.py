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
    from .progress import loading, shows_progress

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
    with _bar(shown=shown) as update:
        path = transcode(prepared, new, partial(update, ""))
    click.echo(f"wrote      {path}, {time.monotonic() - began:.0f} s")


def transcoded(file: str, flags: dict[str, Any]) -> Path:
    """Return the checkpoint of a GGUF file in the cache folder; create it if there is none.

    flags: of the command. With `quiet` nothing is announced and no bar shown; those not in `flags` have defaults.
    """
    from ..checkpoint.gguf.cached import cached
    from .progress import shows_progress

    shown = shows_progress(quiet=bool(flags.get("quiet")))
    announce = None if flags.get("quiet") else _announce
    with _bar(shown=shown) as update:
        return cached(
            file,
            _options(flags),
            config_from=flags.get("config_from"),
            announce=announce,
            progress=partial(update, ""),
        )


def _announce(prepared: Any, place: Path) -> None:
    from ..checkpoint.gguf.report import announcement, as_text
    from .terminal import print_above

    print_above(f"{as_text(prepared)}\n{announcement(prepared, place)}")


def _options(flags: dict[str, Any]) -> Any:
    from ..checkpoint.gguf.plan import Options

    given = {"plan": flags.get("gguf_plan"), "float32": flags.get("gguf_exact"), "dtype": flags.get("dtype")}
    return Options(**{name: value for name, value in given.items() if value})


def _bar(*, shown: bool) -> Any:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    from .progress import bar

    return bar(
        TextColumn("Transcoding"), BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn(), shown=shown
    )
