"""Open the benchmarked model, a checkpoint or a config.json's shape with random weights, and create prompts.

Acceptance may be drawn at random: the heads run at their usual cost, but the target's tokens are replaced so that
drafts are accepted at given rates. Such texts have no meaning. A rate is the share of a depth's drafts that are
accepted; a draft is accepted only with all earlier ones, so no rate exceeds the previous one.
"""

import itertools
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoint.chat_template import about_pictures, render
from ..checkpoint.gguf.cached import find_checkpoint
from ..checkpoint.load import load
from ..decoding import step as one_step
from ..decoding.members import Members
from ..decoding.policy import Learned, kernels_of
from ..decoding.prefill_chunk import prefill_chunk
from ..demo import demo_path
from ..layers.target import Target
from ..pictures.prompt import opened
from ..pictures.rows import Picture
from ..tuning.costs import dense
from ..tuning.kernel_switch import switch_on
from ..tuning.kernel_trials import requested
from .random_model import random_model

DEMO = "demo"


class NothingRemembered:
    """Replaces the store of a model's measured costs, so that a benchmark neither uses nor stores any."""

    def recall(self, *_: Any) -> None:
        """Return None, and store nothing."""

    recall_compiled = keep = recall


def reset_costs(model: Any) -> None:
    """Drop a model's measured costs and recorded cycles; new costs are not stored on disk from now on."""
    nothing: Any = NothingRemembered()
    model.runtime.learned = Learned(kernels_of(model), nothing, nothing, dense)
    model.runtime.recorder = None


@dataclass
class Subject:
    """A model to measure.

    tokenizer: None with random weights.
    facts:     for a result's "model"; its `synthetic` describes what is not real, or is None.
    rates:     drawn acceptance per depth; empty for the heads' own.
    """

    model: Any
    tokenizer: Any
    facts: dict[str, Any]
    rates: tuple[float, ...] = ()

    @property
    def synthetic(self) -> str | None:
        return self.facts["synthetic"]

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text; none if texts have no meaning."""
        return () if self.synthetic else tuple(sorted(self.tokenizer.eos_token_ids))

    def acceptance(self) -> AbstractContextManager[None]:
        """Draw acceptance inside the block if there are rates; everything that drafts must run there."""
        return drawn_acceptance(self.rates) if self.rates else nullcontext()


def open_subject(
    model: str | Path | None = None,
    config: Path | None = None,
    *,
    path: Path | None = None,
    layers: int | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mtp: bool = True,
    kernels: str | None = None,
    synth_rates: Sequence[float] = (),
    tensor_group: Any = None,
    **more: Any,
) -> Subject:
    """Load a checkpoint (a directory, a hub name, "demo", or None for the demo), or create a model of a config.json.

    A GGUF file is transcoded. path: the checkpoint's directory, if the caller has found or transcoded it; None: it is
    found by `model`. layers, bits, group_size: of the random model, see `random_model`; with a checkpoint
    `layers` is an error, and the other two are ignored. kernels: as in `load`. tensor_group, more: arguments of
    `load`; with config they are errors, except a False, (), None, and `vision`. mtp: with the MTP heads.
    synth_rates: shares of drafts to accept per depth; see `drawn_acceptance`.
    Raises a one-line ValueError for what cannot be loaded or combined.
    """
    rates = check_rates(synth_rates) if synth_rates else ()
    if config is not None:
        if given := [name for name, value in {"model": model, **more}.items() if value and name != "vision"]:
            raise ValueError(
                f"config={config}: not together with a checkpoint or its parts ({given[0]}); leave one out"
            )
        if tensor_group is not None:
            raise ValueError(f"config={config}: a drawn model is not split over ranks; allowed is a checkpoint")
        found = random_model(config, layers=layers, bits=bits, group_size=group_size, mtp=mtp)
        tokenizer, name = None, config.resolve().parent.name if config.name == "config.json" else config.stem
        on, not_exact = switch_on(found, requested(kernels))
        found.runtime.note(kernels=on, not_exact=not_exact, prefill_chunk=prefill_chunk(found, {}))
        label = "random weights" if layers is None else f"random weights, the first {layers} layers only"
    else:
        if layers is not None:
            omit = "give config instead of a checkpoint, or omit layers"
            raise ValueError(f"layers={layers}: only for random weights; {omit}")
        if path is None:
            path = demo_path() if model in (None, DEMO) else find_checkpoint(model)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, tokenizer = load(path, mtp=mtp, kernels=kernels, tensor_group=tensor_group, **more)
        name, label = DEMO if path == demo_path() else Path(model or DEMO).resolve().name, None
    if rates and not found.mtp:
        raise ValueError(f"synth_rates={rates}: the model has no heads that draft; allowed is none")
    drawn = f"acceptance drawn at {', '.join(map(str, rates))}" if rates else None
    of, synthetic = found.report, "; ".join(filter(None, (label, drawn))) or None
    counted = "family", "layers", "heads", "target_bytes", "head_bytes", "target_quantization"
    facts = {"name": name, **{what: getattr(of, what) for what in counted}}
    facts |= {"head_quantization": of.head_quantization if of.heads else None, "dtype": dtype_of(found)}
    facts |= {"max_draft_tokens": found.max_draft_tokens, "synthetic": synthetic}
    facts |= {"kernels": list(of.kernels), "not_exact": list(of.not_exact)}
    reset_costs(found)
    return Subject(found, tokenizer, facts, rates)


def dtype_of(model: nn.Module) -> str:
    """Return the name of the type of activations: the widest type of the model's vectors, such as norms."""
    arrays: Any = tree_flatten(model.parameters())
    found = {a.dtype for _, a in arrays if a.ndim == 1 and mx.issubdtype(a.dtype, mx.floating)}
    widest = max(found, key=lambda dtype: dtype.size, default=mx.float32)
    return str(widest).rpartition(".")[2]


POSITIONS = 8191  # draws depend on the position modulo this, so that replays and repeated runs use the same
DEPTHS = 16


def check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the rates, one per depth, as a tuple; ValueError for one outside 0 to 1 or above the previous one."""
    if wrong := [rate for rate in rates if not 0 <= rate <= 1]:
        raise ValueError(f"synth_rates={wrong[0]}: allowed is between 0 and 1")
    if risen := [pair for pair in itertools.pairwise(rates) if pair[1] > pair[0]]:
        raise ValueError(f"synth_rates={risen[0][1]}: allowed is at most {risen[0][0]}, the rate of the depth before")
    return tuple(rates)


def rate_at(rates: Sequence[float], depth: int) -> float:
    """Return the rate at a depth, from 0; after the last given rate, each is the one before times a constant ratio.

    The ratio is that of the last two given rates; of a single rate it is this rate itself.
    """
    if depth < len(rates):
        return rates[depth]
    last, before = rates[-1], rates[-2] if len(rates) > 1 else 1.0
    return last * (last / before if before else 0.0) ** (depth + 1 - len(rates))


def draws(rates: Sequence[float], seed: int) -> mx.array:
    """Return bool [POSITIONS, DEPTHS], drawn: whether the draft at a depth of the cycle at a position is accepted."""
    chances = mx.array([rate_at(rates, depth) for depth in range(DEPTHS)])
    return mx.random.uniform(shape=(POSITIONS, 1), key=mx.random.key(seed)) < chances


@contextmanager
def drawn_acceptance(rates: Sequence[float]) -> Iterator[None]:
    """Make every verify inside accept drafts as drawn; this adds a few operations on k numbers per cycle.

    An accepted draft replaces the target's token; for a rejected draft that equals it, another token does.
    """
    right, pick = draws(rates, 0), one_step.pick
    mx.eval(right)

    def forced(
        model: Target, hidden: mx.array, position: Any, drafts: mx.array | None, members: Members, *masks: Any
    ):
        tokens, logprobs = pick(model, hidden, position, drafts, members, *masks)
        if drafts is None:
            return tokens, logprobs
        rows, k = right[mx.array(position).reshape(-1) % POSITIONS], drafts.shape[1]
        other = mx.where(tokens[:, :k] == drafts, (drafts + 1) % model.vocab_size, tokens[:, :k])
        return mx.concatenate([mx.where(rows[:, :k], drafts, other), tokens[:, k:]], axis=1), logprobs

    one_step.pick = forced
    try:
        yield
    finally:
        one_step.pick = pick


FILE = Path(__file__).parent / "prompts.json"


@dataclass(frozen=True)
class BenchPrompt:
    """Token ids of one prompt of a category.

    context: the maximum length that it was padded to, 0 if it was not. grammar: compiled, which the answer must fit;
    None without one. pictures: those among the tokens.
    """

    category: str
    tokens: list[int]
    context: int = 0
    grammar: Any = None
    pictures: tuple[Picture, ...] = ()


def make_prompts(
    tokenizer: Any, vocab_size: int, *, each: int, context: int = 0, only: Iterable[str] = ()
) -> list[BenchPrompt]:
    """Return up to `each` prompts of every category, or of `only` these, with text in front up to `context` tokens.

    context: 0 for prompts as they are; else a prompt has at most that many tokens, usually just as many.
    tokenizer: None for `each` prompts of `context` (0: 128) random tokens in a category of their own; `only` is then
    ignored. Raises ValueError for an unknown category, or a context that is shorter than a prompt.
    """
    if tokenizer is None:
        length = context or 128
        drawn: Any = mx.random.randint(0, vocab_size, (each, length), key=mx.random.key(0)).tolist()
        return [BenchPrompt("random_tokens", tokens, context) for tokens in drawn]
    known: dict[str, list[str]] = json.loads(FILE.read_text())
    if unknown := sorted(set(only) - known.keys()):
        raise ValueError(f"categories={unknown[0]}: allowed are {', '.join(known)}")
    chosen = [(name, text) for name in known if not only or name in only for text in known[name][:each]]
    return [BenchPrompt(name, padded(tokenizer, text, context), context) for name, text in chosen]


def picture_prompts(subject: Subject, images: Sequence[Any], resize_shape: Any = None) -> list[BenchPrompt]:
    """Return a prompt for each image, in the category "pictures". resize_shape: as in `stream_generate`.

    Raises ValueError for a model that reads no pictures, for one with random weights, which has no tokenizer, and as
    `pictures.prompt.opened` for an image or a resize_shape.
    """
    if subject.tokenizer is None:
        raise ValueError("pictures need a tokenizer; random weights have none: give a checkpoint with --model")
    pictures, vision = opened(subject.model, images, resize_shape), subject.model.vision
    tokens = [about_pictures(subject.tokenizer, (picture,), vision) for picture in pictures]
    pairs = zip(tokens, pictures, strict=True)
    return [BenchPrompt("pictures", each, pictures=(picture,)) for each, picture in pairs]


def padded(tokenizer: Any, text: str, context: int) -> list[int]:
    """Encode a message after as much source code as fits into `context` tokens; 0: the message alone.

    Raises ValueError if the message alone is longer.
    """
    tokens = encode(tokenizer, text)
    if not context:
        return tokens
    if len(tokens) > context:
        raise ValueError(f"contexts={context}: too short for a prompt; allowed is {len(tokens)} tokens or more")
    best, characters = tokens, 3 * (context - len(tokens))
    for _ in range(8):  # corrections of the padding's length
        found = encode(tokenizer, f"{filler(characters)}\n\n{text}")
        if len(best) < len(found) <= context:
            best = found
        missing = context - len(found)
        if 0 <= missing < 4:
            break
        per_token = characters / max(1, len(found) - len(tokens))
        characters = max(0, characters + int(missing * per_token) - (missing < 0))
    return best


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a message, with the chat template if there is one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode(render(tokenizer, messages, {"add_generation_prompt": True}), add_special_tokens=False)


def filler(characters: int) -> str:
    """Return this number of characters of source code of Python's standard library, at most all of the library."""
    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= characters:
            break
        text += file.read_text(errors="replace")
    return text[:characters]
