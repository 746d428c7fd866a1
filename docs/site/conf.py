"""The documentation as a site: the pages of docs/, the notebooks and the docstrings.

    pip install -e '.[docs]'
    sphinx-build -W --keep-going -b html -c docs/site . public
    sphinx-build -b linkcheck -c docs/site . build/links    # with access to the net

The source is the whole repository, so that pages may link to results and notebooks.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "echo_jax"
author = "the authors of echo_jax"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/site/*.md",
    "notebooks/*.ipynb",
    "results/*/table.md",
    "results/seconds/*/table.md",
]
# Dimensions, units and defaults are in the text.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
root_doc = "docs/site/index"
html_theme = "furo"
html_title = "echo_jax"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]  # Its index.html leads to the first page.
# Outputs are those that run_notebooks.py has stored.
nb_execution_mode = "off"
smartquotes = False  # --options are typed.
myst_heading_anchors = 4
# Tables of results are reached by the pages that are about them.
suppress_warnings = ["toc.not_included"]
# Addresses that answer nobody else: of one's own machine, and of a repository that the
# project has not named yet.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)\b", r"https://.*\bOWNER/REPO\b"]
linkcheck_timeout = 15
linkcheck_retries = 2
