"""The decisions for every setting of vLLM: whether it belongs to the keys of blocks, and why.

`VLLM_CONFIGURATION` has a table for each of vLLM's configuration classes, with the fields of all
supported versions. `test_vllm_effects` compares it with vLLM's classes: a field that a version adds
fails the test, and belongs to the keys until it is decided here.
"""

from cascadekv.connectors.effects import (
    Table,
    elsewhere,
    in_key,
    nested,
    no_effect,
    of_quantized,
    rounding,
)

__all__ = ["OFFLOADING_CONFIGURATION", "UNORDERED", "VLLM_CONFIGURATION"]

UNORDERED = frozenset(
    ("kv_cache_dtype_skip_layers", "target_modules", "ignore_patterns", "architectures")
)
"""Settings that are lists of patterns, whose order has no effect."""

_CONFIG: Table = {
    **nested(
        "model_config cache_config parallel_config scheduler_config load_config attention_config "
        "mamba_config kernel_config lora_config speculative_config diffusion_config "
        "compilation_config ec_transfer_config engram_config"
    ),
    **in_key("settings of a platform that is not vLLM's own", "additional_config"),
    **elsewhere("engine_format", "device_config"),
    **elsewhere("model_config.quantization, model_settings and weights", "quant_config"),
    **no_effect("where weights are kept until they are used", "offload_config"),
    **no_effect("what is reported beside an answer", "aux_output_config"),
    **no_effect("which tokens are chosen", "structured_outputs_config watermark_config"),
    **no_effect("which tokens are chosen", "reasoning_config"),
    **no_effect(
        "what is logged, measured and published",
        "observability_config logging_config profiler_config kv_events_config",
    ),
    **no_effect("this connector itself, and others beside it", "kv_transfer_config"),
    **no_effect("how long outputs of encoders are kept", "ec_manager_config"),
    **no_effect("new weights while it runs; the cache is reset after it", "weight_transfer_config"),
    **no_effect("name and end of the process", "instance_id shutdown_timeout"),
    **no_effect(
        "sets defaults of other settings, which count themselves",
        "optimization_level performance_mode",
    ),
}

_MODEL: Table = {
    **nested("multimodal_config"),
    **in_key("how weights become what is computed with", "quantization quantization_config"),
    **in_key("other code for a model", "model_class_overrides"),
    **in_key("which tokens a layer sees", "disable_sliding_window"),
    **elsewhere("weights", "model model_weights revision seed"),
    **elsewhere("dtype", "dtype"),
    **elsewhere("model_settings", "hf_config hf_text_config hf_config_path hf_overrides"),
    **elsewhere("model_settings", "config_format"),
    **elsewhere("positions", "max_model_len"),
    **elsewhere("architecture", "model_impl"),
    **elsewhere("model_files", "trust_remote_code code_revision"),
    # Keys are made of token ids. A model for images has its tokenizer's files in `model_files`.
    **elsewhere("model_files", "tokenizer tokenizer_mode tokenizer_revision"),
    **no_effect("text before and after the tokens", "skip_tokenizer_init io_processor_plugin"),
    **no_effect("text before and after the tokens", "renderer_num_workers"),
    **no_effect("pooling requests have no keys", "runner convert pooler_config"),
    **no_effect("prompts of embeddings have no keys", "enable_prompt_embeds"),
    **no_effect(
        "which tokens are chosen, and what is said about them",
        "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
        "logits_processors generation_config override_generation_config "
        "word_embeddings_untied_by_checkpoint enable_return_routed_experts",
    ),
    **no_effect("names and access", "served_model_name hf_token allowed_local_media_path"),
    **no_effect("names and access", "allowed_media_domains allow_deprecated_quantization"),
    **no_effect(
        "memory",
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
    ),
    **no_effect("only warns", "disable_cascade_attn"),
    **no_effect("set by vLLM for checks of its own", "is_submodel_config"),
    **no_effect("the draft model's length, which counts itself", "spec_target_max_model_len"),
    **rounding("the same operations without a compiler or a graph", "enforce_eager"),
}

_MULTIMODAL: Table = {
    **in_key(
        "how an image, a video or a sound becomes the model's input",
        "media_io_kwargs mm_processor_kwargs mm_device_do_normalize video_pruning_rate "
        "video_pruning_method",
    ),
    **in_key("precision of the encoder", "mm_encoder_attn_dtype"),
    **in_key("embeddings may be those of another engine", "allow_missing_mm_embeddings"),
    **elsewhere("media", "mm_encoder_fp8_scale_path limit_per_prompt"),
    **no_effect("scales for later engines", "mm_encoder_fp8_scale_save_path"),
    **no_effect("scales for later engines", "mm_encoder_fp8_scale_save_margin"),
    **no_effect(
        "caches and transport of inputs",
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_tensor_ipc mm_ipc_gpu_memory_gb skip_mm_profiling",
    ),
    **no_effect("names of inputs: others are misses", "mm_hasher_algorithm"),
    **no_effect("inputs of embeddings are named by their content", "enable_mm_embeds"),
    **no_effect("text before the tokens", "interleave_mm_strings"),
    **no_effect("such an engine has no KV", "mm_encoder_only"),
    **rounding("text is computed without the parts for images", "language_model_only"),
    **rounding("kernels and split of the encoder", "mm_encoder_tp_mode mm_encoder_attn_backend"),
}

_CACHE: Table = {
    **in_key("which layers keep their KV in which type", "kv_cache_dtype_skip_layers"),
    **in_key("layers skip tokens of a prompt", "kv_sharing_fast_prefill swa_bounded_replay"),
    **in_key("precision of a state", "mamba_cache_dtype mamba_ssm_cache_dtype"),
    **elsewhere("block_tokens", "block_size"),
    **elsewhere("dtype", "cache_dtype"),
    **elsewhere("layout", "kv_cache_layout"),
    **elsewhere("model_settings and groups", "sliding_window"),
    **elsewhere("groups", "is_attention_free"),
    **rounding("kernels for a state", "use_replayssm replayssm_buffer_len use_kda_recoverssm"),
    **no_effect(
        "memory, and how much there is of it",
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks num_cpu_blocks "
        "num_gpu_blocks_override kv_cache_size_tokens kv_cache_max_concurrency "
        "effective_attention_block_size kv_offloading_size kv_offloading_backend",
    ),
    **no_effect(
        "vLLM's own prefix cache",
        "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval "
        "prefix_match_unit hash_block_size cache_hit_alignment_tokens "
        "enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache",
    ),
    # Padding is not stored, and layers with a state are refused.
    **no_effect("sizes of pages", "mamba_page_size_padded skip_page_size_padded mamba_block_size"),
    **no_effect("sizes of pages", "mamba_cache_mode user_specified_mamba_block_size"),
    **no_effect("whether block_size was given", "user_specified_block_size _block_size_resolved"),
}

_PARALLEL: Table = {
    **in_key("other code in a worker", "worker_cls worker_extension_cls sd_worker_cls"),
    **elsewhere(
        "context_parallel",
        "decode_context_parallel_size cp_kv_cache_interleave_size dcp_kv_cache_interleave_size",
    ),
    **elsewhere("model_settings", "is_moe_model"),
    # The part of a block names the heads and layers of a rank.
    **rounding("order of the sums over ranks", "tensor_parallel_size data_parallel_size"),
    **rounding(
        "which rank computes what, and the order of the sums over ranks",
        "enable_expert_parallel enable_eplb eplb_config expert_placement_strategy enable_hc_sp "
        "all2all_backend disable_custom_all_reduce enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate",
    ),
    **no_effect("the layers of a rank are in the part", "pipeline_parallel_size"),
    **no_effect("such engines are refused", "prefill_context_parallel_size"),
    **no_effect(
        "ranks, hosts and ports",
        "world_size rank node_rank nnodes master_addr master_port data_parallel_size_local "
        "data_parallel_rank data_parallel_rank_local data_parallel_index data_parallel_master_ip "
        "data_parallel_master_port data_parallel_rpc_port data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval "
        "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank "
        "assigned_physical_gpu_ids numa_bind numa_bind_nodes numa_bind_cpus",
    ),
    **no_effect(
        "how processes are started and talk to each other",
        "distributed_executor_backend ray_workers_use_nsight ray_runtime_env placement_group "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds enable_shm_tensor_arena "
        "disable_nccl_for_dp_synchronization",
    ),
    **no_effect(
        "ranks that come and go",
        "enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config",
    ),
    **no_effect("loading of weights", "max_parallel_loading_workers enable_ep_weight_filter"),
    **no_effect("which tokens are chosen", "enable_batch_sharded_sampling"),
    **no_effect("whether vLLM may choose a size", "_allow_auto_resolve_cp_interleave_size"),
}

_SCHEDULER: Table = {
    **elsewhere("groups", "disable_hybrid_kv_cache_manager"),
    **no_effect(
        "when a token is computed and with which others",
        "runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
        "max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill is_multimodal_model "
        "max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input "
        "scheduler_cls scheduler_reserve_full_isl watermark prefill_schedule_interval "
        "async_scheduling stream_interval",
    ),
}

_LOAD: Table = {
    **in_key("which files are loaded", "ignore_patterns"),
    **elsewhere("weights", "load_format"),
    **elsewhere("load", "safetensors_load_strategy model_loader_extra_config"),
    **rounding("where weights are quantized while they are loaded", "device"),
    **no_effect(
        "how fast and from where files are read",
        "download_dir safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "use_tqdm_on_load pt_load_map_location",
    ),
}

_ATTENTION: Table = {
    **in_key("which tokens a layer sees", "use_non_causal hisparse_config"),
    **in_key(
        "which tokens a sparse layer sees",
        "indexer_kv_dtype indexer_sparse_logits sparse_mla_force_mqa use_fp4_indexer_cache",
    ),
    **in_key(
        "precision of queries",
        "use_trtllm_attention disable_flashinfer_q_quantization use_prefill_query_quantization",
    ),
    **elsewhere("attention", "backend backend_per_kind"),
    **rounding(
        "kernels and their tiles",
        "minimax_m3_msa_decode_backend flash_attn_version mla_prefill_backend "
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph sparse_mla_prefill_workspace_factor flex_attn_block_m "
        "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    ),
}

_KERNEL: Table = {
    **in_key("which tokens a sparse layer sees", "sparse_indexer_topk_backend"),
    **in_key("precision of a router", "enable_bf16x3_router_gemm"),
    **of_quantized("kernels", "moe_backend linear_backend linear_backend_per_quant"),
    **rounding("kernels", "ir_op_priority enable_flashinfer_autotune"),
    **rounding("kernels", "enable_rocm_segmented_attn_autotune"),
    **no_effect("when kernels are compiled", "enable_cutedsl_warmup enable_jit_warmup"),
}

_LORA: Table = {
    **in_key("which modules an adapter changes", "target_modules enable_tower_connector_lora"),
    **in_key(
        "how an adapter's tensors are read",
        "enable_mixed_moe_lora_format enable_moe_shared_loras",
    ),
    **elsewhere("adapters", "lora_dtype"),
    # The request has the adapter then, and its key covers the adapter's content.
    **no_effect("chooses the adapter of a request", "default_mm_loras"),
    **no_effect("room for adapters", "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels"),
    **rounding("kernels", "fully_sharded_loras specialize_active_lora"),
}

_SPECULATIVE: Table = {
    **nested("draft_model_config draft_load_config"),
    **in_key(
        "what the KV of the draft model is computed from",
        "method num_speculative_tokens quantization kv_cache_dtype index_share_for_mtp_iteration "
        "use_heterogeneous_vocab parallel_drafting",
    ),
    **of_quantized("kernels of the draft model", "moe_backend"),
    **elsewhere("speculative", "model revision code_revision"),
    **elsewhere("attention", "attention_backend"),
    **rounding("the same operations without a compiler or a graph", "enforce_eager"),
    **no_effect("the engine's own, which counts itself", "target_model_config"),
    **no_effect("ranks", "target_parallel_config draft_parallel_config tensor_parallel_size"),
    **no_effect("ranks", "draft_tensor_parallel_size"),
    **no_effect("the draft model's length, which counts itself", "max_model_len"),
    **no_effect(
        "which tokens are proposed and accepted, and how many at a time",
        "disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
        "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size "
        "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification "
        "draft_sample_method dspark_draft_topk",
    ),
}

_COMPILATION: Table = {
    **in_key("functions that change what is computed", "inductor_passes"),
    **rounding(
        "the same operations, compiled and fused",
        "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder "
        "compile_sizes compile_ranges_endpoints inductor_compile_config pass_config "
        "use_inductor_graph_partition dynamic_shapes_config fast_moe_cold_start",
    ),
    **rounding(
        "graphs of the same kernels, in padded batches",
        "cudagraph_mode cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_mm_encoder "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch cudagraph_specialize_lora cudagraph_decoder_replay "
        "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold",
    ),
    **no_effect("graphs", "cudagraph_num_of_warmups cudagraph_copy_inputs"),
    **no_effect(
        "files of the compiler, and what it did",
        "debug_dump_path cache_dir compile_cache_save_format local_cache_dir enabled_custom_ops "
        "disabled_custom_ops traced_files compilation_time encoder_compilation_time",
    ),
    **no_effect("the layers of this process", "static_forward_context static_all_moe_layers"),
}

_MAMBA: Table = {
    **in_key("rounding at random", "enable_stochastic_rounding stochastic_rounding_philox_rounds"),
    **rounding("kernels", "backend ssu_algorithm"),
}

_DIFFUSION: Table = {
    **in_key("how blocks of tokens are denoised", "canvas_length max_denoising_steps"),
}

_EC_TRANSFER: Table = {
    **in_key(
        "outputs of encoders may be those of another engine",
        "ec_connector ec_role ec_connector_extra_config ec_connector_module_path",
    ),
    **no_effect(
        "addresses and buffers",
        "engine_id ec_buffer_device ec_buffer_size ec_ip ec_port ec_rank ec_parallel_size",
    ),
    **no_effect("measured at start", "mm_encoder_output_widths"),
}

_ENGRAM: Table = {
    **no_effect(
        "where embeddings are kept", "cpu_offload embedding_across_dp dp_shared_memory use_thp"
    ),
}

_OFFLOADING: Table = {
    **nested("model cache parallel"),
    **elsewhere("groups", "groups"),
    **elsewhere("layout", "replicated_layout canonical_layout kv_cache_layout"),
    **elsewhere("pipeline", "worker_kv_bytes_per_block"),
    **no_effect("name and settings of the offload", "engine_id extra_config"),
    **no_effect("what is published", "enable_kv_cache_events"),
}

OFFLOADING_CONFIGURATION: dict[str, Table] = {
    "OffloadingConfig": _OFFLOADING,
    "OffloadingGroupConfig": elsewhere("groups", "tokens_per_block layer_names group_id"),
    "OffloadingModelConfig": {**elsewhere("weights", "name"), **elsewhere("dtype", "dtype")},
    "OffloadingCacheConfig": elsewhere("layout", "tokens_per_hash blocks_per_chunk"),
    "OffloadingParallelConfig": {
        **elsewhere(
            "tensor_parallel, context_parallel and pipeline",
            "tp_size pcp_size dcp_size pp_size world_size is_parallelism_agnostic",
        ),
        **no_effect(
            "which replica an engine is",
            "rank data_parallel_index data_parallel_size data_parallel_rank_local",
        ),
    },
}
"""Decisions for what vLLM tells a tier of its native offload."""

VLLM_CONFIGURATION: dict[str, Table] = {
    "VllmConfig": _CONFIG,
    "ModelConfig": _MODEL,
    "MultiModalConfig": _MULTIMODAL,
    "CacheConfig": _CACHE,
    "ParallelConfig": _PARALLEL,
    "SchedulerConfig": _SCHEDULER,
    "LoadConfig": _LOAD,
    "AttentionConfig": _ATTENTION,
    "KernelConfig": _KERNEL,
    "LoRAConfig": _LORA,
    "SpeculativeConfig": _SPECULATIVE,
    "CompilationConfig": _COMPILATION,
    "MambaConfig": _MAMBA,
    "DiffusionConfig": _DIFFUSION,
    "ECTransferConfig": _EC_TRANSFER,
    "EngramConfig": _ENGRAM,
}
"""Decisions by the name of a configuration class, then of the field."""
