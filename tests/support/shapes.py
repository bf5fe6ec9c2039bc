"""List names and shapes of tensors that checkpoints of several families share, by the hub's names."""

Shapes = dict[str, tuple[int, ...]]
H, V = 32, 13


def mlp(prefix: str, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, H),
        f"{prefix}.up_proj.weight": (inner, H),
        f"{prefix}.down_proj.weight": (H, inner),
    }


def moe(prefix: str, config: dict) -> Shapes:
    """Return numbered experts, a gate with a correction bias and shared experts, in DeepSeek's naming."""
    E, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes: Shapes = {f"{prefix}.gate.weight": (E, H), f"{prefix}.gate.e_score_correction_bias": (E,)}
    for e in range(E):
        shapes |= mlp(f"{prefix}.experts.{e}", inner)
    if config.get("n_shared_experts"):
        shapes |= mlp(f"{prefix}.shared_experts", inner * config["n_shared_experts"])
    return shapes


def layer_norms(prefix: str) -> Shapes:
    return {f"{prefix}.input_layernorm.weight": (H,), f"{prefix}.post_attention_layernorm.weight": (H,)}


def gqa(prefix: str, q: int, kv: int, D: int, *, bias: bool, qk_norm: bool = False, v: int | None = None) -> Shapes:
    v = v or D
    shapes: Shapes = {f"{prefix}.o_proj.weight": (H, q * v)}
    for name, rows in (("q", q * D), ("k", kv * D), ("v", kv * v)):
        shapes[f"{prefix}.{name}_proj.weight"] = (rows, H)
        if bias:
            shapes[f"{prefix}.{name}_proj.bias"] = (rows,)
    if qk_norm:
        shapes |= {f"{prefix}.q_norm.weight": (D,), f"{prefix}.k_norm.weight": (D,)}
    return shapes


def mla(prefix: str, config: dict) -> Shapes:
    heads, rank, rope = (config[n] for n in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"))
    nope, v, q_rank = (config[n] for n in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank"))
    return {
        f"{prefix}.q_a_proj.weight": (q_rank, H),
        f"{prefix}.q_a_layernorm.weight": (q_rank,),
        f"{prefix}.q_b_proj.weight": (heads * (nope + rope), q_rank),
        f"{prefix}.kv_a_proj_with_mqa.weight": (rank + rope, H),
        f"{prefix}.kv_a_layernorm.weight": (rank,),
        f"{prefix}.kv_b_proj.weight": (heads * (nope + v), rank),
        f"{prefix}.o_proj.weight": (H, heads * v),
    }


def indexer(prefix: str, config: dict) -> Shapes:
    heads, D = config["index_n_heads"], config["index_head_dim"]
    return {
        f"{prefix}.wq_b.weight": (heads * D, config["q_lora_rank"]),
        f"{prefix}.wk.weight": (D, H),
        f"{prefix}.k_norm.weight": (D,),
        f"{prefix}.k_norm.bias": (D,),
        f"{prefix}.weights_proj.weight": (heads, H),
    }


def ends() -> Shapes:
    return {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)}


def nextn(prefix: str, *, own: bool) -> Shapes:
    shapes: Shapes = {f"{prefix}.{n}.weight": (H,) for n in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{prefix}.eh_proj.weight"] = (H, 2 * H)
    if own:
        shapes |= {f"{prefix}.embed_tokens.weight": (V, H), f"{prefix}.shared_head.head.weight": (V, H)}
    return shapes
