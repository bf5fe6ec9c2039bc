"""Run `verify-lossless` on block drafters that are wired, stored or converted wrongly: their drafts get worse."""

import itertools

import block_drafters
import families
import mlx.core as mx
import pytest
import trained
import trained_block
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.checkpoint.block_drafter import set_drafter
from mlx_mtp.decoding.drafters.block import Block
from mlx_mtp.decoding.run import Drafts
from mlx_mtp.lossless import check
from mlx_mtp.lossless.block import block_alternatives, right_block, wired
from mlx_mtp.lossless.check import CheckSettings, Verdict, _kept, conclude, examine_block, verify
from mlx_mtp.lossless.compare import Comparison, Reference, compare, ways
from mlx_mtp.lossless.heads import Known
from mlx_mtp.lossless.prompts import NamedPrompt
from mlx_mtp.lossless.rounding_judge import OnePass

K = trained_block.BLOCK
MASKS = [trained_block.MASK, 12]  # as a tokenizer's special tokens


def load(path, kind, **changed):
    target, drafter = trained_block.save(path, kind, **changed)
    return mlx_mtp.load_model(target, draft_model=drafter)


def verdict_on(model, count=1, **settings):
    """The verdict on the drafter alone, from texts that it was not trained on."""
    passes = [OnePass(model, trained.text(seed)) for seed in range(1000, 1000 + count)]
    texts = [Known.of(p.tokens, p.hidden, p.predicted) for p in passes]
    verdict = Verdict("float32")
    examine_block(model, texts, CheckSettings(K, **settings), verdict, lambda *_: None, masks=MASKS)
    conclude(model, verdict)
    return verdict


@pytest.fixture(scope="module")
def right_models(tmp_path_factory):
    return {kind: load(tmp_path_factory.mktemp(kind), kind) for kind in trained_block.KINDS}


@pytest.mark.parametrize("kind", sampled(["dflash2"], trained_block.KINDS))
def test_a_correct_drafter_passes(right_models, kind):
    verdict = verdict_on(right_models[kind], 2 if SWEEP else 1)
    assert verdict.agreement[0] > 0.4, verdict.agreement
    assert (verdict.broken, verdict.warnings) == ([], [])


def test_next_to_heads_the_block_drafter_is_examined(tmp_path):
    target = families.build("glm4_moe_untied", tmp_path / "target")[0]
    heads = mlx_mtp.load_model(target)
    width, vocab = heads.no_hidden().shape[-1], heads.vocab_size
    drafter = block_drafters.save_for(tmp_path / "drafter", "dspark", width, vocab)
    found = []
    for mtp in (True, False):
        model = mlx_mtp.load_model(target, draft_model=drafter, mtp=mtp)
        of_one = OnePass(model, [i * i % vocab for i in range(40)])
        text = Known.of(of_one.tokens, of_one.hidden, of_one.predicted)
        rights = [right_block(model, text, 3)]
        rights += [wiring.right(model, text, 3) for wiring in block_alternatives(model, [0, 1])[:3]]
        assert model.taps == (1, 2)
        found.append([[right.tolist() for right in each] for each in rights])
    assert found[0] == found[1]


def options(**changed):
    """A config's fault: other keys in `dflash_config`, which precede those at the top level."""
    return lambda config, weights: ({**config, "dflash_config": {**config["dflash_config"], **changed}}, weights)


def norms(part, shift=-1):
    """Weights' fault: norms whose name contains `part`, shifted."""

    def plant(config, weights):
        assert any(part in n for n in weights)
        return config, {n: w + shift if part in n and n.endswith("norm.weight") else w for n, w in weights.items()}

    return plant


def swapped(config, weights):
    return config, {**weights, "fc.weight": mx.concatenate(mx.split(weights["fc.weight"], 2, axis=1)[::-1], axis=1)}


FAULTS = {
    "layers one too high": options(target_layer_ids=[1, 3]),
    "layers in the reverse order": swapped,
    "another mask token": options(mask_token_id=3),
    "a mask token of no text": options(mask_token_id=5),
    "hidden norm": norms("hidden_norm"),
    "norms of the layers": norms("layernorm"),
    "norms of queries and keys": norms("self_attn"),
    "last norm": norms("norm.weight", 1),
}
NAMED = {
    "layers one too high": "with the target read after layers 1, 3",
    "layers in the reverse order": "with the target's layers in the reverse order",
    "another mask token": "with mask token 11",
    "a mask token of no text": "with mask token 11",
    "hidden norm": "with hidden_norm +1",
    "norms of the layers": "with the norms of the layers +1",
}
FEW = ["layers one too high"]  # the only one that needs another pass of the target


@pytest.mark.parametrize("fault", sampled(FEW, FAULTS))
def test_wrong_wirings_are_found(tmp_path, fault):
    """Of DFlash, all of whose drafts depend on the target's states: a Markov head drafts these texts alone."""
    config, weights = FAULTS[fault](trained_block.KINDS["dflash"], trained_block.stored("dflash"))
    verdict = verdict_on(load(tmp_path, "dflash", config=config, weights=weights), 4 if SWEEP else 2)
    assert verdict.broken, verdict.agreement
    assert NAMED.get(fault, "") in verdict.broken[-1]


def test_other_wirings_are_undone(right_models):
    model = right_models["dspark"]
    net = model.drafter.net
    before = net.shape, [layer.self_attn.reach for layer in net.layers], [mx.array(w) for w in norms_of(net)]
    for wiring in block_alternatives(model, MASKS):
        with wired(model, wiring):
            changed = not all(mx.array_equal(a, b) for a, b in zip(norms_of(net), before[2], strict=True))
            assert wiring.hidden or changed or net.shape != before[0] or "layers" in wiring.name
    assert (net.shape, [layer.self_attn.reach for layer in net.layers]) == before[:2]
    assert model.taps == net.shape.taps
    assert all(mx.array_equal(a, b) for a, b in zip(norms_of(net), before[2], strict=True))


def norms_of(net):
    return [net.hidden_norm.weight, net.norm.weight, net.layers[0].self_attn.q_norm.weight]


class OneRowOff(Block):
    def context(self, model, hidden):
        rows = super().context(model, hidden)
        return mx.concatenate([rows[:, :1], rows[:, :-1]], axis=1)


class LastFirst(Block):
    def propose(self, frame, run, k):
        return Drafts(super().propose(frame, run, k).tokens[:, ::-1])


UNAFFECTED = "dflash2", "rows one off"  # the fixture's drafts hardly depend on the newest row
LOOPS = {"right": Block, "rows one off": OneRowOff, "the last draft first": LastFirst}


@pytest.mark.parametrize(
    ("kind", "plant"),
    sampled(
        [("dflash2", "right"), ("dspark", "rows one off")],
        [pair for pair in itertools.product(trained_block.KINDS, LOOPS) if pair != UNAFFECTED],
    ),
)
def test_a_loop_that_drafts_worse_than_from_the_whole_text_is_found(right_models, kind, plant):
    model = right_models[kind]
    own = model.drafter
    prompts = [
        NamedPrompt(str(seed), trained.text(seed, 12), stops=False) for seed in range(2000, 2004 if SWEEP else 2001)
    ]
    references = [Reference(model, prompt, 48, ()) for prompt in prompts]
    passes = [r.one_pass for r in references]
    rights = [right_block(model, Known.of(p.tokens, p.hidden, p.predicted), K) for p in passes]
    way = ways(K, adaptive=False, p_min=0.5, lookup=False, compiled=False)[K - 1]
    set_drafter(model, LOOPS[plant](own.net))
    comparison = Comparison(way.name)
    for reference in references:
        compare(reference, way, comparison)
    set_drafter(model, own)
    assert not comparison.differences
    verdict = Verdict("float32", kept=_kept(references, rights, [comparison] * (K + 1), K))
    conclude(model, verdict)
    assert bool(verdict.broken) == (plant != "right"), verdict.kept
    # The last blocks of an output are shorter, and their drafts others.
    assert plant != "right" or abs(verdict.kept[0] - verdict.kept[1]) <= K * len(prompts) < verdict.kept[1]


class Letters:
    """A tokenizer of the texts' tokens."""

    has_chat_template = False
    eos_token_ids = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % trained.KINDS for c in text][:40]


def test_the_command_checks_a_block_drafter(right_models, monkeypatch):
    model = right_models["dflash2"]
    monkeypatch.setattr(check, "built_in", lambda *_: [NamedPrompt("p", trained.text(7, 20), stops=False)])
    quick = CheckSettings(K, max_tokens=16, draws=2, adaptive=False, lookup=False, diagnose=False)
    verdict = verify(model, Letters(), quick, lambda *_: None)
    assert verdict.broken == []
    assert len(verdict.agreement) == K
    assert abs(verdict.kept[0] - verdict.kept[1]) <= K < verdict.kept[1]
