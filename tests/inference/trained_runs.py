"""Configs of small runs, for the tests of all that is done with a trained one."""

from echo_jax.config import default_config

RUN = {"mesh.data": 1, "dispatch.steps": 1, "batch_size": 8, "log_every": 2}


def made(model, overrides):
    config = default_config()
    with config.unlocked():
        config.model.update(model)
        config.data.train_examples = 0
    config.update_from_flattened_dict({**RUN, "eval_every": 2, **overrides})
    return config


def lm_config(source, **overrides):
    """The config of a tiny language model of the bytes of a file."""
    sizes = {"seq_len": 16, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16}
    fields = {"updates": 4, "checkpoint_every": 2, "optim.lr": 0.02}
    fields |= {"data.source": str(source), "data.eval_examples": 16}
    return made({**sizes, "dropout": 0.1}, {**fields, **overrides})


def shapes_config(**overrides):
    """The config of a tiny classifier of drawn images."""
    fields = {"workload": "shapes", "updates": 2, "data.source": "synthetic"}
    fields |= {"data.train_examples": 64, "data.eval_examples": 20}
    return made({"depth": 8, "width": 4, "norm": "batch"}, {**fields, **overrides})


def write_text(folder):
    """Writes a file of text, and returns it."""
    file = folder / "text.txt"
    file.write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(400)))
    return file
