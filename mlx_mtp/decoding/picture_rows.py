"""Read the rows of a prompt's pictures, in prefill and in heads: their features, positions, and ends of chunks."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..layers.prompt_rows import PromptRows
from ..layers.target import Target
from ..machine.errors import first_line
from ..pictures.rows import Picture, PictureSpan, edge_after, mark_ids, places_in, positions_of, shift_at
from ..pictures.vision import vision_of

END: Any = object()  # what `next` returns at the end of an iterator


def check_pictures(
    model: Target, cache: PromptCache, tokens: Sequence[int], pictures: Sequence[Picture], *, whole: bool = True
) -> None:
    """Raise ValueError unless the pictures among `tokens`, which continue a cache, can be read.

    pictures: in any order; needed is each picture with rows in `tokens` that `cache.pictures` does not contain yet,
    others are allowed. If any token is a row of a picture, they are added to `cache.pictures`. whole: the last
    picture must be complete. Raises ValueError for any pictures if the model has no vision tower, and for negative
    tokens that are no picture's.
    """
    if pictures:
        vision_of(model)
    if min(tokens) >= 0:
        return
    cache.name_pictures(pictures)
    places = places_in([*cache.tokens, *tokens])
    for number, place in enumerate(places, 1):
        if place.end > cache.offset and _named(cache, place) is None:
            raise ValueError(
                f"pictures: picture {number} of the prompt, counted with those in the prompt cache, is not among "
                "them; give every new picture"
            )
    if whole and places[-1].end > cache.offset + len(tokens):
        raise ValueError(
            f"prompt: ends inside picture {len(places)}, counted with those in the prompt cache; "
            "append the rest of the picture's tokens"
        )


def up_to_edge(cache: PromptCache, tokens: list[int]) -> int:
    """Return the number of tokens before the first edge of a picture in `tokens`, which follow those of `cache`.

    An edge is a place after the first token at which a picture begins or ends; without one, all tokens are counted.
    """
    if min(tokens) >= 0:
        return len(tokens)
    edge = edge_after(places_in(cache.tokens + tokens), cache.offset)
    return len(tokens) if edge is None else min(len(tokens), edge - cache.offset)


def hidden_rows(model: Target, cache: PromptCache, tokens: list[int]) -> mx.array:
    """Append the next n tokens to the target's caches; return the rows [1, n, H] of `Target.hidden`.

    tokens: either text only, or only rows of one picture, of which they may be a part. Raises ValueError as
    `features_of`.
    """
    if tokens[0] >= 0:
        return model.hidden(mx.array(tokens)[None], cache.layers)
    first, end = cache.offset, cache.offset + len(tokens)
    places = places_in(cache.tokens + tokens)
    features = features_of(model, cache, places[-1])[first - places[-1].first : end - places[-1].first]
    positions = mx.array(positions_of(places, first, end)) if model.axes else None
    ids = mx.array(mark_ids(tokens, model.vision.mark))[None]
    return model.hidden(ids, cache.layers, PromptRows(features[None], positions))


def features_of(model: Target, cache: PromptCache, place: PictureSpan) -> mx.array:
    """Return the features [rows, H] of a picture that is read next, and hold them in `cache.features`.

    Encodes the picture if its features are not stored; of several ranks only rank 0 does. Raises ValueError, on all
    ranks, if the picture cannot be encoded: `cache.pictures` lacks it or its image, memory is too small, or weights
    are damaged.
    """
    found: Any = _held(cache, place)
    if found is None:
        if model.ranks:
            *_, found = _of_rank_0(model, cache, place, alike=True)
        else:
            found = model.vision.features(_needed(cache, place)).astype(model.no_hidden().dtype)
        cache.features = place.words, found
    return found


def encoding(model: Target, cache: PromptCache, tokens: list[int]) -> Iterator[None]:
    """Encode the picture whose rows are the next tokens; yield after each part of the work, as `Vision.stages` does.

    At the end the features are in `cache.features`. Nothing is done or yielded if the next token is text, or the
    features are stored (of several ranks, in `cache.features`). Raises ValueError if `cache.pictures` lacks the
    picture, and any exception of the encoding. Of several ranks only rank 0 encodes, and all ranks yield equally
    often; if rank 0 raises, the others raise ValueError.
    """
    if tokens[0] >= 0:
        return
    place = places_in(cache.tokens + tokens[: up_to_edge(cache, tokens)])[-1]
    if _stored(model, cache, place) is None:
        rows = None
        for rows in (_of_rank_0 if model.ranks else _stages)(model, cache, place):  # noqa: B007 - the last
            yield
        assert rows is not None
        cache.features = place.words, rows.astype(model.no_hidden().dtype)


def _needed(cache: PromptCache, place: PictureSpan) -> Picture:
    """Return the picture of `cache.pictures` at a place; ValueError if there is none."""
    if (picture := _named(cache, place)) is None:
        raise ValueError(f"pictures: the picture at token {place.first} is not among them; give it again")
    return picture


def _stages(model: Target, cache: PromptCache, place: PictureSpan) -> Iterator[mx.array | None]:
    """Encode the picture at a place and yield as `Vision.stages` does; yield only its features if they are stored."""
    picture = _needed(cache, place)
    stored = model.vision.stored(picture)
    yield from model.vision.stages(picture) if stored is None else (stored,)


def _of_rank_0(
    model: Target, cache: PromptCache, place: PictureSpan, *, alike: bool = False
) -> Iterator[mx.array | None]:
    """Yield on every rank None after each of the `_stages`, which rank 0 alone computes; last, rank 0's features.

    If a stage raises, rank 0 raises the stage's exception, and each other rank ValueError with the first line of that
    exception's message. alike: rank 0 raises this ValueError, too.
    """
    ranks, like, stages = model.ranks, model.no_hidden(), _stages(model, cache, place)
    assert ranks
    found: Any = None
    error: Exception | None = None
    while True:
        more, problem = False, ""
        if ranks.rank == 0:
            try:
                if more := (rows := next(stages, END)) is not END:
                    found = rows
                else:
                    mx.eval(found := found.astype(like.dtype))
            except Exception as e:  # the other ranks wait for a message
                error, problem = e, first_line(e)
        more, problem = ranks.broadcast((more, problem))
        if problem:
            raise ValueError(problem) if alike or error is None else error
        if not more:
            break
        yield None
    yield ranks.broadcast_array(found, (place.end - place.first, like.shape[-1]), like.dtype)


def drop_features(cache: PromptCache) -> None:
    """Set `cache.features` to None, unless the last picture among the tokens held is incomplete."""
    if not cache.places or cache.places[-1].end <= cache.offset:
        cache.features = None


def next_embeddings(model: Target, cache: Any, ids: mx.array, first: int, depth: int) -> mx.array:
    """Return the rows [1, n, H] that the head of `depth` reads for token ids [1, n].

    They are the ids' embeddings, but a picture's features where these are stored. first: the index of the first id
    among the tokens of `cache`, a PromptCache.
    """
    found, end = model.embed(ids, depth), first + ids.shape[1]
    for place in cache.places:
        low, high = max(place.first, first), min(place.end, end)
        if low < high and (features := _stored(model, cache, place)) is not None:
            rows = features[None, low - place.first : high - place.first].astype(found.dtype)
            found = mx.concatenate([found[:, : low - first], rows, found[:, high - first :]], axis=1)
    return found


def place_head(model: Target, cache: Any, kv: Any, first: int, end: int) -> None:
    """Set the RoPE positions of the rows first..end-1, which a head's cache `kv` reads next, to those of the target.

    Nothing is set if `cache` has no pictures, or the model's pictures have the positions of text.
    """
    places = cache.places
    if places and model.axes:
        touched = any(place.first < end and place.end > first for place in places)
        kv.axes = mx.array(positions_of(places, first, end)) if touched else None
        kv.shift = shift_at(places, first)


def _stored(model: Target, cache: PromptCache, place: PictureSpan) -> mx.array | None:
    """Return a picture's features from `cache.features` or, on one rank, from the stored ones; None if not there."""
    if (found := _held(cache, place)) is not None or model.ranks:
        return found
    picture = _named(cache, place)
    return None if picture is None else model.vision.stored(picture)


def _held(cache: PromptCache, place: PictureSpan) -> mx.array | None:
    """Return the features in `cache.features` if their picture has the words of this place, else None.

    If one of both has fewer words, because the tokens end in the picture, only the first words are compared.
    """
    if cache.features is None:
        return None
    words, found = cache.features
    known = min(len(words), len(place.words))
    return found if words[:known] == place.words[:known] else None


def _named(cache: PromptCache, place: PictureSpan) -> Picture | None:
    """Return the picture of `cache.pictures` that has the words of a place; None if there is none.

    If the tokens end before all words of the place, it is the first picture that begins with its words.
    """
    found = cache.pictures.get(place.words)
    if found or place.end <= place.first + len(place.words):
        return found
    alike = (picture for words, picture in cache.pictures.items() if words[: len(place.words)] == place.words)
    return next(alike, None)
