"""Unix sockets, TLS and the bounds of who may connect: `quire serve` with real clients."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quire.config import ServerConfig
from quire.entry.listen import Listener, check_guarded
from quire.errors import ConfigError
from tests.e2e import certificates
from tests.e2e.serving import LIGHT, SHORT, SMALL, Program, Serve
from tests.nursery import LightPopen

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("certificates")
    certificate, key = certificates.make(folder, "server")
    client, client_key = certificates.make(folder, "client")
    return {"cert": str(certificate), "key": str(key), "client": str(client), "client_key": str(client_key)}


def _run_what_it_says_to_try(server: Serve) -> None:
    """The command of the first screen, if there is a curl to run it."""
    found = re.search(r"try +(curl .*?)\n\n", server.log, re.S)
    assert found is not None, server.log
    if shutil.which("curl") is not None:
        result = subprocess.run(found[1], shell=True, check=False, capture_output=True, text=True, timeout=30)
        assert '"chat.completion"' in result.stdout, (found[1], result)


def test_unix_socket(tmp_path: Path) -> None:
    """Its owner's alone, asked under any host name, removed at the end; no port is open."""
    path = tmp_path / "quire.sock"
    with Serve("--uds", str(path), "--host", "0.0.0.0", *SMALL, *SHORT, program=LIGHT) as server:
        assert server.url == f"unix:{path}"
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://proxy.example") as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "quire-demo"
            body = {"prompt": "Hello", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=body, timeout=30) as response:
                assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]
        _run_what_it_says_to_try(server)
        assert "chat in the browser" not in server.log, "no browser opens a Unix socket"
        assert not _ports(server), "a port is open beside the Unix socket"
        assert server.stop() == 0, server.log
    assert not path.exists()


def _ports(server: Serve) -> list[Any]:
    """The network addresses of the server's processes: (address, port)."""
    parent = psutil.Process(server.process.pid)
    return [
        tuple(connection.laddr)
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]


def test_only_the_http_port_is_open_and_only_on_loopback() -> None:
    with Serve(*SMALL, program=LIGHT) as server:
        assert _ports(server) == [("127.0.0.1", int(server.url.rpartition(":")[2]))]


def test_a_unix_socket_is_removed_on_interrupt_while_loading(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    command = [sys.executable, *LIGHT.arguments, "serve", "--uds", str(path), *SMALL]
    with LIGHT.popen(command, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert not path.exists()


INTERRUPTED_WHILE_BINDING = """
import os, signal, sys
from quire.entry import listen
from quire.cli.main import main

bind = listen._bind_path

def bind_path(path):
    bound = bind(path)
    os.kill(os.getpid(), signal.SIGINT)
    return bound

listen._bind_path = bind_path
sys.exit(main())
"""


def test_a_unix_socket_is_removed_on_interrupt_while_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    interrupted = Program(("-c", INTERRUPTED_WHILE_BINDING), LightPopen)
    result = interrupted.run("serve", "--uds", str(path), *SMALL)
    assert (result.returncode, result.stdout) == (130, ""), result.stderr
    assert "interrupted" in result.stderr
    assert not path.exists()


def test_whose_path_it_is(tmp_path: Path) -> None:
    """A dead server's socket is replaced, a living one's and other files are left alone."""
    path = str(tmp_path / "s")
    config = ServerConfig(uds=path)
    first = Listener(config)
    first.listen()
    with pytest.raises(ConfigError, match="Another server listens"):
        Listener(config)
    first.socket.close()  # as a kill does: the file stays
    second = Listener(config)
    first.close()
    assert os.path.exists(path), "it has removed the file of another server"
    second.close()
    assert not os.path.exists(path)
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        Listener(config)
    assert (tmp_path / "s").read_text() == "mine"
    for bad in (str(tmp_path / "no" / "folder"), "/" + "x" * 200):
        with pytest.raises(ConfigError, match="Cannot listen on the Unix socket"):
            Listener(ServerConfig(uds=bad))


def test_a_unix_socket_needs_no_key() -> None:
    """It counts as local, and then the host means nothing."""
    check_guarded(ServerConfig(uds="/x", host="0.0.0.0"), ())
    with pytest.raises(ConfigError, match="open to everybody"):
        check_guarded(ServerConfig(host="0.0.0.0"), ())


@needs_openssl
def test_tls(pems: dict[str, str]) -> None:
    with Serve("--ssl-certfile", pems["cert"], "--ssl-keyfile", pems["key"], *SMALL, *SHORT, program=LIGHT) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=pems["cert"])
        with httpx.Client(base_url=server.url, verify=trusting) as client:
            assert client.get("/readyz").status_code == 200
            body = {"prompt": "Hello", "max_tokens": 3, "stream": True}
            with client.stream("POST", "/v1/completions", json=body, timeout=30) as response:
                assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/readyz")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https:", "http:") + "/readyz")
        _run_what_it_says_to_try(server)
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log


@needs_openssl
def test_certificates_of_clients(pems: dict[str, str]) -> None:
    flags = ("--ssl-certfile", pems["cert"], "--ssl-keyfile", pems["key"], "--ssl-ca-certs", pems["client"])
    with Serve(*flags, "--ssl-cert-reqs", "2", *SMALL, program=LIGHT) as server:
        assert "--cert YOUR_CERTIFICATE" in server.log
        stranger = ssl.create_default_context(cafile=pems["cert"])
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/readyz", verify=stranger)
        known = ssl.create_default_context(cafile=pems["cert"])
        known.load_cert_chain(pems["client"], pems["client_key"])
        assert httpx.get(f"{server.url}/readyz", verify=known).status_code == 200
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log


@needs_openssl
def test_certificates_that_cannot_be_used(pems: dict[str, str], tmp_path: Path) -> None:
    """Said before the model costs time."""
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for settings, words in (
        ({"ssl_certfile": "/no/such.pem"}, "No such file"),
        ({"ssl_certfile": str(junk)}, "certificate or its key cannot be read"),
        ({"ssl_certfile": pems["cert"], "ssl_keyfile": pems["client_key"]}, "KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": pems["cert"]}, "certificate or its key cannot be read"),
        (
            {"ssl_certfile": pems["cert"], "ssl_keyfile": pems["key"], "ssl_ca_certs": str(junk)},
            "certificates of the authorities cannot be read",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            Listener(ServerConfig(port=0, **settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ssl_keyfile": "k"}, "needs a certificate of the server"),
        ({"ssl_ca_certs": "c"}, "needs a certificate of the server"),
        ({"ssl_cert_reqs": 1}, "needs a certificate of the server"),
        ({"ssl_ciphers": "HIGH"}, "needs a certificate of the server"),
        ({"enable_ssl_refresh": True}, "needs a certificate of the server"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "no authority is named"),
        ({"ssl_certfile": "c", "ssl_ca_certs": "c", "ssl_cert_reqs": 3}, "Illegal value of ssl_cert_reqs"),
        ({"uds": ""}, "empty"),
        ({"root_path": "llm"}, "Illegal root_path"),
        ({"root_path": "/a//b"}, "Illegal root_path"),
        ({"root_path": "/<script>"}, "Illegal root_path"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**settings)


@needs_openssl
def test_ciphers(pems: dict[str, str]) -> None:
    files = {"ssl_certfile": pems["cert"], "ssl_keyfile": pems["key"]}
    listener = Listener(ServerConfig(port=0, ssl_ciphers="ECDHE+AES256", **files))
    try:
        assert listener.tls is not None
        names = [cipher["name"] for cipher in listener.tls.get_ciphers() if cipher["protocol"] != "TLSv1.3"]
        assert names
        assert all("AES256" in name for name in names), names
    finally:
        listener.close()
    with pytest.raises(ConfigError, match="OpenSSL knows none of these ciphers"):
        Listener(ServerConfig(port=0, ssl_ciphers="NONSENSE", **files))


def _is_trusted(server: Serve, certificate: Path | str) -> bool:
    try:
        return httpx.get(f"{server.url}/livez", verify=ssl.create_default_context(cafile=certificate)).is_success
    except httpx.ConnectError:
        return False


@needs_openssl
def test_certificates_are_read_again(pems: dict[str, str], tmp_path: Path) -> None:
    """A renewal changes new connections; open ones stay. Half of one changes nothing."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(pems["cert"], certificate)
    shutil.copy(pems["key"], key)
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--enable-ssl-refresh")
    with Serve(*flags, *SMALL, program=LIGHT) as server:
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=pems["cert"])) as client:
            assert client.get("/livez").is_success
            shutil.copy(pems["client"], certificate)
            server.wait_for(lambda: "the old ones stay in use" in server.log, "half a renewal to be noticed")
            assert _is_trusted(server, pems["cert"])
            shutil.copy(pems["client_key"], key)
            server.wait_for(lambda: _is_trusted(server, pems["client"]), "the new certificate")
            assert not _is_trusted(server, pems["cert"])
            assert client.get("/livez").is_success, "an open connection was cut"
        assert server.log.count("the old ones stay in use") == 1
        assert server.stop() == 0, server.log
        assert "Traceback" not in server.log


def _connect(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLObject | None:
    """A handshake in memory: the client's end of a connection over which a byte has come; None: it was refused."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    ready = set()
    try:
        for _ in range(4):
            for end in ends:
                if end not in ready:
                    try:
                        end.do_handshake()
                        ready.add(end)
                    except ssl.SSLWantReadError:
                        continue
        ends[1].write(b"x")
        assert ends[0].read(1) == b"x"
    except ssl.SSLError:
        return None
    return ends[0]


@needs_openssl
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_authority_is_withdrawn(version: ssl.TLSVersion, pems: dict[str, str], tmp_path: Path) -> None:
    """Its clients are refused from then on, with a session from before as well."""
    authorities = tmp_path / "authorities.pem"
    shutil.copy(pems["client"], authorities)
    config = ServerConfig(
        port=0,
        ssl_certfile=pems["cert"],
        ssl_keyfile=pems["key"],
        ssl_ca_certs=str(authorities),
        ssl_cert_reqs=2,
        enable_ssl_refresh=True,
    )
    listener = Listener(config)
    try:
        tls = listener.server_tls()
        assert tls is not None
        client = ssl.create_default_context(cafile=pems["cert"])
        client.maximum_version = version
        client.load_cert_chain(pems["client"], pems["client_key"])
        first = _connect(tls, client)
        assert first is not None
        session = first.session
        again = _connect(tls, client, session)
        assert again is not None
        assert again.session_reused, "sessions are not resumed, so that this test shows less than it says"
        shutil.copy(pems["cert"], authorities)
        listener.refresh_tls()
        assert _connect(tls, client) is None, "an authority that was taken out of the file still counts"
        assert _connect(tls, client, session) is None, "a session of such a client is resumed"
    finally:
        listener.close()


def _passed(address: str) -> Program:
    """LIGHT with a socket as descriptor 3, as systemd passes it."""
    flag, code, *rest = LIGHT.arguments
    assert flag == "-c"
    before = (
        "import os, socket\n"
        f"descriptor = socket.create_server(('{address}', 0)).detach()\n"
        "if descriptor != 3:\n"
        "    os.dup2(descriptor, 3), os.close(descriptor)\n"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'}\n"
    )
    return LIGHT._replace(arguments=("-c", before + code, *rest))


def test_a_socket_of_systemd_is_served_and_handed_back() -> None:
    flags = ("--host", "0.0.0.0", "--port", "1", *SMALL, "--max-model-len", "512")
    with Serve(*flags, program=_passed("127.0.0.1")) as server:
        body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)

            def is_left_to_others() -> bool:
                with socket.socket() as client:
                    return client.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0

            server.wait_for(is_left_to_others, "the server to leave the socket")
            assert [line for line in lines if line][-1] == "data: [DONE]", "running requests end"
        assert server.wait_exit() == 0


def test_a_socket_open_to_others_needs_a_key() -> None:
    with Serve(*SMALL, waits=False, program=_passed("0.0.0.0")) as server:
        assert server.wait_exit() == 2
        assert "open to everybody" in server.log
