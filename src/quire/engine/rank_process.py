"""The process of a rank other than the first. It obeys the process of the first rank, and ends with it.

It is started as `python -m quire.engine.rank_process`. A RankLaunch comes on its standard input; this may happen while
the libraries are still being loaded.
"""

from __future__ import annotations

import signal

from quire import logs
from quire.engine.libraries import load
from quire.engine.rank_spawn import receive_launch


def main() -> None:
    """Run the process: load the libraries, wait for the launch, and obey."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):  # the first rank's process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    logs.configure()
    orders = load("quire.engine.rank_orders")
    if (launch := receive_launch()) is not None:
        orders.obey(launch)


if __name__ == "__main__":
    main()
