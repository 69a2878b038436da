import numpy as np
from nvfp4viz import serving
from nvfp4viz.figures.routing import blind_routes
from nvfp4viz.model.corpus import DEMO_PROMPTS, DOMAINS
from nvfp4viz.model.planner import check_planner, plan_unseen
from nvfp4viz.model.routing_log import RoutingLog, joined, record_routing
from nvfp4viz.moe.router_comparison import compare_routers
from sample_checkpoints import ROUTING, ensure


def recorded(kinds):
    """The log of a kind of text; of several, their documents in turn, as many as one has."""
    logs = [RoutingLog.read(ROUTING, kind) for kind in kinds]
    return joined(logs).part(0, logs[0].documents)


# a prompt or a text, over what the calibration of the holed export saw
calibration = RoutingLog.read(ROUTING, "calibration")
own = bytes.fromhex($own).decode()  # a prompt of yours, in UTF-8
served = serving.load(ensure("tiny-moe-bf16"), backend="bf16")
prompt = record_routing(served.model, served.experts, [own or DEMO_PROMPTS[$kind]], ended=False)
used = {"prompt": prompt, "text": recorded($shown)}[$source].totals()
routes, slots = blind_routes(used, calibration.totals())
print(f"{routes:,} of {used.sum():,} routes go to experts without a scale, at {slots} slots")

# the calibration, document by document
print("slots without a token:", calibration.holes_after()[$documents], "after", $documents, "documents,", calibration.holes_after()[-1], "after all")

# a plan from a few recorded documents, and what came
log = recorded($texts)
(plan,) = plan_unseen(log.part(0, $pilot), [$target])
print(f"{plan.unseen_now} unseen after $pilot documents; {plan.low} to {plan.high} predicted after $target; came: {log.holes_after()[$target]}")
every = {kind: recorded([kind]) for kind in DOMAINS} | {"all": recorded(DOMAINS)}
checks = check_planner(every, $pilot, $target)
print("the interval held in", sum(check.held for check in checks), "of", len(checks), "held-out runs")
for text in every:
    print(f"    {text}: {sum(check.held for check in checks if check.text == text)}")

# one token through every router
picked = compare_routers($logits, $k, bias=$bias, token=$token, table=np.array($table), groups=$groups, top_groups=$kept, scaling=$scaling, image_sentinel_lo=$image)
for name, one in picked.items():
    print(f"{name}: {one.ids}", [f"{weight:.4g}" for weight in one.weights])
