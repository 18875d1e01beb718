"""A tiny comparison, tables over it, and records without training."""

import functools
import importlib
from pathlib import Path

import pytest
import yaml

from headwater_lab.comparison.trials import make_trial
from headwater_lab.papers.arms import FinishedRun, SizedArm, list_claimed_arms
from headwater_lab.papers.measures import Runs
from headwater_lab.papers.table import PaperTable
from headwater_lab.recipe.recipe import Recipe, parse
from headwater_lab.training.records import HeldOutPoint, RunRecord, read_environment, write_record

ARMS = ("vanilla", "shift", "third")
RECIPE = {
    "name": "tiny",
    "title": "A tiny comparison",
    "data": {"kind": "induction", "vocab_size": 8, "length": 8, "held_out": 8},
    "model": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"steps": 4, "batch_size": 4, "warmup_steps": 1, "threads": 1},
    "reporting": {"log_every": 2, "evaluate_every": 2, "save_every": None, "tensorboard": False},
    "compare": {
        "baseline": "vanilla",
        "seeds": [0, 1, 2],
        "workers": 1,
        "threshold": 0.9,
        "arms": {
            "vanilla": {},
            "shift": {"model": {"mechanisms": {"kv_shift": {}}}},
            "third": {"model": {"norm_eps": 1e-3}},
        },
    },
}


def changed(values: dict, **sections: dict) -> dict:
    """A copy with fields of its sections replaced."""
    return values | {name: {**(values.get(name) or {}), **fields} for name, fields in sections.items()}


def written(folder: Path, values: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def one_table(recipes: list[Path], **fields) -> dict:
    """A table that trains these at cpu scale, and nothing at the others."""
    scales = {
        "cpu": {"recipes": [str(path) for path in recipes], "setting": "It is tiny."},
        "gpu": {"nothing": "It has no scale."},
        "paper": {"nothing": "It has no scale."},
    }
    return {"title": "A table", "source": "A paper", "says": "This is so.", "scales": scales} | fields


def put(tables: dict[str, dict], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, by name, in the place of the papers'. Clear `table.read_tables`'s cache afterwards."""
    for name, values in tables.items():
        place = folder / "tables" / f"{name}.yaml"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(yaml.safe_dump(values, sort_keys=False))
    # By this name the package has the function.
    module = importlib.import_module("headwater_lab.papers.table")
    monkeypatch.setattr(module, "TABLES", folder / "tables")
    module.read_tables.cache_clear()


@functools.cache
def here():
    return read_environment("cpu")


def record(
    seed: int = 0,
    results: list[float] | float = 1.0,
    *,
    status: str = "finished",
    steps: int = 100,
    lower: bool = True,
    flops: float = 1.0,
    parameters: int = 100,
    **more,
) -> RunRecord:
    """results: of the deciding metric, at equal distances up to the last step."""
    results = [results] if isinstance(results, (int, float)) else results
    measure = "loss" if lower else "accuracy"
    points = [
        HeldOutPoint(step=steps * (i + 1) // len(results), tokens=0, metrics={measure: value})
        for i, value in enumerate(results)
    ]
    options = (
        dict(
            name="r",
            recipe={"training": {"steps": steps, "learning_rate": 0.1}},
            identity="",
            data={},
            held_out=points,
        )
        | more
    )
    return RunRecord(
        seed=seed,
        status=status,
        metric=measure,
        lower_is_better=lower,
        parameters=parameters,
        cache_bytes_per_token=1,
        tokens=1,
        flops=flops,
        seconds=1.0,
        environment=here(),
        **options,
    )


@functools.cache
def tiny(threshold: float | None = None) -> Recipe:
    return parse(changed(RECIPE, compare={"threshold": threshold}), "tiny")


def runs(claims: list[dict], arms: dict[str, list[RunRecord]], tmp_path: Path, threshold: float | None = None) -> Runs:
    """Runs whose records are these, by arm."""
    path = tmp_path / "tiny.yaml"
    table = PaperTable.model_validate(one_table([path], claims=claims))
    names = {name for claim in table.claims for name in list_claimed_arms(claim)}
    places = {name: SizedArm(_with_seeds_of(arms.get(name), tiny(threshold)), path, name) for name in (*ARMS, *names)}
    found = Runs(table, places, tmp_path / "out")
    found.by_arm = {name: {one.seed: FinishedRun(one, tmp_path / name) for one in of} for name, of in arms.items()}
    return found


def _with_seeds_of(records: list[RunRecord] | None, recipe: Recipe) -> Recipe:
    seeds = [one.seed for one in records or []]
    changes = {"compare": recipe.compare.model_copy(update={"seeds": seeds})} if seeds else {}
    return recipe.model_copy(update=changes)


def save(
    recipe: Recipe, arm: str, size: str | None, seed: int, out: Path, loss: float, parameters: int, **more
) -> None:
    """A record where the run of a comparison would leave it."""
    trial = make_trial(recipe, arm, seed, out, size)
    one = record(seed, loss, parameters=parameters, identity=trial.recipe.identity, **more)
    one.experiment = trial.experiment
    trial.folder.mkdir(parents=True)
    write_record(one, trial.folder)
