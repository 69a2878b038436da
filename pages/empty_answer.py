"""The case of the empty answer: the default page, at ``/``.  Each of its five steps is a function of ``ui/story_*``."""

from nvfp4viz.ui import lesson, story, story_close, story_foot, story_open
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page("empty_answer", **story.PARAMS)
story.tell(page, (story_open.answers, story_open.served, story_open.holes, story_close.chain, story_close.remedies))
story_foot.foot(page)
