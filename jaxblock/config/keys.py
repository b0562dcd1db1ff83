"""Keys of a configuration that need not be understood: the one list. What is in none is refused."""

from typing import Any

# Any value of these leaves the forward pass as it is.
WITHOUT_EFFECT = frozenset(
    {
        # Names and versions.
        "_commit_hash",
        "_model_name_or_path",
        "_name_or_path",
        "auto_map",
        "finetuning_task",
        "is_llama_config",
        "name_or_path",
        "unk_token_id",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # How PyTorch stores, computes and returns. The parameters know their dtype themselves.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "cache_implementation",
        "dtype",
        "experts_implementation",
        "is_decoder",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "torch_dtype",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        # Training: initialisation, dropout, losses, and the length of its sequences. pretraining_tp
        # cut one sum into several for its reproducibility; transformers 5 does not read it.
        "attention_dropout",
        "embd_pdrop",
        "initializer_range",
        "max_sequence_length",
        "pretraining_tp",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "tf_legacy_loss",
        # Classification heads: a causal decoder has none of their tensors.
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        # Special tokens other than the three that are kept.
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "prefix",
        "sep_token_id",
        # Generation, which has a file of its own: transformers 5.24.0,
        # src/transformers/generation/configuration_utils.py, _get_default_generation_params.
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)

# These change the computation, except at the values named here: any other is refused.
WITHOUT_EFFECT_AT: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (None,),
    "chunk_size_feed_forward": (0,),
    "compression_config": (None,),
    "cross_attention_hidden_size": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (False,),
}

# The same for Meta's params.json; source: meta-llama/llama-models, models/llama3/args.py.
META_WITHOUT_EFFECT = frozenset({"max_batch_size", "max_seq_len"})
META_WITHOUT_EFFECT_AT: dict[str, tuple[Any, ...]] = {
    "lora_args": (None,),
    "quantization_args": (None,),
    "vision_num_cross_attention_layers": (-1,),
}
