"""Transcode GGUF files to MLX checkpoints: the integers of a block stay as they are, its scales are stored anew."""
