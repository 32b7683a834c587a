"""A network between a store and its Redis server that can be cut, and servers on TCP.

The embedded Valkey has no TLS; `Network` ends TLS in front of it, so that client, handshake,
certificate check, AUTH and ACL are the real ones.
"""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time

from k3rl.store.redis_server import find_server


class Network:
    """Listens on a port and passes bytes on to `target`; `mode` is pass, drop or hang."""

    def __init__(self, target, tls=None):
        self.target, self.tls, self.mode = target, tls, "pass"
        self.connections = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()
        self.cut("drop")

    def cut(self, mode):
        """drop: every connection ends; hang: those that are there, and new ones, say nothing."""
        self.mode = mode
        if mode == "drop":
            for writer in self.connections:
                writer.transport.abort()

    def heal(self, target=None):
        """Connections that hung are over: what they swallowed never comes."""
        self.target = target or self.target
        self.cut("drop")
        self.mode = "pass"

    async def _serve(self, reader, writer):
        if self.mode == "drop":
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.connections |= {writer, far_writer}
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            ways = (self._pass(reader, far_writer), self._pass(far_reader, writer))
            await asyncio.gather(*ways)
        self.connections -= {writer, far_writer}

    async def _pass(self, reader, writer):
        while data := await reader.read(1 << 16):
            if self.mode == "hang":
                return
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.contextmanager
def tcp_server(folder, *settings):
    """A Valkey on a TCP port of this machine; its process and its port."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [find_server(), "--port", port, "--bind", "127.0.0.1", "--dir", folder]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [*map(str, command), "--save", "", *settings], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait(port, folder / "log")
        yield port
    finally:
        process.kill()
        process.wait()


def _wait(port, log):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.01)
    raise AssertionError(log.read_text()[-500:])


def certificates(folder):
    """An authority's certificate file, and a server context for `localhost` that it signed."""
    key, crt, ca_key, ca = (folder / name for name in ("s.key", "s.crt", "ca.key", "ca.crt"))
    request, names = folder / "s.csr", folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signed = ["-CAcreateserial", "-out", crt, "-days", "9", "-extfile", names]
    for command in (
        ["req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-subj", "/CN=ca", "-days", "9"],
        ["req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=localhost"],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, *signed],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(crt, key)
    return ca, context
