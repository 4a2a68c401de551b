"""What grows with the number of stages, workers, passes and rows, and what it costs to do nothing.

    python test/bench_scale.py [--parts stages,workers,memory,idle,start] [--pairs N] [--seconds S] [--passes N]
                               [--rows N] [--quick]

stages: one busy stage beside 0, 9 and 99 others that have nothing to do, in turn. workers: 10 and 400 workers that
answer at once; 10 again with a database. memory: so many passes (--passes, default 200,000; the target speaks of
10,000,000), with the resident memory at each tenth. idle: statements for each POLL_INTERVAL, and CPU. start: from the
start of the program to its first claim, beside so many rows (--rows) that are done and 1,000 that are pending.
"""
import contextlib
import sys
import time

import bench
import bench_throughput

LIMIT_SLOWER = 0.9  # 100 stages beside one
IDLE_STATEMENTS = 2  # a POLL_INTERVAL
IDLE_CPU = 0.001  # of a core
MEMORY_KIB = 30 * 1024
GROWTH_KIB = 1024
START_S = 0.5


class Rig(bench_throughput.Rig):
    """One busy stage beside others."""

    def __init__(self, server, directory, others, parallelism, mode, queue_limit=16):
        self._others = others
        super().__init__(server, directory, 1, parallelism, queue_limit, mode, limit=False, name='scale_%d' % others)

    def stages(self, commands, **options):
        result = super().stages(commands, **options)
        result.update(('other%d' % number, dict(result['s0'])) for number in range(self._others))
        return result


def measure_stages(server, options):
    """Compare one stage with the same one among others."""
    counts = (0, 9, 99)
    for mode in ('durable', 'alone'):
        with contextlib.ExitStack() as stack:
            rigs = []
            for others in counts:
                directory = stack.enter_context(bench.temporary_directory())
                rigs.append(stack.enter_context(Rig(server, directory, others, 4, mode)))
            messages = max(100, int(min(rig.warm_up() for rig in rigs) * options.seconds))
            results = [[rig.dispatch(messages) for rig in rigs] for _ in range(options.pairs)]
        for number, others in enumerate(counts):
            ratio = bench.median(row[number]['passes_s'] / row[0]['passes_s'] for row in results)
            target = LIMIT_SLOWER if (mode, others) == ('durable', 99) else None
            cpu = [bench.median(row[number][name] for row in results) for name in ('dispatcher_us', 'server_us')]
            yield ('stages: passes/s, %s' % mode, others + 1, bench.median(row[number]['passes_s'] for row in results),
                   ratio, target, bench.judge(ratio, target, True), cpu[0], cpu[1])


def measure_workers(server, options):
    """Many workers of one stage."""
    for mode, parallelism in (('alone', 10), ('alone', 20 if options.quick else 400), ('durable', 10)):
        with bench.temporary_directory() as directory, Rig(server, directory, 0, parallelism, mode, 4) as rig:
            messages = max(10 * parallelism, int(rig.warm_up() * options.seconds))
            results = [rig.dispatch(messages) for _ in range(options.pairs)]
            rate, ours, server_us = (bench.median(result[name] for result in results)
                                     for name in ('passes_s', 'dispatcher_us', 'server_us'))
            yield 'workers: passes/s, %s' % mode, parallelism, rate, None, None, None, ours, server_us


def measure_memory(server, options):
    """Memory of the dispatcher over many passes."""
    with bench.temporary_directory() as directory, Rig(server, directory, 0, 4, 'alone') as rig:
        rig.warm_up()
        sizes = [rig.dispatcher.rss_kib()]
        for number in range(10):
            rig.dispatch(max(100, options.passes // 10))
            sizes.append(rig.dispatcher.rss_kib())
            bench.print_json(bench='scale', part='memory', passes=(number + 1) * options.passes // 10,
                             rss_kib=sizes[-1])
        yield ('memory: KiB after passes', options.passes, sizes[-1], None, MEMORY_KIB,
               bench.judge(sizes[-1], MEMORY_KIB, False), None, None)
        growth = sizes[-1] - sizes[1]
        yield ('memory: KiB more than after a tenth', options.passes, growth, None, GROWTH_KIB,
               bench.judge(growth, GROWTH_KIB, False), None, None)


def measure_idle(server, options):
    """Statements and CPU of a dispatcher that has nothing to do."""
    interval_s = 0.5
    intervals = 4 if options.quick else 20
    with bench.temporary_directory() as directory:
        dsn = bench.make_database(server, 'idle')
        shared = bench.Shared(directory)
        stages = {'a': {'PROGRAM': shared.command(dsn)}, 'b': {'PROGRAM': shared.command(dsn)}}
        with bench.Dispatcher(directory, dsn, stages, POLL_INTERVAL='%g s' % interval_s) as dispatcher:
            time.sleep(2 * interval_s)
            position = len(dispatcher.log())
            dispatcher.ask_state()
            dispatcher.states(position, 1)
            meter, began = bench.Meter(dispatcher=[dispatcher.pid]), time.monotonic()
            time.sleep(intervals * interval_s)
            used, elapsed = meter.read()['dispatcher'], time.monotonic() - began
            dispatcher.ask_state()
            (_, first), (_, last) = dispatcher.states(position, 2)
    statements = (last - first) / elapsed * interval_s
    yield ('idle: statements a POLL_INTERVAL', None, statements, None, IDLE_STATEMENTS,
           bench.judge(statements, IDLE_STATEMENTS + 0.1, False), None, None)
    # All that it does is the heartbeat: with the default POLL_INTERVAL it does it less often.
    share = used / elapsed * interval_s / 30
    yield ('idle: % of a core, POLL_INTERVAL 30 s', None, share * 100, None, IDLE_CPU * 100,
           bench.judge(share, IDLE_CPU, False), None, None)


def measure_start(server, options):
    """From the start of the program to its first claim."""
    with bench.temporary_directory() as directory:
        dsn = bench.make_database(server, 'start')
        shared = bench.Shared(directory)
        with contextlib.closing(bench.connect(dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO queue (stage, status) SELECT 'a', 'done' FROM generate_series(1, %s)",
                           (options.rows,))
            cursor.execute("INSERT INTO queue (stage) SELECT 'a' FROM generate_series(1, 1000)")
            cursor.execute('VACUUM ANALYZE queue')
        times = []
        for _ in range(options.pairs):
            began = time.monotonic()
            with bench.Dispatcher(directory, dsn, {'a': {'PROGRAM': shared.command(dsn), 'PARALLELISM': 1,
                                                         'QUEUE_LIMIT': 1}}) as dispatcher:
                dispatcher.wait_log('spawned worker')
                times.append(time.monotonic() - began)
        yield ('start: s to the first claim beside rows', options.rows, bench.median(times), None, START_S,
               bench.judge(bench.median(times), START_S, False), None, None)


PARTS = {'stages': measure_stages, 'workers': measure_workers, 'memory': measure_memory, 'idle': measure_idle,
         'start': measure_start}


def main(arguments):
    parser = bench.make_parser(__doc__)
    parser.add_argument('--parts', type=bench.words, default=list(PARTS))
    parser.add_argument('--pairs', type=int, help='default: 5')
    parser.add_argument('--seconds', type=float, help='of a run; default: 1')
    parser.add_argument('--passes', type=int)
    parser.add_argument('--rows', type=int, help='default: 1,000,000')
    options = parser.parse_args(arguments)
    options.pairs = options.pairs or (1 if options.quick else 5)
    options.seconds = options.seconds or (0.2 if options.quick else 1)
    options.passes = options.passes or (2000 if options.quick else 200000)
    options.rows = options.rows or (10000 if options.quick else 1000000)
    header = ['what', 'of', 'value', 'to first', 'target', 'verdict', 'dispatcher_us', 'server_us']
    rows = []
    with bench.start_server() as server:
        bench.print_machine(server)
        for part in options.parts:
            for row in PARTS[part](server, options):
                bench.print_json(bench='scale', **dict(zip(header, row)))
                rows.append(row)
    bench.print_table('Scale (medians of %d)' % options.pairs, header, rows)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
