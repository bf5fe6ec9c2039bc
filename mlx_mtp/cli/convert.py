"""Define `mlx-mtp convert`: convert a hub checkpoint for MLX with its heads, or write the heads alone."""

from functools import partial
from typing import Any

import click
from click import Choice, option

from .gguf import convert_gguf, gguf_options
from .options import BITS, options, refuse

RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
OF_QUANTIZED = ("q_group_size", "q_bits", "q_mode", "quant_predicate")
OF_GGUF = ("gguf", "config_from", "gguf_plan", "gguf_exact")
OF_HEADS = ("mtp_only", "mtp_q_bits", "mtp_q_group_size")
OF_TARGET = ("mlx_path", "mtp_layout", "quantize", "dequantize", *OF_QUANTIZED)


def refuse_upload(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    """Refuse --upload-repo, because this program uploads nothing."""
    if value is not None:
        raise click.BadParameter(f"{value}: nothing is uploaded from here; `hf upload {value} MLX_PATH` does it")


@click.command()
@option("--hf-path", "--model", help="Local directory, GGUF file or Hugging Face repository.")
@option("--gguf", help="GGUF file to transcode; of a split file, the first part.")
@options(*gguf_options)
@option("--mlx-path", help="Directory to write, new or empty.  [default: mlx_model]")
@option("--quantize", "-q", is_flag=True, help="Quantize the target, and the heads to 8 bits.")
@option("--q-group-size", type=Choice(["16", "32", "64", "128"]), help="Group size of the target.  [default: 64]")
@option("--q-bits", type=BITS, help="Bits per weight of the target.  [default: 4]")
@option("--q-mode", type=Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), help="Quantization mode.  [default: affine]")
@option("--quant-predicate", type=Choice(RECIPES), help="Recipe with mixed bits.")
@option("--dequantize", "-d", is_flag=True, help="Dequantize target and heads.")
@option(
    "--dtype",
    type=Choice(["float16", "bfloat16", "float32"]),
    help="Type of unquantized weights.  [default: config.json's torch_dtype, else unchanged]",
)
@option(
    "--mtp-q-bits",
    type=Choice([*BITS.choices, "16"]),
    help="Bits of the heads; 16 leaves them unchanged.  [default: 8 if the target is quantized, else unchanged]",
)
@option("--mtp-q-group-size", type=Choice(["32", "64", "128"]), help="Group size of the heads.  [default: 64]")
@option(
    "--mtp-layout",
    type=Choice(["sidecar", "shards"]),
    help="Heads in mtp.safetensors, which mlx-lm ignores, or in the target's files.  [default: sidecar]",
)
@option("--mtp-only", is_flag=True, help="Write only the heads, to --mtp-path.")
@option(
    "--mtp-path",
    help="With --mtp-only: a new file, or the directory of a conversion. With --gguf: file of the heads.",
)
@option("--vision-only", is_flag=True, help="Write only the vision tower, to --vision-path.")
@option("--vision-path", help="With --vision-only: a new file, or the directory of a conversion.")
@option("--revision", help="Branch, tag or commit on the hub.")
@option("--upload-repo", callback=refuse_upload, expose_value=False, hidden=True)
@option("--trust-remote-code", is_flag=True, hidden=True)  # downloads the code; none is run
def convert(**flags: Any) -> None:
    """Convert a checkpoint for MLX with its MTP heads.

    A vision tower is copied unchanged, to vision.safetensors. The heads have their own quantization, because few bits
    in a head cost accepted drafts. A conversion needs memory for the largest tensor only. An interrupted conversion
    leaves nothing that looks complete. A GGUF file keeps its blocks (docs/gguf.md).
    """
    if flags["gguf"] or str(flags["hf_path"]).endswith(".gguf"):
        return convert_gguf(_of_gguf(flags))
    _check(flags)
    from .progress import bar, loading, shows_progress

    shown, only_heads = shows_progress(quiet=False), flags.pop("mtp_only")
    only_tower = flags.pop("vision_only")
    if only_heads or only_tower:
        flags.pop("trust_remote_code")  # they need no tokenizer
    with loading(shown=shown):
        from ..checkpoint.convert import convert as convert_all
        from ..checkpoint.convert import extract_heads
        from ..checkpoint.convert_vision import extract_vision
    given = {name: value for name, value in flags.items() if value not in (None, False) and name not in OF_GGUF}
    given |= {name: int(value) for name, value in given.items() if name.endswith(("_bits", "_size"))}
    with bar(shown=shown, of_bytes=True, left=True) as update:
        function: Any = extract_heads if only_heads else extract_vision if only_tower else convert_all
        done = function(**given, progress=partial(update, "Converting"))
    click.echo(f"wrote      {done.path}")
    lines = [f"vision     {done.summary}"] if only_tower else str(done.report).splitlines()
    click.echo("\n".join(line for line in lines if not (only_heads and line.startswith("target"))))


def _of_gguf(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags with the file as `gguf`; raise UsageError for flags that do not apply to a GGUF file."""
    if flags["gguf"] and flags["hf_path"]:
        raise click.UsageError("--gguf and --hf-path: give only one")
    others = (*OF_TARGET[1:], *OF_HEADS, "vision_only", "vision_path", "revision")  # --mlx-path is for both
    refuse(flags, others, "{}: not for a GGUF file; leave it out")
    return {**flags, "gguf": flags["gguf"] or flags["hf_path"]}


def _check(flags: dict[str, Any]) -> None:
    """Raise UsageError for flags that would have no effect, and for missing ones.

    Needed are --hf-path, and --mtp-only and --mtp-path, or --vision-only and --vision-path, together.
    """
    if not flags["hf_path"]:
        raise click.UsageError("--hf-path or --gguf is missing")
    refuse(flags, OF_GGUF, "{}: only for a GGUF file")
    if flags["mtp_only"] != (flags["mtp_path"] is not None):
        raise click.UsageError("--mtp-only and --mtp-path: give both or neither")
    if flags["vision_only"] != (flags["vision_path"] is not None):
        raise click.UsageError("--vision-only and --vision-path: give both or neither")
    if flags["vision_only"]:
        refuse(flags, (*OF_TARGET, *OF_HEADS, "dtype"), "{}: not with --vision-only; the tower is copied unchanged")
    elif flags["mtp_only"]:
        refuse(flags, OF_TARGET, "{}: not with --mtp-only; --mtp-q-bits is for the heads")
    elif not flags["quantize"]:
        refuse(flags, OF_QUANTIZED, "{}: only with -q")
