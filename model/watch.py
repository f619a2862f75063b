"""The watch over ranks that are processes: the first failure is known to all, and ends them all.

Every rank but 0 keeps a control connection to rank 0 beside its data connection. A thread of each
rank listens on it. Rank 0's takes reports of errors, ends of connections and the parent's news, and
passes the first failure on; then all shut their data connections, so that whoever waits on one
wakes up. A main thread that does not end by itself is ended after `GRACE` seconds.

Control messages are lines of JSON: {"alive": true}, {"error": text} and {"bye": true} to rank 0,
{"failed": text} from it.
"""

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from ddtree_numba.model.comm_tcp import LeaderLost, RankError, RankLost, TcpComm
from ddtree_numba.model.place import Place
from ddtree_numba.model.rendezvous import meet, read_news

GRACE = 3.0  # seconds for a main thread to end by itself, and for all to take leave
NEWS_SECONDS = 0.5  # a parent knows better than a broken connection why a rank ended
VERDICT_SECONDS = 2.0  # from a broken connection to the watch's word on it
ALIVE_SECONDS = 1.0
GONE = "rank {} is gone"


class ProcessGroup:
    """This rank among the ranks of a run: `comm`, and the watch over all of them.

    As a context: rank 0, left without an exception, takes leave of the others, and left with one
    ends them. On another rank whatever is not `RankLost` is reported to rank 0. `farewells` are
    called before leave is taken, and `stops`, from any thread, once the run has failed.
    """

    def __init__(self, place: Place, describe: Callable[[BaseException], str] = str) -> None:
        """Meet the others; RankError names who is missing. `describe` makes a line of an error."""
        self.place, self.rank, self.world = place, place.rank, place.world
        self._describe = describe
        links = meet(place)
        self._controls = {rank: kinds["control"] for rank, kinds in links.items()}
        data = {rank: kinds["data"] for rank, kinds in links.items()}
        self._signs = dict.fromkeys(links, 0)  # of life, by rank
        self.comm = TcpComm(
            place.rank, place.world, data, place.seconds, self._lost, self._signs.__getitem__
        )
        self.failure: str | None = None
        self.farewells: list[Callable[[], None]] = []
        self.stops: list[Callable[[], None]] = []
        self._decided, self._all_left = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._said, self._closed = 0.0, False
        self._wake = os.pipe()
        self._timer = threading.Timer(GRACE, self._end)
        self._timer.daemon = True
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._take_leave()
            else:
                self._report(error)
        except BaseException as late:
            self._report(late)
            raise
        finally:
            self._close()

    def _report(self, error: BaseException) -> None:
        """Why this rank ends: from rank 0 to all others, from another one to rank 0."""
        if self.rank == 0:
            self.fail(self._describe(error))
        elif not isinstance(error, RankLost):
            self._say(0, {"error": self._describe(error)})

    def alive(self) -> None:
        """Tell rank 0, from a rank that is busy for long, that it goes on."""
        if time.monotonic() - self._said > ALIVE_SECONDS:
            self._said = time.monotonic()
            self._say(0, {"alive": True})

    def fail(self, text: str) -> None:
        """The run has failed, if it had not before: rank 0 tells all others."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = text
        if self.rank == 0:
            for rank in self._controls:
                self._say(rank, {"failed": text})
        self.comm.close()
        self._timer.start()
        self._decided.set()
        for stop in self.stops:
            stop()

    def _take_leave(self) -> None:
        if not self.rank:
            self.comm.broadcast()
        for farewell in self.farewells:
            farewell()
        if self.rank:
            self._say(0, {"bye": True})
            return
        self._all_left.wait(GRACE)
        if self.failure is not None:
            raise RankLost(self.failure)
        if not self._all_left.is_set():
            raise RankError(f"a rank has not ended within {GRACE:g} s")

    def _close(self) -> None:
        self._closed = True
        self._timer.cancel()
        os.write(self._wake[1], b".")
        self._thread.join()
        for link in (*self._controls.values(), *self.comm.links.values()):
            link.close()
        for end in self._wake:
            os.close(end)

    def _lost(self, rank: int) -> RankError:
        if not self._decided.wait(VERDICT_SECONDS):
            self.fail(GONE.format(rank))
        return self.lost()

    def lost(self) -> RankError:
        """The error of a run that has failed."""
        kind = LeaderLost if self.failure == GONE.format(0) else RankLost
        return kind(self.failure)

    def _say(self, rank: int, message: dict) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is missed by the watch
            self._controls[rank].sendall(json.dumps(message).encode() + b"\n")

    def _end(self) -> None:
        """The main thread is stuck: it waits for a file or a terminal, or computes."""
        if self._closed:
            return
        if self.rank == 0:
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
        os._exit(1)

    def _watch(self) -> None:
        """Listen until the first failure, or until the group is closed."""
        ranks = {control.fileno(): rank for rank, control in self._controls.items()}
        rests = dict.fromkeys(self._controls, b"")
        wake, news = self._wake[0], self.place.news
        others = [wake] if news is None else [wake, news]
        while self.failure is None:
            ready = select.select([*others, *ranks], [], [])[0]
            if wake in ready:
                return
            # Controls once more, and first: a rank speaks before it ends, its parent after it.
            for control in select.select([*ranks], [], [], 0)[0]:
                if not self._listen(ranks[control], rests):
                    del ranks[control]
            if news in ready and news is not None and self.failure is None:
                self.fail(read_news(news) or "the parent of the ranks is gone")

    def _listen(self, rank: int, rests: dict[int, bytes]) -> bool:
        """Take what a rank says; False once it has ended."""
        try:
            data = self._controls[rank].recv(65536)
        except OSError:
            data = b""
        *lines, rests[rank] = (rests[rank] + data).split(b"\n")
        for line in lines:
            self._heed(rank, json.loads(line))
        if not data and rank not in self._left:
            self.fail(self._why_ended(rank))
        return bool(data)

    def _heed(self, rank: int, message: dict) -> None:
        self._signs[rank] += 1
        if "failed" in message:
            self.fail(message["failed"])
        elif "error" in message:
            self.fail(f"rank {rank}: {message['error']}")
        elif "bye" in message:
            self._left.add(rank)
            if len(self._left) == len(self._controls):
                self._all_left.set()

    def _why_ended(self, rank: int) -> str:
        news = self.place.news
        told = news is not None and select.select([news], [], [], NEWS_SECONDS)[0]
        return (read_news(news) if told and news is not None else "") or GONE.format(rank)
