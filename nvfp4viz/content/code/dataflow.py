from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.moe.steps import STEPS
from nvfp4viz.serving import load
from nvfp4viz.serving.twins import trace_twins
from sample_checkpoints import ensure

# a prompt of one's own stands here as its bytes
prompt = DEMO_PROMPTS.get($prompt) or bytes($own).decode()
healthy = load(ensure("tiny-moe-nvfp4-full"))
faulty = load(ensure("tiny-moe-nvfp4-holes"), allocator=$fate, seed=$seed)
twins = trace_twins(healthy, faulty, prompt, $layer, twin=$twin, most=$most)

plan = twins.faulty.dispatch
print("experts without a scale:", twins.missing)
print("a_map", plan.a_map.tolist())
print("c_map", plan.c_map.tolist())
print("expert_offsets", plan.expert_offsets.tolist())
print("blockscale_offsets", plan.blockscale_offsets.tolist())
for number, step in enumerate(STEPS):
    found = twins.comparison
    print(number + 1, step, "differs for", found.differs[number].sum(), "routes, NaN for", found.nan[number].sum())
print("first difference at step", twins.comparison.first_difference, "first NaN at step", twins.comparison.first_nan)

for route in twins.comparison.differs[2].nonzero()[0][:3]:
    row = plan.c_map[route]
    print("row", row, "expert", plan.row_expert[row], "a1", twins.faulty.input.gscale[row])
    print("  scale bytes before", bytes(twins.healthy.intermediate.scales[row]).hex(" "))
    print("  scale bytes after ", bytes(twins.faulty.intermediate.scales[row]).hex(" "))
