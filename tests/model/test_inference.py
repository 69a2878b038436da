"""The forward pass: a cache changes nothing, a NaN is carried on and never backwards, bad prompts are refused."""

import numpy as np
import pytest

from nvfp4viz import serving
from nvfp4viz.errors import ModelError
from nvfp4viz.model import Cache, ForwardRecord, TinyMoe, TinyMoeConfig, Tokenizer, generate, greedy
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.model.tokenizer import EOS
from nvfp4viz.moe.experts import ExpertsResult
from sample_checkpoints import ensure


def test_reading_token_by_token_gives_the_bits_of_reading_at_once(full):
    ids = Tokenizer().encode("37 + 45 = 82")
    at_once = full.model.forward(ids, full.experts)
    cache = Cache(full.model.config, 64)
    one_by_one = np.concatenate([full.model.forward([token], full.experts, cache) for token in ids])
    assert at_once.tobytes() == one_by_one.tobytes()


def test_a_run_repeats_to_the_bit(full):
    first, second = (full.generate(DEMO_PROMPTS["news"], 16) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.trace.logits.tobytes() == second.trace.logits.tobytes()


def test_the_trace_has_a_row_for_every_position_computed(full):
    generation = full.generate("37 + 45 =", 8)
    positions = len(generation.prompt_ids) + len(generation.token_ids) - 1
    assert generation.trace.routes.shape == (positions, 4, 4)
    assert generation.trace.nan_fraction.shape == (positions, 4)
    assert generation.trace.hidden.shape == (positions, 4, 128)
    assert generation.trace.logits.shape == (len(generation.token_ids), full.model.config.vocab_size)
    assert generation.trace.first_bad is None


def _poison(position):
    """Zero experts, but one position of layer 1 gets NaN."""

    def experts(layer, x, routing):
        out = np.zeros_like(x)
        bad = ()
        if layer == 1 and len(x) > position:
            out[position] = np.nan
            bad = (int(routing.ids[position, 0]),)
        return ExpertsResult(out, bad)

    return experts


def test_nan_spreads_forwards_and_never_backwards(full):
    record = ForwardRecord()
    full.model.forward(Tokenizer().encode("37 + 45 ="), _poison(4), None, record)
    nan = np.array([np.isnan(hidden).any(axis=-1) for hidden in record.hidden])
    assert not nan[0].any()
    assert nan[1].tolist() == [place == 4 for place in range(10)]
    assert nan[2].tolist() == [place >= 4 for place in range(10)]  # attention carries it to every later position
    assert nan[3].tolist() == [place >= 4 for place in range(10)]
    assert record.first_bad[:2] == (4, 1)


def test_nan_logits_give_token_0():
    assert greedy(np.full(99, np.nan, np.float32)) == 0
    assert greedy(np.float32([1, np.nan, 9])) == 1
    assert greedy(np.float32([1, 9, 9])) == 1


def test_generation_stops_at_eos_and_at_the_end_of_the_context(full):
    assert full.generate("37 + 45 =", 64).token_ids[-1] == EOS
    config = full.model.config
    endless = generate(full.model, full.experts, "a" * (config.max_position_embeddings - 6), 64, sampler=lambda _: 40)
    assert len(endless.prompt_ids) + len(endless.token_ids) == config.max_position_embeddings


def test_tokens_are_reported_as_they_come(full):
    seen = []
    generation = full.generate("37 + 45 =", 4, on_token=seen.append)
    assert tuple(seen) == generation.token_ids


@pytest.mark.parametrize(
    ("prompt", "code"),
    [("", "prompt.empty"), ("x" * 300, "prompt.too-long"), ("über", "prompt.unknown-characters")],
)
def test_bad_prompts_are_refused(full, prompt, code):
    with pytest.raises(ModelError) as caught:
        full.generate(prompt, 4)
    assert caught.value.code == code


def test_a_model_needs_its_tensors():
    with pytest.raises(ModelError) as caught:
        TinyMoe(TinyMoeConfig(), {})
    assert caught.value.code == "model.bad-tensor"


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "tiny_moe", "hidden_size": -1}])
def test_a_foreign_config_is_refused(config):
    with pytest.raises(ModelError):
        TinyMoeConfig.from_json(config)


def test_the_cpu_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; from nvfp4viz import serving; from sample_checkpoints import ensure; "
        "reply = serving.load(ensure('tiny-moe-nvfp4-holes')).generate('37 + 45 =', 4).text; "
        "print(repr(reply), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "'<pad><pad><pad><pad>' False"


def test_served_models_share_the_dense_part(bf16, full):
    assert bf16.model.config == full.model.config
    assert serving.load(ensure("tiny-moe-bf16"), backend="bf16").describe
