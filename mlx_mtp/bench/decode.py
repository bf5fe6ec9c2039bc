"""Time mlx-lm's loop, our plain loop, fixed numbers of drafts, and adaptive drafting, one after another by prompt.

A speed is the number of tokens after the first, divided by the time since the first; the prefill is timed separately.
"adaptive" is the default of our loop: it measures costs while it generates, and keeps them for the next prompt.
Under grammars the loops are ours alone: plain, plain without the grammar, and with drafts of the heads, of the
grammar, and of both.
All runs start from the same state: each loop prefills a prompt without its last token once, and each of the loop's
generations continues a copy of that cache.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as mlx_lm_generate_step
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..cache.make_cache import make_prompt_cache
from ..decoding.drafters import GRAMMAR_DRAFTS
from ..decoding.policy import fixed_nodes, tree_reason
from ..decoding.ranges import OPTIONS
from ..decoding.stats import Stats
from ..generate import generate_step
from ..machine.errors import first_line
from ..machine.ranges import check
from . import timing
from .result import result
from .subject import BenchPrompt, Subject, reset_costs

PLAIN, ADAPTIVE, MLX_LM = "plain", "adaptive", "mlx-lm"
FREE = "no grammar"  # the plain loop without the grammar that the other loops have
USUAL_DRAFTS = 3  # maximum of the default fixed numbers of drafts
WARMUPS = 3  # warm-up runs on the first prompt of each setting

Progress = Callable[[str, int, int], None]  # receives what is next, the number done, and the total


@dataclass(frozen=True)
class LoopSettings:
    """Options shared by all loops.

    kv_bits, mtp_kv_bits: of the target's and heads' caches, None: not quantized. grammar: compiled, which all of our
    loops except FREE follow; None without one. pictures: of the prompt.
    """

    max_tokens: int = 128
    temp: float = 0.0
    seed: int = 0
    stop_tokens: Collection[int] = ()
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    mtp_kv_bits: int | None = None
    kv_group_size: int = 64
    grammar: Any = None
    pictures: tuple[Any, ...] = ()


@dataclass
class MlxLm:
    """mlx-lm's own loop on its own model class (see `twin`). weights: bytes of the weights that the loop uses."""

    model: Any
    name: str = "mlx-lm"
    weights: int = 0
    stats: Stats | None = None

    def new_cache(self, settings: LoopSettings) -> Any:
        return mlx_lm_make_prompt_cache(self.model)

    def tokens(self, prompt: list[int], cache: Any, max_tokens: int, settings: LoopSettings) -> Iterator[int]:
        if settings.pictures:
            raise ValueError("mlx-lm reads no pictures")
        mx.random.seed(settings.seed)
        sampler = make_sampler(settings.temp) if settings.temp else None
        options: dict[str, Any] = {"max_tokens": max_tokens, "sampler": sampler, "prompt_cache": cache}
        options |= {name: getattr(settings, name) for name in ("prefill_step_size", "kv_bits", "kv_group_size")}
        for token, _ in mlx_lm_generate_step(mx.array(prompt), self.model, quantized_kv_start=0, **options):
            yield token  # type: ignore[misc] - an int, contrary to its annotation
            if token in settings.stop_tokens:
                return


@dataclass
class Ours:
    """Our loop with options of `generate_step`. drafts: maximum per cycle, None: default. stats: of its last run."""

    model: Any
    name: str
    drafts: int | None
    options: dict[str, Any] = field(default_factory=dict)
    weights: int = 0
    stats: Stats | None = None

    def new_cache(self, settings: LoopSettings) -> Any:
        layout: dict[str, Any] = {"kv_bits": settings.kv_bits, "kv_group_size": settings.kv_group_size}
        layout["mtp_kv_bits"] = None if self.drafts == 0 else settings.mtp_kv_bits
        return make_prompt_cache(self.model, num_draft_tokens=self.drafts, **layout)

    def tokens(self, prompt: list[int], cache: Any, max_tokens: int, settings: LoopSettings) -> Iterator[int]:
        self.stats = Stats()
        options = {name: getattr(settings, name) for name in ("prefill_step_size", "temp", "seed", "stop_tokens")}
        options |= {"max_tokens": max_tokens, "num_draft_tokens": self.drafts, "prompt_cache": cache, **self.options}
        options["grammar"] = None if self.name == FREE else settings.grammar
        options["pictures"] = settings.pictures
        return (token for token, *_ in generate_step(prompt, self.model, stats=self.stats, **options))


Loop = MlxLm | Ours


def twin(model: Any) -> Any:
    """Return an instance of mlx-lm's model class that shares the arrays of our target and so needs no memory.

    Raises ValueError if the class has other parameters or cannot run, or the model is split over ranks.
    """
    if model.ranks:
        raise ValueError("mlx-lm's loop does not run on this model, which is split over ranks")
    base: Any = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("mlx_lm.models."))
    theirs = base(model.args)
    arrays: Any = tree_flatten(model.parameters())
    modules: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if "scales" in m]
    quantized = {path: {"group_size": m.group_size, "bits": m.bits, "mode": m.mode} for path, m in modules}
    nn.quantize(theirs, class_predicate=lambda path, _: quantized.get(path, False))
    try:
        theirs.load_weights([(name, array) for name, array in arrays if not name.startswith(("mtp.", "drafter."))])
        theirs.eval()
        theirs(mx.zeros((1, 1), mx.int32), cache=mlx_lm_make_prompt_cache(theirs))  # builds the graph only
    except Exception as e:  # mlx-lm raises many types
        raise ValueError(f"mlx-lm's {base.__module__} cannot run this model: {first_line(e)}") from e
    return theirs


@dataclass(frozen=True)
class TimedRun:
    """One generation: its tokens, seconds from the first to the last, peak bytes, and statistics."""

    tokens: list[int]
    seconds: float
    peak: int
    stats: Stats | None


@dataclass
class PrefilledLoop:
    """A loop whose `read` prefills all tokens of a prompt but the last; each `run` continues a copy of that cache.

    seconds, peak: of the prefill.
    """

    loop: Loop
    prompt: list[int]
    settings: LoopSettings
    cache: Any = None
    seconds: float = 0.0
    peak: int = 0

    def read(self) -> "PrefilledLoop":
        held = _begin()
        self.cache = self.loop.new_cache(self.settings)
        tic = time.perf_counter()
        if self.prompt[1:]:
            for _ in self.loop.tokens(self.prompt[:-1], self.cache, 0, self.settings):
                raise AssertionError("a token although none was requested")
            mx.synchronize()
            self.seconds = time.perf_counter() - tic
        self.peak = mx.get_peak_memory() - held + self.loop.weights
        return self

    def run(self) -> TimedRun:
        """Generate once from a copy of the cache; the peak counts the loop's weights, cache and temporary arrays."""
        held = _begin()
        model = self.loop.model
        cache = copy.deepcopy(self.cache, {id(model): model})
        tokens, seconds = timed(self.loop.tokens(self.prompt[-1:], cache, self.settings.max_tokens, self.settings))
        mx.synchronize()  # submitted work must not count in the next turn
        return TimedRun(tokens, seconds, mx.get_peak_memory() - held + self.loop.weights, self.loop.stats)


def timed(steps: Iterator[int]) -> tuple[list[int], float]:
    """Return all tokens of an iterator with at least one, and the seconds from the first to the last."""
    tokens = [next(steps)]
    tic = time.perf_counter()
    tokens.extend(steps)
    return tokens, time.perf_counter() - tic


def _begin() -> int:
    """Start measuring peak memory; return the bytes in use now."""
    mx.synchronize()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def entry_of(prompt: BenchPrompt, reader: PrefilledLoop, runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Return a dict about one loop on one prompt; lists have a value per round, those about cycles none for mlx-lm.

    context: the length that the prompt was padded to, or 0. read_seconds: of the prefill without the last token.
    text: a digest of the first round's tokens. tokens: number of tokens. seconds: since the first token. drafted,
    accepted: per depth, of the drafter. drafted_by, accepted_by: of the drafter, by its names in plans.
    lookup_drafted, grammar_drafted and so on: totals. paused: why drafting was paused at the end, else "".
    """
    stats = [run.stats for run in runs if run.stats]
    of_drafter = "drafted", "accepted", "drafted_by", "accepted_by"
    counted = "cycles", *of_drafter, "lookup_drafted", "lookup_accepted", "paused"
    counted += "grammar_drafted", "grammar_accepted", "tree_drafted", "tree_accepted"
    return {
        **{"context": prompt.context, "kv_bits": reader.settings.kv_bits, "mtp_kv_bits": reader.settings.mtp_kv_bits},
        **{"category": prompt.category, "contender": reader.loop.name, "prompt_tokens": len(prompt.tokens)},
        **{"read_seconds": reader.seconds, "read_peak_bytes": reader.peak},
        "text": hashlib.sha256(str(runs[0].tokens).encode()).hexdigest()[:12],
        "tokens": [len(run.tokens) for run in runs],
        **{"seconds": [run.seconds for run in runs], "peak_bytes": [run.peak for run in runs]},
        **{name: [getattr(of_run, name) for of_run in stats] for name in counted},
    }


@dataclass
class Session:
    """A benchmark: its loops, and the entries (see `entry_of`) measured so far.

    differences: texts that differ from our plain loop's although they must not. left_out: loops that cannot run, with
    the reason.
    """

    subject: Subject
    loops: list[Loop]
    rounds: int
    cooldown: float = 0.0
    entries: list[dict[str, Any]] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def open_session(
    subject: Subject, drafts: Sequence[int], rounds: int, cooldown: float, trees: Sequence[int] = ()
) -> Session:
    """Return a session of all loops that can run: mlx-lm, plain, one per number of drafts, per tree, and adaptive.

    drafts: if empty, 1 to USUAL_DRAFTS (3) or to the number of synthetic rates, if that is more, as far as the model
        can. Without heads or a drafter only mlx-lm and plain. Raises ValueError for a number that cannot be drafted.
    trees: numbers of rows of trees.
    """
    model, target, most = subject.model, subject.facts["target_bytes"], subject.model.max_draft_tokens
    drafts = drafts or range(1, min(most, max(USUAL_DRAFTS, len(subject.rates))) + 1)
    if too_many := [k for k in drafts if not 0 < k <= most]:
        allowed = f"1 to {most}" if most else "none, because it has no heads and no drafter"
        raise ValueError(f"drafts={too_many[0]}: allowed with this model is {allowed}")
    for rows in trees:
        check("tree", rows, OPTIONS["tree"])
        if tree_reason(model) or not fixed_nodes(model, rows):
            raise ValueError(f"tree={rows}: {tree_reason(model) or 'no drafter of this model has trees'}")
    session = Session(subject, [], rounds, cooldown)
    try:
        session.loops.append(MlxLm(twin(model), weights=target))
    except ValueError as e:
        session.left_out[MLX_LM] = str(e)
    heads_alone = {"prompt_lookup": False}
    session.loops.append(Ours(model, PLAIN, 0, heads_alone, target))
    if most:
        both, fixed = target + subject.facts["head_bytes"], {"adaptive": False, **heads_alone}
        session.loops += [Ours(model, f"k={k}", k, fixed, both) for k in drafts]
        session.loops += [Ours(model, f"tree={rows}", None, {**fixed, "tree": rows}, both) for rows in trees]
        # With lookups too, except with synthetic acceptance.
        session.loops.append(Ours(model, ADAPTIVE, None, heads_alone if subject.synthetic else {}, both))
    return session


def open_guided_session(subject: Subject, rounds: int, cooldown: float) -> Session:
    """Return a session of our loops under grammars: plain, with drafts of the heads, of the grammar, and of both.

    FREE is the plain loop without a grammar. For a model without heads and drafter, the loops with heads are left
    out.
    """
    model, target = subject.model, subject.facts["target_bytes"]
    both = target + subject.facts["head_bytes"]
    plain, alone = {"prompt_lookup": False}, {"prompt_lookup": False, "grammar_drafts": 0}
    loops = [Ours(model, FREE, 0, plain, target), Ours(model, PLAIN, 0, alone, target)]
    if model.max_draft_tokens:
        loops += [Ours(model, "heads", None, alone, both), Ours(model, "both", None, plain, both)]
    loops.insert(-1, Ours(model, "forced", 0, {**plain, "grammar_drafts": GRAMMAR_DRAFTS}, target))
    return Session(subject, [*loops], rounds, cooldown)


def measure(session: Session, prompts: Sequence[BenchPrompt], settings: LoopSettings, progress: Progress) -> None:
    """Run all loops on each prompt, one after another in each round; add entries and differences to the session.

    The model's measured costs are dropped first. progress: called before each prompt with its category, the number
    done and the total, and with "" at the end.
    """
    reset_costs(session.subject.model)
    with session.subject.acceptance():
        for i, prompt in enumerate(prompts):
            progress(prompt.category, i, len(prompts))
            readers = _readers(session, prompt, settings)
            turns = {name: reader.run for name, reader in readers.items()}
            warmups = 0 if i else WARMUPS
            found = timing.interleaved(turns, session.rounds, warmups=warmups, cooldown=session.cooldown)
            session.entries += [entry_of(prompt, readers[name], runs) for name, runs in found.items()]
            session.differences += _differences(session, prompt, settings, found)
    progress("", len(prompts), len(prompts))


def _readers(session: Session, prompt: BenchPrompt, settings: LoopSettings) -> dict[str, PrefilledLoop]:
    """Return a Reader by loop name, after its prefill of the prompt; without mlx-lm's if that raises an error."""
    readers, settings = {}, replace(settings, grammar=prompt.grammar, pictures=prompt.pictures)
    for loop in session.loops:
        try:
            readers[loop.name] = PrefilledLoop(loop, prompt.tokens, settings).read()
        except Exception as e:  # mlx-lm raises many types
            if not isinstance(loop, MlxLm):
                raise
            what = f" with kv_bits={settings.kv_bits}" if settings.kv_bits else ""
            session.left_out[f"{loop.name}{what}"] = first_line(e)
    return readers


def _differences(
    session: Session, prompt: BenchPrompt, settings: LoopSettings, found: dict[str, list[TimedRun]]
) -> list[dict[str, Any]]:
    """Return a dict per loop whose tokens differ from our plain loop's but must not: first position, tokens there.

    Texts of our other loops may differ with synthetic acceptance, FREE's always, and mlx-lm's with a temperature.
    """
    where = {"context": prompt.context, "kv_bits": settings.kv_bits, "mtp_kv_bits": settings.mtp_kv_bits}
    text, different = found[PLAIN][0].tokens, []
    for name, runs in found.items():
        others = settings.temp if name == MLX_LM else session.subject.rates and name != PLAIN
        others = others or name == FREE
        other = next((run.tokens for run in runs if run.tokens != text and not others), None)
        if other is not None:
            at = next(i for i, (a, b) in enumerate(zip_longest(text, other)) if a != b)
            parted = {"category": prompt.category, "contender": name, "position": at}
            different.append({**where, **parted, "expected": text[at : at + 1], "found": other[at : at + 1]})
    return different


def as_result(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a session, ready for JSON; options: further settings to store in it."""
    options = {"rounds": session.rounds, "cooldown": session.cooldown, **options}
    found = {name: getattr(session, name) for name in ("entries", "differences", "left_out")}
    return result("decode", session.subject.facts, options, **found)


def broken(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the differences in a result that rounding cannot explain.

    If the model is in float32, these are the differences of all settings in which the target's cache is unquantized;
    else there are none.
    """
    exact = found["model"]["dtype"] == "float32"
    return [d for d in found["differences"] if exact and d["kv_bits"] is None]
