"""Settings of the site: `./build.sh docs` builds it with Sphinx from the pages of this folder."""

project = "faser_trtllm"
extensions = ["myst_parser"]
exclude_patterns = ["observability"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "faser_trtllm"
html_copy_source = False
html_show_sphinx = False
