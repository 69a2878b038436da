import numpy as np
from nvfp4viz.moe import eplb, overlap
from nvfp4viz.moe.parallel import choose_slots, choose_slots_at_home, exchange, imbalance, place
from nvfp4viz.serving import route_trace
from sample_checkpoints.record_routes import ROUTES

trace = route_trace.RouteTrace.read(ROUTES)

# one batch: who computes how many rows, what is sent, how long the model says it takes
now = np.concatenate(route_trace.traffic(trace, $now, $now)[8:])[:, $layer].astype(np.int32)
placed = place(64, $ranks, $place)
layer = exchange(choose_slots_at_home(now, placed), placed)
uneven = imbalance(layer.rank_rows)
print(f"rows of each rank {layer.rank_rows.tolist()}, slowest {uneven.ratio:.2f} times the mean, {uneven.idle:.1%} waits")
sent, back = layer.dispatch_bytes($hidden, $payload, $way), layer.combine_bytes($hidden, $way)
print(f"dispatch {sent.sum():,} bytes, combine {back.sum():,}")
machine = overlap.Machine(link=$link * 1e9, latency=$latency * 1e-6, flops=$flops * 1e12, memory=$memory * 1e12)
size = overlap.LayerSize($hidden, $intermediate)
phases = overlap.phases(layer, size, machine, $payload, $way)
print(f"{1e6 * overlap.total(overlap.timeline([phases])):,.1f} microseconds without overlap")
halves = overlap.halves(choose_slots(now, placed), placed)
two = overlap.timeline([overlap.phases(half, size, machine, $payload, $way) for half in halves])
print(f"{1e6 * overlap.total(two):,.1f} microseconds in two halves that overlap")

# the same batch, had EPLB counted such requests; slots keep the input_scale of the expert that they held
such = route_trace.traffic(trace, $now, $now)
plan = route_trace.balance(such, $layer, experts=64, ranks=$ranks, extra=$extra, window=$window, strategy=$place)
new, changed = plan.new[$layer], eplb.compare(plan.old[$layer], plan.new[$layer]).slots
phases = overlap.phases(exchange(choose_slots_at_home(now, new), new), size, machine, $payload, $way)
print(f"{1e6 * overlap.total(overlap.timeline([phases])):,.1f} microseconds after EPLB")
print(f"{len(changed)} of {len(new.slots)} slots get another expert and keep their input_scale")

# EPLB at half time
steps = route_trace.traffic(trace, $before, $now)
found = route_trace.balance(steps, $layer, experts=64, ranks=$ranks, extra=$extra, window=$window, strategy=$place)
print(f"all steps together, slowest rank: {found.before.ratio:.2f} times the mean, {found.after.ratio:.2f} after EPLB")
alone = [route_trace.step_ratio(rows) for rows in (found.without, found.rebalanced)]
print(f"each step by itself, slowest rank: {alone[0]:.2f} times the mean, {alone[1]:.2f} after EPLB")
placed, move = found.new[$layer], eplb.compare(found.old[$layer], found.new[$layer])
print(f"{len(move.slots)} of {len(placed.slots)} slots change, {len(move.arriving)} experts come from another rank")
print("experts with several slots:", {expert: int(placed.replicas[expert]) for expert in move.replicated})
rows = np.bincount(np.concatenate(steps[8:])[:, $layer].ravel(), minlength=64)
print(f"busiest expert {rows.argmax()}: {rows.max() / rows.sum():.1%} of all rows")
