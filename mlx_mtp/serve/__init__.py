"""Serve a model over HTTP: OpenAI's and Anthropic's APIs, on one thread that owns MLX."""
