"""Token rules apply to every row: the text depends neither on drafts nor on other requests."""

import runpy
import threading

import mlx.core as mx
import pytest
import transformers
from letter_chats import make_tokenizer
from sweep import sampled

import mlx_mtp
from mlx_mtp.decoding.logit_rules import LogitRules
from mlx_mtp.serve.batch_decoder import BatchDecoder
from mlx_mtp.serve.engine import Engine
from mlx_mtp.serve.job import DecodeRequest, End, Job, RequestFailed, Served
from mlx_mtp.serve.prefixes import Chunking, PrefixTree
from mlx_mtp.serve.token_rules import TokenRules, vocabulary

GREEDY, SEEDED = {"temp": 0.0, "seed": 1}, {"temp": 1.5, "seed": 3}
XTC = {"temp": 1.0, "seed": 5, "xtc_probability": 0.7, "xtc_threshold": 0.05}
PROMPT, MOST = [1, 5, 9, 4, 2], 16
RULES = {
    "min_tokens": (TokenRules(min_tokens=12), GREEDY),
    "min_tokens, seeded": (TokenRules(min_tokens=12, stop_tokens=(4, 5, 6, 7)), SEEDED),
    "ignore_eos": (TokenRules(ignore_eos=True), SEEDED),
    "bad_words": (TokenRules(bad_words=("a", "bc", "hij"), ignore_eos=True), SEEDED),
    "bad_words, greedy": (TokenRules(bad_words=("a", "bc"), ignore_eos=True), GREEDY),
    "stop_tokens": (TokenRules(stop_tokens=(7, 12)), SEEDED),
    "allowed": (TokenRules(allowed=(5, 6, 7)), SEEDED),
    "xtc": (TokenRules(ignore_eos=True), XTC),
}


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(vocab_size=16)[0]


def answers(model, k, requests, *, batched=True):
    """Return the text, finish reason and number of tokens of each of several requests, decoded at once."""
    options, tokenizer = {"num_draft_tokens": k, "adaptive": False}, make_tokenizer()
    tree = PrefixTree(mlx_mtp.make_prompt_cache(model, num_draft_tokens=k), Chunking(4), 1 << 30)
    batch = BatchDecoder(model, tokenizer, options, 4) if batched else None
    engine = Engine(load=lambda: Served(model, tokenizer, tree, options, None, batch=batch))
    found, finished = [[] for _ in requests], threading.Semaphore(0)

    def emit(i, event):
        found[i].append(event)
        if isinstance(event, (End, RequestFailed)):
            finished.release()

    engine.thread.start()
    engine.submit([Job(request, lambda event, i=i: emit(i, event)) for i, request in enumerate(requests)])
    assert all(finished.acquire(timeout=60) for _ in requests)
    engine.stop(0)
    engine.thread.join(10)
    texts = ["".join(getattr(event, "text", "") for event in events) for events in found]
    ends = [events[-1] for events in found]
    return [(text, end.reason, end.stats.generation_tokens) for text, end in zip(texts, ends, strict=True)]


def rules_of(rules, tokenizer, prompt):
    return LogitRules(**rules.arguments(tokenizer, prompt))


def request_of(rules, sampling):
    return DecodeRequest(PROMPT, max_tokens=MOST, sampling=sampling, rules=rules)


@pytest.fixture(scope="module")
def plain(model):
    """Return each answer, decoded alone by plain steps."""
    return {name: answers(model, 0, [request_of(*each)], batched=False)[0] for name, each in RULES.items()}


@pytest.mark.parametrize("k", sampled([2], [1, 2]))
def test_the_text_depends_neither_on_drafts_nor_on_others(model, plain, k):
    assert answers(model, k, [request_of(*each) for each in RULES.values()]) == list(plain.values())
    assert answers(model, k, [request_of(*RULES["bad_words"])]) == [plain["bad_words"]]
    for name in ("min_tokens, seeded", "bad_words", "xtc"):
        assert answers(model, k, [request_of(*RULES[name])], batched=False) == [plain[name]], name


def test_rules_hold(plain):
    for name, (rules, _) in RULES.items():
        text, reason, made = plain[name]
        assert reason in ("stop", "length")
        assert made >= rules.min_tokens
        assert not any(word in text for word in rules.bad_words), name
        if rules.ignore_eos:
            assert (reason, made) == ("length", MOST), name
        if rules.allowed:
            assert set(text.removesuffix("<e>")) <= set("bcd")


def test_rules_change_the_text(model, plain):
    free = dict(
        zip(RULES, answers(model, 0, [request_of(TokenRules(), how) for _, how in RULES.values()]), strict=True)
    )
    assert [name for name in RULES if free[name] == plain[name] and "greedy" not in name] in ([], ["min_tokens"])


def test_every_tokenization_of_a_word_is_excluded():
    tokenizer = Pieces("Ġcat", "c", "at", "a", "t", "Ġ", "Ċcat", "ca", "ts", "catalog", "Ã", "©", "<s>")
    rules = rules_of(TokenRules(bad_words=("cat", "ca\ts", "é")), tokenizer, 2)
    assert vocabulary(tokenizer).texts[6:7] == [b"\ncat"]
    logits = mx.zeros((1, 14))
    for text, banned in {
        (): {"Ġcat", "Ċcat", "catalog"},
        ("c",): {"Ġcat", "Ċcat", "catalog", "at"},
        ("c", "a"): {"Ġcat", "Ċcat", "catalog", "t", "ts"},
        ("ca",): {"Ġcat", "Ċcat", "catalog", "t", "ts"},
        ("Ã",): {"Ġcat", "Ċcat", "catalog", "©"},
    }.items():
        ids = [1, 1, *map(tokenizer.pieces.index, text)]
        row = rules(mx.array(ids), logits)[0]
        assert {tokenizer.pieces[i] for i in range(13) if row[i].item() < 0} == banned, text
        assert row[13].item() == 0


class Pieces:
    """Return a byte-level BPE tokenizer with these tokens."""

    def __init__(self, *pieces):
        self.pieces, self.added_tokens_decoder, self.eos_token_ids = list(pieces), {}, ()

    def __len__(self):
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]


def test_a_row_without_a_token_left_has_probabilities():
    process = rules_of(TokenRules(ignore_eos=True), Ends(), 1)
    row = process(mx.array([1]), mx.zeros((1, 4), mx.float16))
    assert mx.isfinite(row - mx.logsumexp(row, axis=-1, keepdims=True)).all().item()


class Ends:
    eos_token_ids = frozenset(range(4))


def chat(served, **body):
    messages = [{"role": "user", "content": "What does len do?"}]
    return served.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 20, **body})


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_token_ids": [-1]}, {"stop_token_ids": [1 << 40]}, {"stop_token_ids": 5}, {"bad_words": ["a", ""]},
        {"bad_words": "a"}, {"min_tokens": 21}, {"min_tokens": 1.5}, {"ignore_eos": "yes"}, {"xtc_probability": 2},
        {"repeat_penalty": 2, "repetition_penalty": 3}, {"allowed_token_ids": [True]}, {"max_tokens": -2},
    ],
)  # fmt: skip
def test_invalid_values_are_refused_by_name(one_layer, wrong):
    found = chat(one_layer, **wrong)
    assert found.status_code == 400
    assert next(iter(wrong)) in found.json()["error"]["message"]


def test_stop_tokens_end_the_answer_before_them(served):
    tokenizer, text = served.service.info.tokenizer, chat(served).json()["choices"][0]["message"]["content"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stopped = chat(served, stop_token_ids=[ids[4]]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["content"] == tokenizer.decode(ids[: ids.index(ids[4])])


def test_fields_reach_the_rules(one_layer):
    text = chat(one_layer).json()["choices"][0]["message"]["content"]
    word = text.split()[2]
    assert word not in chat(one_layer, bad_words=[word]).json()["choices"][0]["message"]["content"]
    same = {"seed": 4, "temperature": 1.0, "max_tokens": 12}
    xtc = [chat(one_layer, **same, xtc_probability=1.0, xtc_threshold=t).json()["choices"] for t in (0.001, 0.6)]
    assert xtc[0] != xtc[1] == chat(one_layer, **same).json()["choices"]
    messages = {"messages": [{"role": "user", "content": "Write a function that sorts."}], "max_tokens": 14}
    every = [
        chat(one_layer, **messages, **penalty).json()["choices"]
        for penalty in (
            {"repeat_penalty": 5.0},
            {"repetition_penalty": 5.0},
            {},
            {"repeat_penalty": 5.0, "repeat_last_n": 0},
        )
    ]
    assert every[0] == every[1] != every[2] == every[3]


def test_minus_one_is_no_limit_and_no_seed(one_layer):
    end = chat(one_layer, max_tokens=30, ignore_eos=True).json()["choices"][0]["message"]["content"][-8:]
    whole = chat(one_layer, max_tokens=-1, ignore_eos=True, stop=[end]).json()
    assert (whole["usage"]["completion_tokens"] > 20, whole["choices"][0]["finish_reason"]) == (True, "stop")
    draws = {
        chat(one_layer, seed=-1, temperature=2.0, max_tokens=8).json()["choices"][0]["message"]["content"]
        for _ in range(3)
    }
    assert len(draws) == 3


def test_letters_of_bytes_do_not_depend_on_what_was_imported_before(monkeypatch):
    """transformers replaces its module `convert_slow_tokenizer` by a function of that name once that is used."""
    monkeypatch.setattr(transformers, "convert_slow_tokenizer", lambda: None)
    assert len(runpy.run_module("mlx_mtp.serve.token_rules")["BYTES"]) == 256
