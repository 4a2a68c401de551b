"""How long it takes from an INSERT to the moment when a worker reads the id, beside the least that could do it.

    python test/bench_latency.py [--samples N] [--seconds S] [--cases warm,cold,load] [--quick] [--svg FILE]

The least is a bare listener: it hears the NOTIFY, claims one row with a prepared statement that does not wait for the
disk, and writes the id to the pipe of a worker that is idle. Both have a database of their own on one server, four
workers, and take turns: after each insert (warm: the workers are up; cold: none is, so that one is started), or every
second under load. Load: one client inserts at random times, on average half as often as it can while the dispatcher is
at work. The time is counted from before the INSERT, whose commit is durable, and also from the return of the commit,
which may come after the worker's reading. Targets: warm median 1.3, 99th percentile 2 times that of the listener.
"""
import collections
import contextlib
import os
import random
import selectors
import subprocess
import sys
import time


import bench

WORKERS = 4
TARGETS = {('warm', 0.5): 1.3, ('warm', 0.99): 2.0}

CLAIM = """
PREPARE claim AS UPDATE queue SET status = 'running' WHERE ingress_id = (
    SELECT ingress_id FROM queue WHERE stage = ANY (ARRAY['a']) AND status = 'pending'
    ORDER BY stage, ingress_id LIMIT 1)
RETURNING ingress_id
"""


class Listener:
    """The bare listener, run in a process of its own: see main()."""

    def __init__(self, dsn, command, cold):
        self._connection = bench.connect(dsn)
        self._cursor = self._connection.cursor()
        for statement in ("SET application_name = 'pepsi-dispatch'", "SET pepsi.dispatcher = 'on'",
                          'SET synchronous_commit = off', 'SET enable_seqscan = off', 'SET enable_sort = off',
                          'SET plan_cache_mode = force_generic_plan', CLAIM, 'LISTEN ingress'):
            self._cursor.execute(statement)
        self._command = command
        self._cold = cold
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._connection.fileno(), selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)
        self._idle = collections.deque()
        self._children = []
        if not cold:
            self._idle.extend(self._start() for _ in range(WORKERS))

    def _start(self):
        child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)
        return child

    def run(self):
        """Serve until standard input ends."""
        looking = True
        while True:
            for key, _ in self._selector.select(0 if looking and (self._idle or self._cold) else None):
                if key.fd == 0:
                    for child in self._children:
                        child.stdin.close()
                        child.wait()
                    return
                if key.data is None:
                    self._connection.poll()
                    if self._connection.notifies:
                        del self._connection.notifies[:]
                        looking = True
                else:
                    os.read(key.fd, 65536)
                    self._answered(key.data)
            while looking and (self._idle or self._cold):
                self._cursor.execute('EXECUTE claim')
                rows = self._cursor.fetchall()
                looking = bool(rows)
                for id, in rows:
                    child = self._start() if self._cold else self._idle.popleft()
                    os.write(child.stdin.fileno(), b'%d\n' % id)
                looking = looking or bool(self._connection.notifies)
                del self._connection.notifies[:]

    def _answered(self, child):
        if not self._cold:
            self._idle.append(child)
            return
        self._selector.unregister(child.stdout)
        child.stdin.close()
        child.stdout.close()
        child.wait()
        self._children.remove(child)


class Side:
    """One of the two: a database, who dispatches there, and a client; made and closed by make_sides()."""

    def __init__(self, name, dsn, shared):
        self.name = name
        self.shared = shared
        self._connection = bench.connect(dsn)
        self._cursor = self._connection.cursor()
        self._cursor.execute("PREPARE put AS INSERT INTO queue (stage) VALUES ('a') RETURNING ingress_id")

    def close(self):
        self._connection.close()

    def insert(self):
        """Insert a message; return its id, when that began and when it was committed."""
        began = time.monotonic()
        self._cursor.execute('EXECUTE put')
        committed = time.monotonic()
        return self._cursor.fetchone()[0], began, committed

    def wait_read(self, id, timeout_s=30):
        """Wait until a worker has read an id; return when that was."""
        deadline = time.monotonic() + timeout_s
        while not self.shared.read_at(id):
            if time.monotonic() > deadline:
                raise AssertionError('%s: nobody has read %d for %d s' % (self.name, id, timeout_s))
            time.sleep(0.0005)
        return self.shared.read_at(id)

    def wait_finished(self, number):
        """Wait until so many passes are done."""
        bench.support.wait_until(lambda: self.shared.passes() >= number, 60, '%d passes' % number)

    def one(self):
        """Insert when nothing else is to do; return the two latencies."""
        before = self.shared.passes()
        id, began, committed = self.insert()
        read = self.wait_read(id)
        self.wait_finished(before + 1)
        return read - began, read - committed

    def stream(self, seconds, pause_s):
        """Insert for so long, with random pauses of so much on average; return the latencies of each."""
        before = self.shared.passes()
        inserted, end, due = [], time.monotonic() + seconds, time.monotonic()
        while True:
            due += random.expovariate(1 / pause_s)
            if due > end:
                break
            time.sleep(max(0, due - time.monotonic()))
            inserted.append(self.insert())
        self.wait_finished(before + len(inserted))
        return [(self.shared.read_at(id) - began, self.shared.read_at(id) - committed)
                for id, began, committed in inserted]

    def pause_at_full_speed(self, seconds):
        """Insert as fast as possible for so long; return the mean time between two inserts."""
        before, number, began = self.shared.passes(), 0, time.monotonic()
        while time.monotonic() < began + seconds:
            self.insert()
            number += 1
        pause_s = (time.monotonic() - began) / number
        self.wait_finished(before + number)
        return pause_s


@contextlib.contextmanager
def make_sides(server, cold):
    """Yield the side of the dispatcher and that of the listener."""
    with contextlib.ExitStack() as stack:
        sides = []
        for name in ('dispatcher', 'listener'):
            directory = stack.enter_context(bench.temporary_directory())
            dsn = bench.make_database(server, 'latency_' + name)
            shared = bench.Shared(directory)
            command = shared.command(dsn)
            if name == 'dispatcher':
                stack.enter_context(bench.Dispatcher(
                    directory, dsn, {'a': {'PROGRAM': command, 'PARALLELISM': WORKERS, 'MAX_MESSAGES': 0}},
                    **({'WORKER_IDLE_TIMEOUT': '0'} if cold else {})))
            else:
                process = subprocess.Popen([sys.executable, __file__, '--listener', dsn, 'cold' if cold else 'warm']
                                           + command, stdin=subprocess.PIPE)
                stack.callback(process.wait)
                stack.callback(process.stdin.close)
            sides.append(Side(name, dsn, shared))
            stack.callback(sides[-1].close)
        yield sides


def measure(server, options, case):
    """Return side -> latencies of one case, in seconds."""
    results = {'dispatcher': [], 'listener': []}
    with make_sides(server, case == 'cold') as sides:
        for side in sides * 20:  # first until all is up, and known to be quick
            side.one()
        if case == 'load':
            for side in sides:
                side.stream(1, 0.001)
            pause_s = 2 * sides[0].pause_at_full_speed(min(options.seconds, 1))
            bench.print_json(bench='latency', case=case, inserts_s=1 / pause_s)
            for _ in range(max(1, int(options.seconds))):
                for side in sides:
                    results[side.name] += side.stream(1, pause_s)
        else:
            for _ in range(options.samples // 5 if case == 'cold' else options.samples):
                for side in sides:
                    results[side.name].append(side.one())
                    if case == 'cold':
                        time.sleep(0.05)  # for the worker to be gone
                    time.sleep(random.uniform(0.002, 0.006))
    return results


def main(arguments):
    if arguments[:1] == ['--listener']:
        Listener(arguments[1], arguments[3:], arguments[2] == 'cold').run()
        return 0
    parser = bench.make_parser(__doc__)
    parser.add_argument('--samples', type=int, help='of each side; a fifth of it for cold; default: 1000')
    parser.add_argument('--seconds', type=float, help='under load, of each side; default: 10')
    parser.add_argument('--cases', type=bench.words, default=['warm', 'cold', 'load'])
    options = parser.parse_args(arguments)
    options.samples = options.samples or (20 if options.quick else 1000)
    options.seconds = options.seconds or (1 if options.quick else 10)
    rows, curves = [], {}
    with bench.start_server() as server:
        bench.print_machine(server)
        for case in options.cases:
            results = measure(server, options, case)
            for number, since in enumerate(('insert', 'commit')):
                values = {name: [sample[number] * 1e3 for sample in samples] for name, samples in results.items()}
                if since == 'insert':
                    curves.update(((case, name), sorted(samples)) for name, samples in values.items())
                for share, label in ((0.5, 'median'), (0.9, '90 %'), (0.99, '99 %')):
                    ours, least = (bench.quantile(values[name], share) for name in ('dispatcher', 'listener'))
                    # What the commit took may be more than all that came after it: then there is no ratio.
                    ratio = ours / least if least > 0.1 else None
                    target = TARGETS.get((case, share)) if since == 'insert' else None
                    verdict = bench.judge(ratio, target, False)
                    rows.append([case, since, label, len(values['dispatcher']), ours, least, ratio, target, verdict])
                    bench.print_json(bench='latency', case=case, since=since, quantile=share,
                                     samples=len(values['dispatcher']), dispatcher_ms=ours, listener_ms=least,
                                     ratio=ratio, target=target, verdict=verdict)
    bench.print_table("INSERT to the worker's reading of the id, ms",
                      ['case', 'since', '', 'samples', 'dispatcher', 'listener', 'ratio', 'target', ''], rows)
    with bench.drawing(options.svg) as pyplot:
        if pyplot:
            for (case, name), samples in curves.items():
                pyplot.plot(samples, [(i + 1) / len(samples) for i in range(len(samples))],
                            linestyle='-' if name == 'dispatcher' else ':', label='%s, %s' % (case, name))
            pyplot.xscale('log')
            pyplot.xlabel('ms from INSERT to the worker')
            pyplot.ylabel('share of the messages')
            pyplot.legend()
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
