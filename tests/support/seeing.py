"""Write tiny random Qwen3.5-VL checkpoints with heads, a vision tower, a tokenizer and a chat template."""

import json
from pathlib import Path

import families
import qwen
import tiny
from shapes import H, Shapes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *MARKS,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]
VOCAB = {token: i for i, token in enumerate([*ALPHABET, *SPECIAL])}
START, PAD, END, VIDEO = (VOCAB[mark] for mark in MARKS)
SIZE = 272  # of the vocabulary: a few rows have no token, as in released models

# A patch has 4 x 4 pixels and a row of the language model 2 x 2 patches, so that small pictures have several rows.
VISION = {
    "model_type": "qwen3_5",
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 25,
    "out_hidden_size": H,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
    "initializer_range": 0.02,
}
PREPROCESSOR = {
    "size": {"shortest_edge": 64, "longest_edge": 16384},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
# A head size of 32, half of it rotated: of the 8 frequencies 3 turn with time, 3 with y and 2 with x.
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
TEXT = {"head_dim": 32, "vocab_size": SIZE, "rope_parameters": ROPE, "eos_token_id": VOCAB["<|endoftext|>"]}
IDS = {
    "image_token_id": PAD,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
PARTS = (
    "{%- macro parts(content, plain) -%}{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content or [] -%}{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}"
    "{%- if plain -%}{{ raise_exception('System message cannot contain images.') }}{%- endif -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
CALLS = (
    "{%- for c in m.tool_calls or [] -%}{%- set f = c.function -%}"
    "{{ '\\n<tool_call>\\n<function=' ~ f.name ~ '>\\n' }}{%- for k, v in f.arguments | items -%}"
    "{{ '<parameter=' ~ k ~ '>\\n' ~ (v if v is string else v | tojson) ~ '\\n</parameter>\\n' }}{%- endfor -%}"
    "{{ '</function>\\n</tool_call>' }}{%- endfor -%}"
)
TEMPLATE = (
    PARTS + "{%- if tools -%}{{ '<|im_start|>system\\n' }}{%- for t in tools -%}{{ t | tojson ~ '\\n' }}"
    "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endif -%}{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' ~ parts(m.content, false) ~ '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else -%}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ parts(m.content, m.role == 'system') }}"
    + CALLS
    + "{{ '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def tokenizer(special=SPECIAL, template=TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, the special tokens, and a chat template that prints them."""
    bytewise = Tokenizer(models.BPE({token: VOCAB[token] for token in ALPHABET}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def tower_shapes(vision: dict) -> Shapes:
    """Return the tower's and the merger's tensors by the names of released checkpoints."""
    D, inner, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    shapes: Shapes = {"patch_embed.proj.weight": (D, *patch), "patch_embed.proj.bias": (D,)}
    shapes["pos_embed.weight"] = (vision["num_position_embeddings"], D)
    layers = {"attn.qkv": (3 * D, D), "attn.proj": (D, D), "mlp.linear_fc1": (inner, D), "mlp.linear_fc2": (D, inner)}
    for i in range(vision["depth"]):
        for name, shape in layers.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{i}.norm{n}.{kind}": (D,) for n in (1, 2) for kind in ("weight", "bias")}
    shapes |= {f"merger.norm.{kind}": (D,) for kind in ("weight", "bias")}
    for name, rows in (("linear_fc1", merged), ("linear_fc2", vision["out_hidden_size"])):
        shapes |= {f"merger.{name}.weight": (rows, merged), f"merger.{name}.bias": (rows,)}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def config_of(*, moe: bool) -> dict:
    family = qwen.QWEN_MOE if moe else qwen.QWEN
    return {**family, "text_config": {**family["text_config"], **TEXT}, "vision_config": VISION, **IDS}


def tower_weights(seed: int = 0, vision: dict = VISION) -> dict:
    """Return random tensors of the tower and the merger."""
    return families.random_weights(tower_shapes(vision), seed + 2000, scale=0.1)


def build(path: Path, *, moe: bool = False, seed: int = 0, **vision) -> tuple[Path, dict]:
    """Write a checkpoint directory with tokenizer and preprocessor_config.json; return it and its tensors.

    vision: values that replace the tower's in config.json.
    """
    config = config_of(moe=moe)
    config["vision_config"] = VISION | vision
    shapes = qwen.qwen_trunk(config) | qwen.qwen_heads(config)
    shapes |= {name: (SIZE, H) for name in shapes if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    weights = families.random_weights(shapes, seed, zero_centred=True)
    weights |= tower_weights(seed, config["vision_config"])
    tiny.save(path, config, weights)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    tokenizer().save_pretrained(path)
    return path, weights
