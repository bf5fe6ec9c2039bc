"""Define `mlx-mtp tune-heads`: train a model's MTP heads, or new ones, on the model's own choices."""

import logging
from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange, option

from .given_file import GivenFile, text_files
from .options import check_place, checkpoint_options, checkpoint_path, typed


@click.command("tune-heads")
@checkpoint_options
@option(
    "--adapter-path", multiple=True, help="Directory of LoRA adapters to apply to the target; repeatable, added up."
)
@option("--mtp-path", help="File or directory with the heads to tune, instead of the model's own.")
@option("--data", type=GivenFile(), help="*.jsonl file of texts or prompts.")
@option("--tokens", default=200_000, help="Tokens of text to record.")
@option("--epochs", type=FloatRange(0.01), default=4.0, help="Passes over the recorded text.")
@option("--out", default="mtp.safetensors", callback=check_place, help="*.safetensors file to write, for --mtp-path.")
@option("--new", is_flag=True, help="Make a new recycled head, initialised from the target's last layer.")
@typed("--depths", IntRange(1, 3), 2, "With --new: consecutive drafts that the head is trained for.")
@typed("--draft-vocab", IntRange(0), 8192, "With --new: number of different tokens that it can draft; 0 is all.")
@option(
    "--bits",
    type=Choice(["2", "3", "4", "5", "6", "8", "16"]),
    default="8",
    help="With --new: bits of its weights; 16 leaves them unquantized.",
)
@option("--rank", type=IntRange(1), help="Train only updates of this rank to the heads' quantized matrices.")
@option("--batch", "rows", type=IntRange(1), help="Rows of a batch.  [default: at most 8, as memory allows]")
@option("--dtype", type=Choice(["float32", "bfloat16"]), default="float32", help="Type of the trained weights.")
@option(
    "--learning-rate",
    "rate",
    type=FloatRange(0, min_open=True),
    help="Peak.  [default: 0.128 divided by the hidden size, with --new 0.576, with --rank 1.28; at most 1e-3]",
)
@option("--seed", type=IntRange(0, 2**31 - 1), default=0, help="Seed of the texts and of their order.")
@option("--quiet", is_flag=True, help="Print no estimate and no progress.")
@click.argument("texts", nargs=-1, metavar="[TEXTS]...", type=click.Path(exists=True, path_type=Path))
def tune_heads(model: str | None, trust_remote_code: bool, out: Path, texts: tuple[Path, ...], **given: Any) -> None:
    """Train MTP heads on what the model itself would write.

    The model reads TEXTS and --data, and writes answers to prompts in --data; without both it writes prompts and
    answers itself. Its hidden rows and its most likely next tokens are recorded in a folder next to --out, and the
    heads are trained to draft these tokens; the model does not change. About a sixteenth of the texts is held out, to
    measure the heads. The file is written only if the tokens per cycle on these texts rise. Ctrl-C keeps the best
    heads so far; the same command continues an interrupted run.

    A line of --data is a JSON object with text, with messages, or with prompt and, if the model is not to write it,
    completion.
    """
    from ..checkpoint.load import load
    from ..training.settings import TuneSettings
    from ..training.tune import tune_heads as tune
    from .progress import loading, shows_progress, stages
    from .terminal import print_above

    quiet, names = given.pop("quiet"), [*texts, *([data] if (data := given.pop("data")) else [])]
    adapters, mtp_path = list(given.pop("adapter_path")) or None, given.pop("mtp_path")
    bits, vocab = int(given.pop("bits")), given.pop("draft_vocab")
    settings = TuneSettings(bits=None if bits == 16 else bits, draft_vocab=vocab or None, **given)
    settings.check()
    files = [file for name in names for file in text_files(name)]
    if names and not files:
        raise click.BadParameter(f"no files in {', '.join(map(str, names))}", param_hint="TEXTS")
    path = checkpoint_path(model, code=trust_remote_code)
    with loading(shown=shows_progress(quiet=quiet)):
        logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings about long texts are false
        config = {"trust_remote_code": True} if trust_remote_code else {}
        heads: dict[str, Any] = {"mtp": False} if settings.new else {"mtp_path": mtp_path}
        loaded, tokenizer = load(path, config, adapter_path=adapters, kernels="off", **heads)
    with stages(quiet=quiet, left=True) as update:
        tuned = tune(
            loaded,
            tokenizer,
            files or None,
            out=out,
            settings=settings,
            confirm=None if quiet else lambda costs: print_above(f"Estimate: {costs}"),
            progress=update,
        )
    for line in tuned.lines():
        click.echo(line)
    if tuned.file and not quiet:
        click.echo(f"Use them with: --mtp-path {tuned.file}", err=True)
