"""Check the options that all sequences of a batch share, and create each request from its own arguments."""

from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from ..cache.from_mlx_lm import from_mlx_lm
from ..cache.prompt_cache import PromptCache
from ..decoding import options as checked
from ..decoding.agreement import agreed
from ..decoding.memory_needs import check_prompt, within
from ..decoding.picture_rows import check_pictures
from ..decoding.sampling import Picker, Sampling, random_key
from ..decoding.sequence import Asked, new_sequence
from ..decoding.stats import Stats
from ..grammar import compiled
from ..layers.target import Target
from .responses import Request

SAMPLING = tuple(Sampling.__dataclass_fields__)


class BatchSettings:
    """The checked options of `generate_step` that hold for every sequence of a batch.

    Raises TypeError for an unknown option, ValueError for sampling or num_draft_tokens out of range.
    """

    def __init__(
        self,
        model: Target,
        chunk: int,
        max_kv_size: int | None,
        *,
        num_draft_tokens: int | None = None,
        adaptive: bool = True,
        tree: int | None = None,
        draft_p_min: float = 0.0,
        prompt_lookup: bool | None = None,
        compile_cycles: bool | None = None,
        kv_bits: int | None = None,
        mtp_kv_bits: int | None = None,
        kv_group_size: int | None = None,
        quantized_kv_start: int = checked.QUANTIZED_KV_START,
        max_context: int | None = None,
        check_memory: bool = True,
        seed: int | None = None,
        draft_sampling: str = "coupled",
        grammar: Any = None,
        grammar_drafts: int | None = None,
        logprobs: bool = False,
        stats: Stats | None = None,
        **sampling: Any,
    ):
        if unknown := sorted(sampling.keys() - set(SAMPLING)):
            raise TypeError(f"{unknown[0]}: not an option of a batch; leave it out")
        sampling["xtc_special_tokens"] = tuple(sampling.get("xtc_special_tokens", ()))
        self.model, self.chunk, self.sampling = model, chunk, Sampling(**sampling)
        self.sampling.validate(model.vocab_size)
        self.adaptive, self.prompt_lookup, self.tree = adaptive, prompt_lookup, tree
        self.asked, self.k = num_draft_tokens, checked.draft_count(num_draft_tokens, model, None)
        self.layout = {"kv_bits": kv_bits, "mtp_kv_bits": mtp_kv_bits, "max_kv_size": max_kv_size}
        self.quantized = kv_group_size, quantized_kv_start
        self.max_context, self.check_memory = max_context, check_memory
        self.grammar, self.grammar_drafts = grammar, grammar_drafts
        self.seed, self.draft_sampling, self.logprobs = seed, draft_sampling, logprobs
        self.compile_cycles = compile_cycles
        self.replays = mx.default_device() != mx.cpu if compile_cycles is None else compile_cycles
        self.draft_p_min, self.stats = draft_p_min, stats or Stats()
        self.stats.num_draft_tokens = self.k
        self.stats.start()

    def request(
        self,
        uid: int,
        segments: Any,
        max_tokens: int,
        cache: Any,
        sampler: Any,
        processors: Any,
        stops: Any,
        seed: Any,
        k: Any,
        logprobs: bool,
        stats: Stats | None,
        grammar: Any,
        pictures: Any,
    ) -> Request:
        """Return a queued request made of one prompt's arguments of `BatchGenerator.insert_segments`.

        sampler, seed, k: None gives this batch's own value. cache, stats: None gives a new one; processors, stops,
        grammar, pictures: none. A given cache is copied. Empty segments are skipped; at least one must have tokens.
        Raises ValueError for an invalid argument, such as a grammar without a tokenizer, or if memory is too small.
        """
        seeing = self.model.vision is not None
        pieces = [checked.token_ids(p, self.model.vocab_size, pictures=seeing) for p in segments if len(p)]
        assert pieces
        if max_tokens == 0:
            raise ValueError("max_tokens=0: allowed is 1 or more, or -1 for no limit")
        seed, total = self.seed if seed is None else seed, sum(map(len, pieces))
        checked.check_values({"max_tokens": max_tokens, "seed": seed})
        given: PromptCache | None = None if cache is None else from_mlx_lm(self.model, [*cache]).copy()
        plain, asked = k == 0, self.asked if k is None else k
        k = checked.draft_count(asked, self.model, given)
        own = checked.cache_for(self.model, given, max(k, self.k), *self.quantized, self.layout)
        check_pictures(self.model, own, [*chain(*pieces)], pictures or ())
        max_tokens = within(self.max_context, own.offset, total, max_tokens)
        check_prompt(self.model, own, total, max_tokens, self.chunk, ignore=not self.check_memory)
        options = sampler if isinstance(sampler, Sampling) else self.sampling
        options.validate(self.model.vocab_size)
        call = None if isinstance(sampler, Sampling) or sampler is greedy_sampler else sampler
        key, ranks = random_key(seed), self.model.ranks
        if ranks:
            pieces, key = agreed(ranks, pieces, key, (max_tokens, k, own.offset, options, self.draft_sampling))
        lookup = False if plain else self.prompt_lookup
        drafting = Asked(asked == 0, self.adaptive, lookup, self.grammar_drafts, self.tree)
        constraint = None if grammar is None else compiled(grammar, None, self.model.vocab_size)
        stats = stats or Stats()
        picker = Picker(options, call, tuple(processors or ()), logprobs, key, self.draft_sampling)
        more = {"uid": uid, "longest": own.offset + total + abs(max_tokens)}
        how = picker, stops, max_tokens, k, stats
        sequence = new_sequence(own, total, *how, asked=drafting, grammar=constraint, **more)
        stats.whole = self.stats
        return Request(sequence, pieces)
