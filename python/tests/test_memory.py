"""Memory stays flat over many calls. FEDPROJ_CALLS=1000 makes more of them."""

import os
import shutil
import sys
from pathlib import Path

import fedproj
import pytest

N_CALLS = int(os.environ.get("FEDPROJ_CALLS", "150"))


class Plain(fedproj.Method):
    def fuse(self, server):
        server.weights[:] = server.average()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_after_many_calls_is_that_after_the_first(tmp_path):
    settings = {"federation.rounds": 1, "local.epochs": 1, "model.hidden": [8], "data.private_samples": 200}
    first = max(N_CALLS // 10, 50)
    for call in range(N_CALLS):
        method = Plain() if call % 2 else "fedproj"
        fedproj.run(method=method, settings=settings, out=tmp_path / "run", progress=False, threads=2)
        shutil.rmtree(tmp_path / "run")
        if call + 1 == first:
            before = resident_mb()
    # 5 MB over the 900 calls after the hundredth; over fewer calls, what the allocator moves about.
    assert resident_mb() - before < max(2, 5 * (N_CALLS - first) / 900)
