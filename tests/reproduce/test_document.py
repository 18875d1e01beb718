"""Results in pages of the documentation: from what has run, and kept where nothing has."""

import json
import re

import pytest

from headwater.compare.prices import ArmPrice, Prices, TimeRatio
from headwater.errors import HeadwaterError
from headwater.papers import costs, document
from headwater.papers.table import tables
from headwater.recipe import load_recipe
from headwater.registry import MECHANISMS
from headwater.shipped import recipes_folder

LEDGER = sorted(path.stem for path in (recipes_folder() / "ledger").glob("*.yaml"))
LEDGER_TABLES = [name for name in tables() if name.startswith("ledger/")]
PAGE = """# A page

<!-- claims: kv-shifting/figure-3 kv-shifting/figure-10 -->

| table | claim | | seeds | by |
| --- | --- | --- | ---: | --- |
| `kv-shifting/figure-10` | The losses of QKV and KV shift are similar. | holds | 8 | a number: +0.1 [-0.1, +0.3] |

<!-- end -->
by hand
<!-- statements: ledger/after-reading -->
<!-- end -->
<!-- prices: ledger-text -->
<!-- end -->
"""


def result(folder, table, *claims):
    file = folder / "cpu" / table.replace("/", "-") / "result.json"
    file.parent.mkdir(parents=True)
    given = [dict(zip(("says", "verdict", "seeds", "evidence"), c, strict=True)) for c in claims]
    file.write_text(json.dumps({"claims": given, "settings": costs.current(table, "cpu")}))


def test_a_page_has_what_has_run_keeps_what_it_had_and_lists_the_rest_as_open(tmp_path):
    said = tables()["ledger/after-reading"].claims[0]
    result(tmp_path, "kv-shifting/figure-3", ("KV shift does not change what is learned.", "does not hold", 5, "p|q"))
    result(tmp_path, "ledger/after-reading", (said.says, "holds", 4, "by so much"))
    page = document.renewed(PAGE, tmp_path, "cpu")
    assert "| `kv-shifting/figure-10` | The losses of QKV and KV shift are similar. | holds | 8 | a number" in page
    assert "| `kv-shifting/figure-3` | KV shift does not change what is learned. | does not hold | 5 | p\\|q |" in page
    others = [claim for claim in tables()["ledger/after-reading"].claims if claim.said and claim.says != said.says]
    assert page.count("| open |") == 3 + len(others)  # of figure-3, and the other statements
    assert "Of 2 claims in 2 tables, 1 holds, 1 does not hold. 3 claims are open." in page
    assert page.count("on two cores: `headwater reproduce kv-shifting/figure-3` |") == 1  # beside the first open one
    assert f"| {said.says} | {' '.join(said.said)} | holds: by so much |" in page
    assert "`ledger-text`: not measured yet." in page
    assert "\nby hand\n" in page
    # What a comparison costs stays, too, where nothing says otherwise.
    open_, measured = "`ledger-text`: not measured yet.", "`ledger-text` on a machine:"
    assert measured in document.renewed(page.replace(open_, measured), tmp_path / "empty", "cpu")
    # Renewed again, and without the results, it stays as it is, except for statements, which come from results alone.
    assert document.renewed(page, tmp_path, "cpu") == page
    assert document.written(document.renewed(page, tmp_path / "empty", "cpu")) == document.written(page)

    damaged = tmp_path / "cpu" / "ledger-after-reading" / "result.json"
    for content in ('{"cl', "{}", "[]", '{"claims": [{"says": 1}]}', damaged.read_text().replace("holds", "hodls")):
        damaged.write_text(content)
        with pytest.raises(HeadwaterError, match="is damaged; run `headwater reproduce ledger/after-reading"):
            document.renewed(page, tmp_path, "cpu")

    file = tmp_path / "page.md"
    file.write_text("nothing")
    with pytest.raises(HeadwaterError, match="has no place for results"):
        document.write(file, tmp_path, "cpu")


def test_a_result_of_other_runs_or_claims_than_now_is_open_again(tmp_path):
    result(tmp_path, "ledger/after-reading", (tables()["ledger/after-reading"].claims[0].says, "holds", 4, "b"))
    said = []
    page = PAGE.replace("kv-shifting/figure-3 ", "ledger/after-reading ")
    assert "| holds | 4 |" in document.renewed(page, tmp_path, "cpu", said.append)
    assert said == []
    file = tmp_path / "cpu" / "ledger-after-reading" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": "of an older recipe"}))
    assert "| holds | 4 |" not in document.renewed(page, tmp_path, "cpu", said.append)
    assert said[0].startswith("ledger/after-reading: left open: its runs, claims or headwater have changed")


def test_statements_stay_where_nothing_says_otherwise(tmp_path):
    page = "<!-- statements: ledger/after-reading -->\n\n| by | hand |\n\n<!-- end -->\n"
    assert document.renewed(page, tmp_path, "cpu") == page


def test_the_readme_counts_the_papers_claims_as_their_page_does():
    root = recipes_folder().parent
    page = (root / "docs" / "reproduce.md").read_text()
    # Should claims be open again, the README has to count them too.
    counted = re.search(
        r"^Of \d+ claims in .*, (\d+) hold.*, (\d+) do not hold, (\d+) cannot be told(?: \(\d+ numbers\))?\.$",
        page,
        re.M,
    )
    said = re.search(
        r"(\d+) hold at that scale, (\d+) do not hold and (\d+) cannot be told",
        " ".join((root / "README.md").read_text().split()),
    )
    assert said.groups() == counted.groups()


def test_one_page_has_every_claim_of_a_paper(tmp_path, run):
    said = tables()["ledger/after-reading"].claims[0].says
    result(tmp_path, "ledger/after-reading", (said, "holds", 4, "p|q < 1"))
    page = tmp_path / "page.html"
    code, out, _ = run("reproduce", "--page", page, "ledger", "--out", tmp_path)
    assert (code, out.strip()) == (0, f"written: {page}")
    html = " ".join(page.read_text().split())
    ledger = [claim.says for name, one in tables().items() if name.startswith("ledger/") for claim in one.claims]
    assert f"The claim holds in 1 table. {len(ledger) - 1} claims are open." in html
    assert re.search(rf"{re.escape(said)}</td><td[^>]*>holds</td><td[^>]*>4</td><td[^>]*>p\|q &lt; 1<", html)
    assert html.count(">open<") == len(ledger) - 1
    assert html.index(said) < html.index(">open<")
    for name in LEDGER_TABLES:
        assert f">headwater reproduce {name}<" in html


def test_pages_of_nothing_are_refused(tmp_path, run):
    def refused(*arguments):
        code, _, said = run("reproduce", "--page", tmp_path / "page.html", *arguments, "--out", tmp_path)
        assert code == 2
        assert not (tmp_path / "page.html").exists()
        return " ".join(said.split())

    assert "Name what the page is about" in refused()
    assert "did you mean 'ledger'?" in refused("ledgr")
    assert "None of these tables has a result" in refused("ledger")
    assert "run `headwater reproduce ledger/after-reading` first" in refused("ledger")
    assert "None of these tables is trained at cpu scale" in refused("kv-shifting/table-2", "tokenformer/table-3")
    assert "'compare.seeds=[0]' has no effect with --page" in refused("ledger", "compare.seeds=[0]")


def test_arms_without_a_new_price_keep_theirs_if_the_machine_is_the_same(tmp_path):
    def priced(name, **ratios):
        time = {arm: TimeRatio(seconds=1.0, ratio=ratio, quartiles=(ratio, ratio)) for arm, ratio in ratios.items()}
        arms = {
            arm: ArmPrice(
                settings=arm,
                against="vanilla",
                parameters=1,
                flops=1.0,
                cache=1,
                training=time[arm],
                decoding=time[arm],
            )
            for arm in time
        }
        found = Prices(device="cpu", device_name=name, threads=1, torch="2", headwater="0", arms=arms)
        file = tmp_path / "cpu" / "trials" / "ledger-text" / "prices.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found.model_dump_json())

    def ratios(page):
        return {arm: f"×{ratio}" for arm, ratio in re.findall(r"\| (smear|Engram) \|.*?×([\d.]+) \[", page)}

    priced("a CPU", vanilla=1, smear=1.25)
    page = document.renewed(PAGE, tmp_path, "cpu")
    priced("a CPU", vanilla=1, Engram=1.5)
    page = document.renewed(page, tmp_path, "cpu")
    assert ratios(page) == {"smear": "×1.25", "Engram": "×1.50"}
    priced("a CPU", vanilla=1, smear=1.75)
    assert ratios(document.renewed(page, tmp_path, "cpu")) == {"smear": "×1.75", "Engram": "×1.50"}
    priced("another CPU", vanilla=1, smear=2)
    assert ratios(document.renewed(page, tmp_path, "cpu")) == {"smear": "×2.00"}
    # Against another baseline, nothing that was measured before says anything.
    other = page.replace("| vanilla | 1 |", "| vanilla | 2 |")
    assert other != page
    priced("a CPU", vanilla=1, smear=1.75)
    assert ratios(document.renewed(other, tmp_path, "cpu")) == {"smear": "×1.75"}


def test_the_ledger_has_the_same_arms_everywhere_and_a_claim_or_a_cell_for_each():
    recipes = {name: load_recipe(recipes_folder() / "ledger" / f"{name}.yaml") for name in LEDGER}
    code = recipes.pop("code")
    assert code.compare.arms.items() <= recipes["text"].compare.arms.items()  # the second stage has one of each kind
    arms = {name: list(recipe.compare.arms) for name, recipe in recipes.items()}
    starts = [arm for arm in arms["text"] if arm.endswith(", embedding 0.1")]
    arms["text"] = [arm for arm in arms["text"] if arm not in starts]
    assert len(set(map(tuple, arms.values()))) == 1
    on_text = {name: one for name, one in tables().items() if name.startswith("ledger/") and len(one.columns) == 1}
    assert {cell.arm for row in on_text.pop("ledger/code").rows for cell in row.cells} == set(code.compare.arms)
    in_start = {cell.arm for row in on_text.pop("ledger/start").rows for cell in row.cells}
    assert in_start == {*starts, *(arm.removesuffix(", embedding 0.1") for arm in starts)}
    shown = [cell.arm for one in on_text.values() for row in one.rows for cell in row.cells]
    assert set(shown) == set(arms["text"])
    assert len(set(shown)) == len(shown) - len(on_text) + 1  # only vanilla is in all these tables


def test_every_mechanism_is_in_the_ledger():
    recipe = load_recipe(recipes_folder() / "ledger" / "text.yaml")
    used = [name for arm in recipe.compare.arms for name in recipe.arm(arm, 0).model.get("mechanisms") or {}]
    assert set(used) == set(MECHANISMS.own)
