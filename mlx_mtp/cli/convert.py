"""`mlx-mtp convert`: a hub checkpoint for MLX, with its heads, or its heads alone."""

import contextlib
from collections.abc import Iterator
from typing import Any

import click

from .options import BITS, options

RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
GROUPS = click.Choice(["32", "64", "128"])


def refuse_upload(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    """Callback: this program sends nothing anywhere."""
    if value is not None:
        raise click.BadParameter(f"{value}: nothing is uploaded from here; `hf upload {value} MLX_PATH` does it")


target_options = options(
    click.option("--quantize", "-q", is_flag=True, help="Quantize the target, and the heads in 8 bits."),
    click.option("--q-group-size", type=click.Choice(["16", "32", "64", "128"]), help="Group size.  [default: 64]"),
    click.option("--q-bits", type=BITS, help="Bits per weight.  [default: 4]"),
    click.option(
        "--q-mode",
        type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]),
        help="Quantization mode.  [default: affine]",
    ),
    click.option("--quant-predicate", type=click.Choice(RECIPES), help="Recipe of mixed bits."),
    click.option("--dequantize", "-d", is_flag=True, help="Dequantize target and heads."),
)
head_options = options(
    click.option(
        "--mtp-q-bits",
        type=click.Choice([*BITS.choices, "16"]),
        help="Bits of the heads; 16 leaves them as they are.  [default: 8 with -q, else as they are]",
    ),
    click.option("--mtp-q-group-size", type=GROUPS, help="Group size of the heads.  [default: 64]"),
    click.option(
        "--mtp-layout",
        type=click.Choice(["sidecar", "shards"]),
        help="Heads in mtp.safetensors, which mlx-lm does not read, or in the target's files.  [default: sidecar]",
    ),
    click.option("--mtp-only", is_flag=True, help="Write the heads alone, to --mtp-path."),
    click.option("--mtp-path", help="With --mtp-only: new file, or the directory of a conversion to go with."),
)


@click.command()
@click.option("--hf-path", "--model", required=True, help="Local directory or Hugging Face repository.")
@click.option("--mlx-path", help="Directory to write, new or empty.  [default: mlx_model]")
@target_options
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Type of what is not quantized.  [default: config.json's torch_dtype, else as it is]",
)
@head_options
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--upload-repo", callback=refuse_upload, expose_value=False, hidden=True)
@click.option("--trust-remote-code", is_flag=True, expose_value=False, hidden=True)  # none is run
def convert(**flags: Any) -> None:
    """Convert a checkpoint for MLX and keep its MTP heads.

    Target and heads are quantized apart: few bits in a head cost accepted drafts. Memory in use stays that of the
    largest tensor; what is interrupted leaves nothing that looks finished.
    """
    _check(flags)
    from .progress import loading, shows_progress

    shown = shows_progress(quiet=False)
    with loading(shown=shown):
        from ..checkpoint.convert import convert as convert_all
        from ..checkpoint.convert import extract_heads
    numbers = ("q_group_size", "q_bits", "mtp_q_group_size", "mtp_q_bits")
    given: dict[str, Any] = {name: int(flags[name]) if flags[name] else None for name in numbers}
    with _bar(shown=shown) as progress:
        kept = {"dtype": flags["dtype"], "revision": flags["revision"], "progress": progress}
        heads = {name: given[name] for name in ("mtp_q_group_size", "mtp_q_bits")}
        if flags["mtp_only"]:
            done = extract_heads(flags["hf_path"], flags["mtp_path"], **heads, **kept)
        else:
            defaults = {"quantize": False, "quant_predicate": None, "dequantize": False}
            defaults |= {"q_mode": "affine", "mtp_layout": "sidecar"}
            kept |= {name: flags[name] or default for name, default in defaults.items()}
            new = "mlx_model" if flags["mlx_path"] is None else flags["mlx_path"]
            done = convert_all(flags["hf_path"], new, **given, **kept)
    click.echo(f"wrote      {done.path}")
    lines = str(done.report).splitlines()
    click.echo("\n".join(line for line in lines if not (flags["mtp_only"] and line.startswith("target"))))


def _check(flags: dict[str, Any]) -> None:
    """Flags that would be without effect."""
    named = {name: "--" + name.replace("_", "-") for name in flags}
    of_quantized = ("q_group_size", "q_bits", "q_mode", "quant_predicate")
    if flags["mtp_only"] != (flags["mtp_path"] is not None):
        raise click.UsageError("--mtp-only and --mtp-path: the one needs the other")
    of_target = ("mlx_path", "mtp_layout", "quantize", "dequantize", *of_quantized)
    useless = () if flags["quantize"] else of_quantized
    if given := next((name for name in (of_target if flags["mtp_only"] else useless) if flags[name]), None):
        why = "not with --mtp-only; --mtp-q-bits is the heads'" if flags["mtp_only"] else "only with -q"
        raise click.UsageError(f"{named[given]}: {why}")


@contextlib.contextmanager
def _bar(*, shown: bool) -> Iterator[Any]:
    """A function that is told bytes written and to write, and shows them on stderr."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("Converting"), BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
