"""Sphinx configuration; build the site with `make docs`."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sphinx.ext.napoleon.docstring import GoogleDocstring

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

project, author, language = "GAC", "The GAC authors", "en"
copyright = "The GAC authors, Apache 2.0"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "GAC"
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
smartquotes_action = "D"  # convert dashes only; quotes are often part of code
myst_heading_anchors = 3
myst_disable_syntax = ["myst_line_comment"]  # lines may start with a percent sign
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = (
    "documented"  # undocumented parameters appear only in the signature
)
default_role = "code"  # single backticks in docstrings
autodoc_preserve_defaults = True  # show LossSpec(), not the repr with all fields
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]  # paper and equation
suppress_warnings = ["config.cache"]  # conf.py defines `setup`, a function, which cannot be pickled
# links to external docs need network access at build time: GAC_DOCS_LINKS=1 make docs
if os.environ.get("GAC_DOCS_LINKS") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "transformers": ("https://huggingface.co/docs/transformers/main/en", None),
    }

# attribute docstrings are prose: text before a colon is not a type
GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()


def generate(app: object) -> None:
    """Generate the command-line and configuration reference pages."""
    subprocess.run([sys.executable, "-m", "tools.reference_pages"], cwd=HERE.parent, check=True)


def name_files_outside(app: object, page: str, source: list[str]) -> None:
    """Name files of research/ and tests/, which are not on the site, instead of linking to them."""
    link = r"\[([^\]]*)\]\((?:\.\./)+((?:research|tests)/[^)#]*)[^)]*\)"
    source[0] = re.sub(link, r"\1 (`\2`)", source[0])


def setup(app) -> None:
    app.connect("builder-inited", generate)
    app.connect("source-read", name_files_outside)
