"""triton has wheels for Linux only; whether its kernels are interpreted here is decided in tests/conftest.py."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
