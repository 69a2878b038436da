"""Two parts of the page on loading: the weight-only rule on an editable config, and the stages of one expert."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.errors import NvError
from nvfp4viz.serving.config_lines import MOST_CHARACTERS, Decision, read_configs
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.serving.stages import STAGES, ExpertLife, Stage, expert_life, flags_of
from nvfp4viz.ui import caches, errors, predict
from nvfp4viz.ui.i18n import t
from nvfp4viz.ui.loading_parts import BACKENDS, HOLED, PAGE
from nvfp4viz.ui.numbers import exact
from nvfp4viz.ui.pick import pick_expert

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvfp4viz.ui.lesson import Lesson

BITS = {"num_bits": 4, "type": "float", "group_size": 16}


def _flat(groups: Any = None, algo: str = "NVFP4") -> dict[str, Any]:
    body: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algo}
    if groups is not None:
        body["config_groups"] = groups
    return {"num_experts": 64, "quantization_config": {**body, "ignore": ["lm_head"]}}


_SIDECAR = {
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
}
_NULL = {"weights": BITS, "input_activations": None}
_BOTH = {"weights": BITS, "input_activations": BITS}
EXAMPLES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "null": (_flat({"group_0": _NULL}), None),
    "absent": (_flat({"group_0": {"weights": BITS}}), None),
    "two_groups": (_flat({"group_0": _NULL, "group_1": _BOTH}), None),
    "sidecar": ({"num_experts": 64}, _SIDECAR),
    "empty": (_flat({}), None),
    "empty_object": (_flat({"group_0": {"weights": BITS, "input_activations": {}}}), None),
    "w4a4": (_flat({"group_0": _BOTH}), None),
    "w4a16": (_flat({"group_0": {"weights": BITS}}, "W4A16_NVFP4"), None),
}
"""``config.json`` and ``hf_quant_config.json``; the second to the fifth are the cases of public report vllm#54189."""
WEIGHT_ONLY = "null"
"""The example that the rule is made for."""
CASES = ("absent", "two_groups", "sidecar", "empty")
FILES = ("config", "sidecar")


def example_texts(name: str) -> tuple[str, str]:
    """Both files of an example, as text."""
    config, sidecar = EXAMPLES[name]
    return json.dumps(config, indent=2), "" if sidecar is None else json.dumps(sidecar, indent=2)


def _fill(name: str) -> None:
    for file, text in zip(FILES, example_texts(name), strict=True):
        st.session_state[f"{PAGE}.text.{file}"] = text


def texts_of(page: Lesson) -> tuple[str, str]:
    """What stands in the two editors; they follow the chosen example until somebody writes in them."""
    filled = f"{PAGE}.filled"
    if st.session_state.get(filled) != page.view["cfg"]:
        _fill(page.view["cfg"])
        st.session_state[filled] = page.view["cfg"]
    config, sidecar = (str(st.session_state[f"{PAGE}.text.{file}"]) for file in FILES)
    return config, sidecar


def left_out_of_links(page: Lesson) -> str:
    """A sentence about what a reader has written into the editors, which no link holds."""
    shown = [
        st.session_state.get(f"{PAGE}.text.{file}", text) for file, text in zip(FILES, _example(page), strict=True)
    ]
    written = page.view["part"] == "promotion" and tuple(shown) != _example(page)
    return page.t("promotion.left_out") if written else ""


def _example(page: Lesson) -> tuple[str, str]:
    return example_texts(page.view["cfg"])


def decision_of(page: Lesson) -> Decision | None:
    """What comes of the texts; None where a file cannot be read."""
    try:
        return read_configs(*texts_of(page))
    except NvError:
        return None


def promotion_part(page: Lesson) -> None:
    """The rule on an editable config: what the server believes, and which line decided."""
    stage, side = page.stage()
    with side:
        revealed = _which_case(page)
    if not revealed:
        text, _ = example_texts(WEIGHT_ONLY)
        with stage:
            # Without Streamlit's colours, which are too pale for small type.
            st.code(text, language=None)
        with side:
            _verdict(page, read_configs(text, ""))
        return
    with side:
        st.selectbox(
            page.t("promotion.example"),
            tuple(EXAMPLES),
            format_func=lambda name: page.t(f"example.{name}"),
            **page.view.widget("cfg"),
        )
        page.prose("promotion.edit")
    config, sidecar = texts_of(page)
    with stage:
        for file, height in zip(FILES, (380, 150), strict=True):
            st.text_area(
                page.t(f"promotion.{file}"),
                key=f"{PAGE}.text.{file}",
                height=height,
                max_chars=MOST_CHARACTERS,
                persist_state="session",
            )
    with side:
        try:
            found = read_configs(config, sidecar)
        except NvError as error:
            errors.show(error)
            return
        _verdict(page, found)
    page.table(
        ("step", "question", "found", "holds"),
        [
            (
                str(number),
                page.t(f"step.{step.id.replace('-', '_')}"),
                _short(step.found),
                "–" if step.holds is None else page.t("yes" if step.holds else "no"),
            )
            for number, step in enumerate(found.resolved.steps, start=1)
        ],
    )
    page.prose("promotion.text", vllm=VLLM)


def promotion_rows(page: Lesson) -> list[dict[str, object]]:
    """Each step that the rule takes on what stands in the editors, then on every example, each with its two files; none
    for unreadable text."""
    texts = {"as written": texts_of(page)} | {name: example_texts(name) for name in EXAMPLES}
    found = {"as written": decision_of(page)} | {name: read_configs(*texts[name]) for name in EXAMPLES}
    return [
        {
            "config": name,
            "config.json": texts[name][0],
            "hf_quant_config.json": texts[name][1],
            "step": step.id,
            "found": step.json,
            "goes_on": step.holds,
            "decided_by_line": decision.line if step is decision.step else None,
            "decided_by_absence": decision.absent if step is decision.step else None,
            "file": decision.file,
            "promoted": decision.resolved.promoted,
            "scheme": decision.resolved.scheme,
        }
        for name, decision in found.items()
        if decision is not None
        for step in decision.resolved.steps
    ]


def _short(found: str, most: int = 44) -> str:
    """What a step read, on one line of a table."""
    text = found.replace("`", "ˋ")
    return f"`{text[:most]}{'…' if len(text) > most else ''}`"


def _verdict(page: Lesson, found: Decision) -> None:
    resolved = found.resolved
    key = "promoted" if resolved.promoted else "other" if resolved.scheme != "W4A4" else "kept"
    page.finding(f"promotion.{key}", scheme=resolved.scheme, algo=resolved.algo or "–")
    if found.line is not None:
        text = found.text.replace("`", "ˋ")
        page.finding("promotion.absent" if found.absent else "promotion.line", file=found.file, line=found.line)
        st.code(text, language=None)
    page.glossary("weight_only", "w4a4")


def _which_case(page: Lesson) -> bool:
    """Asked: which of the four configs without activation scales does the rule rescue?"""
    rescued = tuple(name for name in CASES if read_configs(*example_texts(name)).resolved.promoted)
    answers = {("absent",): "absent", ("absent", "two_groups"): "groups", CASES: "all", (): "none"}
    return predict.ask(
        f"{PAGE}.predict.promotion",
        tuple(answers.values()),
        answer=answers[rescued],
        cases=len(CASES),
        rescued=len(rescued),
    )


# ------------------------------------------------------------------ the chain of stages


@st.cache_resource(max_entries=128, show_spinner=False)
def _life(layer: int, expert: int, projection: str, backend: str, allocator: str, identity: caches.Stamp) -> ExpertLife:
    from nvfp4viz.model.calibrate import CalibrationStats
    from sample_checkpoints import CALIBRATION

    return expert_life(
        caches.checkpoint("tiny-moe-bf16"),
        CalibrationStats.read(CALIBRATION / "news.json"),
        caches.served(caches.Build(HOLED, backend=backend, allocator=allocator)),
        layer,
        expert,
        projection,
    )


def life_of(page: Lesson) -> ExpertLife:
    """The expert that the page's settings ask for, on the holed export."""
    view = page.view
    identity = caches.stamp(caches.sample_path(HOLED))
    return _life(view["layer"], view["expert"], view["projection"], view["b"], view["a"], identity)


def stage_rows(page: Lesson) -> list[dict[str, object]]:
    """What the chosen expert has at each stage; None where there is no such number or key."""
    life, view = life_of(page), page.view
    held: dict[Stage, dict[str, object]] = {
        "bf16": {"weight_amax": life.weight_amax},
        "ptq": {"calibration_tokens": life.tokens, "input_amax": life.input_amax},
        "export": {"weight_scale_2": life.weight_scale_2, "input_scale": life.stored},
        "load": {"slot": life.slot},
        "backend": {"input_scale_read": life.read, "encode_scale": life.encode, "alpha": life.alpha},
    }
    about = {name: view[name] for name in ("layer", "expert", "projection")}
    about |= {"backend": view["b"], "memory": view["a"]}
    return [
        {**about, "stage": stage, "holds": name, "value": None if value is None else float(value)}
        | {"flags": " ".join(flags_of(stage))}
        for stage in STAGES
        for name, value in held[stage].items()
    ]


def chain_part(page: Lesson) -> None:
    """BF16 → PTQ → export → load → backend, with one expert's numbers and each stage's flags."""
    columns = ("stage", "happens", "holds_now")
    if not _whose_flag(page):
        life = life_of(page)
        page.table(columns, [_stage_row(page, stage, life)[: len(columns)] for stage in STAGES])
        return
    from nvfp4viz.serving.loader import ALLOCATORS

    view = page.view
    places = st.columns(5)
    pick_expert(page, places=places[:2])
    places[2].selectbox(page.t("pick.projection"), ("gate", "up", "down"), **view.widget("projection"))
    places[3].selectbox(
        page.t("chain.memory"), ALLOCATORS, format_func=lambda name: page.t(f"memory.{name}"), **view.widget("a")
    )
    places[4].selectbox(page.t("fates.backend"), BACKENDS, **view.widget("b"))
    life = life_of(page)
    page.finding("chain.seen_hole" if life.stored is None else "chain.seen", tokens=life.tokens, slot=exact(life.slot))
    page.table((*columns, "flags"), [_stage_row(page, stage, life) for stage in STAGES])
    page.prose("chain.text")
    page.glossary("calibration", "amax", "input_scale")


def _stage_row(page: Lesson, stage: Stage, life: ExpertLife) -> tuple[str, ...]:
    none = page.t("nothing")
    values: dict[Stage, dict[str, object]] = {
        "bf16": {"amax": exact(life.weight_amax)},
        "ptq": {"tokens": life.tokens, "amax": none if life.input_amax is None else exact(life.input_amax)},
        "export": {
            "scale": exact(life.weight_scale_2),
            "tensor": life.key[life.key.index("experts.") :],
            "stored": page.t("no_key") if life.stored is None else exact(life.stored),
        },
        "load": {"slot": exact(life.slot)},
        "backend": {
            "read": none if life.read is None else exact(life.read),
            "encode": none if life.encode is None else exact(life.encode),
            "alpha": exact(life.alpha),
        },
    }
    filled = values[stage]
    flags = " · ".join(f"`{name}`" for name in flags_of(stage))
    at = f"stage.{stage}"
    return page.t(f"{at}.name"), page.t(f"{at}.happens"), page.t(f"{at}.now", **filled), flags


def _whose_flag(page: Lesson) -> bool:
    """Asked: the flag that most readers take for a quantiser."""
    flag = "--quantization modelopt"
    (answer,) = (stage for stage in STAGES if flag in flags_of(stage))
    named = t(f"{PAGE}.stage.{answer}.name")
    return predict.ask(f"{PAGE}.predict.chain", STAGES, answer=answer, flag=flag, stage=named)
