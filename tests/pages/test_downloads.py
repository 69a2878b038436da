"""A downloaded file tells what it is about: every setting behind its rows stands in them, on every page."""

import json
import math

import pytest

from nvfp4viz.checkpoint import FAULTS, canonical
from nvfp4viz.checkpoint.faults import changes
from nvfp4viz.formats import decode_e4m3
from nvfp4viz.model.corpus import DEMO_PROMPTS, DOMAINS
from nvfp4viz.serving import ALLOCATORS
from nvfp4viz.serving.remedies import REMEDIES
from nvfp4viz.ui import backends_remedies, caches, expert_parallel_run
from nvfp4viz.ui.export import about, to_csv, to_json
from nvfp4viz.ui.fault_lab import BASE, FAULT_IDS, SEEDED
from nvfp4viz.ui.loading_config import EXAMPLES, example_texts
from nvfp4viz.ui.registry import PAGES

from .conftest import clean, skipped, texts

CODE = DEMO_PROMPTS["code"]
# A link that sets what decides a page's files, and what each file then says in every row.
TOLD = {
    "empty_answer": (
        {"prompt": "code", "fate": "random", "seed": "3"},
        {
            "coverage": {"sample": "tiny-moe-nvfp4-holes", "slots_read_as": "random", "seed": 3, "prompt": CODE},
            "chain": {"slots_read_as": "random", "seed": 3, "prompt": CODE},
            "remedies": {"slots_read_as": "random", "seed": 3},
        },
    ),
    "two_level_scaling": (
        {"recipe": "modelopt", "scale": "0.125", "x": ",".join(["1.5"] * 16)},
        {
            "block_elements": {"recipe": "modelopt", "global_scale": 0.125},
            "block_steps": {"recipe": "modelopt", "block": " ".join(["1.5"] * 16)},
        },
    ),
    "blocks": (
        {"m": "2", "n": "7", "along": "rows", "size": "100", "s_rows": "40", "s_cols": "5", "layout": "8x4"},
        {
            "inner_sum": {"m": 2, "n": 7, "grouping": "rows"},
            "grouping_error": {"outlier_size": 100.0},
            "scale_offsets": {"tensor_rows": 40, "tensor_columns": 5},
            "scale_bytes": {"tensor_rows": 40, "tensor_columns": 5, "layout": "8x4"},
        },
    ),
    "tensor_core": (
        {"kind": "mxfp4", "c": "2", "k": "256", "spread": "4", "signs": "positive"},
        {
            "step_elements": {"kind": "mxfp4", "c": 2.0},
            "step_terms": {"kind": "mxfp4", "a_scales": "8679", "b_scales": "8472", "c": 2.0},
            "gemm_outputs": {"k": 256, "exponents_spread": 4, "signs": "positive"},
        },
    ),
    "mxfp4": (
        {
            "data": "tiny_moe",
            "mx": "ocp-floor",
            "layer": "2",
            "expert": "7",
            "w": "down_proj",
            "on": "tiny_moe",
            "row": "3",
        }
        | {"stored": "tiny_moe"},
        {
            "scheme_errors": {"layer": 2, "expert": 7, "weight": "down_proj", "mxfp4_recipe": "ocp-floor"},
            "scales_in_use": {"layer": 2, "expert": 7, "weight": "down_proj", "mxfp4_recipe": "ocp-floor"},
            "block_elements": {"layer": 2, "expert": 7, "weight": "down_proj", "row": 3, "run_of_32": 0},
            "rule_steps": {"binade": None},
            "layer_bytes": {"experts_of": "tiny_moe"},
        },
    ),
    "routing": (
        {"source": "text", "text": "logs", "plan": "news", "pilot": "32", "target": "256"}
        | {"token": "9", "scaling": "2"},
        {
            "routes": {"text": "logs"},
            "plan": {"text": "news", "pilot_documents": 32, "target_documents": 256},
            "held_out_runs": {"target_documents": 256, "pilot_documents": 32},
            "routers": {"token": 9, "scaling": 2.0},
        },
    ),
    "dataflow": (
        {"prompt": "code", "layer": "2", "fate": "random", "seed": "4"},
        {
            "dataflow_routes": {"prompt": CODE, "layer": 2, "slots_read_as": "random", "seed": 4, "twin": "filled"},
            "dataflow_experts": {"prompt": CODE, "layer": 2, "slots_read_as": "random", "seed": 4, "twin": "filled"},
        },
    ),
    "fusion": (
        {"tp": "2", "attn": "qwen3_235b", "what": "expert", "layer": "1", "expert": "5", "stretch": "8"},
        {
            "rows": {"sizes_of": "qwen3_235b", "ranks": 2},
            "shared_scale": {"weights": "expert", "layer": 1, "expert": 5, "first_part_times": 8.0},
        },
    ),
    "expert_parallel": (
        {"layer": "3", "ranks": "8", "now": "news", "before": "logs", "place": "round_robin", "size": "tiny_moe"}
        | {"extra": "2", "window": "4", "way": "tokens", "overlap": "off", "link": "50"},
        {
            "slots": {"traffic": "news", "layer": 3, "of_ranks": 8, "placement": "round_robin"},
            "sent": {"traffic": "news", "layer": 3, "of_ranks": 8, "way": "tokens", "sizes_of": "tiny_moe"},
            "timeline": {"layer": 3, "overlap": "off", "link_gb_per_s": 50.0, "sizes_of": "tiny_moe"},
            "moves": {"checkpoint": "tiny-moe-nvfp4-holes", "backend": "vllm-cutlass", "of_ranks": 8}
            | {"redundant_experts": 2},
            "load": {"traffic_before": "logs", "traffic": "news", "redundant_experts": 2, "window_steps": 4},
        },
    ),
    "backends": (
        {"gpu": "sm_100", "scheme": "W4A16", "par": "ep", "lin": "W4A16", "off": "Marlin", "model": "deepseek-v4"},
        {
            "nvfp4_experts": {"gpu": "sm_100", "scheme": "W4A16", "parallel": "ep", "vllm": "0.33.0"},
            "nvfp4_linear": {"gpu": "sm_100", "scheme": "W4A16", "disabled": "Marlin", "vllm": "0.33.0"},
            "mxfp4_experts": {"gpu": "sm_100", "model": "deepseek-v4", "wanted": "none", "vllm": "0.33.0"},
            "stored": {"experts_of": "deepseek_v4_flash", "parallel": "ep", "ranks": 1, "vllm": "0.33.0"},
        },
    ),
    "loading": (
        {"p": "code", "seed": "2", "layer": "1", "expert": "4", "projection": "gate", "v": "own", "own": "0.5"}
        | {"a": "random"},
        {
            "fates": {"prompt": "code", "seed": 2},
            "spread": {"layer": 1, "slot_of_expert": 4, "projection": "gate", "slot_holds": 0.5},
            "stages": {"layer": 1, "expert": 4, "projection": "gate", "memory": "random"},
            "cause": {"prompt": "code"},
            "guard": {"seed": 2},
        },
    ),
    "online_quantisation": (
        {"layer": "2", "w": "down_proj", "tp": "4", "shape": "deepseek_v4_flash"},
        {
            "ways": {"layer": 2, "weight": "down_proj"},
            "ranks": {"layer": 2, "weight": "down_proj", "ranks": 4},
            "peak_memory": {"layer_of": "deepseek_v4_flash"},
        },
    ),
    "mega_kernel": (
        {"data": "outliers", "route": "3", "group": "1", "swizzle": "32B"},
        {
            "stations": {"data": "outliers"},
            "packed_codes": {"data": "outliers"},
            "scale_words": {"data": "outliers"},
            "step_terms": {"step": "whole"},
            "tensor_map": {"swizzle": "32B"},
            "between": {"data": "outliers", "route": 3, "group": 1},
            "effects": {"data": "outliers"},
            "bounds": {"data": "outliers"},
        },
    ),
    "explorer": ({"checkpoint": "tiny-moe-bf16"}, {"slots": {"checkpoint": "tiny-moe-bf16"}}),
    "kernel_lab": (
        {"values": "grid", "rows": "4", "blocks": "2", "seed": "5", "recipe": "vllm-cuda"},
        {
            "paths": {"values": "grid", "rows": 4, "blocks": 2, "seed": 5},
            "bandwidth_here": {"cpu": None, "measured_at": None},
        },
    ),
}
# No setting changes them.
FIXED = {
    "e2m1": {"e2m1_codes", "e2m1_rounding"},
    "empty_answer": {"replies"},
    "two_level_scaling": {"headroom", "granularity"},
    "mxfp4": {"models"},
    "routing": {"holes"},
    "fusion": {"fusions"},
    "backends": {"defaults", "remedies", "scoreboard"},
    "loading": {"weight_only_rule"},
    "online_quantisation": {"per_token"},
    "mega_kernel": {"interleaved_rows"},
    "kernel_lab": {"kernel_builds"},
    "map": {"places"},
    "glossary": {"glossary"},
}
FAULTY = "fault_lab"


def test_every_page_is_here():
    assert {entry.id for entry in PAGES} == TOLD.keys() | FIXED.keys() | {FAULTY}


@pytest.mark.parametrize("page", [entry.id for entry in PAGES if entry.id != FAULTY])
def test_every_row_says_what_it_is_about(open_page, downloaded, page):
    """And no file is left out here: a new one is either told or fixed."""
    link, told = TOLD.get(page, ({}, {}))
    at = open_page(page, **link)
    at.session_state[f"{page}.download"] = True
    clean(at.run())
    assert downloaded.keys() == told.keys() | FIXED.get(page, set())
    for stem, says in told.items():
        assert downloaded[stem], stem
        for name, value in says.items():
            seen = {row[name] for row in downloaded[stem]}
            assert len(seen) == 1, (stem, name)
            assert value is None or seen == {value}, (stem, name, seen)


def test_the_story_s_replies_name_the_seed_of_every_load(open_page, downloaded):
    at = open_page("empty_answer", seed="3")
    at.session_state["empty_answer.download"] = True
    clean(at.run())
    seeds = {row["slots_read_as"]: row["seed"] for row in downloaded["replies"]}
    assert seeds == dict.fromkeys(ALLOCATORS, 0) | {"": "", "random": 3}  # no other fate asks for one


@pytest.mark.parametrize("fault", FAULT_IDS)
def test_a_fault_s_files_are_named_and_filled_with_it(open_page, downloaded, fault):
    projection = "gate" if fault == "pair-mismatch" else "down"
    link = {"fault": fault, "layer": "1", "expert": "5", "projection": projection, "prompt": "code", "seed": "7"}
    at = open_page(FAULTY, backend="vllm-emulation", **link)
    at.session_state[f"{FAULTY}.download"] = True
    clean(at.run())
    spec = FAULTS[fault]
    factor = "" if spec.value is None else f"-x{spec.value:g}"
    seed = "-seed7" if fault in SEEDED else ""
    name = f"{fault}-layer1-expert5-{projection}-{spec.roles[0]}{factor}{seed}-code-vllm-emulation"
    assert list(downloaded) == [f"layers-{name}", f"logits-{name}"]
    told = {"checkpoint": "tiny-moe-nvfp4-full", "fault": fault, "fault_layer": 1, "fault_expert": 5}
    told |= {"fault_projection": projection, "fault_role": spec.roles[0], "fault_value": spec.value}
    told |= {"fault_seed": 7 if seed else None, "backend": "vllm-emulation", "prompt": CODE}
    for rows in downloaded.values():
        assert rows
        assert all(told.items() <= row.items() for row in rows)
        assert b"fault,fault_layer,fault_expert,fault_projection,fault_role" in to_csv(rows).splitlines()[0]
        assert f'"fault": "{fault}"'.encode() in to_json(rows)


def test_a_factor_of_the_reader_s_and_their_own_prompt_are_told_too(open_page, downloaded):
    at = open_page(FAULTY, fault="scaled", value="0.25", layer="0", expert="9", prompt="own", ask="2 + 2 =")
    at.session_state[f"{FAULTY}.download"] = True
    clean(at.run())
    assert any("-x0.25-own-" in stem for stem in downloaded)
    for rows in downloaded.values():
        assert {(row["fault_value"], row["prompt"]) for row in rows} == {(0.25, "2 + 2 =")}


def test_a_seed_is_told_where_it_decides_the_bytes():
    checkpoint = caches.checkpoint(BASE)
    view, tensors = canonical(checkpoint), checkpoint.read_tensors()
    decided = []
    for fault in FAULT_IDS:
        slot = {"layer": 0, "expert": 9, "projection": "gate" if fault == "pair-mismatch" else "down"}
        made = [changes(view, tensors.__getitem__, fault, **slot, seed=seed) for seed in range(4)]
        if len({str([(name, one and one.data) for name, one in each.items()]) for each in made}) > 1:
            decided.append(fault)
    assert sorted(decided) == sorted(SEEDED)


def rows_of(open_page, downloaded, page, **query):
    """The page's texts, and what its downloads hold."""
    at = open_page(page, **query)
    shown = texts(at)
    at.session_state[f"{page}.download"] = True
    clean(at.run())
    return shown


def test_the_mega_kernel_s_files_hold_what_its_parts_show(open_page, downloaded):
    shown = rows_of(open_page, downloaded, "mega_kernel")
    (moved, *_) = downloaded["stations"]
    assert len(downloaded["stations"]) == 6
    assert f"{moved['changed']} of {moved['numbers']:,} codes of gate and up change" in shown
    (code,) = (row for row in downloaded["packed_codes"] if row["k"] == 19)  # the one that is drawn first
    assert (code["code"], code["value"], code["global_byte"], code["shared_byte"]) == (0xA, -1.0, 9, 17)
    assert {decode_e4m3([row["e4m3"]])[0] == row["value"] for row in downloaded["packed_codes"]} == {True}
    (seen,) = (row for row in downloaded["scale_words"] if row["row"] == 33)
    assert seen["word"] == "0x" + "".join(f"{seen[f'scale_byte_{j}']:02X}" for j in (3, 2, 1, 0))
    assert (seen["place"], seen["first_byte"]) == (4 * 1 + 1, 20)  # row 32 j + i goes to 4 i + j; four bytes a word
    assert sorted(row["place"] for row in downloaded["interleaved_rows"]) == list(range(64))
    assert [row["of"] for row in sorted(downloaded["interleaved_rows"], key=lambda row: row["place"])] == (
        ["gate"] * 8 + ["up"] * 8
    ) * 4
    products = [row for row in downloaded["step_terms"] if row["term"] != "c"]
    assert len(products) == 32
    for row in products:
        scale = 2.0 ** (row["a_scale_byte"] - 127 + row["b_scale_byte"] - 127)
        assert row["significand"] * 2.0 ** row["exponent"] == row["a_value"] * row["b_value"] * scale


def test_a_step_that_a_special_value_decides_has_no_bits_to_align(open_page, downloaded):
    rows_of(open_page, downloaded, "mega_kernel", part="step", step="nan")
    assert {row["shift"] for row in downloaded["step_terms"]} == {None}
    assert {row["result_bits"] for row in downloaded["step_terms"]} == {"0x7FFFFFFF"}


def test_the_scoreboard_and_a_rank_s_bytes_can_be_downloaded(open_page, downloaded):
    at = open_page("backends", gpu="sm_120", shape="tiny_moe", ranks="2")
    at = skipped(at, "backends.predict.auto")
    shown = texts(at)
    at.session_state["backends.download"] = True
    clean(at.run())
    stops = [row["backend"] for row in downloaded["stored"] if row["stops"]]
    assert stops == ["VLLM_CUTLASS"]
    for row in downloaded["stored"]:
        assert (row["experts"], row["ranks"], row["of_intermediate"]) == (64, 2, 64)
        assert row["stops"] or f"{row['total']:,}" in shown
    by = {row["remedy"]: row for row in downloaded["scoreboard"]}
    assert by.keys() == REMEDIES.keys()
    assert by["load-guard"]["refused"] == "serving.guard"
    assert (by["load-guard"]["verdict"], by["load-guard"]["tokens"]) == ("refused", 0)
    for name, row in by.items():
        result = backends_remedies.result(name)
        assert (row["bytes"], row["tokens"]) == (result.bytes, result.tokens)
        assert [row[f"reply_{domain}"] for domain in DOMAINS] == (
            [reply.text for reply in result.replies] or [""] * len(DOMAINS)
        )


def test_a_rank_s_border_inside_a_block_leaves_an_empty_file(open_page, downloaded):
    rows_of(open_page, downloaded, "backends", shape="tiny_moe", ranks="8")
    assert downloaded["stored"] == []


def test_what_a_move_leaves_behind_can_be_downloaded(open_page, downloaded):
    rows_of(open_page, downloaded, "expert_parallel", part="moves")
    effect = expert_parallel_run.moved("holes", "vllm-cutlass", 4, 1).effect
    first, moved, left = downloaded["moves"]
    assert [row["loss"] for row in (first, moved)] == [effect.before, effect.moved]
    assert math.isnan(left["loss"])
    assert (first["changed"], moved["wrong"]) == (0, 0)
    assert {name: left[name] for name in ("slots", "changed", "wrong", "empty", "worst")} == {
        name: getattr(effect, name) for name in ("slots", "changed", "wrong", "empty", "worst")
    }
    assert left["reply"].startswith("<pad>")


def test_what_the_rule_found_can_be_parsed_and_its_files_stand_beside_it(open_page, downloaded):
    at = skipped(open_page("loading", part="promotion", cfg="two_groups"), "loading.predict.promotion")
    own = at.text_area(key="loading.text.config").value.replace('"NVFP4"', '"nvfp4"')
    at = clean(at.text_area(key="loading.text.config").set_value(own).run())
    at.session_state["loading.download"] = True
    clean(at.run())
    rows = downloaded["weight_only_rule"]
    assert max(len(row["found"]) for row in rows) > 120
    for row in rows:
        json.loads(row["found"])
    assert {row["config.json"] for row in rows if row["config"] == "as written"} == {own}
    for name in EXAMPLES:
        files = {(row["config.json"], row["hf_quant_config.json"]) for row in rows if row["config"] == name}
        assert files == {example_texts(name)}


def test_columns_of_the_same_name_are_refused():
    with pytest.raises(AssertionError, match="layer"):
        about({"layer": 1}, [{"layer": 0}])
