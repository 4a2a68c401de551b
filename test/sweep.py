"""A dispatcher in which one thing goes wrong: at the N-th call of a kind, before or after it.

    python sweep.py TRACE KIND N WHEN ACTION ARGUMENT...

runs pepsi-dispatch with these arguments and appends the kind of each call to the file TRACE, and 'hit' when it acts.
KIND is one of KINDS, WHEN is before or after, ACTION is one of:

    kill    SIGKILL to itself
    shut    the socket to the database is shut in both directions: what was sent may have been executed
    EAGAIN and the like: the call of the operating system below fails so, instead of being made
"""
import collections
import errno
import os
import signal
import socket
import sys
from typing import Any

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import psycopg2

import pepsidispatch

# Kind -> class and method whose calls are counted.
KINDS = {
    'send': ('Queue', '_send'),
    'receive': ('Queue', 'receive'),
    'spawn': ('Child', '__init__'),
    'write': ('Child', 'write'),
    'read': ('Child', 'read'),
    'close': ('Child', 'close_stdin'),
    'reap': ('Child', 'reap'),
}

# What may be done at which kind of call, and when.
ACTIONS = [(kind, when, 'kill') for kind in KINDS for when in ('before', 'after')]
ACTIONS += [(kind, when, 'shut') for kind in ('send', 'receive') for when in ('before', 'after')]
ACTIONS += [('os.read', 'before', 'EAGAIN'), ('os.write', 'before', 'EAGAIN'), ('os.write', 'before', 'EINTR'),
            ('os.pipe', 'before', 'EMFILE'), ('os.fork', 'before', 'EAGAIN'), ('os.fork', 'before', 'ENOMEM'),
            ('os.connect', 'before', 'refused')]


class Point:
    """Where it goes wrong, and how."""

    def __init__(self, trace, kind, number, when, action):
        self._trace = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._wanted = kind, int(number), when
        self._action = action
        self._counts = collections.Counter()  # type: Any

    def wrap(self, kind, function):
        """Return the function with everything around it."""
        def wrapped(*arguments, **options):
            self._counts[kind] += 1
            number = self._counts[kind]
            os.write(self._trace, kind.encode() + b'\n')
            self._act((kind, number, 'before'), arguments)
            result = function(*arguments, **options)
            self._act((kind, number, 'after'), arguments)
            return result

        return wrapped

    def _act(self, where, arguments):
        if where != self._wanted:
            return
        if self._action == 'shut':
            try:
                fd = os.dup(arguments[0]._conn.fileno())
            except (AttributeError, OSError, psycopg2.Error):
                return  # no connection: nothing to shut
            with socket.socket(fileno=fd) as link:
                try:
                    link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return
        os.write(self._trace, b'hit\n')
        if self._action == 'kill':
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._action == 'refused':
            raise psycopg2.OperationalError('connection refused, says the test')
        elif self._action != 'shut':
            number = getattr(errno, self._action)
            raise OSError(number, os.strerror(number))


class Double:
    """A module with some of its functions replaced."""

    def __init__(self, module, **replaced):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def main(arguments):
    point = Point(*arguments[:5])
    module: Any = pepsidispatch
    for kind, (owner, method) in KINDS.items():
        setattr(getattr(module, owner), method, point.wrap(kind, getattr(getattr(module, owner), method)))
    module.os = Double(os, **{name: point.wrap('os.' + name, getattr(os, name)) for name in ('read', 'write', 'pipe')})
    module.subprocess = Double(module.subprocess, Popen=point.wrap('os.fork', module.subprocess.Popen))
    module.psycopg2 = Double(psycopg2, connect=point.wrap('os.connect', psycopg2.connect))
    return pepsidispatch.main(arguments[5:])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
