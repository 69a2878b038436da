"""The chain: each link holds the numbers of the run, and the links follow from each other."""

import numpy as np
import pytest

from nvfp4viz.formats import decode_e4m3
from nvfp4viz.serving import load
from nvfp4viz.serving.chain import trace_chain, twin_of

PROMPT = "12 + 3 ="
HOLES = [(0, expert) for expert in range(2, 8)] + [(1, 3)]


@pytest.fixture(scope="module")
def served(make_model):
    return load(make_model(HOLES))


@pytest.fixture(scope="module")
def healthy(make_model):
    return load(make_model())


@pytest.fixture(scope="module")
def chain(served):
    return trace_chain(served, PROMPT, n=4)


def test_it_starts_at_the_first_route_into_a_hole(served, chain):
    routes = served.generate(PROMPT, 4).trace.routes
    bad = np.isin(routes[: len(chain.prompt_ids), 0], range(2, 8)).any(axis=1)
    assert (chain.layer, chain.position) == (0, int(np.flatnonzero(bad)[0]))
    assert chain.expert in routes[chain.position, 0]
    assert chain.token_id == chain.prompt_ids[chain.position]
    assert (0, chain.expert) in HOLES


def test_key_and_slot(chain):
    assert [slot.projection for slot in chain.slots] == ["gate", "up", "down"]
    assert [slot.name for slot in chain.slots] == [
        f"model.layers.0.experts.{chain.expert}.{p}_proj.input_scale" for p in ("gate", "up", "down")
    ]
    assert not any(slot.written for slot in chain.slots)
    assert [slot.value for slot in chain.slots] == [0, 0, 0]


def test_reciprocal_scales_codes_and_product(chain):
    for gemm in (chain.first, chain.second):
        assert gemm.input_scale == 0
        assert np.isposinf(gemm.gscale)
        assert gemm.alpha == 0
    assert chain.first.nan_blocks == 0
    assert np.isfinite(chain.first.acc).all()
    assert (chain.first.out == 0).all()
    assert (chain.second.x == 0).all()
    assert chain.second.nan_blocks == 2
    assert chain.second.scales.tolist() == [0x7F, 0x7F]
    assert chain.second.codes.tolist() == [7] * 32
    assert np.isnan(chain.second.acc).all()
    assert np.isnan(chain.expert_out.astype(np.float32)).all()


def test_residual_logits_token(chain):
    assert np.isnan(chain.moe_out.astype(np.float32)).all()
    assert chain.nan_after.tolist() == [1, 1]
    assert chain.first_nan == (chain.position, 0)
    assert chain.logit_nans == len(chain.logits)
    assert chain.token_ids == (0, 0, 0, 0)
    assert chain.text == "<pad>" * 4


def test_its_twin_is_the_same_route_in_a_healthy_model(chain, healthy):
    twin = twin_of(chain, healthy, n=4)
    assert (twin.layer, twin.expert, twin.position) == (chain.layer, chain.expert, chain.position)
    assert all(slot.written for slot in twin.slots)
    assert (twin.first.x == chain.first.x).all()  # the first hole: everything before it is equal
    assert twin.first.gscale == np.float32(1) / twin.first.input_scale
    assert np.isfinite(twin.expert_out.astype(np.float32)).all()
    assert twin.nan_after.tolist() == [0, 0]
    assert twin.first_nan is None
    block = twin.first.block
    assert twin.first.block_amax[block] == twin.first.block_amax.max()
    # The block scale, undone, covers the block's largest value within E4M3's relative step of 1/16.
    covered = decode_e4m3(twin.first.scales[block : block + 1])[0] * twin.first.input_scale * 6
    assert abs(covered / twin.first.block_amax[block] - 1) <= 1 / 16


def test_a_healthy_model_has_no_chain(healthy):
    assert trace_chain(healthy, PROMPT, n=2) is None


def test_a_place_can_be_chosen(served):
    chain = trace_chain(served, PROMPT, layer=1, n=2)
    assert chain.layer == 1
    chosen = trace_chain(served, PROMPT, 0, position=4, n=2)
    assert (chosen.layer, chosen.position) == (0, 4)
    assert trace_chain(served, PROMPT, 0, 5, position=400, n=2) is None


def test_a_backend_without_activation_scales_has_no_codes(make_model, chain):
    marlin = load(make_model(HOLES), backend="vllm-marlin")
    twin = twin_of(chain, marlin, n=2)
    assert twin.first.gscale is twin.first.scales is twin.first.codes is None
    assert twin.second.nan_blocks == 0
    assert np.isfinite(twin.expert_out.astype(np.float32)).all()
