"""The site: ``make docs`` builds it from these pages and the docstrings, with warnings as errors and no network."""

from __future__ import annotations

import pyg_dist

project = "pyg_dist"
author = "The pyg_dist developers"
release = pyg_dist.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
html_theme = "furo"
html_title = "pyg_dist"
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_heading_anchors = 3  # links to headings, checked
myst_enable_extensions = ["dollarmath"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signatures of PyG's classes name types by strings that only PyG can resolve
autodoc_class_signature = "mixed"
napoleon_custom_sections = ["Shapes"]
napoleon_numpy_docstring = False
