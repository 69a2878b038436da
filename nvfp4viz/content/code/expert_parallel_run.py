from nvfp4viz import serving
from nvfp4viz.device.ranks import run_ranks
from nvfp4viz.model import corpus
from nvfp4viz.serving import expert_parallel as ep
from nvfp4viz.serving import route_trace
from sample_checkpoints import ensure
from sample_checkpoints.record_routes import ROUTES

steps = route_trace.traffic(route_trace.RouteTrace.read(ROUTES), "every", "every")
plan = route_trace.balance(steps, $layer, experts=64, ranks=$ranks, extra=$extra)
placement = plan.new[$layer] if $extra else plan.plain

# one layer's batch of every demo prompt, once in a process for each rank and once in one process
served = serving.load(ensure($sample), backend=$backend)
problem = ep.layer_problem(served, corpus.DEMO_PROMPTS.values(), $layer, placement)
answer = run_ranks(problem)
wrong = ep.differing(answer.out, ep.one_process(problem))
print(f"{placement.ranks} processes, {answer.backend}: {wrong} of {answer.out.size:,} BF16 values differ")
for rank in range(placement.ranks):
    sent, back = (of[rank].sum() - of[rank, rank] for of in (answer.dispatched, answer.combined))
    print(f"rank {rank}: {answer.rows[rank]:,} rows, sent {sent:,} bytes, returned {back:,}")
