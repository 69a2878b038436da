"""The case of the empty answer: the default page, at ``/``."""

from nvfp4viz.ui import lesson
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page("empty_answer")
