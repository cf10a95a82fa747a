"""Certificates for the tests of TLS, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make(folder: Path, name: str, *, is_authority: bool = True) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key. Some clients take no authority as a server."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-addext", f"basicConstraints=CA:{str(is_authority).upper()}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
