"""The three stages of the demo: read a file, count what is in it, record the result.

One program for all of them; PEPSI_STAGE tells which one it is. It is also an example of a fused stage.
"""
import hashlib
import os
import sys
import time

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where worker_stub is not installed

from worker_stub import serve

SMALL = 8192  # bytes of a file that is not worth a pass of its own: its lines are counted where it is read


def read(message):
    """Digest a file. Of a small one count the lines as well, and say so: a fused pass of the stage count."""
    data = load(message)
    state = {'sha256': hashlib.sha256(data).hexdigest()}
    if len(data) > SMALL:
        message.advance('count', state)
        return
    since = time.perf_counter()
    state.update(measure(data))
    message.fused('count', time.perf_counter() - since)
    message.advance('record', state)


def count(message):
    """Count lines, words and bytes of a file."""
    message.advance('record', measure(load(message)))


def record(message):
    """Write the result into a table of its own, in the same transaction as the end of the message."""
    result = dict(message.state, message=message.id)
    message.cursor().execute('INSERT INTO result (message, path, sha256, lines, words, bytes) VALUES (%(message)s,'
                             ' %(path)s, %(sha256)s, %(lines)s, %(words)s, %(bytes)s)', result)


def load(message):
    """Return the content of the file that a message is about."""
    with open(os.fsencode(message.state['path']), 'rb') as file:
        return file.read()


def measure(data):
    """Count as wc(1) does."""
    return {'lines': data.count(b'\n'), 'words': len(data.split()), 'bytes': len(data)}


if __name__ == '__main__':
    serve({'read': read, 'count': count, 'record': record}[os.environ['PEPSI_STAGE']])
