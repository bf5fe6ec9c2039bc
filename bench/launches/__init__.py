"""Count the launches of layers and cycles in recorded graphs, without a GPU: `python -m bench.launches`."""
