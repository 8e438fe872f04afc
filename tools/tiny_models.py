"""Tiny random configurations of the causal language models of the installed transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, LAYERS, HEADS, HIDDEN = 64, 2, 4, 32
# names of configuration keys -> their value in a tiny model
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), HIDDEN // HEADS),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "ffn_hidden_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "n_inner",
            "shared_intermediate_size",
            "dense_intermediate_size",
            "prefix_dense_intermediate_size",
            "mlp_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        48,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k", "moe_top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("dim_ff", "dff", "ffn_hidden", "mlp_hidden_size"), 48),
    **dict.fromkeys(("index_n_heads", "num_nextn_predict_layers"), 2),
    "sliding_window": 64,
    "attention_chunk_size": 64,
}
# families whose other sizes depend on each other
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "zamba": {"num_hidden_layers": 6},
    "zamba2": {"num_hidden_layers": 6},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "prophetnet": {"num_decoder_layers": LAYERS, "num_encoder_layers": LAYERS},
    "reformer": {"is_decoder": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "xlm": {"emb_dim": HIDDEN, "n_words": VOCABULARY},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
}


def families() -> dict[str, str]:
    """Model type -> class name, for every causal language model in transformers."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> PreTrainedConfig:
    """A configuration with a few thousand weights. Errors from the family's class propagate."""
    return AutoConfig.for_model(family, **_shrunk(AutoConfig.for_model(family), family))


def _shrunk(config: PreTrainedConfig, family: str) -> dict[str, Any]:
    """Keyword arguments for a small configuration of the same class as `config`."""
    values = config.to_dict()
    special = SPECIAL.get(family, {})
    small: dict[str, Any] = {}
    for name, value in values.items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            small[name] = {**_shrunk(inner, inner.model_type), "model_type": inner.model_type}
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(SIZES[name], value)
        elif isinstance(value, list) and value and all(isinstance(x, str) for x in value):
            small[name] = _kinds(value) if "layer" in name or "block" in name else value
        elif name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            small[name] = ("pad_token_id", "eos_token_id", "bos_token_id").index(name)
    if "kv_lora_rank" in values:  # latent attention: as many key-value heads as query heads
        small["num_key_value_heads"] = HEADS
    layers = special.get("num_hidden_layers", LAYERS)
    for name in ("layer_types", "layers_block_type"):
        if small.get(name):
            small[name] = (small[name] * layers)[:layers]
    return {**small, **special}


def _kinds(types: list[str]) -> list[str]:
    """Choose LAYERS layer types: the first distinct ones, repeated if there are too few."""
    kinds = list(dict.fromkeys(types))[:LAYERS]
    return kinds * (LAYERS // len(kinds)) + kinds[: LAYERS % len(kinds)]
