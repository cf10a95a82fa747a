"""Metrics: each declared once in `registry`, filled by `prometheus`, summed up every ten seconds by `log_line`."""
