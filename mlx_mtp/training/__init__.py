"""Train MTP heads: record the model's most likely tokens, train on them, measure on held-out text, write a file."""
