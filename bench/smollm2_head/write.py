"""Write conversations with a model, many rows at once; a row continues with another conversation where one ends."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .markup import Markup
from .target import Target

TEMPERATURE = 0.8  # of sampled answers; users' messages are sampled at temperature 1
LONGEST_MESSAGE = 80  # tokens of a user's message that the model samples
FOLLOWED = 600  # positions of a conversation, after which no further user's message follows
CHECKED, DISTINCT = 64, 22  # an answer ends if its last CHECKED tokens contain fewer than DISTINCT different ones
CHECK_EVERY = 32  # positions


class Recipe(NamedTuple):
    """How conversations are made; shares are probabilities.

    own_message: share of first users' messages that the model samples instead of taking a prompt. sampled: share of
    conversations whose answers are sampled; the others are greedy. followed: share of answers after which the model
    samples a further user's message. shortest, longest: range of the maximum number of an answer's tokens. in_order:
    take the prompts one after the other instead of at random.
    """

    own_message: float
    sampled: float
    followed: float
    shortest: int
    longest: int
    in_order: bool


TRAINING = Recipe(0.5, 0.25, 0.4, 140, 320, in_order=False)
HELD_OUT = Recipe(0.0, 0.0, 0.0, 240, 240, in_order=True)
TEST = Recipe(0.0, 0.0, 0.0, 200, 200, in_order=True)


class Written(NamedTuple):
    """B rows of L tokens of joined conversations.

    tokens: int32 [B, L]. starts: int16 [B, L], the index in its row where each token's conversation begins. answers:
    bool [B, L], whether the model has chosen the token as a part of an answer; tokens that cut an answer are not.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    answers: torch.Tensor


@torch.no_grad()
def write(target: Target, markup: Markup, prompts: torch.Tensor, recipe: Recipe, rows: int, length: int) -> Written:
    """Return `rows` rows of `length` tokens of conversations by the target. prompts: of `contexts`."""
    state, cache = _Rows(markup, prompts.to(target.device), recipe, rows, length), target.cache(rows)
    for place in range(length):
        starts = state.arrive(place)
        state.append(place, target.step(state.tokens[:, place], place, starts, cache))
    return Written(state.tokens[:, :length].int(), state.starts.short(), state.answers[:, :length])


class _Rows:
    """The conversations of all rows while they are written.

    tokens, starts, answers: as in `Written`, tokens and answers with one more position. forced: int64, the token of
    each position that the model does not choose, else -1. following: position where the row's newest conversation
    begins, which may be the next one. answering: whether the model writes an answer, else a user's message. count:
    tokens that the model has chosen of the message. limit: maximum of an answer's tokens. temperature: of answers.
    """

    def __init__(self, markup: Markup, prompts: torch.Tensor, recipe: Recipe, rows: int, length: int):
        self.markup, self.prompts, self.recipe = markup, prompts, recipe
        self.device, self.used = prompts.device, 0
        self.special, self.answer, self.question, opening = (
            torch.tensor(ids, device=self.device)
            for ids in (markup.special, markup.answer, markup.question, markup.opening)
        )
        self.opening = F.pad(opening, (0, prompts.shape[1] - len(opening)), value=-1)
        integers = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.following, self.count, self.limit, self.start = (integers.clone() for _ in range(4))
        self.answering, self.temperature = integers.bool(), integers.float()
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.long, device=self.device)
        self.starts, self.answers = torch.zeros_like(self.tokens[:, :length]), torch.zeros_like(self.tokens).bool()
        room = length + prompts.shape[1] + len(markup.answer) + len(markup.question) + 2
        self.forced = torch.full((rows, room), -1, device=self.device)
        self._begin(torch.arange(rows, device=self.device), 0)
        self.tokens[:, 0] = self.forced[:, 0]

    def arrive(self, place: int) -> torch.Tensor:
        """Return the first positions of the conversations at `place`, int64 [B], and store them in `starts`."""
        self.start = torch.where(self.following <= place, self.following, self.start)
        self.starts[:, place] = self.start
        return self.start

    def append(self, place: int, logits: torch.Tensor) -> None:
        """Choose the tokens after `place`; begin the next message or conversation in rows whose message ends."""
        forced = self.forced[:, place + 1]
        free = forced < 0
        tokens = torch.where(free, self._chosen(logits, free), forced)
        self.count += free
        ends = free & torch.isin(tokens, self.special)
        full = (self.count >= self.limit) | (self._repeats(place) & (self.count > CHECKED))
        cut = free & torch.where(self.answering, full, self.count >= LONGEST_MESSAGE)
        self.answers[:, place + 1] = free & self.answering & (ends | ~cut)
        self.tokens[:, place + 1] = torch.where(ends | cut, self.markup.close, tokens)
        self._turn((ends | cut).nonzero()[:, 0], place)

    def _chosen(self, logits: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Return the model's tokens [B]; those of rows that are not `free` are arbitrary."""
        chosen, temperature = logits.argmax(-1), torch.where(self.answering, self.temperature, 1.0)
        rows = (free & (temperature > 0)).nonzero()[:, 0]
        if len(rows):
            probabilities = (logits[rows].float() / temperature[rows, None]).softmax(-1)
            chosen[rows] = torch.multinomial(probabilities, 1)[:, 0]
        return chosen

    def _repeats(self, place: int) -> torch.Tensor:
        """Return for each row whether its last tokens repeat, bool [B]; False between the checked positions."""
        if place % CHECK_EVERY or place <= CHECKED:
            return torch.zeros_like(self.answering)
        ordered = self.tokens[:, place + 1 - CHECKED : place + 1].sort(-1)[0]
        return (ordered.diff(dim=-1) != 0).sum(-1) + 1 < DISTINCT

    def _turn(self, rows: torch.Tensor, place: int) -> None:
        """Begin the answer, the further message or the next conversation of rows whose message ends after `place`."""
        if not len(rows):
            return
        asked, answered = rows[~self.answering[rows]], rows[self.answering[rows]]
        self.forced[asked, place + 2 : place + 2 + len(self.answer)] = self.answer
        again = torch.rand(len(answered), device=self.device) < self.recipe.followed
        again &= place + 1 - self.start[answered] < FOLLOWED
        self.forced[answered[again], place + 2 : place + 2 + len(self.question)] = self.question
        self.answering[asked], self.answering[answered[again]] = True, False
        self.count[rows] = 0
        self._begin(answered[~again], place + 2)

    def _begin(self, rows: torch.Tensor, place: int) -> None:
        """Begin new conversations at `place` of the rows."""
        count, recipe = len(rows), self.recipe
        if recipe.in_order:
            picked = (torch.arange(count, device=self.device) + self.used) % len(self.prompts)
            self.used += count
        else:
            picked = torch.randint(len(self.prompts), (count,), device=self.device)
        own = torch.rand(count, device=self.device) < recipe.own_message
        given = torch.where(own[:, None], self.opening, self.prompts[picked])
        self.forced[rows, place : place + given.shape[1]] = given
        self.following[rows], self.answering[rows], self.count[rows] = place, ~own, 0
        sampled = torch.rand(count, device=self.device) < recipe.sampled
        self.temperature[rows] = torch.where(sampled, TEMPERATURE, 0.0)
        self.limit[rows] = torch.randint(recipe.shortest, recipe.longest + 1, (count,), device=self.device)
