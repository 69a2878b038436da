"""The recorded routing: what the file says, and that a part of it comes out again."""

import numpy as np
import pytest

from nvfp4viz.model import corpus
from nvfp4viz.model.calibrate import CalibrationStats
from nvfp4viz.model.routing_log import RoutingLog, joined
from nvfp4viz.model.tokenizer import Tokenizer
from sample_checkpoints import CALIBRATION, ROUTING
from sample_checkpoints import record_routing as script


@pytest.fixture(scope="module")
def logs():
    return {name: RoutingLog.read(ROUTING, name) for name in ("calibration", *corpus.DOMAINS)}


def test_the_calibration_log_adds_up_to_the_statistics_of_the_export(logs):
    stats = CalibrationStats.read(CALIBRATION / "news.json")
    log = logs["calibration"]
    assert (log.totals() == stats.counts).all()
    assert 2 * log.documents == stats.documents
    assert 2 * int(log.tokens.sum()) == stats.tokens
    assert log.holes_after()[-1] == stats.holes.sum() > 0


@pytest.mark.parametrize("name", ["calibration", *corpus.DOMAINS])
def test_every_token_is_counted_once_an_expert(logs, name):
    log = logs[name]
    passes = 2 if name == "calibration" else 1
    assert (log.counts.sum(axis=2) == passes * 4 * log.tokens[:, None].astype(int)).all()
    assert log.documents == (512 if passes == 2 else script.DOCUMENTS)


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_tokens_are_those_of_the_documents(logs, domain):
    texts = corpus.sample(domain, script.SEED, 50)
    assert logs[domain].tokens[:50].tolist() == [len(Tokenizer().encode(text)) + 1 for text in texts]


@pytest.mark.parametrize(("domain", "start"), [(domain, 40 * at) for at, domain in enumerate(corpus.DOMAINS)])
def test_a_part_of_the_recording_comes_out_again(logs, domain, start):
    again = script.record(domain, start, start + 3)
    part = logs[domain].part(start, start + 3)
    assert (again.tokens == part.tokens).all()
    assert (again.counts == part.counts).all()


def test_a_part_of_the_calibration_comes_out_again(logs):
    again = script.record_calibration(9, 11)
    assert (again.counts == logs["calibration"].part(9, 11).counts).all()


def test_holes_close_and_stay_closed(logs):
    for log in logs.values():
        holes = log.holes_after()
        assert holes[0] == 256
        assert (np.diff(holes) <= 0).all()
        for at in (1, 17, 200):
            assert holes[at] == (log.totals(at) == 0).sum()
        assert (log.totals()[log.seen_by() < 0] == 0).all()
        assert log.tokens_after()[-1] == log.tokens.sum()


def test_logs_are_joined_in_turn():
    one = RoutingLog(np.array([1, 2, 3]), np.arange(6).reshape(3, 1, 2))
    two = RoutingLog(np.array([10, 20]), np.arange(10, 14).reshape(2, 1, 2))
    both = joined([one, two])
    assert both.tokens.tolist() == [1, 10, 2, 20]
    assert both.counts[:, 0].tolist() == [[0, 1], [10, 11], [2, 3], [12, 13]]


def test_what_sessions_share_cannot_be_changed(logs):
    with pytest.raises(ValueError, match="read-only"):
        logs["news"].counts[0, 0, 0] = 1
