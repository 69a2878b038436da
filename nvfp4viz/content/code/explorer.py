from nvfp4viz.audit import audit
from sample_checkpoints import ensure

report = audit(ensure($sample), gpu=$gpu, tp=$tp, ep=$ep)

print(report.verdict, report.format.dialect, report.format.scheme)
for role, count in report.coverage.items():
    print(role, "expected", count.expected, "missing", count.missing, "invalid", count.invalid)
for finding in report.findings[:3]:
    print(finding.code, finding.severity, "layer", finding.layer, finding.projection, "experts", finding.experts)
for backend in report.backends[:4]:
    print(backend.name, backend.outcome, backend.scope)
