"""What stands on a page keeps its place from run to run: the browser builds anew what moves, and focus goes with it."""

import pytest

from nvfp4viz.ui.registry import PAGES

from .conftest import clean


def components(at):
    """Places of the components that live in the browser, as indices from the page's root."""

    def walk(block, path):
        for index, node in block.children.items():
            if node.type == "bidi_component":
                yield (*path, index)
            if hasattr(node, "children"):
                yield from walk(node, (*path, index))

    return list(walk(at.main, ()))


@pytest.mark.parametrize("page", [entry.id for entry in PAGES])
@pytest.mark.parametrize("query", [{}, {"nonsense": "1", "layer": "-7"}], ids=["", "bad link"])
def test_components_stay_where_they_are(open_page, page, query):
    at = open_page(page, **query)
    before = components(at)
    assert before, "every page has a button that copies its link"
    clean(at.run())
    assert components(at) == before


def test_a_note_on_the_language_moves_nothing(open_page):
    at = open_page("empty_answer", lang="xx")
    before = components(at)
    assert any("lang=xx" in note.value for note in at.caption)
    clean(at.run())
    assert any("lang=xx" in note.value for note in at.caption)  # as every note on a link, until another page
    assert components(at) == before
