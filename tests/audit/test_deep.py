"""``--deep``: exact counts over bytes, a finding for each fault in each layout, stopping and going on."""

import os
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import describe, run_audit
from nvfp4viz.audit.bytescan import PIECE, Scanner
from nvfp4viz.audit.deep import READ, can_resume, deep_scan, default_state, plan, scan_file
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.audit.linears import collect_linears
from nvfp4viz.checkpoint import FAULTS, Tensor, inject, inspect, memory_checkpoint, tensor, write_checkpoint
from nvfp4viz.errors import CheckpointError, InputError
from tests.audit.layouts import EXPERTS, HIDDEN, LAYOUTS, SIZES, fp8, linear
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened
from tests.checkpoint.web_server import Site, serve

BAD = 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def found(checkpoint, **options):
    """What ``--deep`` adds: (code, severity, layer, projection, experts, count)."""
    plain = run_audit(checkpoint)
    deep = deepen(plain, **options).report
    added = [item for item in deep.findings if item not in plain.report.findings]
    return [(i.code, i.severity, i.layer, i.projection, i.experts, i.count) for i in added]


# ---------------------------------------------------------------------------------------- counting bytes


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
@pytest.mark.parametrize("shift", [0, 3])
def test_codes_are_counted_exactly(size, shift):
    data = np.random.default_rng(size).integers(0, 256, size + shift, dtype=np.uint8)[shift:]
    scanner = Scanner("E2M1")
    scanner.add(data)
    scan = scanner.done()
    nibbles = np.concatenate([data & 15, data >> 4])
    words = np.frombuffer(data.tobytes() + bytes(-size % 8), np.uint64)
    assert (scan.nbytes, scan.sixes) == (size, int((nibbles & 7 == 7).sum()))
    assert scan.nonzero == bool((nibbles & 7).any())
    assert scan.total == sum(words.tolist()) % 2**64
    assert scan.parity == int(np.bitwise_xor.reduce(words))


@pytest.mark.parametrize("code", [0x00, 0x08, 0x80, 0x88])
def test_minus_zero_is_zero(code):
    scanner = Scanner("E2M1")
    scanner.add(np.full(100, code, np.uint8))
    assert not scanner.done().nonzero


def test_every_byte_of_a_block_scale_is_judged_by_itself():
    """All 256 bytes, each alone among sound ones, at every place of a word."""
    for byte in range(256):
        for place in range(8):
            data = np.full(24, 0x38, np.uint8)
            data[8 + place] = byte
            scanner = Scanner("E4M3")
            scanner.add(data)
            scan = scanner.done()
            nan = byte & 0x7F == 0x7F
            assert (scan.nans, scan.negatives) == (int(nan), int(byte >= 0x80 and not nan)), hex(byte)
            assert scan.nan_at == ((8 + place,) if nan else ())


def test_the_first_places_are_kept_across_pieces():
    data = np.full(2 * PIECE, 0x38, np.uint8)
    places = [5, PIECE - 1, PIECE, PIECE + 77, 2 * PIECE - 1]
    data[places] = 0x7F
    scanner = Scanner("E4M3")
    scanner.add(data[: 8 * 1000])
    scanner.add(data[8 * 1000 :])
    assert (scanner.done().nans, scanner.done().nan_at) == (5, tuple(places[:4]))


@pytest.mark.parametrize(
    ("values", "cast"),
    [
        ([118, 120, 121], ""),
        ([0, 0, 1, 4], "integers"),
        ([0, 0, 0], "integers"),
        ([128, 128], ""),
        ([64, 128], ""),
        ([0, 120], ""),
        ([0, 2, 255], "integers"),
        ([255], ""),
        # The bytes 120 and 90 become the powers of two next to 120 and to 90.
        ([134, 133], "exponents"),
        ([134, 0, 255], "exponents"),
        ([134, 120], ""),
        ([135, 136], ""),
    ],
)
def test_exponents_that_were_cast(values, cast):
    scanner = Scanner("E8M0")
    scanner.add(np.uint8(values))
    assert scanner.done().cast == cast


# ------------------------------------------------------------------------- each fault in each layout


def spoiled(layout, kind, role, change):
    """The layout with one expert's bytes changed by ``change(bytes (rows, columns)) -> None``."""
    tensors = layout.tensors()
    name = layout.name(BAD, kind, role)
    old = tensors[name]
    data = np.frombuffer(old.tobytes(), np.uint8).copy()
    parts = data.reshape(1 if layout.arrangement == "expert" else EXPERTS, SIZES[kind][0], -1)
    change(parts[0 if layout.arrangement == "expert" else BAD])
    tensors[name] = Tensor(old.dtype, old.shape, data.tobytes())
    return tensors


def put(value, *place):
    def change(part):
        part[place or ...] = value

    return change


def cast_by_value(part):
    """What ``.to(torch.float8_e8m0fnu)`` makes of exponents' bytes."""
    part[...] = part.astype(np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


@pytest.mark.parametrize("id", LAYOUTS)
def test_a_healthy_layout_stays_healthy(id):
    assert found(LAYOUTS[id].open()) == []


@pytest.mark.parametrize("id", LAYOUTS)
def test_every_fault_in_every_layout(id):
    layout = LAYOUTS[id]
    kind, ids = "down", (BAD,)
    cases = [
        (("weight", put(0)), "weight.all-zero", "warn", 1),
        (("weight", put(0x88)), "weight.all-zero", "warn", 1),
        (("weight", put(0x7F)), "weight.saturated", "warn", 1),
    ]
    if layout.block == "NVFP4":
        cases += [
            (("weight_scale", put(0x7F, 2, 1)), "block-scale.nan", "error", 1),
            (("weight_scale", put(0xFF, 5)), "block-scale.nan", "error", 2),
            (("weight_scale", put(0xB8, 2, 1)), "block-scale.negative", "error", 1),
            (("weight_scale", put(0x80, 2, 1)), "block-scale.negative", "error", 1),
            (("weight_scale", put(0)), "weight.all-zero", "warn", 1),
        ]
    else:
        cases += [
            (("weight_scale", put(0xFF, 2, 0)), "block-scale.nan", "error", 1),
            (("weight_scale", put(0)), "block-scale.exponent-cast", "warn", 1),
            (("weight_scale", cast_by_value), "block-scale.exponent-cast", "warn", 1),
        ]
    for (role, change), code, severity, count in cases:
        checkpoint = layout.open(spoiled(layout, kind, role, change))
        layer = run_audit(checkpoint).view.moe_layers[0]
        assert found(checkpoint) == [(code, severity, layer, kind, ids, count)], code


@pytest.mark.parametrize("id", LAYOUTS)
def test_equal_experts_in_every_layout(id):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for kind in layout.kinds:
        name = layout.name(BAD, kind, "weight")
        old = tensors[name]
        if layout.arrangement == "expert":
            tensors[name] = tensors[layout.name(6, kind, "weight")]
        else:
            data = np.frombuffer(old.tobytes(), np.uint8).copy().reshape(EXPERTS, -1)
            data[BAD] = data[6]
            tensors[name] = Tensor(old.dtype, old.shape, data.tobytes())
        if kind == "down":
            continue
    layer = run_audit(layout.open()).view.moe_layers[0]
    assert found(layout.open(tensors)) == [("weight.duplicate-expert", "warn", layer, None, (3, 6), 2)]


def written_twice(layout, to, of):
    """Everything of one expert under another's names."""
    tensors = layout.tensors()
    for kind in layout.kinds:
        for role in layout.roles:
            tensors[layout.name(to, kind, role)] = tensors[layout.name(of, kind, role)]
    return tensors


def loudest(layout):
    """The expert whose activation scales are its layer's largest in every projection."""
    facts = run_audit(layout.open()).facts
    [expert] = {
        int(np.argmax(facts.tables["input_scale", layer, kind].values))
        for layer in facts.layers for kind in facts.view.projections
    }  # fmt: skip
    return expert


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_an_expert_written_twice_is_one_finding_though_it_has_the_layers_maximum(id):
    layout = LAYOUTS[id]
    top = loudest(layout)
    other = (top + 1) % EXPERTS
    plain = run_audit(layout.open(written_twice(layout, other, top)))
    deep = deepen(plain).report
    # Without --deep the shared maximum is all that can be seen.
    assert {item.code for item in plain.report.findings if item.severity != "info"} == {"scale.filled"}
    for item in plain.report.findings:
        if item.code == "scale.filled":
            # The largest scale is the smallest divisor, and the number beside it is the stored one.
            assert ("smallest stored divisor" in item.message, "largest value" in item.message) == (
                layout.divisors, not layout.divisors,
            )  # fmt: skip
            assert "除数" in describe(item, "zh")[0] or not layout.divisors
    assert plain.report.coverage["input_scale"].filled == 2 * len(layout.kinds)
    assert [item.code for item in deep.findings if item.severity != "info"] == ["weight.duplicate-expert"]
    assert deep.coverage["input_scale"].filled == 0
    assert deep.coverage["weight_scale"] == plain.report.coverage["weight_scale"]


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_a_copied_maximum_stays_a_finding_beside_an_expert_written_twice(id):
    layout = LAYOUTS[id]
    top = loudest(layout)
    twin, filled = (top + 1) % EXPERTS, (top + 2) % EXPERTS
    # Filled scales without equal weights, with and without a twin beside them.
    for tensors in (written_twice(layout, twin, top), layout.tensors()):
        for kind in layout.kinds:
            tensors[layout.name(filled, kind, "input_scale")] = tensors[layout.name(top, kind, "input_scale")]
        report = deepen(run_audit(layout.open(tensors))).report
        assert [i.projection for i in report.findings if i.code == "scale.filled"] == list(layout.kinds)
        assert report.coverage["input_scale"].filled in (2 * len(layout.kinds), 3 * len(layout.kinds))


def test_equal_in_one_projection_only():
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    tensors[layout.name(1, "up", "weight")] = tensors[layout.name(4, "up", "weight")]
    [item] = [i for i in deepen(run_audit(layout.open(tensors))).report.findings if i.code == "weight.duplicate-expert"]
    assert (item.projection, item.experts, item.text) == ("up", (1, 4), "weight.duplicate-expert.projection")
    assert "1, 4" in item.message


def test_the_same_sums_are_not_the_same_codes():
    """Rows in another order add up to the same, and are another matrix."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    name = layout.name(4, "up", "weight")
    rows = np.frombuffer(tensors[name].tobytes(), np.uint8).reshape(SIZES["up"][0], -1)
    turned = Tensor("U8", tensors[name].shape, rows[::-1].tobytes())
    assert found(layout.open({**tensors, layout.name(1, "up", "weight"): turned})) == []


def zeros(layout):
    """One projection whose codes and block scales are all zero."""
    tensors = spoiled(layout, "down", "weight", put(0))
    scale = layout.name(BAD, "down", "weight_scale")
    tensors[scale] = Tensor(tensors[scale].dtype, tensors[scale].shape, bytes(len(tensors[scale].tobytes())))
    return layout.open(tensors)


def test_a_weight_of_zeros_may_have_the_smallest_scales():
    assert [item[0] for item in found(zeros(LAYOUTS["DeepSeek V4"]))] == ["weight.all-zero"]


def test_zero_codes_with_zero_scales_are_one_finding():
    assert [item[0] for item in found(zeros(LAYOUTS["modelopt"]))] == ["weight.all-zero"]


def test_zero_scales_are_told_from_zero_codes_and_forecast_like_them():
    layout = LAYOUTS["modelopt"]
    codes, scales = (layout.open(spoiled(layout, "up", role, put(0))) for role in ("weight", "weight_scale"))
    [item] = deepen(run_audit(scales)).report.findings
    assert (item.code, item.role, item.text) == ("weight.all-zero", "weight_scale", "weight.all-zero.scales")
    assert "block scale" in item.message
    assert outcomes(scales) == outcomes(codes)
    # All but one: that is how a sound projection may look.
    one = spoiled(layout, "up", "weight_scale", put(0, slice(1, None)))
    assert found(layout.open(one)) == []
    more = linear("model.layers.0.self_attn.o_proj", HIDDEN, HIDDEN)
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    more[name] = Tensor("F8_E4M3", more[name].shape, bytes(len(more[name].tobytes())))
    assert found(opened({**base(), **more})) == [("weight.all-zero", "warn", 0, None, None, 1)]


def test_positions_are_rows_and_blocks():
    layout = LAYOUTS["modelopt"]
    tensors = spoiled(layout, "gate", "weight_scale", put(0x7F, 11, 2))
    report = deepen(run_audit(layout.open(tensors))).report
    assert "(11, 2)" in report.findings[0].message
    tensors = spoiled(layout, "gate", "weight_scale", put(0xB8, 11, 2))
    [item] = deepen(run_audit(layout.open(tensors))).report.findings
    assert "1 block scale has the sign bit set" in item.message
    assert report.verdict == "error"


def test_ordinary_modules_are_looked_at_too():
    more = linear("model.layers.0.self_attn.o_proj", HIDDEN, HIDDEN)
    scale = more["model.layers.0.self_attn.o_proj.weight_scale"]
    data = np.frombuffer(scale.tobytes(), np.uint8).copy()
    data[5] = 0x7F
    data[6] = 0xA0
    more["model.layers.0.self_attn.o_proj.weight_scale"] = Tensor(scale.dtype, scale.shape, data.tobytes())
    zero = more["model.layers.0.self_attn.o_proj.weight"]
    more["model.layers.0.self_attn.o_proj.weight"] = Tensor("U8", zero.shape, bytes(len(zero.tobytes())))
    assert found(opened({**base(), **more})) == [
        ("block-scale.nan", "error", 0, None, None, 1),
        ("block-scale.negative", "error", 0, None, None, 1),
        ("weight.all-zero", "warn", 0, None, None, 1),
    ]


def test_ordinary_modules_of_several_layers_have_no_one_layer():
    more = {}
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.o_proj"
        more |= linear(name, HIDDEN, HIDDEN)
        more[f"{name}.weight"] = Tensor("U8", (HIDDEN, HIDDEN // 2), bytes(HIDDEN * HIDDEN // 2))
    checkpoint = memory_checkpoint(
        {**base(layers=2), **more}, config={**CONFIG, "num_hidden_layers": 2}, hf_quant_config=QUANT
    )
    [item] = [i for i in deepen(run_audit(checkpoint)).report.findings if i.code == "weight.all-zero"]
    assert (item.layer, item.count, item.params["numbers"]) == (None, 2, [0, 1])


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1)], ids=["[E, in/16, out]", "[E, out, in/16]"])
@pytest.mark.parametrize("kind", ["gate_up", "down"])
def test_positions_of_transposed_weights_are_rows_and_blocks_too(kind, axes):
    """Llama 4 stores the input along the last axis but one; a row is an output there as everywhere."""
    layout, rng = LAYOUTS["fused"], np.random.default_rng(5)
    tensors = layout.tensors()
    for each in layout.kinds:
        rows, columns = SIZES[each]
        tensors[layout.name(0, each, "weight")] = tensor(rng.integers(0, 256, (EXPERTS, columns // 2, rows), np.uint8))
        scales = rng.integers(0x30, 0x40, (EXPERTS, columns // 16, rows), np.uint8)
        if each == kind:
            scales[BAD, 1, 20] = 0xB8
            scales[BAD, 0, 7] = 0x7F
        stored = np.ascontiguousarray(scales.transpose(axes))
        tensors[layout.name(0, each, "weight_scale")] = tensor(stored, "F8_E4M3")
    nan, negative = deepen(run_audit(layout.open(tensors))).report.findings[:2]
    assert (nan.code, nan.projection, nan.experts) == ("block-scale.nan", kind, (BAD,))
    assert "at (row, block) (7, 0)." in nan.message
    assert (negative.code, "at (row, block) (20, 1)." in negative.message) == ("block-scale.negative", True)


@pytest.mark.parametrize("byte", [0x00, 0x88])
def test_25_rows_of_zeros(byte):
    """ollama#15866: an expert's codes are all zero, written as plus or minus zero."""
    tensors = base()
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    tensors[name] = tensor(np.full(tensors[name].shape, byte, np.uint8))
    report = deepen(run_audit(opened(tensors))).report
    assert [(i.code, i.severity, i.projection, i.experts) for i in report.findings] == [
        ("weight.all-zero", "warn", "up", (0,))
    ]
    assert "0x88" in report.findings[0].message


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "model", base(layers=2), config=CONFIG | {"num_hidden_layers": 2},
                     hf_quant_config=QUANT, max_shard_bytes=1400)  # fmt: skip
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    return tmp_path / "model"


@pytest.mark.parametrize("fault", [fault for fault in FAULTS.values() if fault.deep], ids=lambda fault: fault.id)
def test_an_injected_fault_gives_what_it_promises(folder, tmp_path, fault):
    if fault.id == "exponent-cast":
        layout = LAYOUTS["DeepSeek V4"]
        folder = tmp_path / "mx"
        write_checkpoint(folder, layout.tensors(), config=layout.config)
    inject(folder, tmp_path / "out", fault.id, layer=0, expert=1, projection="up", seed=3)
    codes = {item[0] for item in found(inspect(tmp_path / "out"))}
    assert codes == set(fault.findings)


# -------------------------------------------------------------------------------- reading, stopping, going on


def test_bytes_read_are_those_of_the_files(folder):
    """Headers, scalars, and each code and block scale once."""
    report = deepen(run_audit(folder)).report
    box = report.container
    router = sum(entry.nbytes for entry in inspect(folder).tensors.values() if entry.dtype == "BF16")
    assert box.bytes_read <= box.bytes + 8 * 4 * 24 * 2
    assert box.bytes_read >= box.bytes - router


def test_a_remote_checkpoint_can_be_read_deep(folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve(Site(files)) as site:
        assert found(inspect(site.address)) == []


class Stop(Exception):
    pass


def test_a_stopped_scan_goes_on(folder, tmp_path):
    checkpoint = inspect(folder)
    done = run_audit(checkpoint)
    linears = collect_linears(checkpoint, done.view)
    shards = len(plan(checkpoint, done.view, linears))
    state = tmp_path / "state.jsonl"
    calls = []

    def stop(stage, count, total):
        calls.append(stage)
        if len(calls) == 3:
            raise Stop

    with pytest.raises(Stop):
        deep_scan(checkpoint, done.view, linears, progress=stop, state=state)
    # A line that was being written when the power went.
    state.write_bytes(state.read_bytes() + b'["model-00003')
    second = deep_scan(checkpoint, done.view, linears, resume=True, state=state)
    whole = deep_scan(checkpoint, done.view, linears, state=state)
    assert 0 < second.resumed < shards
    assert second.nbytes < whole.nbytes
    assert (second.units, second.scans, second.twins) == (whole.units, whole.scans, whole.twins)
    assert whole.resumed == 0
    # A finished scan leaves nothing behind.
    assert not state.exists()


def test_changed_files_are_not_taken_for_seen(folder):
    checkpoint = inspect(folder)
    view = run_audit(checkpoint).view
    work = plan(checkpoint, view, ())
    before = default_state(checkpoint, work)
    assert before == default_state(inspect(folder), work)
    shard = folder / checkpoint.files[0].file
    shard.write_bytes(shard.read_bytes())
    assert before != default_state(inspect(folder), work)


@pytest.mark.parametrize("way", ["in place", "replaced", "renamed"])
def test_a_changed_file_whose_time_was_set_back(folder, tmp_path, way):
    """``rsync -t`` and ``cp -p`` set a file's time: another number in it is seen all the same."""
    checkpoint = inspect(folder)
    view = run_audit(checkpoint).view
    work = plan(checkpoint, view, ())
    state = default_state(checkpoint, work)
    stopped_scan(checkpoint, state)
    shard = folder / next(iter(work))
    before = shard.stat()
    data = bytearray(shard.read_bytes())
    unit = next(unit for unit in work[shard.name] if unit.role == "weight_scale")
    data[unit.begin] = 0x7F
    if way == "in place":
        with shard.open("r+b") as out:
            out.write(data)
    else:
        other = tmp_path / "other"
        other.write_bytes(data)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        if way == "renamed":
            os.replace(other, shard)
        else:
            shard.unlink()
            shutil.copy2(other, shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (shard.stat().st_size, shard.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert state.exists()
    again = deepen(run_audit(folder), resume=True).report
    assert [item.code for item in again.findings] == ["block-scale.nan"]


def stopped_scan(checkpoint, state):
    """A scan that ends after its second shard."""
    left = iter(range(2))

    def stop(*_):
        if next(left, None) is None:
            raise Stop

    view = run_audit(checkpoint).view
    with pytest.raises(Stop):
        deep_scan(checkpoint, view, (), progress=stop, state=state)
    return view


def test_a_server_that_does_not_mark_its_files(folder, tmp_path):
    """Nothing tells whether what lies behind an address has changed since: said, and nothing is kept in vain."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve(Site(files)) as site:
        checkpoint = inspect(site.address)
        assert not can_resume(checkpoint)
        view = stopped_scan(checkpoint, tmp_path / "state.jsonl")
        assert not (tmp_path / "state.jsonl").exists()
        with pytest.raises(InputError) as caught:
            deep_scan(checkpoint, view, (), resume=True, state=tmp_path / "state.jsonl")
    assert caught.value.code == "deep.cannot-resume"


def test_a_server_that_marks_its_files(folder, tmp_path):
    """With strong ETags a scan goes on, unless a file has another one since."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serve(Site(files, tagged=True)) as site:
        checkpoint = inspect(site.address)
        work = plan(checkpoint, run_audit(checkpoint).view, ())
        view = stopped_scan(checkpoint, tmp_path / "state.jsonl")
        again = inspect(site.address)
        assert default_state(again, work) == default_state(checkpoint, work)
        assert deep_scan(again, view, (), resume=True, state=tmp_path / "state.jsonl").resumed > 0
        shard = max(name for name in files if name.endswith(".safetensors"))
        site.files = files | {shard: files[shard][:-1] + bytes([files[shard][-1] ^ 1])}
        assert default_state(inspect(site.address), work) != default_state(checkpoint, work)


def test_nowhere_to_keep_what_is_seen(folder, tmp_path, monkeypatch):
    """A home that cannot be written costs the chance to go on, and no more."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found(inspect(folder)) == []


def test_progress_ends_at_the_end(folder):
    told = []
    deepen(run_audit(folder), progress=lambda *at: told.append(at))
    assert told[-1][0] == "weights"
    assert all(done <= total for _, done, total in told)


def test_a_shard_that_has_become_shorter(folder):
    checkpoint = inspect(folder)
    view = run_audit(checkpoint).view
    file = checkpoint.files[-1].file
    units = plan(checkpoint, view, ())[file]
    path = folder / file
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError) as caught:
        scan_file(checkpoint.read_range, file, units)
    assert caught.value.code == "source.changed"


def test_large_tensors_are_read_in_parts_and_in_bounded_memory(tmp_path):
    """Three reads a tensor; positions count from the tensor's first byte."""
    rows = 3 * READ // 4096 + 8
    tensors = {}
    for expert in range(4):
        for kind in ("gate_proj", "up_proj", "down_proj"):
            at = f"model.layers.0.mlp.experts.{expert}.{kind}"
            weight = np.full((rows, 4096), 0x12, np.uint8)
            weight[expert] = 0x34
            scales = np.full((rows, 512), 0x38, np.uint8)
            if expert == 2 and kind == "up_proj":
                scales[rows - 1, 511] = 0x7F
            tensors |= {f"{at}.weight": tensor(weight), f"{at}.weight_scale": tensor(scales, "F8_E4M3"),
                        f"{at}.weight_scale_2": tensor(np.float32(1e-4)),
                        f"{at}.input_scale": tensor(np.float32(1e-3 * (1 + expert / 10)))}  # fmt: skip
    write_checkpoint(tmp_path / "large", tensors, config=CONFIG, hf_quant_config=QUANT)
    del tensors
    done = run_audit(tmp_path / "large")
    tracemalloc.start()
    report = deepen(done).report
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * READ
    [item] = [item for item in report.findings if item.code == "block-scale.nan"]
    assert (item.projection, item.experts) == ("up", (2,))
    assert f"({rows - 1}, 511)" in item.message


# ---------------------------------------------------------------------------------------- the forecasts


def outcomes(checkpoint):
    return {item.name: item.outcome for item in deepen(run_audit(checkpoint)).report.backends}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_reading_sound_weights_changes_no_forecast(layout):
    plain = run_audit(layout.open())
    assert deepen(plain).report.backends == plain.report.backends


def test_a_certain_fault_hides_no_possible_one():
    """A NaN block in up may come out as NaN; zero weights of another expert add nothing.  Both, in either order."""
    layout = LAYOUTS["modelopt"]

    def one_nan(part):
        part[0, 1] = 0x7F

    nan = spoiled(layout, "up", "weight_scale", one_nan)
    alone = {one.name: one for one in deepen(run_audit(layout.open(nan))).report.backends}
    for expert in (0, 6):
        name = layout.name(expert, "up", "weight")
        both = {**nan, name: Tensor("U8", nan[name].shape, b"\x88" * len(nan[name].tobytes()))}
        for one in deepen(run_audit(layout.open(both))).report.backends:
            before = alone[one.name]
            if before.outcome == "nan":
                assert (one.outcome, one.possible) == ("nan", ())
            else:
                # Zero is certain, so that nothing better is left; NaN is as possible as before.
                assert "nan" in before.possible or one.name.endswith("marlin")
                assert (one.outcome, one.possible) == ("zero", ("nan", "zero") if "nan" in before.possible else ())
    assert {one.outcome for one in alone.values()} == {"nan", "degraded"}


def test_a_nan_in_an_ordinary_layer_is_the_one_that_vllm_looks_for():
    sound = {**LAYOUTS["modelopt"].tensors(), **linear("model.layers.0.self_attn.o_proj")}
    name = "model.layers.0.self_attn.o_proj.weight_scale"
    assert set(outcomes(LAYOUTS["modelopt"].open(sound)).values()) == {"safe"}
    data = bytearray(sound[name].tobytes())
    data[7] = 0x7F
    found = outcomes(
        LAYOUTS["modelopt"].open({**sound, name: Tensor(sound[name].dtype, sound[name].shape, bytes(data))})
    )
    assert {found[each] for each in found if each.startswith("vllm-")} == {"load-error"}
    assert found["transformers"] == found["sglang-generic"] == "nan"
    assert found["sglang-marlin"] == "degraded"


@pytest.mark.parametrize("layout", [LAYOUTS["DeepSeek V4"], LAYOUTS["gpt-oss"]], ids=["DeepSeek V4", "gpt-oss"])
def test_exponents_that_were_cast_leave_nothing_of_the_weights(layout):
    def cast(part):
        part[...] = 0

    tensors = spoiled(layout, layout.kinds[-1], "weight_scale", cast)
    served = {name for name, outcome in outcomes(layout.open()).items() if outcome == "safe"}
    found = outcomes(layout.open(tensors))
    assert served
    assert {found[name] for name in served} == {"zero"}
    # The other way round they make the weights far too large.
    found = outcomes(layout.open(spoiled(layout, layout.kinds[-1], "weight_scale", cast_by_value)))
    assert {found[name] for name in served} == {"degraded"}


@pytest.mark.parametrize(("byte", "text"), [(120, None), (0, ""), (134, ".large")])
def test_exponents_of_ordinary_layers_that_were_cast_are_one_finding(byte, text):
    layout, names = LAYOUTS["DeepSeek V4"], ["layers.0.attn.wq_a", "layers.0.attn.wq_b"]
    tensors = layout.tensors()
    for name in names:
        tensors |= fp8(name, "scale", "F8_E8M0") | {f"{name}.scale": Tensor("F8_E8M0", (1, 1), bytes([byte]))}
    report = deepen(run_audit(layout.open(tensors))).report
    expected = [(f"block-scale.exponent-cast{text}.linear", 2)] if text is not None else []
    assert [(item.text, item.count) for item in report.findings] == expected


def test_a_scan_that_fails_before_its_first_shard_leaves_no_file(tmp_path):
    write_checkpoint(tmp_path / "base", base(), config=CONFIG, hf_quant_config=QUANT)

    def nobody(_):
        raise CheckpointError("source.connection", name="scheduler", reason="refused")
        yield

    with pytest.raises(CheckpointError):
        deepen(run_audit(tmp_path / "base"), elsewhere=nobody)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
