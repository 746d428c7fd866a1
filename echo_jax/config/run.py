"""All that a training is told, as one frozen dataclass.

`RunSpec` is made from a `ConfigDict` where a training begins. It checks what concerns
several groups of fields. Behind it nobody reads a `ConfigDict`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from echo_jax.config import specs
from echo_jax.config.applies import misfits
from echo_jax.config.echo import RunEcho
from echo_jax.config.group import (
    Bounds,
    Count,
    Group,
    Natural,
    changed,
    defaults_of,
    made,
    named,
)
from echo_jax.config.optim import OWN_OPTIMIZERS, OWN_SCHEDULES, OptimSpec
from echo_jax.config.workloads import fields_of
from echo_jax.data.pipeline.spec import PipelineSpec
from echo_jax.studies.fields import flat_fields


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
    target: Annotated[float, Bounds(-math.inf)] = 0.0
    stop_at_target: bool = False  # whether the run ends there
    log_every: Count = 50  # updates between rows of metrics.jsonl
    log: specs.LogSpec = field(default_factory=specs.LogSpec)
    eval_every: Count = 100  # updates between evaluations
    # Updates between branches. A branch trains only on fresh data until the next
    # evaluation, to measure the value of repeats. 0: no branches.
    probe_repeats: Natural = 0
    # Updates between checkpoints; 0: only at the end. A stop by a signal always saves.
    checkpoint_every: Natural = 200
    keep_checkpoints: Count = 2  # the newest ones
    echo: RunEcho = field(default_factory=RunEcho)
    optim: OptimSpec = field(default_factory=OptimSpec)
    model: Any = field(default_factory=dict)  # the fields of the workload's model
    precision: specs.PrecisionSpec = field(default_factory=specs.PrecisionSpec)
    data: Any = field(default_factory=specs.DataSpec)
    batch: specs.BatchSpec = field(default_factory=specs.BatchSpec)
    local: specs.LocalSpec = field(default_factory=specs.LocalSpec)
    dispatch: specs.DispatchSpec = field(default_factory=specs.DispatchSpec)
    distributed: specs.DistributedSpec = field(default_factory=specs.DistributedSpec)
    profile: specs.ProfileSpec = field(default_factory=specs.ProfileSpec)
    xla: specs.XlaSpec = field(default_factory=specs.XlaSpec)
    mesh: specs.MeshSpec = field(default_factory=specs.MeshSpec)

    def __post_init__(self):
        super().__post_init__()
        fields, defaults = map(flat_fields, (self.to_dict(), defaults_of(RunSpec)))
        for name, _, rule, usual in misfits(fields, defaults):
            self.refuse(name, rule, usual)
        _ = self.pipeline  # It checks its own fields.
        self._check_echo()
        self._check_optim()
        self._check_counts()

    @classmethod
    def of(cls, config: Any) -> "RunSpec":
        """Returns the spec of a `ConfigDict`; a spec is returned as it is.

        Raises:
          ValueError: A field is unknown, or has an impossible value.
        """
        if isinstance(config, RunSpec):
            return config
        values = defaults_of(RunSpec) | dict(config.items())
        with named("config."):
            for name, group in zip(("model", "data"), fields_of(values), strict=True):
                with named(f"{name}."):
                    values[name] = made(group, values[name])
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

    def _check_echo(self) -> None:
        echo = self.echo
        with named("echo."):
            echo.spec(self.batch_size)
        if echo.mode == "adaptive" and not self.data.prefetch:
            rule = "reads when asked, so that nothing is ever ready for adaptive echo"
            self.refuse("data.prefetch", rule, 4)
        if self.local.sync_schedule == "fetch" and echo.mode != "stochastic":
            rule = "follows fresh loads; it needs config.echo.mode=stochastic"
            self.refuse("local.sync_schedule", rule, "every")

    def _check_optim(self) -> None:
        optim = self.optim
        if optim.name not in OWN_OPTIMIZERS or optim.schedule not in OWN_SCHEDULES:
            # Imported here: it imports jax.
            from echo_jax.config.optimizer import try_optax

            try_optax(optim)
        with named("optim."):
            optim.check(self.updates, self.batch_size)

    def _check_counts(self) -> None:
        shards, size, updates = self.data.shards, self.batch_size, self.updates
        if shards and size % shards:
            rule = f"must divide config.batch_size={size}"
            self.refuse("data.shards", rule, math.gcd(shards, size))
        profiled = self.profile.updates
        if profiled and self.profile.start + profiled > updates:
            rule = f"ends after the {updates} updates of the run"
            self.refuse("profile.start", rule, max(updates - profiled, 0))
        if self.probe_repeats % self.eval_every:
            rule = f"must be a multiple of config.eval_every={self.eval_every}"
            self.refuse("probe_repeats", rule, 10 * self.eval_every)


def check_config(config: Any) -> None:
    """Refuses impossible values; the error names field, value and fix."""
    RunSpec.of(config)
