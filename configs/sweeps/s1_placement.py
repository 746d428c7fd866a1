"""Where and in which order to echo, at e = 2: every variant tuned, with intervals.

    echo-jax study --config configs/sweeps/s1_placement.py --workdir runs/s1

A byte-level Transformer on the Python standard library's source code, an example of
Choi et al. 2019, figure 3, in small: each variant is searched 3 times over 16 points of
learning rate and momentum, and the best point of each search is trained on 8 new
seeds. The warm-up is followed by a constant rate. ``:cifar`` is ResNet-8 on CIFAR-10,
which has augmentation to echo before:

    echo-jax prepare images train=train.tar.gz validation=test.tar.gz --out data/cifar10
    echo-jax study --config configs/sweeps/s1_placement.py:cifar --workdir runs/s1_cifar

``:tiny`` is a smoke test.
"""

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space, small_resnet

from echo_jax.config.study import default_study

_LM_ARMS = {
    "baseline": {},
    "batch": {"factor": 2.0, "stage": "batch", "buffer": 1},
    "shuffle": {"factor": 2.0, "order": "window_shuffle"},
    "shuffle_buffer": {"factor": 2.0, "order": "shuffle_buffer", "buffer": 1024},
    "spread": {"factor": 2.0, "order": "spread"},
    "device": {
        "factor": 2.0,
        "order": "spread",
        "buffer_on": "device",
        "stage": "decode",
    },
}
_CIFAR_ARMS = {
    "baseline": {},
    "batch": {"factor": 2.0, "stage": "batch", "buffer": 1},
    "after": {"factor": 2.0, "stage": "augment", "order": "window_shuffle"},
    "before": {"factor": 2.0, "stage": "decode", "order": "window_shuffle"},
    "spread": {"factor": 2.0, "stage": "decode", "order": "spread"},
}

# Choi et al. 2019, figure 3: ResNet-32 on CIFAR-10, and a Transformer on LM1B.
_PAPER_CIFAR = {"batch": 0.848, "after": 0.658, "before": 0.576}
_PAPER_LM = {"batch": 0.684, "shuffle_buffer": 0.516}

VARIANTS = ("cifar", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"cifar"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_cifar = variant == "cifar"
    base = small_resnet() if is_cifar else byte_lm(tiny=variant == "tiny")
    arms = _CIFAR_ARMS if is_cifar else _LM_ARMS
    study = default_study(
        "Where to echo, e = 2: "
        + ("ResNet-8 on CIFAR-10, B = 64" if is_cifar else "byte-level LM, B = 32"),
        base,
        {name: {"echo": echo} for name, echo in arms.items()},
    )
    study.paper = ConfigDict(_PAPER_CIFAR if is_cifar else _PAPER_LM)
    search_space(study, tiny=variant == "tiny")
    if is_cifar:
        study.search.points = 8
    before = "before" if is_cifar else "shuffle"
    study.falsifiers = (
        less_than(
            "batch", before, "an echo of examples needs more than one of batches"
        ),
        less_than("shuffle" if not is_cifar else before, "spread", "spread needs more"),
        less_than("baseline", before, "it needs more than 0.78 of the reads", 1 / 0.78),
    )
    if is_cifar:
        study.falsifiers += (
            less_than("after", before, "before augmentation needs more than after it"),
        )
    return study.lock()
