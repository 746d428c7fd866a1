"""SSD on COCO to a mAP of 0.24: the protocol of Choi et al. 2019.

    echo-jax prepare coco train=a.json:train validation=b.json:val --out data/coco
    echo-jax train --config configs/coco.py --workdir runs/coco

From the paper: the batch of 256, momentum without Nesterov's, a warm-up of 3.5 epochs
(1,600 updates) and two drops of the learning rate by a factor of 10, 30,000 updates, a
shuffle buffer of 10,000 images, ghost batch norm over 128, and random crop, flip and
colour distortion after resizing. It tuned learning rate and drops, and names neither
the values nor the backbone. Here they are those of MLPerf's SSD: ResNet-34, a learning
rate of 0.0025 for every 32 examples, weight decay of 5e-4, and drops after two thirds
and five sixths of the run. That SSD starts from a backbone trained on ImageNet, and
this one from nothing: that it reaches 0.24 has not been shown.

An echo behind "decode" keeps squares of 300 pixels: 2.7 GB for the paper's buffer, in
memory of the host, or of all devices together (``:device``).

    echo-jax prepare coco train=instances.json:images.tar --out data/coco_mini
    echo-jax train --config configs/coco.py:tiny --workdir runs/coco_tiny

is a network of 2.0 million parameters on 160 pixels that learns 8 photographs by heart:
it is trained on them without augmentation, and judged on the same 8. On 8 images of
COCO 2017 with 63 objects its mAP is 0.93 after 80 updates, within a minute of training
on 2 CPU cores that other jobs used at the same time (seed 0, one run). The rest are
small objects that share their best default box with another one.

Variants of ``configs/echo_variants.py``, joined by commas, say where the echo is.
"""

from echo_variants import ECHO_VARIANTS, apply_variants
from ml_collections import ConfigDict

from echo_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      variant: ``""``, ``"tiny"`` for a run of minutes on two CPU cores, and those of
        ``configs/echo_variants.py``, joined by commas: ``"tiny,spread"``.
    """
    config = default_config("coco")
    config.updates = 30_000
    config.batch_size = 256
    config.target = 0.24
    config.stop_at_target = True
    config.log_every = 100
    config.eval_every = 1000
    config.checkpoint_every = 1000
    config.data.source = "data/coco"
    config.data.workers = 16
    config.echo.stage = "decode"
    config.echo.buffer = 10_000
    config.optim.name = "sgd"
    config.optim.lr = 0.02
    config.optim.nesterov = False
    config.optim.schedule = "piecewise"
    # 3.5 epochs of 117,266 images; tenths of the rate after 44 and after 55.
    config.optim.warmup_updates = 1600
    config.optim.boundaries = (20_000, 25_000)
    config.optim.weight_decay = 5e-4
    config.precision.compute = "bfloat16"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.train_examples = 0
    config.data.augment = ("ssd_crop", "flip", "colour")
    config.data.max_boxes = 100
    config.data.image_size = 300
    config.model.stage_sizes = (3, 4, 6)
    config.model.width = 64
    config.model.loss = "multibox"
    config.model.virtual_batch = 128
    apply_variants(config, variant, _OWN)
    return config


def _make_tiny(config: ConfigDict) -> None:
    config.updates = 80
    config.batch_size = 8
    config.target = 0.5
    config.stop_at_target = False
    config.log_every = 10
    config.eval_every = 40
    config.checkpoint_every = 0
    config.data.source = "data/coco_mini"
    config.data.workers = 0
    config.data.train_examples = 8
    config.data.eval_split = "train"
    config.data.augment = ()
    config.data.max_boxes = 50
    config.echo.buffer = 64
    config.optim.warmup_updates = 20
    config.optim.boundaries = (60,)
    config.optim.weight_decay = 0.0
    config.optim.clip_norm = 10.0
    config.data.image_size = 160
    config.model.stage_sizes = (1, 1, 1)
    config.model.width = 16
    config.model.virtual_batch = 8
    config.precision.compute = "float32"


_OWN = {"tiny": _make_tiny}
VARIANTS = (*_OWN, *ECHO_VARIANTS)
