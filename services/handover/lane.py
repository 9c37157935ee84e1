"""A shorter way from a prefill worker to a decode worker of its host: datagrams, from the one's thread to the other's.

By the link a message passes three threads of gRPC and both event loops: about a millisecond in which a client waits for
token 1. So what a client waits for goes this way where it can. The ticket protocol does not mind that it overtakes what
the link carries, nor that it is lost: the prefill worker says again what is not answered.
"""

import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.message import DecodeError

from ...errors import Mismatch
from ...kvtransfer.messages import Complete, FromWriter, Progress
from ...v1 import worker_pb2 as pb
from ..identity import ProcessIdentity
from .wire_link import from_writer, read_from_writer

log = logging.getLogger(__name__)

_MOST = 1 << 16  # bytes of a datagram; a longer message goes by the link only
_SECRET = 16  # bytes
_NAME = 8  # bytes of an incarnation
_JOIN_S = 5.0
_PREFIX = b"\0twostroke-"  # of addresses: a peer leads us to no other socket of this host
_URGENT = (Progress, Complete)


class LaneEnd:
    """The decode worker's: a socket without a file, in the abstract namespace, and the thread that reads it.

    Anyone on the host may send to it, so each writer proves by a secret, told over its link, that it was invited.
    """

    def __init__(self, received: Callable[[int, FromWriter], None]) -> None:
        """`received`: told the writer's incarnation and what it said, on the thread that read it. OSError where the
        system has no such sockets.
        """
        self._received = received
        self._secrets: dict[int, bytes] = {}  # by writer
        self._heard: set[int] = set()
        self._closing = False
        self._paused_until = 0.0
        self._go_on = threading.Event()
        self._address = _PREFIX + secrets.token_hex(8).encode()
        self._thread = threading.Thread(target=self._read, name="kv-lane", daemon=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(self._address)
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes the thread: it sees what it shall do
        except BaseException:
            self._socket.close()
            raise
        self._thread.start()

    def offer(self, writer: int) -> pb.Lane:
        """For that writer. The event loop's, like `forget`."""
        secret = self._secrets.setdefault(writer, secrets.token_bytes(_SECRET))
        return pb.Lane(address=self._address, secret=secret)

    def forget(self, writer: int) -> None:
        """No link with it comes again."""
        self._secrets.pop(writer, None)
        self._heard.discard(writer)

    def heard(self, writer: int) -> bool:
        """Whether it has used the offer. Any thread."""
        return writer in self._heard

    def pause(self, until: float) -> None:
        """The caller looks himself until then, by the monotonic clock; the thread, which would be in his way, does
        nothing meanwhile. One caller's, like `resume`.
        """
        reads = self._paused_until <= time.monotonic()
        self._go_on.clear()
        self._paused_until = until
        if reads and not self._closing:
            os.eventfd_write(self._bell, 1)

    def resume(self) -> None:
        """The thread reads again."""
        self._paused_until = 0.0
        self._go_on.set()

    def look(self) -> None:
        """Takes what is there, if anything is. Any thread."""
        try:
            datagram = self._socket.recv(_MOST + 1, socket.MSG_DONTWAIT)
        except OSError:  # nothing, or closed
            return
        self._take(memoryview(datagram))

    def close(self) -> None:
        """Nothing is told any more once it returns. Not on the reading thread, and not beside `pause`. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.resume()
        os.eventfd_write(self._bell, 1)
        self._thread.join(_JOIN_S)
        os.close(self._bell)

    def _read(self) -> None:
        wait = select.poll()
        with self._socket:  # once nobody reads it, writers are refused, and take the link
            wait.register(self._socket, select.POLLIN)
            wait.register(self._bell, select.POLLIN)
            while not self._closing:
                if (left := self._paused_until - time.monotonic()) > 0:
                    self._go_on.wait(left)
                elif any(end == self._bell for end, _ in wait.poll()):
                    os.eventfd_read(self._bell)
                else:
                    self.look()

    def _take(self, datagram: memoryview) -> None:
        """Does not raise: whoever sent it has no right to stop the others."""
        head = _NAME + _SECRET
        writer = int.from_bytes(datagram[:_NAME], "big")
        secret = self._secrets.get(writer)
        if secret is None or len(datagram) > _MOST or not hmac.compare_digest(datagram[_NAME:head], secret):
            return
        try:
            message = read_from_writer(pb.FromPrefill.FromString(bytes(datagram[head:])))
        except (DecodeError, Mismatch) as error:
            log.warning("a datagram of %016x cannot be read: %s", writer, error)
            return
        if message is not None:
            self._heard.add(writer)
            try:
                self._received(writer, message)
            except Exception:
                log.exception("what %016x said could not be taken", writer)


class Lane:
    """The prefill worker's: to one decode worker."""

    def __init__(self, writer: int, offer: pb.Lane) -> None:
        """`writer`: our incarnation. OSError where the other end cannot be reached, as out of another container."""
        self._head = writer.to_bytes(_NAME, "big") + offer.secret
        self._lock = threading.Lock()
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(offer.address)
        except BaseException:
            self._socket.close()
            raise

    def send(self, message: FromWriter) -> bool:
        """Any thread. At once, or not at all: whether it went. What does not belong here does not go."""
        if not isinstance(message, _URGENT):
            return False
        datagram = self._head + from_writer(message).SerializeToString()
        with self._lock:
            if self._socket is None or len(datagram) > _MOST:
                return False
            try:
                self._socket.send(datagram)
            except OSError as error:  # its queue is full, or it has gone
                log.debug("goes by the link: %s", error)
                return False
        return True

    def close(self) -> None:
        """Sends nothing any more. Idempotent."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


class Lanes:
    """A prefill worker's, to those decode workers with which a link stands and that it can reach so. All but `send` on
    the event loop.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        """`identity`: ours."""
        self._identity = identity
        self._lanes: dict[int, Lane] = {}  # by reader

    def open(self, reader: ProcessIdentity, offer: pb.Lane) -> None:
        """As its newest link offers; in place of what an older one did."""
        self.close(reader.incarnation)
        known = offer.address.startswith(_PREFIX) and len(offer.secret) == _SECRET
        if not known or reader.host != self._identity.host:
            return
        try:
            self._lanes[reader.incarnation] = Lane(self._identity.incarnation, offer)
        except OSError as error:
            log.info("all that a hand-over says goes to %s by its link: %s", reader.name, error)

    def send(self, batches: Mapping[int, Sequence[FromWriter]]) -> dict[int, Sequence[FromWriter]]:
        """Any thread. What is left for the links."""
        left: dict[int, Sequence[FromWriter]] = {}
        for reader, messages in batches.items():
            lane = self._lanes.get(reader)
            others = messages if lane is None else [message for message in messages if not lane.send(message)]
            if others:
                left[reader] = others
        return left

    def close(self, reader: int) -> None:
        """That link is lost."""
        if (lane := self._lanes.pop(reader, None)) is not None:
            lane.close()

    def close_all(self) -> None:
        """Nothing is sent any more."""
        for reader in list(self._lanes):
            self.close(reader)
