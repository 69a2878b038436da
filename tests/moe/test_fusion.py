"""Fused projections: every row accounted for in both directions, and products with the same bits."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.errors import InputError, error_texts
from nvfp4viz.moe import fusion
from nvfp4viz.moe import fusion_arrays as arrays
from nvfp4viz.moe.dense import product_f32
from nvfp4viz.moe.fusion import ba_layout, gate_up_layout, qkv_layout, qkvz_layout

CASES = [
    *(qkv_layout(8, 2, 4, tp) for tp in (1, 2, 4, 8)),
    qkv_layout(4, 1, 3, 4),
    qkv_layout(6, 6, 2, 3),
    *(gate_up_layout(12, tp) for tp in (1, 2, 3, 12)),
    *(qkvz_layout(4, 8, 3, 5, tp, order) for tp in (1, 2, 4) for order in fusion.ORDERS),
    qkvz_layout(1, 2, 3, 5, 1, "interleaved"),
    *(ba_layout(4, 8, tp, order) for tp in (1, 2, 4) for order in fusion.ORDERS),
]


def name(layout):
    return f"{layout.name}-{layout.order}-tp{layout.tp}-{layout.rank_rows}"


def checkpoint(layout, columns=16, seed=0):
    rng = np.random.default_rng(seed)
    return {tensor: rng.integers(-50, 50, (rows, columns)) for tensor, rows in layout.tensors.items()}


@pytest.mark.parametrize("layout", CASES, ids=name)
class TestMaps:
    def test_every_row_is_where_the_reference_finds_it(self, layout):
        starts = dict(zip(layout.tensors, np.cumsum([0, *layout.tensors.values()])[:-1], strict=True))
        for rank in range(layout.tp):
            for row in range(layout.rank_rows):
                found = fusion.trace_row(layout, rank, row)
                assert layout.sources[rank, row] == starts[found.tensor] + found.tensor_row
                assert found.unit == found.part_row // layout.part(found.part).unit_rows
                assert (rank, row) in fusion.find_row(layout, found.part, found.part_row)

    def test_every_row_of_every_part_is_found_again(self, layout):
        ranks, rows = layout.places
        starts = dict(zip(layout.tensors, np.cumsum([0, *layout.tensors.values()])[:-1], strict=True))
        seen = 0
        for part in layout.parts:
            for row in range(part.rows):
                copies = fusion.find_row(layout, part.name, row)
                at = starts[part.tensor] + layout.tensor_row(part, row)
                real = ranks[at] >= 0
                assert tuple(zip(ranks[at][real], rows[at][real], strict=True)) == copies
                assert len(copies) == layout.copies(part)
                for rank, place in copies:
                    found = fusion.trace_row(layout, rank, place)
                    assert (found.part, found.part_row) == (part.name, row)
                seen += len(copies)
        assert seen == layout.tp * layout.rank_rows

    def test_runs_tile_every_rank(self, layout):
        for rank in range(layout.tp):
            runs = [run for run in layout.runs if run.rank == rank]
            assert [run.first for run in runs] == np.cumsum([0, *(run.rows for run in runs)])[:-1].tolist()
            assert sum(run.rows for run in runs) == layout.rank_rows

    def test_fused_rows_are_those_that_are_traced_one_by_one(self, layout):
        tensors = checkpoint(layout)
        fused = arrays.fuse(layout, tensors)
        for rank, row in np.ndindex(fused.shape[:2]):
            found = fusion.trace_row(layout, rank, row)
            assert np.array_equal(fused[rank, row], tensors[found.tensor][found.tensor_row])

    def test_fuse_and_back_is_the_identity(self, layout):
        tensors = checkpoint(layout)
        back = arrays.unfuse(layout, arrays.fuse(layout, tensors))
        assert back.keys() == tensors.keys()
        assert all(np.array_equal(back[key], tensors[key]) for key in tensors)

    def test_the_fused_product_is_the_separate_ones(self, layout):
        """Integers: exact, whatever the order of the sum."""
        tensors = checkpoint(layout)
        x = np.random.default_rng(1).integers(-50, 50, (16, 7))
        outputs = arrays.split_outputs(layout, arrays.fuse(layout, tensors) @ x)
        for part in layout.parts:
            rows = [layout.tensor_row(part, row) for row in range(part.rows)]
            assert np.array_equal(outputs[part.name], tensors[part.tensor][rows] @ x)

    def test_copies_are_equal(self, layout):
        fused = arrays.fuse(layout, checkpoint(layout))
        for part in layout.parts:
            for rank, row in fusion.find_row(layout, part.name, 0):
                first = fusion.find_row(layout, part.name, 0)[0]
                assert np.array_equal(fused[rank, row], fused[first])


def test_float_products_keep_their_bits():
    """f32 sums in the same order: a row does not see its neighbours."""
    rng = np.random.default_rng(2)
    layout = qkv_layout(4, 2, 8, tp=4)
    tensors = {key: rng.standard_normal((rows, 32)).astype(ml_dtypes.bfloat16) for key, rows in layout.tensors.items()}
    x = rng.standard_normal((5, 32)).astype(ml_dtypes.bfloat16)

    def product(weight):
        return product_f32(x, np.zeros(5, np.int64), np.ascontiguousarray(weight.astype(np.float32).T)[None]).T

    outputs = arrays.split_outputs(layout, np.stack([product(w) for w in arrays.fuse(layout, tensors)]))
    for part in layout.parts:
        assert np.array_equal(outputs[part.name].view(np.uint32), product(tensors[part.tensor]).view(np.uint32))


def test_the_interleaved_order_is_a_view_by_key_head():
    """As the model's own code undoes it: one axis of key heads, then a split inside."""
    key_heads, value_heads, key_dim, value_dim = 4, 8, 3, 5
    layout = qkvz_layout(key_heads, value_heads, key_dim, value_dim, 1, "interleaved")
    tensor = np.arange(layout.rank_rows)
    share = value_heads // key_heads * value_dim
    by_head = np.split(tensor.reshape(key_heads, -1), np.cumsum([key_dim, key_dim, share]), axis=1)
    outputs = arrays.split_outputs(layout, arrays.fuse(layout, {"in_proj_qkvz": tensor}))
    for part, expected in zip("qkvz", by_head, strict=True):
        assert np.array_equal(outputs[part], expected.ravel())


def test_sizes_of_the_specification():
    assert qkv_layout(32, 8, 128).rank_rows == (32 + 2 * 8) * 128
    assert qkv_layout(64, 4, 128, tp=8).rank_rows == (8 + 1 + 1) * 128
    for order in fusion.ORDERS:
        layout = qkvz_layout(16, 32, 128, 128, 4, order)
        assert layout.rank_rows * 4 == 2 * 16 * 128 + 2 * 32 * 128
        assert ba_layout(16, 32, 4, order).rank_rows * 4 == 2 * 32
    flat = qkvz_layout(16, 32, 128, 128)
    assert flat.tensors == {"in_proj_qkv": 2 * 16 * 128 + 32 * 128, "in_proj_z": 32 * 128}


def test_the_order_of_w13_is_gate_then_up():
    first = arrays.fuse(gate_up_layout(4), {"gate_proj": np.zeros(4), "up_proj": np.ones(4)})
    assert first.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_only_the_interleaved_order_can_be_cut_in_pieces(tp):
    layout = qkvz_layout(16, 32, 128, 128, tp, "interleaved")
    shares = {part.name: part.rows // tp for part in layout.parts}
    assert all(piece == shares for piece in arrays.cut_in_pieces(layout))
    fused = arrays.fuse(layout, {"in_proj_qkvz": np.arange(layout.rank_rows * tp)})
    assert np.array_equal(fused.ravel(), np.arange(layout.rank_rows * tp))
    pieces = arrays.cut_in_pieces(qkvz_layout(16, 32, 128, 128, tp))
    assert pieces[0]["q"] > shares["q"]
    assert pieces[0]["z"] == 0


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("fusion.size", lambda: gate_up_layout(0)),
        ("fusion.size", lambda: qkv_layout(4, 2, 32, tp=-1)),
        ("fusion.group", lambda: qkv_layout(6, 4, 32)),
        ("fusion.group", lambda: ba_layout(3, 4)),
        ("fusion.uneven", lambda: qkv_layout(4, 2, 32, tp=8)),
        ("fusion.uneven", lambda: gate_up_layout(10, tp=4)),
        ("fusion.uneven", lambda: qkvz_layout(16, 32, 128, 128, tp=32)),
        ("fusion.kv", lambda: qkv_layout(12, 4, 32, tp=6)),
        ("fusion.order", lambda: ba_layout(2, 4, order="zigzag")),
        ("fusion.row", lambda: fusion.trace_row(gate_up_layout(4), 0, 8)),
        ("fusion.row", lambda: fusion.trace_row(gate_up_layout(4), 1, 0)),
        ("fusion.part-row", lambda: fusion.find_row(gate_up_layout(4), "up", 4)),
        ("fusion.part-row", lambda: fusion.find_row(gate_up_layout(4), "q", 0)),
        ("fusion.tensor", lambda: arrays.fuse(gate_up_layout(4), {"gate_proj": np.zeros(4)})),
        ("fusion.tensor", lambda: arrays.fuse(gate_up_layout(2), {"gate_proj": np.zeros(2), "up_proj": np.zeros(3)})),
    ],
)
def test_what_cannot_be_is_refused(code, make):
    with pytest.raises(InputError) as caught:
        make()
    assert caught.value.code == code
    assert all(caught.value.text(language) for language in ("en", "zh"))
    assert error_texts("en").keys() == error_texts("zh").keys()
