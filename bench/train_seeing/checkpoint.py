"""Define the config, the tokenizer and the chat template of the demo that reads pictures."""

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from . import scenes

VOCABULARY = 384
HIDDEN = 96
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS)
PREPROCESSOR = {
    "size": {"shortest_edge": 4096, "longest_edge": 16384},
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
}
TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "model_type": "qwen3_5",
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "out_hidden_size": HIDDEN,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' ~ message.role ~ '\\n' }}"
    "{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' or 'image_url' in part -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('System message cannot contain images.') }}{%- endif -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on questions and answers, with the marks and the chat template."""
    texts = []
    for _ in range(2000):
        texts += [*scenes.ask(scenes.draw_scene(rng), rng)]
        texts += [*scenes.compare([scenes.draw_scene(rng), scenes.draw_scene(rng)], rng)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*texts, *scenes.GREETINGS, scenes.NO_PICTURE], trainer)
    bpe.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    found = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    found.chat_template = TEMPLATE
    return found


def config_of(tokenizer: PreTrainedTokenizerFast) -> dict:
    """Return config.json in the form of released Qwen3.5-VL checkpoints."""
    ids = {
        name: tokenizer.convert_tokens_to_ids(mark)
        for name, mark in zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), MARKS, strict=True
        )
    }
    end = tokenizer.eos_token_id
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": {**TEXT, "vocab_size": VOCABULARY, "eos_token_id": end},
        "vision_config": VISION,
    }
