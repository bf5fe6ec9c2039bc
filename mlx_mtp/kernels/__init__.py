"""Run the Metal kernels of a verify, one module per op: the reference in plain MLX ops and the public function.

The public function runs the kernel on Metal, else the reference. The bodies are in `kernels/*.metal`.
"""
# ruff: noqa: F401 callers import these names from here

from ._blocks import BLOCK_FORMATS, block_mode, block_product, block_scales, dequantized_blocks, quantized_blocks
from ._first_launch import KernelRefused, Refusal, all_ran, drop_new, launched, out_of_memory, run_again, run_new
from ._matrix import has_twin, matrix_rows, take_order
from ._quantized import SPLIT_ROWS, Quantized, multiplied, served, splits, stock_product
from ._routing import Routing, route_ref
from ._source import on_metal, padded, source_bytes
from .add_norm import add_norm, add_norm_ref
from .change_logits import Changes, Paths, Words, change_logits, change_logits_ref, masked
from .choose_rows import choose_rows, choose_rows_ref, draw_scores
from .delta_inputs import DeltaInputs, Gates, delta_inputs, delta_inputs_ref
from .gated_delta_verify import gated_delta_verify, gated_delta_verify_ref
from .gated_norm import gated_norm, gated_norm_ref
from .mamba2_verify import mamba2_verify, mamba2_verify_ref
from .matrix_order import MatrixOrder, matrix_orders, metal_sum
from .matrix_products import matrix_gemv, matrix_glu, matrix_heads, matrix_qmm
from .norm_rope import RopeArguments, norm_rope, norm_rope_ref
from .verify_attention import attention_served, attention_splits, verify_attention, verify_attention_ref
from .verify_gemv import verify_gemv, verify_gemv_ref
from .verify_head import draw_ref, top_ref, verify_head, verify_head_draw, verify_head_ref, verify_head_top
from .verify_latent_attention import verify_latent_attention, verify_latent_attention_ref
from .verify_moe import Experts, moe_splits, verify_moe, verify_moe_ref
from .verify_qmm import verify_glu, verify_glu_ref, verify_qmm, verify_qmm_heads, verify_qmm_heads_ref, verify_qmm_ref

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
