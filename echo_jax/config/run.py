"""All that a training is told, as one frozen dataclass.

`RunSpec` is made from a `ConfigDict` where a training begins. It checks what concerns
several groups of fields. Behind it nobody reads a `ConfigDict`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from echo_jax.config.applies import idle_fields, missing_field
from echo_jax.config.echo import RunEcho
from echo_jax.config.group import (
    Bounds,
    Count,
    Group,
    Natural,
    changed,
    defaults_of,
    field_of,
    made,
    named,
)
from echo_jax.config.optim import OptimSpec
from echo_jax.config.specs import (
    BatchSpec,
    DataSpec,
    DispatchSpec,
    DistributedSpec,
    LocalSpec,
    LogSpec,
    MeshSpec,
    PrecisionSpec,
    ProfileSpec,
    XlaSpec,
    broken_rules,
)
from echo_jax.config.workloads import fields_of
from echo_jax.data.pipeline.spec import PipelineSpec


@dataclass(frozen=True)
class RunSpec(Group):
    """All that a training is told.

    Sizes are per update over all devices, times are seconds, and every schedule is
    indexed by updates. ``model``, and fields of ``data`` beyond those of `DataSpec`,
    belong to the workload.

    Raises:
      ValueError: A field has an impossible value; it names field, value and fix.
    """

    workload: str = "lm"  # cifar | coco | heat | imagenet | lm | shapes
    seed: Annotated[int, Bounds(0, below=2**32)] = 0  # of all but the echo's order
    # A run folder, or a file of 'echo-jax export --to safetensors'. The run starts
    # with its arrays of the same name and shape.
    init_from: str = ""
    updates: Count = 1000  # optimizer steps
    batch_size: Count = 32  # examples of an update
    # 0: no target. Neither a loss of 0 nor an accuracy of 0 can be a target.
    target: float = 0.0
    stop_at_target: bool = False  # whether the run ends there
    log_every: Count = 50  # updates between rows of metrics.jsonl
    log: LogSpec = field(default_factory=LogSpec)
    eval_every: Count = 100  # updates between evaluations
    # Updates between branches. A branch trains only on fresh data until the next
    # evaluation, to measure the worth of repeats. 0: no branches.
    probe_repeats: Natural = 0
    # Updates between checkpoints; 0: only at the end. A stop by a signal always saves.
    checkpoint_every: Natural = 200
    keep_checkpoints: Count = 2  # the newest ones
    echo: RunEcho = field(default_factory=RunEcho)
    optim: OptimSpec = field(default_factory=OptimSpec)
    model: Any = field(default_factory=dict)  # the fields of the workload's model
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    data: Any = field(default_factory=DataSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    local: LocalSpec = field(default_factory=LocalSpec)
    dispatch: DispatchSpec = field(default_factory=DispatchSpec)
    distributed: DistributedSpec = field(default_factory=DistributedSpec)
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    xla: XlaSpec = field(default_factory=XlaSpec)
    mesh: MeshSpec = field(default_factory=MeshSpec)

    def __post_init__(self):
        super().__post_init__()
        for name, _, rule, usual in idle_fields(self, defaults_of(RunSpec)):
            self.refuse(name, rule, usual)
        for name, rule, fix in self._broken_rules():
            self.refuse(name, rule, fix)

    @classmethod
    def of(cls, config: Any) -> "RunSpec":
        """Returns the spec of a `ConfigDict`; a spec is returned as it is.

        Raises:
          ValueError: A field is missing or unknown, or has an impossible value.
        """
        if isinstance(config, RunSpec):
            return config
        if missing := missing_field(config, defaults_of(RunSpec)):
            raise ValueError(
                f"the config has no field {missing!r}; let get_config() begin with "
                "echo_jax.config.default_config(), which has them all"
            )
        values = dict(config.items())
        for name, group in zip(("model", "data"), fields_of(config), strict=True):
            with named("config."), named(f"{name}."):
                values[name] = made(group, values[name])
        with named("config."):
            return made(RunSpec, values)

    def changed(self, fields: Mapping[str, Any]) -> Self:
        with named("config."):
            return changed(self, fields)

    @property
    def pipeline(self) -> PipelineSpec:
        """The pipeline of the data, up to the trainer."""
        data = self.data
        return PipelineSpec(
            after=self.echo.stage,
            batch_size=self.batch_size,
            seed=self.seed,
            threads=data.threads,
            workers=data.workers,
            prefetch=data.prefetch,
            storage=data.storage,
            engine=data.pipeline,
            check_finite=data.check_finite,
        )

    def _broken_rules(self) -> Iterator[tuple[str, str, Any]]:
        """Yields each field that does not go with another group, the rule, and a fix.

        The pipeline and the echo check their own fields.
        """
        echo, size = self.echo, self.batch_size
        _ = self.pipeline
        with named("echo."):
            if echo.mode == "stochastic":
                with named("fetch."):
                    _ = echo.fetch.loads
            echo.spec(size)
            _ = echo.pattern
        if echo.buffer_on == "device":
            if echo.stage not in ("decode", "augment"):
                rule = "goes with echo.buffer_on=host; a device echoes decoded examples"
                yield "echo.stage", rule, "decode"
            if echo.lanes and size % echo.lanes:
                rule = f"must divide config.batch_size={size}"
                yield "echo.lanes", rule, math.gcd(echo.lanes, size)
        if echo.mode == "adaptive" and not self.data.prefetch:
            rule = "reads when asked, so that nothing is ever ready for adaptive echo"
            yield "data.prefetch", rule, 4
        if not math.isfinite(self.target):
            yield "target", "must be finite; 0 means no target", 0.0
        if self.optim.is_of_optax:
            # Imported here: it imports jax.
            from echo_jax.config.optimizer import try_optax

            try_optax(self.optim)
        yield from self.optim.broken_rules(self.updates, size)
        yield from self._broken_by_parts()
        last = self.profile.start + self.profile.updates
        if self.profile.updates and last > self.updates:
            rule = f"ends after the {self.updates} updates of the run"
            yield "profile.start", rule, max(self.updates - self.profile.updates, 0)
        if every := self.probe_repeats:
            if every % self.eval_every:
                rule = f"must be a multiple of config.eval_every={self.eval_every}"
                yield "probe_repeats", rule, 10 * self.eval_every
            for name, usual in (
                ("local.sync_schedule", "none"),
                ("batch.boundaries", ()),
            ):
                value = field_of(self, name)
                if value != usual:
                    rule = f"does not go with config.{name}={value!r}"
                    yield "probe_repeats", rule, 0
        yield from broken_rules(self)

    def _broken_by_parts(self) -> Iterator[tuple[str, str, Any]]:
        """Yields what does not go with the parts of a batch: on devices, in time."""
        mesh, batch, size = self.mesh, self.batch, self.batch_size
        ways = mesh.fsdp * max(mesh.data, 1)
        if size % ways:
            rule = f"must be a multiple of the {ways} devices of config.mesh"
            yield "batch_size", rule, math.ceil(size / ways) * ways
        by_hand = {"batch.accumulation_steps": 1, "batch.statistics": "all"}
        for name, usual in (by_hand | {"precision.reduce": "auto"}).items():
            if mesh.fsdp > 1 and field_of(self, name) != usual:
                rule = "needs whole parameters on every device, not mesh.fsdp="
                yield name, f"{rule}{mesh.fsdp}", usual
        parts = batch.parts(0)
        if size % parts:
            rule = f"must be a multiple of {parts}, as often as the batch grows"
            yield "batch_size", rule, math.ceil(size / parts) * parts
        needed = {"echo.mode": "fixed", "optim.scale": "linear", "dispatch.steps": 1}
        allowed = {"optim.scale": ("none", "linear")}
        for name, fix in needed.items():
            is_known = field_of(self, name) in allowed.get(name, (fix,))
            if batch.boundaries and not is_known:
                yield name, "does not go with batch.boundaries", fix
        shards = self.data.shards
        if shards and size % shards:
            rule = f"must divide config.batch_size={size}"
            yield "data.shards", rule, math.gcd(shards, size)


def check_config(config: Any) -> None:
    """Refuses impossible values; the error names field, value and fix."""
    RunSpec.of(config)
