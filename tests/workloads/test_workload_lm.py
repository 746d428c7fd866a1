import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.config import default_config
from echo_jax.echo.spec import EchoSpec
from echo_jax.models.transformer import Transformer
from echo_jax.workloads import build
from echo_jax.workloads.lm import LanguageModel

SEQ_LEN = 8

# Dropout or a mask that is not heeded shows in far more than the last bit.
pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def make_task(**fields) -> LanguageModel:
    sizes = {"vocab": 256, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
    return LanguageModel(Transformer(**sizes, max_len=SEQ_LEN, **fields))


# Compiled once for each task: tasks are equal by value. Eager models take seconds.
init = jax.jit(LanguageModel.init, static_argnums=0)
loss = jax.jit(LanguageModel.loss, static_argnums=0)
evaluate = jax.jit(LanguageModel.evaluate, static_argnums=0)


def trained_variables(task: LanguageModel):
    """Returns variables of which none is zero, so that every input matters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32),
        jax.device_get(init(task, jax.random.key(0))),
    )


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module")
def variables(task):
    return trained_variables(task)


@pytest.fixture
def batch():
    tokens = np.random.default_rng(0).integers(0, 256, (4, SEQ_LEN + 1), np.uint8)
    return {"tokens": tokens}


def config_of(source, **data):
    config = default_config()
    config.workload = "lm"
    config.batch_size = 4
    config.data.source = str(source)
    config.data.update(data)
    with config.unlocked():
        config.model.update(
            seq_len=SEQ_LEN,
            d_model=16,
            num_layers=1,
            num_heads=2,
            d_ff=32,
            dropout=0.0,
        )
    return config


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(1).integers(14, 256, 4000, np.uint8)))
    return path


def test_equal_tasks_are_one_static_argument():
    assert make_task() == make_task() and hash(make_task()) == hash(make_task())
    assert make_task() != make_task(dropout=0.1)


def test_untrained_loss_is_that_of_a_uniform_guess(task, batch):
    variables = init(task, jax.random.key(0))
    losses, others, metrics = loss(task, variables, batch, jax.random.key(1))
    assert metrics == {"tokens_per_update": (batch["tokens"][:, 1:].size, 1)}
    assert losses.shape == (4,) and losses.dtype == jnp.float32 and others == {}
    np.testing.assert_allclose(losses, np.log(256), rtol=1e-6)


def test_loss_is_about_the_next_byte(task, variables, batch):
    """The last byte is predicted and never read, the first read and not predicted."""
    tokens = batch["tokens"].astype(np.int32)
    logits = jax.jit(lambda v, x: task.model.apply(v, x, train=False))(
        variables, tokens[:, :-1]
    )
    chances = np.exp(np.asarray(logits, np.float64))
    chances /= chances.sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(chances, tokens[:, 1:, None], axis=-1))
    losses, *_ = loss(task, variables, batch, jax.random.key(1))
    np.testing.assert_allclose(losses, expected[..., 0].mean(axis=1), rtol=1e-5)


def test_evaluation_sums_what_training_averages(task, variables, batch):
    losses, *_ = loss(task, variables, batch, jax.random.key(1))
    total, count = evaluate(task, variables, {**batch, "mask": np.ones(4, np.float32)})[
        "loss"
    ]
    assert count == 4 * SEQ_LEN
    np.testing.assert_allclose(total / count, np.mean(losses), rtol=1e-6)


def test_masked_examples_count_for_nothing(task, variables, batch):
    mask = np.array([1, 1, 0, 0], np.float32)
    total, count = evaluate(task, variables, {**batch, "mask": mask})["loss"]
    changed = {"tokens": batch["tokens"].copy(), "mask": mask}
    changed["tokens"][2:] = 0
    assert count == 2 * SEQ_LEN
    assert evaluate(task, variables, changed)["loss"][0] == total


def test_dropout_follows_its_key_and_spares_evaluation(batch):
    task = make_task(dropout=0.5)
    variables = trained_variables(task)
    first = loss(task, variables, batch, jax.random.key(1))[0]
    again = loss(task, variables, batch, jax.random.key(1))[0]
    other = loss(task, variables, batch, jax.random.key(2))[0]
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    plain = make_task()
    masked = {**batch, "mask": np.ones(4, np.float32)}
    assert (
        evaluate(task, variables, masked)["loss"][0]
        == evaluate(plain, variables, masked)["loss"][0]
    )


def test_gradients_lower_the_loss(task, variables, batch):
    def mean_loss(params):
        return task.loss({"params": params}, batch, jax.random.key(0))[0].mean()

    descend = jax.jit(jax.value_and_grad(mean_loss))
    before, grads = descend(variables["params"])
    stepped = jax.tree.map(lambda p, g: p - 0.01 * g, variables["params"], grads)
    assert descend(stepped)[0] < before


def test_workload_reads_the_users_text(text_file):
    workload = build(config_of(text_file))
    assert (workload.name, workload.metric, workload.mode) == ("lm", "loss", "min")
    iterator = iter(workload.train_dataset(EchoSpec(factor=2)))
    batch = next(iterator)
    iterator.close()
    text = text_file.read_bytes()
    windows = {text[i : i + SEQ_LEN + 1] for i in range(0, 3800, SEQ_LEN + 1)}
    assert batch["tokens"].shape == (4, SEQ_LEN + 1)
    assert all(row.tobytes() in windows for row in batch["tokens"])


def test_validation_text_is_never_trained_on(text_file):
    workload = build(config_of(text_file))
    held_out = text_file.read_bytes()[3800:]
    for batch in workload.eval_batches():
        # What a batch is filled up with too.
        assert all(tokens.tobytes() in held_out for tokens in batch["tokens"])
    assert sum(b["mask"].sum() for b in workload.eval_batches()) == 200 // 9


def test_validation_is_decoded_once_and_is_the_same_for_all_seeds(text_file):
    config = config_of(text_file, eval_examples=5)
    workload = build(config)
    first = workload.eval_batches()
    assert workload.eval_batches() is first
    config.seed = 1
    for one, other in zip(first, build(config).eval_batches(), strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])


def test_facts_say_what_was_read_and_what_is_simulated(text_file):
    metadata = build(config_of(text_file)).metadata
    assert metadata["data"]["synthetic"] is False
    assert metadata["data"]["train_bytes"] == 3800
    assert metadata["data"]["train_examples"] == 3800 // 9
    assert len(metadata["data"]["sha256"]) == 64
    assert metadata["storage"]["simulated"] is False
    slow = config_of(text_file, storage={"latency_s": 0.01})
    assert build(slow).metadata["storage"] == {
        "simulated": True,
        "latency_s": 0.01,
        "bytes_per_s": 0.0,
        "distribution": "constant",
    }


def test_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"too short to hold out a twentieth")
    with pytest.raises(ValueError, match=r"model\.seq_len"):
        build(config_of(tmp_path / "short.txt"))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("seq_len", 0, r"model\.seq_len=0 must be at least 1"),
        ("num_heads", 0, r"model\.num_heads=0 must be at least 1"),
        ("num_heads", 3, "d_model=16 is not a multiple of num_heads=3"),
        ("dropout", 1.0, r"model\.dropout=1\.0.*below 1"),
    ],
)
def test_impossible_model_is_refused(text_file, field, value, named):
    config = config_of(text_file)
    config.model[field] = value
    with pytest.raises(ValueError, match=named):
        build(config)


def test_a_run_may_know_some_windows_alone_and_always_the_same_ones(text_file):
    def windows(examples, seed):
        config = config_of(text_file)
        with config.unlocked():
            config.data.train_examples = examples
        config.seed = seed
        workload = build(config)
        iterator = iter(workload.train_dataset(EchoSpec()))
        # An epoch of all windows, or eight of some.
        batches = itertools.islice(iterator, 10 if examples else 110)
        rows = {row.tobytes() for batch in batches for row in batch["tokens"]}
        iterator.close()
        return rows, workload.metadata["data"]["train_examples"]

    (some, count), (again, _) = windows(5, 0), windows(5, 1)
    assert (len(some), count) == (5, 5) and some == again
    every, _ = windows(0, 0)
    assert some < every
    with pytest.raises(ValueError, match=r"train_examples=9999 is none of 0 to \d+"):
        windows(9999, 0)
