"""e2m1."""

from nvfp4viz.ui import lesson
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page("e2m1")
