"""The page on expert parallelism as a reader in either language meets it."""

import json
import re

import numpy as np
import pytest

from nvfp4viz.device import ranks
from nvfp4viz.moe.parallel import choose_slots_at_home, exchange, place
from nvfp4viz.serving import all_to_all
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import expert_parallel_opening as opening
from nvfp4viz.ui import expert_parallel_parts as parts
from nvfp4viz.ui import expert_parallel_run as run

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "expert_parallel"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Expert parallel", "zh": "专家并行"}
COPIES, REPLICAS, TURN, MOVES = (f"{PAGE}.predict.{name}" for name in ("copies", "replicas", "turn", "moves"))


def skip(at, *questions):
    for question in questions:
        skipped(at, question)
    return at


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", parts.PARTS)
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]
    assert len(at.get("plotly_chart")) <= 1


@pytest.mark.parametrize(
    "query",
    [
        {"part": "nowhere"}, {"layer": "4"}, {"ranks": "3"}, {"place": "zigzag"}, {"now": "poems"}, {"before": ""},
        {"extra": "5"}, {"window": "0"}, {"way": "post"}, {"payload": "int4"}, {"size": "gpt"}, {"link": "0"},
        {"flops": "nan"}, {"overlap": "2"}, {"procs": "64"}, {"spread": "all"}, {"model": "x"},
        {"backend": "vllm-marlin"},
    ],
    ids=lambda query: " ".join(f"{name}={value}" for name, value in query.items()),
)  # fmt: skip
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, query):
    at = open_page(PAGE, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)


def test_it_opens_on_a_rank_that_others_wait_for(open_page):
    at = open_page(PAGE)
    found = parts.balance_of("code", "code", 1, 4, 0)
    assert found.before.ratio > 2
    assert f"Rank {found.before.slowest} computes" in texts(at)
    assert f"{found.before.ratio:.2f} times the mean" in texts(at)


def test_it_opens_on_two_all_to_alls_with_the_wait_between_them(open_page):
    at = open_page(PAGE)
    (timeline,) = (json.loads(chart.proto.spec) for chart in at.get("plotly_chart"))
    dispatch, experts, combine = timeline["data"]
    assert {len(trace["y"]) for trace in timeline["data"]} == {4}
    ends = [start + wide for start, wide in zip(experts["base"], experts["x"], strict=True)]
    assert set(dispatch["base"]) == {0}
    # All combine together, when the busiest rank is done; every other rank has waited.
    assert combine["base"] == [pytest.approx(max(ends))] * 4  # a start and a length, added again
    assert sorted(ends)[-2] < max(ends)
    assert "By the model the layer takes" in texts(at)


def drawing(at):
    """Cells of the drawing of a move: (tensor, as loaded, sign, in the new slot), and where both slots are."""
    (markup,) = [html.proto.body for html in at.get("html") if 'class="left-behind"' in html.proto.body]
    heads = re.findall(r'<th scope="col">(.*?)</th>', markup)
    rows = re.findall(r'<th scope="row">(.*?)</th><td>(\d+)</td><td class="sign">(.)</td><td><span>(\d+)<', markup)
    return heads, rows


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("query", [{}, {"ranks": "32", "now": "news"}, {"ranks": "2", "extra": "0", "layer": "2"}])
def test_it_opens_on_an_expert_that_moves_without_its_input_scale(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    now, layer, ranks_, extra = (query.get(name) for name in ("now", "layer", "ranks", "extra"))
    asked = now or "code"
    found = parts.balance_of(asked, asked, int(layer or 1), int(ranks_ or 4), int(extra or 1))
    old, new = found.old[int(layer or 1)], found.new[int(layer or 1)]
    changed = [slot for slot, (was, has) in enumerate(zip(old.slots, new.slots, strict=True)) if was != has]
    assert f"{len(changed)} of {len(new.slots)}" in texts(at) if lang == "en" else f"{len(changed)} 个" in texts(at)
    heads, rows = drawing(at)
    (expert,), (before,) = (map(int, re.findall(r"\d+", head)) for head in heads)
    assert (before, expert) in {(old.slots[slot], new.slots[slot]) for slot in changed}
    more = len(new.slots) - 64
    said = {"en": f"(64 experts and {more} redundant slots; ", "zh": f"（64 个专家，另有 {more} 个冗余槽位；"}
    assert said[lang] in texts(at)
    assert [int(held) for _, held, _, _ in rows] == [expert] * 4
    assert [sign for _, _, sign, _ in rows] == ["→" if moves else "✗" for _, _, moves in run.TENSORS]
    assert [int(held) for _, _, _, held in rows] == [expert, expert, expert, before]
    assert rows[-1][0] == "input_scale"


def test_the_timeline_marks_when_eplb_would_have_it_done(open_page):
    at = open_page(PAGE)
    timeline = json.loads(at.get("plotly_chart")[0].proto.spec)
    (line,), (label,) = timeline["layout"]["shapes"], timeline["layout"]["annotations"]
    whole = max(start + wide for one in timeline["data"] for start, wide in zip(one["base"], one["x"], strict=True))
    assert line["x0"] == line["x1"] == label["x"] < whole  # EPLB shortens the wait
    assert f"After EPLB the same batch takes {line['x0']:,.1f} µs." in texts(at)
    assert label["text"] == "done after EPLB"


def test_a_placement_that_eplb_leaves_alone_leaves_nothing_behind(open_page, monkeypatch):
    monkeypatch.setattr(opening, "rearranged", lambda page: (parts.place(64, 4), parts.place(64, 4)))
    at = open_page(PAGE)
    assert "EPLB changes none of the 64 slots here" in texts(at)
    assert not [html for html in at.get("html") if 'class="left-behind"' in html.proto.body]


def test_copies_are_asked_for_beside_two_figures_and_the_matrix_stands_elsewhere(open_page):
    at = open_page(PAGE)
    assert "stands in the part *What is sent*" not in texts(at)
    guessed(at, COPIES, "none")
    assert "stands in the part *What is sent*" in texts(at)
    assert len(at.get("plotly_chart")) == 1
    layer = opening.asked_layer()
    once, each = (int(layer.dispatch_bytes(4096, "bf16", way).sum()) for way in ("tokens", "routes"))
    assert f"{each:,} bytes with a copy for each expert, {once:,} with one a rank" in texts(at)
    assert "It turns out to be: **about a third**" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("ranks_", [2, 32])
@pytest.mark.parametrize("way", ["tokens", "routes", "gather"])
def test_every_way_is_drawn(open_page, lang, ranks_, way):
    query = {"ranks": str(ranks_), "way": way, "payload": "nvfp4", "size": "tiny_moe", "place": "round_robin"}
    at = open_page(PAGE, lang=lang, part="sent", **query)
    assert len(at.get("plotly_chart")) == 1
    ids = np.concatenate(parts.steps_of("code", "code")[parts.HALF :])[:, 1].astype(np.int32)
    placed = place(64, ranks_, "round_robin")
    layer = exchange(choose_slots_at_home(ids, placed), placed)
    hidden = 128  # tiny-moe's
    assert f"{int(layer.dispatch_bytes(hidden, 'nvfp4', way).sum()):,}" in texts(at)


@pytest.mark.parametrize("ranks_", ["4", "32"])
def test_overlap_can_help_and_can_hurt(open_page, ranks_):
    slow_link = open_page(PAGE, part="time", ranks=ranks_, link="100", memory="1000", flops="200", latency="0.1")
    assert " less." in texts(slow_link)
    slow_memory = open_page(PAGE, part="time", ranks=ranks_, link="10000", memory="1", flops="100000", overlap="off")
    assert " more. Halves read weights twice" in texts(slow_memory)


def test_replicas_and_a_turn_of_traffic_are_asked_for(open_page):
    at = open_page(PAGE, part="balance")
    assert len(at.get("plotly_chart")) == 0
    guessed(at, REPLICAS, "most")
    assert "It turns out to be: **next to nothing**" in texts(at)
    guessed(at, TURN, "worse")
    assert "As you predicted: **more loaded**" in texts(at)
    assert len(at.get("plotly_chart")) == 1
    found = parts.balance_of("news", "code", 3, 4, 1)
    assert (
        f"Never rearranged: {found.before.ratio:.2f} times the mean. Rearranged for news: {found.after.ratio:.2f}"
        in texts(at)
    )


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [{"ranks": "32", "extra": "4", "window": "1"}, {"ranks": "2", "extra": "0", "before": "every", "now": "news"}],
)
def test_balance_of_other_settings(open_page, lang, query):
    at = skip(open_page(PAGE, lang=lang, part="balance", **query), REPLICAS, TURN)
    assert len(at.get("plotly_chart")) == 1


def test_a_move_that_leaves_scales_behind_silences_the_holed_model(open_page):
    at = open_page(PAGE, part="moves")
    assert "| `w13_input_scale`, `w2_input_scale` (`a1_gscale`, `a2_gscale`) | **stays in the slot** | F32 |" in texts(
        at
    )
    guessed(at, MOVES, "silent")
    assert "As you predicted: **NaN: padding instead of words**" in texts(at)
    assert "| moved, input scales left behind | NaN | `<pad><pad>" in texts(at)
    effect = run.moved("holes", "vllm-cutlass", 4, 1).effect
    assert f"{effect.empty} with one that was never written" in texts(at)


def test_a_scale_for_the_whole_layer_has_nothing_to_leave(open_page):
    at = skip(open_page(PAGE, part="moves", model="full", backend="vllm-flashinfer-cutlass", lang="en"), MOVES)
    assert "none has a wrong scale" in texts(at)


def test_every_offer_is_listed(open_page):
    at = open_page(PAGE, part="offers")
    for offer in all_to_all.OFFERS:
        assert f"| `{offer.flag}` | {offer.library} |" in texts(at)
    assert VLLM in texts(at)


LONG = 150  # the page follows the ranks until they are done, and other tests may keep the cores


def press(at):
    """Press the button; the page's run ends when the ranks have."""
    return clean(at.button(key=f"{PAGE}.start").click().run(timeout=LONG))


@pytest.mark.parametrize("spread", ["linear", "eplb"])
def test_the_ranks_really_run_and_their_bits_are_equal(open_page, spread):
    pytest.importorskip("torch")
    at = press(open_page(PAGE, part="run", spread=spread))
    assert "**Bits equal.** 2 processes over gloo" in texts(at)
    job = at.session_state[f"{PAGE}.job"]
    assert len(job.run.processes) == 2
    assert job.problem.placement.slots_per_rank == (33 if spread == "eplb" else 32)
    partial = run.partial_sums(job.problem)
    assert 0 < partial < job.answer.out.size
    assert f"**{partial:,}** of" in texts(at)
    assert not at.button(key=f"{PAGE}.start").disabled


def test_ranks_can_be_stopped(open_page, monkeypatch):
    """As a click on Stop does: its callback runs, and the page follows no longer."""
    pytest.importorskip("torch")
    monkeypatch.setattr(run.Job, "look", run.Job.cancel)
    at = press(open_page(PAGE, part="run"))
    assert "Stopped; every process has ended." in texts(at)
    job = at.session_state[f"{PAGE}.job"]
    assert all(process.returncode is not None for process in job.run.processes)
    assert run._free()


def test_a_rank_that_dies_is_said_on_the_page(open_page, monkeypatch):
    pytest.importorskip("torch")
    start = run._start

    def start_and_kill(page):
        start(page)
        page_job = run._at_work()[-1]
        page_job.processes[0].kill()

    monkeypatch.setattr(run, "_start", start_and_kill)
    at = press(open_page(PAGE, part="run", spread="linear"))
    assert "Rank 0 ended before its work was done (SIGKILL)." in texts(at).replace("\\", "")


def test_without_torch_the_button_says_what_is_missing(open_page, monkeypatch):
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    at = open_page(PAGE, part="run")
    at.button(key=f"{PAGE}.start").click().run()
    assert "PyTorch is not installed here." in texts(at)


@pytest.mark.parametrize(
    "query", [{}, {"ranks": "16", "extra": "2", "place": "round_robin", "way": "gather", "payload": "nvfp4"}], ids=str
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    at = open_page(PAGE, **query)
    whole, after = re.search(
        r"the layer takes ([\d.]+) µs.*After EPLB the same batch takes ([\d.]+) µs", texts(at)
    ).groups()
    changed, slots = re.search(r"EPLB changes \*\*(\d+) of (\d+)\*\* slots", texts(at)).groups()
    output = shown_code_output(at, PAGE)
    assert f"{whole} microseconds without overlap" in output
    assert f"{after} microseconds after EPLB" in output
    assert f"{changed} of {slots} slots get another expert and keep their input_scale" in output
    if not query:
        found = parts.balance_of("code", "code", 1, 4, 1)
        assert f"slowest {found.before.ratio:.2f} times the mean" in output
        assert f"{found.after.ratio:.2f} after EPLB" in output
    idle = re.search(r"the ranks would wait \*\*([\d.]+) ?%\*\*", texts(at)).group(1)
    assert f"{idle}% waits" in output


@pytest.mark.parametrize("query", [{}, {"ranks": "16", "size": "tiny_moe", "link": "50"}], ids=str)
def test_the_code_shown_gives_both_times(open_page, query):
    at = open_page(PAGE, part="time", **query)
    one, two = re.search(r"Whole: ([\d,.]+) µs. In two halves that overlap: \*\*([\d,.]+) µs", texts(at)).groups()
    output = shown_code_output(at, PAGE)
    assert f"{one} microseconds without overlap" in output
    assert f"{two} microseconds in two halves that overlap" in output


def test_the_code_shown_says_what_eplb_changes(open_page):
    at = open_page(PAGE, part="balance", layer="2", now="news", extra="2")
    shown = texts(skip(at, REPLICAS, TURN))
    changed, slots, arriving = re.search(
        r"EPLB changed (\d+) of this layer's (\d+) slots; in (\d+) of them", shown
    ).groups()
    expert, share = re.search(r"busiest expert \((\d+)\) takes ([\d.]+ ?%)", shown).groups()
    alone = re.search(r"step by step, that rank computes ([\d.]+) times .*\*\*([\d.]+)\*\* times after", shown).groups()
    whole = re.search(r"All 8 steps together: .* computes ([\d.]+) times .* with ([\d.]+) times", shown).groups()
    output = shown_code_output(at, PAGE)
    assert f"each step by itself, slowest rank: {alone[0]} times the mean, {alone[1]} after EPLB" in output
    assert f"all steps together, slowest rank: {whole[0]} times the mean, {whole[1]} after EPLB" in output
    assert f"{changed} of {slots} slots change, {arriving} experts come from another rank" in output
    assert f"busiest expert {expert}: {share} of all rows".replace(" %", "%") in output.replace(" %", "%")


@pytest.mark.parametrize("query", [{}, {"model": "full", "ranks": "2", "extra": "3"}], ids=str)
def test_the_code_shown_moves_experts_without_their_scales(open_page, query):
    at = open_page(PAGE, part="moves", **query)
    shown = texts(skip(at, MOVES))
    changed, slots = re.search(r"(\d+) of all layers' (\d+) slots got another expert", shown).groups()
    losses = re.findall(r"\| (\d\.\d{4}|NaN) \|", shown)
    assert len(losses) == 3
    output = shown_code_output(at, PAGE)
    assert f"{changed} of {slots} slots get another expert" in output
    assert re.findall(r"loss (\d\.\d{4}|nan)", output) == [loss.lower() for loss in losses]


@pytest.mark.slow
def test_the_code_shown_runs_the_ranks(open_page):
    output = shown_code_output(open_page(PAGE, part="run"), PAGE)
    assert "2 processes, gloo: 0 of " in output
    assert output.count(" bytes, returned ") == 2


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
