"""How the tests read a report."""

NARROW = "why.alignment.narrow"
"""What a forecast says of vllm-cutlass and experts as narrow as those of most tests: nobody has tried it."""


def found(report, above="info"):
    """(code, severity, layer, projection, experts) of every finding above a severity."""
    order = ("ok", "info", "warn", "backend", "error")
    return [
        (item.code, item.severity, item.layer, item.projection, item.experts)
        for item in report.findings
        if order.index(item.severity) > order.index(above)
    ]


def codes(report):
    """(code, severity) of every finding."""
    return [(item.code, item.severity) for item in report.findings]


def outcomes(report):
    return {item.name: item.outcome for item in report.backends}
