"""The decisions for every option of SGLang: whether it belongs to the keys of pages, and why.

`SGLANG_OPTIONS` has a table for each of SGLang's namespaces of options. `test_sglang_identity`
compares it with the installed version: an option that a version adds fails the test, and belongs to
the keys until it is decided here.
"""

from cascadekv.connectors.effects import (
    Table,
    elsewhere,
    in_key,
    no_effect,
    of_quantized,
    rounding,
)

__all__ = ["SGLANG_ENVIRONMENT", "SGLANG_OPTIONS"]

_MODEL: Table = {
    **in_key(
        "how weights become what is computed with",
        "quantization modelopt_quant quantize_and_serve modelopt_checkpoint_restore_path "
        "rl_quant_profile custom_weight_loader",
    ),
    **in_key("settings of the model", "json_model_override_args model_config_parser"),
    **in_key("settings of the model", "decrypted_config_file decrypted_draft_config_file"),
    # Some processors scale images by it, and it changes the settings of draft models.
    **in_key("the longest sequence", "context_length"),
    **in_key("precision of KV", "kv_cache_dtype qsa_indexer_dtype"),
    **in_key("other code for a model", "model_impl"),
    **in_key("which weights are loaded", "load_format model_loader_extra_config"),
    **elsewhere("weights", "model_path revision"),
    **elsewhere("dtype", "dtype"),
    **elsewhere("scales", "quantization_param_path"),
    **elsewhere("model_files", "trust_remote_code"),
    **no_effect("such an engine has no KV of answers", "is_embedding"),
    **no_effect(
        "how fast and from where weights are read",
        "startup_weight_load_mode weight_loader_disable_mmap weight_loader_prefetch_checkpoints "
        "weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load download_dir "
        "remote_instance_weight_loader_seed_instance_ip "
        "remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports "
        "remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port "
        "modelexpress_config model_checksum delete_ckpt_after_loading weight_cache_mode "
        "weight_cache_socket weight_cache_timeout checkpoint_engine_wait_weights_before_ready",
    ),
    **no_effect("files that are written", "modelopt_checkpoint_save_path modelopt_export_path"),
}

_DEVICE: Table = {
    **in_key("other kernels", "device"),
    **no_effect("which tokens are chosen", "random_seed mlx_enable_sampling"),
    **no_effect(
        "devices and processes",
        "base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray "
        "custom_sigquit_handler numa_node gc_threshold",
    ),
}

_FEATURES: Table = {
    **in_key("precision of products", "enable_tf32_matmul"),
    **in_key("layers skip tokens of a prompt", "enable_encoder_swa_bounded_replay"),
    **in_key("layers skip tokens of a prompt", "enable_decoder_swa_bounded_replay"),
    **in_key("which tokens a layer sees", "enable_mis"),
    **no_effect("memory", "enable_memory_saver enable_weights_cpu_backup"),
    **no_effect("memory", "enable_draft_weights_cpu_backup"),
    **no_effect(
        "which tokens are chosen, and what is said about them",
        "enable_fp32_lm_head enable_custom_logit_processor enable_watermark watermark_config "
        "watermark_key watermark_key_b watermark_context_window watermark_mixing_probability "
        "watermark_max_probability watermark_default_enabled watermark_enforce_all "
        "enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states "
        "aux_hidden_state_capture return_aux_hidden_state_layer_ids enable_return_routed_experts "
        "enable_return_indexer_topk sampling_mask_max_tokens disable_outlines_disk_cache",
    ),
}

_KERNEL: Table = {
    **in_key("precision of KV in attention", "prefill_kv_cache_dequant_dtype"),
    **in_key(
        "which tokens a sparse layer sees",
        "dsa_prefill_backend dsa_decode_backend dsa_triton_union dsa_paged_mqa_logits_backend "
        "dsa_topk_backend dsv4_prefill_backend dsv4_attn_backend enable_deepseek_v4_fp4_indexer "
        "enable_dsa_fused_indexer",
    ),
    **in_key("embeddings of images", "enable_precise_embedding_interpolation"),
    **of_quantized(
        "kernels",
        "attention_backend decode_attention_backend prefill_attention_backend "
        "fp8_gemm_runner_backend fp4_gemm_runner_backend",
    ),
    **rounding(
        "kernels",
        "enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel bf16_gemm_backend "
        "disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32 "
        "triton_attention_num_kv_splits triton_attention_split_tile_size "
        "flashinfer_mla_disable_ragged enable_fused_qk_norm_rope",
    ),
    **no_effect("which tokens are chosen", "sampling_backend grammar_backend"),
}

_MAMBA: Table = {
    **in_key(
        "precision of a state",
        "mamba_ssm_dtype enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
        "enable_int8_mamba_checkpoint",
    ),
    **rounding(
        "kernels",
        "mamba_backend linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len "
        "enable_linear_replayssm_spec",
    ),
    **no_effect(
        "which states are kept",
        "mamba_max_states_per_path mamba_radix_cache_strategy uses_mamba_radix_cache "
        "mamba_track_interval int8_mamba_ckpt_size",
    ),
}

_GRAPH: Table = rounding(
    "graphs of the same kernels, in padded batches",
    "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill "
    "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill "
    "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
    "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph "
    "disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph "
    "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs",
)

_COMM: Table = {
    **in_key("precision of what ranks send each other", "enable_quant_communications"),
    **rounding(
        "order of the sums over ranks",
        "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp "
        "enable_torch_symm_mem enable_scattered_sconv boundary_reduction "
        "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
        "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion "
        "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode",
    ),
    **no_effect("measurements and warm-up", "enable_layerwise_nvtx_marker pre_warm_nccl"),
}

_MOE: Table = {
    **in_key(
        "precision of activations",
        "enable_w4a4_mxfp4_megamoe flashinfer_mxfp4_moe_precision deepep_dispatcher_output_dtype "
        "flashinfer_a2a_dispatch_type",
    ),
    **in_key("experts at random", "ep_dispatch_algorithm"),
    **in_key(
        "other weights and precision of experts",
        "kt_weight_path kt_method kt_num_gpu_experts kt_max_deferred_experts_per_token",
    ),
    **of_quantized("kernels", "moe_runner_backend disable_flashinfer_cutlass_moe_fp4_allgather"),
    **rounding(
        "which rank computes what, and the order of the sums over ranks",
        "enable_fused_moe_sum_all_reduce moe_a2a_backend deepep_v2_mode deepep_mode fuseep_mode "
        "ep_num_redundant_experts init_expert_location enable_eplb eplb_algorithm "
        "eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
        "eplb_min_rebalancing_utilization_threshold deepep_config enable_waterfill "
        "disable_shared_experts_fusion enforce_shared_experts_fusion",
    ),
    **no_effect(
        "measurements, and ranks that come and go",
        "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size "
        "expert_balancedness_report_mode elastic_ep_backend enable_elastic_expert_backup "
        "mooncake_ib_device ep_join_mode elastic_ep_scale_timeout",
    ),
    **no_effect(
        "where weights are kept, and threads",
        "enable_paged_experts paged_experts_num_resident kt_cpuinfer kt_threadpool_count",
    ),
}

_OVERLAP: Table = rounding(
    "batches in two halves",
    "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold",
)

_OFFLOAD: Table = no_effect(
    "where weights are kept until they are used",
    "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode "
    "ple_offload_embedding ple_offload_backend ple_offload_dir",
)

_DLLM: Table = in_key(
    "how blocks of tokens are denoised", "dllm_algorithm dllm_algorithm_config dllm_fdfo"
)

_DETERMINISTIC: Table = {
    **elsewhere("numerics", "enable_deterministic_inference"),
    **in_key("operations of a training system", "rl_on_policy_target"),
}

_SCHEDULE: Table = {
    **elsewhere("block_tokens", "page_size"),
    **elsewhere("pool", "c128_page_size disable_hybrid_swa_memory"),
    **rounding("prefixes in pieces", "disable_chunked_prefix_cache"),
    **no_effect("memory", "mem_fraction_static max_total_tokens swa_full_tokens_ratio"),
    **no_effect("memory", "_swa_full_tokens_ratio_explicitly_set swa_prefix_tails"),
    **no_effect("memory", "max_mamba_cache_size mamba_full_memory_ratio"),
    **no_effect("such an engine keeps nothing", "prefill_only_disable_kv_cache"),
    **no_effect(
        "when a token is computed and with which others",
        "max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval "
        "prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens "
        "prefill_max_requests schedule_policy enable_priority_scheduling "
        "disable_priority_preemption default_priority_value abort_on_priority_when_disabled "
        "schedule_low_priority_values_first priority_scheduling_preemption_threshold "
        "retraction_policy schedule_conservativeness disable_overlap_schedule "
        "num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk "
        "enable_prefill_delayer prefill_delayer_max_delay_passes "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
        "prefill_delayer_max_delay_ms min_free_slots_delay",
    ),
}

_MEMORY: Table = {
    **in_key("which tokens a sparse layer sees", "enable_hisparse hisparse_config"),
    **elsewhere("layout", "hicache_mem_layout enable_page_major_kv_layout enable_unified_memory"),
    **no_effect(
        "caches, this one among them",
        "radix_eviction_policy _radix_eviction_policy_explicitly_set radix_eviction_policy_config "
        "disable_radix_cache enable_session_radix_cache radix_cache_backend "
        "enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size "
        "hicache_host_memory_fraction hicache_write_policy hicache_io_backend "
        "hicache_storage_backend hicache_storage_prefetch_policy "
        "hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval "
        "hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker "
        "unified_cache_external_linker_backend unified_cache_external_linker_config "
        "enable_linker_mla_dedup enable_lmcache lmcache_config_file enable_flexkv "
        "flexkv_config_file",
    ),
}

_SPEC: Table = {
    **in_key(
        "what the KV of the draft model is computed from",
        "speculative_algorithm uno_lora_path speculative_draft_load_format speculative_num_steps "
        "speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size "
        "speculative_dspark_block_size speculative_draft_kv_cache_dtype "
        "speculative_draft_window_size speculative_draft_sink_size "
        "speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization "
        "speculative_dsa_topk_backend enable_multi_layer_eagle",
    ),
    **elsewhere("draft_weights", "speculative_draft_model_path speculative_draft_model_revision"),
    **of_quantized("kernels", "speculative_moe_runner_backend speculative_attention_mode"),
    **of_quantized("kernels", "speculative_draft_attention_backend"),
    **rounding(
        "order of the sums over ranks", "speculative_boundary_reduction speculative_moe_a2a_backend"
    ),
    **no_effect(
        "which tokens are proposed and accepted",
        "speculative_domino_candidate_pool_size speculative_dspark_sps_table_path "
        "speculative_dspark_confidence_sts_path "
        "speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single "
        "speculative_accept_threshold_acc speculative_use_rejection_sampling "
        "speculative_use_block_verification speculative_token_map "
        "_speculative_draft_quantization_explicitly_set speculative_adaptive "
        "speculative_adaptive_config spec_trace_dir speculative_ngram_min_bfs_breadth "
        "speculative_ngram_max_bfs_breadth speculative_ngram_match_type "
        "speculative_ngram_max_trie_depth speculative_ngram_capacity "
        "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
        "speculative_ngram_external_corpus_max_tokens",
    ),
}

_LORA: Table = {
    **in_key("which modules an adapter changes", "lora_target_modules lora_strict_loading"),
    **in_key("how an adapter's tensors are read", "experts_shared_outer_loras"),
    **elsewhere("adapters", "enable_lora lora_paths"),
    **rounding("kernels", "lora_backend max_lora_chunk_size lora_use_virtual_experts"),
    **no_effect(
        "room for adapters, and when they are loaded",
        "enable_lora_overlap_loading max_lora_rank max_loaded_loras max_loras_per_batch "
        "lora_eviction_policy lora_drain_wait_threshold",
    ),
}

_MM: Table = {
    **in_key(
        "how an image, a video or a sound becomes the model's input",
        "mm_process_config image_processor_backend disable_fast_image_processor",
    ),
    **in_key("inputs are named by the caller", "trust_mm_content_hashes"),
    **in_key("outputs of encoders may be those of another engine", "enable_mm_global_cache"),
    **rounding("kernels and split of the encoder", "mm_attention_backend mm_enable_dp_encoder"),
    **no_effect(
        "threads, caches and transport of inputs, and which are refused",
        "enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache "
        "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb "
        "mm_preprocess_cache_size_mb limit_mm_data_per_request mm_global_cache_backend "
        "mm_feature_transport",
    ),
}

_DISAGG: Table = {
    **in_key("outputs of encoders are those of another engine", "language_only encoder_only"),
    **rounding("text is computed without the parts for images", "language_model_only"),
    **no_effect(
        "engines that work together, and how",
        "decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank "
        "decoupled_spec_role disaggregation_mode disaggregation_decode_allocation_policy "
        "disaggregation_transfer_backend disaggregation_enable_kv_checksum "
        "disaggregation_bootstrap_port disaggregation_ib_device "
        "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache "
        "disaggregation_decode_retraction_backup num_reserved_decode_tokens "
        "disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "enable_pd_role_switch optimistic_prefill_attempts encoder_transfer_backend encoder_urls "
        "encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder "
        "disaggregation_decode_host_receive_threshold enable_pdmux pdmux_config_path sm_group_num",
    ),
}

_PARALLEL: Table = {
    # The manifest of a page has its rank.
    **elsewhere("tensor_parallel", "tp_size"),
    **elsewhere("pipeline_parallel", "pp_size"),
    **elsewhere("context_parallel", "attn_cp_size enable_prefill_cp cp_strategy dcp_size"),
    **in_key(
        "which rank keeps what",
        "enable_dsa_cache_layer_split enable_kv_cache_sharding enable_cp_tp_group_sharing",
    ),
    **rounding(
        "which rank computes what, and the order of the sums over ranks",
        "dp_size attn_dp_size moe_dp_size dwdp_size dcp_comm_backend dcp_replicate_q_proj ep_size "
        "moe_dense_tp_size enable_cp_decode_attn_tp enable_dp_attention enable_dp_lm_head "
        "enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered "
        "enable_shared_experts_attn_tp shared_experts_tp_size enable_dense_mlp_attn_tp "
        "enable_layernorm_sp enable_megamoe_for_layernorm_sp disable_attn_tp_gather",
    ),
    **no_effect(
        "ranks, hosts and ports",
        "nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank "
        "load_balance_method enable_dp_attention_local_control_broadcast enable_p2p_check "
        "ep_join_rank_offset elastic_ep_initial_size max_ep_size",
    ),
    **no_effect("when a token is computed", "pp_max_micro_batch_size pp_async_batch_depth"),
}

_SERVING: Table = {
    **elsewhere("model", "served_model_name"),
    **elsewhere("model_files", "tokenizer_path tokenizer_mode"),
    **in_key("a name for the weights", "weight_version"),
    **no_effect(
        "the server's interface",
        "enable_response_store host port fastapi_root_path enable_http_worker_reuseport "
        "smg_grpc_mode grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar "
        "sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams "
        "http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs "
        "ssl_keyfile_password enable_ssl_refresh api_key admin_api_key file_storage_path "
        "enable_cache_report return_input_ids return_output_ids asr_max_buffer_seconds "
        "asr_max_concurrent_sessions stream_interval batch_notify_size "
        "stream_response_default_include_usage incremental_streaming_output "
        "enable_streaming_session",
    ),
    **no_effect(
        "text before and after the tokens, and which tokens are chosen",
        "tokenizer_backend tokenizer_worker_num detokenizer_worker_num skip_tokenizer_init "
        "chat_template trust_request_chat_template hf_chat_template_name completion_template "
        "reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking "
        "tool_call_parser tool_server sampling_defaults preferred_sampling_params "
        "allow_auto_truncate constrained_json_whitespace_pattern "
        "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt "
        "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
        "dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode "
        "disable_tokenizer_batch_decode",
    ),
}

_OBSERVABILITY: Table = {
    **in_key("code that may change what a layer computes", "forward_hooks"),
    **no_effect(
        "what is logged, measured and published",
        "log_level log_level_http log_requests log_requests_level log_requests_format "
        "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost "
        "enable_metrics smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers "
        "load_snapshot_publish_interval tokenizer_metrics_custom_labels_header "
        "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token "
        "bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets gc_warning_threshold_secs decode_log_interval "
        "enable_request_time_stats_logging kv_events_config load_publish_endpoint "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name "
        "enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file "
        "export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data "
        "kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers "
        "debug_tensor_dump_input_file msprobe_dump_config",
    ),
}

SGLANG_OPTIONS: dict[str, Table] = {
    "model": _MODEL,
    "device": _DEVICE,
    "exec.features": _FEATURES,
    "exec.kernel": _KERNEL,
    "exec.mamba": _MAMBA,
    "exec.graph": _GRAPH,
    "exec.comm": _COMM,
    "exec.moe": _MOE,
    "exec.overlap": _OVERLAP,
    "exec.offload": _OFFLOAD,
    "exec.dllm": _DLLM,
    "exec.deterministic": _DETERMINISTIC,
    "schedule": _SCHEDULE,
    "memory": _MEMORY,
    "spec": _SPEC,
    "lora": _LORA,
    "mm": _MM,
    "disagg": _DISAGG,
    "parallel": _PARALLEL,
    "serving": _SERVING,
    "observability": _OBSERVABILITY,
}
"""Decisions by SGLang's namespace of options, then by the option's name."""

SGLANG_ENVIRONMENT = {
    "*LOG*": "what is logged",
    "*DEBUG*": "checks and logs",
    "*TRACE*": "measurements",
    "*PROFILE*": "measurements",
    "*METRICS*": "measurements",
    "*TEST*": "tests",
    "*TIMEOUT*": "time limits",
    "*INTERVAL*": "how often something is done",
    "*PORT": "ports",
    "*PORT_BASE": "ports",
    "*ADDR*": "addresses",
    "*_DIR": "places of files",
    "*SOCKET*": "addresses",
    "*READY_TEMPLATE": "addresses",
    "*API_KEY": "access",
    "*_CI*": "tests",
    "*HICACHE*": "this cache and others",
    "*MOONCAKE*": "this cache and others",
    "*DISAGG*": "engines that work together",
    "*ZMQ*": "how processes talk to each other",
    "*RANK_ON_NODE": "ranks",
    "*RAY*": "how processes are started",
    "*VISIBLE_DEVICE*": "devices",
    "*NUMA*": "devices",
    "*AFFINITY*": "devices",
    "*COREDUMP*": "crashes",
    "*JIT_CACHE*": "places of files",
    "SGLANG_KV_CANARY*": "checks",
    "SGLANG_SCHEDULER*": "when a token is computed",
    "SGLANG_PREFILL_DELAYER*": "when a token is computed",
    "SGLANG_GRPC*": "the server's interface",
    "SGLANG_EXA*": "tools",
    "*DISABLE_XET": "how files are fetched",
    "*OPENAPI*": "the server's interface",
    # SGLang sets these itself, as its options say.
    "*OUTLINES*": "which tokens are chosen",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "in the field numerics",
    "SGLANG_ENABLE_TORCH_COMPILE": "the same operations, compiled",
}
"""Patterns of the names of environment variables without effect; each other one counts if it is set
and SGLang knows it."""
