"""``python -m echo_jax`` works as ``echo-jax`` does."""

import sys

from echo_jax.cli import main

sys.exit(main())
