"""The training script: it learns, its model is the one that NumPy runs, its fake quantisation is NVFP4."""

import json

import numpy as np
import pytest

from nvfp4viz.model import TinyMoe, TinyMoeConfig, corpus
from nvfp4viz.model.tokenizer import Tokenizer
from nvfp4viz.quant import amax, dequantize, quantize
from sample_checkpoints import HERE

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")


def test_two_steps_write_a_model_that_loads(tmp_path, monkeypatch):
    from nvfp4viz.checkpoint import open_checkpoint
    from nvfp4viz.model import train

    held_out = corpus.held_out_documents
    monkeypatch.setattr(train, "CALIBRATION_DOCUMENTS", 4)
    monkeypatch.setattr(train, "POOL_DOCUMENTS", 100)
    monkeypatch.setattr(corpus, "held_out_documents", lambda domain, n=50, seed=0: held_out(domain, 4, seed))
    options = ["--steps", "1", "--quantised-steps", "1", "--rows", "2", "--length", "256", "--device", "cpu"]
    train.main(["--out", str(tmp_path), *options])
    checkpoint = open_checkpoint(tmp_path)
    config = TinyMoeConfig.from_json(checkpoint.config)
    assert config == TinyMoeConfig()
    TinyMoe(config, {name: checkpoint.read(name) for name in config.dense_shapes()})
    report = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert set(report["domains"]) == set(corpus.DOMAINS)
    assert len(report["holes_per_layer"]) == config.num_hidden_layers


@pytest.fixture(scope="module")
def trained():
    """The shipped weights in the script's own PyTorch model."""
    from safetensors.torch import load_file

    from nvfp4viz.model.train import TorchTinyMoe

    model = TorchTinyMoe(TinyMoeConfig(), 0.3)
    tensors = {}
    for shard in sorted((HERE / "tiny-moe-bf16").glob("*.safetensors")):
        tensors |= {name.removeprefix("model."): value.float() for name, value in load_file(shard).items()}
    model.load_state_dict(tensors)
    return model.eval()


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_numpy_runs_the_model_that_was_trained(trained, bf16, domain):
    """Same loss within 0.02 nat a document: PyTorch works in float32 here, NumPy rounds every step to BF16."""
    for document in corpus.held_out_documents(domain, 3):
        ids = Tokenizer().encode(document)
        rows = torch.tensor([ids])
        with torch.no_grad():
            logits, _ = trained(rows, torch.ones_like(rows), torch.arange(len(ids))[None])
        ours = bf16.model.forward(ids, bf16.experts)
        losses = [
            torch.nn.functional.cross_entropy(torch.as_tensor(found)[:-1].float(), rows[0, 1:]).item()
            for found in (logits[0], ours)
        ]
        assert abs(losses[0] - losses[1]) < 0.02


def test_fake_quantisation_is_nvfp4():
    """The values of the `ieee` recipe but for the last bits: the script multiplies and divides in another order."""
    from nvfp4viz.model.train import fake_nvfp4

    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    top = amax(x)
    ours = dequantize(quantize(x, recipe="ieee", global_scale=np.float32(2688) / top))
    fake = fake_nvfp4(torch.from_numpy(x), torch.tensor(float(top)).reshape(1, 1)).numpy()
    same = np.isclose(ours, fake, rtol=1e-5, atol=0)
    assert same.mean() > 0.999  # a value that sits on a tie may fall to either side


def test_fake_quantisation_lets_the_gradient_through():
    from nvfp4viz.model.train import fake_nvfp4

    x = torch.randn(2, 32, requires_grad=True)
    fake_nvfp4(x, x.detach().abs().amax().reshape(1, 1)).sum().backward()
    assert (x.grad == 1).all()


def test_experts_that_follow_the_domain_carry_information():
    """Two domains with an expert each: log 2 nats; domains that share all experts alike: none."""
    from nvfp4viz.model.train import specialisation

    domains = torch.tensor([0, 0, 1, 1])
    split = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert specialisation(split, domains, 2).item() == pytest.approx(np.log(2), abs=1e-6)
    assert specialisation(torch.full((4, 2), 0.5), domains, 2).item() == pytest.approx(0, abs=1e-6)


def test_rows_too_short_for_a_document_are_refused(capsys):
    from nvfp4viz.model.train import main

    with pytest.raises(SystemExit):
        main(["--out", "nowhere", "--length", "128"])
    assert "--length" in capsys.readouterr().err


def test_a_document_attends_only_to_itself(trained):
    """Packed beside another, a document gets the logits that it has alone (float32 sums in another order)."""
    from nvfp4viz.model.train import encode, pack

    first, second = encode("37 + 45 = 82"), encode("def sum_rows(rows, top):")
    ids, segments, positions, *_ = _packed(pack, first, second)
    with torch.no_grad():
        together, _ = trained(ids, segments, positions)
        alone, _ = trained(
            torch.tensor([second]), torch.ones(1, len(second), dtype=torch.int64), torch.arange(len(second))[None]
        )
    begin = len(first)
    assert torch.allclose(together[0, begin : begin + len(second)], alone[0], atol=1e-3)


def _packed(pack, *documents):
    """One row with these documents; the stream names a domain with each."""
    stream = iter([(0, ids) for ids in documents] + [(0, [0] * 300)])
    return pack(stream, 1, 256)
