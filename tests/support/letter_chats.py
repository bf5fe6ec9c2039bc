"""Chats over an alphabet of twelve characters: a tokenizer, chat templates, and sessions of a tiny model."""

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_mtp.session import ChatSession

LETTERS = "abcdefghij[]"
SPECIAL = ["<e>", "<u>", "<a>", "<s>"]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
TURNS = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + CONTENT + '<e>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'OPEN' }}{% endif %}"
)
PLAIN = TURNS.replace("CONTENT", "m.content").replace("OPEN", "<a>")
# Drops everything up to the last "]" of earlier answers; the generation prompt adds a "[" that they lack.
REWRITING = TURNS.replace("CONTENT", "m.content.split(']')[-1]").replace("OPEN", "<a>[")


def make_tokenizer(template=PLAIN):
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return TokenizerWrapper(fast)


def make_session(model, template=PLAIN, **options):
    return ChatSession(model, make_tokenizer(template), **{"max_tokens": 14, **options})


def answer(session, text):
    return [response.token for response in session.ask(text)]
