"""Comparisons: records, and a report made of them alone."""

import json
import re

import pytest
from PIL import Image

from headwater.util.errors import HeadwaterError
from headwater_lab.comparison.trials import list_trials
from headwater_lab.recipe.recipe import parse
from headwater_lab.reports import read_comparisons, write_report
from headwater_lab.training.loop import train
from headwater_lab.training.records import read_record


@pytest.fixture
def recipe():
    return parse(
        {
            "name": "tiny",
            "title": "A tiny comparison",
            "data": {"kind": "induction", "vocab_size": 8, "length": 12, "held_out": 64},
            "model": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
            "training": {"steps": 20, "batch_size": 4, "threads": 1},
            "reporting": {"log_every": 5, "evaluate_every": 5, "save_every": None, "tensorboard": False},
            "compare": {
                "baseline": "vanilla",
                "seeds": [0, 1],
                "threshold": 0.2,
                "arms": {"vanilla": {}, "KV shift": {"model": {"mechanisms": {"kv_shift": {}}}}},
            },
        },
        "test",
    )


@pytest.mark.slow
def test_a_report_of_trials_needs_no_network(recipe, tmp_path):
    for trial in list_trials(recipe, tmp_path):
        for job in trial.jobs:
            train(job.recipe, job.folder, experiment=job.experiment)

    page = write_report(tmp_path)
    html = page.read_text()
    assert "A tiny comparison" in html
    own = re.sub(r"(?s)<script>.*?</script>", "", html)
    assert not re.search(r'(?:src|href)="(?!data:|#)', own), "the page must need no network"
    for summary in read_comparisons(tmp_path)[0].summaries:
        assert f"{summary.mean:.3f}" in html
    with Image.open(tmp_path / "figures" / "tiny-curves.png") as picture:
        assert picture.width > 800
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 10, "an empty picture"


def test_records_of_another_schema_are_refused(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(HeadwaterError, match=r"has schema version 99, .* reads only 2"):
        read_record(tmp_path)
