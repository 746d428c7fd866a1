"""What no training can be is refused with its field and the fix."""

import ast

import pytest
from tiny_workload import run

# Fields of a config, and parts of the error that refuses them. E, G and C are a mesh of
# replicas, batches that grow, and a learning rate of one cycle.
SHORT = {
    "E": "mesh.data=4 local.schedule=every ",
    "G": "batch.boundaries=(8,12) batch.factors=(2,2) ",
    "C": "optim.schedule=onecycle optim.start_fraction=0.04 ",
}
REFUSED = """
optim.name=adam | name='adam' is no public optimizer of optax; use adamw,
optim.name=optax.lbfgs | 'optax.lbfgs' cannot train with config.optim.args
optim.name=optax.contrib.schedule_free_adamw | is no parameter ... warmup_stable_decay
optim.name=optax.lion optim.args={"b3":1} | cannot train with ... b3
optim.name=optax.lion optim.args=b1=1 | is no JSON object of numbers
optim.name=optax.lion optim.args={"learning_rate":1} | use config.optim.lr
optim.name=optax.lion optim.weight_decay=0.1 | has it in config.optim.args
optim.name=sgd optim.args={"b1":0.5} | belongs to optimizers of optax
optim.name=lars optim.clip_norm=1.0 | clip_norm=1.0 has no meaning with lars
optim.scale=sqrt optim.reference_batch=4 optim.b1=0.4 | b1=0.4 would be ... b1=0.95
optim.schedule=optax.exponential_decay | cannot be made of config ... missing
optim.schedule=onecycle | start_fraction=0.0 must be above 0 with onecycle
C optim.schedule=cyclic optim.warmup_updates=2 | warmup_updates=2 has no meaning with cy
C optim.peak_at=0.0 | peak_at=0.0 must lie between 0 and 1
optim.schedule=warmup_stable_decay optim.cooldown_updates=12 | =12 must be at most
optim.schedule=slow_start optim.boundaries=(3,) | be 2 numbers ... fractions=(0.5, 0.05)
optim.schedule=slow_start optim.boundaries=(3,2) | must be rising numbers
local.every=2 | local.every=2 needs ... local.schedule=every; ... 1
local.p=0.5 | p=0.5 needs ... =bernoulli, or one of cosine, linear, mul
E local.outer_lr=0.5 | outer_lr=0.5 needs ... outer=nesterov;
E local.outer=nesterov local.outer_momentum=1.0 | outer_momentum=1.0 must be below
local.schedule=bernoulli local.p=0.0 | a probability, in (0
local.schedule=load | 'load' ... needs config.echo.mode=stochastic
E local.staleness=1 | staleness=1 delays gradients ... =0
E mesh.fsdp=2 | fsdp=2 needs one copy of the parameters
E batch.micro=2 | micro=2 is for gradients that devices share
E batch.boundaries=(8,) batch.factors=(2,) | (8,) is for one model, not rep ... =()
E batch.norm=last | norm='last' is of one model ... =recompute
E dispatch.steps=2 | steps=2 has no place ... steps=1
mesh.data=2 batch.micro=3 | micro=3 does not divide the 4 ... =1
mesh.fsdp=2 batch.micro=2 | micro=2 needs whole parameters ... =2
batch.norm=recompute batch.norm_batches=0 | norm_batches=0 must be at least 1
G batch.boundaries=(8,11) | has 11, where ... boundaries=(8, 12)
G batch.boundaries=(8,"b") | must be numbers of updates
G batch.factors=(2,) | must be 2 whole numbers above 1, ... =(2, 2)
G echo.mode=adaptive | does not go with batch.boundaries; ... =fixed
G optim.scale=sqrt | does not go with batch.boundaries; ... =linear
G echo.where=device echo.after=decode echo.lanes=4 | first batch of 2 ... 4 dev ... =16
precision.compute=fp16 | compute='fp16' must be one of float32, bfloat16, fl
precision.init=8.0 | init=8.0 needs ... loss_scale=static or dynamic; set
precision.loss_scale=static precision.growth=5 | growth=5 needs ... loss_scale=dynamic
precision.loss_scale=dynamic precision.init=0.0 | init=0.0 must be above 0; set
precision.loss_scale=dynamic precision.init=0.5 | must be at least ... min_scale=1.0
batch_size=12 mesh.data=3 mesh.fsdp=4 | data=3 times ... fsdp=4 does not fit 8 dev
probe_repeats=5 | probe_repeats=5 must be a multiple of config.eval_every=6
probe_repeats=6 | needs a workload with with_seed
probe_repeats=6 local.schedule=every | does not go with config.local.schedule
probe_repeats=6 data.hold_batch=True | does not go with config.data.hold_batch
xla.preset=all | preset='all' must be one of default, fuse
xla.options={"nonsense":1} | cannot compile for cpu ... 'nonsense' ... leave
echo.where=device echo.after=decode echo.mode=adaptive echo.buffer=4 | 4 is too small
echo.where=device echo.after=decode echo.buffer=8 echo.lanes=4 mesh.data=8 | lanes=4 is
echo.mode=adaptive echo.replay=nowhere.json | no log of decisions 'nowhere.json'
log.to=("clearml",) | 'clearml', which is unknown; use tensorboa
"""


def typed(text):
    try:
        return ast.literal_eval(text) if text[:1] != "{" else text
    except (SyntaxError, ValueError):
        return text


@pytest.mark.parametrize("row", REFUSED.strip().split("\n"))
def test_what_cannot_be_trained_is_refused_and_nothing_is_written(tmp_path, row):
    fields, parts = row.split(" | ")
    if fields[1] == " ":
        fields = SHORT[fields[0]] + fields[2:]
    pairs = (each.split("=", 1) for each in fields.split())
    with pytest.raises(ValueError) as error:
        run(tmp_path / "run", **{name: typed(value) for name, value in pairs})
    said, at = str(error.value), 0
    for part in parts.split("..."):
        at = said.find(part.strip(), at)
        assert at >= 0, said
    assert not (tmp_path / "run").exists()
