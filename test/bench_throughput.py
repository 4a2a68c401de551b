"""How many passes a second, beside what the same workers do without a dispatcher.

    python test/bench_throughput.py [--pairs N] [--seconds S] [--queue-limits 1,4,16,64] [--parallelism 1,4,8]
                                    [--stages 1,3] [--modes durable,relaxed,alone] [--full] [--no-fsync]
                                    [--quick] [--svg FILE]

A pass is one guarded UPDATE that a worker commits. The *limit* of one stage: the same workers, fed from a full pipe,
with rows that are running already, and no dispatcher. The limit of three stages: the same claims, requeues and commits,
the former two in bulk by a loop that knows all ids. Dispatcher and limit take turns on the same table of one server;
what counts is the ratio, pair by pair. Modes: durable; relaxed, where the workers do not wait for the disk
(synchronous_commit off); alone, where workers answer without a database, so that only the dispatcher is at work and
there is no limit. Without --full it is PARALLELISM 4 only for all but one durable stage. --no-fsync: the server does
not wait for the disk either. CPU times are on-CPU times of all processes of a kind between the first 10 and the
last 5 % of a run, in microseconds a pass; statements are the dispatcher's, each is one round trip.
"""
import collections
import os
import subprocess
import sys
import time

import bench
import pepsidispatch

TICK_S = 0.005  # between two looks at the counters: a worker's pipe holds far more than it does in that time
DEPTH = 500  # ids in the pipe of a worker of the limit, at most
BULK = 512  # ids in a statement of the limit of three stages
WINDOW = (0.1, 0.95)  # share of the passes at which measuring begins and ends

# (stages, QUEUE_LIMIT, mode) -> least ratio, PARALLELISM 4
RATIOS = {(1, 1, 'durable'): 0.6, (1, 4, 'durable'): 0.85, (1, 16, 'durable'): 0.95,
          (1, 1, 'relaxed'): 0.45, (1, 4, 'relaxed'): 0.75, (1, 16, 'relaxed'): 0.90, (3, 16, 'durable'): 0.85}
DISPATCHER_US = {1: 60, 4: 30, 16: 15}  # QUEUE_LIMIT -> most CPU a pass, workers that answer at once
STATEMENTS = {16: 0.1}  # QUEUE_LIMIT -> most statements a pass


class Loops:
    """Workers without a dispatcher, and the loop that keeps their pipes full."""

    def __init__(self, commands, number):
        """commands: for each stage the command of its workers; number: of workers a stage."""
        self.stages = [[subprocess.Popen(command + ['worker'], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         bufsize=0) for _ in range(number)] for command in commands]
        self._unanswered = {}
        self._rest = {}
        for process in self.processes():
            os.set_blocking(process.stdout.fileno(), False)
            self._unanswered[process.pid] = 0
            self._rest[process.pid] = b''

    def processes(self):
        """Return all of them."""
        return [process for stage in self.stages for process in stage]

    def feed(self, stage, ids):
        """Fill the pipes of a stage's workers, evenly, from a deque of ids."""
        workers = self.stages[stage]
        for process in workers:
            # Less and less towards the end: no worker is to have much left when the others have nothing.
            level = min(DEPTH, len(ids) // (2 * len(workers)) + 1)
            room = min(level - self._unanswered[process.pid], len(ids))
            if room > 0:
                os.write(process.stdin.fileno(), b''.join(b'%d\n' % ids.popleft() for _ in range(room)))
                self._unanswered[process.pid] += room

    def answers(self, stage):
        """Return the ids that were answered since the last time."""
        found = []
        for process in self.stages[stage]:
            try:
                data = os.read(process.stdout.fileno(), 1 << 20)
            except BlockingIOError:
                continue
            lines = (self._rest[process.pid] + data).split(b'\n')
            self._rest[process.pid] = lines.pop()
            self._unanswered[process.pid] -= len(lines)
            found += [int(line[5:]) for line in lines]
        return found

    def close(self):
        """End them."""
        for process in self.processes():
            process.stdin.close()
        for process in self.processes():
            process.wait(20)
            process.stdout.close()


class Rig:
    """One configuration: a database, a dispatcher with its workers, and the workers of the limit; a context manager."""

    def __init__(self, server, directory, stages, parallelism, queue_limit, mode, limit=True, name='throughput'):
        """limit: whether the limit is to be measured, too. name: of the database."""
        self._server = server
        self._names = ['s%d' % i for i in range(stages)]
        self._alone = mode == 'alone'
        self._parallelism = parallelism
        dsn = bench.make_database(server, name)
        self._connection = bench.connect(dsn)
        self._cursor = self._connection.cursor()
        self._shared = bench.Shared(directory)
        sync = 'on' if mode == 'durable' else 'off'
        if self._alone:
            self._cursor.execute(bench.FINISH_AT_CLAIM)
            dsn_of_workers = None
        else:
            dsn_of_workers = dsn
        commands = [self._shared.command(dsn_of_workers, sync, following)
                    for following in self._names[1:] + [None]]
        self.loops = Loops(commands, parallelism) if limit and not self._alone else None
        self.dispatcher = bench.Dispatcher(directory, dsn, self.stages(
            commands, PARALLELISM=parallelism, QUEUE_LIMIT=queue_limit, MAX_MESSAGES=0))
        self._cursor.execute('SET synchronous_commit = off')  # ours is no part of the measurement
        self._cursor.execute('CHECKPOINT')

    def stages(self, commands, **options):
        """Return the stages for the configuration."""
        return {name: dict(options, PROGRAM=command) for name, command in zip(self._names, commands)}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.dispatcher.__exit__(*error)
        if self.loops:
            self.loops.close()
        self._connection.close()

    def warm_up(self):
        """Have all workers started on both sides; return the passes a second of the dispatcher, roughly."""
        wanted = self._parallelism * len(self._names)
        for _ in range(10):
            rate = self.dispatch(400 * self._parallelism)['passes_s']
            if len(self.dispatcher.workers()) >= wanted:
                break
        if self.loops:
            self.limit(100 * self._parallelism)
        return rate

    def dispatch(self, messages):
        """Let the dispatcher do so many messages; return the measurement."""
        position = len(self.dispatcher.log())
        groups = {'dispatcher': [self.dispatcher.pid], 'workers': [w.pid for w in self.dispatcher.workers()]}
        self._load(messages, 'pending')
        result = self._follow(messages, groups, lambda: None, self.dispatcher.ask_state)
        (turns, statements), (turns_end, statements_end) = self.dispatcher.states(position, 2)
        result.update(statements_a_pass=(statements_end - statements) / result['passes'],
                      turns_a_pass=(turns_end - turns) / result['passes'],
                      rows_a_claim=self.dispatcher.rows_a_claim(position))
        return result

    def limit(self, messages):
        """Let the workers do so many messages without a dispatcher; return the measurement."""
        groups = {'workers': [process.pid for process in self.loops.processes()]}
        single = len(self._names) == 1
        ids = self._load(messages, 'running' if single else 'done')
        if single:
            queue = collections.deque(ids)
            return self._follow(messages, groups, lambda: (self.loops.feed(0, queue), self.loops.answers(0)))
        # Rows that no dispatcher sees until a claim of ours sets them running; a claim costs the same from any status.
        return self._follow(messages, groups, Bulk(self.loops, self._cursor, ids).step)

    def _load(self, messages, status):
        """Fill the empty table and return the ids."""
        self._cursor.execute('TRUNCATE queue')
        self._cursor.execute('INSERT INTO queue (stage, status) SELECT %s, %s FROM generate_series(1, %s)'
                             ' RETURNING ingress_id', (self._names[0], status, messages))
        return [id for id, in self._cursor.fetchall()]

    def _follow(self, messages, groups, step, mark=lambda: None):
        """Call step until all passes are done; return what happened between the two marks, at which mark is called."""
        begun, total = self._begun, messages * len(self._names)
        marks, deadline = [], time.monotonic() + 300
        meter = bench.Meter(server=bench.server_pids(self._server), bench=[os.getpid()], **groups)
        while True:
            step()
            done = self._shared.passes() - begun
            if len(marks) < 2 and done >= total * WINDOW[len(marks)]:
                marks.append((time.monotonic(), done, meter.read()))
                mark()
            elif done >= total:
                break
            if time.monotonic() > deadline:
                raise AssertionError('%d of %d passes after 300 s' % (done, total))
            time.sleep(TICK_S)
        self._begun += total
        (began, first, cpu), (ended, last, cpu_end) = marks
        passes = max(last - first, 1)
        result = {'passes': passes, 'seconds': ended - began, 'passes_s': passes / (ended - began)}
        result.update(('%s_us' % name, (cpu_end[name] - cpu[name]) / passes * 1e6) for name in cpu)
        return result

    _begun = 0  # passes of earlier runs


class Bulk:
    """The limit of several stages: the statements that a dispatcher has to send, in bulk and with all ids known."""

    def __init__(self, loops, cursor, ids):
        self._loops = loops
        self._cursor = cursor
        self._fresh = collections.deque(ids)
        self._waiting = [collections.deque() for _ in loops.stages]
        self._advanced = [[] for _ in loops.stages]

    def step(self):
        """Take answers, requeue and claim what is enough for a statement, feed."""
        last = len(self._loops.stages) - 1
        for stage, waiting in enumerate(self._waiting):
            self._advanced[stage] += self._loops.answers(stage)
            if stage == last:
                self._advanced[stage] = []
            hungry = stage < last and not self._waiting[stage + 1]
            if len(self._advanced[stage]) >= BULK or (self._advanced[stage] and hungry):
                ids, self._advanced[stage] = self._advanced[stage], []
                self._update(ids, 'running', 'pending', 'running')
                self._waiting[stage + 1].extend(ids)
            if stage == 0 and self._fresh and len(waiting) < BULK:
                ids = [self._fresh.popleft() for _ in range(min(BULK, len(self._fresh)))]
                self._update(ids, 'done', 'running')
                waiting.extend(ids)
            self._loops.feed(stage, waiting)

    def _update(self, ids, *statuses):
        # In one transaction: the idle dispatcher must not see them pending.
        array = pepsidispatch.array(ids)
        self._cursor.execute(';'.join(
            self._cursor.mogrify('UPDATE queue SET status = %s WHERE ingress_id = ANY (%s::bigint[]) AND status = %s',
                                 (after, array, before)).decode() for before, after in zip(statuses, statuses[1:])))


def measure(server, options, stages, parallelism, queue_limit, mode):
    """Measure one configuration, print its pairs, and return its summary."""
    labels = {'bench': 'throughput', 'mode': mode, 'stages': stages, 'parallelism': parallelism,
              'queue_limit': queue_limit}
    pairs = []
    with bench.temporary_directory() as directory, Rig(server, directory, stages, parallelism, queue_limit,
                                                       mode) as rig:
        messages = max(100, int(rig.warm_up() * options.seconds / stages))
        for number in range(options.pairs):
            ours = rig.dispatch(messages)
            limit = rig.limit(messages) if rig.loops else None
            ratio = ours['passes_s'] / limit['passes_s'] if limit else None
            pairs.append((ours, limit, ratio))
            bench.print_json(pair=number + 1, ratio=ratio, dispatcher=ours, limit=limit, **labels)

    def middle(side, name):
        return bench.median(pair[side].get(name) for pair in pairs if pair[side])

    ratios = [pair[2] for pair in pairs if pair[2]]
    summary = dict(labels, pairs=len(pairs), messages=messages, ratio=bench.median(ratios),
                   least=min(ratios, default=None), most=max(ratios, default=None),
                   passes_s=middle(0, 'passes_s'), limit_passes_s=middle(1, 'passes_s'),
                   dispatcher_us=middle(0, 'dispatcher_us'), server_us=middle(0, 'server_us'),
                   workers_us=middle(0, 'workers_us'), limit_server_us=middle(1, 'server_us'),
                   limit_workers_us=middle(1, 'workers_us'), statements_a_pass=middle(0, 'statements_a_pass'),
                   turns_a_pass=middle(0, 'turns_a_pass'), rows_a_claim=middle(0, 'rows_a_claim'))
    if parallelism == 4 and ratios:
        summary['target'] = RATIOS.get((stages, queue_limit, mode))
        summary['verdict'] = bench.judge(summary['ratio'], summary['target'], True)
    if parallelism == 4 and mode == 'alone':
        summary['target'] = DISPATCHER_US.get(queue_limit)
        summary['verdict'] = bench.judge(summary['dispatcher_us'], summary['target'], False)
    bench.print_json(summary=True, **summary)
    return summary


def configurations(options):
    """Yield (stages, PARALLELISM, QUEUE_LIMIT, mode) of all that is to be measured."""
    for mode in options.modes:
        for stages in options.stages:
            if mode == 'alone' and stages > 1:
                continue
            for parallelism in options.parallelism:
                reduced = (mode, stages) != ('durable', 1) and 4 in options.parallelism and not options.full
                if reduced and parallelism != 4:
                    continue
                for queue_limit in options.queue_limits:
                    yield stages, parallelism, queue_limit, mode


def draw(pyplot, summaries):
    """Draw the ratios by QUEUE_LIMIT, a line for each mode, number of stages and PARALLELISM."""
    lines = collections.OrderedDict()
    for s in summaries:
        if s['ratio']:
            lines.setdefault((s['mode'], s['stages'], s['parallelism']), []).append(s)
    for (mode, stages, parallelism), points in lines.items():
        pyplot.errorbar([p['queue_limit'] for p in points], [p['ratio'] for p in points],
                        [[p['ratio'] - p['least'] for p in points], [p['most'] - p['ratio'] for p in points]],
                        marker='o', capsize=3, label='%s, %d stage%s, PARALLELISM %d' % (
                            mode, stages, 's' * (stages > 1), parallelism))
    pyplot.xscale('log', base=2)
    pyplot.ylim(bottom=0)
    pyplot.xlabel('QUEUE_LIMIT')
    pyplot.ylabel('passes per second / limit')
    pyplot.axhline(1, color='grey', linewidth=0.5)
    pyplot.legend(fontsize='small')


def main(arguments):
    parser = bench.make_parser(__doc__)
    parser.add_argument('--pairs', type=int, help='default: 5')
    parser.add_argument('--seconds', type=float, help='of a run, roughly; default: 2')
    parser.add_argument('--queue-limits', type=bench.numbers)
    parser.add_argument('--parallelism', type=bench.numbers)
    parser.add_argument('--stages', type=bench.numbers)
    parser.add_argument('--modes', type=bench.words, default=['durable', 'relaxed', 'alone'])
    parser.add_argument('--full', action='store_true')
    parser.add_argument('--no-fsync', action='store_true')
    options = parser.parse_args(arguments)
    options.pairs = options.pairs or (1 if options.quick else 5)
    options.seconds = options.seconds or (0.2 if options.quick else 2)
    options.queue_limits = options.queue_limits or ([4] if options.quick else [1, 4, 16, 64])
    options.parallelism = options.parallelism or ([4] if options.quick else [1, 4, 8])
    options.stages = options.stages or [1, 3]
    summaries = []
    with bench.start_server(**(bench.cluster.NOT_DURABLE if options.no_fsync else {})) as server:
        bench.print_machine(server)
        for configuration in configurations(options):
            summaries.append(measure(server, options, *configuration))
    bench.print_table(
        'Passes a second; CPU in microseconds a pass (medians of %d pairs)' % options.pairs,
        ['mode', 'stages', 'workers', 'QUEUE_LIMIT', 'passes/s', 'limit', 'ratio', 'least', 'most', 'target', '',
         'dispatcher', 'server', 'limit', 'workers', 'limit', 'statements', 'rows/claim', 'turns'],
        [[s['mode'], s['stages'], s['parallelism'], s['queue_limit'], s['passes_s'], s['limit_passes_s'], s['ratio'],
          s['least'], s['most'], s.get('target'), s.get('verdict'), s['dispatcher_us'], s['server_us'],
          s['limit_server_us'], s['workers_us'], s['limit_workers_us'], s['statements_a_pass'], s['rows_a_claim'],
          s['turns_a_pass']] for s in summaries])
    with bench.drawing(options.svg) as pyplot:
        if pyplot:
            draw(pyplot, summaries)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
