"""What other programs call the fields of a recipe: nanoGPT, litgpt, transformers, Hugging Face's Trainer, torchtitan.

The names are for hints alone; a recipe has one name for each field.
"""

# Section -> field, or several -> the names elsewhere. "" is the top level.
_NAMES = {
    "": {
        "name": "run_name wandb_run_name experiment_name project",
        "seed": "random_seed manual_seed data_seed",
    },
    "model": {
        "num_hidden_layers": "n_layer n_layers num_layers depth num_blocks",
        "hidden_size": "n_embd d_model dim n_embed embed_dim embedding_size width",
        "intermediate_size": "n_inner ffn_dim d_ff mlp_hidden_size ffn_hidden_size feed_forward_size",
        "num_attention_heads": "n_head n_heads num_heads",
        "num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads n_query_groups num_query_groups",
        "head_dim": "head_size d_head head_width",
        "qkv_bias, output_bias and mlp_bias": "bias use_bias",
        "embedding_dropout, attention_dropout and residual_dropout": "dropout dropout_rate hidden_dropout",
        "attention_dropout": "attn_pdrop attn_dropout",
        "residual_dropout": "resid_pdrop resid_dropout",
        "embedding_dropout": "embd_pdrop embd_dropout",
        "hidden_act": "activation activation_function hidden_activation act_fn",
        "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon",
        "norm": "norm_class norm_class_name norm_type",
        "feed_forward": "mlp_class mlp_class_name mlp_type",
        "parallel_residual": "use_parallel_residual",
        "rope_parameters": "rope_theta rope_base rope_scaling rotary_percentage rotary_pct partial_rotary_factor",
        "position": "position_embedding_type pos_emb positional_encoding",
        "sliding_window": "sliding_window_size window_size",
        "tie_word_embeddings": "weight_tying tie_weights tie_embeddings",
        "vocab_size": "padded_vocab_size n_vocab",
        "logit_softcap": "final_logit_softcapping",
        "attention_softcap": "attn_logit_softcapping attention_logit_softcapping",
        "initializer_range": "init_std initializer_std",
        "base": "model_type arch model_name",
    },
    "data": {
        "source": "dataset dataset_name dataset_path data_dir data_path train_file train_data path files",
        "context": "block_size seq_len seq_length sequence_length max_seq_len max_seq_length max_length n_ctx "
        "n_positions context_length",
        "tokenizer": "tokenizer_name tokenizer_path tokenizer_dir",
        "text_column": "text_field text_key dataset_text_field",
        "held_out": "val_fraction val_split val_split_fraction eval_fraction validation_split test_size",
        "workers": "num_workers dataloader_num_workers",
    },
    "training": {
        "steps": "max_iters max_steps train_steps num_train_steps num_training_steps total_steps num_steps iters "
        "iterations lr_decay_iters epochs num_epochs num_train_epochs max_tokens",
        "batch_size": "batch micro_batch_size per_device_train_batch_size train_batch_size local_batch_size "
        "global_batch_size device_batch_size total_batch_size",
        "gradient_accumulation_steps": "grad_accum gradient_accumulation grad_accum_steps accumulate_grad_batches "
        "gradient_accumulation_iters",
        "learning_rate": "lr max_lr peak_lr base_lr max_learning_rate",
        "min_learning_rate_ratio": "min_lr final_lr lr_min min_lr_ratio min_lr_factor min_learning_rate",
        "warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_ratio",
        "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule decay_lr decay_type",
        "optimizer": "optim optimizer_name",
        "optimizer_options": "optim_args optimizer_args optimizer_kwargs",
        "betas": "beta1 beta2 adam_beta1 adam_beta2",
        "epsilon": "eps adam_eps adam_epsilon",
        "weight_decay": "wd",
        "max_grad_norm": "grad_clip gradient_clip_val gradient_clipping clip_grad_norm max_norm grad_norm_clip",
        "label_smoothing": "label_smoothing_factor",
        "ema_decay": "ema ema_rate",
        "precision": "dtype torch_dtype bf16 fp16 mixed_precision param_dtype",
        "compile": "torch_compile compile_model",
        "gradient_checkpointing": "activation_checkpointing activation_checkpoint",
        "attn_implementation": "attention_implementation attn_impl attention flash_attention",
        "devices": "num_devices n_gpu num_gpus gpus nproc_per_node",
        "nodes": "num_nodes nnodes",
    },
    "reporting": {
        "evaluate_every": "eval_interval eval_steps eval_every eval_freq eval_iters val_interval",
        "log_every": "log_interval logging_steps log_freq logging_interval",
        "save_every": "save_interval save_steps save_freq checkpoint_interval checkpoint_every",
        "keep_checkpoints": "save_total_limit keep_latest_k",
        "wandb": "wandb_log wandb_project report_to",
        "tensorboard": "enable_tensorboard",
    },
    "start": {
        "checkpoint": "init_from resume_from model_name_or_path pretrained pretrained_model resume_from_checkpoint"
    },
}
# Name elsewhere -> section and field.
SYNONYMS = {
    name: (section, field)
    for section, fields in _NAMES.items()
    for field, names in fields.items()
    for name in names.split()
}
