"""Serve a tiny model whose answer is dictated, with a chat template for tools."""
