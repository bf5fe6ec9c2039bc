"""Define `mlx-mtp verify-lossless`: compare output with and without drafts, for this model on this machine."""

import json
import sys
from typing import Any

import click
from click import IntRange, option

from .image_options import WithImages, image_options
from .next_command import after_verify
from .options import load_model, model_options

TOKENS = 24  # default number of new tokens: the demo takes a minute on a slow CPU


@click.command("verify-lossless", cls=WithImages)
@model_options
@option("--max-tokens", "-m", type=IntRange(1), default=TOKENS, help="Maximum tokens of a text.")
@option("--draws", type=IntRange(20), default=24, help="Number of sampled texts for the test of distributions.")
@option("--seed", type=IntRange(0, 2**62), default=0, help="Seed of all draws.")
@option("--diagnose/--no-diagnose", default=True, help="Try other wirings of the heads.")
@option("--float32", is_flag=True, help="Compute in float32 with MLX's own kernels; any difference is then a bug.")
@image_options
@option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def verify_lossless(**flags: Any) -> None:
    """Check that drafting does not change the output.

    Greedy output is compared for built-in prompts with 1 to --num-draft-tokens drafts, lookups, --draft-p-min, draft
    trees and adaptive drafting. Every difference is listed with both tokens' logits from a forward pass of the
    target; it is a near-tie if rounding can explain it. Sampled output must depend only on the seed, and have the
    target's probabilities. For the heads the command measures the share of correct predictions, and whether
    another wiring increases it.

    With --image, greedy and sampled output is also compared for a prompt with each picture and, if there are several,
    for one with all of them.

    A model with a vision tower is also tested with 12 pairs of drawn pictures, which differ in the side or the colour
    of a square: each picture must make its own answer more likely than the other picture's. One pair may fail. This
    tests the wiring of pictures, not exactness; --no-vision leaves it out.

    `mlx-mtp doctor` checks each kernel, which may be the cause of a divergence; `mlx-mtp bench decode` measures the
    speed with and without drafts.

    Exit codes: 0 if lossless, 1 if output diverged, heads or pictures are wired wrongly or something failed, 2
    for a wrong command line.
    """
    if not (flags["mtp"] or flags["draft_model"]) or flags["num_draft_tokens"] == 0:
        wrong = "without drafts there is nothing to verify; leave out --no-mtp and --num-draft-tokens 0"
        raise click.UsageError(wrong)
    model, tokenizer = _load(flags)
    from ..lossless.check import CheckSettings, verify
    from ..pictures.prompt import opened
    from .progress import stages

    settings = CheckSettings(
        drafts=_drafts(model, flags["num_draft_tokens"]),
        p_min=flags["draft_p_min"],
        lookup=flags["prompt_lookup"] is not False,
        compiled=bool(flags["compile_cycles"]),
        trees=CheckSettings.trees if flags["tree"] is None else flags["tree"],
        **{name: flags[name] for name in ("max_tokens", "draws", "seed", "adaptive", "diagnose")},
    )
    pictures = opened(model, flags["images"], flags["resize_shape"])
    with stages(quiet=flags["as_json"]) as progress:
        verdict = verify(model, tokenizer, settings, progress, pictures)
    _print(model, tokenizer, verdict, flags)
    sys.exit(1 if verdict.broken else 0)


def _print(model: Any, tokenizer: Any, verdict: Any, flags: dict[str, Any]) -> None:
    """Print the result as tables and a line with the next command, or with --json as one JSON object."""
    from .verify_tables import as_dict, show

    if flags["as_json"]:
        click.echo(json.dumps(as_dict(model, verdict)))
    else:
        show(model, tokenizer, verdict)
        if ranks := model.ranks:
            click.echo(f"on {ranks.size} ranks; on another number of them near-ties may be decided otherwise")
        click.echo(after_verify(verdict.diverged, flags))


def _load(flags: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model and its tokenizer; with --float32 in float32, without our kernels.

    Raises UsageError for --float32 with --kernels other than off.
    """
    flags = {**flags, "quiet": flags["as_json"]}
    if not flags["float32"]:
        return load_model(flags)
    if flags["kernels"] not in (None, "off"):
        raise click.UsageError(f"--float32 uses no kernels; leave out --kernels {flags['kernels']}")
    model, tokenizer = load_model({**flags, "kernels": "off"})
    import mlx.core as mx

    model.set_dtype(mx.float32)
    return model, tokenizer


def _drafts(model: Any, asked: int | None) -> int:
    """Return the maximum drafts per cycle: `asked`, or the model's default; 0 without heads, for lookup only.

    Raises ValueError for more drafts than the model supports, or if no drafting is supported for it.
    """
    from ..decoding.options import default_draft_tokens

    most = model.max_draft_tokens
    if not hasattr(model, "spec"):
        raise ValueError(
            f"model_type {model.report.family!r} does not support drafting: there is nothing to verify; "
            "give a model of a supported family"
        )
    if asked is not None and asked > most:
        allowed = f"1 to {most} with this model" if most else "none, as no MTP heads are loaded"
        raise ValueError(f"num_draft_tokens={asked}: allowed is {allowed}")
    return default_draft_tokens(model) if asked is None else asked
