import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.config import default_config
from echo_jax.echo.spec import EchoSpec
from echo_jax.models.resnet import ResNet
from echo_jax.workloads import build
from echo_jax.workloads.classification import ImageClassifier

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def make_task(norm: str = "batch") -> ImageClassifier:
    model = ResNet(num_classes=8, depth=8, width=8, norm=norm)
    return ImageClassifier(model, 32, (127.5,) * 3, (73.6,) * 3)


# Compiled once for each task: tasks are equal by value. Eager models take seconds.
init = jax.jit(ImageClassifier.init, static_argnums=0)
loss = jax.jit(ImageClassifier.loss, static_argnums=0)
evaluate = jax.jit(ImageClassifier.evaluate, static_argnums=0)


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module")
def variables(task):
    return jax.device_get(init(task, jax.random.key(0)))


@pytest.fixture(scope="module")
def config():
    config = default_config()
    config.workload = "shapes"
    config.batch_size = 8
    config.data.source = "synthetic"
    config.data.eval_examples = 20
    with config.unlocked():
        config.data.train_examples = 64
        config.model.update(depth=8, width=8, norm="batch")
    return config


@pytest.fixture(scope="module")
def workload(config):
    return build(config)


@pytest.fixture(scope="module")
def batch(workload):
    return workload.eval_batches()[0]


def test_equal_tasks_are_one_static_argument():
    assert make_task() == make_task() and hash(make_task()) == hash(make_task())
    assert make_task() != make_task("group")


def test_loss_moves_the_statistics_and_evaluation_does_not(task, variables, batch):
    losses, others, _ = loss(task, variables, batch, jax.random.key(0))
    assert losses.shape == (8,) and losses.dtype == jnp.float32
    assert others.keys() == {"batch_stats"}
    before = {"batch_stats": variables["batch_stats"]}
    moved = jax.tree.map(lambda a, b: (np.asarray(a) != b).any(), others, before)
    assert all(jax.tree.leaves(moved))
    first = evaluate(task, variables, batch)
    assert first == evaluate(task, variables, batch)


@pytest.mark.slow
def test_a_model_without_statistics_returns_none(batch):
    task = make_task("group")
    variables = init(task, jax.random.key(0))
    losses, others, _ = loss(task, variables, batch, jax.random.key(0))
    assert variables.keys() == {"params"} and others == {}
    # Without statistics, training and evaluation compute the same loss.
    total, count = evaluate(task, variables, batch)["loss"]
    np.testing.assert_allclose(total / count, np.mean(losses), rtol=1e-5)


def test_masked_images_count_for_nothing(task, variables, batch):
    mask = np.array([1, 1, 1, 0, 0, 0, 0, 0], np.float32)
    sums = evaluate(task, variables, {**batch, "mask": mask})
    blank = np.where(mask[:, None, None, None] > 0, batch["image"], 0).astype(np.uint8)
    again = evaluate(task, variables, {**batch, "image": blank, "mask": mask})
    for metric in ("accuracy", "loss"):
        assert sums[metric][1] == 3
        np.testing.assert_allclose(sums[metric][0], again[metric][0], rtol=1e-6)


def test_accuracy_counts_right_answers(task, variables, batch):
    pixels = (batch["image"].astype(np.float32) - 127.5) / 73.6
    logits = jax.jit(lambda v, x: task.model.apply(v, x, train=False))(
        variables, pixels
    )
    answers = np.asarray(logits.argmax(-1)).astype(np.int32)
    right = {**batch, "label": answers}
    wrong = {**batch, "label": (answers + 1) % 8}
    assert evaluate(task, variables, right)["accuracy"] == (8, 8)
    assert evaluate(task, variables, wrong)["accuracy"] == (0, 8)
    masked = {**right, "mask": np.array([1, 0, 1, 0, 0, 0, 1, 0], np.float32)}
    assert evaluate(task, variables, masked)["accuracy"] == (3, 3)


def test_gradients_lower_the_loss(task, variables, batch):
    def mean_loss(params):
        losses, *_ = task.loss(
            {**variables, "params": params}, batch, jax.random.key(0)
        )
        return losses.mean()

    descend = jax.jit(jax.value_and_grad(mean_loss))
    before, grads = descend(variables["params"])
    stepped = jax.tree.map(lambda p, g: p - 0.01 * g, variables["params"], grads)
    assert descend(stepped)[0] < before


def test_workload_trains_on_jpegs_and_evaluates_others(workload):
    assert (workload.name, workload.metric, workload.mode) == (
        "shapes",
        "accuracy",
        "max",
    )
    iterator = iter(workload.train_dataset(EchoSpec(factor=2)))
    batch = next(iterator)
    iterator.close()
    assert batch["image"].shape == (8, 32, 32, 3)
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    evaluated = workload.eval_batches()
    assert [b["image"].shape for b in evaluated] == [(8, 32, 32, 3)] * 3
    assert sum(b["mask"].sum() for b in evaluated) == 20


def test_validation_is_decoded_once_and_is_the_same_for_all_seeds(workload, config):
    first = workload.eval_batches()
    assert workload.eval_batches() is first
    other_seed = config.copy_and_resolve_references()
    other_seed.seed = 1
    for one, other in zip(first, build(other_seed).eval_batches(), strict=True):
        np.testing.assert_array_equal(one["image"], other["image"])


def test_facts_call_it_synthetic(workload):
    data = workload.metadata["data"]
    assert data["synthetic"] is True and data["source"].startswith("synthetic")
    assert data["train"]["images"] == 64
    assert len(data["train"]["sha256"]) == 64


def test_validation_images_are_no_training_images(config):
    same_size = config.copy_and_resolve_references()
    same_size.data.train_examples = 2048
    data = build(same_size).metadata["data"]
    assert data["train"]["images"] == data["validation"]["images"]
    assert data["train"]["sha256"] != data["validation"]["sha256"]


def test_other_sources_are_refused(config):
    other = config.copy_and_resolve_references()
    other.data.source = "stdlib"
    with pytest.raises(ValueError, match=r"'stdlib'.*data\.source=synthetic"):
        build(other)


def test_unknown_workload_is_refused(config):
    other = config.copy_and_resolve_references()
    other.workload = "chess"
    with pytest.raises(
        ValueError, match=r"'chess' is unknown; use one of cifar, .*shapes"
    ):
        build(other)
