"""The start of a run, refused or not, what it says, and runs on one held batch."""

import ast
import io
import json
import re
import signal
import time

import pytest
from compilations import counted_compilations
from rich.console import Console
from tiny_workload import Regression, make_workload, run, said_by, stop_at, tiny_config

from echo_jax.training import Interrupted
from echo_jax.training.records import Progress

pytestmark = pytest.mark.usefixtures("compiled_soon")


def refuse(*args, **options):
    raise ValueError("image 'a': it has 40x40 pixels")


def start(workdir, replaced="eval_batches", **overrides):
    """A start that the data refuses, by default that of the first evaluation."""
    with pytest.raises(ValueError, match="40x40"):
        run(workdir, replaced={replaced: refuse}, **overrides)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.json*")}


def test_a_refused_start_is_in_nobodys_way(tmp_path):
    folder, local = tmp_path / "made" / "run", {"local__sync_schedule": "every"}
    start(folder, local__sync_every=3, **local)
    # Neither another config nor another number of replicas is refused.
    summary = run(folder, local__sync_every=3, mesh__data=2, optim__lr=0.5, **local)
    assert summary["updates"] == 12
    assert json.loads(contents(folder)["config.json"])["optim"]["lr"] == 0.5


def test_a_refused_extension_leaves_the_run_as_it_was(tmp_path):
    run(tmp_path, updates=6, checkpoint_every=3)
    before = contents(tmp_path)
    start(tmp_path, "train_dataset", updates=12, checkpoint_every=3)
    assert contents(tmp_path) == before
    assert run(tmp_path, updates=12, checkpoint_every=3)["updates"] == 12


def test_what_fails_after_a_save_is_a_run(tmp_path):
    with pytest.raises(FloatingPointError):
        run(tmp_path, nan_at_fresh=3, log_every=1)
    with pytest.raises(FloatingPointError):
        run(tmp_path, nan_at_fresh=8, log_every=1, checkpoint_every=1, optim__lr=0.3)
    with pytest.raises(ValueError, match=r"another config.*optim\.lr \(0\.3 -> 0\.5"):
        run(tmp_path, optim__lr=0.5)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*another"):
        run(tmp_path)


def stopping_evaluation(shard):
    signal.raise_signal(signal.SIGTERM)
    return make_workload(tiny_config()).eval_batches(shard)


STOPPING = {"eval_batches": stopping_evaluation}


def test_a_signal_before_the_first_update_keeps_what_was_saved(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, replaced=STOPPING)
    assert (tmp_path / "config.json").exists()
    assert run(tmp_path)["updates"] == 12


def test_a_shorter_command_leaves_the_config_of_the_longer_run(tmp_path):
    run(tmp_path, updates=4)
    longer = run(tmp_path, updates=8)
    before = contents(tmp_path)
    assert json.loads(before["config.json"])["updates"] == 8
    assert run(tmp_path, updates=4) == longer
    assert contents(tmp_path) == before


def test_a_run_that_is_ahead_of_its_command_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(8), echo__factor=2.0)
    before = contents(tmp_path)["config.json"]
    with pytest.raises(ValueError, match=r"updates, more than config\.updates=1; set"):
        run(tmp_path, updates=1, echo__factor=2.0)
    assert contents(tmp_path)["config.json"] == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"local__sync_schedule": "every", "local__sync_every": 3},
            "synchronised after update 2, the end",
        ),
        ({"optim__schedule": "cosine"}, "the cosine schedule decays to the end of"),
        ({"optim__schedule": "cosine", "optim__decay_updates": 9}, ""),
    ],
)
def test_an_extension_says_what_it_moves(tmp_path, options, said):
    assert "config.updates was" not in said_by(tmp_path, updates=2, **options)[1]
    longer = said_by(tmp_path, updates=4, **options)[1]
    assert "resumes after update 2" in longer
    assert ("config.updates was 2 and is 4: " in longer) == bool(said)
    assert re.search(said, longer)


def test_updates_without_a_row_are_said_now_and_then(monkeypatch):
    now, done, text = [100.0], 0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shown = Progress(Console(file=text, width=200), total=10_100)

    def said_by(updates, update_s):
        nonlocal done
        before = len(text.getvalue())
        for _ in range(updates):
            now[0] += update_s
            done += 1
            shown.update(done)
        return [line[10:] for line in text.getvalue()[before:].splitlines()]

    shown.note("begins")
    assert said_by(1, 60.0) == []  # How fast it is nobody knows yet.
    shown.note("update 1 is evaluated")
    # The time left does not count the minute of compiling.
    wanted = ["update 11/10100  ETA 2:48:09", "update 21/10100  ETA 2:47:59"]
    assert said_by(25, 1.0) == wanted
    shown.note("a row")
    assert said_by(9, 1.0) == []
    assert len(said_by(10_000, 0.002)) == 2


def test_what_is_trained_is_said_before_anything_is_compiled(tmp_path):
    class Text(io.StringIO):
        def write(self, text):
            super().write(text)
            if "no echo" in text:
                raise StopAsyncIteration

    task = Regression(width=15)  # Compiled by no other test.
    console = Console(file=Text(), width=200)
    with counted_compilations() as compiled, pytest.raises(StopAsyncIteration):
        run(tmp_path, console=console, task=task)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["model:", "no"]
    assert not compiled


def test_a_run_says_its_size_and_its_echo_once_and_its_progress(tmp_path):
    first = said_by(tmp_path)[1]
    model, echo, begin, _, _, row, _, _ = (line[10:] for line in first.splitlines())
    size = "96 parameters in 3 arrays: first 64, bias 16, second 16"
    assert model == f"model: {size}; see model.txt"
    assert echo == "no echo: every batch is used once"
    assert re.fullmatch(r"update 0  eval_loss \S+", begin)
    numbers = r"loss \d+\.\d{4}  \d+ examples/s  idle \d+%  kept 0\.\d+"
    assert re.fullmatch(rf"update 8/12  {numbers}  ETA \d+:\d\d:\d\d", row)
    assert (tmp_path / "model.txt").read_text() == (
        "batch_stats/mean  float32[4]\nparams/bias  float32[16]\n"
        "params/first  float32[4,16]\nparams/second  float32[16,1]\n"
    )
    # What another version of Flax would write of a run that goes on.
    (tmp_path / "model.txt").write_text("of the first start")
    second = said_by(tmp_path, updates=14)[1]
    assert "; see model.txt" not in second and "no echo: " not in second
    assert (tmp_path / "model.txt").read_text() == "of the first start"


# Fields of a config, and parts of the error that refuses them. E, G and C are a mesh of
# replicas, batches that grow, and a learning rate of one cycle.
SHORT = {
    "D": "echo.buffer_on=device echo.stage=decode ",
    "E": "mesh.data=4 local.sync_schedule=every ",
    "G": "batch.boundaries=(8,12) batch.factors=(2,2) ",
    "C": "optim.schedule=onecycle optim.start_fraction=0.04 ",
}
REFUSED = """
optim.name=adam | name='adam' is no public function of optax; use adamw,
optim.name=optax.lbfgs | 'optax.lbfgs' cannot train with config.optim.args
optim.name=optax.lion optim.args={"b3":1} | cannot train with ... b3
optim.name=optax.lion optim.args=b1=1 | is no JSON object of numbers
optim.name=optax.lion optim.args={"learning_rate":1} | cannot train ... learning_rate
optim.name=optax.lion optim.weight_decay=0.1 | has it in config.optim.args
optim.name=sgd optim.args={"b1":0.5} | needs config.optim.name!=adamw
optim.name=lars optim.clip_norm=1.0 | clip_norm=1.0 needs config.optim.name!=lars
optim.scale=sqrt optim.reference_batch=4 optim.b1=0.4 | b1=0.4 would be ... b1=0.95
optim.schedule=optax.exponential_decay | cannot be made of ... missing
optim.schedule=onecycle | start_fraction=0.0 must be above 0 with onecycle
optim.peak_at=0.0 | peak_at=0.0 must be above 0
optim.schedule=warmup_stable_decay optim.cooldown_updates=12 | =12 must be at most
optim.schedule=slow_start optim.boundaries=(3,) | be 2 numbers ... fractions=(0.5, 0.05)
local.sync_every=2 | local.sync_every=2 needs ... local.sync_schedule=every; ... 1
E local.outer=nesterov local.outer_momentum=1.0 | outer_momentum=1.0 must be below
local.sync_p=0.5 | p=0.5 needs ... =bernoulli or cosine or linear or mul
precision.loss_scale=static precision.growth=5 | growth=5 needs ... loss_scale=dynamic
xla.preset=all | preset='all' must be one of default, fuse
local.sync_schedule=bernoulli local.sync_p=1.5 | p=1.5 must be at most 1
local.sync_schedule=bernoulli local.sync_p=0.0 | p=0.0 must be above 0
local.sync_schedule=fetch | 'fetch' ... needs config.echo.mode=stochastic
E local.staleness=1 | staleness=1 needs config.local.sync_schedule=none; ... =0
E mesh.fsdp=2 | fsdp=2 needs config.local.sync_schedule=none; ... =1
E batch.accumulation_steps=2 | steps=2 needs config.local.sync_schedule=none; ... =1
E batch.boundaries=(8,) batch.factors=(2,) | (8,) needs config.local ... =()
E dispatch.steps=2 | steps=2 needs config.local.sync_schedule=none; ... steps=1
mesh.data=2 batch.accumulation_steps=3 | steps=3 does not divide the 4 ... =1
mesh.fsdp=2 batch.accumulation_steps=2 | steps=2 needs config.mesh.fsdp=1; ... =1
batch.norm=recompute batch.norm_batches=0 | norm_batches=0 must be at least 1
G batch.boundaries=(8,11) | has 11, where ... boundaries=(8, 12)
G batch.boundaries=(8,"b") | must be a whole number
G batch.factors=(2,) | must be 2 factors, ... =(2, 2)
G echo.mode=adaptive | needs config.batch.boundaries=(); ... =fixed
G echo.buffer_on=device echo.stage=decode echo.lanes=4 | of 2 ... 4 dev ... =16
precision.compute=fp16 | compute='fp16' must be one of float32, bfloat16, fl
precision.init=8.0 | init=8.0 needs ... loss_scale=static or dynamic; set
precision.loss_scale=dynamic precision.init=0.0 | init=0.0 must be above 0; set
batch_size=12 mesh.data=3 mesh.fsdp=4 | data=3 times ... fsdp=4 does not fit 8 dev
probe_repeats=5 | probe_repeats=5 must be a multiple of config.eval_every=6
probe_repeats=6 | needs a workload with with_seed
probe_repeats=6 local.sync_schedule=every | needs config.local.sync_schedule=none
xla.options={"nonsense":1} | cannot compile for cpu ... 'nonsense' ... leave
D echo.mode=adaptive echo.buffer=4 | 4 is too small
D echo.buffer=8 echo.lanes=4 mesh.data=8 | lanes=4 is
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
