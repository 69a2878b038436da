"""Map: where each lesson sits in a layer and in the life of a checkpoint, ways through them, and what is left out."""

from nvfp4viz.figures import places
from nvfp4viz.ui import lesson, map_parts, state
from nvfp4viz.ui.shell import ensure_shell

ensure_shell()
page = lesson.open_page("map", path=state.choice(tuple(places.PATHS), default="first"))

map_parts.picture(page)
map_parts.way(page)
map_parts.left_out(page)
page.foot(code={"path": page.view["path"]}, data={"places": places.place_rows})
