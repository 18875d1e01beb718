"""The record of a run: one JSON file with one schema, the only thing reports read. See docs/reference/records.md."""

import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headwater import __version__
from headwater.plugins.external_code import hash_code
from headwater.util.errors import HeadwaterError
from headwater.util.files import read_bytes, replace_text
from headwater.util.processor import describe_cpu

if TYPE_CHECKING:
    from headwater_lab.recipe.recipe import Recipe

SCHEMA_VERSION = 2
RECORD = "record.json"
# In the folder of a conversion: what it measured on all held-out data.
CONVERSION = "conversion.json"
# In the folder of a conversion, the run of its control; in its record, the metrics of that.
CONTROL = "control"
# Status of runs that have a result. The result of a diverged run is that it diverged.
ENDED = ("finished", "diverged")
# Relative tolerance of bits per byte over nats per token; rounding is a millionth of it.
SAME = 1e-6
# A count. Numbers with thousands of digits are rejected, because printing them raises an error.
RecordCount = Annotated[int, Field(ge=0, lt=2**63)]


class _Section(BaseModel):
    # Losses of a diverged run are not finite, but its record must still be readable.
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


class CurvePoint(_Section):
    """One point of the training curve."""

    step: RecordCount
    """Optimizer steps done."""
    tokens: RecordCount
    """Tokens seen."""
    loss: float
    """Training loss in nats per token, mean since the previous point."""
    learning_rate: float
    gradient_norm: float
    """Norm of the last step's gradient before clipping."""
    flops: float = 0.0
    """Training FLOPs spent."""


class HeldOutPoint(_Section):
    """One evaluation on held-out data."""

    step: RecordCount
    tokens: RecordCount
    flops: float = 0.0
    metrics: dict[str, float]
    """bits_per_byte and loss (nats per token) for text, for a domain as loss/NAME; accuracy and loss for synthetic
    tasks."""


class SpeedPoint(_Section):
    """Training speed since the previous point."""

    step: RecordCount
    tokens_per_second: float
    data_wait_fraction: float
    """Share of the time that steps waited for data."""
    mfu: float | None = None
    """The model's FLOPs as a share of the devices' peak (from data sheets, or measured)."""


class Notice(_Section):
    """A warning, which did not stop the run."""

    step: RecordCount
    message: str


class DocumentLoss(_Section):
    """The final loss of one held-out document."""

    id: str
    bytes: RecordCount
    tokens: RecordCount
    nats: float
    """Summed over the document."""


class Environment(_Section):
    """The environment of a run."""

    headwater: str
    python: str
    torch: str
    transformers: str
    platform: str
    device: str
    device_name: str | None = None
    """The GPU's or the processor's name."""
    threads: RecordCount
    world_size: RecordCount = 1
    compiled: bool | None = None
    """Whether the model ran under torch.compile."""
    attention: str | None = None
    """The attention kernel that ran, as in training.attn_implementation."""


class Recorded(_Section):
    """The day on which a record was written, and the code that wrote it."""

    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    """The day in UTC on which the run last wrote its record."""
    commit: str | None = None
    """The commit of the clone that headwater ran from, with `-dirty` after changes; None outside a clone."""
    source: Literal["run", "history"] = "run"
    """history: the run wrote neither, and both are of the commit that added its record to a repository."""


class SeedPlan(_Section):
    """A plan to add seeds until a comparison is decided (`compare.sequential`)."""

    seeds: list[RecordCount]
    """All seeds that may be trained, in order; their number is the maximum."""
    min_seeds: int = Field(ge=2, lt=2**63)
    """Seeds before the first look."""
    margin: float = Field(gt=0, allow_inf_nan=False)
    """The smallest difference of the deciding metric that matters."""
    arms: list[str] = Field(min_length=1)
    """Arms that are tested against the baseline; the error rate is divided among them."""
    baseline: str

    @model_validator(mode="after")
    def _check_seeds(self) -> Self:
        if len(self.seeds) < self.min_seeds:
            raise ValueError(f"seed_plan.seeds lists {len(self.seeds)}, fewer than min_seeds {self.min_seeds}")
        return self


class Experiment(_Section):
    """The comparison a run belongs to."""

    name: str
    title: str
    arm: str
    """Which of the compared variants this run is."""
    baseline: str
    """The arm the others are compared with."""
    threshold: float | Literal["baseline"] | None = None
    """The value of the deciding metric; the first step that reaches it is reported."""
    budget_arms: list[str] = []
    """Arms that are the baseline with other budgets."""
    projections: list[float] = []
    """FLOPs for which the fitted laws predict the losses."""
    size: str | None = None
    """Which of the compared sizes this run has."""
    phase: Literal["comparison", "tuning"] = "comparison"
    """tuning: the run was used to choose the arm's learning rate."""
    seed_plan: SeedPlan | None = None
    """Set if seeds are added until the comparison is decided."""


class Event(_Section):
    """One thing that was done to a model; a checkpoint's history.json lists them all, in order."""

    kind: Literal["trained", "grown", "shrunk", "retrofitted", "converted", "refitted"]
    tokens: RecordCount = 0
    """Training tokens of this event."""
    flops: float = 0.0
    """Training FLOPs of this event."""
    details: dict[str, Any] = {}
    """For training: name, identity, seed, steps and rows; otherwise the arguments and the measurements."""


class Origin(_Section):
    """The trained model that a run started from."""

    checkpoint: str
    tokens: RecordCount
    """Total tokens it had been trained on."""
    flops: float
    """Total training FLOPs spent on it."""
    history: list[Event]


class Trunk(_Section):
    """The run that this one branched off (docs/compare.md). Steps, tokens, FLOPs, time and points count from its
    start, as if this run had trained that far itself."""

    folder: str
    """The folder of that run, from this record's."""
    identity: str
    """The identity of that run."""
    step: RecordCount
    """The step at which this run branched off; only later ones cost anything."""


class StageRecord(_Section):
    """One stage of a run that has several."""

    name: str
    folder: str = Field(pattern=r"^(\.\./)?stages/\w[\w.-]*$")
    """The stage's own run, from the folder of the record: in its stages/, or next to it if trials share stages."""
    parameters: RecordCount
    steps: RecordCount
    tokens: RecordCount
    flops: float
    seconds: float
    total_tokens: RecordCount
    """Total tokens up to the end of this stage."""
    total_flops: float
    """Total training FLOPs up to the end of this stage."""
    result: float | None
    """The deciding metric at the end of the stage."""
    cache_bytes_per_token: RecordCount = 0
    """Bytes per token in the cache of the stage's model, in fp32."""


class _TrainingSettings(BaseModel):
    """The fields of `recipe.training` that readers of records need."""

    steps: RecordCount
    learning_rate: float
    devices: RecordCount = 1
    nodes: RecordCount = 1


class _Sections(BaseModel):
    """The sections of `recipe` that readers of records need."""

    training: _TrainingSettings
    model: dict[str, Any] = {}
    data: dict[str, Any] = {}


class RunRecord(_Section):
    """Everything known about one run."""

    schema_version: Literal[2] = 2
    name: str
    """The recipe's."""
    experiment: Experiment | None = None
    """Set by `headwater compare`."""
    origin: Origin | None = None
    """Set if the run started from a trained model, whose cost precedes this run's."""
    trunk: Trunk | None = None
    """Set if the run began with a checkpoint of a shorter one."""
    stages: list[StageRecord] = []
    """The stages that this record sums up; its points continue from one to the next."""
    seed: RecordCount
    """The recipe's."""
    status: Literal["running", "stopped", "finished", "diverged", "failed"]
    """stopped: on request, or given up; diverged: its loss, gradient or weights stopped being finite."""
    error: str | None = None
    """Why it failed or diverged."""
    recipe: dict[str, Any]
    """The resolved recipe, defaults included."""
    identity: str
    """A hash of the recipe's fields that decide the result. Records of equal identity are the same run."""
    code: dict[str, str] = {}
    """Code from outside that the recipe names: by name, the SHA-256 of its module's or package's statements."""
    data: dict[str, Any]
    """The data's source, tokenizer, hashes and sizes; of domains, what is left out since it is trained on."""
    metric: str
    """The deciding metric."""
    lower_is_better: bool
    """Whether a lower deciding metric is better."""
    parameters: RecordCount
    """Trainable parameters, tied ones once."""
    embedding_parameters: RecordCount = 0
    """The number of these in the embedding and an untied output head."""
    cache_bytes_per_token: RecordCount
    """Bytes each further token adds to the K/V cache of one sequence, in fp32."""
    unit: Literal["tokens", "images"] = "tokens"
    """What this record counts, here and in its points, wherever a field is named after tokens."""
    tokens: RecordCount
    """Training tokens seen, or images."""
    flops: float
    """Training FLOPs spent: matmuls and causal attention, three times the forward pass."""
    seconds: float
    """Time in training steps, without evaluation and saving."""
    data_wait_seconds: float = 0.0
    """The part of `seconds` in which steps waited for data."""
    skipped_steps: RecordCount = 0
    """Steps skipped because their loss or gradient was not finite."""
    data_order: str = ""
    """Hash of all training rows in their order: equal for runs that saw the same data, on any number of processes."""
    curve: list[CurvePoint] = []
    """Points of the training curve, every `reporting.log_every` steps."""
    held_out: list[HeldOutPoint] = []
    """Evaluations; of a run that starts from a trained model, the first is before its first step."""
    speed: list[SpeedPoint] = []
    """Points of the training speed."""
    notices: list[Notice] = []
    """Warnings, such as skipped steps and damaged checkpoints."""
    documents: list[DocumentLoss] = []
    """Held-out loss per document at the end; empty for synthetic tasks."""
    environment: Environment
    recorded: Recorded | None = None
    """When the record was written, and by which code."""

    def __repr__(self) -> str:
        return f"RunRecord(name={self.name!r}, seed={self.seed}, status={self.status!r}, result={self.result})"

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        if any(self.metric not in point.metrics for point in self.held_out):
            raise ValueError(f"an evaluation has no {self.metric!r}, the deciding metric")
        return self

    @property
    def domains(self) -> list[str]:
        """The domains that the last evaluation's loss averages; empty if the held-out data are not split."""
        metrics = self.held_out[-1].metrics if self.held_out else {}
        return [name.removeprefix("loss/") for name in metrics if name.startswith("loss/")]

    @property
    def tokens_per_second(self) -> float:
        """Mean training speed."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def changed_code(self) -> list[str]:
        """The names of the run's code from outside that has changed since, where the user trusts it."""
        return [name for name, digest in self.code.items() if hash_code(name).get(name, digest) != digest]

    def describe_difference(self, recipe: "Recipe") -> str:
        """Describe why this is no run of a recipe: other settings, or code that has changed; "" if it is."""
        if self.identity != recipe.identity:
            return "with other settings"
        return f"from before {self.changed_code[0]} was changed" if self.changed_code else ""

    @property
    def rows_key(self) -> tuple[Any, ...]:
        """What the rows that a run reads, and their order, follow from."""
        sections = [self.recipe.get(name) for name in ("data", "start", "stages")]
        batch_size = self.recipe.get("training", {}).get("batch_size")
        return repr((*sections, batch_size, self.tokens, self.seed)), self.data_hashes

    @property
    def data_hashes(self) -> str:
        """Hashes of the training data and of held-out domains, as JSON; equal for tasks, whose settings say all."""
        return json.dumps([self.data.get("sha256"), self.data.get("held_out_sha256")], sort_keys=True)

    @property
    def total_tokens(self) -> int:
        """Training tokens, including the starting model's."""
        return self.tokens + (self.origin.tokens if self.origin else 0)

    @property
    def total_flops(self) -> float:
        """Training FLOPs, including the starting model's."""
        return self.flops + (self.origin.flops if self.origin else 0.0)

    @property
    def arm(self) -> str:
        """The arm of a run; the name of one that belongs to no comparison."""
        return self.experiment.arm if self.experiment else self.name

    @property
    def size(self) -> str:
        """The size of a run; "" for one that has none."""
        return (self.experiment.size or "") if self.experiment else ""

    @property
    def has_diverged(self) -> bool:
        return self.status == "diverged" or (self.status == "finished" and not math.isfinite(self.result or 0.0))

    @property
    def result(self) -> float | None:
        """The deciding metric at the last evaluation."""
        return self.held_out[-1].metrics[self.metric] if self.held_out else None

    @property
    def best(self) -> HeldOutPoint | None:
        """The evaluation with the best deciding metric."""
        choose = min if self.lower_is_better else max
        return choose(self.held_out, key=lambda point: point.metrics[self.metric], default=None)


def same_tokens(records: Iterable[RunRecord]) -> bool:
    """Whether all were measured on the same tokens, so that their losses per token can be compared.

    Then bits per byte are a fixed multiple of the loss (in each domain), which differs for other tokenizers and texts.
    """
    evaluated = [record for record in records if record.held_out]
    domains = {tuple(sorted(record.domains)) for record in evaluated}
    if len(domains) != 1:
        return not domains
    metrics = [record.held_out[-1].metrics for record in evaluated]
    return all(_share_bits(metrics, suffix) for suffix in [f"/{name}" for name in domains.pop()] or [""])


def _share_bits(metrics: Sequence[Mapping[str, float]], suffix: str) -> bool:
    """Whether bits per byte are the same multiple of the loss in all that have both. suffix: of the names."""
    pairs = [(row.get(f"bits_per_byte{suffix}", math.nan), row.get(f"loss{suffix}", 0.0)) for row in metrics]
    ratios = [bits / nats for bits, nats in pairs if nats and math.isfinite(bits / nats)]
    return not ratios or max(ratios) - min(ratios) <= SAME * max(ratios)


def read_environment(
    device: str, world_size: int = 1, compiled: bool | None = None, attention: str | None = None
) -> Environment:
    """Describe this process. compiled, attention: how a run's model runs."""
    return Environment(
        headwater=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=platform.platform(),
        device=device,
        device_name=device_name(torch.device(device)),
        threads=torch.get_num_threads(),
        world_size=world_size,
        compiled=compiled,
        attention=attention,
    )


def list_recordings(records: Iterable[RunRecord]) -> tuple[list[str], list[str]]:
    """List the days and the commits of some records, in order of time and without repetitions."""
    recorded = sorted((record.recorded.date, record.recorded.commit or "") for record in records if record.recorded)
    dates, commits = zip(*recorded, strict=True) if recorded else ((), ())
    return list(dict.fromkeys(dates)), list(dict.fromkeys(filter(None, commits)))


def device_name(device: torch.device) -> str:
    """A GPU's name as its driver gives it, or the processor's."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else describe_cpu()


def changed_data(records: Iterable[RunRecord]) -> str:
    """Write a sentence if runs with the same data settings had different data, or read different rows with the same
    seed, or had different versions of code from outside; "" if none did.

    The data would be a part of their difference, and a mean over seeds would be one over texts. For runs with stages
    it is the data of the last one, which is all that they state.
    """
    by_rows: dict[Any, RunRecord] = {}
    by_code: dict[str, RunRecord] = {}
    by_settings: dict[tuple[str, str], RunRecord] = {}
    again = "Train them again in a new folder."
    for record in records:
        if (first := by_rows.setdefault(record.rows_key, record)).data_order != record.data_order:
            problem = f"Runs of one seed read different rows ({first.name}; {record.name})"
            return f"{problem}, so their results cannot be paired. {again}"
        for name, digest in record.code.items():
            if (first := by_code.setdefault(name, record)).code[name] != digest:
                problem = f"Runs had different versions of {name} ({first.name}; {record.name})"
                return f"{problem}, so their results cannot be compared. {again}"
        changes = [stage["data"] for stage in record.recipe.get("stages", ()) if stage.get("data")]
        settings = json.dumps([record.recipe.get("data"), *changes], sort_keys=True)
        key = settings, str(record.data.get("source"))
        if (first := by_settings.setdefault(key, record)).data_hashes != record.data_hashes:
            python = [f", Python {run.data['python']}" if "python" in run.data else "" for run in (first, record)]
            names = f"{first.name}{python[0]}; {record.name}{python[1]}"
            problem = f"Runs with the same data settings had different data ({names})"
            return f"{problem}, so their results cannot be compared. {again}"
    return ""


def write_record(record: RunRecord, folder: Path) -> None:
    """Write `folder`/record.json atomically."""
    replace_text(folder / RECORD, record.model_dump_json(indent=1))


def usable_record(record: RunRecord) -> RunRecord:
    """Return the record, if its recipe has what is read from it. Raises pydantic's `ValidationError`."""
    _Sections.model_validate(record.recipe)
    return record


def find_record(path: Path) -> RunRecord | None:
    """Read a record as `read_record`; None if there is none that is usable."""
    with suppress(HeadwaterError):
        return read_record(path)
    return None


def read_record(path: Path) -> RunRecord:
    """Read a record from a run's folder or the file itself. Raises `HeadwaterError` for any problem with it."""
    path = path / RECORD if path.is_dir() and path.name != RECORD else path
    try:
        return usable_record(RunRecord.model_validate_json(read_bytes(path)))
    except FileNotFoundError:
        raise HeadwaterError(f"There is no run record at {str(path)!r}.") from None
    except OSError as error:
        raise HeadwaterError(f"The run record {str(path)!r} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        if detail["loc"] == ("schema_version",):
            raise HeadwaterError(
                f"{str(path)!r} has schema version {detail['input']}, and this version of headwater reads only "
                f"{SCHEMA_VERSION}; train the run again."
            ) from error
        field = ".".join(map(str, detail["loc"]))
        problem = f"{field}: {detail['msg']}" if field else detail["msg"].removeprefix("Value error, ")
        raise HeadwaterError(f"{str(path)!r} is not a run record, or it is damaged: {problem}.") from error


def list_records(folder: Path, tell: Callable[[str], None] | None = None) -> list[Path]:
    """List all records below `folder`, sorted.

    tell: called with a message for each unreadable folder; without it, such a folder raises `HeadwaterError`.
    """

    def report_folder(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):  # the folder never existed, or was removed meanwhile
            return
        problem = f"The folder {error.filename!r} cannot be read: {error.strerror}."
        if tell is None:
            raise HeadwaterError(problem)
        tell(problem)

    walked = os.walk(folder, onerror=report_folder)
    return sorted(Path(path, RECORD) for path, folders, files in walked if RECORD in files or RECORD in folders)
