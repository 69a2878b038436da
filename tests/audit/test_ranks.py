"""Experts split over ranks: what an audit says of it afterwards, and what each rank gets."""

from itertools import pairwise

import pytest

from nvfp4viz.audit import audit, describe, for_ranks, run_audit
from nvfp4viz.audit.parallel import expert_ranks, expert_width, is_gated, width_ranks
from nvfp4viz.checkpoint import open_checkpoint
from sample_checkpoints import ensure
from tests.audit.layouts import HIDDEN, LAYOUTS, ct_linear, linear
from tests.audit.test_cases_config import of_width
from tests.audit.test_forecast_rules import widened

HOLES, SOUND = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full"


@pytest.mark.parametrize("sample", [HOLES, "gemma4-skeleton", "tiny-moe-mxfp4", "tiny-moe-bf16"])
def test_ranks_are_looked_at_without_reading_again_and_can_be_taken_back(sample):
    done = run_audit(ensure(sample))
    before = done.checkpoint.bytes_read
    for tp, ep in ((2, None), (None, 7), (3, 5), (64, 64)):
        assert for_ranks(done, tp, ep).report == audit(ensure(sample), tp=tp, ep=ep)
        assert for_ranks(for_ranks(done, tp, ep), None, None).report == done.report
    assert done.checkpoint.bytes_read == before


def test_a_border_inside_a_block_is_said_and_breaks_backends():
    done = run_audit(ensure(SOUND))
    width = expert_width(done.facts)
    ranks = 2 * width // 16
    split = for_ranks(done, ranks, None).report
    assert split.verdict == "backend"
    assert [item.code for item in split.findings if item.severity == "backend"] == ["parallel.group-split"]
    assert all(rank.cut for rank in width_ranks(done.facts, ranks))


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
def test_the_width_is_given_out_in_equal_parts_without_a_gap(tp):
    facts = run_audit(ensure(SOUND)).facts
    width = expert_width(facts)
    ranks = width_ranks(facts, tp)
    assert [rank.rank for rank in ranks] == list(range(tp))
    assert (ranks[0].begin, ranks[-1].end) == (0, width)
    assert all(one.end == two.begin for one, two in pairwise(ranks))
    for rank in ranks:
        assert rank.rows == pytest.approx(2 * width / tp)  # a fraction printed as a double where tp is 3 or 5
        assert rank.missed == tuple(size for size in (64, 128) if 2 * width % (tp * size))
    borders = [k * width for k in range(tp + 1)]
    cut = [k % (tp * 16) != 0 for k in borders]
    assert [rank.cut for rank in ranks] == [one + two for one, two in pairwise(cut)]


@pytest.mark.parametrize("ep", [1, 2, 3, 7, 64, 100])
def test_every_expert_has_one_rank_and_every_hole_is_counted_once(ep):
    done = run_audit(ensure(HOLES))
    ranks = expert_ranks(done.facts, ep)
    experts = done.report.model.experts
    assert [expert for rank in ranks for expert in range(rank.begin, rank.end)] == list(range(experts))
    sizes = [rank.end - rank.begin for rank in ranks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    count = done.report.coverage["input_scale"]
    assert sum(rank.unusable for rank in ranks) == count.missing + count.invalid > 0
    for rank in ranks:
        assert rank.unusable == sum(
            row.role == "input_scale" and row.status == "missing" and rank.begin <= row.expert < rank.end
            for row in done.rows()
        )


def test_a_checkpoint_without_a_scheme_has_no_blocks_to_cut():
    facts = run_audit(ensure("tiny-moe-bf16")).facts
    assert width_ranks(facts, 2) == ()
    assert {rank.unusable for rank in expert_ranks(facts, 2)} == {0}
    assert open_checkpoint(ensure("tiny-moe-bf16")).config["num_experts"] == expert_ranks(facts, 2)[-1].end


@pytest.mark.parametrize(
    ("width", "gated", "tp", "text"),
    [
        (48, True, 1, "parallel.alignment.none"),
        (32, True, 2, "parallel.alignment.none"),
        (80, False, 1, "parallel.alignment.up.none"),
        (208, True, 1, "parallel.alignment.refused.none"),
        (64, True, 1, None),
        (64, True, 2, "parallel.alignment"),
        (256, True, 4, None),
        (768, True, 8, "parallel.alignment.refused"),
    ],
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_where_no_number_of_ranks_works_none_is_advised(width, gated, tp, text, language):
    report = audit(of_width(width, gated=gated), tp=tp)
    assert [item.text for item in report.findings] == ([text] if text else [])
    for item in report.findings:
        _, advice = describe(item, language)
        assert "–" not in advice
        assert ("128" in advice) == (text is not None)
        refused = text.startswith("parallel.alignment.refused")
        assert {one.outcome for one in report.backends if one.name == "vllm-cutlass"} == (
            {"unsupported"} if refused else {"safe"}
        )


@pytest.mark.parametrize(
    ("width", "ranks", "shown"), [(32, 3, "10.67"), (32, 7, "4.57"), (80, 2, "40"), (2880, 64, "45")]
)
def test_a_ranks_share_has_two_digits_behind_the_point(width, ranks, shown):
    report = audit(of_width(width), tp=ranks)
    [item] = [one for one in report.findings if one.code == "parallel.group-split"]
    assert item.params["rank"] == shown
    for language in ("en", "zh"):
        assert f"{shown} " in describe(item, language)[0] or f"{shown}，" in describe(item, language)[0]


@pytest.mark.parametrize("tp", [8, 11, 512])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_an_advice_says_among_which_sizes_it_has_looked(tp, language):
    """Of a width of 704 eleven ranks are as good as one, and no power of two."""
    report = audit(of_width(704), tp=tp)
    advices = [describe(item, language)[1] for item in report.findings if item.code.startswith("parallel.")]
    assert len(advices) == (tp != 11)
    for advice in advices:
        assert {"en": "of the powers of two up to 64", "zh": "64 以内 2 的幂"}[language] in advice


@pytest.mark.parametrize("id", LAYOUTS)
def test_no_word_about_ranks_is_one_rank(id):
    """Which widths a kernel refuses is the same, and of one that no number of ranks makes fit nobody is told safe."""
    layout = LAYOUTS[id]
    fits = {item.name: item.outcome for item in audit(widened(layout, 64)).backends}
    for width in (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 352, 384, 496, 512):
        if width % layout.group:
            continue
        done = run_audit(widened(layout, width))
        assert done.report.backends == for_ranks(done, 1, None).report.backends, width
        told = {item.severity for item in done.report.findings if item.code == "parallel.alignment"}
        assert told <= {"info"}, width
        # With a gate half a tile is enough, and below it is a toy; of MXFP4 nothing was read.
        odd = width % 64 and is_gated(done.facts) and layout.block == "NVFP4" and fits["vllm-cutlass"] == "safe"
        refused = ("unsupported", ()) if width > 64 else ("safe", ("safe", "unsupported"))
        for item in done.report.backends:
            expected = refused if odd and item.name == "vllm-cutlass" else (fits[item.name], ())
            assert (item.outcome, item.possible) == expected, (item.name, width)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_width_that_is_refused_at_every_number_of_ranks_has_a_note_without_them(language):
    [item] = audit(of_width(160)).findings
    assert (item.text, item.severity, item.params["rows"]) == ("parallel.alignment.refused.none", "info", 320)
    [asked] = audit(of_width(160), tp=1).findings
    assert (asked.severity, describe(asked, language)) == ("backend", describe(item, language))
    assert "1 ranks" not in describe(item, language)[0]
    # Without a gate, or without activation scales, the kernel pads or is not asked.
    assert audit(of_width(192, gated=False)).findings == ()
    weight_only = widened(LAYOUTS["W4A16"], 160)
    assert not any(one.code == "parallel.alignment" for one in audit(weight_only).findings)


@pytest.mark.parametrize(("tp", "cut"), [(None, False), (1, False), (2, True), (4, True)])
def test_a_draft_with_wider_blocks_than_the_model_s(tp, cut):
    """DeepSeek V4's three formats: NVFP4 experts in blocks of 16, and a draft's in MXFP4's of 32."""
    layout = LAYOUTS["DeepSeek V4, three formats"]
    report = audit(layout.open(), tp=tp)
    items = [one for one in report.findings if one.code == "parallel.group-split"]
    assert [one.severity for one in items] == ["backend"] * cut
    if tp == 4:
        # There the model's own are cut, and that is told.
        assert [one.text for one in items] == ["parallel.group-split"]
    elif cut:
        assert (items[0].text, items[0].params["numbers"]) == ("parallel.group-split.layers", [1])
        for language in ("en", "zh"):
            assert "32" in describe(items[0], language)[0]
        for one in report.backends:
            assert one.name == "transformers" or one.possible == ("degraded", "load-error", "safe")


def beside(id, module, width, hidden=HIDDEN):
    """A sound checkpoint with one MLP of another width beside its routed experts."""
    layout, make = LAYOUTS[id], ct_linear if id == "compressed-tensors" else linear
    tensors = layout.tensors()
    for last, size in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        tensors |= make(f"{module}.{last}", *size)
    return layout.open(tensors)


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("module", ["model.layers.0.mlp.shared_expert", "model.layers.1.mlp"])
def test_ranks_that_cut_a_block_of_a_shared_expert_or_a_dense_layer(id, module):
    done = run_audit(beside(id, module, 48))
    before = {item.name: item.outcome for item in done.report.backends}
    for tp in (None, 1):
        assert [item for item in for_ranks(done, tp, None).report.findings if item.code == "parallel.group-split"] == []
    report = for_ranks(done, 2, None).report
    [item] = [item for item in report.findings if item.code == "parallel.group-split"]
    assert (item.text, item.severity, item.count) == ("parallel.group-split.linear", "backend", 1)
    assert (item.params["width"], item.params["rank"], item.params["works"]) == (48, "24", "1")
    assert item.tensors[0].startswith(f"{module}.down_proj.weight")
    for one in report.backends:
        expected = (
            "load-error" if one.name != "transformers" and before[one.name] != "unsupported" else before[one.name]
        )
        assert one.outcome == expected
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))
    # A width that two ranks share by whole blocks, and one that the routed experts have too.
    for width in (64, 32):
        split = for_ranks(run_audit(beside(id, module, width)), 2, None).report
        assert "parallel.group-split" not in {item.code for item in split.findings}
