"""Transcode GGUF files to MLX checkpoints: a block's integers stay the same, its scales change their form."""
