"""A TCP proxy in front of a server's unix socket whose link can be frozen, dropped, refused, delayed or muted.

For tests of what a program does when its link to the database is ill. Runs in a thread of its own.
"""
import collections
import selectors
import socket
import struct
import threading
import time

SIZE = 65536  # bytes of one read
LIMIT = 1 << 18  # bytes kept for a side that does not take them
RESET = struct.pack('ii', 1, 0)  # SO_LINGER: close() resets the connection instead of ending it in an orderly way


class Half:
    """One direction of a link: what was read at one end and is still to be written to the other."""

    def __init__(self, source, sink):
        self.source = source
        self.sink = sink
        self.chunks = collections.deque()  # (when it is due, bytes)
        self.size = 0
        self.ended = False

    def pump(self, now, delay_s):
        """Move what can be moved without waiting; return how many bytes were written. Raises OSError."""
        if not self.ended and self.size < LIMIT:
            try:
                data = self.source.recv(SIZE)
            except BlockingIOError:
                pass
            else:
                self.ended = not data
                self.size += len(data)
                if data:
                    self.chunks.append((now + delay_s, data))
        written = 0
        while self.chunks and self.chunks[0][0] <= now:
            when, data = self.chunks.popleft()
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            written += sent
            self.size -= sent
            if sent < len(data):
                self.chunks.appendleft((when, data[sent:]))
                break
        return written


class Link:
    """A client and, unless it is mute, its connection to the server."""

    def __init__(self, client, server):
        self.client = client
        self.server = server  # None: mute
        self.frozen = False
        self.halves = [Half(client, server), Half(server, client)] if server else []

    def sockets(self):
        return [end for end in (self.client, self.server) if end]


class Proxy:
    """The proxy; a context manager. All methods return when what they say is in force.

    Passes everything on until told otherwise; thaw() ends all but drop(), which is over at once.
    """

    def __init__(self, target):
        """target: path of the server's unix socket. Listens on 127.0.0.1 at .port, a free one."""
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._links = set()
        self._listener = None
        self._masks = {}  # socket -> what the selector waits for
        self._hold_new = False
        self._mute = False
        self._delay_s = 0.0
        self._commands = collections.deque()
        self._closed = False
        self.port = 0
        self.accepted = 0  # connections since the beginning
        self.delayed = 0  # bytes that came late
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listen()
        self._thread = threading.Thread(target=self._run, name='proxy', daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def freeze(self, old=True, new=True):
        """Pass nothing on and notice nothing; on connections that are there, on those that will be made, or both."""
        self._do(self._freeze, old, new)

    def mute(self):
        """Drop all connections; take new ones, but never say a word on them."""
        self._do(self._be_mute)

    def refuse(self):
        """Drop all connections and refuse new ones."""
        self._do(self._refuse)

    def delay(self, seconds):
        """Pass everything on so much later, in both directions."""
        self._do(setattr, self, '_delay_s', seconds)

    def drop(self):
        """Reset all connections."""
        self._do(self._drop_all)

    def thaw(self):
        """Be a good proxy again. What was frozen goes on; who was mute is dropped."""
        self._do(self._thaw)

    def connections(self):
        """Return how many clients are connected."""
        return len(self._links)

    def close(self):
        """Drop everything and end."""
        if not self._closed:
            self._do(self._end)
            self._thread.join()
            for resource in (self._wake, self._woken, self._selector):
                resource.close()

    # below here: in the thread

    def _do(self, function, *arguments):
        done = threading.Event()
        self._commands.append((function, arguments, done))
        self._wake.send(b'x')
        if not done.wait(10):
            raise RuntimeError('the proxy does not answer')

    def _run(self):
        while not self._closed:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._woken:
                    self._obey()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._links:
                    self._pump(key.data)
            if self._delay_s or any(half.chunks for link in self._links for half in link.halves):
                for link in list(self._links):
                    self._pump(link)

    def _patience(self):
        now = time.monotonic()
        due = [half.chunks[0][0] for link in self._links if not link.frozen for half in link.halves if half.chunks]
        return min((when - now for when in due if when > now), default=None)  # what is due waits for room

    def _obey(self):
        try:
            self._woken.recv(SIZE)
        except BlockingIOError:
            pass
        while self._commands:
            function, arguments, done = self._commands.popleft()
            function(*arguments)
            done.set()

    def _listen(self):
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(('127.0.0.1', self.port))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self):
        try:
            client, _ = self._listener.accept()
        except OSError:  # gone again
            return
        self.accepted += 1
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = None
        if not self._mute:
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._target)
            except OSError:  # no server: what a client sees is a connection that ends
                server.close()
                client.close()
                return
            server.setblocking(False)
        link = Link(client, server)
        link.frozen = self._hold_new
        self._links.add(link)
        self._watch(link)

    def _pump(self, link):
        if link.frozen or not link.halves:
            return
        now = time.monotonic()
        try:
            for half in link.halves:
                written = half.pump(now, self._delay_s)
                self.delayed += written if self._delay_s else 0
        except OSError:
            self._drop(link)
            return
        if any(half.ended and not half.chunks for half in link.halves):
            self._drop(link, reset=False)
        else:
            self._watch(link)

    def _watch(self, link):
        """Have the selector wait for what the link can make use of; nothing while it is frozen or mute."""
        now = time.monotonic()
        wanted = dict.fromkeys(link.sockets(), 0)
        for half in link.halves if not link.frozen else ():
            if not half.ended and half.size < LIMIT:
                wanted[half.source] |= selectors.EVENT_READ
            if half.chunks and half.chunks[0][0] <= now:
                wanted[half.sink] |= selectors.EVENT_WRITE
        for end, mask in wanted.items():
            before = self._masks.get(end, 0)
            if mask and not before:
                self._selector.register(end, mask, link)
            elif mask and mask != before:
                self._selector.modify(end, mask, link)
            elif before and not mask:
                self._selector.unregister(end)
            self._masks[end] = mask

    def _drop(self, link, reset=True):
        self._links.discard(link)
        for end in link.sockets():
            if self._masks.pop(end, 0):
                self._selector.unregister(end)
            if reset and end is link.client:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()

    def _drop_all(self):
        for link in list(self._links):
            self._drop(link)

    def _freeze(self, old, new):
        self._hold_new = new
        for link in self._links:
            link.frozen = link.frozen or old
            self._watch(link)

    def _be_mute(self):
        self._mute = True
        self._drop_all()

    def _refuse(self):
        self._drop_all()
        if self._listener:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _thaw(self):
        self._hold_new = self._mute = False
        self._delay_s = 0.0
        if self._listener is None:
            self._listen()
        for link in list(self._links):
            if link.server is None:
                self._drop(link)
                continue
            link.frozen = False
            self._pump(link)

    def _end(self):
        self._refuse()
        self._closed = True
