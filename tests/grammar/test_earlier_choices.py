"""What an answer chose under a mask of few tokens is proposed again at the same place; masks do not depend on it."""

import random

import grammars
import numpy as np
import pytest

from mlx_mtp import grammar
from mlx_mtp.grammar import matcher

LIST = grammar.json_schema(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green", "grey"]}, "width": {"type": "integer"}},
            "required": ["colour", "width"],
            "additionalProperties": False,
        },
    },
    whitespace=4,
)
STYLES = [("\n\t", " : ", "\n"), ("\t", ":  ", " "), ("\n", ":\n", "\t\t")]


def encoded(text):
    return grammars.demo_tokenizer().encode(text, add_special_tokens=False)


def after(constraint, tokens, drafts=()):
    """Return a matcher that has followed tokens one by one, each under its mask, as in decoding without drafts."""
    found, masks = constraint.matcher(most=15), np.empty((1 + len(drafts), constraint.words), np.int32)
    for i in range(len(tokens)):
        found.follow(tokens[:i])
        found.fill(masks, drafts)
    found.follow(tokens)
    return found


@pytest.mark.parametrize(("space", "colon", "end"), STYLES)
def test_white_space_and_words_are_proposed_as_before(space, colon, end):
    """A style that is not in `Grammar.styles`: the third object of a list needs few passes."""
    constraint = grammars.constraint(LIST)
    item = f'{{{space}"colour"{colon}"green"{end},{space}"width"{colon}7{end}}}{end},'
    text, start = encoded(f"[{item}{item}{item}"), len(encoded(f"[{item}{item}"))

    def passes(begun):
        count, taken = 0, start
        while taken < len(text):
            drafts, more = begun(text[:taken]).drafts(15), text[taken:]
            taken += 1 + next((i for i, (a, b) in enumerate(zip(drafts, more, strict=False)) if a != b), len(drafts))
            count += 1
        return count

    def without_masks(tokens):
        found = constraint.matcher(most=15)
        found.follow(tokens)
        return found

    assert passes(lambda tokens: after(constraint, tokens)) <= 4
    assert passes(without_masks) >= 12


def test_earlier_choices_change_no_mask_and_are_allowed():
    """Walks with good and bad drafts: each mask is that of a new matcher, and each proposal is allowed."""
    constraint, rng, repeated = grammars.constraint(LIST), random.Random(2), 0
    common = encoded(' \n{"[]}:,79')
    for _ in range(4):
        used, answer, possible = constraint.matcher(most=15), [], [0]
        while len(answer) < 40 and possible:
            used.follow(answer)
            drafts, fresh = used.drafts(6), constraint.matcher()
            fresh.follow(answer)
            repeated += len(drafts) > len(fresh.drafts(6))
            if rng.random() < 0.3:
                drafts = [*drafts[: rng.randrange(6)], rng.randrange(2048)]
            masks = np.full((len(drafts) + 1, constraint.words), -1, np.int32)
            fits = used.fill(masks, drafts)
            assert fits >= len(drafts) - 1  # all but the drawn one
            for i in range(fits + 1):
                assert (masks[i] == grammars.mask(constraint, [*answer, *drafts[:i]])).all()
            right = rng.randrange(fits + 1)
            possible = [t for t in grammars.allowed(masks[right]) if t not in constraint.eos]
            likely = [token for token in possible if token in common] or possible
            answer += [*drafts[:right], rng.choice(likely)] if possible else []
    assert repeated > 5


def test_choices_under_wide_masks_are_not_stored():
    constraint = grammars.constraint(grammar.json_schema({"type": "string"}))
    assert after(constraint, encoded('"aaaaaaaa')).drafts(15) == []


def test_few_choices_are_proposed_at_once(monkeypatch):
    constraint, tokens = grammars.constraint(grammar.regex("([0-9] [a-c]\n)+")), encoded("1 a\n" * 6)
    lengths = []
    for most in (0, 1, 3):
        monkeypatch.setattr(matcher, "MOST_REPEATED", most)
        lengths.append(len(after(constraint, tokens).drafts(15)))
    assert lengths[0] < lengths[1] < lengths[2] < 15


def test_only_tokens_whose_masks_were_noted_are_stored():
    """A mask that was noted behind a draft belongs to the answer only if that draft does."""
    noted, few = matcher.EarlierChoices(), np.array([0b11, *[0] * 99], np.int32)
    for new in ([7, 5], [1, 6], [1]):
        noted.note([], few)
        noted.note([1], few)
        noted.follow(new)
    assert [noted.after(before, few) for before in (-1, 5, 1, 6, 7)] == [[7], [1], [6], [1], []]
