"""Model ports, one file per `model_type`. A port `mlx_mtp/models/<model_type>.py` defines

- `ModelArgs`: mlx-lm's dataclass of config.json, with `head_dim` and `vocab_size`;
- `SPEC`: the family's MTPSpec;
- `IGNORED`: prefixes of tensors that text decoding does not use (a vision tower), named in the load report;
- `Model(args, heads=0)`: mlx-lm's model with `heads` MTPHead modules in `mtp`, and
    `hidden(tokens [1, L], cache) -> [1, L, H]`   residual stream before the final norm,
    `logits(hidden) -> [1, L, V]`                 final norm and LM head,
    `capture(hidden) -> [1, L, H]`                what depth 0 reads of it,
    `draft_logits(depth, output) -> [1, L, V]`    logits of a head's block output,
    `no_hidden() -> [1, 1, H]`                    zeros, in the dtype of hidden states,
    `windows() / head_windows()`                  attention window (or None) per layer and per head,
    `sanitize(weights, *, shift_trunk, shift_heads)`  checkpoint names and values -> this module's.

Nothing outside this package knows a family by name.
"""
