"""How Sphinx builds the site: `make docs`."""

import os
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
smartquotes_action = "D"  # dashes; quotes in our words are often code
myst_heading_anchors = 3
myst_disable_syntax = ["myst_line_comment"]  # a line may begin with a percent sign
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # others are in the signature
default_role = "code"  # single backticks in docstrings
autodoc_preserve_defaults = True  # LossSpec(), not all its fields
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]  # paper and equation
suppress_warnings = ["config.cache"]  # `setup` below is a function of this file
# links to others' pages need a network while building: GAC_DOCS_LINKS=1 make docs
if os.environ.get("GAC_DOCS_LINKS") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "transformers": ("https://huggingface.co/docs/transformers/main/en", None),
    }

# the words under a field are prose: what stands before a colon is no type
GoogleDocstring._parse_attribute_docstring = lambda self: self._consume_to_end()


def generate(app: object) -> None:
    """Pages that the program itself writes: the command line and every configuration key."""
    subprocess.run([sys.executable, "-m", "tools.reference_pages"], cwd=HERE.parent, check=True)


def setup(app) -> None:
    app.connect("builder-inited", generate)
