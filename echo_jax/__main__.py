"""Runs ``echo-jax`` as ``python -m echo_jax``."""

import sys

from echo_jax.cli import main

sys.exit(main())
