"""Create the empty caches of a conversation."""

from ..machine.ranges import check_options
from ..machine.stream import in_turn
from .absorb import reach_of
from .drafting import chained_caches, no_kept, starts_of
from .kinds import LAYOUT, check_layout, group_size_for, make_caches
from .layer_cache import CachedModel
from .mark import Quantizing
from .prompt_cache import PromptCache
from .ring import Ring

SINKS = 4  # first positions that max_kv_size keeps, as mlx_lm does; they get much attention (arXiv 2309.17453)


@in_turn()
def make_prompt_cache(
    model: CachedModel,
    *,
    num_draft_tokens: int | None = None,
    kv_bits: int | None = None,
    mtp_kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int = 0,
    max_kv_size: int | None = None,
) -> PromptCache:
    """Return an empty cache for `model` and `num_draft_tokens` MTP heads (None: all; 0: none, nor another drafter).

    kv_bits, mtp_kv_bits: bits of the target's and the heads' keys and values (None: not quantized). The attention
        kernel, which makes a row's bits independent of drafts, supports None, 4 and 8.
    kv_group_size: 32, 64 or 128; None is 64, or 32 where the head size needs it.
    quantized_kv_start: with kv_bits, positions before this one are read unquantized, as in mlx-lm; caches are
        quantized exactly there, whatever is drafted.
    max_kv_size: full-attention layers keep this many positions, the first SINKS and the last ones, as mlx_lm's
        rotating cache when it decodes; MLX reads such a cache, no kernel does. A bad argument raises ValueError.
    """
    check_options(locals(), LAYOUT)
    kv_group_size = group_size_for(model) if kv_group_size is None else kv_group_size
    check_layout(model, kv_bits, mtp_kv_bits, kv_group_size, max_kv_size)
    full = None if max_kv_size is None else Ring(max_kv_size, keep=min(SINKS, max_kv_size - 1))
    windows, heads = [window or full for window in model.windows()], model.head_windows()
    if num_draft_tokens is not None and (not num_draft_tokens or chained_caches(model, len(heads)) == len(heads)):
        heads = heads[:num_draft_tokens]
    later = kv_bits is not None and quantized_kv_start > 0
    target = {"bits": None if later else kv_bits, "group_size": kv_group_size}
    draft = {"bits": mtp_kv_bits, "group_size": kv_group_size}
    cache = PromptCache(
        model,
        make_caches(windows, starts=[0] * len(windows), **target),
        make_caches(heads, starts=starts_of(model, len(heads)), **draft),
        reach_of(model, heads),
        no_kept(model, len(heads)),
    )
    if later and kv_bits:
        cache.quantizing = Quantizing(quantized_kv_start, kv_bits, kv_group_size)
    return cache
