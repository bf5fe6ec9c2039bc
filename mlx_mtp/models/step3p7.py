"""Port Step-3.7-Flash: Step-3.5's text model inside a vision wrapper; only text is decoded.

The wrapper keeps the text model's tensor names, which vision conversions put under `language_model.`, and its config
under `text_config`. Sources: transformers `conversion_mapping.py` ("step3p7") and `modeling_step3p7.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..layers.port import Tensors
from . import step3p5


@dataclass
class ModelArgs(step3p5.ModelArgs):
    """config.json's fields for `step3p7`, which are those of its `text_config`."""

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "ModelArgs":
        return super().from_dict({**params, **params.get("text_config", {}), "model_type": "step3p5"})


class Model(step3p5.Model):
    """Step-3.5's port without the vision tower's tensors."""

    SPEC = replace(step3p5.Model.SPEC, prefix=r"(?:language_model\.)?" + step3p5.Model.SPEC.prefix)
    IGNORED = ("vision_model.", "vit_large_projector.")

    def renamed(self, name: str) -> list[str]:
        return super().renamed(name.removeprefix("language_model."))

    def sanitized(self, trunk: Tensors, heads: Tensors, *, shift_trunk: bool, shift_heads: bool) -> Tensors:
        trunk = {name.removeprefix("language_model."): w for name, w in trunk.items()}
        return super().sanitized(trunk, heads, shift_trunk=shift_trunk, shift_heads=shift_heads)
