"""Mistakes that somebody could make in `src/headwater`, each with the tests of `make test` that must notice it.

`old` stands exactly once in the package, in whichever file, and `new` in its place is the mistake. `tests` are what
pytest is given: files, or functions in them as FILE::NAME, as few as will do, since each mistake pays for them.
`make mutations` makes the mistakes one by one; `tests/test_mutations.py` sees to it that the list fits the code.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    name: str
    old: str
    new: str
    tests: tuple[str, ...]


KV_SHIFT = "tests/mechanisms/test_kv_shift.py"
SPLIT = "tests/serving/test_split.py"
VALUE_RESIDUAL = "tests/mechanisms/test_value_residual.py"
PATTENTION = "tests/mechanisms/test_pattention.py"
TOP_K = "tests/mechanisms/test_top_k.py"
BASELINES = "tests/mechanisms/test_baselines.py"
SHARING = "tests/mechanisms/test_sharing.py"
KV_SOURCE = "tests/mechanisms/test_kv_source.py"
PREFILL = "tests/models/test_prefill.py"
OUTPUTS = "tests/mechanisms/test_outputs.py"
MEMORY = "tests/mechanisms/test_persistent_memory.py"
VALUE_EMBEDDING = "tests/mechanisms/test_value_embedding.py"
SMEAR = "tests/mechanisms/test_smear.py"
BACKOUT = "tests/mechanisms/test_backout.py"
NGRAM_MEMORY = "tests/mechanisms/test_ngram_memory.py"
SHORT_CONV = "tests/mechanisms/test_short_conv.py"
DEPTH = "tests/mechanisms/test_depth.py"
CONTRACT = "tests/contract/test_contract.py"
CACHE = "tests/models/test_cache.py"
HUGGINGFACE = "tests/models/test_huggingface.py"
GROWTH = "tests/growth/test_pairs.py"
ENLARGE = "tests/growth/test_enlarge.py"
LOOP = "tests/training/test_loop.py"
CHECKPOINT = "tests/training/test_checkpoint.py"
SAVING = "tests/training/test_saving.py"
PREPARE = "tests/data/test_prepare.py"
TEXT = "tests/data/test_text.py"
ROWS = "tests/data/test_rows.py"
STATISTICS = "tests/compare/test_statistics.py"
PRICES_OF_ARMS = "tests/compare/test_prices.py"
SEQUENTIAL = "tests/compare/test_sequential.py"
EARLIER = "tests/compare/test_earlier.py"
CLAIMS = "tests/reproduce/test_claims.py"
COST = "tests/test_cost.py"
PRICE = "tests/test_price.py"
EVALUATE = "tests/test_evaluate.py"
FAMILIES = "tests/retrofit/test_families.py"
FOREIGN = "tests/retrofit/test_foreign.py"
TWO_KINDS = "tests/models/test_two_kinds.py"
VARLEN = "tests/nn/test_varlen.py"
DECODING = "tests/models/test_decoding.py"
IMAGES = "tests/data/test_images.py"
TRAINING_IMAGES = "tests/training/test_training_images.py"
INSPECT_IMAGES = "tests/inspect/test_inspect_images.py"
REPORT = "tests/test_report.py"
EQUATIONS = "tests/vision/test_equations.py"
IMAGE_CONFIG = "tests/vision/test_image_config.py"
IMAGE_COSTS = "tests/vision/test_image_costs.py"

VERIFY = "tests/test_verify.py"
CONVERT = "tests/retrofit/test_convert.py"

MISTAKES = [
    # A smaller cache
    Mistake(
        "a blend stops short of the last step",
        "self.weight.fill_(kept + (1 - kept) * (step.number + 1) / step.steps)",
        "self.weight.fill_(kept + (1 - kept) * step.number / step.steps)",
        (f"{CONVERT}::test_a_run_goes_over_and_finishes",),
    ),
    Mistake(
        "what later layers read is blended too",
        "parts = [(own if slot is None else sources[slot])[:, first:end] for first, end, slot in runs]",
        "parts = [own[:, first:end] for first, end, slot in runs]",
        (f"{CONVERT}::test_on_its_way_it_is_what_the_equation_says",),
    ),
    Mistake(
        "values are turned and not turned back",
        'weight.copy_(torch.einsum("ohi,hij->ohj", heads, of_queries.to(weight.device)).flatten(1))',
        'weight.copy_(torch.einsum("ohi,hji->ohj", heads, of_queries.to(weight.device)).flatten(1))',
        (f"{CONVERT}::test_turning_keeps_the_function_and_brings_what_is_shared_nearer",),
    ),
    Mistake(
        "a model in bf16 is turned as it is",
        "before.to(torch.promote_types(before.dtype, torch.float32))",
        "pass",
        (f"{CONVERT}::test_a_model_in_bf16_is_turned_in_fp32",),
    ),
    Mistake(
        "a conversion is resumed with other options",
        "if old.get(field) != new.get(field):",
        "if False:",
        (f"{CONVERT}::test_resuming_writes_to_no_other_folder",),
    ),
    Mistake(
        "the divergence is not scaled by the temperature",
        "return temperature**2 * kl",
        "return kl",
        (f"{CONVERT}::test_the_divergence_and_its_gradient_are_those_of_the_equation",),
    ),
    # Pairs beside the tokens'
    Mistake(
        "a decoding step joins the pairs to the history",
        "if not first and not torch.is_grad_enabled() and is_few(length):",
        "if False:",
        (f"{MEMORY}::test_a_step_does_not_join_the_pairs_to_the_history",),
    ),
    Mistake(
        "the first few tokens of a row are not causal beside pairs",
        "if not first and not torch.is_grad_enabled() and is_few(length):",
        "if not torch.is_grad_enabled() and is_few(length):",
        (f"{MEMORY}::test_a_step_does_not_join_the_pairs_to_the_history",),
    ),
    # Looking back
    Mistake(
        "dynamic taps are not scaled",
        "return (2 * self.window + 1) ** -0.5 if name in self.dynamic else 1.0",
        "return 1.0",
        (
            f"{SHORT_CONV}::test_dynamic_taps_are_inkling_2s",
            f"{SHORT_CONV}::test_a_model_with_it_everywhere_equals_the_equations",
        ),
    ),
    Mistake(
        "the gradient of dynamic taps crosses a document's start",
        "ahead = torch.where(seen[:, None, :, None], (taps[steps] + more[steps]) * g, 0)",
        "ahead = (taps[steps] + more[steps]) * g",
        (f"{SHORT_CONV}::test_dynamic_taps_keep_no_shifted_copy_and_have_their_gradients",),
    ),
    Mistake(
        "a decoding step weighs the oldest token as the newest",
        "first = window - 1 - steps",
        "first = steps - 1",
        (f"{SHORT_CONV}::test_one_token_at_a_time",),
    ),
    Mistake(
        "a decoding step convolves without the token itself",
        "return (y + x if residual else y).to(x.dtype)",
        "return y.to(x.dtype)",
        (f"{SHORT_CONV}::test_one_token_at_a_time",),
    ),
    Mistake(
        "another layer than nanochat's is taken out",
        "layer = config.num_hidden_layers // 2 if",
        "layer = (config.num_hidden_layers - 1) // 2 if",
        (f"{BACKOUT}::test_it_is_the_equation",),
    ),
    Mistake(
        "a plan is that of the config as it was",
        "pickle.dumps(vars(config))",
        "config.num_hidden_layers",
        (f"{HUGGINGFACE}::test_what_is_set_later_is_settled_as_what_is_given_at_first", SMEAR),
    ),
    Mistake(
        "half of the heads is half of those that a layer stores",
        "current=cls.first_half(config, plan),",
        "current=None,",
        (f"{KV_SHIFT}::test_half_of_the_heads_are_those_of_the_model",),
    ),
    Mistake(
        "layer 0 reads the embedding before it is smeared",
        "context.sources[self.embedding] = x",
        "pass",
        (f"{SMEAR}::test_whoever_reads_the_embedding_reads_the_smeared_one",),
    ),
    Mistake(
        "later layers read the embedding before it is smeared",
        "if self.exports_embedding:\n            made.append(embedding)",
        "if self.exports_embedding:\n            made.append(before)",
        (f"{SMEAR}::test_whoever_reads_the_embedding_reads_the_smeared_one",),
    ),
    # Looking inside
    Mistake(
        "the class token counts as a patch in their similarity",
        "similarity(x[:, self.first_patch :])",
        "similarity(x)",
        (f"{INSPECT_IMAGES}::test_maps_and_similarity_are_those_of_the_models_own_outputs",),
    ),
    Mistake(
        "attention maps are those of the patches, not of the class token",
        "slice(0, 1) if self.has_class_token else slice(self.first_patch, None)",
        "slice(self.first_patch, None)",
        (f"{INSPECT_IMAGES}::test_maps_and_similarity_are_those_of_the_models_own_outputs",),
    ),
    Mistake(
        "a report shows images that the run was not evaluated on",
        'return data if data.description.get("sha256") == run.data.get("sha256") else None',
        "return data",
        (f"{REPORT}::TestImages::test_wrong_and_right_answers_of_the_best_arm",),
    ),
    # Layers of two kinds, and other families
    Mistake(
        "layers outside sliding_layers have the window too",
        'own = (self.sliding_fields or {}) if slides else {"sliding_window": None}',
        "own = (self.sliding_fields or {}) if slides else {}",
        (f"{TWO_KINDS}::test_costs_are_those_of_the_model",),
    ),
    Mistake(
        "RoPE of the layers with a window is that of the others",
        "angles[True] = for_heads(*self.sliding_rotary_emb(x, position_ids))",
        "angles[True] = for_heads(*self.rotary_emb(x, position_ids))",
        (f"{FOREIGN}::test_baichuan_m1_with_its_windows_and_their_heads",),
    ),
    Mistake(
        "nanochat's heads are not turned the other way",
        "return tensor.unflatten(0, (-1, width)).roll(width // 2, 1).flatten(0, 1)",
        "return tensor",
        (f"{FOREIGN}::test_nanochat_is_the_same_function",),
    ),
    Mistake(
        "nanochat's windows count the token itself",
        "sliding_window=version.short(context) + 1 if short else None",
        "sliding_window=version.short(context) if short else None",
        (f"{FOREIGN}::test_nanochat_is_the_same_function",),
    ),
    # Verifying
    Mistake(
        "verify compares only the first token of a call",
        "parted = (error > self.tolerance).nonzero()",
        "parted = (error[:1] > self.tolerance).nonzero()",
        (f"{VERIFY}::test_a_call_parts_in_its_middle",),
    ),
    Mistake(
        "verify reuses a prefix without a copy of its cache",
        "cache=copy.deepcopy(kept)",
        "cache=kept",
        (f"{VERIFY}::test_a_mistake_is_seen_and_told_from_others",),
    ),
    Mistake(
        "verify names the last layer that differs",
        "for name, wrote in seen.layers.items():",
        "for name, wrote in reversed(seen.layers.items()):",
        (f"{VERIFY}::test_a_mistake_is_seen_and_told_from_others",),
    ),
    # Mechanisms
    Mistake(
        "the shift of whole rows takes the token before the last",
        "y[:, back:].addcmul_(x[:, :-back], tap)",
        "y[:, back + 1 :].addcmul_(x[:, : -back - 1], tap)",
        (f"{KV_SHIFT}::test_shift_equals_naive",),
    ),
    Mistake(
        "a kernel for keys is given parameters in place of the taps that they stand for",
        "return self.taps(self.alpha) if self.alpha",
        "return self.alpha if self.alpha",
        (f"{CONTRACT}::TestEveryMechanism::test_key_taps_equal_local",),
    ),
    Mistake(
        "the shift with a cache is one slot off",
        "first = window - 1 - steps\n",
        "first = window - steps\n",
        (f"{KV_SHIFT}::test_chunks_with_a_tail_equal_one_row",),
    ),
    Mistake(
        "the shift crosses the border of a document",
        "tap = taps[steps] if reach is None else taps[steps] * (reach >= steps)[:, None, :, None]",
        "tap = taps[steps]",
        (f"{CONTRACT}::TestEveryMechanism::test_packed_documents_decode",),
    ),
    Mistake(
        "the first token of a document still counts the one before it",
        "taps[steps] * (reach >= steps)",
        "taps[steps] * (reach >= steps - 1)",
        (f"{CONTRACT}::TestEveryMechanism::test_packed_documents_decode",),
    ),
    Mistake(
        "the gradient of the shift goes to the wrong tokens",
        "gx[:, :-back].addcmul_(g[:, back:], tap)",
        "gx[:, back:].addcmul_(g[:, :-back], tap)",
        (f"{KV_SHIFT}::test_fast_path_passes_gradcheck",),
    ),
    Mistake(
        "the compiled shift's gradient crosses the border of a document",
        "seen = seen & (reach.roll(-steps, 1) >= steps)",
        "seen = seen & (reach >= steps)",
        (f"{KV_SHIFT}::test_form_for_the_compiler_equals_naive",),
    ),
    Mistake(
        "the compiled shift keeps a shifted copy for its gradient",
        "return traced_shift(x, weight, reach)",
        "pass",
        (f"{KV_SHIFT}::test_compiled_shift_keeps_no_shifted_copy",),
    ),
    Mistake(
        "the shift's scalars no longer start with a sum of one",
        'return torch.stack((current, 1 - current)) if self.form == "free" else current\n',
        'return torch.stack((current, current)) if self.form == "free" else current\n',
        (f"{KV_SHIFT}::test_start_is_uniform_and_sums_to_one",),
    ),
    Mistake(
        "the taps of longer windows are normalized over the heads",
        "return taps / taps.sum(0)",
        "return taps / taps.sum(1, keepdim=True)",
        (f"{KV_SHIFT}::test_start_of_longer_windows_is_normalized_once",),
    ),
    Mistake(
        "values are shifted by the scalars of the keys",
        'k, v = shifted("k", k, self.alpha), shifted("v", v, self.beta)',
        'k, v = shifted("k", k, self.alpha), shifted("v", v, self.alpha)',
        (f"{KV_SHIFT}::test_keys_and_values_are_shifted_by_their_own_scalars",),
    ),
    Mistake(
        "the cache keeps no tail for the shift",
        'return plan.acting("local", cls.name(), tails) if tails else plan',
        'return plan.acting("local", cls.name()) if tails else plan',
        (f"{KV_SHIFT}::test_plan_keeps_the_raw_tokens_of_every_layer",),
    ),
    Mistake(
        "λ1 of the constant value residual weighs the layer's own values",
        "mixed = torch.add(own, *sources, alpha=first / last)",
        "mixed = torch.add(*sources, own, alpha=first / last)",
        (f"{VALUE_RESIDUAL}::test_fixed_weights", f"{VALUE_RESIDUAL}::test_values_and_gradients_equal_naive"),
    ),
    Mistake(
        "the identity mode of the value residual forgets its half",
        'self.fixed = (weight, 0.5 if mode == "identity" else 1.0)',
        "self.fixed = (weight, 1.0)",
        (f"{VALUE_RESIDUAL}::test_values_and_gradients_equal_naive",),
    ),
    Mistake(
        "learnable-plus gives each layer a softmax of its own",
        "return self.scale * self.logits.softmax(0)",
        "return self.scale * self.logits.sigmoid()",
        (f"{VALUE_RESIDUAL}::test_plus_shares_the_depth_among_the_receivers",),
    ),
    Mistake(
        "the value residual reads mixed values, and not the projected ones",
        'return (Source("raw", PARTS[of], source),)',
        'return (Source("local" if of == "values" else "raw", PARTS[of], source),)',
        (
            f"{VALUE_RESIDUAL}::test_first_values_are_raw",
            f"{VALUE_RESIDUAL}::test_what_another_mechanism_reads_is_not_mixed_in",
        ),
    ),
    Mistake(
        "the weighted sum adds its first tensor once more",
        "for weight, x in zip(weights[1:], tensors[1:], strict=True):\n            y.addcmul_(x, weight)",
        "for weight, x in zip(weights[1:], tensors[:-1], strict=True):\n            y.addcmul_(x, weight)",
        (f"{VALUE_RESIDUAL}::test_values_and_gradients_equal_naive", "tests/mechanisms/test_weighted_sum.py"),
    ),
    Mistake(
        "a skip head attends to the layer's own keys and values",
        "if 0 < distance <= layer:",
        "if 0 < distance < layer:",
        (f"{SHARING}::test_plan_says_what_the_equations_say",),
    ),
    Mistake(
        "a layer attends to what its source projects, whatever that attends to",
        "return getattr(plans[source].attends[head], letter)",
        "return source",
        (f"{SHARING}::test_a_layer_attends_to_what_its_source_attends_to",),
    ),
    Mistake(
        "skip heads read what their source's skip heads read",
        'return options["source"] == "alias"',
        "return True",
        (f"{SHARING}::test_skip_heads_with_shared_layers",),
    ),
    Mistake(
        "half of the model's heads are shifted in layers that have others",
        "for part in cls.shifted(options, config.at(plan.index), plan)]",
        "for part in cls.shifted(options, config, plan)]",
        (f"{KV_SHIFT}::test_half_of_the_heads_that_a_layer_has",),
    ),
    Mistake(
        "SVFormer shares the keys where values were asked for",
        'keys, values = options["share"] != "values", options["share"] != "keys"',
        'keys, values = options["share"] != "keys", options["share"] != "values"',
        (f"{SHARING}::test_svformer_stores_values_once",),
    ),
    Mistake(
        "NeuTRENO subtracts the first values",
        "difference = weight * (first - own).transpose(1, 2)",
        "difference = weight * (own - first).transpose(1, 2)",
        (f"{BASELINES}::test_neutreno_adds_the_difference_to_each_head",),
    ),
    Mistake(
        "NeuTRENO gives query heads the values of others under GQA",
        "difference.repeat_interleave(out.shape[2] // difference.shape[2], dim=2)",
        "difference.repeat(1, 1, out.shape[2] // difference.shape[2], 1)",
        (f"{BASELINES}::test_neutreno_adds_the_difference_to_each_head",),
    ),
    Mistake(
        "DenseFormer starts as a mean",
        "last = torch.zeros(self.alpha.shape)\n        last[-1] = 1\n        return last",
        "last = torch.full(self.alpha.shape, 1 / len(self.alpha))\n        return last",
        (f"{BASELINES}::test_dense_former_starts_as_vanilla",),
    ),
    Mistake(
        "DenseFormer's dilation counts from the first block",
        'if (layer - j) % options["dilation"] == 0)',
        'if j % options["dilation"] == 0)',
        (f"{BASELINES}::test_dilation_and_period",),
    ),
    Mistake(
        "exclusive attention adds what it should remove",
        "torch.addcmul(y, times, v, value=-1)",
        "torch.addcmul(y, times, v, value=1)",
        (f"{OUTPUTS}::test_exclusive_removes_what_lies_along_the_own_value",),
    ),
    Mistake(
        "exclusive attention takes a layer's own values where a head attends to another's",
        'return tuple(Source("local", "v", group.v) for group in plan.groups)',
        'return tuple(Source("local", "v", plan.index) for group in plan.groups)',
        (f"{OUTPUTS}::test_exclusive_takes_the_values_that_a_head_attends_to",),
    ),
    Mistake(
        "an output gate ignores its scale",
        "gate = gate * self.scale\n",
        "gate = gate * 1\n",
        (f"{OUTPUTS}::test_a_gate_scales_what_a_head_has_read",),
    ),
    Mistake(
        "a mask hides the learned pairs",
        "value=mask.dtype == torch.bool)",
        "value=False)",
        (f"{MEMORY}::test_every_token_sees_the_pairs",),
    ),
    Mistake(
        "what an earlier mechanism needs of the kernel hides what a later one needs",
        "if all(name in kernels for kernels in known.values())",
        "if name",
        (f"{MEMORY}::test_the_kernels_of_several_mechanisms_are_those_that_all_work_with",),
    ),
    Mistake(
        "tables of values are given by the layer's number",
        "cls.receiving(config).index(plan.index) % tables",
        "plan.index % tables",
        (f"{VALUE_EMBEDDING}::test_layers_read_the_tables_in_turn",),
    ),
    Mistake(
        "n-grams reach into the document before",
        "return past if reach is None else torch.where((reach >= steps)[:, None, :, None], past, 0)",
        "return past if reach is None else torch.where((reach >= 0)[:, None, :, None], past, 0)",
        (f"{NGRAM_MEMORY}::test_n_grams_begin_with_the_document",),
    ),
    Mistake(
        "a cache initialized early keeps ids in digits that half precision rounds",
        "DIGITS, DIGIT_BITS = 4, 8",
        "DIGITS, DIGIT_BITS = 3, 11",
        (f"{NGRAM_MEMORY}::test_caches_keep_ids_exactly",),
    ),
    Mistake(
        "scalars in fp32 take linear layers beside them along",
        "child._apply(fn)",
        "child._apply(keep)",
        (f"{VALUE_EMBEDDING}::test_half_precision_keeps_its_dtype",),
    ),
    Mistake(
        "YOCO's cache is that of the lower half's last layer",
        "min(layer, len(layers) // 2)",
        "min(layer, len(layers) // 2 - 1)",
        (f"{KV_SOURCE}::test_maps_of_layers",),
    ),
    Mistake(
        "the embedding's weight and the stream's are exchanged",
        "weighted_sum(self.lambdas, embedding, x)",
        "weighted_sum(self.lambdas, x, embedding)",
        (f"{BASELINES}::test_embedding_residual_changes_the_stream_itself",),
    ),
    Mistake(
        "Inkling 2's scores over depth are not divided by √D",
        'width**-0.5 if self.form == "inkling_2" else 1.0',
        "1.0",
        (f"{DEPTH}::test_it_is_inklings",),
    ),
    Mistake(
        "attention over depth reads sums of what layers added",
        "*(after - before for before, after in pairwise(states))",
        "*states[1:]",
        (f"{DEPTH}::test_it_is_inklings",),
    ),
    Mistake(
        "the keys of MUDD are the values'",
        "k = None if self.k is None else others[0]",
        "k = None if self.k is None else others[-1]",
        (f"{DEPTH}::test_inputs_that_differ_equal_naive",),
    ),
    Mistake(
        "MUDD's sums after others leave out what these gave",
        "own = None if self.alike else torch.stack([*x.parts(), x.stream])",
        "own = None",
        (f"{DEPTH}::test_inputs_that_differ_equal_naive",),
    ),
    Mistake(
        "the inputs of queries, keys and values share one tail",
        'return self.tail.before(f"{name}.{self.part}", x, length, everything)',
        "return self.tail.before(name, x, length, everything)",
        (f"{DEPTH}::test_inputs_that_differ_equal_naive",),
    ),
    Mistake(
        "the cache's price counts the raw tokens of one input",
        '"input": len(plan.inputs) * own.hidden_size',
        '"input": own.hidden_size',
        (f"{DEPTH}::test_inputs_that_differ_equal_naive",),
    ),
    Mistake(
        "a short convolution loses the token itself",
        "taps = torch.cat((own[:1] + 1, own[1:])) if self.residual else own",
        "taps = own",
        (f"{SHORT_CONV}::test_it_is_inklings",),
    ),
    Mistake(
        "around attention, mechanisms do not see where documents begin",
        'Context([*sources], kwargs.get("reach"), tail,',
        "Context([*sources], None, tail,",
        (f"{SHORT_CONV}::test_documents_are_apart",),
    ),
    Mistake(
        "τ is n and not its root",
        'else float(pairs) if "l1" in score else pairs**0.5',
        "else float(pairs)",
        (f"{PATTENTION}::test_default_tau",),
    ),
    Mistake(
        "Pattention's fused form forgets τ",
        "inverse[block] = torch.where(norm > guard**0.5, tau / norm, 0.0)",
        "inverse[block] = torch.where(norm > guard**0.5, 1 / norm, 0.0)",
        (f"{PATTENTION}::test_values_and_gradients_equal_naive",),
    ),
    Mistake(
        "Pattention's gradient keeps what points along the scores",
        "grad.addcmul_(z, along[block], value=-1).mul_(inverse[block])",
        "grad.mul_(inverse[block])",
        (f"{PATTENTION}::test_fused_form_passes_gradcheck_in_every_input",),
    ),
    Mistake(
        "a row without scores gives no number",
        "return a * torch.where(seen, tau * torch.where(seen, square, 1.0).rsqrt(), 0.0)",
        "return a * tau * square.rsqrt()",
        (f"{PATTENTION}::test_a_row_without_scores_gives_zero_and_no_gradient",),
    ),
    Mistake(
        "equation 15's softmax is not scaled",
        "scores = scores / self.key.shape[1] ** 0.5",
        "scores = scores * 1.0",
        (f"{PATTENTION}::test_values_and_gradients_equal_naive",),
    ),
    Mistake(
        "values of parameter tokens start too wide",
        "value_std = 2 / (config.num_hidden_layers * config.hidden_size**0.5)",
        "value_std = 2 / config.hidden_size**0.5",
        (f"{PATTENTION}::test_start",),
    ),
    Mistake(
        "Pattention reads the k best of too few product keys",
        "if (i + 1) * (j + 1) <= self.top_k]",
        "if (i + 2) * (j + 1) <= self.top_k + 1]",
        (f"{TOP_K}::test_product_keys_find_the_best_of_all_pairs",),
    ),
    Mistake(
        "of equal scores the last pair is read",
        "place = torch.arange(a.shape[-1] - 1, -1, -1, device=a.device)",
        "place = torch.arange(a.shape[-1], device=a.device)",
        (f"{TOP_K}::test_the_largest_are_in_order_and_of_equal_ones_the_first",),
    ),
    Mistake(
        "τ is that of all pairs where a token reads a few",
        "self.scale = Tau(default_tau(score, top_k or pairs) if tau is None else tau)",
        "self.scale = Tau(default_tau(score, pairs) if tau is None else tau)",
        (f"{TOP_K}::test_start",),
    ),
    # The model: attention, positions, masks, norms, starts
    Mistake(
        "attention is scaled by the model's width",
        "self.scaling = config.head_dim**-0.5",
        "self.scaling = config.hidden_size**-0.5",
        (f"{HUGGINGFACE}::test_equals_llama",),
    ),
    Mistake(
        "a group of query heads reads another group's keys",
        '(self.plan.slot(Source("bank", "k", group.k)), group.k_heads),',
        '(self.plan.slot(Source("bank", "k", group.k)), group.v_heads),',
        (f"{SHARING}::test_keys_and_values_of_heads_that_lie_at_different_places",),
    ),
    Mistake(
        "the rotation turns the wrong way",
        "return cos.unsqueeze(1), torch.cat((-first, second), dim=-1).unsqueeze(1)",
        "return cos.unsqueeze(1), torch.cat((first, -second), dim=-1).unsqueeze(1)",
        (f"{HUGGINGFACE}::test_equals_llama",),
    ),
    Mistake(
        "a token sees the document before its own",
        "seen = key + 1 if key_count is None else key_count[batch, key]",
        "seen = key + 2 if key_count is None else key_count[batch, key] + 1",
        (f"{CONTRACT}::TestEveryMechanism::test_packed_documents_equal_separate",),
    ),
    Mistake(
        "a hole in the mask does not end what a mechanism looks back to",
        "return torch.minimum(position_ids, columns(since_gap, past, position_ids.shape[1]))",
        "return position_ids + 0 * columns(since_gap, past, position_ids.shape[1])",
        (f"{CONTRACT}::TestEveryMechanism::test_attention_mask_equals_naive",),
    ),
    Mistake(
        "RoPE's frequencies follow the longest row of a batch",
        "self.frequencies_for(document_lengths(position_ids))",
        "self.frequencies_for(document_lengths(position_ids).amax().expand(position_ids.shape))",
        ("tests/models/test_long_context.py::test_rows_and_documents_have_the_frequencies_of_their_own_length",),
    ),
    Mistake(
        "keys of other frequencies stay in the cache",
        "return bool(self.model.frequencies_change(before, now).any())",
        "return False",
        ("tests/models/test_long_context.py::test_a_cache_changes_nothing_across_the_border",),
    ),
    Mistake(
        "integers are taken for weights",
        "return kind.is_floating_point and kind.itemsize > 1",
        "return True",
        ("tests/test_weights.py::test_tensors_that_are_no_weights_are_refused_wherever_they_enter",),
    ),
    Mistake(
        "under a tree the parent is the token with the same position",
        "parent, count = at(1, visible)",
        "parent, count = at(0, visible)",
        ("tests/models/test_branches.py::test_three_continuations_in_one_row",),
    ),
    Mistake(
        "documents that begin within a window are not looked for",
        "if looks and bool((position_ids >= limit).all()):",
        "if looks and bool((position_ids >= limit).any()):",
        (CONTRACT,),
    ),
    Mistake(
        "a decoding step reads the tokens before it in the wrong order",
        ".flip(0).transpose(0, 1) * torch.cat((before, x), dim=2)",
        ".transpose(0, 1) * torch.cat((before, x), dim=2)",
        (SHORT_CONV,),
    ),
    Mistake(
        "contiguous documents are looked across",
        "torch.minimum(_reach(position_ids, attention_mask, past), since)",
        "_reach(position_ids, attention_mask, past)",
        (f"{CONTRACT}::TestEveryMechanism::test_contiguous_documents_equal_naive",),
    ),
    Mistake(
        "ALiBi prefers what is far",
        "bias = -slopes[:, None, None] * distance[:, None]",
        "bias = slopes[:, None, None] * distance[:, None]",
        ("tests/nn/test_position.py",),
    ),
    Mistake(
        "RMSNorm's gradient keeps what points along x",
        "along = product.sum(-1, keepdim=True).mul_(inverse.square()).div_(-x.shape[-1])",
        "along = product.sum(-1, keepdim=True).mul_(inverse.square()).div_(x.shape[-1])",
        (
            "tests/nn/test_feed_forward.py::test_rms_norm_keeps_its_input",
            f"{CONTRACT}::TestEveryMechanism::test_gradients_equal_naive",
        ),
    ),
    Mistake(
        "every parameter starts from one generator",
        "draw = generator(self.config.initializer_seed, qualified)",
        "draw = generator(self.config.initializer_seed)",
        (f"{HUGGINGFACE}::test_start_depends_on_the_name",),
    ),
    Mistake(
        "the start depends on PyTorch's global seed",
        "return torch.normal(0.0, std, shape, generator=draw)",
        "return torch.normal(0.0, std, shape)",
        (f"{HUGGINGFACE}::test_start_does_not_depend_on_the_global_seed",),
    ),
    Mistake(
        "the last maps of the residual path start unscaled",
        'if self.config.scaled_residual_init and qualified.endswith(("o_proj.weight", "down_proj.weight")):',
        'if self.config.scaled_residual_init and qualified.endswith("down_proj.weights"):',
        (f"{HUGGINGFACE}::test_start_has_the_configured_spread",),
    ),
    Mistake(
        "scalars follow the model into bf16",
        "if tensor.is_floating_point() and moved.dtype in (torch.float16, torch.bfloat16):",
        "if tensor.is_floating_point() and moved.dtype in (torch.float16,):",
        (f"{KV_SHIFT}::test_scalars_stay_in_fp32_when_the_model_is_cast",),
    ),
    Mistake(
        "scalars are loaded in bf16",
        'self._keep_in_fp32_modules_strict = sorted({".".join(parts[-2:]) for parts in names})',
        "self._keep_in_fp32_modules_strict = []",
        (f"{HUGGINGFACE}::test_models_name_the_fp32_modules_that_they_have",),
    ),
    Mistake(
        "the labels of the last rows are another row's",
        "return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "return labels.roll(-1, -1)",
        ("tests/nn/test_loss.py::test_is_the_loss_of_transformers",),
    ),
    Mistake(
        "labels of -100 count in the loss",
        "zeros = torch.where(targets == ignore_index, ignore_index, 0)",
        "zeros = torch.zeros_like(targets)",
        ("tests/nn/test_loss.py::test_is_the_loss_of_transformers",),
    ),
    # The cache
    Mistake(
        "the tail keeps the first raw tokens and not the last",
        "return (x if enough else torch.cat((tail, x), dim=2))[:, :, -length:]",
        "return (x if enough else torch.cat((tail, x), dim=2))[:, :, :length]",
        (f"{CACHE}::test_tail_stands_in_front_of_each_call",),
    ),
    Mistake(
        "crop leaves the tail where it was",
        "cropped[name] = tail[:, :, kept - length : kept].clone()",
        "cropped[name] = tail[:, :, -length:].clone()",
        (f"{CACHE}::test_crop_restores_an_earlier_state",),
    ),
    Mistake(
        "crop beyond what is kept is done as well as it can be",
        "if kept < length:\n",
        "if kept < 0:\n",
        (f"{CACHE}::test_crop_that_cannot_be_restored_changes_nothing",),
    ),
    Mistake(
        "beams keep the tails of others",
        "super().reorder_cache(beam_idx)\n        self.map_tails(lambda t: t.index_select(0, beam_idx.to(t.device)))",
        "super().reorder_cache(beam_idx)",
        (f"{CACHE}::test_reorder_cache",),
    ),
    Mistake(
        "selected rows keep the tails of all",
        "self.map_tails(lambda t: t[indices])",
        "self.map_tails(lambda t: t)",
        (f"{CACHE}::test_batch_select_indices",),
    ),
    Mistake(
        "repeated rows have their tails in another order",
        "self.map_tails(lambda t: t.repeat_interleave(repeats, dim=0))",
        "self.map_tails(lambda t: t.repeat(repeats, 1, 1, 1))",
        (f"{CACHE}::test_batch_repeat_interleave",),
    ),
    Mistake(
        "a copied cache writes into the memory of the other",
        "held is not self.latest\n",
        "self.latest is None\n",
        (f"{CACHE}::test_a_state_once_given_out_never_changes",),
    ),
    Mistake(
        "a new request begins with the raw tokens of the last",
        "super().reset()\n        self.tails, self.record_past = {}, False",
        "super().reset()\n        self.record_past = False",
        (f"{CACHE}::test_reset_forgets_everything",),
    ),
    # Growth and retrofit
    Mistake(
        "new layers of a deeper model add something at first",
        'WRITERS = ("self_attn.o_proj", "mlp.down_proj", "mlp")',
        'WRITERS = ("self_attn.o_proj", "mlp")',
        (f"{ENLARGE}::test_new_layers_add_nothing_and_stand_evenly",),
    ),
    Mistake(
        "what reads copies keeps the whole old weight",
        "factor = factor * shares",
        "factor = factor * 1.0",
        (f"{ENLARGE}::test_what_reads_copies_shares_the_old_weight",),
    ),
    Mistake(
        "a source stays where it was when layers come before it",
        'source = growth.at(options["source"])',
        'source = options["source"]',
        (f"{ENLARGE}::test_mechanisms_go_along_by_the_rules_they_state",),
    ),
    Mistake(
        "gradients of copies are those of the whole",
        'factor = (shares if axis.of not in ("same", "layers") else 1.0) ** power / factor**power',
        "factor = torch.ones_like(shares)",
        (f"{ENLARGE}::test_averages_of_gradients_move_as_the_gradients_do",),
    ),
    Mistake(
        "FLOPs to a loss leave out the checkpoint that a run began with",
        "return point.flops + (run.origin.flops if run.origin else 0.0)",
        "return point.flops",
        (f"{STATISTICS}::test_costs_up_to_a_threshold_include_every_stage_and_are_compared_seed_by_seed",),
    ),
    Mistake(
        "a stage is priced without those before it",
        "total = spent if first else total + spent",
        "total = spent",
        ("tests/test_plan_cli.py::test_a_schedule_is_priced_with_all_before_it",),
    ),
    Mistake(
        "growth draws keys that are not zero",
        'added["key"].zero_()',
        'added["key"].mul_(1e-3)',
        (f"{GROWTH}::test_growing_keeps_the_function_under_every_neutral_score",),
    ),
    Mistake(
        "growth always sets τ anew",
        'if tau == "recomputed" and extra:',
        "if extra:",
        (f"{GROWTH}::test_growing_keeps_the_function_under_every_neutral_score",),
    ),
    Mistake(
        "frozen pairs learn",
        "parameter.requires_grad_(isinstance(module, tuned) and module.learns(name))",
        "parameter.requires_grad_(isinstance(module, tuned))",
        (f"{GROWTH}::TestFreezing::test_only_the_new_pairs_learn_under_any_optimiser_and_decay",),
    ),
    Mistake(
        "shrinking keeps the pairs that matter least",
        "kept = weights[layer][which].to(module.key.device).topk(new[layer][which]).indices.sort().values",
        "kept = weights[layer][which].to(module.key.device).neg().topk(new[layer][which]).indices.sort().values",
        (f"{GROWTH}::TestShrinking::test_the_least_important_go_first",),
    ),
    Mistake(
        "importance forgets the size of the values",
        "sums[layer][which] = sums[layer][which] / seen[module] * size",
        "sums[layer][which] = sums[layer][which] / seen[module]",
        (f"{GROWTH}::TestShrinking::test_importance_is_the_mean_of_score_times_the_size_of_the_value",),
    ),
    Mistake(
        "merging takes one copy for the mean",
        "rows.append(torch.cat((torch.stack([t[:n] for t in tensors]).mean(0), *(t[n:] for t in tensors))))",
        "rows.append(torch.cat((tensors[0][:n], *(t[n:] for t in tensors))))",
        (f"{GROWTH}::TestMerging::test_what_all_have_becomes_the_mean",),
    ),
    Mistake(
        "τ jumps when it should go step by step",
        "self.scale.put(way[0] + (way[1] - way[0]) * done)",
        "self.scale.put(way[1])",
        ("tests/training/test_start.py::test_tau_goes_to_the_default_of_its_pairs_step_by_step",),
    ),
    Mistake(
        "query, key and value of interleaved families are cut one after another",
        "return tuple(x.flatten(0, 1) for x in parts)",
        "return tensor.chunk(len(self.ours))",
        (f"{FAMILIES}::test_the_logits_are_the_same",),
    ),
    Mistake(
        "GPT-2's matrices are not turned",
        "tensor = tensor.mT if self.transposed and tensor.ndim == 2 else tensor\n        if self.interleaved:",
        "if self.interleaved:",
        (f"{FAMILIES}::test_the_logits_are_the_same",),
    ),
    Mistake(
        "heads that are still built take the rows of others",
        "parts.add((dim, len(had), tuple(had.index(head) for head in has)))",
        "parts.add((dim, len(had), tuple(had.index(head) for head in has)[::-1]))",
        ("tests/retrofit/test_add.py::test_heads_that_are_still_built_keep_their_rows",),
    ),
    # Training, checkpoints, files
    Mistake(
        "dropout is the same in every step",
        'torch.manual_seed(number("dropout", self.recipe.seed, progress.step, self.fabric.global_rank))',
        'torch.manual_seed(number("dropout", self.recipe.seed, self.fabric.global_rank))',
        ("tests/training/test_loop.py::test_dropout_is_drawn_anew_in_every_step",),
    ),
    Mistake(
        "dropout goes on from PyTorch's generator, which no checkpoint holds",
        'torch.manual_seed(number("dropout", self.recipe.seed, progress.step, self.fabric.global_rank))',
        "pass",
        (f"{LOOP}::test_a_cut_run_resumes_to_the_same_end",),
    ),
    Mistake(
        "a resumed run begins its data anew",
        "batches(recipe, self.data, self.progress.rows, self.share,",
        "batches(recipe, self.data, 0, self.share,",
        (f"{LOOP}::test_a_cut_run_resumes_to_the_same_end",),
    ),
    Mistake(
        "the optimiser's state is not restored",
        "_read_model(path, model, targets, distributed)",
        "_read_model(path, model, dict(list(targets.items())[-len(running) :]), distributed)",
        (f"{LOOP}::test_a_cut_run_resumes_to_the_same_end",),
    ),
    Mistake(
        "running sums are not restored",
        'targets |= {f"running.{name}": tensor.view(1) for name, tensor in running.items()}',
        "targets |= {}",
        (f"{LOOP}::test_a_cut_run_resumes_to_the_same_end",),
    ),
    Mistake(
        "checksums are not compared",
        "changed = [name for name, digest in zip(sums, actual, strict=True) if digest != sums[name]]",
        "changed = [name for name, digest in zip(sums, actual, strict=True) if not digest]",
        (f"{CHECKPOINT}::test_a_damaged_file_is_seen",),
    ),
    Mistake(
        "stray weights beside a checkpoint are read",
        'if file.name not in sums and not file.name.startswith(".") and OPENED.fullmatch(file.name)',
        'if file.name not in sums and not file.name.startswith(".") and file.suffix == ".gguf"',
        ("tests/training/test_run_folder.py::TestStrays",),
    ),
    Mistake(
        "a checkpoint that is written during later steps is no copy",
        "tensors[name] = self.host[name].copy_(tensor.detach(), non_blocking=True)",
        "tensors[name] = tensor.detach()",
        (f"{SAVING}::test_a_checkpoint_written_during_later_steps_is_of_its_own",),
    ),
    Mistake(
        "an error of the thread that writes checkpoints is lost",
        "own = {} if self.work is None else self.work.result()",
        "own = {} if self.work is None or self.work.exception() else self.work.result()",
        (f"{SAVING}::test_an_error_of_the_last_save_is_not_lost",),
    ),
    Mistake(
        "a run ends before its checkpoint is written",
        "self.thread.shutdown()\n        if self.saving:",
        "self.thread.shutdown(wait=False)\n        if False:",
        (f"{SAVING}::test_a_run_that_fails_completes_its_checkpoint_first",),
    ),
    Mistake(
        "recomputation of half keeps every matmul",
        "keep = matmuls[context.is_recompute] % 2 == 0",
        "keep = True",
        ("tests/nn/test_recompute.py::test_compiled_blocks_keep_the_same_in_one_graph",),
    ),
    Mistake(
        "the best checkpoint is pruned",
        "if old != best:\n            remove(old)",
        "remove(old)",
        (f"{CHECKPOINT}::test_the_newest_and_the_best_are_kept",),
    ),
    Mistake(
        "a step that is not finite is taken",
        "finite = loss.isfinite() & norm.isfinite()",
        "finite = loss.isfinite()",
        ("tests/training/test_guards.py::test_a_gradient_that_is_not_finite_is_enough",),
    ),
    Mistake(
        "the average of the weights also moves in a step that is skipped",
        "weight = (1 - min(self.decay, (1 + step) / (10 + step))) * taken",
        "weight = torch.tensor(1 - min(self.decay, (1 + step) / (10 + step)))",
        (f"{TRAINING_IMAGES}::test_a_step_that_is_skipped_leaves_the_average",),
    ),
    Mistake(
        "of all heads' parameters a process takes the first",
        "at for at, head in enumerate(of) if head in own[part]",
        "at for at, head in enumerate(range(len(own[part])))",
        (f"{SPLIT}::test_parts_together_are_the_whole",),
    ),
    Mistake(
        "weights that are no numbers are saved",
        "broken = [~parameter.isfinite().all() for parameter in map(local, self.parameters)]",
        "broken = [parameter.isnan().all() for parameter in map(local, self.parameters)]",
        ("tests/training/test_guards.py::test_broken_weights_are_never_saved",),
    ),
    Mistake(
        "a step that is not finite is counted one step too late",
        "if progress.skipped_last + 1 >= settings.skip_limit:",
        "if progress.skipped_last > settings.skip_limit:",
        ("tests/training/test_guards.py",),
    ),
    Mistake(
        "a step waits for its loss",
        "finite = loss.isfinite() & norm.isfinite()",
        "finite = torch.tensor(math.isfinite(float(loss))) & norm.isfinite()",
        ("tests/training/test_host_waits.py::test_a_step_of_a_run_does_not_wait",),
    ),
    Mistake(
        "a skipped step moves Muon's momentum",
        "torch._foreach_mul_(differences, (1 - momentum) * taken)",
        "torch._foreach_mul_(differences, 1 - momentum)",
        ("tests/training/test_optim.py::test_muon_skips_a_step_on_the_device",),
    ),
    Mistake(
        "training returns its logits",
        "if labels is None or not skip_logits:",
        "if True:",
        ("tests/models/test_losses.py::test_no_logits_leave_a_compiled_graph",),
    ),
    Mistake(
        "the last chunk of the loss is divided by its own tokens",
        "total = torch.stack(chunks).sum(0) / counted(targets, num_items_in_batch)",
        "total = torch.stack(chunks).sum(0) / targets.numel()",
        ("tests/models/test_losses.py::test_loss_and_z_loss_written_out",),
    ),
    Mistake(
        "gradients are not clipped",
        "if settings.clip is not None:",
        "if settings.clip is not None and settings.clip > 10:",
        (f"{LOOP}::test_the_step_is_the_papers_optimiser",),
    ),
    Mistake(
        "scalars decay",
        '"matrices": ("matrices", "tensors"),',
        '"matrices": ("matrices", "tensors", "scalars"),',
        ("tests/training/test_optim.py",),
    ),
    Mistake(
        "norms and biases stand among the matrices",
        'kind = ("vectors", "vectors", "matrices")[parameter.ndim] if parameter.ndim < 3 else "tensors"',
        'kind = "matrices" if parameter.ndim < 3 else "tensors"',
        ("tests/training/test_optim.py",),
    ),
    Mistake(
        "the first step has a learning rate of zero",
        "return peak * (step + 1) / training.warmup_steps",
        "return peak * step / training.warmup_steps",
        ("tests/training/test_optim.py::test_cosine_schedule",),
    ),
    Mistake(
        "frozen parameters are trained",
        "parameter.requires_grad_(parameter in chosen)",
        "parameter.requires_grad_(True)",
        (f"{LOOP}::test_only_unfrozen_mechanisms_are_trained",),
    ),
    Mistake(
        "the mechanisms' scalars learn at the common rate",
        '(settings.scalar_rate if group["name"] == "scalars" else 1.0)',
        "1.0",
        (f"{LOOP}::test_the_mechanisms_scalars_may_learn_faster",),
    ),
    Mistake(
        "a resumed run takes other data for its own",
        "if progress.data.get(fact) != data.get(fact):",
        "if not data:",
        (f"{CHECKPOINT}::test_a_run_does_not_go_on_with_other_data",),
    ),
    Mistake(
        "a folder that is no run's is taken for one",
        "if not os.path.lexists(run) or (run.is_dir() and (is_run(run) or not any(run.iterdir()))):",
        "if not os.path.lexists(run) or run.is_dir():",
        ("tests/training/test_run_folder.py::TestForeignFolders",),
    ),
    Mistake(
        "a file's place is taken before its content is on the disk",
        "        flush(beside)\n        beside.replace(file)",
        "        beside.replace(file)",
        ("tests/test_files.py",),
    ),
    Mistake(
        "a staged folder is renamed before its files are on the disk",
        '        for path in folder.rglob("*"):\n            flush(path)\n        flush(folder)\n',
        "",
        ("tests/test_files.py",),
    ),
    # Data
    Mistake(
        "every epoch has the same order",
        'generator=generator("order", seed, epoch, *key))[position:]',
        'generator=generator("order", seed, *key))[position:]',
        (ROWS, TEXT),
    ),
    Mistake(
        "rows are cut one token late",
        "stream, begin = self.streams[number], row * context",
        "stream, begin = self.streams[number], row * (context + 1)",
        (ROWS,),
    ),
    Mistake(
        "position ids go on over the border of a document",
        'batch["position_ids"] = slot - torch.where(begins, slot, 0).cummax(1).values',
        'batch["position_ids"] = slot.expand(len(rows), -1)',
        (ROWS, TEXT),
    ),
    Mistake(
        "each process gets the same rows",
        "yield self.batch(chosen[rank * share : (rank + 1) * share])",
        "yield self.batch(chosen[:share])",
        (ROWS,),
    ),
    Mistake(
        "a mixture forgets what each stream had used when it goes on",
        "used += np.bincount(first[: start % BLOCK], minlength=len(used))",
        "used += 0",
        (ROWS,),
    ),
    Mistake(
        "preparation goes on behind the place where it was stopped",
        "self.place = parts[-1].after\n                        if uncommitted",
        "self.place = self.stream.place\n                        if uncommitted",
        (f"{PREPARE}",),
    ),
    Mistake(
        "token files are not synced",
        "        if self.unsynced:\n            os.fsync(self.stream.fileno())\n            self.unsynced = False\n",
        "",
        (f"{PREPARE}",),
    ),
    Mistake(
        "damage of a file in the making is not seen",
        "if left or self.hash.hexdigest() != written.sha256:",
        "if left:",
        (f"{PREPARE}",),
    ),
    Mistake(
        "a document's border is that of the one before",
        "self.starts.append(self.open_tokens)",
        "self.starts.append(max(0, self.open_tokens - 1))",
        (f"{PREPARE}",),
    ),
    Mistake(
        "a text that spells the end of text ends a document",
        "self.backend.encode_special_tokens = True",
        "self.backend.encode_special_tokens = False",
        (f"{TEXT}", f"{PREPARE}"),
    ),
    Mistake(
        "bits per byte are nats per byte",
        '"bits_per_byte": float(nats.sum()) / math.log(2) / sum(one.bytes for one in self.held_out),',
        '"bits_per_byte": float(nats.sum()) / sum(one.bytes for one in self.held_out),',
        (TEXT,),
    ),
    # Prices
    Mistake(
        "a price of another baseline is taken for one of this",
        "return price.against == against and price.settings == timed_recipe(arm).digest()",
        "return price.settings == timed_recipe(arm).digest()",
        (PRICES_OF_ARMS,),
    ),
    Mistake(
        "at equal time an arm that takes longer gets more steps",
        'steps = round(budget / (longer * _step_cost(arm, own, equal == "flops")))',
        'steps = round(budget * longer / _step_cost(arm, own, equal == "flops"))',
        (PRICES_OF_ARMS,),
    ),
    Mistake(
        "an arm that another one beats at a lower price is on the front",
        "ratios[one] <= ratios[arm]\n                and gains[one] >= gains[arm]",
        "ratios[one] <= ratios[arm]\n                and gains[one] <= gains[arm]",
        (PRICES_OF_ARMS,),
    ),
    Mistake(
        "a page loses the claims of tables that have not run here",
        "known = {row.says: row for row in before if row.verdict != OPEN}",
        "known = {row.says: row for row in before if row.verdict == OPEN}",
        ("tests/reproduce/test_document.py",),
    ),
    # Statistics and claims
    Mistake(
        "Holm's procedure tests all at the strictest level",
        "steps = level / np.arange(len(p), 0, -1)",
        "steps = level / np.full(len(p), len(p))",
        (STATISTICS,),
    ),
    Mistake(
        "Holm's procedure goes on behind the first that fails",
        "passed = int(np.logical_and.accumulate(p[order] <= steps).sum())",
        "passed = int((p[order] <= steps).sum())",
        (STATISTICS,),
    ),
    Mistake(
        "a paired t test has a degree of freedom too many",
        "return float(2 * special.stdtr(len(differences) - 1, -abs(np.mean(differences)) / _error(differences)))",
        "return float(2 * special.stdtr(len(differences), -abs(np.mean(differences)) / _error(differences)))",
        (STATISTICS,),
    ),
    Mistake(
        "seeds are paired by their order",
        "return [arm[seed].result - base[seed].result for seed in sorted(arm) if seed in base]",
        "return [a.result - b.result for a, b in zip(arm.values(), base.values())]",
        (STATISTICS, "tests/test_compare.py"),
    ),
    Mistake(
        "an arm with a diverged run is judged by those that are left",
        'if self.diverged:\n            return "diverged"',
        'if self.diverged and self.paired is None:\n            return "diverged"',
        (STATISTICS, "tests/test_compare.py"),
    ),
    Mistake(
        "the jackknife's error is that of a mean",
        "error = math.sqrt((count - 1) / count * float(np.sum((parts - parts.mean()) ** 2)))",
        "error = math.sqrt(float(np.sum((parts - parts.mean()) ** 2)) / (count * (count - 1)))",
        ("tests/compare/test_scaling_laws.py",),
    ),
    Mistake(
        "a claim holds where the interval only touches its region",
        'if low >= region[0] and high <= region[1]:\n        return "holds"',
        'if low >= region[0] or high <= region[1]:\n        return "holds"',
        (CLAIMS,),
    ),
    Mistake(
        "a difference of differences is a sum",
        "values = [gains[0][seed] - gains[1][seed] for seed in sorted(seeds)]",
        "values = [gains[0][seed] + gains[1][seed] for seed in sorted(seeds)]",
        (f"{CLAIMS}::test_a_difference_of_differences_is_students_t_on_each_seeds_four_runs",),
    ),
    Mistake(
        "less is better is taken for more is better",
        "differences = _differences(runs, claim.measure, claim.arm, claim.against, -1 if lower else 1)",
        "differences = _differences(runs, claim.measure, claim.arm, claim.against)",
        (f"{CLAIMS}::test_better_is_students_t_on_the_differences_of_paired_seeds",),
    ),
    Mistake(
        "runs with other settings are taken for the table's",
        "if record.status in ENDED and record.config_hash == recipe.digest():",
        "if record.status in ENDED:",
        ("tests/reproduce/test_reproduction.py",),
    ),
    # Cost, price, evaluation, the command line
    Mistake(
        "causal attention is counted as if every token saw the whole row",
        "return (window * (window + 1) / 2 + (context - window) * window) / context",
        "return window",
        (COST,),
    ),
    Mistake(
        "the backward pass is counted once",
        "return 3 * forward_flops_per_token(config, context, causal)",
        "return 2 * forward_flops_per_token(config, context, causal)",
        (COST, PRICE),
    ),
    Mistake(
        "raw tails are left out of the cache's bytes",
        'numbers += sum(width[part] * length for part, length, _ in plan.tails if part != "id")',
        "numbers += 0",
        (f"{CONTRACT}::TestEveryMechanism::test_cache_bytes_follow_the_plan", COST),
    ),
    Mistake(
        "AdamW keeps one average",
        '"optimiser": 2 * stream * count,',
        '"optimiser": stream * count,',
        (COST, PRICE),
    ),
    Mistake(
        "reading for generation does not grow with the batch",
        "read = element * cost.weights_read(config) + batch * cost.cache_bytes_read(config, length, element)",
        "read = element * cost.weights_read(config) + cost.cache_bytes_read(config, length, element)",
        (PRICE,),
    ),
    Mistake(
        "overlapping windows score a token twice",
        "yield max(0, end - context), end, end - done",
        "yield max(0, end - context), end, min(end, context)",
        (EVALUATE,),
    ),
    Mistake(
        "a document is scored by the token that it predicts after the next",
        "targets = torch.from_numpy(rows[index][end - scored + 1 : end + 1]).to(logits.device)",
        "targets = torch.from_numpy(rows[index][end - scored : end]).to(logits.device)",
        (EVALUATE,),
    ),
    Mistake(
        "McNemar's test counts the items on which both agree",
        "p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0",
        "p = float(stats.binomtest(better, len(ours.values)).pvalue) if better + worse else 1.0",
        (EVALUATE,),
    ),
    Mistake(
        "what the user can put right ends with exit code 1",
        'print(f"headwater: {literal(str(error))}", file=sys.stderr)\n        sys.exit(2)',
        'print(f"headwater: {literal(str(error))}", file=sys.stderr)\n        sys.exit(1)',
        ("tests/test_cli.py::test_bad_input_is_one_sentence",),
    ),
    Mistake(
        "a run that was asked to stop ends as one that is done",
        'except Interrupted as error:\n        print(f"headwater: {error}", file=sys.stderr)\n        sys.exit(130)',
        'except Interrupted as error:\n        print(f"headwater: {error}", file=sys.stderr)\n        sys.exit(0)',
        ("tests/test_cli.py::test_ctrl_c_ends_cleanly_and_says_how_to_resume",),
    ),
    Mistake(
        "kernels run under torch.func, which cannot transform them",
        "return not torch._C._are_functorch_transforms_active()",
        "return True",
        ("tests/test_kernels.py::test_transforms_of_functions_get_the_plain_form",),
    ),
    Mistake(
        "the switch leaves kernels on",
        " and not off()\n",
        "\n",
        ("tests/test_kernels.py::test_a_model_computes_the_same_without_kernels",),
    ),
    Mistake(
        "a kernel is taken that is hardly faster than PyTorch's",
        "self.seconds[fastest] < CLEAR * self.seconds[PLAIN] else PLAIN",
        "self.seconds[fastest] < self.seconds[PLAIN] else PLAIN",
        ("tests/test_choose.py::test_only_a_clear_win_over_plain_is_taken",),
    ),
    Mistake(
        "chosen kernels run under autograd",
        'if memory is None or memory is False or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):',
        'if memory is None or memory is False or torch.is_autocast_enabled("cpu"):',
        (
            "tests/nn/test_linear.py::test_kernels_are_for_generation_only",
            "tests/test_choose.py::test_nobody_chooses_but_generation",
        ),
    ),
    Mistake(
        "a quantiser passes Pattention by without a word",
        "if name in module.matrices\n",
        "if name in ()\n",
        ("tests/models/test_quantization.py",),
    ),
    Mistake(
        "a run does not lock its folder",
        '        lock.enter_context(occupied(run, busy="run is writing to"))\n',
        "        run.mkdir(parents=True, exist_ok=True)\n",
        (f"{LOOP}::test_two_runs_cannot_share_a_folder",),
    ),
    Mistake(
        "labels that count nothing weigh in the z-loss",
        "return (logits.to(wide).logsumexp(-1).square() * (targets != -100)).sum()",
        "return logits.to(wide).logsumexp(-1).square().sum()",
        (f"{LOOP}::test_only_labels_that_count_weigh_in_loss_and_z_loss",),
    ),
    Mistake(
        "a compiled model is evaluated on a shorter last batch",
        "batch = filled(batch, most)",
        "batch = batch",
        (f"{LOOP}::test_a_compiled_model_sees_evaluation_in_one_shape",),
    ),
    Mistake(
        "the budget of activations is forgotten",
        "with functorch.patch(activation_memory_budget=budget):",
        "with functorch.patch(activation_memory_budget=1.0):",
        ("tests/nn/test_graphs.py::test_a_budget_holds_while_blocks_are_compiled",),
    ),
    Mistake(
        "a recipe is priced without its chunks of the loss",
        '"loss_chunk": training.loss_chunk,\n            "masked": self',
        '"loss_chunk": None,\n            "masked": self',
        ("tests/test_plan_cli.py::test_a_recipe_is_priced_as_it_trains",),
    ),
    Mistake(
        "a step that is logged waits for itself",
        "self.due = self.journal.mark(",
        "self.settle()\n                    self.due = self.journal.mark(",
        ("tests/training/test_host_waits.py::test_a_step_of_a_run_does_not_wait",),
    ),
    Mistake(
        "the imports of `bench gpu` are not part of its budget",
        "begun = time.monotonic() - age",
        "begun = time.monotonic()",
        ("tests/bench/test_gpu.py::test_the_budget_is_the_whole_commands",),
    ),
    Mistake(
        "an accumulated step averages its parts, however many tokens each has",
        "part, aimed = self.losses(self.fabric.to_device(batch), counted)",
        'part, aimed = self.losses(self.fabric.to_device(batch), (batch["shift_labels"] != -100).sum() * len(micro))',
        (f"{LOOP}::test_only_labels_that_count_weigh_in_loss_and_z_loss",),
    ),
    Mistake(
        "a spike moves the averages as far as it likes",
        "taken = min(loss, float(mean) + DEVIATIONS * spread) if float(seen) >= MEMORY else loss",
        "taken = loss",
        ("tests/training/test_guards.py::test_a_loss_that_stands_out_is_a_spike_and_noise_is_none",),
    ),
    Mistake(
        "a recipe's digest does not depend on the order of its mechanisms",
        'content["model"]["mechanisms"] = list((content["model"].get("mechanisms") or {}).items())',
        "pass",
        ("tests/test_recipe.py::test_digest_follows_what_decides_the_result_and_nothing_else",),
    ),
    Mistake(
        "a recipe's digest depends on how it reports",
        'exclude={"name", "title", "reporting", "compare"}',
        'exclude={"name", "title", "compare"}',
        ("tests/test_recipe.py::test_digest_follows_what_decides_the_result_and_nothing_else",),
    ),
    Mistake(
        "the best look is the last where more is better",
        "choose = min if self.lower_is_better else max\n        return choose(self.held_out",
        "choose = min\n        return choose(self.held_out",
        (f"{STATISTICS}::test_the_best_look_has_the_least_loss_or_the_greatest_accuracy",),
    ),
    Mistake(
        "a search tests its winners on the seeds that chose them",
        '"seeds": [FRESH + seed for seed in range(seeds)],',
        '"seeds": list(range(seeds)),',
        ("tests/compare/test_search.py",),
    ),
    Mistake(
        "a search takes the worst arms",
        "return sorted(means, key=lambda arm: means[arm], reverse=True)[:count]",
        "return sorted(means, key=lambda arm: means[arm])[:count]",
        ("tests/compare/test_search.py",),
    ),
    Mistake(
        "held-out rows of a task are among its training rows",
        "batch = replaced(batch, seen, again)",
        "batch = batch",
        ("tests/data/test_synthetic.py",),
    ),
    Mistake(
        "induction labels tokens that nobody can know",
        "labels = torch.where(known, row[:, 1:], -100)",
        "labels = row[:, 1:]",
        ("tests/data/test_synthetic.py",),
    ),
    Mistake(
        "the norms of a wider model are not rescaled",
        "scale = growth.part**0.5 if exact and scales else 1.0",
        "scale = 1.0",
        (f"{ENLARGE}::test_a_lossless_method_keeps_the_function_with_a_mechanism_or_is_refused",),
    ),
    Mistake(
        "equal FLOPs are equal steps",
        'budget = base.training.steps * _step_cost(base, data, equal == "flops")',
        'budget = base.training.steps * _step_cost(arm, own, equal == "flops")',
        ("tests/compare/test_budget.py",),
    ),
    # Packed rows
    Mistake(
        "documents of packed rows begin one token late",
        "borders[: len(begins)] = begins",
        "borders[: len(begins)] = begins + (begins > 0)",
        (f"{VARLEN}::test_borders_of_padded_and_continued_rows",),
    ),
    Mistake(
        "documents that share a call see each other",
        "seen = (document[:, None] == document) & (back >= 0)",
        "seen = (back >= 0)",
        (f"{VARLEN}::test_equals_the_equation",),
    ),
    Mistake(
        "a padded tail belongs to the document before it",
        "starts = (position_ids == 0) | (slot == 0)",
        "starts = (position_ids == 0) & (position_ids.roll(-1, 1) != 0) | (slot == 0)",
        (f"{VARLEN}::test_borders_of_padded_and_continued_rows",),
    ),
    Mistake(
        "a window in packed rows on a GPU is one token too long",
        "(-1 if window is None else window - 1, 0)",
        "(-1 if window is None else window, 0)",
        (f"{VARLEN}::test_what_a_gpu_is_asked_for",),
    ),
    # Prompts
    Mistake(
        "layers whose raw tokens are looked back at run for a prompt's last token alone",
        "return not (self.k_heads or self.v_heads or self.tails)",
        "return not (self.k_heads or self.v_heads)",
        (f"{PREFILL}::test_which_layers_are_for_the_output_only",),
    ),
    Mistake(
        "a prompt's last token reads what lower layers made of the first",
        "tensor.narrow(dim, tensor.shape[dim] - self.tokens, self.tokens)",
        "tensor.narrow(dim, 0, self.tokens)",
        (f"{PREFILL}::test_the_last_logits_and_what_follows_are_the_same",),
    ),
    Mistake(
        "a layer's cache does not count the tokens that the layer left out",
        "x.new_empty(x.shape[0], 0, left_out + x.shape[1], self.head_dim)",
        "x.new_empty(x.shape[0], 0, x.shape[1], self.head_dim)",
        (f"{PREFILL}::test_the_last_logits_and_what_follows_are_the_same",),
    ),
    Mistake(
        "a prompt's last tokens see the empty slots of a static cache",
        "end = past + length if empty else slots",
        "end = slots",
        (f"{PREFILL}::test_the_last_logits_and_what_follows_are_the_same",),
    ),
    Mistake(
        "a layer shares with another kind's",
        "own[kinds[layer]] for layer in layers",
        "first - 1 for layer in layers",
        (f"{KV_SOURCE}::test_the_map_last_is_gemmas",),
    ),
    # Decoding with a static cache
    Mistake(
        "query heads that share a key are grouped in turns",
        "return x.reshape(x.shape[0], heads, -1, x.shape[-1])",
        "return x.reshape(x.shape[0], -1, heads, x.shape[-1]).transpose(1, 2)",
        (DECODING, f"{CACHE}"),
    ),
    Mistake(
        "with a static cache, the last columns of a mask are those of the new tokens",
        "return x.index_select(1, torch.arange(length, device=x.device) + past.to(x.device))",
        "return x[:, -length:]",
        (f"{DECODING}::test_a_mask_may_be_as_wide_as_the_static_cache",),
    ),
    Mistake(
        "a row that has ended goes on",
        "chosen = scores.argmax(-1).masked_fill(self.ended, self.choice.pad)",
        "chosen = scores.argmax(-1)",
        (f"{DECODING}::test_draws_and_ends_are_those_of_generate",),
    ),
    Mistake(
        "a loop with a static cache forgets which slots are padding",
        "self.real[:, : real.shape[1]] = real",
        "self.real[:, : real.shape[1]] = 1",
        (f"{DECODING}::test_tokens_equal_those_without_a_cache",),
    ),
    Mistake(
        "attention of one token leaves the keys' groups out of ALiBi's mask",
        "if mask is not None and mask.shape[1] > 1:",
        "if False:",
        (DECODING,),
    ),
    Mistake(
        "the gradient of a weighted sum's weights is of one tensor",
        "gw = torch.stack([torch.dot(flat, x) for x in others])",
        "gw = torch.stack([torch.dot(flat, others[0]) for x in others])",
        ("tests/mechanisms/test_weighted_sum.py",),
    ),
    Mistake(
        "the kernels' switch is read while the compiler traces",
        "kernels.off()  # reads the environment now",
        "pass  # reads the environment now",
        ("tests/nn/test_graphs.py::test_the_switch_of_the_kernels_is_read_before_the_compiler_looks_at_it",),
    ),
    Mistake(
        "models compiled one after another share the compiler's limit",
        "    torch._dynamo.reset()\n    compile_blocks(",
        "    compile_blocks(",
        ("tests/nn/test_graphs.py::test_models_of_one_process_do_not_add_up",),
    ),
    Mistake(
        "blocks are compiled for symbolic shapes",
        "block.compile(fullgraph=True, dynamic=False",
        "block.compile(fullgraph=True",
        ("tests/nn/test_graphs.py::test_evaluating_first_makes_no_shape_symbolic",),
    ),
    Mistake(
        "DDP splits a block's graph",
        "    settings.optimize_ddp = False\n",
        "",
        ("tests/nn/test_graphs.py::test_ddp_does_not_split_a_block",),
    ),
    Mistake(
        "layers that differ reach the compiler's limit",
        "max(settings.recompile_limit, GRAPHS * count)",
        "settings.recompile_limit",
        ("tests/nn/test_graphs.py::test_layers_may_all_differ",),
    ),
    Mistake(
        "the measurements of the start are compiled",
        "stack.enter_context(torch.compiler.set_stance",
        "(lambda _: None)(torch.compiler.set_stance",
        ("tests/training/test_loop.py::test_a_compiled_run_is_the_same",),
    ),
    # Images
    Mistake(
        "an image's changes are drawn from the global generator",
        'and kwargs.get("generator") is None',
        'and kwargs.get("generator") is self',
        (f"{IMAGES}::test_transforms_draw_from_their_own_generator_what_the_global_one_would_give",),
    ),
    Mistake(
        "every epoch changes an image alike",
        'draw = generator("image", seed, epoch, index, repetition)',
        'draw = generator("image", seed, index, repetition)',
        (f"{IMAGES}::test_an_epoch_has_every_image_and_the_next_has_others_of_them",),
    ),
    Mistake(
        "images are mixed by the number of the batch",
        'draws = [partial(generator, "mix", seed, first + row) for row in own]',
        'draws = [partial(generator, "mix", seed, first) for row in own]',
        (f"{IMAGES}::test_rows_depend_on_seed_and_number_alone",),
    ),
    Mistake(
        "the hash of the order counts from 0 in each part",
        "accumulate(map(len, parts), initial=row + share.rank * size // share.world)",
        "[row + share.rank * size // share.world] * len(parts)",
        (f"{IMAGES}::test_batches_and_their_fingerprints_are_those_made_image_by_image",),
    ),
    Mistake(
        "a batch with an image that cannot be read is skipped",
        "                raise batch\n",
        "                continue\n",
        (f"{IMAGES}::test_broken_files_are_named_and_skipped_only_if_asked",),
    ),
    Mistake(
        "a class has the number that it has in its own split",
        "        labels.append(numbers[key])\n",
        "        labels.append(label if own is not None else numbers[key])\n",
        (f"{IMAGES}::test_folders_and_splits",),
    ),
    Mistake(
        "a held-out family is trained on",
        "if (name in held_out) is out for",
        "if (name in held_out) or not out for",
        (f"{IMAGES}::test_glyphs_hold_whole_families_out",),
    ),
    Mistake(
        "the trained weights are evaluated, not their average",
        "with self.reading(), nullcontext() if self.average is None else self.average.in_place():",
        "with self.reading():",
        (f"{TRAINING_IMAGES}::test_the_average_is_evaluated_and_saved",),
    ),
    Mistake(
        "steps are lost where a held-out image cannot be read",
        "with self.reading(), nullcontext() if self.average is None else self.average.in_place():",
        "with nullcontext() if self.average is None else self.average.in_place():",
        (f"{TRAINING_IMAGES}::test_a_broken_held_out_image_loses_no_step",),
    ),
    Mistake(
        "training squeezes what evaluation crops",
        "partial(fitted, size=size, shorter=shorter)",
        "partial(fitted, size=size, shorter=None)",
        (f"{IMAGES}::test_without_a_random_crop_training_sees_what_evaluation_sees",),
    ),
    Mistake(
        "a label of ten million makes as many classes",
        "    if count > 2 * len(used):\n",
        "    if False:\n",
        (f"{IMAGES}::test_what_does_not_fit_is_one_sentence",),
    ),
    Mistake(
        "a resumed run trains the average",
        "        average.swap()  # the file of the model has the average\n",
        "        pass\n",
        (f"{TRAINING_IMAGES}::test_a_cut_run_resumes_to_the_same_end",),
    ),
    Mistake(
        "a skipped step moves the average",
        "(1 + step) / (10 + step))) * taken",
        "(1 + step) / (10 + step))) * torch.ones_like(taken)",
        (f"{TRAINING_IMAGES}::test_a_step_that_is_skipped_leaves_the_average",),
    ),
    # Image models
    Mistake(
        "patches of an image see only earlier ones",
        "    default_theta = 100.0\n    is_causal = False",
        "    default_theta = 100.0\n    is_causal = True",
        (f"{EQUATIONS}::test_positions_and_pooling",),
    ),
    Mistake(
        "the first patch looks at the class token",
        "return nn.functional.pad(counted, (first, 0))[None]",
        "return nn.functional.pad(counted + 1, (first, 0))[None]",
        (f"{EQUATIONS}::test_a_shift_never_looks_at_the_class_token_nor_it_at_patches",),
    ),
    Mistake(
        "a shift never stops at rows",
        "counted = coordinates(grid, device)[1] if by_row else",
        "counted = coordinates(grid, device)[1] if False else",
        (f"{EQUATIONS}::test_a_shift_never_looks_at_the_class_token_nor_it_at_patches",),
    ),
    Mistake(
        "rotary positions of images turn everything by the row",
        "torch.cat((row, column, row, column), -1)",
        "torch.cat((row, row, row, row), -1)",
        (f"{EQUATIONS}::test_images_of_another_size_than_trained_on",),
    ),
    Mistake(
        "positions of another size are interpolated between corners",
        'size=new, mode="bicubic", align_corners=False',
        'size=new, mode="bicubic", align_corners=True',
        (f"{EQUATIONS}::test_images_of_another_size_than_trained_on",),
    ),
    Mistake(
        "the mean over patches counts the registers",
        "x[:, self.config.first_patch :].mean(1)",
        "x.mean(1)",
        (f"{EQUATIONS}::test_registers",),
    ),
    Mistake(
        "every layer drops as many branches as the last",
        "config.drop_path * plan.index / max(1, config.num_hidden_layers - 1)",
        "config.drop_path",
        (f"{IMAGE_CONFIG}::test_drop_path_drops_whole_branches_of_some_images",),
    ),
    Mistake(
        "the classifier of an image is counted for every patch",
        "before, logits = 0, context * config.vocab_size if config.is_causal else config.num_labels",
        "before, logits = 0, context * (config.vocab_size if config.is_causal else config.num_labels)",
        (f"{IMAGE_COSTS}::test_activations_are_those_autograd_keeps",),
    ),
    Mistake(
        "the classes of glyphs are not priced",
        'return self.model.get("num_labels") or self.data.known_classes or of_preset',
        'return self.model.get("num_labels") or of_preset',
        (
            "tests/reproduce/test_tables.py::test_a_price_of_images_is_that_of_their_patches",
            "tests/vision/test_image_recipes.py::test_a_recipe_of_images_has_the_classes_of_its_data",
        ),
    ),
    Mistake(
        "a stage that does not exist has no effect",
        "            if stage not in STAGES:",
        "            if False:",
        ("tests/test_outside.py::test_a_plan_that_leaves_something_out_is_refused",),
    ),
    Mistake(
        "a mechanism that is never called has no effect",
        "        if defined and not acts:",
        "        if False:",
        ("tests/test_outside.py::test_a_plan_that_leaves_something_out_is_refused",),
    ),
    Mistake(
        "where layers differ, nothing is mixed",
        "plain = copy.deepcopy(whole)",
        "plain = copy.deepcopy(config)",
        ("tests/retrofit/test_convert.py::test_it_begins_as_the_model_and_ends_as_the_goal",),
    ),
    Mistake(
        "a server leaves out what a mechanism does after the cache",
        'INSIDE_KERNEL: tuple[Stage, ...] = ("gathered", ',
        "INSIDE_KERNEL: tuple[Stage, ...] = (",
        ("tests/serving/test_pages.py::test_what_a_server_cannot_run_is_refused",),
    ),
    Mistake(
        "raw tokens of a shared block are read before the step that writes them",
        "found = torch.where(self.own, old, region[self.there])",
        "found = old",
        ("tests/serving/test_pages.py::test_raw_tokens_of_a_shared_block_are_read_in_the_step_that_writes_them",),
    ),
    Mistake(
        "a block keeps no raw token for those that are taken back",
        "return length + self.spare",
        "return length",
        ("tests/serving/test_pages.py::test_tokens_through_a_server_in_miniature",),
    ),
    Mistake(
        "a server's process takes the first heads' scalars",
        "tensor = tensor.index_select(own[0], torch.tensor(own[1], dtype=torch.long))",
        "tensor = tensor.narrow(own[0], 0, len(own[1]))",
        (f"{SPLIT}::test_parts_together_are_the_whole",),
    ),
    Mistake(
        "a server's process norms the scores of its own pairs",
        "square = self.processes.summed(wide.square().sum(-1, keepdim=True))",
        "square = wide.square().sum(-1, keepdim=True)",
        (f"{SPLIT}::test_parts_together_are_the_whole",),
    ),
    Mistake(
        "each process of a server has the first slopes of ALiBi",
        "[own.start : own.stop]\n",
        "[: len(own)]\n",
        (f"{SPLIT}::test_parts_together_are_the_whole",),
    ),
    Mistake(
        "a stage of a pipeline reads the embedding of another",
        'crossing = [one.layer for one in plan.reads if one.kind != "shared" and one.layer not in self.own_layers]',
        'crossing = [one.layer for one in plan.reads if one.kind == "bank" and one.layer not in self.own_layers]',
        (f"{SPLIT}::test_what_crosses_a_border",),
    ),
    Mistake(
        "a server's sequences are counted in tokens, not in blocks",
        "-(-tokens // self.block_size))",
        "tokens)",
        ("tests/serving/test_pages.py::test_a_block_has_the_bytes_of_the_plan",),
    ),
    Mistake(
        "the first look spends nothing of the level",
        "spent = level * ((n / last) ** SPENDING - before)",
        "spent = level * ((n / last) ** SPENDING - ((n - 1) / last) ** SPENDING)",
        (f"{SEQUENTIAL}::test_critical_values_spend_the_level_look_by_look",),
    ),
    Mistake(
        "a missing seed is left out of a sample that is looked at in order",
        "        if seed not in arm or seed not in base or diverged:\n            break",
        "        if diverged:\n            break\n        if seed not in arm or seed not in base:\n"
        "            continue",
        (f"{SEQUENTIAL}::test_a_decision_depends_on_the_seeds_up_to_it_in_order_and_on_no_later_one",),
    ),
    Mistake(
        "a run from an image model of other classes keeps their names",
        "        check_classes(config, data)\n",
        "",
        (f"{TRAINING_IMAGES}::test_a_trained_model_gets_a_classifier_and_positions_for_other_images",),
    ),
    Mistake(
        "learned positions of another size are those of the first patches",
        "weights[POSITIONS] = resized(weights[POSITIONS].float(), old, config.grid)",
        "weights[POSITIONS] = weights[POSITIONS].repeat(9, 1)[: config.tokens]",
        (f"{TRAINING_IMAGES}::test_a_trained_model_gets_a_classifier_and_positions_for_other_images",),
    ),
    Mistake(
        "the classes of images before a broken one are lost",
        "        if opened:\n            pixels",
        "        if opened and broken is None:\n            pixels",
        (f"{TRAINING_IMAGES}::test_predictions",),
    ),
    Mistake(
        "a line of pixels is resized",
        "            if max(opened.size) > LONGEST * min(opened.size):",
        "            if max(opened.size) > 10**9 * min(opened.size):",
        (f"{IMAGES}::test_a_line_of_pixels_is_refused_before_it_is_resized",),
    ),
    Mistake(
        "results after the decision count",
        "used = {arm: set(one.seeds) for arm, one in standings(records, baseline, plan).items()}",
        "used = {arm: set(plan.seeds) for arm, one in standings(records, baseline, plan).items()}",
        (f"{SEQUENTIAL}::test_how_many_are_trained_at_a_time_changes_nothing",),
    ),
    Mistake(
        "runs of other seeds may have other settings",
        "if record.config_hash != own.digest() and (record.status in ENDED or checkpoints(folder)):",
        "if False:",
        (f"{EARLIER}::test_runs_of_another_comparison_are_refused_whatever_their_seeds_and_stay_as_they_are",),
    ),
    Mistake(
        "a refused plan is written into the runs",
        "    check_settings(recipe, rates, there, out)\n    adopt(recipe, there, out)",
        "    adopt(recipe, there, out)\n    check_settings(recipe, rates, there, out)",
        (f"{EARLIER}::test_a_refused_plan_is_not_written_into_the_runs",),
    ),
    Mistake(
        "a claim is judged without the seed that failed",
        "evidence = [_missing(claim, runs) or _evidence(claim, runs) for claim in claims]",
        "evidence = [_evidence(claim, runs) for claim in claims]",
        (f"{CLAIMS}::test_a_claim_is_not_judged_while_a_seed_is_missing",),
    ),
    Mistake(
        "pairs beside the tokens start far larger than these",
        "drawn = config.initializer_range * sqrt(config.hidden_size)",
        "drawn = 1.0",
        (f"{MEMORY}::test_pairs_start_with_the_size_of_tokens_keys_and_values_or_the_one_asked_for",),
    ),
]
