"""Where to echo: Choi et al. 2019, figure 3b, on Common Crawl.

    echo-jax prepare text crawl/ --holdout 0.001 --vocab 32000 --document line \
      --out data/crawl
    echo-jax study --config configs/sweeps/lm_crawl.py --workdir runs/crawl

An echo factor of 2, of batches and of examples, until the cross-entropy is 3.9: the
study of ``lm_batch_size.py:1024`` on other data. The folder ``crawl/`` holds text files
of a crawl with one document a line. A variant may take as many updates as the curves in
the paper's appendix have. With 61 million blocks of 256 tokens no example is read
twice, as in the paper. Learning rate and momentum are searched for each variant: 5
searches of 100 points.

The paper needed 47.3 million fresh examples without an echo. With echoed batches it
needed 27.6 million, and with echoed examples 27.5 million. ``:tiny`` is a smoke test on
bytes.
"""

from ml_collections import ConfigDict
from sweep_parts import (
    check_variant,
    placement_arms,
    search_like_paper,
    start_study,
    tiny_target,
)

from echo_jax.config.study import set_arms

_PAPER = {"batch": 0.584, "example": 0.581}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    study = start_study(
        "Where to echo: a Transformer on Common Crawl, factor 2",
        "lm.py:crawl,tiny" if variant else "lm.py:crawl",
    )
    set_arms(study, placement_arms("batch", "example"))
    if variant:
        study.base.echo.buffer = 128
        tiny_target(study)
    else:
        study.arms.batch.updates = 90_000
    search_like_paper(study, 100, tiny=bool(variant))
    study.paper = ConfigDict(_PAPER)
    return study.lock()
