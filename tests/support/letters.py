"""A fake tokenizer whose tokens are letters."""


class Letters:
    """The part of a tokenizer's interface that serving an answer needs."""

    has_thinking = False
    eos_token_ids = frozenset()
    bos_token = None

    class _Detokenizer:
        last_segment = ""

        def add_token(self, token):
            self.last_segment = Letters().decode([token])

        def finalize(self):
            pass

    @property
    def detokenizer(self):
        return self._Detokenizer()

    def decode(self, tokens):
        return "".join(chr(97 + token % 26) for token in tokens)
