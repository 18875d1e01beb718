"""The ledger's recipes and tables."""

from headwater.plugins.mechanisms import MECHANISMS
from headwater_lab.papers.table import read_tables
from headwater_lab.recipe.recipe_files import load_recipe, recipes_folder

LEDGER = sorted(path.stem for path in (recipes_folder() / "ledger").glob("*.yaml"))


def test_the_ledger_has_the_same_arms_everywhere_and_a_claim_or_a_cell_for_each():
    recipes = {name: load_recipe(recipes_folder() / "ledger" / f"{name}.yaml") for name in LEDGER}
    code = recipes.pop("code")
    assert code.compare.arms.items() <= recipes["text"].compare.arms.items()  # the second stage has one of each kind
    arms = {name: list(recipe.compare.arms) for name, recipe in recipes.items()}
    starts = [arm for arm in arms["text"] if arm.endswith(", embedding 0.1")]
    arms["text"] = [arm for arm in arms["text"] if arm not in starts]
    assert len(set(map(tuple, arms.values()))) == 1
    on_text = {name: one for name, one in read_tables().items() if name.startswith("ledger/") and len(one.columns) == 1}
    assert {cell.arm for row in on_text.pop("ledger/code").rows for cell in row.cells} == set(code.compare.arms)
    in_start = {cell.arm for row in on_text.pop("ledger/start").rows for cell in row.cells}
    assert in_start == {*starts, *(arm.removesuffix(", embedding 0.1") for arm in starts)}
    shown = [cell.arm for one in on_text.values() for row in one.rows for cell in row.cells]
    assert set(shown) == set(arms["text"])
    assert len(set(shown)) == len(shown) - len(on_text) + 1  # only vanilla is in all these tables


# Not in the recipes yet: it makes the cache smaller, and is measured by conversions.
UNMEASURED = {"mla", "low_rank_kv"}


def test_every_mechanism_is_in_the_ledger():
    recipe = load_recipe(recipes_folder() / "ledger" / "text.yaml")
    used = [name for arm in recipe.compare.arms for name in recipe.arm(arm, 0).model.get("mechanisms") or {}]
    assert set(used) == set(MECHANISMS.built_in) - UNMEASURED
