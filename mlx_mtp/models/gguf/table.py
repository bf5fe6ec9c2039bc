"""Find the family of a GGUF file's architecture."""

from .dense import GEMMA3, LLAMA, QWEN2, QWEN3, QWEN3_MOE
from .family import Family
from .hybrid import NEMOTRON, QWEN3_NEXT, QWEN35
from .meta import Meta
from .nextn import DEEPSEEK, GLM, GLM_DSA, MIMO, STEP

FAMILIES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3_MOE,
    "gemma3": GEMMA3,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35,
    "qwen3next": QWEN3_NEXT,
    "nemotron_h": NEMOTRON,
    "nemotron_h_moe": NEMOTRON,
    "step35": STEP,
    "glm4moe": GLM,
    "glm-dsa": GLM_DSA,
    "deepseek2": DEEPSEEK,
    "mimo2": MIMO,
}


def find_family(meta: Meta) -> Family:
    """Return the description of a file's family, by its architecture; ValueError names the supported ones."""
    if found := FAMILIES.get(meta.architecture):
        return found
    known = ", ".join(sorted(FAMILIES))
    raise ValueError(f"{meta.file}: architecture {meta.architecture!r} is not supported; supported are {known}")
