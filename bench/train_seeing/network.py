"""The demo that sees while it is trained: transformers' Qwen3.5-VL, and one MTP layer of its classes."""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

HEAD_DEPTHS = 2  # the MTP layer is also trained on its own output


class Head(nn.Module):
    """One MTP layer with the released checkpoints' names; it shares the embedding and the LM head."""

    def __init__(self, config: Any):
        super().__init__()
        size, norm = config.hidden_size, qwen.Qwen3_5RMSNorm
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (norm(size) for _ in range(3))

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
        """Return the normed output [B, L, H] for the next tokens' embeddings and the hidden states of these rows."""
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.layers[0](self.fc(torch.cat(pair, dim=-1)), position_embeddings=angles)
        return self.norm(x)


class Seeing(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.whole = qwen.Qwen3_5ForConditionalGeneration(Qwen3_5Config.from_dict(config))
        self.mtp = Head(self.whole.config.text_config)

    def forward(self, tokens: torch.Tensor, pixels: Any, grids: Any, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return logits [B, L, V] of the next tokens, then of the drafts at each depth.

        pixels, grids: of all pictures of the batch, or None. positions: int [3, B, L].
        """
        inner, whole = self.whole.model, self.whole
        x = inner.get_input_embeddings()(tokens)
        if pixels is not None:
            features = torch.cat(inner.get_image_features(pixels, grids).pooler_output)
            marks = (tokens == whole.config.image_token_id)[..., None].expand_as(x)
            x = x.masked_scatter(marks, features)
        hidden = inner.language_model(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state
        angles = inner.language_model.rotary_emb(x, positions)
        found = [whole.lm_head(hidden)]
        for depth in range(1, HEAD_DEPTHS + 1):
            later = torch.cat([x[:, depth:], torch.zeros_like(x[:, :depth])], dim=1)
            hidden = self.mtp(later, hidden, angles)
            found.append(whole.lm_head(hidden))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all weights by the names of released checkpoints."""
        return self.whole.state_dict() | {f"mtp.{name}": value for name, value in self.mtp.state_dict().items()}

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Set all weights from those that `tensors` returned."""
        parts = {"": self.whole, "mtp.": self.mtp}
        for prefix, part in parts.items():
            part.load_state_dict({name: tensors[prefix + name] for name in part.state_dict()})


def loss_of(
    logits: list[torch.Tensor], tokens: torch.Tensor, answer: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """Return the loss, and the share of right tokens of the model and of each depth of drafts.

    answer: 1.0 where a token belongs to the answer, [B, L]. A draft counts if the answer has the token before it.
    """
    total, right = torch.zeros(()), []
    for depth, found in enumerate(logits):
        ahead = depth + 1
        counted = answer[:, ahead:] * answer[:, 1 : answer.shape[1] - depth]
        targets, found = tokens[:, ahead:], found[:, :-ahead]
        losses = nn.functional.cross_entropy(found.transpose(1, 2), targets, reduction="none")
        total = total + (1.0 if depth == 0 else 0.5) * (losses * counted).sum() / counted.sum()
        right.append(float(((found.argmax(-1) == targets) * counted).sum() / counted.sum()))
    return total, right
