"""Speed and memory as ratios, measured side by side: ``python -m benchmarks``."""

import os

# A notebook's backend, which a command in a cell inherits, may not be installed here.
os.environ.pop("MPLBACKEND", None)
