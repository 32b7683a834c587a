"""Sockets of the host, of other sandboxes and of the world. Controls stay on the machine."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, Untried, loosely
from k3rl.sandboxes.spec import Capability

GREETING = b"hello"
TALK = """
kinds = {"tcp4": (2, 1), "tcp6": (10, 1), "udp4": (2, 2), "unix": (1, 1)}
def talk(kind, host, port):
    with socket.socket(*kinds[kind]) as line:
        line.settimeout(2)
        if kind == "unix":
            line.connect(host.replace("@", "\\0"))
        else:
            line.connect((host, int(port)))
        line.send(b"hello")
for word in sys.argv[1:]:
    kind, host, port = word.split("|")
    attempt(word, talk, kind, host, port)
"""
KINDS = {
    "tcp4": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
    "tcp6": (socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
    "udp4": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
}


async def host_port(ground: Ground, kind: str) -> str:
    """A server of the host on its loopback interface."""
    family, how, address = KINDS[kind]
    with socket.socket(family, how) as server:
        try:
            server.bind(address)
        except OSError as error:
            raise Untried(f"no server at {address[0]}: {error.strerror}") from error
        if how == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
        host, port = server.getsockname()[:2]
        async with ground.place() as place:
            said = await place.attempts(TALK, f"{kind}|{host}|{port}")
        return said if how == socket.SOCK_STREAM or _has_heard(server) else ""


def _has_heard(server: socket.socket) -> bool:
    """A datagram can be sent without anybody's being there to hear it."""
    try:
        return server.recv(16) == GREETING
    except BlockingIOError:
        return False


async def host_socket(ground: Ground, is_abstract: bool) -> str:
    """A unix socket of the host, by its path or its abstract name."""
    name = f"@{ground.new_token()}" if is_abstract else str(ground.folder / "docker.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(name.replace("@", "\0"))
        if not is_abstract:
            (ground.folder / "docker.sock").chmod(0o777)
        server.listen()
        try:
            async with ground.place() as place:
                return await place.attempts(TALK, f"unix|{name}|")
        finally:
            if not is_abstract:
                (ground.folder / "docker.sock").unlink()


SERVE = """
import time
servers = []
def serve(family, address):
    server = socket.socket(family, 1)
    server.bind(address)
    server.listen()
    servers.append(server)
for family, address in ((2, ("127.0.0.1", 45671)), (1, "\\0k3rl-conformance"), (1, "by-path")):
    attempt("", serve, family, address)
through.clear()
def greet():
    for word in sys.argv[2:]:
        kind, host, port = word.split("|")
        with socket.socket({"tcp4": 2, "unix": 1}[kind], 1) as line:
            line.connect((host, int(port)) if port else host.replace("@", "\\0"))
        through.append(word)
if sys.argv[1] == "wait":
    time.sleep(1.5)
else:
    greet()
"""
OWN_SERVERS = ("tcp4|127.0.0.1|45671", "unix|@k3rl-conformance|", "unix|by-path|")


async def sibling_servers(ground: Ground) -> str:
    """Servers in another sandbox."""
    async with ground.place() as one, ground.place() as two:
        serving = asyncio.create_task(one.attempts(SERVE, "wait"))
        await asyncio.sleep(0.7)
        found = await two.attempts(TALK, *OWN_SERVERS)
        await serving
        return found


LOOPBACK = """
import fcntl, struct
def raise_loopback(name, address):
    with socket.socket() as any_socket:
        ask = struct.pack("16sHH4s8x", name, 2, 0, socket.inet_aton(address))
        fcntl.ioctl(any_socket, 0x8916, ask)  # SIOCSIFADDR
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", name, 0x41))  # SIOCSIFFLAGS: up
raise_loopback(b"lo", "127.0.0.1")
"""


async def own_servers(ground: Ground) -> str:
    """The control: servers of one and the same process."""
    return await ground.privileged(LOOPBACK + SERVE, "greet", *OWN_SERVERS)


FAR = ("tcp4|169.254.169.254|80", "udp4|169.254.169.254|53", "udp4|8.8.8.8|53", "tcp4|10.0.0.1|22")
NEARBY = """
servers = []
for number, (host, port, kind) in enumerate(
    (("169.254.169.254", 80, 1), ("8.8.8.8", 53, 2), ("10.0.0.1", 22, 1))
):
    raise_loopback(b"lo:%d" % number, host)
    servers.append(socket.socket(2, kind))
    servers[-1].bind((host, port))
    if kind == 1:
        servers[-1].listen()
"""
"""Makes far addresses those of a network namespace's own loopback interface."""


async def far_addresses(ground: Ground) -> str:
    """The cloud's metadata service, a name server, a private network."""
    async with ground.place() as place:
        return await place.attempts(TALK, *FAR)


async def far_addresses_nearby(ground: Ground) -> str:
    """The control: where these addresses are those of one's own machine."""
    return await ground.privileged(LOOPBACK + NEARBY + TALK, *FAR)


NAMES = """
for name in sys.argv[1:]:
    attempt(name, socket.getaddrinfo, name, 80)
"""
FAR_NAMES, OWN_NAME = ("example.com", "metadata.google.internal"), "localhost"


async def names(ground: Ground) -> str:
    """Addresses of names of other machines."""
    async with ground.place() as place:
        return await place.attempts(NAMES, *FAR_NAMES)


async def own_name(ground: Ground) -> str:
    """The control: the host's address of its own name."""
    return await ground.on_host(NAMES, OWN_NAME)


RAW = """
kinds = {"raw": (2, 3, 1), "raw tcp": (2, 3, 6), "raw6": (10, 3, 58), "packet": (17, 3, 768)}
for name, kind in kinds.items():
    attempt(name, lambda: socket.socket(*kind).close())
"""


async def raw_sockets(ground: Ground) -> str:
    """Sockets that write whole packets."""
    async with ground.place() as place:
        return await place.attempts(RAW)


async def raw_sockets_of_the_privileged(ground: Ground) -> str:
    """The control: by one who may."""
    return await ground.privileged(RAW)


INTERFACES = """
def see(name):
    return name not in sys.argv
def routes():
    return len(open("/proc/net/route").readlines()) > 1
try:
    for _, name in socket.if_nameindex():
        attempt(name, see, name)
except OSError:
    pass
attempt("a route", routes)
"""


async def interfaces(ground: Ground) -> str:
    """Routes, and network interfaces but loopback."""
    async with ground.place() as place:
        return await place.attempts(INTERFACES, "lo")


async def interfaces_on_host(ground: Ground) -> str:
    """The control: all of the host's, loopback too."""
    return await ground.on_host(INTERFACES)


NO_NETWORK = Capability.NO_NETWORK
CHECKS = (
    *(
        Check(
            f"{kind} server of the host",
            NO_NETWORK,
            partial(host_port, kind=kind),
            loosely(partial(host_port, kind=kind)),
        )
        for kind in KINDS
    ),
    Check(
        "abstract unix socket of the host",
        NO_NETWORK,
        partial(host_socket, is_abstract=True),
        loosely(partial(host_socket, is_abstract=True)),
    ),
    Check(
        "unix socket of the host by its path",
        Capability.ISOLATED_FILES,
        partial(host_socket, is_abstract=False),
        loosely(partial(host_socket, is_abstract=False)),
    ),
    Check("servers of other sandboxes", NO_NETWORK, sibling_servers, own_servers),
    Check("metadata service and name server", NO_NETWORK, far_addresses, far_addresses_nearby),
    Check("names of other machines", NO_NETWORK, names, own_name),
    Check("raw sockets", NO_NETWORK, raw_sockets, raw_sockets_of_the_privileged),
    Check("interfaces and routes", NO_NETWORK, interfaces, interfaces_on_host),
)
