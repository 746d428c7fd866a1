r"""A Transformer on LM1B to a cross-entropy of 3.9: the protocol of Choi et al. 2019.

    python -c "import tensorflow_datasets as tfds; \
      tfds.builder('lm1b', file_format='array_record').download_and_prepare()"
    echo-jax prepare text news.en-00001-of-00100 --out data/lm1b --vocab 32000
    echo-jax train --config configs/lm.py --workdir runs/lm1b

From the paper: a Transformer (Vaswani et al. 2017), batches of 1024, Nesterov momentum,
a constant learning rate, a shuffle buffer of 10^6 examples, 20,000 updates at most. It
states no sizes, and tuned learning rate and momentum for every variant.

Chosen here: the base model (6 layers of width 512, 8 heads, 2048 hidden units) as a
decoder, with tied embeddings. Layer norms are before the sub-layers, because norms
behind them fail without a warm-up. The vocabulary has 32,000 tokens. Sequences have 128
tokens and hold several sentences, which do not see each other. The learning rate is a
start for a search, not the result of one.

Variants, joined by commas:

    c4           Common Crawl instead, for 60,000 updates
    crawl        the same of a prepared folder, data/crawl
    wikitext103  a prepared folder, data/wikitext103
    wikitext2    a prepared folder, data/wikitext2
    gpt2         GPT-2 small (124,439,808 parameters), data/text, of --block 1024
    bytes        0.47 million parameters on the bytes of Python's own sources
    tiny         a minute of that; with wikitext2, or with gpt2 on the data of
                 wikitext2, minutes on two CPU cores
    example      echoed before batching; text has nothing to augment
    baseline, read, batch, consecutive, shuffle, shuffle_buffer, spread, device: see
                 echo_variants.py

``bytes`` needs no download, and reads any ``.txt``, ``.gz`` or ``.xz`` files:

    echo-jax train --config configs/lm.py:bytes --workdir runs/my \
      --config.data.source=my.txt

Its validation loss is 5.545 nats per byte untrained, and 1.716 after its 1000 updates,
without an echo, on Python 3.11's sources. That run took 4 minutes on 2 CPU cores that
other jobs used at the same time (seed 0, one run).

``wikitext2,tiny`` takes words apart into 8192 pieces:

    echo-jax prepare text train=train.txt validation=valid.txt --out data/wikitext2
    echo-jax train --config configs/lm.py:wikitext2,tiny --workdir runs/wikitext2

Its validation loss after its 300 updates, without an echo, was 5.468 nats per piece, or
2.023 bits per byte. To know how frequent every piece is gives 6.647, which it was below
by update 100. That run took 6 minutes on 2 CPU cores that other jobs used at the same
time, of which it had 153 seconds (seed 0, one run). ``gpt2,tiny``, four layers of
GPT-2's form on the same pieces, ended at 5.360 and 1.983, in 4 minutes beside other
jobs (seed 0, one run).
"""

from echo_variants import ECHO_VARIANTS, apply_variant, apply_variants
from ml_collections import ConfigDict

from echo_jax.config import default_config


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      variant: ``""``, or variants joined by commas, such as ``"c4,example"``.
    """
    config = default_config("lm")
    config.updates = 20_000
    config.batch_size = 1024
    config.target = 3.9
    config.stop_at_target = True
    config.log_every = 100
    config.eval_every = 250
    config.checkpoint_every = 1000
    config.data.source = "tfds:lm1b"
    config.data.eval_examples = 8192
    config.data.workers = 4
    config.echo.stage = "decode"
    config.echo.buffer = 1_000_000
    config.optim.name = "sgd"
    config.optim.lr = 0.1
    config.precision.compute = "bfloat16"
    config.data.tokenizer = "data/lm1b/tokenizer.model"
    config.model.seq_len = 128
    config.model.d_model = 512
    config.model.num_layers = 6
    config.model.num_heads = 8
    config.model.d_ff = 2048
    config.model.dropout = 0.1
    config.model.positions = "sinusoidal"
    config.model.activation = "relu"
    config.model.bias = True
    config.model.tied = True
    config.model.segments = True
    apply_variants(config, variant, _OWN)
    return config


def _make_c4(config: ConfigDict) -> None:
    config.updates = 60_000
    config.data.source = "tfds:c4/en"
    config.data.tokenizer = "data/c4/tokenizer.model"
    config.model.seq_len = 256


def _make_crawl(config: ConfigDict) -> None:
    _make_c4(config)
    config.data.source = "data/crawl"
    config.data.tokenizer = ""  # that of the folder


def _make_prepared(config: ConfigDict) -> None:
    """A stream of blocks, as the field reads it; AdamW, which needs less tuning."""
    config.target = 0.0
    config.stop_at_target = False
    config.data.tokenizer = ""
    config.data.workers = 0
    config.data.eval_examples = 0
    config.optim.name = "adamw"
    config.optim.schedule = "cosine"
    config.optim.clip_norm = 1.0
    config.model.segments = False


def _make_wikitext103(config: ConfigDict) -> None:
    _make_prepared(config)
    config.updates = 50_000
    config.batch_size = 128
    config.data.source = "data/wikitext103"
    config.echo.buffer = 100_000
    config.optim.lr = 5e-4
    config.optim.warmup_updates = 2000
    config.model.seq_len = 256


def _make_wikitext2(config: ConfigDict) -> None:
    _make_prepared(config)
    config.updates = 4000
    config.batch_size = 64
    config.data.source = "data/wikitext2"
    config.echo.buffer = 4096
    config.optim.lr = 5e-4
    config.optim.warmup_updates = 400
    config.model.dropout = 0.3


def _make_gpt2(config: ConfigDict) -> None:
    _make_prepared(config)
    config.updates = 100_000
    config.batch_size = 64
    config.eval_every = 1000
    config.data.source = "data/text"
    config.data.eval_examples = 1024
    config.echo.buffer = 100_000
    config.optim.lr = 6e-4
    config.optim.warmup_updates = 2000
    config.optim.end_fraction = 0.1
    config.optim.weight_decay = 0.1
    config.model.seq_len = 1024
    config.model.d_model = 768
    config.model.num_layers = 12
    config.model.num_heads = 12
    config.model.d_ff = 3072
    config.model.dropout = 0.0
    config.model.positions = "learned"
    config.model.activation = "gelu"
    config.model.vocab = 50_257


def _make_bytes(config: ConfigDict) -> None:
    _make_prepared(config)
    config.updates = 1000
    config.batch_size = 32
    config.log_every = 50
    config.eval_every = 100
    config.checkpoint_every = 200
    config.data.source = "stdlib"
    config.data.eval_examples = 512
    config.echo.buffer = 1
    config.optim.lr = 2e-3
    config.optim.warmup_updates = 50
    config.precision.compute = "float32"
    config.model.seq_len = 64
    config.model.d_model = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.d_ff = 512
    config.model.dropout = 0.0
    config.model.positions = "learned"
    config.model.activation = "gelu"
    config.model.bias = False
    config.model.tied = False


def _make_tiny(config: ConfigDict) -> None:
    if config.data.source == "data/wikitext2":
        _make_tiny_wikitext2(config)
        return
    if config.data.source == "data/text":
        _make_tiny_gpt2(config)
        return
    _make_bytes(config)
    config.updates = 60
    config.log_every = 10
    config.eval_every = 30
    config.checkpoint_every = 30
    config.data.eval_examples = 64
    config.optim.warmup_updates = 10
    config.model.seq_len = 64
    config.model.d_model = 64
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.d_ff = 128


def _make_tiny_wikitext2(config: ConfigDict) -> None:
    config.updates = 300
    config.batch_size = 32
    config.log_every = 25
    config.eval_every = 100
    config.checkpoint_every = 100
    config.data.eval_examples = 1024
    config.echo.buffer = 512
    config.optim.lr = 3e-3
    config.optim.warmup_updates = 50
    config.model.seq_len = 64
    config.model.d_model = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.d_ff = 512
    config.model.dropout = 0.0
    config.precision.compute = "float32"
    config.model.positions = "learned"


def _make_tiny_gpt2(config: ConfigDict) -> None:
    _make_wikitext2(config)
    _make_tiny_wikitext2(config)
    config.optim.weight_decay = 0.1
    config.model.num_layers = 4
    config.model.vocab = 0  # that of the data


def _refuse_augmentation(config: ConfigDict) -> None:
    del config
    raise ValueError(
        "variants 'before' and 'after' mean augmentation, of which text has none: both "
        "would be the same echo. Use 'example'."
    )


_OWN = {
    "lm1b": lambda config: None,
    "c4": _make_c4,
    "crawl": _make_crawl,
    "wikitext103": _make_wikitext103,
    "wikitext2": _make_wikitext2,
    "gpt2": _make_gpt2,
    "bytes": _make_bytes,
    "tiny": _make_tiny,
    "example": lambda config: apply_variant(config, "before"),
    "before": _refuse_augmentation,
    "after": _refuse_augmentation,
}
VARIANTS = tuple(
    name
    for name in {**_OWN, **ECHO_VARIANTS}
    if _OWN.get(name) is not _refuse_augmentation
)
