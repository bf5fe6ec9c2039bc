"""Choosing the tokens of a pass takes few launches, and as many for sixteen rows as for one."""

import itertools
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
import tiny

import mlx_mtp
from mlx_mtp.bench.census import operations
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.decoding.logit_rules import LogitRules
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.pick import pick
from mlx_mtp.decoding.sampling import Picker, Sampling
from mlx_mtp.emulator.kernel import replaced
from mlx_mtp.kernels import drop_new
from mlx_mtp.layers.lm_head import place_heads

SETTINGS = {"top_p": 0.9, "min_p": 0.1, "min_tokens_to_keep": 3, "xtc_probability": 0.5, "top_k": 20}
COMBINATIONS = [
    dict(itertools.compress(SETTINGS.items(), chosen)) for chosen in itertools.product((0, 1), repeat=len(SETTINGS))
]
RULES = LogitRules(logit_bias={3: 1.0}, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
VOCAB, ROWS = 41, (1, 4, 8, 16)
SEVERAL = {"Sort", "ArgSort", "Partition", "ArgPartition", "Concatenate"}  # a launch per pass or input


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose LM head chooses tokens in all row counts."""
    config = {**tiny.CONFIG, "vocab_size": VOCAB}
    made = mlx_mtp.load_model(tiny.save(tmp_path_factory.mktemp("m"), config, tiny.random_weights(config)))
    for head in place_heads(made):
        head.rows = frozenset(range(1, 65))
    return made


@pytest.fixture(autouse=True)
def without_launches():
    """Stand-ins leave launches that no kernel could run."""
    yield
    drop_new()


class Counted:
    """A maker of kernels whose outputs are zeros that depend on the inputs; `names` are those launched."""

    def __init__(self):
        self.names = []

    def __call__(self, name, **_):
        def launch(*, inputs, output_shapes, output_dtypes, **_):
            self.names.append(name)
            zeros = [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]
            return mx.depends(zeros, [each for each in inputs if isinstance(each, mx.array)])

        return launch


def chosen(model, rows, pickers, masked):
    """Build the choice of `rows` rows of each sequence; return its tokens' graph."""
    n, words = len(pickers), -(-VOCAB // 32)
    hidden, drafts = mx.zeros((n, rows, 32)), mx.zeros((n, rows - 1), mx.int32) if rows > 1 else None
    masks = mx.full((n, rows, words), 5, mx.int32) if masked else None
    position = mx.full((n,), 7, mx.int32)
    mx.eval([each for each in (hidden, drafts, masks, position) if each is not None])
    members = [Single(picker, TokenHistory([1, 2, 3, 1])) for picker in pickers]
    return pick(model, hidden, position, drafts, members, masks)[0]


def launches(model, rows, pickers, masked=False):
    """Return the number of launches of a choice: kernels, and MLX's operations, of which none launches several.

    The norm is one on a GPU, and several operations in a graph made on a CPU.
    """
    maker, norm = Counted(), operations(model.normed(mx.zeros((len(pickers), rows, 32)))).total()
    with replaced(maker):
        found = operations(chosen(model, rows, pickers, masked))
    assert not SEVERAL & {*found}
    return found.total() - norm + 1 + len(maker.names)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rules", [(), (RULES,)], ids=["free", "rules"])
def test_all_combinations_take_at_most_ten_launches(model, rules, masked):
    for options in COMBINATIONS:
        picker = Picker(Sampling(temp=0.8, **options), processors=rules)
        found = {rows: launches(model, rows, [picker], masked) for rows in ROWS}
        assert max(found.values()) <= 10, (options, found)
        assert len(set(found.values())) == 1, (options, found)


def test_greedy_choices_take_at_most_four_launches_under_a_mask(model):
    for rows in ROWS:
        assert launches(model, rows, [Picker()]) <= 3
        assert launches(model, rows, [Picker()], masked=True) <= 4
        assert launches(model, rows, [Picker(Sampling(temp=0.7))], masked=True) <= 6


@pytest.mark.parametrize("recorded", [False, True], ids=["built", "recorded"])
@pytest.mark.parametrize("masked", [False, True])
def test_sequences_with_different_options_share_the_launches(model, masked, recorded):
    options = [{"temp": 0.8, "top_p": 0.95}, {}, {"temp": 1.2, "top_k": 5, "xtc_probability": 0.5}, {"temp": 1.0}]
    pickers = [Picker(Sampling(**each), processors=(RULES,) * (i % 2)) for i, each in enumerate(options)]
    pickers += [Picker(Sampling(temp=0.7, **SETTINGS), processors=(RULES,))]
    if recorded:
        keys = mx.array([[i, i] for i in range(5)], mx.uint32)
        pickers = [replace(each, key=keys[i], step_keys=keys) for i, each in enumerate(pickers)]
    found = {(n, rows): launches(model, rows, pickers[:n], masked) for n in range(2, 6) for rows in ROWS}
    assert max(found.values()) <= 10, found
    assert len(set(found.values())) == 1, found


def calls(function):
    """Return the number of Python and C calls of a function."""
    found = []
    sys.setprofile(lambda _, event, __: found.append(event) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(found)


@pytest.mark.parametrize("rules", [(), (RULES,)], ids=["free", "rules"])
def test_the_host_works_no_more_for_more_rows(model, rules):
    picker, found = Picker(Sampling(temp=0.8, top_p=0.9, min_p=0.05), processors=rules), {}
    with replaced(Counted()):
        for rows in (2, 2, 16, 16):  # the first of each makes kernels and constants
            found[rows] = calls(lambda rows=rows: chosen(model, rows, [picker], True))
    assert found[16] <= found[2] + 2


@pytest.mark.parametrize("n", [1, 3])
def test_a_callers_processor_gets_logits_before_the_mask(model, n):
    seen = []

    def process(_, logits):
        seen.append(mx.isfinite(logits).all().item())
        return logits + mx.where(mx.arange(VOCAB) == 1, 100.0, 0.0)  # a token that the mask forbids

    pickers = [Picker(processors=(process,)), Picker(), Picker(Sampling(temp=1.0))][:n]
    found = chosen(model, 4, pickers, True)
    assert {*found.flatten().tolist()} <= {0, 2, 32, 34}
    assert seen == [True] * 4
