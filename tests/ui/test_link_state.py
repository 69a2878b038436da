"""What a link may say, and what a session does with it."""

import math

import pytest
from streamlit.testing.v1 import AppTest

from nvfp4viz.ui import state


@pytest.mark.parametrize(
    ("param", "text", "value"),
    [
        (state.integer(0, 15), "7", 7),
        (state.number(-6, 6), "-2.5", -2.5),
        (state.real(), "-inf", -math.inf),
        (state.choice(("ieee", "vllm-cuda")), "vllm-cuda", "vllm-cuda"),
        (state.choices(("info", "warn", "error")), "error,info", ("info", "error")),
        (state.flag(), "1", True),
        (state.slug(), "tiny-moe.holed_2", "tiny-moe.holed_2"),
        (state.hex_digits(4, "0000"), "AbC1", "abc1"),
        (state.numbers(3, (0, 0, 0)), "1,-0.5,inf", (1.0, -0.5, math.inf)),
        (state.text(), "🙂 中文 " + "x" * 494, "🙂 中文 " + "x" * 494),
    ],
)
def test_a_good_value_is_read(param, text, value):
    assert param.parse(text) == value


@pytest.mark.parametrize(
    ("param", "text"),
    [
        (state.integer(0, 15), "16"),
        (state.integer(0, 15), "1.5"),
        (state.integer(0, 15), "1" * 5000),  # more digits than Python converts
        (state.number(-6, 6), "nan"),
        (state.number(-6, 6), "1e400"),
        (state.real(), "two"),
        (state.choice(("ieee",)), "IEEE"),
        (state.choices(("info", "warn")), "info,fatal"),
        (state.choices(("info", "warn")), "info,info"),
        (state.choices(("info", "warn")), ""),
        (state.flag(), "yes"),
        (state.slug(), "../../etc/passwd"),
        (state.slug(), "/home"),
        (state.slug(), ""),
        (state.hex_digits(4, "0000"), "12g4"),
        (state.numbers(3, (0, 0, 0)), "1,2"),
        (state.numbers(3, (0, 0, 0)), "1,2,x"),
        (state.text(), "x" * 501),
        (state.numbers(3, (0, 0, 0), most=2), "1,2,2.5"),
        (state.numbers(3, (0, 0, 0), most=2), "1,2,nan"),
    ],
)
def test_a_bad_value_is_refused(param, text):
    with pytest.raises(ValueError):
        param.parse(text)


@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, 2.5, 1e300, 5e-324, -1e-7, 123456789.0, math.inf, -math.inf])
def test_a_number_reads_back_to_the_same_bits(value):
    again = float(state.repr_number(value))
    assert again == value
    assert math.copysign(1, again) == math.copysign(1, value)


def _script() -> None:
    import streamlit as st

    from nvfp4viz.ui import state

    page = st.session_state.get("page", "first")
    view = state.open_view(page, x=state.integer(0, 9, default=3), layer=state.integer(0, 3))
    view.refine("expert", state.integer(0, 63))
    if st.session_state.pop("set_x", None) is not None:
        view.put(x=5)
    st.write(f"x={view['x']} layer={view['layer']}" + (f" expert={view['expert']}" if view["expert"] else ""))
    st.markdown(" ".join(f"{note.name}={note.value}" for note in view.notes) or "none")
    view.write_link()


@pytest.fixture
def at() -> AppTest:
    return AppTest.from_function(_script)


def _said(at: AppTest) -> str:
    assert not at.exception
    return at.markdown[0].value


def _query(at: AppTest) -> dict[str, str]:
    return {name: (value[0] if isinstance(value, list) else value) for name, value in dict(at.query_params).items()}


def test_defaults_stay_out_of_the_link(at):
    at.run()
    assert _said(at) == "x=3 layer=None"
    assert _query(at) == {}


def test_a_link_is_read_and_kept(at):
    at.query_params["x"] = "7"
    at.query_params["layer"] = "2"
    at.run()
    assert _said(at) == "x=7 layer=2"
    assert _query(at) == {"x": "7", "layer": "2"}


def test_a_change_reaches_the_link_and_is_not_undone_by_it(at):
    at.query_params["x"] = "7"
    at.run()
    at.session_state["set_x"] = True
    at.run()
    assert _said(at).startswith("x=5")
    assert _query(at)["x"] == "5"
    at.run()
    assert _said(at).startswith("x=5")


def test_what_makes_no_sense_is_named_and_removed(at):
    at.query_params["x"] = "70"
    at.query_params["layer"] = "99"
    at.query_params["what"] = "ever"
    at.run()
    assert _said(at) == "x=3 layer=None"
    assert at.markdown[1].value == "layer=99 x=70 what=ever"
    assert _query(at) == {}


def test_of_several_values_the_last_counts_and_it_is_said(at):
    at.query_params["x"] = ["2", "7"]
    at.query_params["layer"] = ["1", "99"]
    at.query_params["expert"] = ["5", "5"]
    at.run()
    assert _said(at) == "x=7 layer=None expert=5"
    assert [(note.name, note.value, note.values) for note in at.session_state["_notes"]] == [
        ("x", "7", ("2", "7")),
        ("layer", "99", ("1", "99")),
        ("layer", "99", ()),
    ]
    assert _query(at) == {"x": "7", "expert": "5"}


def test_many_values_are_not_all_repeated(at):
    at.query_params["x"] = [str(value) for value in range(10)]
    at.run()
    assert [note.values for note in at.session_state["_notes"]] == [("0", "1", "…", "9")]


def test_the_cursor_is_shared_between_pages_and_rechecked(at):
    at.query_params["layer"] = "2"
    at.run()
    at.session_state["page"] = "second"
    at.run()
    assert _said(at) == "x=3 layer=2"
    at.query_params.clear()  # as Streamlit does when a reader turns to another page
    at.session_state["layer"] = 77  # that page knows more layers than this one
    at.session_state["page"] = "third"
    at.run()
    assert _said(at) == "x=3 layer=None"


def test_back_brings_the_default_that_the_address_leaves_out(at):
    at.run()
    at.session_state["set_x"] = True
    at.run()
    assert _query(at) == {"x": "5"}
    at.query_params.clear()  # the browser's Back
    at.run()
    assert _said(at) == "x=3 layer=None"
    assert _query(at) == {}


def _settling_script() -> None:
    """A page that settles on a layer and an expert by itself when one arrives, as the Explorer does."""
    import streamlit as st

    from nvfp4viz.ui import state

    view = state.open_view("settling", x=state.integer(0, 9, default=3))
    if not view.arrived:
        view.write_link()
    if view["layer"] is None:
        view.put(layer=0, expert=9)
    st.write(f"x={view['x']} layer={view['layer']} expert={view['expert']}")
    if view.arrived:
        view.trust_link()
    else:
        view.write_link()


def test_what_the_page_settled_is_not_undone_by_an_address_that_lacks_it():
    at = AppTest.from_function(_settling_script)
    at.run()
    assert _said(at) == "x=3 layer=0 expert=9"
    assert _query(at) == {}  # the browser puts it in, and Streamlit does not hear of it
    at.session_state["expert"] = 11  # a cell of the same layer is picked
    at.run()
    assert _said(at) == "x=3 layer=0 expert=11"
    assert _query(at) == {"layer": "0", "expert": "11"}


def test_back_to_an_address_without_them_is_followed_all_the_same():
    at = AppTest.from_function(_settling_script)
    at.query_params["x"] = "5"
    at.run()
    assert _said(at) == "x=5 layer=0 expert=9"
    at.query_params.clear()  # Back, to before x
    at.run()
    assert _said(at) == "x=3 layer=0 expert=9"


def test_forward_brings_what_the_address_says(at):
    at.run()
    at.query_params["x"] = "5"
    at.run()
    assert _said(at) == "x=5 layer=None"


def test_a_late_address_does_not_undo_a_widget(at):
    at.query_params["x"] = "7"
    at.run()
    at.session_state["first.x"] = 8  # a widget's callback, while the address bar has not yet heard of the run before
    at.query_params.clear()
    at.run()
    assert _said(at) == "x=8 layer=None"
    assert _query(at) == {"x": "8"}


def test_a_late_address_does_not_undo_what_another_widget_did_before(at):
    """Two changes one after the other: the second is sent before the browser hears of the first one's address."""
    at.run()
    at.session_state["first.x"] = 8
    at.run()
    assert _query(at) == {"x": "8"}
    at.query_params.clear()
    at.session_state["layer"] = 2
    at.run()
    assert _said(at) == "x=8 layer=2"
    assert _query(at) == {"x": "8", "layer": "2"}


def test_an_edit_that_says_the_same_again_is_no_back(at):
    """As a drag ends: the component repeats its last value."""
    at.run()
    at.session_state["first.x"] = 8
    at.run()
    at.query_params.clear()
    at.session_state["_edited"] = True  # what View.put leaves in a component's callback
    at.run()
    assert _said(at) == "x=8 layer=None"


def _refined_script() -> None:
    import streamlit as st

    from nvfp4viz.ui import state

    view = state.open_view("refined", x=state.integer(0, 9, default=3), layer=state.integer(0, None, default=0))
    view.refine("layer", state.integer(1, 5, default=1))
    st.write(f"x={view['x']} layer={view['layer']}")
    view.write_link()


def test_back_is_followed_where_the_open_checkpoint_says_the_default():
    at = AppTest.from_function(_refined_script)
    at.query_params["layer"] = "1"
    at.run()
    assert _query(at) == {}
    at.session_state["refined.x"] = 5
    at.run()
    assert _query(at) == {"x": "5"}
    at.query_params.clear()  # Back
    at.run()
    assert _said(at) == "x=3 layer=1"
    at.query_params["layer"] = "4"  # Forward
    at.run()
    assert _said(at) == "x=3 layer=4"


def test_one_run_writes_the_address_once(at, monkeypatch):
    import streamlit as st

    writes = []
    proxy = type(st.query_params)
    monkeypatch.setattr(proxy, "from_dict", lambda self, params: writes.append(dict(params)))
    monkeypatch.setattr(proxy, "__setitem__", lambda self, name, value: writes.append((name, value)))
    at.session_state["first.x"], at.session_state["layer"] = 4, 1
    at.run()
    assert writes == [{"x": "4", "layer": "1"}]


def test_a_range_that_is_known_late_is_named_too(at):
    at.query_params["expert"] = "99"
    at.run()
    assert _said(at) == "x=3 layer=None"
    assert at.markdown[1].value == "expert=99"
    assert _query(at) == {}


def test_a_cursor_from_another_page_moves_without_a_word(at):
    at.run()
    at.session_state["expert"] = 99
    at.run()
    assert _said(at) == "x=3 layer=None"
    assert at.markdown[1].value == "none"


def test_an_unknown_mode_is_named_and_a_known_one_stays(at):
    at.query_params["mode"] = "xx"
    at.run()
    assert at.markdown[1].value == "mode=xx"
    assert _query(at) == {}
    at.query_params["mode"] = "workshop"
    at.run()
    assert at.session_state["mode"] == "workshop"
    assert _query(at) == {"mode": "workshop"}
