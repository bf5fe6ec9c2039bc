"""Train MTP heads for a model: record its choices, train on them, compare held-out acceptance, write a sidecar."""
