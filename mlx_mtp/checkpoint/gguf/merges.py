"""Find the merges of a SentencePiece vocabulary, which stores scores of tokens instead."""

MAX_LETTERS = 256  # of a token that merges can make


def merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """List each way to make a token of two others, those of the token with the best score first.

    Of one token's, those come first whose parts come first in the vocabulary.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for number, token in enumerate(tokens):
        if len(token) > MAX_LETTERS:
            continue
        for cut in range(1, len(token)):
            left, right = numbers.get(token[:cut]), numbers.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda merge: merge[:4])
    return [merge[4:] for merge in found]
