"""ResNet-50 v1.5 on ImageNet to 75 % top-1: the protocol of Choi et al. 2019.

    echo-jax prepare images train=ILSVRC2012_img_train.tar \
        validation=ILSVRC2012_img_val.tar --classes ILSVRC2012_devkit_t12.tar.gz \
        --out data/imagenet
    echo-jax train --config configs/imagenet.py --workdir runs/imagenet

The three files are read as they are downloaded; folders or archives of class folders
will do as well, and ``tfds:imagenet2012`` names what tensorflow-datasets has prepared.

It wants accelerators (bfloat16), and a host with 16 cores or more:
``--config.data.workers`` says how many read and decode.

The paper states batch, optimizer, budget, target, buffer, virtual batches of 32 for
batch norm, and that the learning rate falls linearly to a thousandth; what it tuned is
chosen from Goyal et al. 2017: a rate of 0.4, and a weight decay of 1e-4, though not of
biases and norms, as in MLPerf. Colours change as in Inception's preprocessing. In the
paper the tuned baseline took 82.5 million images, 81 thousand updates.

An echo behind "decode" keeps squares of 256 pixels: 20 GB for the paper's buffer of
10^5, in memory of the host, or of all devices together (``:device``). One behind "read"
keeps files, about 11 GB, and decodes at every use what its crop needs.

    echo-jax prepare images imagenet_sample/images.tar --out data/imagenet_sample
    echo-jax train --config configs/imagenet.py:tiny --workdir runs/imagenet_tiny

is a network of 0.76 million parameters on 64 pixels that learns 64 images by heart: it
is trained on them without augmentation, and judged on the same 64. All are right after
30 updates, within 15 seconds of training on 2 CPU cores (seed 0, one run).

    echo-jax prepare images photos/ --holdout 0.1 --out data/photos
    echo-jax train --config configs/imagenet.py:small --workdir runs/photos \
        --config.data.source=data/photos

is for a folder of one's own where there is no accelerator: a network of 0.31 million
parameters on 64 pixels, trained on all of it and judged on its validation split. Of
3,000 images of CIFAR-10, enlarged, it learnt to name 53 % of 500 others in its 800
updates, 73 seconds on 2 CPU cores (seed 0, one run; nothing of it is tuned).

Variants of ``configs/echo_variants.py``, joined by commas, say where the echo is:
``configs/imagenet.py:device`` uses every decoded image twice, on the accelerators.
"""

from echo_variants import ECHO_VARIANTS, apply_variants
from ml_collections import ConfigDict

from echo_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      variant: ``""``, ``"tiny"`` and ``"small"`` for runs of two minutes on two CPU
        cores, and those of ``configs/echo_variants.py``, joined by commas:
        ``"tiny,spread"``.
    """
    config = default_config("imagenet")
    config.updates = 110_000
    config.batch_size = 1024
    config.target = 0.75
    config.stop_at_target = True
    config.log_every = 100
    config.eval_every = 1000
    config.checkpoint_every = 1000
    config.data.source = "data/imagenet"
    config.data.workers = 16
    config.echo.stage = "decode"
    config.echo.buffer = 100_000
    config.optim.name = "sgd"
    config.optim.lr = 0.4
    config.optim.schedule = "linear"
    config.optim.end_fraction = 0.001
    config.optim.weight_decay = 1e-4
    config.precision.compute = "bfloat16"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.train_examples = 0
    config.data.image_size = 224
    config.data.resize = 256
    config.data.augment = ("crop", "flip", "colour")
    config.model.stage_sizes = (3, 4, 6, 3)
    config.model.block = "bottleneck"
    config.model.width = 64
    config.model.norm = "ghost"
    config.model.virtual_batch = 32
    config.model.label_smoothing = 0.0
    apply_variants(config, variant, _OWN)
    return config


def _make_cheap(config: ConfigDict) -> None:
    """Takes images of 64 pixels, and what two CPU cores do with them in seconds."""
    config.stop_at_target = False
    config.data.workers = 0
    config.data.image_size = 64
    config.data.resize = 73
    config.optim.lr = 0.1
    config.model.stage_sizes = (1, 1, 1, 1)
    config.model.width = 16
    config.precision.compute = "float32"


def _make_tiny(config: ConfigDict) -> None:
    _make_cheap(config)
    config.updates = 120
    config.batch_size = 32
    config.target = 0.99
    config.log_every = 20
    config.eval_every = 30
    config.checkpoint_every = 60
    config.data.source = "data/imagenet_sample"
    config.data.eval_split = "train"
    config.data.train_examples = 64
    config.data.augment = ()
    config.echo.buffer = 64
    config.optim.warmup_updates = 10
    config.model.virtual_batch = 16


def _make_small(config: ConfigDict) -> None:
    _make_cheap(config)
    config.updates = 800
    config.batch_size = 64
    config.log_every = 50
    config.eval_every = 200
    config.checkpoint_every = 200
    config.data.source = "data/images"
    config.data.augment = ("crop", "flip")
    config.echo.buffer = 1000
    config.optim.warmup_updates = 40
    config.optim.weight_decay = 5e-4
    config.model.block = "basic"


_OWN = {"tiny": _make_tiny, "small": _make_small}
VARIANTS = (*_OWN, *ECHO_VARIANTS)
