"""Which missing activation scales a lost calibration rank explains, slot by slot."""

import pytest

from nvfp4viz.audit import audit, describe
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, base, ct_base, opened

EXPERTS = 64
KINDS = ("gate", "up", "down")
NAME = "model.layers.0.mlp.experts.{}.{}_proj.input_scale"


def said(lost, experts=EXPERTS):
    """What an audit says of these (expert, projections) without an activation scale."""
    names = {NAME.format(expert, kind) for expert, kinds in lost for kind in kinds}
    tensors = {name: item for name, item in base(experts=experts).items() if name not in names}
    report = audit(opened(tensors, {**CONFIG, "num_experts": experts}))
    assert report.coverage["input_scale"].missing == len(names)
    return report, [(item.code, item.projection, item.experts) for item in report.findings]


def whole(ids):
    return [(expert, KINDS) for expert in ids]


@pytest.mark.parametrize(
    "ranks",
    [
        [range(32, 64)],
        [range(8)],
        [range(4, 8)],
        [range(8), range(16, 24)],
        [range(8), range(8, 16), range(40, 48)],
        [range(0, 16), range(48, 64)],
        [range(4), range(20, 24), range(60, 64)],
    ],
)
@pytest.mark.parametrize("lone", [(), (17,), (9, 29, 57)])
def test_ranks_are_told_from_what_else_is_missing(ranks, lone):
    """Before, one more expert anywhere, or one more rank, and no rank was seen at all."""
    ids = tuple(sorted(expert for rank in ranks for expert in rank))
    others = tuple(expert for expert in lone if expert not in ids)
    report, found = said(whole({*ids, *others}))
    if len(others) > len(ids) // 2:
        assert {code for code, *_ in found} == {"scale.missing"}
        return
    expected = [("expert.rank-hole", None, ids), *(("scale.missing", kind, others) for kind in KINDS if others)]
    assert found == expected
    # Every missing slot has exactly one finding.
    assert sum(item.count for item in report.findings) == report.coverage["input_scale"].missing


def test_what_lacks_in_one_projection_only_stays_apart():
    _, found = said([*whole(range(32, 48)), (3, ("gate",)), (5, ("down",))])
    assert found == [
        ("expert.rank-hole", None, tuple(range(32, 48))),
        ("scale.missing", "gate", (3,)),
        ("scale.missing", "down", (5,)),
    ]
    # A range that only some projections lack is none of a rank's.
    _, found = said([(expert, ("gate", "up")) for expert in range(32, 48)])
    assert {code for code, *_ in found} == {"scale.missing"}


@pytest.mark.parametrize(
    "ids",
    [
        (42, 43), (40, 41, 42), range(1, 64), (0, 9, 18, 27, 36, 45, 54, 63), range(4, 12, 2), range(2, 10),
        # Two neighbours among many others explain little.
        (0, 1, 2, 3, 10, 21, 37),
        # All but a few: the calibration as a whole, no rank.
        range(60),
    ],
)  # fmt: skip
def test_what_is_no_rank(ids):
    _, found = said(whole(ids))
    assert {code for code, *_ in found} == {"scale.missing"}


@pytest.mark.parametrize("ids", [range(2, 8), range(6), (0, 1, 2, 3, 6, 7)])
def test_three_of_four_ranks_are_one_finding(ids):
    """Before, the larger rank was seen, and the third was two slots a projection."""
    _, found = said(whole(ids), experts=8)
    assert found == [("expert.rank-hole", None, tuple(ids))]
    # One more, and nothing says that it was ranks.
    _, found = said(whole(range(1, 8)), experts=8)
    assert {code for code, *_ in found} == {"scale.missing"}


def test_few_experts_are_neighbours_by_chance():
    for lost, expected in (((0, 1), "expert.rank-hole"), ((0, 1, 3), "scale.missing"), ((1, 2), "scale.missing")):
        _, found = said(whole(lost), experts=4)
        assert {code for code, *_ in found} == {expected}


def test_the_same_in_other_layouts_and_both_languages():
    lost = {f"model.layers.0.mlp.experts.{e}." for e in (0, 1, 4, 5, 6, 7)}
    tensors = {
        name: item
        for name, item in ct_base().items()
        if not (name.endswith("input_global_scale") and any(name.startswith(start) for start in lost))
    }
    layout = LAYOUTS["compressed-tensors"]
    report = audit(opened(tensors, {**CONFIG, "quantization_config": layout.config["quantization_config"]}, None))
    assert [item.experts for item in report.findings if item.code == "expert.rank-hole"] == [(0, 1)]
    report, _ = said(whole([*range(8), *range(16, 24)]))
    [item] = report.findings
    assert item.text == "expert.rank-hole.several"
    for language in ("en", "zh"):
        message, advice = describe(item, language)
        assert "0–7, 16–23" in message
        assert "2 " in message
        assert advice
