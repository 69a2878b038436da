from nvfp4viz import serving
from nvfp4viz.model import corpus
from nvfp4viz.serving import expert_parallel as ep
from nvfp4viz.serving import route_trace
from sample_checkpoints import ensure
from sample_checkpoints.record_routes import ROUTES

# EPLB rearranges every layer for mixed traffic
steps = route_trace.traffic(route_trace.RouteTrace.read(ROUTES), "every", "every")
plan = route_trace.balance(steps, 0, experts=64, ranks=$ranks, extra=$extra)

# what moves is an expert's weights; its input scales stay in the slot
served = serving.load(ensure($sample), backend=$backend)
effect = ep.move_effect(served, plan.old, plan.new, corpus.held_out_documents("news", 1))
print(f"{effect.changed} of {effect.slots} slots get another expert, {effect.wrong} with another expert's scale,")
print(f"{effect.empty} with one that was never written; of the others the worst is off by {effect.worst:.2f}")

prompt = corpus.DEMO_PROMPTS["news"]
cases = {
    "before": (effect.before, served),
    "scales move": (effect.moved, ep.moved(served, plan.old, plan.new)),
    "scales stay": (effect.stayed, ep.moved(served, plan.old, plan.new, scales_move=False)),
}
for name, (loss, model) in cases.items():
    print(f"{name}: loss {loss:.4f}, {model.generate(prompt, $tokens).text!r}")
