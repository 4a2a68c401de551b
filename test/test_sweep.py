"""Whatever call of the dispatcher is its last one, or meets an ill system: the run ends as if nothing had happened.

A scenario of six messages is run again and again on the same database. Each time one thing goes wrong at one point;
where that ends the dispatcher, the next one finds what it left, until one lives. All points take minutes: by default
every k-th is tried, from a random one on.

SWEEP       number of points, default 24; all: all of them
SWEEP_SEED  where to begin
"""
import collections
import json
import os
import random
import subprocess
import sys
import time

import checker
import pytest
from chaos import SCHEMA, STAGE
from checker import DEAD, REPEATS, Incident, Plan
from pipeline import get_schema
from support import PYTHON, RUNNING_MARK, find_marked, kill_all, wait_until, write_config
from sweep import ACTIONS

SWEEP = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'sweep.py')

# (stage, steps by stage, what is to become of it)
SCENARIO = [
    ('a', {}, Plan(('a', 'b'))),
    ('a', {'a': "fail='3 no'"}, Plan((), ('failed',), 'status: 3 no', 'a')),
    ('a', {'a': ['pause=0.05', 'advance=b']}, Plan(('a', 'a', 'b'))),
    ('a', {'b': 'crash=4'}, Plan(('a',), ('failed',), 'crash: worker exited with status 4', 'b')),
    ('b', {}, Plan(('b',))),
    ('a', {}, Plan(('a', 'b'))),
]


FIRST = {'os.pipe': 2}  # the first one is for signals: without it nothing can start


class System:
    """The database, and all that is known about it."""

    def __init__(self, directory, dsn, db):
        self.directory = str(directory)
        self.db = db
        self.plans = {}
        self.incidents = []
        self.points = {}  # id -> the point at which it was queued
        self.log = os.path.join(self.directory, 'execution.log')
        stage = STAGE + ['--log=' + self.log, '--locks=' + os.path.join(self.directory, 'locks')]
        self.config = write_config(directory, dsn, {
            name: {'PROGRAM': stage + steps, 'PARALLELISM': 1} for name, steps in [('a', ['advance=b']), ('b', [])]},
            poll_interval='1 h', stats_interval='1 h', stop_timeout='5 s')
        self.sql(get_schema())
        self.sql(SCHEMA)
        open(self.log, 'a').close()

    def sql(self, statement, *parameters):
        with self.db.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def insert(self, point):
        for stage, steps, plan in SCENARIO:
            [(id,)] = self.sql('INSERT INTO queue (stage, state) VALUES (%s, %s) RETURNING ingress_id', stage,
                               json.dumps({'stub': steps}))
            self.plans[id] = plan
            self.points[id] = point

    def unfinished(self):
        return self.sql("SELECT ingress_id, stage, status FROM queue WHERE status IN ('pending', 'running', 'paused')")

    def counts(self):
        """Return (effects, processed) of now."""
        return (self.sql('SELECT count(*) FROM effect')[0][0],
                self.sql('SELECT coalesce(sum(processed), 0) FROM stage_stats')[0][0])

    def live(self, kind, number, when, action):
        """Run a dispatcher with this point until all is done or it is killed; return its log and its trace."""
        point = '%s %d %s %s' % (kind, number, when, action)
        trace, err = (os.path.join(self.directory, name) for name in ('trace', 'err'))
        for path in (trace, err):
            open(path, 'w').close()
        mark = '%d-sweep' % os.getpid()
        before, begin = self.counts(), time.monotonic()
        self.insert(point)
        with open(err, 'ab') as file:
            process = subprocess.Popen(
                PYTHON + [SWEEP, trace, kind, str(number), when, action, '-v', '-c', self.config, 'run'],
                stdin=subprocess.DEVNULL, stderr=file, env=dict(os.environ, **{RUNNING_MARK: mark}))
        try:
            wait_until(lambda: process.poll() is not None or not self.unfinished(), 30, point)
            if process.poll() is None:
                process.terminate()
            code = process.wait(20)
            end = time.monotonic()
            wait_until(lambda: not find_marked(RUNNING_MARK, mark), 5, 'the end of the workers')
            if action == 'kill' and code == -9:
                self.incidents.append(Incident(point, end, end, frozenset([REPEATS])))
            else:
                assert code == 0, 'exit code %s' % code
                assert not self.unfinished(), self.unfinished()
                now = self.counts()
                # What was counted in this life is what took effect in it.
                assert now[1] - before[1] == now[0] - before[0], 'counted %d, effects %d' % (
                    now[1] - before[1], now[0] - before[0])
                if action in ('shut', 'refused'):
                    self.incidents.append(Incident(point, begin, end, frozenset([DEAD])))
        except BaseException:
            with open(err) as file:
                print('--- %s\n%s---' % (point, file.read()))
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            kill_all(find_marked(RUNNING_MARK, mark))
        with open(err) as log, open(trace) as calls:
            return log.read(), calls.read().split()

    def complaints(self):
        """Compare everything with everything."""
        rows = {id: (stage, status, error) for id, stage, status, error in self.sql(
            "SELECT ingress_id, stage, status, state->>'dispatch_error' FROM queue")}
        events = checker.read_log(self.log)
        lives = checker.find_lives(events)
        repeats, _ = checker.check_repeats(self.plans, lives, self.incidents)
        blame, _ = checker.check_blame(self.plans, rows, lives, self.incidents)
        return (checker.check_rows(self.plans, rows) + blame + checker.check_twice(events, lives) + repeats
                + checker.check_effects(self.plans, self.sql('SELECT id, stage FROM effect')))


def find_points(calls):
    """Return all points for a run that made these calls."""
    counts = collections.Counter(calls)
    return [(kind, number, when, action) for kind, when, action in ACTIONS
            for number in range(FIRST.get(kind, 1), counts[kind] + 1)]


@pytest.mark.timeout(3600)
def test_no_call_is_a_bad_one_to_be_the_last_or_to_fail(tmp_path, dsn, db):
    seed = int(os.environ.get('SWEEP_SEED', random.randrange(10 ** 6)))
    wanted = os.environ.get('SWEEP', '24')
    print('SWEEP=%s SWEEP_SEED=%d %s' % (wanted, seed, ' '.join(sys.argv)))
    system = System(tmp_path, dsn, db)
    _, calls = system.live('none', 0, 'before', 'kill')
    points = find_points(calls)
    step = 1 if wanted == 'all' else max(1, len(points) // int(wanted))
    points = points[seed % step::step]
    if wanted != 'all':
        random.Random(seed).shuffle(points)
    hit = 0
    for point in points:
        _, calls = system.live(*point)
        hit += 'hit' in calls
    system.live('none', 0, 'before', 'kill')
    assert not system.unfinished()
    complaints = system.complaints()
    for line in complaints:
        words = line.split()
        id = int(words[1]) if words[1].isdigit() else None
        print('%s   # %s' % (line, system.points.get(id)))
    assert not complaints
    print('%d points, %d of them hit' % (len(points), hit))
    assert hit > len(points) * 0.7, 'only %d of %d points were met' % (hit, len(points))
