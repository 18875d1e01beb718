"""Models in torchtitan: a step that is split over processes is the step of one process, or is refused."""

import json
import os
import re
from itertools import islice, product

import pytest
import torch

pytest.importorskip("torchtitan")
pytest.importorskip("triton", reason="torchtitan's models import it, without a GPU too")

from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import ConfigManager, ParallelismConfig

import processes
import titan_worker
from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.config.planner import plan_layers
from headwater.cost.counts import training_flops
from headwater.engines.split import narrow_plans
from headwater.integrations.torchtitan import export, spec
from headwater.integrations.torchtitan.limits import check_model
from headwater.integrations.torchtitan.model import Linears, TitanAdapter
from headwater.integrations.torchtitan.pipeline import check_cuts
from headwater.integrations.torchtitan.titan_checkpoints import ours_of, theirs_of
from headwater.mechanisms.contract import Mechanism
from headwater.plugins.mechanisms import MECHANISMS
from headwater.util.errors import HeadwaterError
from headwater_lab import train
from headwater_lab.recipe.recipe_files import load_recipe
from headwater_lab.titan import config_registry
from headwater_lab.titan.recipe_limits import CHOICES, FOLLOWED
from headwater_lab.titan.titan_data import RecipeLoader
from headwater_lab.training.optimizers import parameter_groups

SIZES = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
)  # fmt: skip
MODELS = {
    "vanilla": {},
    "gpt2": {"base": "gpt2", "tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "alibi": {"position": "alibi"},
    "kv_shift": {"mechanisms": {"kv_shift": {"queries": True, "window": 3}}, "num_key_value_heads": 2, "qk_norm": True},
    "value_residual": {"mechanisms": {"value_residual": {}}},
    "learnable_plus": {"mechanisms": {"value_residual": {"mode": "learnable_plus"}}},
    "dense": {"mechanisms": {"value_residual": {"mode": "dense"}}},
    "hidden": {"mechanisms": {"value_residual": {"target": "hidden", "mode": "learnable"}}},
    "probabilities": {"mechanisms": {"value_residual": {"target": "probabilities", "mode": "learnable"}}},
    "svformer": {"mechanisms": {"svformer": {}}},
    "skip_layer": {"mechanisms": {"skip_layer": {}, "kv_shift": {}}},
    "dense_former": {"mechanisms": {"dense_former": {}}},
    "neutreno": {"mechanisms": {"neutreno": {"learnable": True}}},
    "pattention": {"mechanisms": {"pattention": {}, "kv_shift": {}}},
    "mla": {"mechanisms": {"mla": {}}},
    "low_rank_kv": {"mechanisms": {"low_rank_kv": {}}},
}
# The models whose heads and tokens can be split, those whose parts differ for FSDP2, and those that a pipeline can cut.
SPLIT = [name for name in MODELS if name != "low_rank_kv"]
ALIKE = ("vanilla", "tied", "kv_shift", "learnable_plus", "pattention")
CUT = ("vanilla", "gpt2", "alibi", "kv_shift", "pattention")
RECIPE = """
name: small
data: {kind: induction, length: 16}
model: {num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2, mechanisms: {kv_shift: {}, value_residual: {}}}
training: {steps: 4, batch_size: 8, gradient_accumulation_steps: 2, learning_rate: 3.0e-3, warmup_steps: 2, threads: 1,
  max_grad_norm: 0.1}
reporting: {tensorboard: false, log_every: 1}
"""


def together(folder, jobs, world=2):
    """What came of the jobs, run one after another in `world` processes."""
    file = folder / f"{world}.json"
    file.write_text(json.dumps(jobs))
    file.with_name(f"{file.name}.meeting").unlink(missing_ok=True)  # of earlier jobs: processes would wait for theirs
    started = [
        processes.Command(
            file,
            rank,
            world,
            call=titan_worker.main,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
        )
        for rank in range(world)
    ]
    for one in started:
        _, err = one.communicate(timeout=1800)
        assert one.returncode == 0, err[-4000:]
    return json.loads(file.with_suffix(".made").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    (folder / "small.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def made(folder):
    """All that two processes do: starting them takes longer than the steps."""
    jobs = {
        f"{by} {name}": {"config": SIZES | fields, "by": [by]}
        for by in ("fsdp", "tp", "cp", "pp")
        for name, fields in MODELS.items()
        if name in {"fsdp": ALIKE, "pp": CUT}.get(by, SPLIT)
    }
    jobs["fsdp ac"] = {"config": SIZES | MODELS["kv_shift"], "by": ["fsdp", "ac"]}
    jobs["pp refused"] = {"config": SIZES | MODELS["value_residual"], "by": ["pp"]}
    jobs["tp refused"] = {"config": SIZES | {"num_key_value_heads": 1}, "by": ["tp"]}
    for kind, more in {"fsdp": [], "tp": ["--parallelism.tensor_parallel_degree", "2"]}.items():
        arguments = ["--config", str(folder / "small.yaml"), "--dump_folder", str(folder / kind), *more]
        jobs[f"{kind} trainer"] = {"arguments": [*arguments, "--checkpoint.interval", "2"]}
    arguments = ["--config", str(folder / "small.yaml"), "--dump_folder", str(folder / "resumed")]
    arguments += ["--checkpoint.initial_load_path", str(folder / "fsdp" / "checkpoint" / "step-2")]
    arguments += ["--checkpoint.no-initial_load_model_only", "--training.local_batch_size", "2"]
    jobs["resumed trainer"] = {"arguments": arguments}
    return together(folder, jobs)


@pytest.mark.parametrize(("by", "name"), [*product(("tp", "cp"), SPLIT), *product(["fsdp"], ALIKE)])
def test_a_split_step_is_the_whole_step(made, by, name):
    found = made[f"{by} {name}"]
    assert "error" not in found, found
    assert found["logits"] < 1e-12
    assert found["gradients"] < 1e-10
    assert found["split"] > 0


@pytest.mark.parametrize("name", CUT)
def test_a_pipelines_step_is_the_whole_step(made, name):
    found = made[f"pp {name}"]
    assert "error" not in found, found
    assert found["gradients"] < 1e-10


def test_activations_may_be_recomputed(made):
    assert made["fsdp ac"]["gradients"] < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("by", [("tp",), ("cp",), ("tp", "cp"), ("tp", "ac")])
def test_four_processes_share_a_step(folder, by):
    names = ("gpt2", "kv_shift", "skip_layer", "learnable_plus", "pattention")
    heads = {"num_key_value_heads": 4}  # tensor and context parallelism together divide them
    jobs = {name: {"config": SIZES | MODELS[name] | heads, "by": by} for name in names}
    for found in together(folder, jobs, world=4).values():
        assert found["gradients"] < 1e-10


@pytest.fixture(scope="module")
def ours(folder):
    train(folder / "small.yaml", out=folder / "ours")
    return HeadwaterForCausalLM.from_pretrained(sorted((folder / "ours").glob("checkpoints/*"))[-1])


@pytest.mark.parametrize("kind", ["fsdp", "tp", "resumed"])
def test_the_trainer_trains_what_we_train(made, folder, ours, kind):
    """torchtitan's own trainer, of a recipe's file: the same rows, optimizer, clipping and rates.

    resumed: after half of the steps, with half as many rows at once.
    """
    assert "error" not in made[f"{kind} trainer"], made[f"{kind} trainer"]
    checkpoint = f"{made[f'{kind} trainer']}/checkpoint/step-4"
    theirs = HeadwaterForCausalLM.from_pretrained(export(checkpoint, ours.config, folder / f"exported-{kind}"))
    new = HeadwaterForCausalLM(ours.config)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(theirs.get_parameter(name), parameter, rtol=1e-3, atol=1e-4)
        assert not torch.equal(new.get_parameter(name), parameter)
    with pytest.raises(HeadwaterError, match="another model"):
        export(checkpoint, HeadwaterConfig(**SIZES), folder / "other")
    with pytest.raises(HeadwaterError, match="step-N"):
        export(folder, ours.config, folder / "other")


def test_a_cut_between_a_layer_and_its_reader_is_refused(made):
    assert re.search("block .* reads what block 0 computed .*value_residual", made["pp refused"])
    both = HeadwaterConfig(**SIZES, mechanisms={"kv_shift": {}, "value_residual": {"layers": [1]}})
    check_cuts(both, [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "lm_head"]])
    with pytest.raises(HeadwaterError, match="block 1 reads what block 0"):
        check_cuts(both, [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "lm_head"]])


class Quiet(Mechanism):
    """It says nothing about heads."""


@pytest.mark.parametrize(
    ("fields", "parallelism", "message"),
    [
        ({}, {"spmd_backend": "spmd_types"}, "partial_dtensor"),
        ({}, {"expert_parallel_degree": 2}, "no experts"),
        ({}, {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}, "no-enable-sequence-parallel"),
        ({}, {"context_parallel_degree": 2, "context_parallel_load_balancer": "headtail"}, "load_balancer"),
        ({"position": "learned", "max_position_embeddings": 8}, {}, "learned positions"),
        ({"residual_dropout": 0.1}, {}, "residual_dropout"),
        ({"tie_word_embeddings": True}, {"pipeline_parallel_degree": 2}, "tied output head"),
        ({"num_key_value_heads": 2}, {"tensor_parallel_degree": 4}, "2 key/value heads"),
        ({"num_key_value_heads": 2}, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, "2 key/value heads"),
        ({"vocab_size": 33}, {"tensor_parallel_degree": 2}, "vocab_size 33"),
        ({"intermediate_size": 33}, {"tensor_parallel_degree": 2}, "intermediate_size 33"),
        (MODELS["low_rank_kv"], {"tensor_parallel_degree": 2}, "'low_rank_kv' does not declare.*per_head"),
        ({"mechanisms": {"quiet": {}}}, {"tensor_parallel_degree": 2}, "'quiet' does not declare.*per_head"),
        ({"mechanisms": {"quiet": {}}}, {"context_parallel_degree": 2}, "'quiet' does not declare.*per_head"),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_sentence(monkeypatch, fields, parallelism, message):
    monkeypatch.setitem(MECHANISMS.added, "quiet", Quiet)
    options = dict(
        spmd_backend="partial_dtensor", enable_sequence_parallel=False, context_parallel_load_balancer=None
    )  # fmt: skip
    check_model(HeadwaterConfig(**SIZES), ParallelismConfig(**options), 16)
    with pytest.raises(HeadwaterError, match=message):
        check_model(HeadwaterConfig(**SIZES | fields), ParallelismConfig(**options | parallelism), 16)


def test_heads_that_cannot_be_split_are_refused_in_the_trainer_too(made):
    assert "1 key/value heads" in made["tp refused"]


@pytest.mark.parametrize("name", MODELS)
def test_a_process_has_the_heads_that_its_own_heads_attend_to(name):
    fields = dict(SIZES | MODELS[name])
    config = (HeadwaterConfig.gpt2 if fields.pop("base", None) else HeadwaterConfig)(**fields)
    count = config.num_key_value_heads // 2
    halves = [narrow_plans(plan_layers(config), range(start, start + count)) for start in (0, count)]
    for plan, *parts in zip(plan_layers(config), *halves, strict=True):
        assert sum((part.attends for part in parts), ()) == plan.attends
        both = [head + start for part, start in zip(parts, (0, count), strict=True) for head in part.k_heads]
        assert tuple(both) == plan.k_heads
        for part in parts:
            assert sum(group.size for group in part.groups) == count


def test_names_go_both_ways_and_a_tied_head_is_left_out():
    for name in ("tied", "gpt2", "pattention", "learnable_plus"):
        fields = dict(SIZES | MODELS[name])
        config = (HeadwaterConfig.gpt2 if fields.pop("base", None) else HeadwaterConfig)(**fields)
        model = HeadwaterForCausalLM(config)
        described = spec(config)
        titan = described.model.build()
        adapter = described.state_dict_adapter(described.model, None)
        assert isinstance(adapter, TitanAdapter)
        names = [one for one in model.state_dict() if not (config.tie_word_embeddings and one == "lm_head.weight")]
        assert list(adapter.to_hf(titan.state_dict())) == names
        assert adapter.from_hf(adapter.to_hf(titan.state_dict())).keys() == titan.state_dict().keys()
        assert all(theirs_of(ours_of(one)) == one for one in titan.state_dict())
        titan.init_states()
        for one, tensor in model.state_dict().items():
            assert torch.equal(tensor, titan.state_dict()[theirs_of(one)]), one
        parameters, flops = described.model.get_nparams_and_flops(titan, 16)
        assert parameters == sum(one.numel() for one in model.parameters())
        assert flops == training_flops(config, 16)


def test_converters_find_the_linear_layers():
    assert len(vars(Linears(HeadwaterConfig(**SIZES)))) == 4 * 7 + 1
    assert list(vars(Linears(HeadwaterConfig(**SIZES, mechanisms={"pattention": {}})))) == ["lm_head"]
    pytest.importorskip("torchao")
    converter = Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"])
    model = spec(HeadwaterConfig(**SIZES, intermediate_size=32), converters=[converter]).model.build()
    kinds = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert len(kinds) == 4 * 7
    model.init_states()
    plain = HeadwaterForCausalLM(HeadwaterConfig(**SIZES, intermediate_size=32))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert 0 < float((model(ids) - plain(input_ids=ids).logits).abs().max()) < 0.05


def test_processes_read_the_rows_of_our_batches(folder):
    recipe = load_recipe(folder / "small.yaml")
    wanted = torch.cat([one["input_ids"] for one in islice(recipe.data.build().batches(recipe.seed, 8, 0), 3)])

    def rows(world, local):
        loaders = [
            RecipeLoader.Config(recipe=str(folder / "small.yaml")).build(
                dp_world_size=world, dp_rank=rank, seq_len=16, local_batch_size=local
            )
            for rank in range(world)
        ]
        for loader in loaders:  # stopped after a part of a batch, and resumed
            read = [options["input"] for options, _ in islice(loader, 1)]
            stopped, loader.row, loader.batch_index = loader.state_dict(), 0, 0
            loader.load_state_dict(stopped)
            yield from torch.cat([*read, *(inputs["input"] for inputs, _ in islice(loader, 24 // world // local - 1))])

    for world, local in ((1, 8), (1, 4), (2, 4), (2, 2)):
        assert sorted(row.tolist() for row in rows(world, local)) == sorted(wanted.tolist())
    with pytest.raises(HeadwaterError, match="local_batch_size"):
        list(rows(2, 3))


def test_rows_resume_on_other_processes_after_a_whole_batch(folder):
    def loader(world, local):
        sizes = dict(dp_world_size=world, dp_rank=0, seq_len=16, local_batch_size=local)
        return RecipeLoader.Config(recipe=str(folder / "small.yaml")).build(**sizes)

    def read(loader, count):
        return torch.cat([inputs["input"] for inputs, _ in islice(loader, count)])

    expected, split = read(loader(1, 8), 2)[8:], loader(2, 2)
    read(split, 2)
    resumed = loader(1, 4)
    resumed.load_state_dict(split.state_dict())
    assert torch.equal(read(resumed, 2), expected)
    read(split, 1)
    with pytest.raises(HeadwaterError, match="saved inside a batch"):
        resumed.load_state_dict(split.state_dict())


def test_a_recipe_gives_the_trainers_config(folder):
    config = ConfigManager().parse_args(["--module", "headwater_lab.titan", "--config", str(folder / "small.yaml")])
    assert config.training.global_batch_size == 16
    assert config.training.steps == 4
    model = config.model_spec.model.build()
    for name, _ in model.named_parameters():
        wrapped = re.sub(r"^(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", name)
        for one in (name, wrapped):
            assert sum(bool(re.search(group.pattern, one)) for group in config.optimizer.param_groups) == 1
    whole = HeadwaterForCausalLM(config.model_spec.model.headwater)
    ours = {parameter: group["weight_decay"] for group in parameter_groups(whole, 0.1) for parameter in group["params"]}
    for name, parameter in whole.named_parameters():
        (group,) = [one for one in config.optimizer.param_groups if re.search(one.pattern, theirs_of(name))]
        assert group.optimizer_kwargs["weight_decay"] == ours[parameter]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training: {optimizer: muon}", "training.optimizer=muon"),
        ("model: {mechanisms: {'test_titan_recipes:Hooked': {}}}", "does not call prepare_step"),
    ],
)
def test_a_recipe_that_the_trainer_cannot_follow_is_refused(tmp_path, change, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"name: other\ndata: {{kind: induction, length: 16}}\n{change}\n")
    with pytest.raises(HeadwaterError, match=message):
        getattr(config_registry, str(file))()


# A value for each setting that the trainer follows, unlike the default. torchrun and FSDP2 decide the first four.
OTHER_VALUES = {
    "training": {
        **{"devices": 2, "nodes": 2, "device": "cuda", "strategy": "fsdp"},
        **{"steps": 2000, "batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 2e-3},
        **{"scalar_learning_rate_multiplier": 2.0, "schedule": "constant", "warmup_steps": 3, "betas": [0.8, 0.9]},
        **{"min_learning_rate_ratio": 0.1, "epsilon": 1e-6, "weight_decay": 0.2, "weight_decay_on": "all"},
        **{"max_grad_norm": 2.0, "precision": "bf16-true", "attn_implementation": "eager"},
        **{"compile": not torch.cuda.is_available()},
        **{"gradient_checkpointing": True, "threads": 2, "timeout_minutes": 7},
    },
    "reporting": {"log_every": 3, "save_every": 7, "keep_checkpoints": 5, "tensorboard": False, "wandb": "mine"},
}


@pytest.mark.parametrize(
    ("section", "name"),
    [*product(["training"], (*FOLLOWED["training"], *CHOICES)), *product(["reporting"], FOLLOWED["reporting"])],
)
def test_the_trainer_follows_each_setting(tmp_path, monkeypatch, section, name):
    """A setting that the list names, and that changes nothing, would be ignored."""
    monkeypatch.setenv("WANDB_PROJECT", "")

    def configured(values):
        monkeypatch.setattr(torch, "set_num_threads", (threads := []).append)
        file = tmp_path / "recipe.yaml"
        recipe = {
            "name": "small",
            "data": {"kind": "induction", "length": 16},
            "model": {
                "num_hidden_layers": 1,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "mechanisms": {"kv_shift": {}},
            },
            section: values,
        }
        file.write_text(json.dumps(recipe))
        config = getattr(config_registry, str(file))()
        kernel = config.model_spec.model.headwater._attn_implementation
        return [kernel, *threads], config.to_dict() | {"model_spec": None}

    is_same = configured({}) == configured({name: OTHER_VALUES[section][name]})
    assert is_same == (name in ("devices", "nodes", "device", "strategy"))
    assert os.environ["WANDB_PROJECT"] == ("mine" if name == "wandb" else "")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-stream"])
def test_fsdp2_casts_the_weights_in_both_precisions_with_wide_ones(tmp_path, precision):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"name: other\ndata: {{kind: induction, length: 16}}\ntraining: {{precision: {precision}}}\n")
    training = getattr(config_registry, str(file))().training
    assert (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce) == (
        "float32",
        "bfloat16",
        "float32",
    )


def test_a_name_that_is_neither_preset_nor_recipe_is_refused():
    assert getattr(config_registry, "gpt2-124m")().model_spec.flavor == "gpt2-124m"
    with pytest.raises(HeadwaterError, match="no recipe"):
        config_registry.gpt2_124()
