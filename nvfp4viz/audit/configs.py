"""Findings about the configuration: absent, contradictory, incomplete, or against the tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from nvfp4viz.audit.built_names import excluded_as_built, fused_exclusions, fused_findings, part_of_a_name
from nvfp4viz.audit.facts import label_in, pruned_layers
from nvfp4viz.audit.findings import make
from nvfp4viz.audit.fp8_numbers import SCALES
from nvfp4viz.audit.labels import NAMED, is_native, label_findings
from nvfp4viz.audit.linears import FP8, Linear, fp8_scale
from nvfp4viz.audit.module_names import is_built_by_list, is_draft
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.routers import router_names
from nvfp4viz.audit.two_files import files_findings, of_each_file
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, QuantConfig, SourceConfig, TensorEntry
from nvfp4viz.checkpoint.canonical_view import EXPERT_KEYS, config_experts, config_number
from nvfp4viz.checkpoint.module_rules import compiled, targets_of
from nvfp4viz.checkpoint.problems import as_written
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG


def config_findings(checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear]) -> Iterator[Finding]:
    """All ``config.*`` findings but ``config.invalid``, which opening the files has found already."""
    sections = checkpoint.quant_config.sections
    quantised = view.scheme != "UNQUANTISED"
    broken = {item.file for item in checkpoint.problems if item.code == "config.invalid" and item.severity == "error"}
    if quantised and not sections and not broken and not {CONFIG, HF_QUANT_CONFIG} & set(checkpoint.unread):
        yield _absent(checkpoint)
    # The other file is not read at all, and what it lacks harms nobody.
    used = checkpoint.quant_config.used
    if used is not None and quantised:
        yield from _incomplete(used)
    yield from _no_expression(checkpoint.quant_config)
    yield from _no_number(checkpoint, view)
    quant = checkpoint.quant_config
    labels = list(of_each_file(quant, lambda lists: label_findings(checkpoint, view, linears, lists)))
    yield from files_findings(checkpoint, view, linears, labels) if len(sections) == 2 else labels
    yield from _against_tensors(checkpoint, view, linears, told=bool(labels))
    # Where the experts are not what the configuration says, it says nothing new of their neighbours.
    wrong = any(item.severity == "error" and item.text in NAMED for item in labels)
    yield from of_each_file(quant, lambda lists: _against_excludes(checkpoint, view, linears, lists, wrong=wrong))


def _incomplete(used: SourceConfig) -> Iterator[Finding]:
    """Fields that are not there, and who cannot do without them.

    Without a method transformers' ``quantizers/auto.py`` (00e3e79) raises an error, whatever the algorithm, and vLLM
    takes a flat section for nobody's: ``config/model.py`` (0052a5b) asks `quant_method`, and ``modelopt.py`` (00155cd)
    answers to its own alone.  A nested one it knows by its producer.
    """
    fields = used.missing
    if "quant_method" in fields and used.layout == "nested":
        fill = {"file": used.file, "fields": "quant_method", "engines": ("transformers",)}
        yield make("config.incomplete", "backend", text="config.incomplete.method.nested", count=1, fill=fill)
        fields = tuple(name for name in fields if name != "quant_method")
    if fields:
        method = "quant_method" in fields
        engines = ("vllm", "transformers") if method else ("vllm",)
        fill = {"file": used.file, "fields": ", ".join(fields), "engines": engines}
        text = f"config.incomplete{'.method' * method}"
        yield make("config.incomplete", "backend", text=text, count=len(fields), fill=fill)


def _absent(checkpoint: Checkpoint) -> Finding:
    """Servers take a model for unquantised where nothing says how it is quantised."""
    if checkpoint.config is not None:
        return make("config.absent", "error", count=1)
    return make("config.absent", "warn", text="config.absent.no-files", count=1)


def _no_expression(quant: QuantConfig) -> Iterator[Finding]:
    """A pattern after ``re:`` that does not compile, which a load comes to with the first module no other one matches.

    Of ModelOpt's lists nobody compiles it.  Source: ``check_equal_or_regex_match`` of vLLM and SGLang.
    """
    used = quant.used
    if used is None or used.method not in ("compressed-tensors", "quark"):
        return
    patterns = [*(used.exclude or ()), *targets_of(used.config_groups)]
    wrong = [name for name in dict.fromkeys(patterns) if name.startswith("re:") and compiled(name[3:]) is None]
    if wrong:
        fill = {"file": used.file, "pattern": as_written(wrong[0], 120), "engines": ("vllm", "sglang")}
        yield make("config.invalid", "backend", text="config.invalid.expression", count=len(wrong), fill=fill)


def _no_number(checkpoint: Checkpoint, view: CanonicalView) -> Iterator[Finding]:
    """A number of experts that is none; a list may speak of each layer, and null of nothing."""
    if not view.moe_layers:
        return
    config = checkpoint.config or {}
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in EXPERT_KEYS:
            value = holder.get(key)
            if value is not None and not isinstance(value, list) and config_number({key: value}, (key,)) is None:
                fill = {"key": key, "value": as_written(value, 40), "found": view.experts}
                yield make("config.invalid", "warn", text="config.invalid.experts", count=1, fill=fill)


def _against_tensors(
    checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear], *, told: bool
) -> Iterator[Finding]:
    quant = checkpoint.quant_config
    used = quant.used
    fill: dict[str, object]
    sizes = {view.dialects[layer].group for layer in view.moe_layers if view.dialects[layer]}  # type: ignore[union-attr]
    # compressed-tensors' groups have a width each, and a label for it.
    grouped = quant.algo == "MIXED_PRECISION" or (used is not None and used.method == "compressed-tensors")
    claimed_size = used.group_size if used and not grouped else None
    # The blocks of another format are of another width.
    if claimed_size is None and quant.algo == "MIXED_PRECISION":
        claimed_size = next((size for size in _listed_groups(quant) if size not in sizes), None)
    if not told and claimed_size and len(sizes) == 1 and claimed_size not in sizes:
        fill = {"claimed": claimed_size, "found": sizes.pop()}
        yield make("config.conflict", "error", text="config.conflict.group", count=1, fill=fill)
    yield from _unread_inputs(checkpoint, view, linears)
    pruned = pruned_layers(checkpoint, view)
    claims = {layer: config_experts(checkpoint.config or {}, layer) for layer in view.moe_layers}
    wide = [
        (layer, view.experts_in[layer] - claimed, claimed)
        for layer, claimed in claims.items()
        if claimed is not None and view.experts_in[layer] > claimed and layer not in pruned
    ]
    for unused in (False, True):
        some = [found for layer, *found in wide if _never_chosen(checkpoint, view, layer, found[1]) == unused]
        if some:
            more, claimed = max(some)
            text = "config.conflict.experts.unused" if unused else "config.conflict.experts"
            fill = {"claimed": claimed, "found": claimed + more, "more": more}
            yield make("config.conflict", "backend" if unused else "error", text=text, count=more, fill=fill)


def _unread_inputs(checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear]) -> Iterator[Finding]:
    """Activation scales under a weight-only label: the experts', or those of a model without experts."""
    bare = {at for at in view.moe_layers if (label_in(checkpoint, view, at) or "").startswith("W4A16")}
    places: set[tuple[int, int, str]] = set()
    names: dict[str, None] = {}
    for place, module in view.modules.items():
        dialect = view.dialects[place[0]]
        if place[0] in bare and dialect is not None and dialect.block == "NVFP4":
            entry = module.tensors.get("input_scale") if module.state == "quantised" else None
            if entry is not None:
                names[entry.name] = None
                places.add(place)
    if not view.moe_layers and (checkpoint.quant_config.algo or "").startswith("W4A16"):
        found = (linear.tensor("input_scale") for linear in linears if linear.format == "NVFP4")
        names = {entry.name: None for entry in found if entry is not None}
    if names:
        layers, kinds = {at for at, _, _ in places}, {kind for _, _, kind in places}
        experts = tuple(sorted({expert for _, expert, _ in places}))
        layer = min(layers) if len(layers) == 1 else None
        alone = layer is not None and not view.is_whole(layer)
        yield make(
            "config.conflict", "warn", text="config.conflict.weight-only", role="input_scale", layer=layer,
            projection=min(kinds) if alone and len(kinds) == 1 else None, experts=experts if alone else None,
            tensors=names,
        )  # fmt: skip


def _listed_groups(quant: QuantConfig) -> Iterator[int]:
    """Widths of blocks that an allow-list gives its NVFP4 entries; vLLM's loader takes the first for all."""
    for section in quant.sections:
        for entry in section.quantized_layers.values():
            if isinstance(entry, dict) and "NVFP4" in str(entry.get("quant_algo")).upper():
                size = entry.get("group_size")
                if isinstance(size, int) and not isinstance(size, bool):
                    yield size


def _never_chosen(checkpoint: Checkpoint, view: CanonicalView, layer: int, claimed: int) -> bool:
    """Experts beyond the configured number, each in tensors of its own, that the layer's router has no row for.

    Padding, as some exporters do it for expert parallelism.
    """
    if view.is_whole(layer):
        return False
    shapes = [
        entry.shape for name in router_names(view.blocks[layer]) if (entry := checkpoint.tensors.get(name)) is not None
    ]
    return bool(shapes) and all(len(shape) == 2 and shape[0] == claimed for shape in shapes)


def _against_excludes(
    checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear], lists: QuantConfig, *, wrong: bool
) -> Iterator[Finding]:
    """Tensors against the exclude list; an allow-list that leaves something out says nothing about exclusion."""
    quant = checkpoint.quant_config
    if not quant.sections or quant.algo == "MIXED_PRECISION":
        yield from _excluded_fp8(lists, view, linears, note=True)
        yield from _listed_but_plain(quant, linears)
        # vLLM asks the exclude list first, of such a file too (``modelopt.py``, ``get_quant_method``).  Experts that no
        # entry names besides are left out by the allow-list already, and told so (`label_findings`).
        ordinary = {linear.name for linear in linears}

        def leaves_out(module: str) -> bool:
            return lists.lists(module) and (module in ordinary or _is_named(lists, module))

        telling = (entry.name for entry in _telling(checkpoint, view, linears, lists))
        yield from _excluded(view, lists, telling, leaves_out, engines=("vllm",))
        yield from _singled_out(lists, view, leaves_out)
        return
    yield from _singled_out(lists, view, lists.is_excluded)
    fused = fused_exclusions(lists, linears)
    yield from part_of_a_name(lists, view, linears, fused)
    yield from fused_findings(fused)
    told = {name for one in fused for name in one.modules}
    telling = (entry.name for entry in _telling(checkpoint, view, linears, lists))
    names = (name for name in telling if name.rpartition(".")[0] not in told)
    yield from _excluded(view, lists, names, lists.is_excluded, engines=ASK_FOR_LAYERS)
    # Where FP8 is what everything else is stored in, being excluded from four bits means FP8 (TRT-LLM#16196).
    note = any(section.method == "fp8" for section in quant.sections)
    yield from _excluded_fp8(lists, view, linears, note=note)
    if _quantises_every_linear(quant) and not wrong:
        plain = [
            f"{name}.weight"
            for name in _plain(linears)
            if not is_draft(name, view.layers) and not lists.is_excluded(name) and not excluded_as_built(lists, name)
        ]
        if plain:
            yield make("config.unquantised-not-excluded", "warn", tensors=plain)


# Servers that hold the list against the name of a layer's experts as a whole, and build them unquantised.
ASK_FOR_LAYERS = ("vllm", "tensorrt-llm")


def _excluded(
    view: CanonicalView,
    lists: QuantConfig,
    telling: Iterable[str],
    leaves_out: Callable[[str], bool],
    *,
    engines: Sequence[str],
) -> Iterator[Finding]:
    """``config.excluded-but-quantised`` of modules that are left out although these scales are theirs.

    Parameters
    ----------
    engines
        Servers that build the experts of a layer that is left out unquantised.
    """
    excluded = [name for name in telling if leaves_out(name.rpartition(".")[0])]
    if not excluded:
        return
    layers = [at for at in view.moe_layers if view.dialects[at] is not None and leaves_out(view.blocks[at])]
    singled = _named_experts(lists)
    count = sum(_modules_like(name, view, singled) for name in excluded)
    # Of ordinary modules it was not read what a load does with them.
    stops = {"engines": engines} if layers else {}
    fill = {"numbers": layers, **stops}
    severity = "backend" if layers else "warn"
    yield make("config.excluded-but-quantised", severity, tensors=excluded, count=count, fill=fill)


def _is_named(lists: QuantConfig, module: str) -> bool:
    """Does an allow-list name a module, or a parent of it?"""
    return not all(section.leaves_unnamed(module) for section in lists.sections)


def _modules_like(name: str, view: CanonicalView, singled: Collection[int]) -> int:
    """How many modules a telling scale speaks for: its own, or those of all experts of its layer and projection."""
    slot = view.locate(name)
    if slot is None or view.is_whole(slot.layer):
        return 1
    states = {
        expert: module.state
        for expert in range(view.experts_in[slot.layer])
        if (module := view.modules.get((slot.layer, expert, slot.projection))) is not None
    }
    return sum(state == "quantised" and (at == slot.expert or at not in singled) for at, state in states.items())


def _singled_out(quant: QuantConfig, view: CanonicalView, leaves_out: Callable[[str], bool]) -> Iterator[Finding]:
    """Quantised experts that the exclude list names by number, while it leaves the layer's others alone."""
    numbers = _named_experts(quant)
    for layer in view.moe_layers if numbers else ():
        if view.is_whole(layer) or leaves_out(view.blocks[layer]):
            continue
        names: dict[str, int] = {}
        for expert in sorted(numbers):
            for kind in view.projections_in[layer]:
                module = view.modules.get((layer, expert, kind))
                if module is not None and module.state == "quantised" and leaves_out(module.name):
                    names[module.name] = expert
        experts = tuple(sorted(set(names.values())))
        # All of them is the layer, which has a finding of its own.
        if names and len(experts) < view.experts_in[layer]:
            text = "config.excluded-but-quantised.experts"
            yield make("config.excluded-but-quantised", "warn", text=text, layer=layer, experts=experts, tensors=names)


def _named_experts(quant: QuantConfig) -> frozenset[int]:
    """Numbers of experts that some exclude list singles out."""
    return frozenset().union(*(section.named_experts() for section in quant.sections))


def _listed_but_plain(quant: QuantConfig, linears: Sequence[Linear]) -> Iterator[Finding]:
    """Ordinary layers that an allow-list gives an algorithm, and that are not quantised."""
    names = [f"{name}.weight" for name in _plain(linears) if quant.algo_of(name) not in (None, "NONE", "BF16", "FP16")]
    if names:
        text = "config.unquantised-not-excluded.listed"
        yield make("config.unquantised-not-excluded", "warn", text=text, tensors=names)


def _plain(linears: Sequence[Linear]) -> Iterator[str]:
    """Modules that are not quantised although a server builds them so, where no list leaves them out."""
    return (linear.name for linear in linears if linear.format == "plain" and is_built_by_list(linear.name))


def _excluded_fp8(
    quant: QuantConfig, view: CanonicalView, linears: Sequence[Linear], *, note: bool
) -> Iterator[Finding]:
    """Ordinary modules, and the experts of draft layers beside them, which `draft.unquantised` leaves out."""
    names = [
        scale.name
        for linear in linears
        if linear.format == "FP8" and (scale := fp8_scale(linear)) is not None and quant.lists(linear.name)
    ]  # fmt: skip
    for (layer, _, _), module in view.modules.items():
        if layer in view.draft_layers and module.state == "other":
            tensors = {**module.tensors, **module.extras}
            weight = tensors.get("weight", tensors.get(""))
            scale = next((tensors[suffix] for suffix in SCALES if suffix in tensors), None)
            if weight is not None and weight.dtype in FP8 and scale is not None and quant.lists(module.name):
                names.append(scale.name)
    if names and note:
        yield make("loader.note", "info", text="loader.note.excluded-fp8", tensors=names)
    elif names:
        text = "config.excluded-but-quantised.fp8"
        yield make("config.excluded-but-quantised", "warn", text=text, tensors=names)


def _quantises_every_linear(quant: QuantConfig) -> bool:
    """Does the configuration mean every linear layer that it does not exclude?"""
    used = quant.used
    if used is None or not (used.algo or "").startswith(("NVFP4", "W4A16", "W4A8", "MXFP4")):
        return False
    if used.config_groups is None:
        # Quark's global section means every linear layer too.
        return used.method is None or used.method.startswith(("modelopt", "quark"))
    groups = used.config_groups.values() if isinstance(used.config_groups, dict) else ()
    targets = [
        group.get("targets")
        for group in groups
        if isinstance(group, dict)
        and isinstance(weights := group.get("weights"), dict)
        and weights.get("num_bits") == 4
    ]
    return any(isinstance(names, list) and "Linear" in names for names in targets)


def _telling(
    checkpoint: Checkpoint, view: CanonicalView, linears: Sequence[Linear], lists: QuantConfig
) -> Iterator[TensorEntry]:
    """A scale of every quantised ordinary module, and of one expert per layer and projection.

    Patterns name layers or kinds of modules; 40,000 expert names times 500 patterns would cost seconds.
    """
    for linear in linears:
        if linear.format == "NVFP4":
            found = linear.tensor("weight_scale_2") or linear.tensor("weight_scale")
        else:
            found = (
                linear.tensors.get("scale", linear.tensors.get("weight_scale")) if linear.format == "MXFP4" else None
            )
        if found is not None:
            yield found
    # DeepSeek's draft experts are excluded from NVFP4 and stay as they were.
    drafts = [at for at in view.draft_layers if (own := view.dialects[at]) and not is_native(checkpoint, own.block)]
    # Experts that a list names by number have a finding of their own.
    singled = _named_experts(lists)
    for layer in (*view.moe_layers, *drafts):
        every = range(view.experts_in[layer])
        for projection in view.projections:
            for expert in [one for one in every if one not in singled] or every:
                module = view.modules.get((layer, expert, projection))
                if module is not None and module.state == "quantised":
                    entry = module.tensors.get("weight_scale_2") or module.tensors.get("weight_scale")
                    if entry is not None:
                        yield entry
                        break
