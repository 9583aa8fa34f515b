"""Sphinx configuration: ``make docs`` runs ``sphinx-build -W -n docs build/docs``.

Two pages are written by a program before Sphinx reads the others: the benchmarks, from the records in
``benchmarks/results``, and the command line, from what ``gpuload COMMAND --help`` prints.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
# Notebooks run in a kernel of their own, which must find this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

import generated_pages
import kernels

import gpuload
from benchmarks.frame import is_installed

project = "gpuload"
author = "the gpuload developers"
project_copyright = "the gpuload developers, Apache-2.0"
release = version = gpuload.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_design",
]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}  # the first is that of generated pages
exclude_patterns = ["build"]

html_theme = "pydata_sphinx_theme"
html_title = "gpuload"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_show_sourcelink = False
html_sidebars = {page: [] for page in ("index", "quickstart", "generated/benchmarks", "migration/index")}
maximum_signature_line_length = 88
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 400
nb_merge_streams = True
nb_output_stderr = "remove"  # on some machines the build has to wait for kernels to compile, and is told so

default_role = "autolink"  # in docstrings: a link if the name resolves, otherwise emphasised
templates_path = ["templates"]
autosummary_generate = True
autodoc_default_options = {"member-order": "bysource"}
autodoc_mock_imports = [
    name for name in ("cupy", "lightning", "nvidia", "prometheus_client", "torch") if not is_installed(name)
]
autodoc_type_aliases = {"NDArray": "numpy.ndarray"}
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
numpydoc_xref_param_type = False

smartquotes = False  # values in messages and options must stay copyable

nitpicky = True
# Types of other packages, our non-public types, and our modules.
nitpick_ignore_regex = [("py:.*", r"(?!gpuload\.).*"), ("py:class", r"gpuload\..*"), ("py:obj", r"gpuload(\.[a-z_]+)+")]

kernels.start()
generated_pages.write(HERE / "generated")
shutil.rmtree(HERE / "reference" / "generated", ignore_errors=True)  # may hold pages of removed names
