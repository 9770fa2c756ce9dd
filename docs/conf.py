"""Settings of the documentation site, which `make docs` builds.

The source folder is the root of the repository, so that a link from docs/ to a recipe or to a table of results is the
same link on GitHub and on the site.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "sorl-trl"
author = "the sorl-trl authors"
copyright = author
root_doc = "docs/index"
include_patterns = ["docs/**.md", "recipes/README.md", "examples/*/README.md", "benchmarks/results/*.md"]
include_patterns += ["CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "formulas",
    "github_markdown",
    "docstrings",
]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autodoc_default_options = {"members": True, "imported-members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = napoleon_numpy_docstring = False  # docstrings.py calls it, and not for attributes
napoleon_use_rtype = False
default_role = "py:obj"  # a name in backticks links to its object if this site has it, and is code if not
nitpick_ignore_regex = [
    ("py:obj", r"[\s\S]*"),
    (
        "py:.*",
        r"(Path|(bm25s|collections|concurrent|contextlib|datasets|numpy|os|pathlib|peft|tenacity|torch|transformers|trl|typing)\..*)",
    ),
    # What signatures name, and is imported for type checkers alone.
    (
        "py:.*",
        r"BitsAndBytesConfig|GRPOTrainer|GenerationConfig|PeftConfig|PeftModel|PolicyRollout|PreTrainedModel|"
        r"PreTrainedTokenizerBase|(sorl_trl\.rollout\.chat\.)?RolloutSetup",
    ),
    # Nobody outside of the package makes one.
    (
        "py:.*",
        r"Factory|SanitizedText|Manifest|Tensor|Tool|UserMistake|inf|sorl_trl\.checks\..*|"
        r"sorl_trl\.(rollout\.observation\.SanitizedText|search\.bm25\.Manifest)|types\.Annotated",
    ),
]

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "sorl-trl"
html_static_path = ["site_static"]
html_css_files = ["site.css"]
html_extra_path = ["site_root"]
html_theme_options = {"top_of_page_buttons": []}
