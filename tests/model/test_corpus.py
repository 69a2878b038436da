"""The corpus comes from seeds, and what is held out stays out."""

import zlib

import pytest

from nvfp4viz.errors import ModelError
from nvfp4viz.model import Tokenizer, corpus
from nvfp4viz.model.domains import Draw
from nvfp4viz.model.tokenizer import BOS, PAD


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_a_seed_gives_the_same_documents(domain):
    assert corpus.sample(domain, 7, 20) == corpus.sample(domain, 7, 20)
    assert corpus.sample(domain, 7, 20) != corpus.sample(domain, 8, 20)


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_no_held_out_prompt_is_trained_on(domain):
    prompts = set(corpus.held_out_prompts(domain))
    assert len(prompts) == corpus.HELD_OUT_PROMPTS or domain == "recipes"
    assert not prompts & {corpus.prompt_of(domain, document) for document in corpus.sample(domain, 1, 3000)}


@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_every_document_can_be_read_and_fits(domain):
    tokenizer = Tokenizer()
    for document in corpus.sample(domain, 3, 200):
        ids = tokenizer.encode(document)
        assert tokenizer.decode(ids) == document
        assert len(ids) < 256


def test_the_shipped_model_saw_no_held_out_news():
    """Rebuild the news it was trained on: 8,000 documents of seed 1, held out by their first six words."""

    def opening(document):
        return " ".join(document.split(" ")[:6])

    draw, trained_on = Draw(zlib.crc32(b"news/1")), []
    while len(trained_on) < 8_000:
        document = corpus.GENERATORS["news"](draw)
        if zlib.crc32(opening(document).encode()) % 10:
            trained_on.append(document)
    assert not set(map(opening, trained_on)) & set(map(opening, corpus.held_out_documents("news")))
    assert set(corpus.held_out_prompts("news")) == set(map(opening, corpus.held_out_documents("news")))


def test_arithmetic_is_right():
    for document in corpus.sample("arithmetic", 1, 500):
        left, right = document.split("=")
        a, sign, b = left.split()
        assert int(right) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


def test_news_has_no_digit():
    assert not any(character.isdigit() for text in corpus.sample("news", 1, 500) for character in text)


def test_the_padding_token_is_id_0():
    assert PAD == 0
    assert Tokenizer().decode([BOS, 0, 0]) == "<pad><pad>"


def test_unknown_characters_are_named_with_their_places():
    with pytest.raises(ModelError) as caught:
        Tokenizer().encode("2 + 二 = é")
    assert caught.value.code == "prompt.unknown-characters"
    assert caught.value.params["characters"] == "二 (5), é (9)"
    assert caught.value.params["count"] == 2
