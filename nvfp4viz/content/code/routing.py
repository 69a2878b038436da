import numpy as np
from nvfp4viz.model.planner import check_planner, plan_unseen
from nvfp4viz.model.routing_log import RoutingLog
from nvfp4viz.moe.router_comparison import compare_routers
from sample_checkpoints import ROUTING

# the calibration of the holed export, document by document
calibration = RoutingLog.read(ROUTING, "calibration")
print("slots without a token:", calibration.holes_after()[$documents], "after", $documents, "documents,", calibration.holes_after()[-1], "after all")

# a plan from a few recorded documents, and what came
log = RoutingLog.read(ROUTING, $text)
(plan,) = plan_unseen(log.part(0, $pilot), [$target])
print(f"{plan.unseen_now} unseen after $pilot documents; {plan.low} to {plan.high} predicted after $target; came: {log.holes_after()[$target]}")
checks = check_planner({$text: log}, $pilot, $target)
print("the interval held in", sum(check.held for check in checks), "of", len(checks), "runs of this text")

# one token through every router
picked = compare_routers($logits, $k, bias=$bias, token=$token, table=np.array($table), groups=$groups, top_groups=$kept, scaling=$scaling, image_sentinel_lo=$image)
for name, one in picked.items():
    print(f"{name}: {one.ids}", [f"{weight:.4g}" for weight in one.weights])
