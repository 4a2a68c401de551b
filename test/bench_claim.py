"""How long a claim takes, by the number of rows and by what the planner believes of them.

    python test/bench_claim.py [--full] [ROWS ...]

Starts a PostgreSQL of its own (see cluster.py for which), fills tables of 10,000, 100,000 and 1,000,000 rows, with
--full also of 10,000,000, or of as many as are named, and claims from each in six states of the statistics and with
the head of the queue full of dead index entries. Prints one JSON object for each measurement, with the time that
passed, and then a table of the CPU time of the server, which other loads disturb less; its last column is the time at
the most rows divided by that at the fewest. Exits with 1 if a claim read anything but its indexes, or took other than
what was asked for.
"""
import contextlib
import json
import os
import statistics
import sys
import time

import psycopg2

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import cluster
import pepsidispatch

STAGES = ('s0', 's1', 's2')

# What the planner believes -> what is done to the table for it, as (what, status of the rows). `fill` adds as many rows
# as were asked for, `finish` sets all done but one in 1,000 (1,000 at least); that one is left as it was, and is alone
# on its page: a claim of 192 rows then writes to 192 pages instead of 3, which is what it costs more.
STATES = {
    'analysed': [('fill', 'open'), ('analyse', None)],
    'never analysed': [('fill', 'open')],
    'analysed when empty': [('analyse', None), ('fill', 'open')],
    'analysed when all done': [('fill', 'done'), ('analyse', None), ('fill', 'open')],
    'analysed before 99.9 % were done': [('fill', 'open'), ('analyse', None), ('finish', None)],
    'analysed when 99.9 % done': [('fill', 'open'), ('finish', None), ('vacuum', None)],
}
ROUNDS = 15  # of each measurement, after two that warm up
HELD = 400


def build(cursor, schema, steps, rows, status='pending'):
    """Make a queue in a schema of its own, in a state of STATES, where open rows have this status.

    Rows are numbered from 1 in the order of their making and go to STAGES in turn; paused ones are due, the first is
    due longest. Nothing but the steps gathers statistics. Leaves search_path at the new schema.
    """
    cursor.execute('CREATE SCHEMA "%s"' % schema)
    cursor.execute('SET search_path = "%s"' % schema)
    cursor.execute(pepsidispatch.SCHEMA)
    cursor.execute('ALTER TABLE queue SET (autovacuum_enabled = off)')
    filled = 0
    for step, of in steps:
        if step == 'fill':
            cursor.execute("""
                INSERT INTO queue (ingress_id, stage, status, timeout)
                SELECT i, (%(stages)s::text[])[1 + i %% %(count)s], %(status)s,
                       CASE WHEN %(status)s = 'paused' THEN now() + (i - %(last)s - 1) * interval '1 ms' END
                FROM generate_series(%(first)s, %(last)s) AS i
            """, {'stages': list(STAGES), 'count': len(STAGES), 'first': filled + 1, 'last': filled + rows,
                  'status': status if of == 'open' else of})
            filled += rows
        elif step == 'finish':
            cursor.execute("SET pepsi.dispatcher = 'on'")  # these changes wake nobody
            one_in = min(1000, rows // 1000)
            one_in += one_in % len(STAGES) == 0  # those that are left are of all stages
            cursor.execute("UPDATE queue SET status = 'done' WHERE ingress_id %% %s <> 0", (one_in,))
        else:
            cursor.execute('ANALYZE queue' if step == 'analyse' else 'VACUUM ANALYZE queue')


def open_session(dsn, schema):
    """Connect and make the session what the dispatcher's is, in a schema; the caller closes it."""
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute('SET search_path = "%s"' % schema)
        cursor.execute(pepsidispatch.SETTINGS, {'names': list(pepsidispatch.SESSION),
                                                'values': list(pepsidispatch.SESSION.values())})
        cursor.execute(pepsidispatch.RELAX)
        cursor.execute(pepsidispatch.PREPARE)
    return connection


def claim_params(cap, stages=STAGES, floor=pepsidispatch.FIRST_ID, held=()):
    """Return the parameters of CLAIM for a claim of `cap` ids of each stage."""
    array = pepsidispatch.array
    return {'stages': array(list(stages)), 'caps': array([cap] * len(stages)),
            'floors': array([floor] * len(stages)), 'held': array(list(held))}


def explain(cursor, sql, params):
    """Run a statement under EXPLAIN (ANALYZE), undo it, and return its plan as EXPLAIN's JSON has it.

    The SET commands that may stand in front of it are run, too.
    """
    settings, _, statement = sql.rpartition(';')
    cursor.execute('BEGIN')
    if settings:
        cursor.execute(settings)
    cursor.execute('EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ' + statement, params)
    plan = cursor.fetchone()[0][0]['Plan']
    cursor.execute('ROLLBACK')
    return plan


def scans(plan):
    """Return what a plan read of the queue: (kind of scan, index or None, times run, rows that a filter dropped)."""
    found = []
    if plan.get('Relation Name') == 'queue' and 'Scan' in plan['Node Type']:
        dropped = sum(plan.get(name, 0) for name in ('Rows Removed by Filter', 'Rows Removed by Index Recheck'))
        found.append((plan['Node Type'], plan.get('Index Name'), plan['Actual Loops'], dropped * plan['Actual Loops']))
    for part in plan.get('Plans', []):
        found += scans(part)
    return found


def buffers(plan):
    """Return how many pages a plan touched, in memory or not."""
    return plan['Shared Hit Blocks'] + plan['Shared Read Blocks']


def measure(cursor, sql, params):
    """Run a statement again and again, undoing it each time; return its rows, and in ms, sorted, how long it took and
    how much CPU time the server had for it."""
    times, works, rows = [], [], []
    pid = cursor.connection.get_backend_pid()
    for number in range(ROUNDS + 2):
        cursor.execute('BEGIN')
        began, worked = time.perf_counter(), read_cpu_ms(pid)
        cursor.execute(sql, params)
        rows = cursor.fetchall()
        if number >= 2:
            times.append((time.perf_counter() - began) * 1e3)
            works.append(read_cpu_ms(pid) - worked)
        cursor.execute('ROLLBACK')
    return rows, sorted(times), sorted(works)


def read_cpu_ms(pid):
    """Return the CPU time that a process has had, which other loads disturb little; where the system does not tell
    it finely enough, what the clock says."""
    try:
        with open('/proc/%d/schedstat' % pid) as file:
            return int(file.read().split()[0]) / 1e6
    except OSError:
        return time.perf_counter() * 1e3


class Bench:
    """One server, and the results so far as (rows, case) -> median of the server's CPU time in ms."""

    def __init__(self, server):
        self.dsn = server.dsn()
        self.results = {}
        self.sound = True
        self._admin = psycopg2.connect(self.dsn)
        self._admin.autocommit = True
        self._cursor = self._admin.cursor()

    def close(self):
        self._admin.close()

    def run(self, rows):
        """Measure all cases with so many rows."""
        for state, steps in STATES.items():
            with self._table(steps, rows) as session:
                first = rows + 1 if state == 'analysed when all done' else 1
                held = range(first, first + HELD)
                self.claim(session, rows, state, claim_params(64))
                self.claim(session, rows, '%s, %d held' % (state, HELD), claim_params(64, held=held))
                self.claim(session, rows, state + ', not prepared', claim_params(64), pepsidispatch.CLAIM)
                self.claim(session, rows, state + ', skipping locked', claim_params(64), pepsidispatch.CLAIM_SKIPPING)
                self.claim(session, rows, state + ', one row', claim_params(1, STAGES[:1]))
        with self._table(STATES['analysed'], rows) as session:
            with contextlib.closing(psycopg2.connect(self.dsn)) as old, old.cursor() as cursor:
                cursor.execute('SET TRANSACTION ISOLATION LEVEL REPEATABLE READ')
                cursor.execute('SELECT FROM bench.queue LIMIT 1')  # from here on nothing can be cleaned up
                half = rows // 2
                self._cursor.execute("UPDATE queue SET status = 'done' WHERE ingress_id <= %s", (half,))
                self.claim(session, rows, 'half dead at the head, from the floor', claim_params(64, floor=half + 1))
                self.claim(session, rows, 'half dead at the head, from the beginning', claim_params(64))

    def claim(self, session, rows, case, params, sql=pepsidispatch.PREPARED_CLAIM):
        """Measure one case and print it."""
        asked = 64 * len(STAGES) if params['caps'].startswith('{64') else 1
        with session.cursor() as cursor:
            plan = explain(cursor, sql, params)
            taken, times, works = measure(cursor, sql, params)
        kinds = sorted({'%s %s' % scan[:2] if scan[1] else scan[0] for scan in scans(plan)})
        sound = len(taken) == asked and not any('Seq' in kind or 'Bitmap' in kind for kind in kinds)
        self.sound = self.sound and sound
        self.results[rows, case] = statistics.median(works)
        print(json.dumps({'rows': rows, 'case': case, 'claimed': len(taken), 'least_ms': round(times[0], 3),
                          'median_ms': round(statistics.median(times), 3), 'most_ms': round(times[-1], 3),
                          'cpu_ms': round(statistics.median(works), 3), 'pages': buffers(plan), 'scans': kinds,
                          'sound': sound}), flush=True)

    def table(self):
        """Return the results as a table for people."""
        sizes = sorted({rows for rows, _ in self.results})
        cases = list(dict.fromkeys(case for _, case in self.results))
        width = max(map(len, cases))
        lines = ['%-*s %s   growth' % (width, 'CPU time of a claim, ms',
                                       ''.join('%12s' % '{:,}'.format(rows) for rows in sizes))]
        for case in cases:
            times = [self.results[rows, case] for rows in sizes]
            lines.append('%-*s %s %8.2f' % (width, case, ''.join('%12.2f' % t for t in times), times[-1] / times[0]))
        return '\n'.join(lines)

    @contextlib.contextmanager
    def _table(self, steps, rows):
        build(self._cursor, 'bench', steps, rows)
        self._cursor.execute('CHECKPOINT')
        try:
            with contextlib.closing(open_session(self.dsn, 'bench')) as session:
                with session.cursor() as cursor:
                    cursor.execute('SET statement_timeout = 0')  # what is too slow is to be seen
                yield session
        finally:
            self._cursor.execute('DROP SCHEMA bench CASCADE')


def main(arguments):
    sizes = [int(argument) for argument in arguments if argument.isdigit()]
    if len(sizes) + ('--full' in arguments) != len(arguments) or min(sizes or [10000]) < 10000:
        print(__doc__ + '\nROWS has to be 10000 at least.', file=sys.stderr)
        return 64
    sizes = sizes or [10000, 100000, 1000000] + [10000000] * ('--full' in arguments)
    with cluster.Cluster(durable=True, shared_buffers='512MB', max_wal_size='8GB', checkpoint_timeout='1h',
                         autovacuum='off') as server:
        with contextlib.closing(Bench(server)) as bench:
            for rows in sizes:
                bench.run(rows)
            print(bench.table())
            return 0 if bench.sound else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
