"""Constrain answers to a grammar: a JSON schema, any JSON, a regular expression or a Lark grammar.

llguidance parses grammars and computes, for each position, the mask of the allowed tokens. A mask depends on the
tokens of the answer before it and on nothing else.
"""

from .constraint import Constraint, compiled, is_compiled, vocabulary_of
from .forms import Grammar, json, json_schema, lark, regex
from .gate import Gate
from .matcher import GrammarError, Matcher

__all__ = ["Constraint", "Gate", "Grammar", "GrammarError", "Matcher", "compiled", "is_compiled", "json"]
__all__ += ["json_schema", "lark", "regex", "vocabulary_of"]
