"""Build models whose heads have a separate, a shared or a tied LM head."""

import drafters
import families

import mlx_mtp


def build_headed(name, path):
    """Return a model; the drafter's own LM head has seven tokens, which no kernel supports."""
    if name == "eagle":
        config = {**drafters.GQA, "model_type": "mistral", "mlx_lm": "llama", "tie_word_embeddings": True}
        directory, _ = families.headless(path / "target", config)
        return mlx_mtp.load_model(directory, draft_model=drafters.save(path / "drafter", drafters.CONFIG, 32))
    return mlx_mtp.load_model(families.build(name, path, **({"vocab_size": 13} if name != "mimo" else {}))[0])
