"""docs/metrics.md says what the registry says."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from quire.messages import EngineReady
from quire.metrics.document import markdown
from quire.metrics.prometheus import PrometheusMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m quire.metrics.document > docs/metrics.md"


def test_every_family_that_is_shown_has_a_row():
    metrics = PrometheusMetrics("m", 2048, legacy_names=True, kv_blocks=True, experts=True, max_draft=2)
    metrics.engines[0].on_ready(EngineReady(2048, 8, 16, 8, 2048))
    page = markdown()
    for family in text_string_to_metric_families(metrics.render().decode()):
        if not family.name.startswith(("process_", "python_")):
            suffix = "_total" if family.type == "counter" else ""
            assert f"| `{family.name}{suffix}` | {family.type} |" in page
