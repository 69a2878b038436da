"""What an audit fetches: headers and scalars in a handful of ranges, whatever the layout, and never a weight."""

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import MemorySource, file_bytes, inspect
from nvfp4viz.checkpoint.writer import json_bytes
from tests.audit.families import FAMILIES
from tests.audit.layouts import LAYOUTS


class Counting(MemorySource):
    """Ranges of the shard that were asked for."""

    def __init__(self, files):
        super().__init__(files)
        self.ranges = []

    def read_range(self, file, begin, end):
        if file.endswith(".safetensors"):
            self.ranges.append((begin, end))
        return super().read_range(file, begin, end)


def counted(checkpoint):
    files = {"model.safetensors": file_bytes(checkpoint.read_tensors())}
    for name, content in (("config.json", checkpoint.config), ("hf_quant_config.json", checkpoint.hf_quant_config)):
        if content is not None:
            files[name] = json_bytes(content)
    return Counting(files)


@pytest.mark.parametrize("name", [*LAYOUTS, *FAMILIES])
def test_scalars_come_in_one_range(name):
    """Sorted files hold all F32 numbers at the front, stacked vectors among them."""
    source = counted(LAYOUTS[name].open() if name in LAYOUTS else FAMILIES[name]())
    checkpoint = inspect(source)
    opening = len(source.ranges)
    report = audit(checkpoint)
    wanted = [entry for entry in checkpoint.tensors.values() if entry.dtype == "F32"]
    more = source.ranges[opening:]
    # One range for the experts' scalars, one for their vectors, one for ordinary modules' and one for the KV cache's.
    awq = sum(".pre_quant_scale" in name for name in checkpoint.tensors)
    assert len(more) <= 4 + awq
    small = sum(entry.nbytes for entry in wanted if entry.nbytes <= 64)
    spent = report.container.bytes_read - report.container.header_bytes
    # Other F32 tensors and gaps of up to 4 KiB may lie between.
    assert spent <= 2 * small + 4 * 4096 + awq * 128
