"""Derive BPE merges from the scores of a SentencePiece vocabulary."""

MAX_LETTERS = 256  # longer tokens get no merges


def merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, sorted by the joined token's score, best first.

    Pairs of one token are sorted by the ids of their parts.
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
