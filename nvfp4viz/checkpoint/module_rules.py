"""What a configuration gives one module, where it speaks of modules by patterns: compressed-tensors and Quark.

compressed-tensors sorts schemes into ``config_groups`` with ``targets``: names, ``re:`` and an expression, or the name
of a class (``"Linear"``, which takes in the experts' projections).  Quark has a ``global_quant_config`` and exceptions
by pattern in ``layer_quant_config``.  Order as in vLLM's ``compressed_tensors/utils.py: find_matched_target`` and
``quark/quark.py: _find_matched_config``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from time import thread_time
from typing import Any, NamedTuple, Protocol

# What stands before the layers varies with the version that exported: `model.`, `model.language_model.`, ….
_PREFIX = re.compile(r"^(?:(?:model|language_model)\.)+")
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
# vLLM asks for the first expert's projections under these names, whatever the file calls them.
_ASKED = {
    "gate_proj": ("gate_proj",), "w1": ("gate_proj",), "up_proj": ("up_proj",), "w3": ("up_proj",),
    "down_proj": ("down_proj",), "w2": ("down_proj",), "gate_up_proj": ("gate_proj", "up_proj"),
}  # fmt: skip


def bare(name: str) -> str:
    """A module's name without what stands before its layers.

    >>> bare("model.language_model.layers.0.mlp")
    'layers.0.mlp'
    """
    return _PREFIX.sub("", name)


class Expression:
    """A regular expression of a configuration, which may be anybody's: it has so much time, and no more.

    Attributes
    ----------
    too_slow
        It was given up, and matches nothing from then on.
    """

    # What one name may cost, and what names that cost more than a usual one may cost together; in seconds of computing,
    # because on a busy machine the clock runs while something else does.
    ONE, USUAL, ALL = 0.25, 0.001, 1.0

    def __init__(self, text: str) -> None:
        # vLLM reads them with this package too (`import regex as re`); only few checkpoints have any.
        import regex

        self._pattern = regex.compile(text)
        self._spent = 0.0
        self.too_slow = False

    def match(self, name: str) -> bool:
        """Does the expression match at the name's beginning?"""
        if self.too_slow:
            return False
        begun = thread_time()
        try:
            found = self._pattern.match(name, timeout=self.ONE) is not None
        except TimeoutError:
            found, self.too_slow = False, True
        took = thread_time() - begun
        if took > self.USUAL:
            self._spent += took
            self.too_slow |= self._spent > self.ALL
        return found and not self.too_slow


@lru_cache(maxsize=512)
def compiled(text: str) -> Expression | None:
    """A regular expression of a configuration, or None where it is none."""
    import regex

    try:
        return Expression(text)
    except (regex.error, RecursionError):
        return None


def too_slow(raw: object) -> Iterator[str]:
    """Expressions anywhere in a configuration that took too long while it was asked about modules."""
    if isinstance(raw, str):
        if raw.startswith("re:"):
            known = compiled(raw[3:])
            if known is not None and known.too_slow:
                yield raw
    elif isinstance(raw, dict | list):
        for part in raw.values() if isinstance(raw, dict) else raw:
            yield from too_slow(part)


class Rules(Protocol):
    """The patterns of one section."""

    def find(self, modules: Iterable[str]) -> str | None:
        """The algorithm of a module (given at several depths): ``""`` for no word, None where the section, which
        names all that it quantises, leaves the module out."""

    def eight_bit(self, modules: Iterable[str]) -> tuple[EightBit, ...]:
        """What the entries for eight-bit floats that mean a module (given at several depths) say of it."""


Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Groups:
    """compressed-tensors' groups.

    Attributes
    ----------
    exact
        Groups by name, without prefix.
    expressions
        Compiled targets with their groups.
    classes
        Names of classes with their groups.
    open
        Some group's targets cannot be read: what no other group names may be meant by it.
    """

    exact: Mapping[str, tuple[Group, ...]]
    expressions: tuple[tuple[Expression, Group], ...]
    classes: tuple[tuple[str, Group], ...]
    open: bool

    def find(self, modules: Iterable[str]) -> str | None:
        """As `Rules.find`."""
        groups = self.meaning(modules)
        if groups:
            return _kindest([group_algo(group) for group in groups])
        return "" if self.open or self.classes else None

    def meaning(self, modules: Iterable[str]) -> tuple[Group, ...]:
        """The groups that mean a module; a target that names it goes before one that names a class."""
        modules = tuple(modules)
        names = tuple(_depths(modules))
        named = [group for name in names for group in self.exact.get(name, ())]
        if self.expressions:
            forms = [*modules, *(prefix + name for name in names for prefix in _PREFIXES)]
            named += [group for pattern, group in self.expressions if any(map(pattern.match, forms))]
        return tuple(named or (group for name, group in self.classes if name == "Linear"))

    def eight_bit(self, modules: Iterable[str]) -> tuple[EightBit, ...]:
        """As `Rules.eight_bit`."""
        groups = (group for group in self.meaning(modules) if group_algo(group) == "8-bit float")
        return tuple(EightBit(weight_grain(group), _static_inputs(group)) for group in groups)


def _static_inputs(group: Group) -> bool | None:
    """Do a group's activations have stored scales?  `dynamic` is false where it is not there (``quant_args.py``)."""
    inputs = group.get("input_activations")
    if not isinstance(inputs, dict):
        return False if inputs is None else None
    dynamic = inputs.get("dynamic") or False
    if dynamic is not False:
        return False
    plain = inputs.get("num_bits") == 8 and inputs.get("type") == "float"
    return True if plain and inputs.get("strategy") in (None, "tensor") else None


def _kindest(algos: list[str]) -> str:
    """Of several groups that mean a module, a four-bit one: which comes first differs from loader to loader."""
    return next((algo for algo in algos if "FP4" in algo), algos[0])


# Classes that are no expert's projection and no linear layer.
_ELSEWHERE = re.compile(r"Attention|Embedding|Conv\d?d|Norm|LMHead|Rotary")


def groups_of(raw: Any) -> Groups:
    """Read ``config_groups``; what is no group is left out."""
    exact: dict[str, tuple[Group, ...]] = {}
    expressions: list[tuple[Expression, Group]] = []
    classes: list[tuple[str, Group]] = []
    unread = False
    for group in raw.values() if isinstance(raw, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list):
            unread = True
            continue
        for target in targets:
            if not isinstance(target, str):
                unread = True
            elif target.startswith("re:"):
                pattern = compiled(target[3:])
                if pattern is not None:
                    expressions.append((pattern, group))
            elif target[:1].isupper() and "." not in target:
                if not _ELSEWHERE.search(target):
                    classes.append((target, group))
            else:
                exact[bare(target)] = (*exact.get(bare(target), ()), group)
    return Groups(exact, tuple(expressions), tuple(classes), unread)


def targets_of(raw: Any) -> list[str]:
    """What all ``config_groups`` aim at, as written.

    >>> targets_of({"group_0": {"targets": ["Linear", "re:.*experts.*"]}, "group_1": None})
    ['Linear', 're:.*experts.*']
    """
    groups = raw.values() if isinstance(raw, dict) else ()
    lists = [group.get("targets") for group in groups if isinstance(group, dict)]
    return [target for found in lists if isinstance(found, list) for target in found if isinstance(target, str)]


def group_algo(group: Mapping[str, Any]) -> str:
    """A group's algorithm: ``"NVFP4"``, ``"W4A16_NVFP4"``, ``"MXFP4"``, or in words, such as ``"8-bit float"``.

    >>> group_algo({"weights": {"num_bits": 4, "type": "float"}, "input_activations": None})
    'W4A16_NVFP4'
    >>> group_algo({"weights": {"num_bits": 8, "type": "int"}})
    '8-bit int'
    """
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return ""
    if weights.get("num_bits") != 4 or weights.get("type") != "float":
        return f"{weights.get('num_bits')}-bit {weights.get('type')}"
    size = weights.get("group_size") or 16
    if size not in (16, 32):
        return f"4-bit float, group_size {size}"
    if size == 32:
        return "MXFP4"
    return "NVFP4" if group.get("input_activations") is not None else "W4A16_NVFP4"


Grain = tuple[int | None, int | None]
"""Rows, and values of a row, that share one scale of a weight; None for all of them."""


class EightBit(NamedTuple):
    """What a section says of a module in eight-bit floats; None where it does not say, or in a way not known here.

    Attributes
    ----------
    grain
        How the weight is cut for its scales.
    static
        Its activations have stored scales.
    """

    grain: Grain | None
    static: bool | None


def weight_grain(group: Group) -> Grain | None:
    """How a group of compressed-tensors cuts a weight for its scales; None where it does not say, or in another way.

    Source: ``compressed_tensors/quantization/quant_args.py``, which also says what an absent `strategy` means.

    >>> weight_grain({"weights": {"strategy": "block", "block_structure": [128, 64]}})
    (128, 64)
    >>> weight_grain({"weights": {"strategy": "channel"}}), weight_grain({"weights": {"group_size": 32}})
    ((1, None), (1, 32))
    >>> weight_grain({"weights": {"strategy": "attn_head"}}) is None
    True
    """
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return None
    strategy, size, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy is None and block is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    kind = strategy.lower() if isinstance(strategy, str) else ""
    if kind == "block":
        # Once written "128x128".
        sides = block.split("x") if isinstance(block, str) else block
        numbers = [int(side) if str(side).isdecimal() else 0 for side in sides] if isinstance(sides, list) else []
        return (numbers[0], numbers[1]) if len(numbers) == 2 and min(numbers) > 0 else None
    if kind in ("group", "tensor_group"):
        return (1, size) if isinstance(size, int) and size > 0 else None
    known: dict[str, Grain] = {"tensor": (None, None), "channel": (1, None)}
    return known.get(kind)


@dataclass(frozen=True, slots=True)
class QuarkRules:
    """Quark's exceptions by pattern, and what holds for everything else: algorithms, and what is said beside FP8."""

    layers: tuple[tuple[str, str, EightBit], ...]
    rest: tuple[str, EightBit]

    def find(self, modules: Iterable[str]) -> str | None:
        """As `Rules.find`; Quark leaves nothing out."""
        return self._entry(modules)[0]

    def eight_bit(self, modules: Iterable[str]) -> tuple[EightBit, ...]:
        """As `Rules.eight_bit`."""
        algo, said = self._entry(modules)
        return (said,) if algo == "FP8" else ()

    def _entry(self, modules: Iterable[str]) -> tuple[str, EightBit]:
        for name in _depths(modules):
            for pattern, algo, said in self.layers:
                if _means(pattern, name):
                    return algo, said
        return self.rest


def _means(pattern: str, name: str) -> bool:
    """A pattern with a star is one; another means the modules that its own name contains."""
    if "*" in pattern:
        return any(fnmatchcase(prefix + name, pattern) for prefix in _PREFIXES)
    return f".{bare(pattern)}.".startswith(f".{name}.")


def quark_rules(raw: Mapping[str, Any]) -> QuarkRules:
    """Read a section of Quark's."""
    layers = raw.get("layer_quant_config")
    found = layers.items() if isinstance(layers, dict) else ()
    whole = {} if raw.get("layer_type_quant_config") else raw.get("global_quant_config")
    layers = tuple((str(pattern), quark_algo(entry), _quark_eight_bit(entry)) for pattern, entry in found)
    return QuarkRules(layers, (quark_algo(whole), _quark_eight_bit(whole)))


def _quark_eight_bit(entry: Any) -> EightBit:
    """What one of Quark's entries says beside FP8: `qscheme` of the weight, and whether its inputs are dynamic.

    >>> _quark_eight_bit({"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}})
    EightBit(grain=(1, None), static=False)
    """
    weight, inputs = (entry.get(key) if isinstance(entry, dict) else None for key in ("weight", "input_tensors"))
    static: bool | None = False if inputs is None else None
    if isinstance(inputs, dict) and isinstance(inputs.get("is_dynamic"), bool):
        one = str(inputs.get("dtype")).startswith("fp8") and inputs.get("qscheme") in (None, "per_tensor")
        static = False if inputs["is_dynamic"] else (True if one else None)
    if not isinstance(weight, dict):
        return EightBit(None, static)
    kind, size = weight.get("qscheme"), weight.get("group_size")
    grain: Grain | None = None
    if kind == "per_tensor":
        grain = (None, None)
    elif kind == "per_channel" and weight.get("ch_axis") in (None, 0):
        grain = (1, None)
    elif kind == "per_group" and isinstance(size, int) and not isinstance(size, bool) and size > 0:
        grain = (1, size)
    return EightBit(grain, static)


def quark_algo(entry: Any) -> str:
    """The algorithm of one of Quark's entries, ``""`` where it names none.

    Two levels make a list: ``fp4`` in blocks of 16 below ``fp8_e4m3`` is NVFP4.

    >>> quark_algo({"weight": {"dtype": "fp4", "group_size": 32}}), quark_algo({"weight": {"dtype": "fp8_e4m3"}})
    ('MXFP4', 'FP8')
    """
    weight = entry.get("weight") if isinstance(entry, dict) else None
    levels = [level for level in (weight if isinstance(weight, list) else [weight]) if isinstance(level, dict)]
    kinds = [level.get("dtype") for level in levels]
    names = [kind.lower() for kind in kinds if isinstance(kind, str)]
    if not names:
        return ""
    if names[0] in ("fp4", "mxfp4"):
        if len(names) == 1 and levels[0].get("group_size") != 16:
            return "MXFP4"
        return "NVFP4" if entry.get("input_tensors") else "W4A16_NVFP4"
    short = ["FP8" if name.startswith("fp8") else name.upper() for name in names]
    return " + ".join(dict.fromkeys(short))


def _depths(modules: Iterable[str]) -> Iterator[str]:
    """A module's names without prefix, and that under which vLLM asks for an expert's projection."""
    given = tuple(modules)
    if len(given) == 1 and given[0].endswith(".experts"):
        # Asked for as a whole.
        yield from (f"{bare(given[0])}.0.{asked}" for asked in ("gate_proj", "up_proj", "down_proj"))
    for module in given:
        name = bare(module)
        yield name
        block, middle, tail = name.partition(".experts.")
        if middle:
            for part in tail.split("."):
                yield from (f"{block}.experts.0.{asked}" for asked in _ASKED.get(part, ()))


def quark_static_inputs(raw: Mapping[str, Any]) -> bool:
    """Does a section of Quark's promise stored FP8 scales for the experts' activations?

    >>> quark_static_inputs({"global_quant_config": {"input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}})
    True
    """
    layers = raw.get("layer_quant_config")
    named = [entry for name, entry in layers.items() if "expert" in str(name)] if isinstance(layers, dict) else []
    inputs = [entry.get("input_tensors") if isinstance(entry, dict) else None for entry in named]
    if not inputs:
        whole = raw.get("global_quant_config")
        inputs = [whole.get("input_tensors") if isinstance(whole, dict) else None]
    return all(
        isinstance(item, dict) and str(item.get("dtype")).startswith("fp8") and item.get("is_dynamic") is False
        for item in inputs
    )
