"""Import llguidance when a grammar is first made, and state the limits of its work."""

from functools import cache
from typing import Any, NamedTuple

from ..machine.errors import install

# Work, not time: a text does not depend on the machine's speed. A mask takes up to about 20 ms within these limits.
STEP_FUEL = 200_000
STEP_ITEMS = 50_000
STYLE_ITEMS = 5_000  # of a style, which only proposes drafts: a recursive schema can force tokens without end
MASK_SECONDS = 0.5  # of the thread's processor time: a slower mask ends its answer, so that others are not held up


class Library(NamedTuple):
    """The parts of llguidance that grammars use.

    limits, style_limits: of the work per token, for grammars and for `Grammar.styles`.
    """

    LLMatcher: Any
    LLTokenizer: Any
    limits: Any
    style_limits: Any


@cache
def llguidance() -> Library:
    """Return the `Library`; ValueError that states how to install llguidance if it is missing."""
    try:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    except ImportError:
        raise ValueError(f"grammars need llguidance: {install('grammar')}") from None
    limits = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS, verbose_errors=False)
    styles = LLParserLimits(step_lexer_fuel=STEP_FUEL, step_max_items=STYLE_ITEMS, verbose_errors=False)
    return Library(LLMatcher, LLTokenizer, limits, styles)
