"""A worker for the benchmarks: the least that a stage program can do, and a note of when it did it.

    bench_worker.py --shared=FILE [--dsn=DSN] [--sync=off] [--next=STAGE] [--work=SECONDS] worker -c CONFIG_FILE

With --dsn it commits one guarded UPDATE a pass, prepared once: to done, or to the stage --next, and with --sync=off
without waiting for the disk; without it, it only answers. --work: it sleeps for so long in each pass. --shared names a
file made by make_shared().
"""
import fcntl
import mmap
import os
import sys
import time

# The shared file is an array of 64-bit numbers: how many workers have come, a counter of passes for each of SLOTS
# workers in turn, then for each id, modulo STAMPS, when it was last read from stdin: CLOCK_MONOTONIC, which is the same
# in all processes, in ns.
SLOTS = 4096
STAMPS = 65536
FIRST_STAMP = 1 + SLOTS


def make_shared(path):
    """Make the shared file, with zeros in it."""
    with open(path, 'wb') as file:
        file.truncate(8 * (FIRST_STAMP + STAMPS))


def map_shared(path):
    """Return the numbers of the shared file, as a writable sequence."""
    with open(path, 'r+b') as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast('Q')


def take_slot(path, shared):
    """Return the index of a counter that is ours alone, until SLOTS others have come."""
    with open(path, 'r+b') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shared[0] += 1
        return 1 + (shared[0] - 1) % SLOTS


def prepare(dsn, sync, following):
    """Connect, and return a function that commits the one statement of a pass for an id."""
    import psycopg2  # takes its time: not where no database is wanted

    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    cursor = connection.cursor()
    cursor.execute('SET synchronous_commit = %s', (sync,))
    cursor.execute('PREPARE pass (bigint) AS UPDATE queue SET ' + ('stage = %s' if following else 'status = %s')
                   + " WHERE ingress_id = $1 AND status = 'running'", (following or 'done',))
    return lambda id: cursor.execute('EXECUTE pass (%d)' % id)


def main(arguments):
    options = dict(argument[2:].split('=', 1) for argument in arguments if argument.startswith('--'))
    shared = map_shared(options['shared'])
    slot = take_slot(options['shared'], shared)
    commit = None
    if 'dsn' in options:
        commit = prepare(options['dsn'], options.get('sync', 'on'), options.get('next'))
    work_s = float(options.get('work', 0))
    rest = b''
    while True:
        data = os.read(0, 65536)
        if not data:
            return
        now = int(time.monotonic() * 1e9)
        lines = (rest + data).split(b'\n')
        rest = lines.pop()
        for line in lines:
            shared[FIRST_STAMP + int(line) % STAMPS] = now
        for line in lines:
            if work_s:
                time.sleep(work_s)
            if commit:
                commit(int(line))
            shared[slot] += 1
            os.write(1, b'0 id=%s\n' % line)


if __name__ == '__main__':
    main(sys.argv[1:])
