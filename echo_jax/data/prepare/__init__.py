"""Turns users' files into a prepared folder: ``echo-jax prepare``."""

from echo_jax.data.prepare.coco import prepare_coco
from echo_jax.data.prepare.images import prepare_images
from echo_jax.data.prepare.job import PrepareError, Settings
from echo_jax.data.prepare.text import TextSettings, prepare_text
from echo_jax.lazy import door

__all__ = [
    "PrepareError",
    "Settings",
    "TextSettings",
    "prepare_coco",
    "prepare_images",
    "prepare_text",
]

__getattr__ = door(__name__, {"tokenizer": ["ByteTokenizer", "SubwordTokenizer"]})
