"""Rows that branch under a mask made for the kernel: every path from root to leaf is as if it had been run alone."""

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache

from conftest import assert_near, build, config, document_positions, shared, tokens
from headwater import HeadwaterError, HeadwaterForCausalLM
from headwater.nn.ancestors import find_ancestors
from headwater.testing.trees import Tree, batch_trees
from headwater.testing.trees import slice_tokens as growing_part

EXACT = 1e-12
SHIFTS: list[dict] = [
    {"kv_shift": {}},
    {"kv_shift": {"window": 4, "queries": True}},
    {"kv_shift": {"variant": "gate", "values": False}},
    {"kv_shift": {"queries": True, "keys": False, "values": False, "window": 3}},
    {"pattention": {}, "kv_shift": {"window": 3}, "value_residual": {}, "skip_layer": {}, "dense_former": {}},
    {"kv_shift": {"window": 3}, "svformer": {}},
    {"value_residual": {"mode": "dense"}, "neutreno": {}},
]
shifts = pytest.mark.parametrize("mechanisms", SHIFTS, ids=lambda m: "+".join(m) + str(len(str(m))))
MASKS = ("bool", "additive", "float32 minus 1e9")


def random_tree(size: int, seed: int, trunk: int = 0) -> Tree:
    """After a trunk of plain tokens any token may be any later one's parent; now and then a new document begins."""
    draw = random.Random(seed)
    return Tree([t - 1 if t < trunk else draw.randrange(max(trunk - 1, -1), t) for t in range(size)], seed)


def as_masked(given: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The same call with a mask that is added to the scores; bool: as it is."""
    if kind == "bool":
        return given
    hidden = torch.finfo(torch.float64).min if kind == "additive" else -1e9
    mask = torch.zeros(given["attention_mask"].shape, dtype=torch.float64)
    return given | {"attention_mask": mask.masked_fill(~given["attention_mask"], hidden)}


def part(given: dict[str, Tensor], start: int, end: int, slots: int | None = None) -> dict[str, Tensor]:
    """Tokens from `start` to `end`; the mask over as many slots as a static cache has, if it is one."""
    chosen = growing_part(given, start, end)
    if slots is None:
        return chosen
    return chosen | {"attention_mask": torch.nn.functional.pad(chosen["attention_mask"], (0, slots - end))}


def test_three_continuations_in_one_row():
    model, rows = shared({"kv_shift": {}}), torch.tensor([[10, 11, 12, x] for x in range(3)])
    tree = Tree([-1, 0, 1, 2, 2, 2])
    tree.ids = torch.tensor([10, 11, 12, 0, 1, 2])
    logits = model(**batch_trees([tree])).logits[0]
    assert tree.positions.tolist() == [0, 1, 2, 3, 3, 3]
    assert_near(logits[3:], model(rows).logits[:, -1], EXACT)


@pytest.mark.sampled(2)
@pytest.mark.sampled(9)
@shifts
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_random_trees(mechanisms, kind, kernel):
    model = shared(mechanisms, attn_implementation=kernel)
    trees = [random_tree(12, seed, trunk) for seed, trunk in enumerate((0, 3, 5, 12))]
    expected = torch.stack([tree.compute_logits(model) for tree in trees])
    assert_near(model(**as_masked(batch_trees(trees), kind), use_cache=False).logits, expected, EXACT)


@pytest.mark.sampled(2)
@pytest.mark.sampled(9)
@shifts
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("seed", range(3))
def test_branches_after_a_cached_prefix(mechanisms, static, seed):
    """The prefix plain and in two calls, then a tree on its last token in one call."""
    model, prefix, size = shared(mechanisms), 5, 12
    trees = [random_tree(size, 10 * seed + row, prefix) for row in range(3)]
    given, slots = batch_trees(trees), 15 if static else None
    cache = StaticCache(config=model.config, max_cache_len=15) if static else DynamicCache(config=model.config)
    model(given["input_ids"][:, :3], past_key_values=cache)
    model(given["input_ids"][:, 3:prefix], past_key_values=cache)
    logits = model(**part(given, prefix, size, slots), past_key_values=cache).logits
    expected = torch.stack([tree.compute_logits(model)[prefix:] for tree in trees])
    assert_near(logits, expected, EXACT)


@pytest.mark.sampled(5)
@shifts
@pytest.mark.parametrize("seed", range(3))
def test_trees_grow_in_a_cache_that_records_the_past(mechanisms, seed):
    model, borders = shared(mechanisms), (4, 6, 7, 11, 14)
    trees = [random_tree(borders[-1], 20 * seed + row, 4) for row in range(2)]
    given, cache = batch_trees(trees), DynamicCache(config=model.config)
    model(given["input_ids"][:, :4], past_key_values=cache)
    cache.activate_past_recording()
    logits = [
        model(**part(given, start, end), past_key_values=cache).logits for start, end in itertools.pairwise(borders)
    ]
    expected = torch.stack([tree.compute_logits(model)[4:] for tree in trees])
    assert_near(torch.cat(logits, 1), expected, EXACT)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_without_recording_an_old_branch_is_refused_and_nothing_changes(static):
    model = shared({"kv_shift": {}})
    tree = Tree([-1, 0, 0, 0, 1, 3])  # 4 goes on from 1, which is not kept; 5 from 3, which is the last
    given, slots = batch_trees([tree]), 8 if static else None
    cache = StaticCache(config=model.config, max_cache_len=8) if static else DynamicCache(config=model.config)
    model(**part(given, 0, 4, slots), past_key_values=cache)
    with pytest.raises(HeadwaterError, match="activate_past_recording"):
        model(**part(given, 4, 5, slots), past_key_values=cache)
    tree = Tree([-1, 0, 0, 0, 3])
    logits = model(**part(batch_trees([tree]), 4, 5, slots), past_key_values=cache).logits
    assert_near(logits[0], tree.compute_logits(model)[4:], EXACT)


def test_a_crop_takes_branches_back():
    model, cache = shared({"kv_shift": {"window": 3}}), DynamicCache(config=config({"kv_shift": {"window": 3}}))
    tree = Tree([-1, 0, 1, 2, 2, 3, 4])
    given = batch_trees([tree])
    model(given["input_ids"][:, :3], past_key_values=cache)
    cache.activate_past_recording()
    model(**part(given, 3, 5), past_key_values=cache)
    cache.crop(-1)
    cache.activate_past_recording()
    kept = Tree([-1, 0, 1, 2, 3, 3])
    kept.ids = torch.cat((tree.ids[:4], tokens(2, seed=9)))
    logits = model(**part(batch_trees([kept]), 4, 6), past_key_values=cache).logits
    assert_near(logits[0], kept.compute_logits(model)[4:], EXACT)


@shifts
def test_plain_padded_and_packed_rows_as_masks_for_the_kernel(mechanisms):
    """The same answers as with [batch, tokens] and position ids."""
    model, ids = shared(mechanisms), tokens(2, 9)
    position_ids = document_positions([[4, 5], [9]])
    slot = torch.arange(9)
    seen = (slot[:, None] >= slot).repeat(2, 1, 1)
    seen[0, 4:, :4] = False
    expected = model(ids, position_ids=position_ids, use_cache=False).logits
    assert_near(model(ids, position_ids=position_ids, attention_mask=seen[:, None]).logits, expected, EXACT)

    mask = (slot >= torch.tensor([[3], [0]])).long()
    padded = (slot[:, None] >= slot) & mask[:, None].bool()
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    actual = model(ids, position_ids=position_ids, attention_mask=padded[:, None], use_cache=False).logits
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert_near(actual[mask.bool()], expected[mask.bool()], EXACT)
    # and token by token, with the prefix under one kind of mask and the rest under the other
    cache = model(ids[:, :5], attention_mask=mask[:, :5]).past_key_values
    for t in range(5, 9):
        logits = model(
            ids[:, t : t + 1],
            position_ids=position_ids[:, t : t + 1],
            attention_mask=padded[:, None, t : t + 1, : t + 1],
            past_key_values=cache,
        ).logits
        assert_near(logits[:, 0], expected[:, t], EXACT)


def test_one_mask_and_position_ids_for_all_rows():
    model, tree = shared({"kv_shift": {"window": 3}}), random_tree(9, 1, 3)
    given = batch_trees([tree])
    given["input_ids"] = tokens(3, 9)
    expected = []
    for row in given["input_ids"]:
        tree.ids = row
        expected.append(tree.compute_logits(model))
    assert_near(model(**given, use_cache=False).logits, torch.stack(expected), EXACT)


@pytest.mark.parametrize("window", [3, 6])
def test_sliding_windows(window):
    """Narrower than the tree and wider, a mask that keeps to it; the cache has dropped the oldest columns."""
    model, tree = shared({"kv_shift": {}}, sliding_window=window), Tree([0] * 11)
    tree.parents = list(range(-1, 10))
    tree.ids = tokens(11)
    expected = model(tree.ids[None], use_cache=False).logits
    slot = torch.arange(11)
    given = batch_trees([tree])
    given["attention_mask"] = given["attention_mask"] & (slot[:, None] - slot < window)
    assert_near(model(**given, use_cache=False).logits, expected, EXACT)
    cache = model(tree.ids[None, :8]).past_key_values
    last = part(given, 8, 11)
    last["attention_mask"] = last["attention_mask"][..., 8 - window + 1 :]
    assert_near(model(**last, past_key_values=cache).logits, expected[:, 8:], EXACT)


def changed(**changes: Tensor) -> dict[str, Tensor]:
    return batch_trees([Tree([-1, 0, 1, 2, 3, 4])]) | changes


def hiding(token: int, slot: int) -> Tensor:
    mask = Tree([-1, 0, 1, 2, 3, 4]).visible[None, None].clone()
    mask[..., token, slot] = False
    return mask


REFUSED = {
    "hidden": changed(attention_mask=hiding(4, 3)),
    "a position left out": changed(position_ids=torch.tensor([[0, 1, 2, 4, 5, 6]])),
    "two of them": changed(position_ids=torch.tensor([[0, 1, 2, 2, 3, 4]])),
    "begins at a later position": changed(position_ids=torch.tensor([[3, 4, 5, 6, 7, 8]])),
    "crossing documents": changed(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]])),
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_where_there_is_no_one_token_before_it_is_refused(given):
    with pytest.raises(HeadwaterError, match="exactly one token at position p - 1"):
        shared({"kv_shift": {}})(**given)
    shared({"value_residual": {}})(**given)  # which does not look back


@pytest.mark.parametrize("count", [1, 7])
def test_there_is_a_position_for_each_token(count):
    with pytest.raises(HeadwaterError, match=f"position_ids has {count} positions, but the input has 6 tokens"):
        shared({"value_residual": {}})(tokens(1, 6), position_ids=torch.zeros(1, count, dtype=torch.long))


@pytest.mark.parametrize(
    "mask",
    [hiding(5, 2), hiding(5, 3)[..., 5:, :]],
    ids=["positions of the cached tokens", "of tokens that are not kept"],
)
def test_what_the_cache_holds_is_held_against_the_mask(mask):
    model, ids = shared({"kv_shift": {}}), tokens(1, 6)
    cache = model(ids[:, :5], position_ids=torch.tensor([[0, 1, 2, 2, 3]])).past_key_values
    given = dict(input_ids=ids[:, 5:], attention_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool), past_key_values=cache)
    for position in (3, 5):
        with pytest.raises(HeadwaterError, match="exactly one"):
            model(**given, position_ids=torch.tensor([[position]]))
    with pytest.raises(HeadwaterError, match="exactly one"):  # two of the older tokens share a position
        model(**given, position_ids=torch.tensor([[4]]))
    assert cache.get_seq_length() == 5


def test_masks_of_other_shapes_are_refused():
    model, ids = shared({"kv_shift": {}}), tokens(2, 6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    with pytest.raises(HeadwaterError, match=r"\[batch, tokens\] .* not \[2, 6, 6\]"):
        model(ids, attention_mask=seen.expand(2, 6, 6))
    with pytest.raises(HeadwaterError, match="among 6"):
        model(ids, attention_mask=seen.expand(2, 1, 6, 6)[..., :5, :])
    several = seen.repeat(2, 4, 1, 1)
    assert_near(model(ids, attention_mask=several).logits, model(ids).logits, EXACT)
    several[:, 2, 4, 3] = False
    with pytest.raises(HeadwaterError, match="all heads share"):
        model(ids, attention_mask=several)


@pytest.mark.parametrize("cached", [DynamicCache, StaticCache])
@pytest.mark.parametrize(
    "mechanisms", [{}, {"kv_shift": {"window": 3}}, {"short_conv": {}}, {"value_residual": {}}], ids=str
)
def test_a_mask_may_be_allocated_once_for_all_steps(mechanisms, cached):
    """It is then wider than the tokens so far, and of what is not yet there it says anything."""
    model, ids = shared(mechanisms), tokens(2, 12)
    for begins in (0, 3):
        mask = torch.ones(2, 20, dtype=torch.long)
        mask[0, :begins] = 0
        whole = model(ids, attention_mask=mask[:, :12]).logits
        mask[1, 14:] = 0
        cache = (
            StaticCache(config=model.config, max_cache_len=20)
            if cached is StaticCache
            else DynamicCache(config=model.config)
        )
        parts = [
            model(part, attention_mask=mask, past_key_values=cache).logits for part in ids.split([5, 1, 1, 5], dim=1)
        ]
        assert_near(torch.cat(parts, 1)[:, begins:], whole[:, begins:], EXACT)


def test_numbers_of_a_mask_other_than_zero_are_one():
    model, ids = shared({"kv_shift": {}}), tokens(2, 6)
    numbered = torch.tensor([[0, 1, 1, 2, 2, 2], [1, 1, 1, 1, 3, 3]])
    assert_near(
        model(ids, attention_mask=numbered).logits[:, 1:],
        model(ids, attention_mask=numbered.sign()).logits[:, 1:],
        EXACT,
    )


def test_a_mask_of_the_new_tokens_alone_is_refused():
    model, ids = shared({}), tokens(2, 6)
    cache = model(ids[:, :4]).past_key_values
    with pytest.raises(HeadwaterError, match="has 2 columns, but there are 4 cached tokens and 2 new ones"):
        model(ids[:, 4:], attention_mask=torch.ones(2, 2), past_key_values=cache)


def test_masks_by_layer_type():
    model, ids = shared({"kv_shift": {}}, sliding_window=4), tokens(1, 6)
    slot = torch.arange(6)
    full = (slot[:, None] >= slot)[None, None]
    sliding = full & (slot[:, None] - slot < 4)
    for given in ({"full_attention": full, "sliding_attention": sliding}, {"sliding_attention": sliding}):
        assert_near(model(ids, attention_mask=given).logits, model(ids).logits, EXACT)
    with pytest.raises(HeadwaterError, match="none is for"):
        model(ids, attention_mask={"full_attention": full, "chunked_attention": full})


def test_alibi_is_not_left_out_of_a_mask_made_for_the_kernel():
    model, ids = shared(position="alibi"), tokens(1, 6)
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(HeadwaterError, match="ALiBi's distances"):
        model(ids, attention_mask=seen)


def test_document_starts():
    model, ids = shared({"kv_shift": {"window": 3}}), tokens(2, 9)
    starts = torch.zeros(2, 9, dtype=torch.bool)
    starts[0, 4] = starts[1, [2, 3]] = True
    seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    expected = model(ids, document_starts=starts, use_cache=False).logits
    assert_near(model(ids, document_starts=starts, attention_mask=seen, use_cache=False).logits, expected, EXACT)
    cache = model(ids[:, :5], document_starts=starts[:, :5]).past_key_values
    with pytest.raises(HeadwaterError, match="without a cache"):
        model(ids[:, 5:], document_starts=starts[:, 5:], past_key_values=cache)
    narrow = shared({"kv_shift": {}})
    cache = narrow(ids[:, :5], document_starts=starts[:, :5]).past_key_values
    logits = narrow(ids[:, 5:], document_starts=starts[:, 5:], past_key_values=cache).logits
    assert_near(logits, narrow(ids, document_starts=starts, use_cache=False).logits[:, 5:], EXACT)


def test_flex_attentions_block_masks():
    """Their kernel would have to be compiled first; here what is read from the mask."""
    tree = random_tree(9, 3, 3)
    position_ids, seen = tree.positions[None], tree.visible
    blocks = create_block_mask(lambda b, h, q, kv: seen[q, kv], 1, 1, 9, 9, device="cpu")
    slots = find_ancestors(position_ids, blocks, tail_lengths=(3, 3, 3)).slots
    assert torch.equal(slots, find_ancestors(position_ids, seen[None, None], tail_lengths=(3, 3, 3)).slots)
    assert slots[0, 0].tolist() == [9 if parent < 0 else parent for parent in tree.parents]
    model = shared({"kv_shift": {}})
    with pytest.raises(HeadwaterError, match="sdpa does not take"):
        model(tree.ids[None], position_ids=position_ids, attention_mask=blocks)


@pytest.mark.sampled(2)
@shifts
def test_gradients(mechanisms):
    model, tree = build(mechanisms), random_tree(7, 2, 2)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    actual = torch.autograd.grad(model(**batch_trees([tree]), use_cache=False).logits.square().sum(), wanted)
    expected = torch.autograd.grad(tree.compute_logits(model).square().sum(), wanted)
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b, 1e-9)


@pytest.mark.slow
def test_compiled_code_asserts_what_it_cannot_look_at():
    model, tree = build({"kv_shift": {"window": 3}}, num_hidden_layers=1), random_tree(9, 4, 3)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_near(compiled(**batch_trees([tree]), use_cache=False).logits[0], tree.compute_logits(model), 1e-9)
        with pytest.raises((RuntimeError, HeadwaterError), match="exactly one token"):
            compiled(**batch_trees([tree]) | {"position_ids": tree.positions[None] + 1}, use_cache=False)


def test_half_precision_scalars_stay_wide():
    model = HeadwaterForCausalLM(config({"kv_shift": {}})).to(torch.bfloat16)
    tree = random_tree(9, 3, 3)
    assert_near(
        model(**batch_trees([tree]), use_cache=False).logits[0].float(), tree.compute_logits(model).float(), 0.05
    )
