"""The fields of each workload: its model, and what it adds to the data's."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echo_jax.config.group import Count, Group, Natural, Share
from echo_jax.config.specs import DataSpec

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class SplitData(DataSpec):
    """Data with splits."""

    train_split: str = "train"  # the split that is trained on
    eval_split: str = "validation"  # the split that is evaluated
    train_examples: Natural = 0  # so many of the former, always the same; 0: all


@dataclass(frozen=True)
class ImageData(SplitData):
    """Images."""

    augment: tuple[str, ...] = ()  # random changes of each use, in this order


@dataclass(frozen=True)
class CocoData(ImageData):
    """Images with boxes."""

    max_boxes: Count = 100  # objects of an image that are kept, the largest ones
    image_size: Count = 300  # pixels of a side, to which images are squeezed


@dataclass(frozen=True)
class PhotographData(ImageData):
    """Photographs in classes."""

    image_size: Count = 224  # pixels of a side of the model's input
    resize: Count = 256  # pixels of the shorter side before the middle is cut out


@dataclass(frozen=True)
class MadeData(DataSpec):
    """Examples that are computed."""

    train_examples: Count = 16_384  # different examples, which then come again


@dataclass(frozen=True)
class TextData(SplitData):
    """Text."""

    tokenizer: str = ""  # a SentencePiece model for raw text; "": that of the folder


@dataclass(frozen=True)
class ShapesModel(Group):
    """A ResNet."""

    depth: Count = 8  # layers of a ResNet: 6 n + 2
    width: Count = 16  # channels of a ResNet's first stage
    norm: Literal["batch", "group"] = "batch"  # its normalisation


@dataclass(frozen=True)
class CifarModel(ShapesModel):
    """A small network."""

    # The network.
    name: Literal["resnet", "mobilenet_v3_small", "mobilenet_v3_large"] = "resnet"
    depth: Count = 32  # layers of a ResNet: 6 n + 2
    label_smoothing: Share = 0.0  # part of the target that all classes share


@dataclass(frozen=True)
class CocoModel(Group):
    """A single-shot detector."""

    stage_sizes: Sizes = (3, 4, 6)  # blocks of each stage of its ResNet
    width: Count = 64  # channels of the first stage
    loss: Literal["multibox", "focal"] = "multibox"  # of the classes
    virtual_batch: Count = 128  # examples of a batch norm's statistics


@dataclass(frozen=True)
class ImageNetModel(Group):
    """A ResNet for photographs."""

    stage_sizes: Sizes = (3, 4, 6, 3)  # blocks of each stage
    block: Literal["bottleneck", "basic"] = "bottleneck"  # its kind of block
    width: Count = 64  # channels of the first stage
    norm: Literal["ghost", "batch"] = "ghost"  # ghost: over virtual_batch examples
    virtual_batch: Count = 32  # examples of a ghost batch norm's statistics
    label_smoothing: Share = 0.0  # part of the target that all classes share


@dataclass(frozen=True)
class HeatModel(Group):
    """Dense layers."""

    width: Count = 384  # units of a hidden layer
    depth: Count = 2  # hidden layers


@dataclass(frozen=True)
class LmModel(Group):
    """A Transformer."""

    seq_len: Count = 64  # tokens of an example, without the first one
    d_model: Count = 128  # features of a token
    num_layers: Count = 2  # layers
    num_heads: Count = 4  # heads of attention
    d_ff: Count = 512  # hidden units of a token's dense layers
    dropout: Share = 0.0  # part that is dropped
    positions: Literal["learned", "sinusoidal"] = "learned"  # their vectors
    activation: Literal["gelu", "relu"] = "gelu"  # of hidden units
    bias: bool = False  # whether dense layers have one
    tied: bool = False  # whether the output shares the vectors of the tokens
    vocab: Natural = 0  # tokens of the model; 0: the vocabulary of the data
    segments: bool = False  # whether attention ends where a document ends


FIELDS: dict[str, tuple[type[Group], type[DataSpec]]] = {
    "cifar": (CifarModel, ImageData),
    "coco": (CocoModel, CocoData),
    "heat": (HeatModel, MadeData),
    "imagenet": (ImageNetModel, PhotographData),
    "lm": (LmModel, TextData),
    "shapes": (ShapesModel, MadeData),
}
"""The fields ``model`` and ``data`` of each workload."""


def fields_of(run: Mapping[str, Any]) -> tuple[type[Group], type[DataSpec]]:
    """Returns the groups ``model`` and ``data`` of a run's workload."""
    if run["workload"] in FIELDS:
        return FIELDS[run["workload"]]
    # A workload of somebody else has the fields that its config has.
    shared = {field.name for field in dataclasses.fields(DataSpec)}
    own = tuple(name for name in run["data"] if name not in shared)
    return _loose(Group, tuple(run["model"])), _loose(DataSpec, own)


@functools.cache
def _loose(base: type, names: tuple[str, ...]) -> Any:
    fields = [(name, Any, dataclasses.field(default=None)) for name in names]
    return dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True)
