"""Run files: one TOML file describes one run. `docs/run-file.md` lists every key.

Reading a run file needs no torch. Unknown keys and impossible values are ConfigErrors that name the file, the key, the
value and, for a misspelt key, the nearest known one. The resolved configuration, with defaults, is saved with the run.
"""

import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_serializer, model_validator

from diloco.errors import ConfigError, without_key_lines
from diloco.tables import Table, number_ranges, read_text, read_toml, validate, write_toml

LEARNERS_OWN = ("inner", "schedule", "train", "evaluate", "checkpoint", "syncer", "track")
"""The tables that `[learner.NAME]` may override."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

MAX_GROUP_BYTES, GROUP_HEADER_BYTES, MAX_TASK = 5 << 20, 1 << 16, 64
"""Of one group of reinforcement learning, of what it has beside its tokens at most, and characters of a task's name."""

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The number of a mixture's experts in configurations of transformers: one of these keys."""

AUTO = "auto"
"""The value of `train.holds_experts` with which the syncer deals them."""

MUON_PRESET = "MuLoCo"
"""The preset whose default inner optimizer is Muon."""


class RunTable(Table):
    """The run's name, its length and its planned number of learners."""

    name: str = Field(pattern=NAME)
    tokens: int = Field(gt=0, le=2**53)  # budget of all learners together; ends the run
    steps: int | None = Field(default=None, gt=0, le=2**53)  # ends a learner, unless the tokens end first
    seed: int = Field(default=0, ge=0, lt=2**32)
    learners: int = Field(default=1, ge=1)
    dir: Path | None = None  # default runs/<name>
    arithmetic: Literal["auto", "compiled", "torch"] = "auto"  # of rounds; the same bits


class ModelTable(BaseModel):
    """The causal language model; further keys are settings of its transformers configuration."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    type: str = "llama"
    config: Path | None = None  # a transformers config.json, instead of `type`
    weights: str | None = None  # a .safetensors file, a directory written by save_pretrained, or a hub name
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that belong to the model's own configuration."""
        return dict(self.model_extra or {})

    @property
    def num_experts(self) -> int | None:
        """The experts of a mixture, where the table or the model's config.json has their number."""
        path = self.config or (None if self.weights is None else Path(self.weights) / "config.json")
        known: Any = {}
        if path is not None and path.is_file():
            with suppress(OSError, ValueError):  # reported when the model is built
                known = json.loads(path.read_text(encoding="utf-8"))
        values = {**(known if isinstance(known, dict) else {}), **self.settings}
        return next((values[key] for key in NUM_EXPERTS if isinstance(values.get(key), int)), None)


class DataTable(Table):
    """The source of the tokens, and the held-out part."""

    kind: Literal["stdlib", "text", "tokens", "huggingface"] = "stdlib"
    sequence_length: int = Field(default=64, ge=1)
    deal: Literal["shards", "leases"] = "shards"  # a fixed part for each learner, or ranges leased by the syncer
    lease_steps: int | None = Field(default=None, gt=0)  # inner steps of a lease; default: 16
    shared_fraction: float = Field(default=0.0, ge=0, le=1)  # shards: share of every pass that all learners read
    stream: bool = False  # read texts during training, instead of before
    shuffle_sequences: int = Field(default=1024, ge=1)  # stream: size of a shard's shuffle buffer
    paths: tuple[Path, ...] = ()  # or patterns; text: files with a known suffix; tokens: .bin or .npy files
    directory: Path | None = None  # tokens: a directory written by `diloco tokenize`
    held_out_paths: tuple[Path, ...] = ()
    held_out_fraction: float = Field(default=0.05, gt=0, lt=1)  # at the end; without held-out paths or split
    held_out_documents: int = Field(default=256, gt=0)  # stream: the first ones; without held-out paths or split
    tokenizer: str = "bytes"  # or a tokenizer.json, a directory or a hub name
    dtype: Literal["uint16", "uint32"] = "uint16"  # of .bin files
    vocab_size: int | None = Field(default=None, gt=0)  # of token files
    dataset: str | None = None  # huggingface: a directory written by save_to_disk, or a name for load_dataset
    dataset_config: str | None = None
    split: str = "train"
    held_out_split: str | None = None
    text_column: str = "text"

    @model_validator(mode="after")
    def _sources(self) -> Self:
        kind, is_leased, is_named = self.kind, self.deal == "leases", bool(self.held_out_paths or self.held_out_split)
        of_kind = f'with kind = "{kind}"'
        self.refuse_unused(
            ("lease_steps", is_leased, 'without deal = "leases"'),
            ("shared_fraction", not is_leased, 'with deal = "leases", which gives each sequence to one learner'),
            ("stream", kind in ("text", "huggingface"), f"{of_kind}, which has no texts to read"),
            ("held_out_fraction", not self.stream, "with stream = true"),
            ("shuffle_sequences", self.stream, "without stream = true"),
            ("held_out_documents", self.stream, "without stream = true"),
            ("held_out_documents", not is_named, "with held-out paths or a held-out split"),
            ("directory", kind == "tokens", of_kind),
            *((key, kind in ("text", "tokens"), of_kind) for key in ("paths", "held_out_paths")),
            *((key, kind == "huggingface", of_kind) for key in ("dataset", "dataset_config", "held_out_split")),
            ("tokenizer", kind in ("text", "huggingface"), of_kind),
            *((key, kind == "tokens", of_kind) for key in ("vocab_size", "dtype")),
            *(
                (key, self.directory is None, "beside directory, which determines all sources")
                for key in ("paths", "held_out_paths", "vocab_size", "dtype")
            ),
        )
        if kind in ("text", "tokens") and not self.paths and self.directory is None:
            also = ", or the directory that `diloco tokenize` wrote" if kind == "tokens" else ""
            raise ValueError(f'kind = "{kind}" needs paths = [...]{also}')
        if kind == "huggingface" and self.dataset is None:
            raise ValueError('kind = "huggingface" needs dataset = "..."')
        if kind == "tokens" and self.vocab_size is None and self.directory is None:
            raise ValueError('kind = "tokens" needs vocab_size')
        if self.stream and is_leased:
            raise ValueError(
                'deal = "leases" needs the number of sequences, which a stream does not know; set deal = "shards", or '
                "make token shards with `diloco tokenize`"
            )
        return self


class InnerTable(Table):
    """The inner optimizer: AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others."""

    optimizer: Literal["adamw", "muon"] | None = None  # default: adamw, or muon for the preset MuLoCo
    lr: float = Field(default=4e-3, gt=0)  # the peak
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    eps: float = Field(default=1e-8, gt=0)  # AdamW's
    weight_decay: float = Field(default=0.1, ge=0)  # of matrices
    muon_lr: float | None = Field(default=None, gt=0)  # Muon's own peak; default: lr
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)  # Nesterov's
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"  # torch's adjust_lr_fn
    muon_steps: int = Field(default=5, gt=0, lt=100)  # Newton-Schulz iterations


class ScheduleTable(Table):
    """The inner learning rate as a function of a learner's own steps."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(default=50, ge=0)  # default: a tenth of the steps where there are no more than 50
    steps: int | None = Field(default=None, gt=0)  # default: run.tokens / tokens per full step
    final_fraction: float = Field(default=0.1, ge=0, le=1)  # of the peak, at the end and afterwards
    decay_fraction: float = Field(default=0.2, gt=0, le=1)  # wsd: fraction of the steps with decay


class TrainTable(Table):
    """The inner loop."""

    # sequences per step over all planned learners; default: the least multiple of learners x accumulate from 16 on
    global_batch: int = Field(default=16, gt=0)
    batch: int | None = Field(
        default=None, gt=0
    )  # sequences per step of this learner; default: global_batch / learners
    trains: tuple[str, ...] = ()  # name patterns of the tensors that this learner trains; none: all
    # the experts of a mixture that this learner trains, such as "0-15" or "0,3,8-11"; default: all
    trains_experts: str | None = None
    # those that this learner holds, of which it trains all; "auto": the syncer deals them; default: all
    holds_experts: str | None = None
    overlap: int | None = Field(default=None, ge=0)  # overlap in inner steps of this learner; default: the method's
    # ranks of this learner that share the experts of a mixture, over which the rest is sharded; default: no sharding
    expert_parallel: int | None = Field(default=None, ge=2)
    accumulate: int = Field(default=1, gt=0)  # micro-batches per step
    rewarm_steps: int = Field(default=5, ge=0)  # warmup of the lr for a joiner without a checkpoint
    # step of a router's balancing bias (DeepSeek-V3), at each inner step; default: 0.001; 0: it stays
    bias_speed: float | None = Field(default=None, ge=0)
    clip: float | None = Field(default=1.0, gt=0)  # largest norm of the gradient
    device: Literal["auto", "cpu", "cuda"] = "auto"
    autocast: Literal["auto", "bfloat16", "off"] = "auto"  # auto: bfloat16 on CUDA where supported
    threads: int | None = Field(default=None, gt=0)  # default: torch's choice
    flush_denormals: bool = False  # to zero, in the inner steps only
    log_every_s: float = Field(default=60.0, gt=0)  # interval of progress lines without a terminal
    log_every_steps: int = Field(default=10, gt=0)  # interval of step events

    @model_validator(mode="after")
    def _names_experts(self) -> Self:
        for key in ("trains_experts", "holds_experts"):
            text = getattr(self, key)
            try:
                number_ranges(key, "0" if text is None or (key, text) == ("holds_experts", AUTO) else text)
            except ConfigError as error:
                raise ValueError(str(error).removesuffix(".")) from error
        self.refuse_unused(
            *(
                (key, self.holds_experts is None, "beside holds_experts: a learner trains what it holds, unsharded")
                for key in ("trains_experts", "expert_parallel")
            )
        )
        return self


class WarmStartTable(Table):
    """The steps before the learners join: one model, at the full batch of the run."""

    steps: int = Field(default=0, ge=0)  # counted in the run and its schedule; the run is initialised after them
    checkpoint: Path | None = None  # begin with this checkpoint's global model, inner optimizer, step and tokens


class EvaluateTable(Table):
    """Evaluation of the global model on the held-out part."""

    every_steps: int = Field(default=0, ge=0)  # 0: only at the end
    sequences: int = Field(default=256, gt=0)
    sample_bytes: int = Field(default=200, ge=0)  # length of text generated at the end, for byte models
    prompt: str = "def "


class CheckpointTable(Table):
    """Local checkpoints of a learner."""

    every_steps: int = Field(default=0, ge=0)  # 0: only if a signal or a refusal stops training
    keep: int = Field(default=2, ge=1)


class PoolTable(Table):
    """The number of learners that train at a time: a schedule over the inner steps of the run, up to run.learners."""

    schedule: str  # a `PoolSchedule` of protocol.steering
    begin_step: int | None = Field(default=None, ge=0)  # default: warm_start.steps
    end_step: int | None = Field(default=None, gt=0)  # default: run.steps, or the end of the learning-rate schedule


class SyncerTable(Table):
    """The syncer's address, keys, state and deadlines."""

    address: str = "127.0.0.1:7700"  # comma-separated for a run with a standby
    # this machine's directory of keys, made by `diloco keys`; for a learner also a line of keys
    keys: str | None = Field(default=None, min_length=1, repr=False)
    insecure: bool = False
    state_dir: Path | None = None  # default <run.dir>/syncer
    metrics_port: int | None = Field(default=None, ge=0, le=65535)  # loopback port; 0: any free port
    page: bool | None = None  # serve the live page; default: only if the syncer's address is loopback
    page_port: int = Field(default=0, ge=0, le=65535)  # loopback port of the live page; 0: any free port
    spool_bytes: int = Field(default=1 << 30, ge=0)  # memory for contributions; beyond it they are spooled to disk
    threads: int | None = Field(default=None, ge=1)  # that close a round; default: one for each core
    journal: bool = True  # record the events with which `diloco replay` repeats all decisions
    record_contributions: bool = False  # also record every contribution, to repeat all merges
    store: str | None = Field(default=None, min_length=1)  # a directory, or a bucket's URL; default: state_dir
    keep_s: float = Field(default=600.0, ge=60)  # objects stay for this long after they were superseded
    standby: bool = False  # wait while another syncer serves the run from this bucket, and take over
    lease_s: float = Field(default=10.0, ge=3)  # a standby takes over after this long without a sign of the other one
    hold: bool = False  # keep the newest model in memory as a standby, to take over sooner
    copy_to: str | None = Field(default=None, min_length=1)  # a directory or a bucket that gets copies of the store
    copy_every_s: float = Field(default=3600.0, gt=0)
    lost_steps: float = Field(default=20.0, gt=0)  # silence in own steps of the learner, between floor and cap
    lost_floor_s: float = Field(default=6.0, gt=0)
    lost_cap_s: float = Field(default=120.0, gt=0)
    reconnect_steps: float = Field(default=5.0, gt=0)  # time without a connection, in own steps of the learner
    reconnect_floor_s: float = Field(default=3.0, gt=0)
    stalled_steps: float = Field(default=50.0, gt=0)  # time without a step, in own steps of the learner
    stalled_floor_s: float = Field(default=60.0, gt=0)
    stalled_cap_s: float = Field(default=3600.0, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for kind in ("lost", "stalled"):
            cap, floor = getattr(self, f"{kind}_cap_s"), getattr(self, f"{kind}_floor_s")
            if cap < floor:
                raise ValueError(f"{kind}_cap_s = {cap} is below {kind}_floor_s = {floor}; raise the cap")
        if self.keys is not None and self.insecure:
            raise ValueError("insecure and keys contradict each other; drop one of them")
        self.refuse_unused(
            ("record_contributions", self.journal, "with journal = false"),
            ("hold", self.standby, "without standby = true"),
            ("copy_every_s", self.copy_to is not None, "without copy_to"),
        )
        return self

    @field_serializer("keys")
    def _without_line(self, keys: str | None) -> str | None:
        """Leave a line of keys, which is a secret, out of the saved configuration."""
        return None if keys is not None and without_key_lines(keys) != keys else keys


class TrackTable(Table):
    """The trackers to which the syncer and every learner log."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    project: str = Field(default="diloco", min_length=1)  # W&B's and trackio's project, MLflow's experiment
    name: str | None = Field(default=None, pattern=NAME)  # default: run.name; each process appends its own
    folder: Path | None = None  # of the trackers' local files; default <run.dir>/tracking
    wandb_mode: Literal["online", "offline"] | None = None  # default: online
    mlflow_tracking_uri: str | None = Field(default=None, min_length=1)  # default: a database in the folder

    @model_validator(mode="after")
    def _have_effect(self) -> Self:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers = {list(self.trackers)} names a tracker twice; name each once")
        if self.trackers:  # in [learner.NAME.track], an empty list switches the trackers of [track] off
            self.refuse_unused(
                ("wandb_mode", "wandb" in self.trackers, 'without "wandb" among the trackers'),
                ("mlflow_tracking_uri", "mlflow" in self.trackers, 'without "mlflow" among the trackers'),
            )
        return self


class RlTable(Table):
    """Reinforcement learning: groups of completions, and the loss of the trainers."""

    tokenizer: str = "bytes"  # or a tokenizer.json, a directory or a hub name
    group_size: int = Field(default=8, ge=2, le=1024)  # completions of a prompt
    groups_per_step: int = Field(default=32, ge=1, le=4096)  # of one trainer
    max_prompt_tokens: int = Field(default=64, ge=1)  # a longer prompt is refused
    max_tokens: int = Field(default=16, ge=1)  # of a completion
    temperature: float = Field(default=1.0, gt=0)
    max_staleness: int = Field(default=4, ge=0, le=100)  # versions of a fragment, after which a group is dropped
    queue: int | None = Field(default=None, gt=0)  # groups generated ahead; default: 4 steps of all planned trainers
    reward: Literal["workers", "inline"] = "workers"  # inline: rollout workers score what they generate
    score_timeout_s: float = Field(default=10.0, gt=0)  # of one group, or prompt
    score_memory_mb: int = Field(default=2048, ge=64)
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"  # what it is a mean over; gives the defaults of kl and scale
    kl: float | None = Field(default=None, ge=0)  # weight of the divergence from the run's first model
    scale: Literal["group", "none"] | None = None  # group: divide advantages by the standard deviation of the group
    importance_cap: float = Field(default=2.0, ge=0)  # of trainer's over rollout's probability; 0: no correction
    supervised_steps: int = Field(default=0, ge=0)  # on answers, before the run has a model
    supervised_lr: float = Field(default=1e-3, gt=0)
    supervised_batch: int = Field(default=64, ge=1)


class TaskTable(Table):
    """A task: where prompts come from, and how completions are scored."""

    # reasoning-gym:NAME, verifiers:NAME, or a module, or module:object, with sample(seed) and score(prompt, completion)
    source: str
    template: str = "{question}"  # of reasoning-gym: the prompt, from the question and its metadata
    exact: bool = True  # of reasoning-gym: 1 for the answer, 0 for all else; false: its partial scores
    settings: dict[str, Any] = Field(default_factory=dict)  # of the task of reasoning-gym, or the taskset of verifiers
    held_out: float = Field(default=0.0, ge=0, lt=1)  # fraction of the prompts that is never trained on
    reward_model: str | None = None  # a sequence classifier, whose logit is the score


class EngineTable(Table):
    """What generates the completions of a rollout worker."""

    kind: Literal["transformers", "openai", "vllm"] = "transformers"
    url: str | None = None  # of a server with the OpenAI interface
    folder: Path | None = None  # where the server reads new weights
    prompts: int = Field(default=8, ge=1, le=1024)  # generated at once
    threads: int | None = Field(default=None, gt=0)
    device: str = "cpu"

    @model_validator(mode="after")
    def _server(self) -> Self:
        has_server = self.kind != "transformers"
        if has_server and (self.url is None or self.folder is None):
            raise ValueError(f'kind = "{self.kind}" needs url and folder')
        self.refuse_unused(*((key, has_server, 'with kind = "transformers"') for key in ("url", "folder")))
        return self


class RunConfig(Table):
    """A run file."""

    run: RunTable
    model: ModelTable = Field(default_factory=ModelTable)
    data: DataTable = Field(default_factory=DataTable)
    inner: InnerTable = Field(default_factory=InnerTable)
    schedule: ScheduleTable = Field(default_factory=ScheduleTable)
    train: TrainTable = Field(default_factory=TrainTable)
    warm_start: WarmStartTable = Field(default_factory=WarmStartTable)
    evaluate: EvaluateTable = Field(default_factory=EvaluateTable)
    checkpoint: CheckpointTable = Field(default_factory=CheckpointTable)
    method: dict[str, Any] = Field(default_factory=lambda: {"preset": "StreamingDiLoCo"})
    pool: PoolTable | None = None
    syncer: SyncerTable = Field(default_factory=SyncerTable)
    track: TrackTable = Field(default_factory=TrackTable)
    rl: RlTable | None = None
    task: dict[str, TaskTable] = Field(default_factory=dict)  # by name
    engine: EngineTable | None = None
    learner: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)  # overrides by the learner's name
    _num_dealt: int = PrivateAttr(0)

    @model_validator(mode="after")
    def _defaults_that_fit(self) -> Self:
        """A loop of one's own has no use for [train] and [schedule], so their defaults must not refuse its run."""
        config = self
        if "global_batch" not in self.train.model_fields_set:
            parts = self.run.learners * self.train.accumulate
            config = config._with("train", global_batch=-(-self.train.global_batch // parts) * parts)
        if "warmup_steps" not in self.schedule.model_fields_set and self.schedule.warmup_steps >= config.schedule_steps:
            config = config._with("schedule", warmup_steps=config.schedule_steps // 10)
        return config

    def _with(self, table: str, **values: int) -> Self:
        return self.model_copy(update={table: getattr(self, table).model_copy(update=values)})

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        accumulate, schedule_steps = self.train.accumulate, self.schedule_steps
        parts = self.run.learners * accumulate
        if self.train.global_batch % parts:
            raise ValueError(
                f"train.global_batch = {self.train.global_batch} must be a multiple of run.learners x train.accumulate "
                f"= {parts}"
            )
        if self.learner_batch % accumulate:
            raise ValueError(f"train.batch = {self.train.batch} must be a multiple of train.accumulate = {accumulate}")
        if self.inner_optimizer == "adamw":
            for key, field in InnerTable.model_fields.items():
                if key.startswith("muon_") and getattr(self.inner, key) != field.default:
                    raise ValueError(f'inner.{key} has no effect with AdamW; set inner.optimizer = "muon" or drop it')
        warmup_steps = self.schedule.warmup_steps
        if warmup_steps >= schedule_steps:
            raise ValueError(
                f"schedule.warmup_steps = {warmup_steps} must be below the schedule's {schedule_steps} steps, which "
                f"run.tokens = {self.run.tokens} gives at {self.tokens_per_full_step} tokens a step; "
                f"set schedule.warmup_steps = {schedule_steps // 10}, or train for longer"
                if self.schedule.steps is None
                else f"schedule.warmup_steps = {warmup_steps} must be below schedule.steps = {schedule_steps}; "
                f"set schedule.warmup_steps = {schedule_steps // 10}"
            )
        if self.warm_start.steps * self.tokens_per_full_step >= self.run.tokens:
            raise ValueError(f"warm_start.steps = {self.warm_start.steps} leaves nothing of run.tokens to the learners")
        if self.run.steps is not None and self.warm_start.steps >= self.run.steps:
            raise ValueError(f"warm_start.steps = {self.warm_start.steps} leaves nothing of run.steps to the learners")
        if (self.rl is None) != (not self.task):
            raise ValueError("[rl] and [task.NAME] belong together; write both, or neither")
        if self.rl is not None and self.rl.queue is not None and self.rl.queue < self.rl.groups_per_step:
            raise ValueError(
                f"rl.queue = {self.rl.queue} is below rl.groups_per_step = {self.rl.groups_per_step}, which a trainer "
                "leases at once; raise it"
            )
        most = MAX_GROUP_BYTES - GROUP_HEADER_BYTES
        if (rl := self.rl) is not None and 8 * rl.group_size * rl.max_tokens + 4 * rl.max_prompt_tokens > most:
            raise ValueError(
                f"a group of rl.group_size = {rl.group_size} completions of rl.max_tokens = {rl.max_tokens} tokens, 8 "
                f"bytes each, and a prompt of rl.max_prompt_tokens = {rl.max_prompt_tokens} are larger than {most} "
                "bytes; lower one of them"
            )
        if any(len(name) > MAX_TASK or not name.isprintable() for name in self.task):
            raise ValueError(f"the name of a table [task.NAME] has up to {MAX_TASK} printable characters")
        if self.engine is not None and self.rl is None:
            raise ValueError("[engine] has no effect without [rl]; drop it")
        if self.data.shared_fraction and self.run.learners == 1:
            raise ValueError("data.shared_fraction has no effect with run.learners = 1; drop it")
        return self

    @property
    def pool_values(self) -> dict[str, Any] | None:
        """The fields of the run's `protocol.steering.Pool`; None: it has no pool."""
        if self.pool is None:
            return None
        begin, end = self.pool.begin_step, self.pool.end_step
        return {
            "schedule": self.pool.schedule,
            "learners": self.run.learners,
            "begin_step": self.warm_start.steps if begin is None else begin,
            "end_step": end or self.run.steps or self.schedule_steps,
        }

    @property
    def dir(self) -> Path:
        """Directory of all files of the run."""
        return self.run.dir if self.run.dir is not None else Path("runs") / self.run.name

    @property
    def state_dir(self) -> Path:
        """Directory of the syncer's state."""
        return self.syncer.state_dir if self.syncer.state_dir is not None else self.dir / "syncer"

    @property
    def store(self) -> str:
        """Where the objects of the run are: a directory, or the URL of a bucket."""
        return self.syncer.store or str(self.state_dir)

    @property
    def inner_optimizer(self) -> Literal["adamw", "muon"]:
        """The inner optimizer of the run file, or the default of its method."""
        if self.inner.optimizer is not None:
            return self.inner.optimizer
        return "muon" if self.method.get("preset") == MUON_PRESET else "adamw"

    @property
    def num_dealt(self) -> int:
        """Planned learners that hold the experts that the syncer deals them."""
        return self._num_dealt or self.run.learners

    @property
    def share(self) -> int:
        """Default number of sequences per step of a planned learner."""
        return self.train.global_batch // self.run.learners

    @property
    def learner_batch(self) -> int:
        """Sequences per step of this learner."""
        return self.share if self.train.batch is None else self.train.batch

    @property
    def tokens_per_full_step(self) -> int:
        """Tokens in one step over all planned learners."""
        return self.train.global_batch * self.data.sequence_length

    @property
    def schedule_steps(self) -> int:
        """Length of the learning-rate schedule in steps."""
        return self.schedule.steps or -(-self.run.tokens // self.tokens_per_full_step)


def load_config(path: str | Path, overrides: Sequence[str] = (), learner: str | None = None) -> RunConfig:
    """Read a run file; `overrides` are "table.key=value" with the value as TOML (a bare word is a string).

    With the name of a `learner`, its table `[learner.NAME]` overrides the others, `overrides` override both, and the
    result has no `[learner]` tables. Raises ConfigError that names file, key and value if the file is missing, is not
    TOML, or has unknown keys or impossible values.
    """
    return parse_config(read_text(path, "run file"), source=str(path), overrides=overrides, learner=learner)


def parse_config(
    text: str, source: str = "run file", overrides: Sequence[str] = (), learner: str | None = None
) -> RunConfig:
    """Read the text of a run file; see `load_config`."""
    tables = read_toml(text, source)
    config = resolved = _read(tables, overrides, source)
    # The batch is that of all learners, also where it is a default.
    tables = _merged(tables, {"train": {"global_batch": config.train.global_batch}})
    for name, own in config.learner.items():
        shared = [f"the table {key}" for key in own if key not in LEARNERS_OWN]
        shared += ["train.global_batch"] if "global_batch" in own.get("train", {}) else []
        if shared:
            raise ConfigError(
                f"{source}: [learner.{name}] sets {shared[0]}, which all learners of a run share; "
                f"set only {', '.join(LEARNERS_OWN)} there"
            )
        of_learner = _read(_merged(tables, own), overrides, f"{source}: [learner.{name}]")
        if name == learner:
            resolved = of_learner
    resolved._num_dealt = _num_dealt(config)
    if config.pool is not None and resolved._num_dealt:
        raise ConfigError(
            f'{source}: [pool] and train.holds_experts = "{AUTO}" exclude each other: a learner that is dealt other '
            "experts leaves and would give up its place; drop one of them"
        )
    # `--set` does not count: it may be for this learner's process alone. Nor does a file without tables of learners: it
    # may be the one that a learner has saved.
    if config.learner:
        _require_all_held(config, tables["train"].get("holds_experts"), source)
    return config if learner is None else resolved.model_copy(update={"learner": {}})


def _held(config: RunConfig, shared: str | None) -> list[str | None]:
    """What each planned learner holds; `shared`: those without a set of their own."""
    own = [table.get("train", {}).get("holds_experts", shared) for table in config.learner.values()]
    return [*own, *[shared] * (config.run.learners - len(own))]


def _num_dealt(config: RunConfig) -> int:
    """How many planned learners hold experts that the syncer deals."""
    return _held(config, config.train.holds_experts).count(AUTO)


def require_holders(config: RunConfig, source: str) -> None:
    """Raise ConfigError if `copies` or `deal_every` has no effect, since no planned learner's experts are dealt, or if
    the planned learners together do not hold all experts."""
    _require_all_held(config, config.train.holds_experts, source)
    cut = config.method.get("fragments")
    for key in ("copies", "deal_every"):
        if isinstance(cut, dict) and key in cut and not _num_dealt(config):
            raise ConfigError(
                f'{source}: method.fragments.{key} has no effect without train.holds_experts = "{AUTO}"; drop it'
            )


def _require_all_held(config: RunConfig, shared: str | None, source: str) -> None:
    """Raise ConfigError if a run file gives all learners parts of the experts, together not all. `shared`: of those
    without a set of their own."""
    texts = _held(config, shared)
    if not {None, AUTO}.isdisjoint(texts):
        return
    held = sorted(pair for text in texts for pair in number_ranges("holds_experts", text))
    missing = 0  # the first expert that is not held
    for first, stop in held:
        missing = max(missing, stop) if first <= missing else missing
    if missing < (config.model.num_experts or held[-1][1]):
        raise ConfigError(
            f"{source}: no learner holds expert {missing}, which would stay as it was initialised; name it in "
            "train.holds_experts of one"
        )


def _read(tables: Mapping[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    own = copy.deepcopy(dict(tables))
    for override in overrides:
        _override(own, override)
    return validate(RunConfig, own, source)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`: tables are merged, other values are replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _override(tables: dict[str, Any], override: str) -> None:
    name, equals, raw = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        problem = f"--set {override} is not of the form table.key=value"
        raise ConfigError(f'{problem}; write for example "train.global_batch=8"')
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    for key in keys[:-1]:
        tables = tables.setdefault(key, {})
        if not isinstance(tables, dict):
            raise ConfigError(f'--set {override}: "{key}" is a value, not a table; correct the key')
    tables[keys[-1]] = value


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML, which `parse_config` reads back to an equal value, except for a line of keys,
    which is left out."""
    return write_toml(config.model_dump(mode="json", exclude_none=True))
