r"""What an echo is worth where photographs are decoded from JPEG, every variant tuned.

    echo-jax prepare images photographs/ --holdout 0.2 --out data/photographs
    export PYTHONPATH=configs/sweeps
    echo-jax study --config configs/sweeps/s9_photographs.py --workdir runs/s9

A small ResNet learns which way up a photograph is, of four rotations (Gidaris et al.
2018, arXiv 1803.07728). Each use of an image is another random crop of the decoded
photograph:

    baseline          every image once
    e2, e3, e4, e6    decoded images 2, 3, 4, 6 times, evenly far apart, buffer of 512
    back_to_back      every batch 3 times in a row

The published results are of 396 photographs of ImageNet, one of each of 396 classes.
These are too few to judge by others. So the target is an accuracy of 44 % on the same
photographs, uncropped: the study is of optimisation, not of generalisation. Learning
rate and b1 of AdamW are searched, after a warm-up of 20 updates at a constant rate.

Fresh examples and updates are counted. So images are decoded once in a process, which
changes no pixel; ``s9_seconds.py`` has the seconds, and decodes. The search is as
narrow as that of ``s10_heat.py``. ``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import check_variant, less_than, search_space, start_study

from echo_jax.config.study import set_arms

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    study = start_study("Photographs in four rotations, B = 32", "imagenet.py:small")
    base = study.base
    base.target, base.stop_at_target = 0.44, True
    base.updates, base.batch_size = 1000, 32
    base.eval_every = base.log_every = 25
    base.data.source, base.data.eval_split = "python:rotations:Decoded", "judged"
    base.data.augment = ("crop",)
    base.data.image_size, base.data.resize = 32, 36
    base.model.width = 8
    optim = base.optim
    optim.name, optim.b2, optim.lr = "adamw", 0.99, 3e-3
    optim.schedule, optim.warmup_updates, optim.weight_decay = "constant", 20, 0.0
    if is_tiny:
        base.updates, base.target = 50, 0.26
    set_arms(study, _arms(64 if is_tiny else 512))
    if not is_tiny:
        study.arms.back_to_back.updates = 2000
    search_space(study, tiny=is_tiny)
    study.stop.cut = 1.5
    study.falsifiers = (
        less_than("baseline", "e3", "e = 3 reads over half of the baseline's", 2.0),
        less_than("back_to_back", "e3", "batches back to back read less than e = 3"),
        less_than("e3", "e6", "e = 6 reads no less than e = 3"),
    )
    return study.lock()


def _arms(buffer: int) -> dict[str, Any]:
    """Returns no echo, and echoes of decoded images and of batches."""
    echoes: dict[str, dict[str, Any]] = {"baseline": {"factor": 1.0}}
    for factor in (2, 3, 4, 6):
        spread = {"factor": float(factor), "order": "spread", "buffer": buffer}
        echoes[f"e{factor}"] = spread
    echoes["back_to_back"] = {"factor": 3.0, "stage": "batch", "order": "consecutive"}
    return {name: {"echo": echo} for name, echo in echoes.items()}
