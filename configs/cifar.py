"""ResNet-32 on CIFAR-10 to 91 % accuracy: the protocol of Choi et al. 2019.

    echo-jax prepare images train=train.tar.gz validation=test.tar.gz --out data/cifar10
    echo-jax train --config configs/cifar.py --workdir runs/cifar

The archives hold class folders of images of 32x32 pixels. CIFAR-100 is trained by
naming another folder, and ``tfds:cifar10`` and ``tfds:cifar100`` name what
tensorflow-datasets has prepared:

    --config.data.source=data/cifar100    --config.data.source=tfds:cifar100

The paper states batch, optimizer, budget, target, buffer and that the learning rate
falls linearly to 1 %; what it tuned is chosen from He et al. 2016, for whom batch,
rate, weight decay (of all parameters) and 64 thousand updates are these. Images are
shifted by up to 4 pixels, mirrored at their border (He et al. pad with zeros). In the
paper the tuned baseline took 11.1 million images, 87 thousand updates.

    echo-jax train --config configs/cifar.py:tiny --workdir runs/cifar_tiny

is a ResNet-8 of 75 thousand parameters. On a copy of CIFAR-10 as JPEG files of quality
75 it reached 60 % on 2000 of the test images, after 51 thousand images: 800 updates,
100 seconds on 2 CPU cores that other jobs used at the same time (seed 0, one run).

``cifar100`` names the data of CIFAR-100, and has no target, for no paper states one;
``mobilenet`` is MobileNetV3-Small with its first two strides left out.

Variants of ``configs/echo_variants.py``, joined by commas, say where the echo is:
``configs/cifar.py:tiny,spread`` is the small run with every decoded image used twice.
"""

from echo_variants import ECHO_VARIANTS, apply_variants
from ml_collections import ConfigDict

from echo_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      variant: ``""``, ``"tiny"`` for a run of minutes on two CPU cores,
        ``"cifar100"``, ``"mobilenet"``, and those of ``configs/echo_variants.py``,
        joined by commas: ``"tiny,spread"``.
    """
    config = default_config("cifar")
    config.updates = 150_000
    config.batch_size = 128
    config.target = 0.91
    config.stop_at_target = True
    config.log_every = 100
    config.eval_every = 1000
    config.checkpoint_every = 5000
    config.data.source = "data/cifar10"
    config.data.threads = 4
    config.echo.stage = "decode"
    config.echo.buffer = 10_000
    config.optim.name = "sgd"
    config.optim.lr = 0.1
    config.optim.schedule = "linear"
    config.optim.decay_updates = 64_000
    config.optim.end_fraction = 0.01
    config.optim.weight_decay = 1e-4
    config.optim.decay_vectors = True
    config.precision.compute = "float32"
    config.data.train_split = "train"
    config.data.eval_split = "validation"
    config.data.train_examples = 0
    config.data.augment = ("pad_crop_flip",)
    config.model.name = "resnet"  # or mobilenet_v3_small, mobilenet_v3_large
    config.model.depth = 32  # of a resnet, and so is the width
    config.model.width = 16
    config.model.norm = "batch"
    config.model.label_smoothing = 0.0
    apply_variants(config, variant, _OWN)
    return config


def _use_cifar100(config: ConfigDict) -> None:
    config.data.source = "data/cifar100"
    config.target = 0.0
    config.stop_at_target = False


def _use_mobilenet(config: ConfigDict) -> None:
    config.model.name = "mobilenet_v3_small"


def _make_tiny(config: ConfigDict) -> None:
    config.updates = 800
    config.batch_size = 64
    config.target = 0.45
    config.stop_at_target = False
    config.log_every = 50
    config.eval_every = 200
    config.checkpoint_every = 400
    config.data.threads = 1
    config.data.eval_examples = 2000
    config.echo.buffer = 1000
    config.optim.decay_updates = 0
    config.optim.warmup_updates = 50
    config.model.depth = 8


_OWN = {"tiny": _make_tiny, "cifar100": _use_cifar100, "mobilenet": _use_mobilenet}
VARIANTS = (*_OWN, *ECHO_VARIANTS)
