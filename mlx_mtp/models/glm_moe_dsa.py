"""Port GLM-5, 5.1, 5.2: DeepSeek-V3.2's layers under GLM's config, whose indexers rotate interleaved pairs.

In GLM-5.2 most layers have no indexer and reuse the positions that the last indexer before them selected. Its
config.json also reuses the head's first selection for later drafts; here each draft selects again, which changes
drafts only.
Sources: transformers `modeling_glm_moe_dsa.py` and `configuration_glm_moe_dsa.py`, llama.cpp `glm-dsa.cpp`.
"""

from dataclasses import dataclass
from typing import Any

from mlx_lm.models import glm_moe_dsa

from ..layers.mtp_spec import MTPSpec
from ..layers.sparse_mla import Chosen
from . import deepseek_v32

KINDS = {"F": "full", "S": "shared"}


@dataclass
class ModelArgs(glm_moe_dsa.ModelArgs):
    """config.json's fields for `glm_moe_dsa`, with those that state which layers have an indexer.

    `indexer_types` lists "full" for a layer with an indexer, `index_topk_pattern` is a string such as "FFSSS";
    without both, the first `index_skip_topk_offset` layers and every `index_topk_freq`-th layer after them have one.
    """

    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2

    @classmethod
    def respelled(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return the config with keys of expert routing that it lacks, at the defaults of transformers' model."""
        return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, **config}

    def indexers(self) -> list[str]:
        """Return per layer "full" (has an indexer) or "shared" (reuses the selection of the last layer that has one).

        ValueError for a list of another length, other kinds, or a first layer without an indexer.
        """
        layers = range(self.num_hidden_layers)
        late = [max(i - self.index_skip_topk_offset + 1, 0) for i in layers]
        every = ["shared" if i % max(self.index_topk_freq, 1) else "full" for i in late]
        kinds = [KINDS.get(kind, kind) for kind in self.indexer_types or self.index_topk_pattern or every]
        name = "indexer_types" if self.indexer_types or not self.index_topk_pattern else "index_topk_pattern"
        if len(kinds) != len(layers):
            raise ValueError(f"{name} has {len(kinds)} entries; expected one for each of {len(layers)} layers")
        for i, kind in enumerate(kinds):
            if kind not in (("full", "shared") if i else ("full",)):
                raise ValueError(f"{name}[{i}]={kind!r}: allowed are full and, but for the first, shared")
        return kinds


class Model(deepseek_v32.Model):
    BASE = glm_moe_dsa.Model

    def __init__(self, args: ModelArgs, heads: int = 0, spec: MTPSpec | None = None):
        super().__init__(args, heads, spec)
        handed_on = Chosen()
        for layer, kind in zip(self.model.layers, args.indexers(), strict=True):
            layer.self_attn.handed_on = handed_on
            if kind == "shared":
                layer.self_attn.pop("indexer")
