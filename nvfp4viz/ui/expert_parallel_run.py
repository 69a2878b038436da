"""The parts of the page on expert parallelism that run something: a move, ranks in processes; and who offers what."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.model import corpus
from nvfp4viz.moe.parallel import Placement, choose_slots_at_home, combine_by_rank
from nvfp4viz.serving import all_to_all
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.route_trace import EVERY
from nvfp4viz.ui import caches, errors, predict
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.expert_parallel_parts import ASKED, PAGE, RANKS, balance_of, choose
from nvfp4viz.ui.export import about
from nvfp4viz.ui.i18n import listed, t
from nvfp4viz.ui.kernels import wait_for_kernels
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.numbers import four

if TYPE_CHECKING:
    from nvfp4viz.device.ranks import Problem, RankAnswer, RankRun
    from nvfp4viz.serving.expert_parallel import MoveEffect

HOLED, WHOLE = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full"
MODELS = {"holes": HOLED, "full": WHOLE}
BACKENDS = ("vllm-cutlass", "vllm-flashinfer-cutlass")
PROMPT = corpus.DEMO_PROMPTS["news"]
REPLY = 16
PROCESSES = (2, 4)
SECONDS = 240.0
STEP = 0.25
"""Seconds between two looks at the ranks."""
PRESSED = "_expert_parallel_pressed"
TENSORS = (
    ("`w13_weight`, `w2_weight`", "U8", True),
    ("`w13_weight_scale`, `w2_weight_scale`", "F8_E4M3", True),
    ("`w13_weight_scale_2`, `w2_weight_scale_2` (`g1_alphas`, `g2_alphas`)", "F32", True),
    ("`w13_input_scale`, `w2_input_scale` (`a1_gscale`, `a2_gscale`)", "F32", False),
)
"""An expert's tensors in vLLM, their type in a checkpoint, and whether EPLB exchanges them."""


# ------------------------------------------------------------------ what moves and what stays


@dataclass(frozen=True, slots=True)
class Moved:
    """A rearrangement's effect on loss and on one reply."""

    effect: MoveEffect
    reply: str
    moved_reply: str
    stayed_reply: str


@st.cache_resource(max_entries=16, show_spinner=False)
def moved(model: str, backend: str, ranks: int, extra: int) -> Moved:
    """Rearrange every layer for mixed traffic, with the input scales and without."""
    from nvfp4viz.model import expect
    from nvfp4viz.serving import expert_parallel as ep

    served = caches.served(caches.Build(MODELS[model], backend))
    plan = balance_of(EVERY, EVERY, 0, ranks, extra)
    effect = ep.move_effect(served, plan.old, plan.new, corpus.held_out_documents("news", 1))
    wholly, partly = (ep.moved(served, plan.old, plan.new, scales_move=move) for move in (True, False))
    guess = expect(caches.likely_answer(PROMPT))
    return Moved(effect, *(one.generate(PROMPT, REPLY, guess=guess).text for one in (served, wholly, partly)))


def moves_part(page: Lesson) -> None:
    """What EPLB exchanges, and what becomes of a healthy answer when the rest stays."""
    wait_for_kernels()
    page.prose("moves.before", version=VLLM)
    page.table(
        ("tensor", "moves", ">dtype"),
        [(names, page.t("moves.yes" if moves else "moves.no"), dtype) for names, dtype, moves in TENSORS],
    )
    with st.spinner(page.t("moves.busy")):
        asked = moved("holes", BACKENDS[0], ASKED["ranks"], 1)
    effect = asked.effect
    shown = predict.ask(
        f"{PAGE}.predict.moves",
        ("same", "worse", "silent"),
        answer="silent" if np.isnan(effect.stayed) else "worse" if effect.stayed > effect.before else "same",
        prompt=escape(PROMPT),
        reply=escape(asked.reply),
        stayed=escape(_plain(asked.stayed_reply)),
        ranks=ASKED["ranks"],
        redundant=ASKED["ranks"],  # one a rank
        changed=effect.changed,
        empty=effect.empty,
    )
    if not shown:
        return
    stage, side = page.stage()
    view = page.view
    with side:
        choose(page, "model", tuple(MODELS))
        choose(page, "backend", BACKENDS)
        st.selectbox(page.t("pick.ranks"), RANKS, **view.widget("ranks"))
        with st.spinner(page.t("moves.busy")):
            found = moved(view["model"], view["backend"], view["ranks"], view["extra"])
        effect = found.effect
        page.finding(
            "moves.seen" if effect.wrong else "moves.none",
            redundant=view["ranks"] * view["extra"],
            changed=effect.changed,
            slots=effect.slots,
            wrong=effect.wrong,
            empty=effect.empty,
            worst=f"{effect.worst:.2f}",
        )
        page.glossary("input_scale", "global_scale")
    with stage:
        page.table(
            ("case", ">loss", "reply"),
            [
                (page.t(f"moves.{name}"), "NaN" if np.isnan(loss) else f"{loss:.4f}", f"`{_plain(reply)}`")
                for name, loss, reply in (
                    ("at_first", effect.before, found.reply),
                    ("all", effect.moved, found.moved_reply),
                    ("left", effect.stayed, found.stayed_reply),
                )
            ],
        )
        st.caption(page.t("moves.prompt", prompt=escape(PROMPT)))
    page.prose("moves.text", version=VLLM)


def moved_rows(page: Lesson) -> list[dict[str, object]]:
    """Each of the three ways that the experts stand, to download; computes them."""
    view = page.view
    found = moved(view["model"], view["backend"], view["ranks"], view["extra"])
    effect = found.effect
    of = {"checkpoint": MODELS[view["model"]], "backend": view["backend"], "of_ranks": view["ranks"]}
    of |= {"redundant_experts": view["extra"], "prompt": PROMPT}
    counted = {name: getattr(effect, name) for name in ("slots", "changed", "wrong", "empty", "worst")}
    none = dict.fromkeys(counted, 0) | {"slots": effect.slots, "worst": 1.0}
    cases = (
        ("at_first", effect.before, found.reply, none),
        ("all_moved", effect.moved, found.moved_reply, none | {"changed": effect.changed}),
        ("input_scales_left", effect.stayed, found.stayed_reply, counted),
    )
    return about(of, [{"case": case, "loss": loss, "reply": reply} | count for case, loss, reply, count in cases])


def _plain(text: str) -> str:
    """A reply inside backquotes, in one line; a long run of padding is cut."""
    line = text.replace("`", "'").replace("\n", " ⏎ ")
    return (line if len(line) <= 40 else f"{line[:40]}…") or " "


def snippets(page: Lesson) -> dict[str, dict[str, object]]:
    """What fills the code of the parts that run something, by part."""
    view = page.view
    return {
        "moves": {
            "sample": MODELS[view["model"]],
            "backend": view["backend"],
            "ranks": view["ranks"],
            "extra": view["extra"],
            "tokens": REPLY,
        },
        "run": {
            "sample": WHOLE,
            "backend": BACKENDS[0],
            "layer": view["layer"],
            "ranks": view["procs"],
            "extra": 1 if view["spread"] == "eplb" else 0,
        },
    }


# ------------------------------------------------------------------ ranks in processes


@st.cache_resource(max_entries=1, show_spinner=False)
def _at_work() -> list[RankRun]:
    """The run of this server, if there is one: two at once would only slow each other."""
    return []


def _free() -> bool:
    """Whether no run is going on; one that nobody watches any more is ended when its time is over."""
    runs = _at_work()
    for run in list(runs):
        if all(process.poll() is not None for process in run.processes):
            runs.remove(run)
        elif run.overdue:
            run.stop()
            runs.remove(run)
    return not runs


@dataclass(slots=True)
class Job:
    """A run in this session: at work, then its answer or its error."""

    problem: Problem
    run: RankRun
    begin: float
    answer: RankAnswer | None = None
    error: NvError | None = None
    cancelled: bool = False
    seconds: float = 0.0

    @property
    def active(self) -> bool:
        return self.answer is None and self.error is None and not self.cancelled

    def look(self) -> None:
        """Collect what the ranks have done."""
        try:
            if self.run.poll():
                self.answer = self.run.answer()
        except (NvError, OSError) as error:
            # Stop ends the ranks and removes their files from the reader's next run, while this one still looks.
            if self.cancelled:
                return
            if not isinstance(error, NvError):
                raise
            self.error = error
        if not self.active:
            self.seconds = time.monotonic() - self.begin
            self.run.stop()

    def cancel(self) -> None:
        """End the ranks."""
        self.cancelled = True
        self.run.stop()


def problem_of(layer: int, ranks: int, eplb: bool) -> Problem:
    """One layer's batch of every demo prompt; with `eplb`, a redundant slot a rank, rearranged for mixed traffic."""
    from nvfp4viz.serving import expert_parallel as ep

    plan = balance_of(EVERY, EVERY, layer, ranks, 1 if eplb else 0)
    placement = plan.new[layer] if eplb else plan.plain
    served = caches.served(caches.Build(WHOLE))
    return ep.layer_problem(served, corpus.DEMO_PROMPTS.values(), layer, placement)


def _press() -> None:
    # Kept until the run that starts the ranks: a cold link's first run may end before it comes to the button.
    st.session_state[PRESSED] = True


def _start(page: Lesson) -> None:
    from nvfp4viz.device.ranks import RankRun

    view = page.view
    st.session_state.pop(f"{PAGE}.job", None)
    try:
        problem = problem_of(view["layer"], view["procs"], view["spread"] == "eplb")
        run = RankRun(problem, seconds=SECONDS)
    except NvError as error:
        errors.show(error)
        return
    _at_work().append(run)
    st.session_state[f"{PAGE}.job"] = Job(problem, run, time.monotonic())


def run_part(page: Lesson) -> None:
    """The button, what the ranks are at, and the comparison."""
    wait_for_kernels()
    stage, side = page.stage()
    with side:
        st.segmented_control(page.t("pick.procs"), PROCESSES, required=True, **page.view.widget("procs"))
        choose(page, "spread", ("linear", "eplb"))
        st.number_input(page.t("pick.layer"), 0, 3, **page.view.widget("layer"))
        page.prose("run.does")
    page.prose("run.text")
    with stage:
        if st.session_state.pop(PRESSED, False) and _free():
            _start(page)
        button, shown = st.empty(), st.empty()
        job: Job | None = st.session_state.get(f"{PAGE}.job")
        if job is not None and job.active:
            # In the place of Start, which does not move while the ranks report: a click would miss what moves.
            button.button(page.t("run.cancel"), key=f"{PAGE}.cancel", icon=":material/stop:", on_click=job.cancel)
            with shown.container():
                _follow(page, job)
        busy = not _free()
        button.button(
            page.t("run.start"), key=f"{PAGE}.start", icon=":material/play_arrow:", disabled=busy, on_click=_press
        )
        with shown.container():
            if busy:
                st.caption(page.t("run.elsewhere"))
            if job is None:
                return
            if job.cancelled:
                st.caption(page.t("run.cancelled"))
            elif job.error is not None:
                errors.show(job.error)
            else:
                _compared(page, job)


def _follow(page: Lesson, job: Job) -> None:
    """Draw what the ranks are at until they are done.  A click anywhere ends this run of the page, and the next one
    follows on."""
    from nvfp4viz.device.ranks import STEPS

    bar, table = st.empty(), st.empty()
    while job.active:
        steps = job.run.steps()
        bar.progress(
            sum(STEPS.index(step) for step in steps) / (len(steps) * (len(STEPS) - 1)),
            page.t("run.busy", seconds=int(time.monotonic() - job.begin)),
        )
        lines = [f"- {page.t('columns.rank')} {rank}: {page.t(f'run.step.{step}')}" for rank, step in enumerate(steps)]
        table.markdown("\n".join(lines))
        time.sleep(STEP)
        job.look()


def _compared(page: Lesson, job: Job) -> None:
    from nvfp4viz.serving.expert_parallel import differing, one_process

    assert job.answer is not None
    answer, placement = job.answer, job.problem.placement
    wrong = differing(answer.out, one_process(job.problem))
    page.finding(
        "run.equal" if not wrong else "run.unequal",
        ranks=placement.ranks,
        wrong=f"{wrong:,}",
        values=f"{answer.out.size:,}",
        seconds=four(job.seconds),
        backend=answer.backend,
    )
    page.table(
        ("rank", ">experts", ">rows", ">sent", ">returned", ">dispatch_ms", ">compute_ms", ">combine_ms"),
        [
            (
                str(rank),
                str(len(set(placement.on(rank).tolist()))),
                f"{answer.rows[rank]:,}",
                f"{_others(answer.dispatched, rank):,}",
                f"{_others(answer.combined, rank):,}",
                *(f"{1000 * seconds:.1f}" for seconds in answer.seconds[rank]),
            )
            for rank in range(placement.ranks)
        ],
    )
    page.prose("run.partial", partial=f"{partial_sums(job.problem):,}", values=f"{answer.out.size:,}")


def _others(sent: np.ndarray, rank: int) -> int:
    """Bytes that left a rank."""
    return int(sent[rank].sum() - sent[rank, rank])


def partial_sums(problem: Problem) -> int:
    """BF16 values that would change, did each rank sum its own routes before it sends them."""
    from nvfp4viz.moe import Routing, run_w4a4_experts
    from nvfp4viz.serving.expert_parallel import differing

    routing = Routing(problem.ids, problem.weights, np.empty((len(problem.ids), 0), np.float32))
    found = run_w4a4_experts(problem.x, routing, problem.experts, record=True)
    assert found.trace is not None
    placement: Placement = problem.placement
    ranks = placement.rank_of[choose_slots_at_home(problem.ids, placement)]
    return differing(found.out, combine_by_rank(found.trace.routes, problem.weights, ranks))


# ------------------------------------------------------------------ who offers it


def offers_part(page: Lesson) -> None:
    """The values of ``--all2all-backend``."""
    page.prose("offers.before", version=VLLM)
    page.table(
        ("flag", "library", "shape", "travels", "refused"),
        [
            (
                f"`{offer.flag}`",
                offer.library,
                page.t(f"offers.{offer.shape}"),
                listed(name.upper() for name in offer.travels),
                listed(f"`{name}`" for name in offer.refused_by) or "–",
            )
            for offer in all_to_all.OFFERS
        ],
    )
    page.prose(
        "offers.text",
        version=VLLM,
        block=all_to_all.DEEPEP_BLOCK,
        never=listed(f"`{name}`" for name in all_to_all.NEVER),
        read=t("ui.semicolon").join(f"`{path}` @ `{commit}`" for path, commit in all_to_all.READ.items()),
    )
