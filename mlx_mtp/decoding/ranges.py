"""List the values that the options of a generation allow; others are checked with the model and its caches."""

from collections.abc import Mapping
from sys import float_info

from ..cache.kinds import LAYOUT, MOST_POSITIONS
from ..cache.ring import MAX_ROWS
from ..grammar import Constraint, Grammar
from ..machine.ranges import COUNT, FLAG, PART, SWITCH, Allowed, Functions, InstanceOf, IntegerChoice, Range, Tokens
from .stats import Stats

TEMPERATURE = Range("0 or more, as a finite float", 0, float_info.max, False)
OPTIONS: Mapping[str, Allowed] = {
    "max_tokens": Range(f"-1 (no limit) or 0 to {MOST_POSITIONS}, as an integer", -1, MOST_POSITIONS),
    "prefill_step_size": COUNT._replace(optional=True),
    "seed": Range("0 to 2**63 - 1, as an integer", 0, 2**63 - 1, optional=True),
    "draft_p_min": PART,
    "grammar_drafts": Range(f"0 to {MAX_ROWS - 1}, or None", 0, MAX_ROWS - 1, optional=True),
    "tree": IntegerChoice(f"0, 2 to {MAX_ROWS}, or None", (0, *range(2, MAX_ROWS + 1))),
    "max_context": COUNT._replace(optional=True),
    **LAYOUT,
    **dict.fromkeys(("adaptive", "check_memory", "logprobs", "verbose"), FLAG),
    **dict.fromkeys(("return_prompt_caches", "return_token_ids", "return_logprobs"), FLAG),
    **dict.fromkeys(("prompt_lookup", "compile_cycles"), SWITCH),
    **dict.fromkeys(("completion_batch_size", "prefill_batch_size"), COUNT),
    "sampler": Functions("a function"),
    "prompt_progress_callback": Functions("a function"),
    "logits_processors": Functions("a list of functions", several=True),
    "xtc_special_tokens": Tokens(),
    "grammar": InstanceOf("one from mlx_mtp.grammar, or None", (Grammar, Constraint), True),
    "stats": InstanceOf("a Stats, or None", (Stats,), True),
}
