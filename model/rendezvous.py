"""How ranks that are processes find one another: rank 0 listens, the others connect.

Ranks of one run share the job's name, so that a rank of another run, or a stranger, is turned away
and disturbs nobody.
"""

import contextlib
import errno
import json
import os
import select
import socket
import struct
import time

from ddtree_numba.model.comm_tcp import LeaderLost, RankError
from ddtree_numba.model.place import Place

MAGIC = b"ddtree-numba ranks 1\n"
LENGTH = struct.Struct("<I")
LONGEST = 4096  # bytes of a greeting
STRANGER_SECONDS = 2.0
LINKS = ("data", "control")  # connections of a rank
Links = dict[int, dict[str, socket.socket]]


def meet(place: Place) -> Links:
    """Connections by rank and kind (`LINKS`): rank 0's to all others, or another rank's to rank 0.

    RankError, in one line, names who is missing after `place.seconds`, and who was turned away.
    """
    links: Links = {}
    try:
        (_approach if place.rank else _gather)(place, links)
    except BaseException:
        for link in (link for kinds in links.values() for link in kinds.values()):
            link.close()
        raise
    return links


def _listen(place: Place) -> socket.socket:
    if place.listener is not None:
        return socket.socket(fileno=place.listener)
    try:
        family, *_, address = socket.getaddrinfo(
            place.address, place.port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2 * place.world)
    except OSError as error:
        why = {
            errno.EADDRINUSE: "the port is taken: give another MASTER_PORT",
            errno.EADDRNOTAVAIL: "MASTER_ADDR is no address of this host, where rank 0 runs",
        }.get(error.errno or 0, error.strerror or str(error))
        raise RankError(f"rank 0 cannot listen at {place.where}: {why}") from None


def _gather(place: Place, links: Links) -> None:
    links |= {rank: {} for rank in range(1, place.world)}
    refused: list[str] = []
    news = [] if place.news is None else [place.news]
    deadline = time.monotonic() + place.seconds
    with _listen(place) as listener:
        while missing := [str(rank) for rank, kinds in links.items() if len(kinds) < len(LINKS)]:
            sources = [listener.fileno(), *news]
            ready = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))[0]
            if ready and ready[-1] in news:
                raise RankError(read_news(ready[-1]) or "the parent of the ranks is gone")
            if not ready:
                raise RankError(
                    f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {place.world} did not"
                    f" reach rank 0 at {place.where} within {place.seconds:g} s"
                    + "".join(f"; {why}" for why in refused)
                )
            link, (host, *_) = listener.accept()
            link.settimeout(STRANGER_SECONDS)
            try:
                greeting = _hear(link)
                why = _objection(place, greeting, links)
                _say(link, {"refused": why})
            except (OSError, ValueError, KeyError, TypeError):  # a stranger
                link.close()
                continue
            if why:
                link.close()
                if (line := f"refused {host}: {why}") not in refused:
                    refused.append(line)
            else:
                links[greeting["rank"]][greeting["kind"]] = tuned(link)
    for kinds in links.values():
        with contextlib.suppress(OSError):  # whoever is gone by now is missed at the first call
            _say(kinds["control"], {"complete": True})


def _objection(place: Place, greeting: dict, links: dict) -> str | None:
    """Why whoever sent this greeting is not let in."""
    rank, world, kind = greeting["rank"], greeting["world"], greeting["kind"]
    if greeting["job"] != place.job:
        return "it belongs to another run"
    if world != place.world:
        return f"rank {rank} has WORLD_SIZE {world}, rank 0 has {place.world}"
    if rank not in links or kind not in LINKS:
        raise ValueError(f"rank {rank}")
    return f"rank {rank} is there already" if kind in links[rank] else None


def _approach(place: Place, links: Links) -> None:
    deadline = time.monotonic() + place.seconds
    links[0] = {}
    for kind in LINKS:
        links[0][kind] = link = _connect(place, deadline)
        try:
            own = {"rank": place.rank, "world": place.world, "job": place.job, "kind": kind}
            _say(link, own)
            why = _hear(link)["refused"]
        except ConnectionError:
            raise LeaderLost(f"rank 0 at {place.where} closed the connection") from None
        except (OSError, ValueError, KeyError) as error:
            raise RankError(f"what answers at {place.where} is no rank 0: {error}") from None
        if why:
            raise RankError(f"rank 0 at {place.where} refused this rank: {why}")
    try:
        links[0]["control"].settimeout(None)  # rank 0 has the deadline
        _hear(links[0]["control"])
    except (OSError, ValueError):
        raise LeaderLost("rank 0 ended before all ranks had met") from None
    for link in links[0].values():
        tuned(link)


def _connect(place: Place, deadline: float) -> socket.socket:
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            link = socket.create_connection((place.address, place.port), timeout=left)
            if link.getsockname() != link.getpeername():
                return link
            link.close()  # where nobody listens, a connection may come to reach itself
        except OSError as error:
            if place.parent is not None:
                raise LeaderLost(f"rank 0 at {place.where} has ended") from None
            if time.monotonic() > deadline:
                raise RankError(
                    f"no rank 0 at {place.where} within {place.seconds:g} s:"
                    f" {error.strerror or error}"
                ) from None
            time.sleep(0.05)


def tuned(link: socket.socket) -> socket.socket:
    """Small messages leave at once; a host that vanished is noticed within ten seconds."""
    link.settimeout(None)
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    )
    for option in options:
        link.setsockopt(*option)
    return link


def _say(link: socket.socket, message: dict) -> None:
    data = json.dumps(message).encode()
    link.sendall(MAGIC + LENGTH.pack(len(data)) + data)


def _hear(link: socket.socket) -> dict:
    """A message; ValueError for anything else, ConnectionError for an end."""
    if _exactly(link, len(MAGIC)) != MAGIC:
        raise ValueError("it speaks another protocol")
    (length,) = LENGTH.unpack(_exactly(link, LENGTH.size))
    if length > LONGEST:
        raise ValueError("its message is too long")
    message = json.loads(_exactly(link, length))
    if not isinstance(message, dict):
        raise ValueError("its message is no object")
    return message


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


def read_news(news: int) -> str:
    """The first line on the parent's pipe that waits to be read; "" once the parent is gone."""
    return os.read(news, 4096).decode().partition("\n")[0]
