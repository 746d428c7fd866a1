"""Configs of small runs, for the tests of all that is done with a trained one."""

import jax

from echo_jax.config import default_config, load_config
from echo_jax.files.folders import run_folder
from echo_jax.inference.run import TrainedRun
from echo_jax.workloads import make_task


def lm_config(source, **overrides):
    """The config of a tiny language model of the bytes of a file."""
    config = default_config()
    config.mesh.data = 1
    config.dispatch.mode, config.dispatch.steps = "loop", 1
    config.updates, config.batch_size = 4, 8
    config.log_every = config.eval_every = config.checkpoint_every = 2
    config.optim.lr = 0.02
    config.data.source = str(source)
    config.data.eval_examples = 16
    with config.unlocked():
        config.model.update(
            seq_len=16, d_model=8, num_layers=1, num_heads=2, d_ff=16, dropout=0.1
        )
    config.update_from_flattened_dict(overrides)
    return config


def shapes_config(**overrides):
    """The config of a tiny classifier of drawn images."""
    config = default_config()
    config.workload = "shapes"
    config.mesh.data = 1
    config.dispatch.mode, config.dispatch.steps = "loop", 1
    config.updates, config.batch_size = 2, 8
    config.log_every = config.eval_every = 2
    config.data.source = "synthetic"
    config.data.eval_examples = 20
    with config.unlocked():
        config.data.train_examples = 64
        config.model.update(depth=8, width=4, norm="batch")
    config.update_from_flattened_dict(overrides)
    return config


def write_text(folder):
    """Writes a file of text, and returns it."""
    file = folder / "text.txt"
    file.write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(400)))
    return file


def untrained_detector(folder):
    """A run of a tiny detector that was not trained: it is unsure of everything."""
    config = load_config("coco:tiny")
    config.data.image_size = 64
    config.model.stage_sizes, config.model.width = (1, 1, 1), 8
    names = [{"id": k, "name": name} for k, name in enumerate(("cat", "dog", "cow"))]
    info = {"categories": names}
    task = make_task(config, info)
    variables = dict(jax.jit(task.init)(jax.random.key(0)))
    return TrainedRun(run_folder(folder), config, 1, task, variables, info, {})
