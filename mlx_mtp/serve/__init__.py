"""Serve a model over HTTP: OpenAI's and Anthropic's APIs, on one thread that owns MLX."""

import logging

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the program that embeds the server chooses its log
