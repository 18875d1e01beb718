import copy

import pytest
import torch
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conftest import SIZES, VOCAB, assert_near, build, config, disturb, document_positions, shared, tokens
from headwater import HeadwaterConfig, HeadwaterError, HeadwaterForCausalLM, HeadwaterModel
from headwater.kernels.autotune import allow_autotuning
from headwater.kernels.fused_attention import matmul_attention
from headwater.nn.attention_kernel import attention_kernel, eager_attention
from headwater.nn.cache_name import CACHE
from headwater_lab.data.tokenizer import byte_tokenizer

T = 12
BOTH = {"kv_shift": {}, "value_residual": {}}


def log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each target but -100, in a row."""
    kept = targets != -100
    return logits.log_softmax(-1)[kept].gather(-1, targets[kept][:, None])[:, 0]


def weights_equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Auto classes and saving


def test_a_config_that_cannot_be_saved_is_a_sentence(tmp_path):
    model = build(BOTH, output_attentions=True)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(HeadwaterError, match="output_attentions"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_a_classifier_on_a_trained_model(auto, tmp_path):
    trained, ids = build(BOTH).float(), tokens(2, T)
    trained.save_pretrained(tmp_path / "trained")
    model = auto.from_pretrained(tmp_path / "trained", num_labels=3, pad_token_id=0)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], tensor), name
    ids[ids == 0] = 1
    mask = torch.ones_like(ids)
    ids[1, :4] = mask[1, :4] = 0
    logits = model(ids, attention_mask=mask).logits[1]
    alone = model(ids[1:, 4:]).logits[0]
    assert_near(logits[-len(alone) :] if alone.ndim > 1 else logits, alone, 1e-5)
    labels = torch.zeros(ids.shape if alone.ndim > 1 else 2, dtype=torch.long)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert model.score.weight.grad.any()
    assert model.model.layers[0].self_attn.v_proj.weight.grad.any()
    model.save_pretrained(tmp_path / "classifier")
    assert weights_equal(auto.from_pretrained(tmp_path / "classifier"), model)


def test_auto_classes(tmp_path):
    model, ids = build(BOTH).float(), tokens(2, T)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), HeadwaterConfig)
    base, whole = AutoModel.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(base, HeadwaterModel)
    assert isinstance(whole, HeadwaterForCausalLM)
    assert torch.equal(whole(ids).logits, model(ids).logits)
    assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_auto_classes_from_a_config():
    assert isinstance(AutoModel.from_config(config(BOTH)), HeadwaterModel)
    made = AutoModelForCausalLM.from_config(config(BOTH), dtype=torch.bfloat16)
    assert made.lm_head.weight.dtype == torch.bfloat16
    assert made.model.layers[0].self_attn.mechanisms["kv_shift"].alpha.dtype == torch.float32


def test_base_model_saved_alone_loads_into_both(tmp_path):
    model = build(BOTH).float()
    model.model.save_pretrained(tmp_path)
    assert weights_equal(AutoModel.from_pretrained(tmp_path), model.model)
    assert weights_equal(AutoModelForCausalLM.from_pretrained(tmp_path).model, model.model)


@pytest.mark.parametrize("tied", [True, False])
def test_tying_survives_save_and_load(tmp_path, tied):
    model, ids = build(BOTH, tie_word_embeddings=tied).float(), tokens(2, T)
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_loading_a_checkpoint_without_a_mechanism_starts_it(tmp_path):
    vanilla, fresh = build().float(), HeadwaterForCausalLM(config(BOTH))
    vanilla.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, config=config(BOTH))
    for name, parameter in loaded.named_parameters():
        source = fresh if ".mechanisms." in name else vanilla
        assert torch.equal(parameter, source.get_parameter(name)), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("size", [VOCAB + 30, VOCAB - 30])
def test_resize_token_embeddings(tmp_path, tied, mean_resizing, size):
    model, kept = build(BOTH, tie_word_embeddings=tied).float(), min(size, VOCAB)
    ids = tokens(2, T) % kept
    before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=mean_resizing)
    after = model(ids, labels=ids)
    assert after.logits.shape == (2, T, size)
    assert torch.equal(after.logits[..., :kept], before[..., :kept])
    assert after.loss.isfinite()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert torch.equal(loaded(ids).logits, after.logits)


def test_layers_can_be_sliced():
    layers = build(num_hidden_layers=3).model.layers
    assert list(layers[1:]) == list(layers)[1:]


# Arguments of forward


def test_inputs_embeds():
    model, ids = shared(BOTH), tokens(2, T)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits)


def test_generate_from_inputs_embeds():
    model, ids = shared(BOTH), tokens(2, T)
    generated = model.generate(inputs_embeds=model.model.embed_tokens(ids), max_new_tokens=5, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=5, do_sample=False)[:, T:])


@pytest.mark.parametrize("both", [True, False])
def test_input_is_given_once(both):
    model, ids = shared(), tokens(2, T)
    given = dict(input_ids=ids, inputs_embeds=model.model.embed_tokens(ids)) if both else {}
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(**given)


def test_labels_are_shifted_and_minus_100_counts_nothing():
    model, ids = shared(BOTH), tokens(2, T)
    labels = ids.clone()
    labels[0, 3:8] = labels[1, -1] = -100
    out = model(ids, labels=labels)
    assert_near(out.loss.double(), -log_likelihood(out.logits[:, :-1], labels[:, 1:]).mean(), 1e-5)


def test_shift_labels_are_taken_as_they_are():
    model, ids = shared(BOTH), tokens(2, T)
    targets = tokens(2, T, seed=1)
    out = model(ids, labels=targets, shift_labels=targets)
    assert_near(out.loss.double(), -log_likelihood(out.logits, targets).mean(), 1e-5)


def test_num_items_in_batch_divides_the_sum():
    model, ids = shared(BOTH), tokens(2, T)
    out = model(ids, labels=ids, num_items_in_batch=50)
    assert_near(out.loss.double(), -log_likelihood(out.logits[:, :-1], ids[:, 1:]).sum() / 50, 1e-5)


@pytest.mark.parametrize("keep", [1, 5, torch.tensor([0, 3, 4]), torch.tensor([T - 1])], ids=str)
def test_logits_to_keep(keep):
    model, ids = shared(BOTH), tokens(2, T)
    chosen = slice(-keep, None) if isinstance(keep, int) else keep
    assert_near(model(ids, logits_to_keep=keep).logits, model(ids).logits[:, chosen], 1e-12)


def test_logits_to_keep_by_row():
    """As transformers' models take it: indices of each row, or a mask."""
    model, ids = shared(BOTH), tokens(2, T)
    logits = model(ids).logits
    kept = model(ids, logits_to_keep=torch.tensor([[0, 3], [5, 1]])).logits
    assert_near(kept, torch.stack((logits[0, [0, 3]], logits[1, [5, 1]])), 1e-12)
    mask = torch.zeros(2, T, dtype=torch.bool)
    mask[0, 2] = mask[1, 4] = mask[1, 5] = True
    assert_near(model(ids, logits_to_keep=mask).logits, logits[mask], 1e-12)


def test_no_cache_is_built_in_training():
    model, ids = build(BOTH), tokens(2, T)
    assert isinstance(model(ids).past_key_values, DynamicCache)
    assert model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, DynamicCache)


def test_outputs_as_a_tuple():
    model, ids = shared(BOTH), tokens(2, T)
    assert torch.equal(model(ids, return_dict=False)[0], model(ids).logits)


def test_hidden_states_are_those_of_llama():
    theirs, ours, ids = LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)), build().float(), tokens(2, T)
    ours.load_state_dict(disturb(theirs.eval()).state_dict())
    outputs = [model(ids, output_hidden_states=True).hidden_states for model in (ours, theirs)]
    assert len(outputs[0]) == SIZES["num_hidden_layers"] + 1
    for a, b in zip(*outputs, strict=True):
        assert_near(a, b, 1e-5)


def test_attentions():
    model, ids = build(BOTH), tokens(2, T)
    model.set_attn_implementation("eager")
    mask = (torch.arange(T) >= torch.tensor([[0], [4]])).long()
    attentions = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert len(attentions) == SIZES["num_hidden_layers"]
    for weights in attentions:
        assert weights.shape == (2, SIZES["num_attention_heads"], T, T)
        assert not weights.triu(1)[0].any()
        assert not weights[1, :, 4:, :4].any()
        assert_near(weights.sum(-1), torch.ones(2, 4, T), 1e-12)


# Attention kernels

ROWS = {
    "plain": {},
    "left_padded": dict(attention_mask=(torch.arange(T) >= torch.tensor([[0], [4]])).long()),
    "packed": dict(position_ids=document_positions([[5, 1, 6], [1, 11]])),
}


def real(rows: dict) -> Tensor:
    return rows.get("attention_mask", torch.ones(2, T)).bool()


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kernel", ["eager", "matmul"])
def test_kernels_equal_sdpa(rows, window, kernel):
    sdpa, ids = build(BOTH, sliding_window=window), tokens(2, T)
    other = copy.deepcopy(sdpa)
    other.set_attn_implementation(kernel)
    assert_near(other(ids, **rows).logits[real(rows)], sdpa(ids, **rows).logits[real(rows)])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 5])
def test_bf16_equals_fp32_to_its_precision(rows, window):
    """By every kernel, in training and with a cache."""
    exact, ids = build(BOTH, sliding_window=window).float(), tokens(2, T)
    expected = exact(ids, **rows).logits[real(rows)]
    for kernel in ("sdpa", "eager", "matmul"):
        half = copy.deepcopy(exact).bfloat16()
        half.set_attn_implementation(kernel)
        for use_cache in (False, True):
            actual = half(ids, use_cache=use_cache, **rows).logits[real(rows)].float()
            assert (actual - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize(("length", "history"), [(6, 6), (1, 6), (3, 6), (1, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_matmul_kernel_equals_eager(heads, length, history, masked):
    """In fp64, where the two can differ by rounding only."""
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((heads, length), (2, history), (2, history)))
    causal = torch.ones(length, history).tril(history - length).bool().expand(2, 1, -1, -1)
    if masked:
        causal = causal & (torch.rand(2, 1, length, history) < 0.6)
        causal[..., 0] = True
    module = torch.nn.Module().eval()
    bias = torch.zeros(causal.shape, dtype=torch.float64).masked_fill(~causal, -torch.inf)
    expected, _ = eager_attention(module, q, k, v, bias, 0.3)
    given = [causal, causal.expand(2, heads, -1, -1), bias] if masked else [causal, causal[0, 0]]
    if not masked and length in (1, history):
        given.append(None)
    for mask in given:
        actual, weights = matmul_attention(module, q, k, v, mask, 0.3)
        assert weights is None
        assert_near(actual, expected, 1e-12)


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("of_module", [None, True, False])
@pytest.mark.parametrize(("length", "history"), [(6, 6), (1, 6), (3, 6), (6, 3)])
def test_matmul_kernel_without_a_mask_sees_what_sdpa_does(is_causal, of_module, length, history):
    """Empty slots of a static cache, encoders and cross-attention among them."""
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (length, history, history))
    module = torch.nn.Module().eval()
    if of_module is not None:
        module.is_causal = of_module
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, None, scaling=0.3, is_causal=is_causal)
    assert_near(matmul_attention(module, q, k, v, None, 0.3, is_causal=is_causal)[0], expected, 1e-12)


@pytest.mark.parametrize("name", ["llama", "ours"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "matmul"])
def test_prefill_of_a_static_cache(name, kernel):
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=96)
    model = build(BOTH) if name == "ours" else LlamaForCausalLM(LlamaConfig(**shape)).double().eval()
    model.set_attn_implementation(kernel)
    ids = tokens(2, T)
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=T + 5)
        chunks = [model(part, **{CACHE: cache}).logits for part in (ids[:, :4], ids[:, 4:])]
        assert_near(torch.cat(chunks, 1), model(ids).logits, 1e-5)  # theirs rounds in fp32


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "cache"])
def test_matmul_kernel_refuses_what_it_would_leave_out(name):
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(HeadwaterError, match=f"matmul.*{name}"):
        matmul_attention(torch.nn.Module(), q, q, q, None, 0.3, **{name: torch.ones(1)})
    matmul_attention(torch.nn.Module(), q, q, q, None, 0.3, **{name: None})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul_kernel_is_finite_where_a_query_sees_nothing(dtype):
    q, k, v = (torch.full((1, 1, 3, 8), value, dtype=dtype) for value in (8.0, -8.0, 1.0))
    sees_nothing = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    out, _ = matmul_attention(torch.nn.Module().eval(), q, k, v, sees_nothing, 1.0)
    assert out.isfinite().all()


def test_generation_alone_may_take_the_matmul_kernel():
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    q, prompt = torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 100, 8)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            assert attention_kernel("sdpa", q.to(dtype), q.to(dtype)) is sdpa
            with allow_autotuning():
                assert attention_kernel("sdpa", q.to(dtype), q.to(dtype)) is not sdpa
                assert attention_kernel("eager", q.to(dtype), q.to(dtype)) is eager_attention
                assert attention_kernel("sdpa", prompt.to(dtype), prompt.to(dtype)) is sdpa
        with allow_autotuning():
            assert attention_kernel("sdpa", q, q) is sdpa


@pytest.mark.parametrize("changes", [{}, dict(qk_norm=True), dict(gpt2=True)], ids=["llama", "qk_norm", "gpt2"])
def test_autocast_trains(changes):
    model, ids = build(BOTH, **changes).float().train(), tokens(2, T)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - exact) < 0.03 * exact
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["embedding_dropout", "attention_dropout", "residual_dropout"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager", "matmul"])
def test_dropout_in_training_only(name, dtype, kernel):
    model, ids = build(BOTH, **{name: 0.5}).to(dtype), tokens(2, T)
    model.set_attn_implementation(kernel)
    plain = build(BOTH).to(dtype)
    plain.set_attn_implementation(kernel)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    model.train()
    assert (model(ids).logits - model(ids).logits).abs().max() > 0.01


def test_casting_a_model_keeps_its_rotation(tmp_path):
    model, ids = build().float(), tokens(2, 60)
    model.save_pretrained(tmp_path)
    loaded = HeadwaterForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.bfloat16()(ids).logits, loaded(ids).logits)


# Against transformers' own models

ROPES = {
    "default": dict(rope_type="default"),
    "theta": dict(rope_type="default", rope_theta=500.0),
    "linear": dict(rope_type="linear", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
}


def assert_same_model(theirs: torch.nn.Module, ours: HeadwaterForCausalLM, length: int = 40) -> None:
    """Same names, and the same logits, short and long, plain and left-padded, the padded row as alone."""
    disturb(theirs.eval())
    ours.eval().load_state_dict(theirs.state_dict())
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :3] = 0
    for n in (5, length, 5):
        assert (ours(ids[:, :n]).logits - theirs(ids[:, :n]).logits).abs().max() <= 1e-5
    padded = ours(ids, attention_mask=mask).logits
    # Llama's dynamic RoPE follows the longest row of a batch, and remembers it until a short one comes.
    for row, start in ((0, 0), (1, 3)):
        theirs(ids[:, :5])
        alone = theirs(ids[row : row + 1, start:]).logits[0]
        assert (padded[row, start:] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_equals_llama_for_every_kind_of_rope(rope):
    given = dict(rope_parameters=dict(rope_theta=10_000.0) | rope, max_position_embeddings=32)
    theirs = LlamaForCausalLM(LlamaConfig(**(SIZES | given), rms_norm_eps=1e-5))
    assert_same_model(theirs, HeadwaterForCausalLM(config(**given)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("changes", [{}, dict(head_dim=16), dict(tie_word_embeddings=True)], ids=str)
def test_equals_llama(kv_heads, biases, changes):
    given = changes | dict(num_key_value_heads=kv_heads)
    theirs = LlamaConfig(**(SIZES | given), rms_norm_eps=1e-5, attention_bias=biases, mlp_bias=biases)
    ours = config(**given, qkv_bias=biases, output_bias=biases, mlp_bias=biases)
    assert_same_model(LlamaForCausalLM(theirs), HeadwaterForCausalLM(ours))


@pytest.mark.parametrize("window", [2, 5, 64])
def test_equals_mistral(window):
    theirs = MistralConfig(**SIZES, rms_norm_eps=1e-5, sliding_window=window)
    assert_same_model(MistralForCausalLM(theirs), HeadwaterForCausalLM(config(sliding_window=window)), 20)


def test_equals_qwen3():
    theirs = Qwen3Config(**SIZES, rms_norm_eps=1e-5, head_dim=8)
    assert_same_model(Qwen3ForCausalLM(theirs), HeadwaterForCausalLM(config(qk_norm=True)))


# Trainers


def texts() -> list[dict[str, Tensor]]:
    """Rows with different numbers of labels that count."""
    rows = [dict(input_ids=tokens(T, seed=seed), labels=tokens(T, seed=seed)) for seed in range(32)]
    for index, row in enumerate(rows):
        row["labels"][: index % 8] = -100
    return rows


def train(model: torch.nn.Module, folder, steps: int = 4, batch: int = 4, accumulate: int = 1) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=texts())
    trainer.train()
    return trainer


@pytest.mark.slow
def test_trainer_trains(tmp_path):
    model, rows = build(BOTH), torch.utils.data.default_collate(texts())
    before = model(**rows).loss
    train(model, tmp_path, steps=10)
    assert model.eval()(**rows).loss < before - 0.1


@pytest.mark.slow
def test_trainer_saves_a_model_that_loads(tmp_path):
    model = build(BOTH, tie_word_embeddings=True).float()
    train(model, tmp_path, steps=1).save_model(str(tmp_path / "saved"))
    assert weights_equal(HeadwaterForCausalLM.from_pretrained(tmp_path / "saved"), model)


@pytest.mark.slow
def test_gradient_accumulation_counts_tokens_not_batches(tmp_path):
    whole, parts = build(BOTH), build(BOTH)
    train(whole, tmp_path, steps=2, batch=4)
    train(parts, tmp_path, steps=2, batch=1, accumulate=4)
    start = build(BOTH)
    for (name, a), b, c in zip(parts.named_parameters(), whole.parameters(), start.parameters(), strict=True):
        assert (b - c).abs().max() > 1e-6, name
        assert_near(a, b, 1e-5)


@pytest.mark.slow  # `test_feed_forward.py` and `test_loop.py` have gradient checkpointing without Trainer
def test_trainer_with_gradient_checkpointing(tmp_path):
    plain, checkpointed = build(BOTH), build(BOTH)
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        train(model, tmp_path, steps=1)
    for a, b in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert_near(a, b, 1e-9)


def test_label_smoothing_shifts_the_labels(tmp_path):
    """Trainer smooths by itself, and shifts the labels of the classes it knows to be causal."""
    model, rows = build(BOTH), torch.utils.data.default_collate(texts())
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    loss = Trainer(model, arguments).compute_loss(model, dict(rows))
    logits, targets = model(rows["input_ids"]).logits[:, :-1], rows["labels"][:, 1:]
    uniform = logits.log_softmax(-1)[targets != -100].mean()
    assert_near(loss, -0.9 * log_likelihood(logits, targets).mean() - 0.1 * uniform, 1e-6)


def test_prefix_tuning_needs_ordinary_caches(tmp_path):
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    build({"skip_layer": {}, "svformer": {}}).float().save_pretrained(tmp_path)
    with pytest.raises(HeadwaterError, match=r"heads.*materialise=True"):
        peft.get_peft_model(HeadwaterForCausalLM.from_pretrained(tmp_path), prefix)(input_ids=tokens(2, T))
    model = peft.get_peft_model(HeadwaterForCausalLM.from_pretrained(tmp_path, materialise=True), prefix)
    model(input_ids=tokens(2, T), labels=tokens(2, T)).loss.backward()
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)


PROMPTS = {
    "prefix": ("PrefixTuningConfig", {}),
    "prompt": ("PromptTuningConfig", {}),
    "p-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 8}),
}


@pytest.mark.parametrize(
    ("kind", "mechanisms"),
    [("prefix", {}), ("prefix", {"value_residual": {}}), ("prompt", BOTH), ("p-tuning", {"svformer": {}})],
    ids=str,
)
@torch.no_grad()
def test_virtual_tokens_of_peft_in_generate(kind, mechanisms):
    """Each token is that of a pass over all tokens without a cache, and a padded row's are those of the row alone."""
    peft = pytest.importorskip("peft")
    name, given = PROMPTS[kind]
    prompts = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=4, **given)
    base = build(mechanisms).float()
    model = peft.get_peft_model(base, prompts).eval()
    for parameter in model.prompt_encoder.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(0))
    ids, options = tokens(2, 8), dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    mask = (torch.arange(8) >= torch.tensor([[0], [3]])).long()
    made = model.generate(input_ids=ids, attention_mask=mask, **options)
    for row, begin in ((0, 0), (1, 3)):
        alone = ids[row : row + 1, begin:]
        for _ in range(3):
            alone = torch.cat((alone, model(input_ids=alone).logits[:, -1:].argmax(-1)), 1)
        assert torch.equal(made[row : row + 1, begin:], alone)
    assert not torch.equal(made, base.generate(ids, attention_mask=mask, **options))


def test_prefix_tuning_has_no_raw_tokens():
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(HeadwaterError, match="use prompt tuning or LoRA"):
        peft.get_peft_model(build(BOTH).float(), prefix).eval().generate(input_ids=tokens(2, 8), max_new_tokens=2)


@pytest.mark.slow
def test_trl_trains_a_folder(tmp_path):
    trl = pytest.importorskip("trl")
    build(BOTH, vocab_size=257, pad_token_id=256, eos_token_id=256).float().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    given = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, bf16=False, save_steps=2)
    rows = Dataset.from_dict({"text": ["A river rises."] * 4})
    trainer = trl.SFTTrainer(str(tmp_path), trl.SFTConfig(tmp_path / "out", **given), train_dataset=rows)
    assert type(trainer.model) is HeadwaterForCausalLM
    assert trainer.train().training_loss < 20
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-2"), HeadwaterForCausalLM)


@pytest.mark.slow
def test_lora_trains_adapters_only(tmp_path):
    peft = pytest.importorskip("peft")
    before, ids = build(BOTH), tokens(2, T)
    model = peft.get_peft_model(build(BOTH), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert_near(model(input_ids=ids).logits, before(ids).logits, 1e-12)
    train(model, tmp_path)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all(".lora_" in name for name in trainable)
    original = before.state_dict()
    for name, value in model.base_model.model.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(value, original[name.replace(".base_layer", "")]), name
    tuned = model.eval()(input_ids=ids).logits
    assert (tuned - before(ids).logits).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(build(BOTH), tmp_path / "adapters")
    assert_near(loaded(input_ids=ids).logits, tuned, 1e-5)
    assert_near(model.merge_and_unload()(ids).logits, tuned)


def test_lora_generates():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(BOTH), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    options = dict(input_ids=tokens(2, T), max_new_tokens=5, do_sample=False)
    assert torch.equal(model.eval().generate(**options), model.generate(**options, use_cache=False))


# Learned positions


def test_learned_positions_end():
    model = shared(gpt2=True)
    model(tokens(1, 64))
    with pytest.raises(HeadwaterError, match="Position 64 is beyond this model's 64 learned positions"):
        model(tokens(1, 65))


def test_learned_positions_end_in_generation():
    model = shared(gpt2=True)
    model.generate(tokens(1, 60), max_new_tokens=5, do_sample=False)
    with pytest.raises(HeadwaterError, match="Position 64 is beyond"):
        model.generate(tokens(1, 60), max_new_tokens=6, do_sample=False)


def test_learned_positions_count_each_document():
    model = shared(gpt2=True)
    model(tokens(1, 100), position_ids=document_positions([[50, 50]]))


# Where parameters start


def starts(mechanisms: dict | None = None, model: type = HeadwaterForCausalLM, **changes) -> dict[str, Tensor]:
    made = model(config(mechanisms, **changes))
    return {name.removeprefix("model."): parameter for name, parameter in made.named_parameters()}


def assert_shared_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    common = a.keys() & b.keys()
    assert "layers.0.mlp.up_proj.weight" in common
    for name in common:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    "mechanisms", [{"kv_shift": {}}, {"value_residual": {}}, BOTH, dict(reversed(BOTH.items()))], ids="+".join
)
def test_shared_parameters_start_equal_whatever_the_mechanisms(mechanisms):
    vanilla, other = starts(), starts(mechanisms)
    assert vanilla.keys() < other.keys()
    assert_shared_equal(vanilla, other)
    assert_shared_equal(starts(BOTH), other)


@pytest.mark.parametrize(
    "changes", [{}, dict(tie_word_embeddings=True), dict(gpt2=True)], ids=["untied", "tied", "gpt2"]
)
def test_base_model_starts_as_the_whole_model(changes):
    assert_shared_equal(starts(BOTH, HeadwaterModel, **changes), starts(BOTH, **changes))


@pytest.mark.parametrize("changes", [dict(num_hidden_layers=5), dict(tie_word_embeddings=True), dict(vocab_size=97)])
def test_shared_parameters_start_equal_whatever_else_changes(changes):
    assert_shared_equal(starts(BOTH), starts(BOTH, **changes))


def test_start_does_not_depend_on_the_global_seed():
    torch.manual_seed(1)
    first = starts(BOTH)
    torch.manual_seed(2)
    assert_shared_equal(first, starts(BOTH))


def test_start_depends_on_the_seed():
    a, b = starts({"kv_shift": {}}), starts({"kv_shift": {}}, initializer_seed=1)
    for name in a:
        assert torch.equal(a[name], b[name]) == ("norm" in name), name


def test_start_depends_on_the_name():
    start = starts({"kv_shift": {}})
    drawn = [value.flatten()[:4] for name, value in start.items() if "norm" not in name]
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn)


def test_start_has_the_configured_spread():
    start = starts(gpt2=True, initializer_range=0.05, hidden_size=128, intermediate_size=512)
    for name, value in start.items():
        if "norm" in name and name.endswith("weight"):
            assert torch.equal(value, torch.ones_like(value)), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.05 / 6**0.5 if to_residual else 0.05
            assert abs(value.std() / expected - 1) < 0.05, name


# What a config refuses

REFUSED = {
    "unknown mechanism": (dict(mechanisms={"kv_shfit": {}}), "no mechanism named 'kv_shfit'; did you mean 'kv_shift'?"),
    "nothing near": (
        dict(mechanisms={"xyz": {}}),
        "known names: backout, dense_former",
    ),
    "unnamed mechanism": (dict(mechanisms="kv_shift"), "mechanisms"),
    "unknown option": (dict(mechanisms={"value_residual": {"mod": 1}}), "no option 'mod'; did you mean 'mode'?"),
    "unknown choice": (dict(mechanisms={"value_residual": {"mode": "x"}}), "mode"),
    "heads": (dict(num_attention_heads=5), "hidden_size 32 is not divisible by num_attention_heads 5"),
    "no heads": (dict(num_attention_heads=0), "num_attention_heads"),
    "no heads of given width": (dict(num_attention_heads=0, head_dim=8), "num_attention_heads"),
    "kv heads": (dict(num_key_value_heads=3), "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
    "more kv heads": (dict(num_key_value_heads=8), "num_attention_heads 4 is not divisible by num_key_value_heads 8"),
    "no kv heads": (dict(num_key_value_heads=0), "num_key_value_heads"),
    "negative kv heads": (dict(num_key_value_heads=-2), "num_key_value_heads"),
    "odd head": (dict(head_dim=5), "make it even"),
    "odd rotation": (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.4)), "make it even"),
    "unknown rope": (dict(rope_parameters=dict(rope_theta=1e4, rope_type="yran")), "yran"),
    "rope without its factor": (dict(rope_parameters=dict(rope_theta=1e4, rope_type="linear")), "'factor'"),
    "more rotation than head": (
        dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=2.0)),
        "at most 1, not 2",
    ),
    "mechanism with a number for a name": (dict(mechanisms={1: {}}), "no mechanism named '1'"),
    "negative start": (dict(initializer_range=-1.0), "initializer_range must be zero or more"),
    "negative epsilon": (dict(norm_eps=-1.0), "norm_eps must be zero or more"),
    "negative dropout": (dict(attention_dropout=-0.1), "attention_dropout must be a probability below 1, not -0.1"),
    "whole dropout": (dict(residual_dropout=1.0), "residual_dropout must be a probability below 1, not 1.0"),
    "no window": (dict(sliding_window=1), "sliding_window must be at least 2, not 1"),
    "no layers": (dict(num_hidden_layers=0), "num_hidden_layers must be at least 1, not 0"),
    "no first layer": (dict(num_hidden_layers=0, mechanisms={"value_residual": {}}), "num_hidden_layers"),
    "no tokens": (dict(vocab_size=0), "vocab_size must be at least 1, not 0"),
    "no feed-forward": (dict(intermediate_size=0), "intermediate_size"),
    "unknown norm": (dict(norm="rms"), "norm"),
    "unknown position": (dict(position="sinusoidal"), "position"),
    "unknown feed-forward": (dict(feed_forward="swiglu"), "feed_forward"),
    "misspelt field": (dict(hiden_size=3), "HeadwaterConfig has no field 'hiden_size'; did you mean 'hidden_size'?"),
    "rope without rope": (dict(position="none", rope_parameters=dict(rope_theta=1e4)), "has no rope_parameters"),
    "negative base": (dict(rope_parameters=dict(rope_theta=-5.0)), "rope_theta must be above zero"),
    "text for a base": (dict(rope_parameters=dict(rope_theta="x")), "rope_theta must be a number"),
    "rope of zeros": (
        dict(rope_parameters=dict(rope_type="yarn", factor=0, rope_theta=1e4, original_max_position_embeddings=64)),
        "cannot compute frequencies",
    ),
    "no number": (dict(norm_eps=float("nan")), "norm_eps must be zero or more and finite"),
    "text for a number": (dict(num_hidden_layers="three"), "num_hidden_layers"),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_config_refuses(changes, sentence):
    with pytest.raises((HeadwaterError, StrictDataclassError)) as error:
        HeadwaterConfig(**(SIZES | changes))
    assert sentence in str(error.value)
    assert "Traceback" not in str(error.value)


def test_unknown_activation():
    with pytest.raises(HeadwaterError, match="no activation named 'silo'; did you mean 'silu'"):
        HeadwaterForCausalLM(config(hidden_act="silo"))


OTHERS = dict(rms_norm_eps=1.0, use_sliding_window=False, n_positions=7, hiden_size=3, is_decoder=True)


def test_names_of_others_are_kept_and_saved_again(tmp_path):
    """The guard against misspelt fields is for what is written by hand, not for what files hold."""
    model = build(BOTH).float()
    for name, value in OTHERS.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path / "once")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    assert weights_equal(loaded, model)
    loaded.save_pretrained(tmp_path / "twice")
    for read in (HeadwaterConfig.from_pretrained(tmp_path / "twice"), HeadwaterConfig(**loaded.config.to_dict())):
        assert OTHERS.items() <= read.to_dict().items()


def test_the_file_of_a_config_written_by_hand(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "headwater", "hiden_size": 3}')
    assert AutoConfig.from_pretrained(tmp_path).hiden_size == 3
    (tmp_path / "config.json").write_text('{"hiden_size": 3}')
    assert HeadwaterConfig.from_pretrained(tmp_path).hiden_size == 3
    for make in (HeadwaterConfig.from_pretrained, AutoConfig.from_pretrained):
        config().save_pretrained(tmp_path)
        with pytest.raises(HeadwaterError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
            make(tmp_path, hiden_size=3)


def test_files_hold_nothing_for_trl(tmp_path):
    """TRL reads `auto_map` of every config; a file has one only where there is code beside it."""
    assert config().auto_map == {}
    config().save_pretrained(tmp_path)
    assert "auto_map" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("position", ["learned", "none"])
def test_odd_heads_are_fine_without_rope(position):
    model = build(position=position, head_dim=5)
    assert model(tokens(1, T)).logits.shape == (1, T, VOCAB)


def test_fields_may_be_set_before_a_model_is_built():
    described, ids = config(), tokens(1, 5)
    described.mechanisms = {"kv_shift": {}}
    described.num_hidden_layers = 5
    model = HeadwaterForCausalLM(described).eval()
    assert model.config.mechanisms == config({"kv_shift": {}}).mechanisms
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 8)
    described.mechanisms = {"svformer": {}, "neutreno": {}}  # checked when a model is built
    with pytest.raises(HeadwaterError, match="neutreno"):
        HeadwaterForCausalLM(described)


LEFT_OUT = ("head_dim", "num_key_value_heads", "intermediate_size", "final_norm_weight", "rope_parameters")


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in LEFT_OUT),
        dict(position="learned"),
        dict(rope_parameters={"rope_theta": 500.0}),
        dict(rope_parameters={"rope_type": "yarn", "factor": 2.0}),
        dict(hidden_size=48, num_attention_heads=6, num_hidden_layers=2),
    ],
    ids=str,
)
def test_what_is_set_later_is_settled_as_what_is_given_at_first(changes, tmp_path):
    described = config()
    for name, value in changes.items():
        setattr(described, name, copy.deepcopy(value))
    model = HeadwaterForCausalLM(described).eval()
    given = dict(head_dim=8) | changes
    assert weights_equal(model, HeadwaterForCausalLM(config(**given)))
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_fields_of_layers_are_refused():
    with pytest.raises(HeadwaterError, match="does not support per_layer_config"):
        config(per_layer_config={0: {"num_key_value_heads": 1}})


@pytest.mark.parametrize(
    "changes", [dict(num_attention_heads=3), dict(sliding_window=1), dict(hidden_act="x"), dict(num_hidden_layers=0)]
)
def test_what_is_set_later_is_checked(changes):
    described = config()
    for name, value in changes.items():
        setattr(described, name, value)
    with pytest.raises(HeadwaterError, match=next(iter(changes)).replace("hidden_act", "activation")):
        HeadwaterForCausalLM(described)


def test_rotary_embedding_is_llamas():
    """In shape and sign: other packages call it."""
    ours, theirs = build().float().model, LlamaForCausalLM(LlamaConfig(**SIZES)).model
    x, where = torch.zeros(1), torch.arange(9)[None]
    for a, b in zip(ours.rotary_emb(x, where), theirs.rotary_emb(x, where), strict=True):
        assert torch.equal(a, b)


def test_models_name_the_fp32_modules_that_they_have():
    assert build().model._keep_in_fp32_modules_strict == set()
    assert build(BOTH)._keep_in_fp32_modules_strict == {"kv_shift.alpha", "kv_shift.beta", "value_residual.lambdas"}
    assert build({"pattention": {}})._keep_in_fp32_modules_strict == {"scale.tau"}
