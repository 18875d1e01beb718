"""Runs that are there before a comparison begins, and folders that hold the runs of several."""

import pytest
import yaml

from comparison.calibration import read_results
from comparison.saved import Here, changed_times, record, tiny
from headwater import HeadwaterError
from headwater.plugins.external_code import hash_code
from headwater_lab.comparison import pool
from headwater_lab.comparison.running import run_comparison
from headwater_lab.comparison.trials import list_trials
from headwater_lab.reports import read_comparisons
from headwater_lab.training.records import HeldOutPoint, changed_data, read_record, write_record

ARMS = {"base": {}, "wide": {"model": {"hidden_size": 16}}}
PLAN = {"sequential": True, "margin": 0.1, "min_seeds": 2, "max_seeds": 4}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Training in this process."""
    trains = Here()
    monkeypatch.setattr("headwater_lab.comparison.running.run_trials", trains)
    return trains


def ended(made, out, **changes):
    """Runs of a recipe's comparison that are there, with results that were never measured."""
    for trial in list_trials(made, out):
        place(trial, trial.folder, **changes)
    return made


def place(trial, folder, result=0.5, **changes):
    done = record(trial.experiment.arm, trial.recipe.seed, result, metric="accuracy")
    own = {
        "experiment": trial.experiment,
        "recipe": trial.recipe.model_dump(mode="json", exclude={"compare"}),
        "identity": trial.recipe.identity,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_record(done.model_copy(update=own | changes), folder)


def test_runs_of_the_comparison_stay_and_seeds_are_added(tmp_path, here):
    ended(tiny({"arms": ARMS}), tmp_path)
    run_comparison(tiny({"arms": ARMS, "seeds": [1, 2]}), tmp_path)
    assert [label for label, *_ in here.trained] == ["base · seed 2", "wide · seed 2"]
    assert read_comparisons(tmp_path)[0].seeds == [0, 1, 2]


def test_runs_on_other_data_are_refused_if_more_are_to_be_trained(tmp_path, here):
    ended(tiny({"arms": ARMS}), tmp_path, data={"sha256": "another"})
    run_comparison(tiny({"arms": ARMS}), tmp_path)
    with pytest.raises(HeadwaterError, match="holds a run trained on other data"):
        run_comparison(tiny({"arms": ARMS, "seeds": [0, 1, 2]}), tmp_path)
    with pytest.raises(HeadwaterError, match="holds a run with other settings"):
        run_comparison(tiny({"arms": ARMS, "seeds": [0, 1, 2]}, data={"length": 10}), tmp_path)
    assert here.trained == []


def test_a_decided_comparison_does_not_look_at_the_data(tmp_path):
    """Its plan has more seeds, which are not trained."""
    made = tiny({"arms": ARMS, **PLAN})
    for trial in list_trials(made, tmp_path):
        if trial.recipe.seed in made.compare.all_seeds[:2]:
            result = 0.5 + 0.001 * trial.recipe.seed * (trial.experiment.arm == "wide")
            place(trial, trial.folder, result, data={"sha256": "another"})
    outcomes = run_comparison(made, tmp_path)
    assert {outcome.record.seed for outcome in outcomes} == {*made.compare.all_seeds[:2]}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"training": {"steps": 6}}, r"tiny/(base|wide)-0' holds a run with other settings; choose another --out"),
        (
            {"compare": {"arms": ARMS | {"deep": {"training": {"steps": 6}}}}},
            {},
            "deep-0' holds a run of the arm 'deep'",
        ),
        ({"compare": {"arms": ARMS, "sizes": {"S": {}}}}, {}, "holds a run of the size 'S', which the recipe 'tiny'"),
        ({}, {"compare": {"arms": ARMS, "sizes": {"S": {}}}}, "holds a run of the one size, which the recipe 'tiny'"),
        (
            {"compare": {"arms": ARMS, **PLAN}},
            {"compare": {"arms": ARMS, **PLAN, "margin": 0.5}},
            "a margin of 0.1 and",
        ),
        ({"compare": {"arms": ARMS, **PLAN}}, {}, "now the recipe has fixed seeds"),
    ],
    ids=["settings", "arm", "size", "sizes", "margin", "fixed"],
)
def test_runs_of_another_comparison_are_refused_whatever_their_seeds_and_stay_as_they_are(
    tmp_path, here, before, now, message
):
    first = {"compare": {"arms": ARMS}} | before
    ended(tiny(first.pop("compare"), **first), tmp_path)
    then = {"compare": {"arms": ARMS}} | now
    times = changed_times(tmp_path)
    with pytest.raises(HeadwaterError, match=message) as error:
        run_comparison(tiny(then.pop("compare") | {"seeds": [70]}, **then), tmp_path)
    assert "\n" not in str(error.value)
    assert not here.trained
    assert changed_times(tmp_path) == times


def test_runs_of_code_that_has_changed_are_refused(tmp_path, here, monkeypatch):
    """Else the table shows the old code's results as the new code's."""
    module, out = tmp_path / "falling.py", tmp_path / "out"
    module.write_text("def fall(progress):\n    return 1 - progress\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HEADWATER_TRUST", "falling")
    made = tiny({"seeds": [0], "arms": ARMS}, training={"schedule": "falling:fall"})
    run_comparison(made, out)
    trained = list(here.trained)
    records = read_comparisons(out)[0].records

    module.write_text("def fall(progress):  # linear\n    return 1 - progress\n")
    run_comparison(made, out)
    module.write_text("def fall(progress):\n    return 1 - progress**2\n")
    with pytest.raises(HeadwaterError, match=r"holds a run from before falling:fall was changed; choose another"):
        run_comparison(made, out)
    assert here.trained == trained
    assert not changed_data(records)
    edited = records[1].model_copy(update={"code": hash_code(["falling:fall"])})
    assert "different versions of falling:fall (base-0; wide-0)" in changed_data([records[0], edited])


def test_a_plain_run_of_the_same_name_is_refused_before_anything_is_trained(tmp_path, here):
    made = tiny({"arms": ARMS})
    place(list_trials(made, tmp_path)[0], tmp_path, experiment=None, name="tiny")
    with pytest.raises(HeadwaterError, match="holds a run 'tiny' of no comparison"):
        run_comparison(made, tmp_path)
    assert here.trained == []


def test_a_model_that_cannot_be_built_is_refused_before_anything_is_trained(tmp_path, here):
    made = tiny({"arms": ARMS | {"shift": {"model": {"mechanisms": {"kv_shif": {}}}}}})
    with pytest.raises(HeadwaterError, match="did you mean 'kv_shift'"):
        run_comparison(made, tmp_path)
    assert here.trained == []


def test_a_refused_plan_is_not_written_into_the_runs(tmp_path):
    """Else the comparison that they belong to could not go on."""
    made = ended(tiny({"arms": ARMS}), tmp_path)
    with pytest.raises(HeadwaterError, match="other settings"):
        run_comparison(tiny({"arms": ARMS, **PLAN}, training={"steps": 6}), tmp_path)
    run_comparison(made, tmp_path)
    assert read_comparisons(tmp_path)[0].plan is None


def test_runs_of_other_arms_and_settings_may_be_there_where_no_table_is_made_of_all(tmp_path, here):
    ended(tiny({"arms": ARMS | {"deep": {}}}, training={"steps": 6}), tmp_path)
    run_comparison(tiny({"arms": ARMS, "seeds": [7]}), tmp_path, shared=True)
    assert len(here.trained) == 2


def test_what_says_how_results_are_read_holds_for_all_runs(tmp_path):
    ended(tiny({"arms": ARMS}), tmp_path)
    run_comparison(tiny({"arms": ARMS, "seeds": [2], "baseline": "wide", "threshold": 0.3}), tmp_path)
    (found,) = read_comparisons(tmp_path)
    assert (found.baseline, found.threshold, found.seeds) == ("wide", 0.3, [0, 1, 2])


def test_arms_that_are_evaluated_at_different_steps_have_no_steps_to_compare(tmp_path):
    ended(tiny({"arms": ARMS, "threshold": 0.3}, reporting={"evaluate_every": 2}), tmp_path)
    with pytest.raises(HeadwaterError, match=r"evaluate_every=2, and the recipe now has 8"):
        run_comparison(tiny({"arms": ARMS, "threshold": 0.3, "seeds": [2]}, reporting={"evaluate_every": 8}), tmp_path)
    run_comparison(tiny({"arms": ARMS, "seeds": [2]}, reporting={"evaluate_every": 8}), tmp_path)


def test_a_run_in_two_places_counts_once_or_not_at_all(tmp_path):
    made = ended(tiny({"arms": ARMS}), tmp_path)
    place(list_trials(made, tmp_path)[0], tmp_path / "copy")
    with pytest.raises(HeadwaterError, match="copy' holds a run of base · seed 0, which belongs in"):
        run_comparison(made, tmp_path)
    with pytest.raises(HeadwaterError, match=r"copy' and .*base-0' both hold 'base' with seed 0, so they do not fit"):
        read_comparisons(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"training": {"steps": 6}}, "hold runs of 'base' with different settings, so they do not fit"),
        ({"compare": {"arms": ARMS, "baseline": "wide"}}, "was compared with 'base' and .* with 'wide'"),
        ({"compare": {"arms": ARMS, **PLAN, "margin": 0.5}}, "run until decided by different plans"),
    ],
    ids=["settings", "baseline", "plan"],
)
def test_a_folder_with_runs_of_several_comparisons_has_no_table(tmp_path, other, message):
    ended(tiny({"arms": ARMS, **(PLAN if "margin" in str(other) else {})}), tmp_path / "one")
    options = {"compare": {"arms": ARMS}} | other
    ended(tiny(options.pop("compare") | {"seeds": [8, 9]}, **options), tmp_path / "two")
    with pytest.raises(HeadwaterError, match=message):
        read_comparisons(tmp_path)
    assert len(read_comparisons(tmp_path / "one")) == len(read_comparisons(tmp_path / "two")) == 1


def test_fields_that_were_added_later_are_no_different_settings(tmp_path):
    made = ended(tiny({"arms": ARMS}), tmp_path)
    path = list_trials(made, tmp_path)[0].folder
    old = read_record(path)
    without = {key: value for key, value in old.recipe["training"].items() if key not in ("ema_decay", "distillation")}
    write_record(old.model_copy(update={"recipe": old.recipe | {"training": without}}), path)
    assert read_comparisons(tmp_path)[0].seeds == [0, 1]
    run_comparison(made, tmp_path)


def test_results_of_several_settings_are_not_resampled_as_one_arm(tmp_path):
    ended(tiny({"arms": ARMS}), tmp_path / "one")
    assert read_results(tmp_path) == ("base", [0.5, 0.5])
    ended(tiny({"arms": ARMS, "seeds": [8]}, training={"steps": 6}), tmp_path / "two")
    with pytest.raises(HeadwaterError, match="different settings, so they are not results of one arm"):
        read_results(tmp_path)


def test_a_run_that_has_ended_is_not_trained_over_though_its_checkpoints_are_gone(tmp_path):
    (job,) = list_trials(ended(tiny({}), tmp_path), tmp_path)[0].jobs
    (other,) = list_trials(tiny({}, training={"steps": 6}), tmp_path)[0].jobs
    assert pool.read_finished(job) is not None
    with pytest.raises(HeadwaterError, match="holds a run with other settings"):
        pool.read_finished(other)


def staged(seed, digest, stages):
    recipe = {"data": {"kind": "text"}, "training": {"steps": 1, "learning_rate": 0.1}, "stages": stages}
    return record("grown", seed, 1.0, data={"source": "x", "sha256": digest}, recipe=recipe)


def test_data_that_changed_are_seen_in_runs_with_stages():
    plain = record(
        "base", 0, 1.0, data={"source": "x", "sha256": "a"}, recipe=staged(0, "a", []).recipe | {"stages": []}
    )
    stages = [{"name": "grown", "data": {}}]
    assert not changed_data([plain, staged(0, "a", stages), staged(1, "a", stages)])
    assert "(grown-0; grown-1)" in changed_data([staged(0, "a", stages), staged(1, "b", stages)])
    assert "(base-0; grown-0)" in changed_data([plain, staged(0, "b", stages)])
    # A stage with data of its own has no others to be compared with.
    assert not changed_data([plain, staged(0, "b", [{"name": "grown", "data": {"source": "y"}}])])


def test_nothing_is_decided_from_runs_with_different_data(tmp_path):
    made = tiny({"arms": ARMS, **PLAN})
    for number, trial in enumerate(list_trials(made, tmp_path)):
        look = HeldOutPoint(step=1, tokens=1, metrics={"accuracy": number / 10})
        place(
            trial, trial.folder, data={"source": "x", "sha256": "a" if trial.recipe.seed < 1 else "b"}, held_out=[look]
        )
    with pytest.raises(HeadwaterError, match="had different data"):
        run_comparison(made, tmp_path)


def test_an_interrupted_run_is_none_that_was_given_up(tmp_path):
    made = ended(tiny({"arms": ARMS, "seeds": [0]}), tmp_path)
    trial = next(one for one in list_trials(made, tmp_path) if one.experiment.arm == "wide")
    place(trial, trial.folder, status="stopped")
    (found,) = read_comparisons(tmp_path)
    assert [one.seed for one in found.unfinished] == [0]
    assert found.arms == ["base"]


def test_recipes_of_one_name_are_refused_before_anything_is_trained(tmp_path, run):
    files = [tmp_path / f"{name}.yaml" for name in "ab"]
    for file in files:
        file.write_text(yaml.safe_dump(tiny(compare={"arms": ARMS, "baseline": "base"}).model_dump(mode="json")))
    code, _, stderr = run("compare", *files, "--out", tmp_path / "runs")
    assert code == 2
    assert "would share a folder" in stderr
    assert not (tmp_path / "runs").exists()
