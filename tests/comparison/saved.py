"""Records of runs that were never run, and recipes of such as take a second."""

from pathlib import Path

from headwater_lab.comparison.pool import Outcome, read_finished
from headwater_lab.comparison.trials import order_jobs
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import train
from headwater_lab.training.records import Experiment, HeldOutPoint, RunRecord, read_environment, read_record
from headwater_lab.util.endings import Diverged


def record(arm, seed, result, curve=(), metric="bits_per_byte", size=None, **changes):
    looks = [] if result is None else [*curve, result]
    values = dict(
        name=f"{arm}-{seed}",
        experiment=Experiment(name="e", title="E", arm=arm, baseline="base", size=size),
        seed=seed,
        status="finished",
        recipe={"training": {"steps": 1, "learning_rate": 0.1}},
        identity="",
        data={},
        metric=metric,
        lower_is_better=metric == "bits_per_byte",
        parameters=10,
        cache_bytes_per_token=4,
        tokens=1000,
        flops=1.0,
        seconds=2.0,
        held_out=[HeldOutPoint(step=10 * i, tokens=100 * i, metrics={metric: v}) for i, v in enumerate(looks, 1)],
        environment=read_environment("cpu"),
    )
    return RunRecord(**(values | changes))


def tiny(compare, **changes):
    """A comparison whose trials take a second together."""
    values = {
        "name": "tiny",
        "title": "A tiny comparison",
        "data": {"kind": "induction", "vocab_size": 8, "length": 12, "held_out": 64},
        "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "training": {
            "steps": 12,
            "batch_size": 4,
            "threads": 1,
            "warmup_steps": 2,
            "max_skipped_steps": 2,
            "max_grad_norm": None,
        },
        "reporting": {"log_every": 2, "save_every": None, "tensorboard": False},
        "compare": {"baseline": "base", "seeds": [0, 1], "arms": {"base": {}}} | compare,
    }
    for section, fields in changes.items():
        values[section] = values[section] | fields
    return parse(values, "test")


# A step of 1e30 makes every later one inf or nan.
DIVERGES = {"training": {"learning_rate": 1e30}}
SHIFT = {"model": {"mechanisms": {"kv_shift": {}}}}


class Here:
    """`run_trials` in this process, which saves starting others; `trained` lists what was not there already."""

    def __init__(self):
        self.trained = []

    def __call__(self, trials, workers=None, on_change=None):
        outcomes = {job.folder: self.run(job) for level in order_jobs(trials) for job in level}
        return [outcomes[job.folder] for trial in trials for job in trial.jobs]

    def run(self, job):
        if (there := read_finished(job)) is not None:
            return Outcome(job.label, there, there.error)
        self.trained.append((job.label, job.recipe.training.learning_rate))
        try:
            done = train(job.recipe, job.folder, resume=True, experiment=job.experiment, trunk=job.trunk)
            return Outcome(job.label, done)
        except Diverged as error:
            return Outcome(job.label, read_record(job.folder), str(error))


def changed_times(folder: Path):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("record.json"))}
