"""two_level_scaling."""

from nvfp4viz.ui import lesson
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page("two_level_scaling")
