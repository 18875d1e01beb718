"""Other programs' names for the fields of a recipe: nanoGPT, litgpt, transformers, Hugging Face's Trainer, torchtitan.

And for options of `headwater generate`. They are used only in hints; a recipe has one name for each field.
"""

# Section -> field, or several fields -> names in other programs. "" is the top level.
_NAMES = {
    "": {"name": "run_name wandb_run_name experiment_name"},
    "model": {
        "num_hidden_layers": "n_layer n_layers num_layers depth",
        "hidden_size": "n_embd d_model dim embed_dim",
        "intermediate_size": "n_inner ffn_dim d_ff mlp_hidden_size",
        "num_attention_heads": "n_head n_heads num_heads",
        "num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads n_query_groups num_query_groups",
        "head_dim": "head_size d_head",
        "qkv_bias, output_bias and mlp_bias": "bias use_bias",
        "embedding_dropout, attention_dropout and residual_dropout": "dropout dropout_rate",
        "attention_dropout": "attn_pdrop",
        "residual_dropout": "resid_pdrop hidden_dropout",
        "embedding_dropout": "embd_pdrop",
        "hidden_act": "activation activation_function hidden_activation",
        "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
        "norm": "norm_class norm_class_name norm_type",
        "rope_parameters": "rope_theta rope_base rope_scaling rotary_percentage partial_rotary_factor",
        "position": "position_embedding_type",
        "tie_word_embeddings": "weight_tying tie_embeddings",
        "vocab_size": "padded_vocab_size",
        "base": "model_type model_name",
    },
    "data": {
        "source": "dataset dataset_name data_dir data_path train_file",
        "context": "block_size seq_len seq_length sequence_length max_seq_len max_seq_length n_ctx n_positions",
        "tokenizer": "tokenizer_name tokenizer_path",
        "text_column": "text_field dataset_text_field",
        "held_out": "val_fraction val_split_fraction validation_split",
        "workers": "num_workers dataloader_num_workers",
    },
    "training": {
        "steps": "max_iters max_steps num_train_steps train_steps num_training_steps epochs num_train_epochs",
        "batch_size": "batch micro_batch_size per_device_train_batch_size train_batch_size global_batch_size "
        "local_batch_size",
        "gradient_accumulation_steps": "grad_accum gradient_accumulation gradient_accumulation_iters",
        "learning_rate": "lr max_lr",
        "min_learning_rate_ratio": "min_lr_factor",
        "warmup_steps": "warmup warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps warmup_ratio",
        "schedule": "scheduler lr_scheduler lr_scheduler_type decay_lr decay_type",
        "decay_fraction": "decay_ratio cooldown_fraction cooldown_frac warmdown_ratio",
        "decay_form": "cooldown_type",
        "optimizer": "optim",
        "optimizer_options": "optim_args",
        "betas": "beta1 beta2 adam_beta1 adam_beta2",
        "epsilon": "eps adam_epsilon",
        "weight_decay": "wd",
        "max_grad_norm": "grad_clip max_norm gradient_clip_val clip_grad_norm",
        "label_smoothing": "label_smoothing_factor",
        "precision": "dtype torch_dtype bf16 fp16 mixed_precision",
        "compile": "torch_compile",
        "gradient_checkpointing": "activation_checkpointing",
        "attn_implementation": "attention_implementation flash_attention",
        "nodes": "num_nodes",
    },
    "reporting": {
        "evaluate_every": "eval_interval eval_steps eval_every eval_freq",
        "log_every": "log_interval logging_steps log_freq",
        "save_every": "save_interval save_steps checkpoint_interval",
        "keep_checkpoints": "save_total_limit",
        "wandb": "wandb_log wandb_project report_to",
    },
    "start": {"checkpoint": "resume_from_checkpoint model_name_or_path pretrained"},
}
# Name in other programs -> section and field.
SYNONYMS = {
    name: (section, field)
    for section, fields in _NAMES.items()
    for field, names in fields.items()
    for name in names.split()
}
# Names of other programs for what has another unit here, or is no field of a recipe -> a hint.
ANSWERS = {
    "out_dir": "--out names the run's folder",
    "output_dir": "--out names the run's folder",
    "init_from": "--resume continues a run, and start.checkpoint starts from a model",
    "min_lr": "training.min_learning_rate_ratio is its share of training.learning_rate",
    "lr_decay_iters": "every training.schedule ends at training.steps",
    "eval_iters": "every evaluation reads data.held_out_bytes of text",
    "eval_only": "`headwater evaluate` measures a run",
    "always_save_checkpoint": "reporting.save_every saves whatever the loss",
}
_PROMPT = "write the prompt after the checkpoint, without an option"
_SEVERAL = "write the prompt that often, a line each, into a file for --jsonl"
_CHECKPOINT = "write the run's folder before the prompt, without an option"
# Names of other programs for what `headwater generate` has no option for -> a hint.
SAMPLING = {
    "start": _PROMPT,
    "prompt": _PROMPT,
    "num_samples": _SEVERAL,
    "num_return_sequences": _SEVERAL,
    "out_dir": _CHECKPOINT,
    "init_from": _CHECKPOINT,
    "checkpoint_dir": _CHECKPOINT,
    "max_length": "--max-new-tokens counts the tokens after the prompt",
    "do_sample": "--temperature 0 is greedy",
}
