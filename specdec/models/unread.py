"""Detect unread config fields, which may change the computation."""

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.models.fields import TEXT

_GENERIC = """
    architectures auto_map bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id
    finetuning_task gguf_types id2label is_decoder is_encoder_decoder label2id model_type name_or_path
    output_attentions output_hidden_states pad_token_id prefix problem_type quantization_config return_dict
    sep_token_id task_specific_params tokenizer_class torch_dtype torchscript transformers_version use_cache
"""
"""Fields of every config: file creation, tokens, and returned values."""
_TRAINING = """
    attention_dropout attn_pdrop dropout embd_pdrop hidden_dropout initializer_range linear_a_log_max
    linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min num_logits_to_keep output_router_logits
    pretraining_tp rescale_prenorm_residual resid_pdrop router_aux_loss_coef router_jitter_noise
    time_step_floor time_step_init_scheme time_step_max time_step_min time_step_scale
"""
_RUNNING = """
    block_size chunk_size mamba_chunk_size mamba_ssm_cache_dtype moe_shared_expert_overlap
    use_associative_scan use_mamba_kernels
"""
"""Settings of other engines that do not change the mathematics."""
_OTHER_LAYERS = """
    block_ffn_dim_multiplier block_multiple_of conv_kernel expand first_k_dense_replace head_dim
    hybrid_layer_ids intermediate_size kv_channels num_query_groups short_conv_kernel_size
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
    linear_value_head_dim mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_head_dim
    mamba_n_groups mamba_n_heads mamba_num_heads mamba_proj_bias max_window_layers mlp_bias
    moe_intermediate_size moe_latent_size moe_renormalize moe_shared_expert_intermediate_size
    mtp_layers_block_type n_group n_groups n_routed_experts n_shared_experts norm_topk_prob
    num_attention_heads num_expert_group num_experts num_experts_per_tok num_experts_per_token
    num_key_value_heads num_shared_experts qk_head_dim rope_parameters routed_scaling_factor ssm_state_size
    time_step_limit time_step_rank topk_group use_conv_bias
"""
"""Fields of optional layers, unread if a model lacks them, and derived fields."""
_HARMLESS = frozenset(" ".join((_GENERIC, _TRAINING, _RUNNING, _OTHER_LAYERS)).split())


class Watched(Mapping[str, Any]):
    """A config that records which of its fields were read, on every level."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {
            name: Watched(value) if isinstance(value, Mapping) else value for name, value in values.items()
        }
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> list[str]:
        """Return set fields that were not read and are not known to be harmless."""
        for text in map(self._values.get, TEXT):
            if isinstance(text, Watched):
                return text.unread()  # the other fields belong to other parts of a multimodal model
        return [
            name
            for name, value in self._values.items()
            if name not in self._asked and name not in _HARMLESS and not name.startswith("_") and value
        ]
