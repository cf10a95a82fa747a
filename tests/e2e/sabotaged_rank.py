"""A rank of an engine as Quire starts it, except that a file in the folder given as argument orders faults in steps."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    from quire.engine import rank_process
    from quire.worker.worker import DeviceWorker
    from tests.e2e.sabotaged_engine import sabotaged

    DeviceWorker.execute = sabotaged(DeviceWorker.execute)  # type: ignore[method-assign]
    rank_process.main()
