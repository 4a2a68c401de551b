"""What waking the dispatcher costs those who insert.

    python test/bench_notify.py [--clients N] [--pairs N] [--seconds S] [--no-fsync] [--quick]

Clients insert one message a transaction, durably, as fast as they can: into a table without any trigger, and with what
`init` installs; in turn, while no dispatcher runs, while one is idle (the messages are of a stage that it does not
serve), and while one is busy with exactly these messages. Busy without a trigger means that somebody else, ten times a
second, tells it to look. The target is for the busy one; what the dispatcher and its workers take of the processors,
trigger or not, shows in the ratio to the rate where there is neither (to bare). Also with one client.
"""
import contextlib
import multiprocessing
import sys
import time

import bench

TARGET = 0.85
CASES = ('none', 'idle', 'busy')
TRIGGERS = ('pepsi_dispatch_insert', 'pepsi_dispatch_update')


def insert(dsn, stage, go, until, counter, number):
    """Insert messages from the moment go is set until that time; count them."""
    with contextlib.closing(bench.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute('PREPARE put AS INSERT INTO queue (stage) VALUES (%s)', (stage,))
        counter[number] = -1  # ready
        go.wait()
        done = 0
        while time.monotonic() < until.value:
            cursor.execute('EXECUTE put')
            done += 1
        counter[number] = done


class Rig:
    """A database, a dispatcher that may run in it, and clients; a context manager."""

    def __init__(self, server, directory, clients, dispatcher):
        self._server = server
        self._dsn = bench.make_database(server, 'notify')
        self._connection = bench.connect(self._dsn)
        self._cursor = self._connection.cursor()
        self._shared = bench.Shared(directory)
        self._clients = clients
        self._busy = dispatcher == 'busy'
        self._dispatcher = None
        if dispatcher != 'none':
            self._dispatcher = bench.Dispatcher(directory, self._dsn, {
                'busy': {'PROGRAM': self._shared.command(self._dsn), 'MAX_MESSAGES': 0, 'QUEUE_LIMIT': 16}})
            self.run(True, 0.2)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._dispatcher:
            self._dispatcher.__exit__(*error)
        self._connection.close()

    def run(self, trigger, seconds):
        """Have the clients insert for so long; return what happened."""
        self._cursor.execute('TRUNCATE queue')
        for name in TRIGGERS:
            self._cursor.execute('ALTER TABLE queue %s TRIGGER %s' % ('ENABLE' if trigger else 'DISABLE', name))
        go = multiprocessing.Event()
        until = multiprocessing.Value('d', 0)
        counter = multiprocessing.Array('q', self._clients, lock=False)
        clients = [multiprocessing.Process(target=insert, args=(
            self._dsn, 'busy' if self._busy else 'nobody', go, until, counter, number))
            for number in range(self._clients)]
        for client in clients:
            client.start()
        bench.support.wait_until(lambda: all(counter), 30, 'clients to connect')
        passes = self._shared.passes()
        meter = bench.Meter(server=bench.server_pids(self._server),
                            dispatcher=[self._dispatcher.pid] if self._dispatcher else [])
        began = time.monotonic()
        until.value = began + seconds
        go.set()
        while time.monotonic() < until.value:
            time.sleep(0.1)
            if self._busy and not trigger:
                self._cursor.execute('NOTIFY ingress')
        elapsed, used, done = time.monotonic() - began, meter.read(), self._shared.passes() - passes
        for client in clients:
            client.join()
        inserts = sum(counter)
        if self._busy:  # let it finish: the next run is to begin with nothing to do
            self._cursor.execute('NOTIFY ingress')
            bench.support.wait_until(lambda: self._shared.passes() - passes >= inserts, 120, 'the backlog to be done')
        return {'inserts': inserts, 'inserts_s': inserts / elapsed, 'passes_s': done / elapsed,
                'server_us': used['server'] / inserts * 1e6, 'dispatcher_us': used['dispatcher'] / inserts * 1e6}


def main(arguments):
    parser = bench.make_parser(__doc__)
    parser.add_argument('--clients', type=bench.numbers, default=[8, 1])
    parser.add_argument('--pairs', type=int, help='default: 5')
    parser.add_argument('--seconds', type=float, help='of a run; default: 1.5')
    parser.add_argument('--no-fsync', action='store_true')
    options = parser.parse_args(arguments)
    options.pairs = options.pairs or (1 if options.quick else 5)
    options.seconds = options.seconds or (0.3 if options.quick else 1.5)
    rows = []
    with bench.start_server(**(bench.cluster.NOT_DURABLE if options.no_fsync else {})) as server:
        bench.print_machine(server)
        for clients in options.clients:
            bare = None
            for case in CASES:
                with bench.temporary_directory() as directory, Rig(server, directory, clients, case) as rig:
                    pairs = [(rig.run(False, options.seconds), rig.run(True, options.seconds))
                             for _ in range(options.pairs)]
                without, with_it = (bench.median(pair[i]['inserts_s'] for pair in pairs) for i in (0, 1))
                ratios = [b['inserts_s'] / a['inserts_s'] for a, b in pairs]
                bare = bare or without
                target = TARGET if (clients, case) == (8, 'busy') else None
                result = {'clients': clients, 'dispatcher': case, 'without_s': without, 'with_s': with_it,
                          'ratio': bench.median(ratios), 'least': min(ratios), 'most': max(ratios),
                          'to_bare': with_it / bare, 'target': target,
                          'verdict': bench.judge(bench.median(ratios), target, True),
                          'passes_without_s': bench.median(a['passes_s'] for a, _ in pairs),
                          'passes_with_s': bench.median(b['passes_s'] for _, b in pairs),
                          'server_without_us': bench.median(a['server_us'] for a, _ in pairs),
                          'server_with_us': bench.median(b['server_us'] for _, b in pairs)}
                bench.print_json(bench='notify', **result)
                rows.append([result[name] for name in (
                    'clients', 'dispatcher', 'without_s', 'with_s', 'ratio', 'least', 'most', 'to_bare', 'target',
                    'verdict', 'passes_without_s', 'passes_with_s', 'server_without_us', 'server_with_us')])
    bench.print_table('Inserts a second, one a transaction (medians of %d pairs)' % options.pairs,
                      ['clients', 'dispatcher', 'no trigger', 'trigger', 'ratio', 'least', 'most', 'to bare', 'target',
                       '', 'passes/s', 'with', 'server us', 'with'], rows)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
