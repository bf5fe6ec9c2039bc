"""Give no port to families that look like wrappers of a language model, but compute something else."""

import copy
import sys
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
import wrappers
from mlx_lm.models import deepseek_v3, llama, qwen3_5
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import RotatingKVCache

from mlx_mtp.models import find_port

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED["original_max_position_embeddings"] = 64
LLAMA = {**wrappers.SIZES, "model_type": "llama"}


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    text_config: dict


class Wrapper(nn.Module):
    """A wrapper without tricks."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.language_model = llama.Model(llama.ModelArgs.from_dict(args.text_config))

    def __call__(self, inputs, cache=None, input_embeddings=None):
        return self.language_model(inputs, cache=cache, input_embeddings=input_embeddings)


class ScaledLogits(Wrapper):
    def __call__(self, inputs, cache=None):
        return self.language_model(inputs, cache) * 0.5


class CappedLogits(Wrapper):
    def __call__(self, inputs, cache=None):
        return mx.tanh(self.language_model(inputs, cache))


class OtherTokens(Wrapper):
    def __call__(self, inputs, cache=None):
        return self.language_model(inputs + 1, cache)


class NoCache(Wrapper):
    def __call__(self, inputs, cache=None):
        return self.language_model(inputs)


class OwnEmbeddings(Wrapper):
    def __call__(self, inputs, cache=None):
        embedded = self.language_model.model.embed_tokens(inputs) * 2
        return self.language_model(inputs, cache, embedded)


class Twice(Wrapper):
    def __call__(self, inputs, cache=None):
        self.language_model(inputs, cache)
        return self.language_model(inputs, cache)


class PastTheNorm(Wrapper):
    def __call__(self, inputs, cache=None):
        return self.language_model.lm_head(self.language_model.model.embed_tokens(inputs))


class SecondModule(Wrapper):
    """Its output needs no second module, but a later version's might."""

    def __init__(self, args):
        super().__init__(args)
        self.adapter = nn.Linear(8, 8)


class Norm(nn.RMSNorm):
    def __call__(self, x):
        return super().__call__(x) * 2


class OtherNorm(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.model.norm = Norm(args.text_config["hidden_size"])


class OtherScale(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.layers[1].self_attn.scale *= 2


class OtherRotation(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.layers[-1].self_attn.rope.base = 5.0


class OtherList(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.model.layer_types = ["sliding_attention"] * 4


class OtherFrequencies(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        for layer in self.language_model.layers:
            layer.self_attn.rope._freqs = layer.self_attn.rope._freqs * 2


class OtherCaches(Wrapper):
    def make_cache(self):
        return [RotatingKVCache(4) for _ in self.language_model.layers]


class FewerLayers(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.model.layers.pop()


class Subclass(llama.Model):
    def __call__(self, *args, **options):
        return super().__call__(*args, **options) * 2


class OfSubclass(Wrapper):
    def __init__(self, args):
        super().__init__(args)
        self.language_model = Subclass(self.language_model.args)


class Language(nn.Module):
    """A language model of its own with the layers of a family."""

    def __init__(self, args):
        super().__init__()
        self.args, self.model = args, deepseek_v3.DeepseekV3Model(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs, cache=None):
        return self.lm_head(self.model(inputs, cache))


class ScaledLanguage(Language):
    def __call__(self, inputs, cache=None):
        return self.lm_head(self.model(inputs, cache) * 2)


class BiasedLanguage(Language):
    def __init__(self, args):
        super().__init__(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=True)


def of_layers(kind):
    """Return a wrapper of a language model of this class."""

    def build(self, args):
        nn.Module.__init__(self)
        self.args = args
        self.language_model = kind(deepseek_v3.ModelArgs.from_dict(args.text_config))

    return type("Model", (Wrapper,), {"__init__": build})


class Doubled(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 2


class OtherLinears(qwen3_5.Model):
    """Only a linear layer has another class, as in `prism_hadamard_qwen35`."""

    def __init__(self, args):
        super().__init__(args)
        size = self.language_model.args.hidden_size
        self.language_model.model.layers[0].mlp.down_proj = Doubled(48, size, bias=False)


class OtherMixer(qwen3_5.Model):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.model.norm = Norm(self.language_model.args.hidden_size)


class OtherCall(qwen3_5.Model):
    def __call__(self, *args, **options):
        return super().__call__(*args, **options) * 2


class OtherValue(qwen3_5.Model):
    def __init__(self, args):
        super().__init__(args)
        self.language_model.model.layers[0].linear_attn.head_v_dim = 6


def port(monkeypatch, model, args, text):
    """Return the port that a family of mlx-lm's with these classes gets."""
    name = f"mlx_lm.models.{model.__name__.lower()}"
    made = ModuleType(name)
    made.Model, made.ModelArgs = model, args
    monkeypatch.setitem(sys.modules, name, made)
    return find_port({"model_type": name.rpartition(".")[2], "text_config": copy.deepcopy(text)})


HONEST = [
    (Wrapper, ModelArgs, LLAMA, "llama"),
    (Wrapper, ModelArgs, {**LLAMA, "rope_scaling": SCALED}, "llama"),
    (of_layers(Language), ModelArgs, wrappers.DEEPSEEK, "deepseek_v3"),
    (OtherLinears, qwen3_5.ModelArgs, wrappers.qwen.QWEN_TEXT, "qwen3_5"),
]
LYING = [
    *((kind, ModelArgs, LLAMA) for kind in (ScaledLogits, CappedLogits, OtherTokens, NoCache, OwnEmbeddings, Twice)),
    *((kind, ModelArgs, LLAMA) for kind in (PastTheNorm, SecondModule, OtherNorm, OtherScale, OtherRotation)),
    *((kind, ModelArgs, LLAMA) for kind in (FewerLayers, OfSubclass, OtherList, OtherCaches)),
    (OtherFrequencies, ModelArgs, {**LLAMA, "rope_scaling": SCALED}),
    *((of_layers(kind), ModelArgs, wrappers.DEEPSEEK) for kind in (ScaledLanguage, BiasedLanguage)),
    *((kind, qwen3_5.ModelArgs, wrappers.qwen.QWEN_TEXT) for kind in (OtherMixer, OtherCall, OtherValue)),
]


@pytest.mark.parametrize(("model", "args", "text", "family"), HONEST)
def test_a_family_that_adds_nothing_gets_the_port(monkeypatch, model, args, text, family):
    assert port(monkeypatch, model, args, text).Model.__module__ == f"mlx_mtp.models.{family}"


@pytest.mark.parametrize(("model", "args", "text"), LYING)
def test_a_family_that_computes_something_else_gets_none(monkeypatch, model, args, text):
    assert port(monkeypatch, model, args, text) is None
