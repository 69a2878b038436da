"""Config files as text: clear refusals, and the line that decided."""

import json

import numpy as np
import pytest

from nvfp4viz.errors import NvError
from nvfp4viz.serving.config_lines import MOST_CHARACTERS, json_lines, read_configs

BITS = {"num_bits": 4}


def flat(groups, algo="NVFP4"):
    body = {"quant_method": "modelopt", "quant_algo": algo}
    return json.dumps({"quantization_config": body | ({} if groups is None else {"config_groups": groups})}, indent=1)


NESTED = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}


@pytest.mark.parametrize(
    ("config", "sidecar", "algo", "step", "text", "absent"),
    [
        (flat({"g": {"weights": BITS}}), "", "W4A16_NVFP4", "no-input-activations", '"g": {', True),
        (
            flat({"g": {"input_activations": None}}),
            "",
            "W4A16_NVFP4",
            "no-input-activations",
            '"input_activations": null',
            False,
        ),
        (
            flat({"g": {"input_activations": None}, "h": {"input_activations": BITS}}),
            "",
            "NVFP4",
            "no-input-activations",
            '"input_activations": {',
            False,
        ),
        ("{}", json.dumps({"quantization": NESTED}, indent=1), "NVFP4", "groups-present", "{", True),
        (flat({}), "", "NVFP4", "groups-present", '"config_groups": {}', False),
        (flat(None), "", "NVFP4", "groups-present", '"quantization_config": {', True),
        (flat({"g": {}, "h": 3}), "", "NVFP4", "groups-are-objects", '"h": 3', False),
        (flat({"g": {}}, "FP8"), "", "FP8", "algo-exactly-nvfp4", '"quant_algo": "FP8",', False),
    ],
    ids=["absent", "null", "two-groups", "sidecar", "empty", "no-groups", "odd", "fp8"],
)
def test_the_line_that_decided(config, sidecar, algo, step, text, absent):
    found = read_configs(config, sidecar)
    assert found.resolved.algo == algo
    assert found.step.id == step
    assert (found.text, found.absent) == (text, absent)
    source = config if found.file == "config.json" else sidecar
    assert source.splitlines()[found.line - 1].strip() == text


def test_an_unquantised_model_has_no_line():
    found = read_configs("")
    assert found.resolved.scheme == "UNQUANTISED"
    assert (found.file, found.line) == (None, None)


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ('{"a": 1,\n "b" 2}', "serving.config-json", "line 2, column 6"),
        ("{", "serving.config-json", "line 1, column 2"),
        ("[1]", "serving.config-object", "config.json"),
        ("[" * 9000, "serving.config-json", "line 1"),
        ('{"a": ' + "1" * 5000 + "}", "serving.config-json", "a number is too long"),
        ("{}" + " " * MOST_CHARACTERS, "serving.config-long", f"{MOST_CHARACTERS + 2} characters"),
        ('{"quantization_config": {"quant_algo": "INT3"}}', "serving.quant-algo", "INT3"),
        ('{"quantization_config": 3}', "serving.quant-shape", "3"),
        ('{"quantization_config": {"quantization": {"quant_algo": "NVFP4"}}}', "serving.quant-fields", "group_size"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text, code, says):
    with pytest.raises(NvError) as caught:
        read_configs(text)
    assert caught.value.code == code
    assert says in str(caught.value)


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _paths(item, (*path, name))


def _random_json(rng, depth=0):
    kind = rng.integers(0, 7 if depth < 4 else 5)
    if kind < 5:
        return [None, True, -1.5e-7, 'a "quoted" \\ {[:,]}', "数\n\u2028"][kind]
    size = int(rng.integers(0, 4))
    if kind == 5:
        return [_random_json(rng, depth + 1) for _ in range(size)]
    return {f'k{"{" * k}"{k}': _random_json(rng, depth + 1) for k in range(size)}


@pytest.mark.parametrize("seed", range(60))
def test_every_value_of_any_json_has_its_line(seed):
    """A line is right if the text cut in front of it does not yet hold the key, and held to one line all are on it."""
    value = {"top": _random_json(np.random.default_rng(seed))}
    text = json.dumps(value, indent=2, ensure_ascii=False)
    found = json_lines(text)
    assert set(found) == set(_paths(value))
    lines = text.split("\n")
    for path, line in found.items():
        if path and isinstance(path[-1], str):
            assert lines[line - 1].strip().startswith(json.dumps(path[-1], ensure_ascii=False) + ":")
    assert sorted(found.values()) == list(found.values())
    assert set(json_lines(json.dumps(value)).values()) == {1}


def test_of_a_repeated_key_the_last_counts_as_for_json():
    assert json_lines('{"a": 1,\n"a": 2}')[("a",)] == 2


def section(body):
    return f'{{"quantization_config": {{"quant_algo": "NVFP4",\n{body}}}}}'


def test_a_text_is_not_taken_for_a_key_that_is_absent():
    found = read_configs(section('"config_groups": {"g": {"input_activations": "absent"}}'))
    assert (found.resolved.algo, found.resolved.promoted) == ("NVFP4", False)


def test_what_a_repeated_key_replaced_decides_nothing():
    first, last = '"config_groups": {"g": {\n"input_activations": 1}}', '"config_groups": {"g": {}}'
    found = read_configs(section(f"{first},\n{last}"))
    assert found.resolved.promoted
    assert (found.line, found.absent) == (4, True)


def test_a_line_separator_inside_a_string_ends_no_line():
    found = read_configs(section('"x": "a\u2028b\u0085c",\n"config_groups": {}'))
    assert (found.line, found.text) == (3, '"config_groups": {}}}')


@pytest.mark.parametrize(
    "body", ['"config_groups": {"\\ud800": {}}', '"config_groups": {"g": {"input_activations": "\\ud800"}}']
)
def test_half_of_a_surrogate_pair_can_be_shown(body):
    for step in read_configs(section(body)).resolved.steps:
        assert step.found.encode("utf-8").decode("utf-8") == step.found
