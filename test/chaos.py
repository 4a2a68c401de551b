#!/usr/bin/env python3
"""Chaos: messages flow through three stages while things are broken, again and again; then all is checked.

    python test/chaos.py [--messages N] [--faults N] [--seed N] [--only KIND,KIND...] [--list] [--keep]

A real PostgreSQL, a dispatcher that reaches it through a proxy, real workers. A fault is due when its share of the
messages has ended. Each one has to prove that it had an effect; after each one a fresh message has to get through at
once. In the end checker.py compares the tables, the effects of the passes, and the execution log.

Exit code: 0 nothing is wrong, 1 something is, 2 a fault had no effect: the run proves nothing.
"""
import argparse
import collections
import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback

import psutil
import psycopg2

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import checker
import cluster
from checker import CRASH, DEAD, REPEATS, UNCOUNTED, Incident, Plan
from pipeline import get_schema
from proxy import Proxy
from support import Running, call, find_marked, wait_until, write_config

HERE = os.path.dirname(os.path.abspath(__file__))
STAGE = [sys.executable, os.path.join(HERE, 'chaos_stage.py')]

LEAD = 60  # messages under way beside those that are awaited
PROBE_S = 10.0  # a fresh message gets through within this after a fault; a busy machine takes its part
STUCK_S = 35.0  # after the last fault, at most: 30 s and a little for a busy machine
STATS_S, STOP_S, RUNTIME_S = 0.5, 1.0, 2.0  # STATS_INTERVAL, STOP_TIMEOUT, MAX_RUNTIME of stage odd
BACK = r'database (is back|works again)'

# What the neighbours of the dispatcher bring along. Workers see the queue through a view: it stays what it is while an
# operator renames the table.
SCHEMA = """
CREATE TABLE effect (n bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, id bigint, stage text, pid int);
CREATE INDEX ON effect (id, stage);
CREATE SCHEMA stages;
CREATE VIEW stages.queue AS SELECT ingress_id, stage, status, timeout, state FROM public.queue;
"""
RIGHTS = """
GRANT USAGE ON SCHEMA public TO dispatch;
GRANT SELECT (ingress_id, stage, status, timeout, state), UPDATE (status, state) ON queue TO dispatch;
GRANT SELECT, INSERT, UPDATE ON stage_stats, dispatch_stats TO dispatch;
GRANT USAGE ON SCHEMA public, stages TO stage;
GRANT SELECT, UPDATE, DELETE ON stages.queue TO stage;
GRANT SELECT, INSERT ON effect TO stage;
"""


class NoEffect(Exception):
    """A fault found nothing to break: the run is not valid."""


class Dispatcher(Running):
    """A dispatcher whose log is read from where one likes."""

    def log_from(self, position=0):
        """Return the log from this position on."""
        with open(self._err, 'rb') as file:
            file.seek(position)
            return file.read().decode('utf-8', 'replace')

    def position(self):
        """Return the position of what will be logged next."""
        return os.path.getsize(self._err)

    def expect(self, pattern, position=0, timeout_s=20.0):
        """Wait for a line in the log, from this position on."""
        def found():
            ended = self.process.poll() is not None
            match = re.search(pattern, self.log_from(position))
            assert match or not ended, 'exited with %s without logging %r' % (self.process.returncode, pattern)
            return match

        return wait_until(found, timeout_s, 'log line %r' % pattern)


class World:
    """The system under test, and all that is known about it."""

    def __init__(self, directory, server, seed):
        self.directory = directory
        self.server = server
        self.rng = random.Random(seed)
        self.dbname = 'chaos'
        self.plans = {}
        self.incidents = []
        self.events = []  # of the execution log, as far as it was read
        self.begun = {}  # id -> the last event of its beginning
        self.latencies = []
        self.reports = []  # (kind, seconds, evidence)
        self.log_path = self.path('execution.log')
        self._log_at = 0
        self._admin = None
        self._sockets = os.path.join(server.base, '.s.PGSQL.5432')
        open(self.log_path, 'a').close()
        for role in ('dispatch', 'stage'):
            self.sql('CREATE ROLE %s LOGIN' % role, dbname='postgres')
        self.sql('CREATE DATABASE chaos', dbname='postgres')
        self.sql(get_schema())
        self.sql(SCHEMA)
        self.sql(RIGHTS)
        self.sql('ALTER ROLE stage SET search_path = stages, public')
        self.link = Proxy(self._sockets)
        self.worker_link = Proxy(self._sockets)
        self.config = self.write_config()
        self.write_program()
        self.dispatcher = None
        self.others = []  # dispatchers of the past
        self.files = None  # descriptors of the dispatcher without those of its workers

    def path(self, name):
        return os.path.join(self.directory, name)

    def close(self):
        if self.dispatcher:
            self.dispatcher.close()
        for other in self.others:
            other.close()
        self.link.close()
        self.worker_link.close()
        if self._admin:
            self._admin.close()

    # configuration

    def stage(self, *steps):
        return STAGE + ['--log=' + self.log_path, '--locks=' + self.path('locks')] + list(steps)

    def write_config(self, **changes):
        """Write pepsi.conf; changes: stage -> options to replace, None removes the stage."""
        workers = os.path.join(self.directory, 'workers')
        os.makedirs(workers, exist_ok=True)
        workers = write_config(workers, 'host=%s user=stage dbname=chaos' % self.server.base, {})
        through = '--database=host=127.0.0.1 port=%d user=stage dbname=chaos' % self.worker_link.port
        stages = collections.OrderedDict([
            ('a', {'PROGRAM': self.stage('advance=b'), 'PARALLELISM': 2}),
            ('b', {'PROGRAM': self.stage('advance=c'), 'PARALLELISM': 2}),
            ('c', {'PROGRAM': self.stage(through), 'PARALLELISM': 2, 'QUEUE_LIMIT': 8, 'MAX_MESSAGES': 200}),
            ('odd', {'PROGRAM': [self.path('odd')], 'PARALLELISM': 1, 'MAX_RUNTIME': '%g s' % RUNTIME_S}),
            ('probe', {'PROGRAM': self.stage(), 'PARALLELISM': 1, 'QUEUE_LIMIT': 1, 'WORKER_IDLE_TIMEOUT': '4 s'})])
        for name, options in changes.items():
            if options is None:
                del stages[name]
            else:
                stages[name].update(options)
        database = 'host=127.0.0.1 port=%d user=dispatch dbname=chaos' % self.link.port
        return write_config(self.directory, database, stages,
                            max_runtime='30 s', worker_idle_timeout='2 s', poll_interval='1 s', config_file=workers,
                            stats_interval='%g s' % STATS_S, stop_timeout='%g s' % STOP_S)

    def write_program(self, shebang='#!/bin/sh'):
        """Write the program of stage odd."""
        words = self.stage('--start=if=%s crash=7' % self.path('no-start'), '--end=if=%s hang' % self.path('no-end'))
        with open(self.path('odd.new'), 'w') as file:
            file.write('%s\nexec %s "$@"\n' % (shebang, ' '.join("'%s'" % word for word in words)))
        os.chmod(self.path('odd.new'), 0o755)
        os.rename(self.path('odd.new'), self.path('odd'))

    @contextlib.contextmanager
    def flag(self, name):
        """While in the block there is a file that steps look for."""
        open(self.path(name), 'w').close()
        try:
            yield self.path(name)
        finally:
            os.remove(self.path(name))

    # the database, as its administrator

    def connect(self, dbname=None):
        connection = psycopg2.connect(self.server.dsn(dbname or self.dbname))
        connection.autocommit = True
        return connection

    def sql(self, statement, *parameters, dbname=None):
        """Run one statement in a session of the administrator, which is made anew where it was lost."""
        if dbname:
            with contextlib.closing(self.connect(dbname)) as connection:
                return fetch(connection, statement, parameters)
        for last in (False, True):
            try:
                if self._admin is None or self._admin.closed:
                    self._admin = self.connect()
                return fetch(self._admin, statement, parameters)
            except psycopg2.Error as e:
                if last or (e.pgcode and e.pgcode[:2] != '57'):  # a lost connection often has no code, nor is it closed
                    raise
                if self._admin is not None:
                    self._admin.close()
                self._admin = None

    @contextlib.contextmanager
    def transaction(self, statement, *parameters):
        """Hold open a transaction in which a statement was executed; yields its rows."""
        with contextlib.closing(self.connect()) as connection:
            connection.autocommit = False
            yield fetch(connection, statement, parameters)
            connection.rollback()

    def sessions(self, role='dispatch', what='pid'):
        return [value for value, in self.sql('SELECT %s FROM pg_stat_activity WHERE usename = %%s' % what, role)]

    def terminate(self, role='dispatch'):
        """End all sessions of a role; return how many there were."""
        return len(self.sql('SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s', role))

    def row(self, id):
        """Return (stage, status, error) of a message; three times None if it is gone."""
        rows = self.sql("SELECT stage, status, state->>'dispatch_error' FROM queue WHERE ingress_id = %s", id)
        return rows[0] if rows else (None, None, None)

    def await_status(self, id, *wanted, timeout_s=20.0):
        return wait_until(lambda: self.row(id)[1] in wanted, timeout_s, 'message %d %s' % (id, wanted))

    def unfinished(self):
        return self.sql("SELECT count(*) FROM queue WHERE status IN ('pending', 'running', 'paused')")[0][0]

    # messages

    def insert(self, items):
        """Queue messages, [(stage, steps, Plan)]; return their ids."""
        ids = [id for id, in self.sql(
            'INSERT INTO queue (stage, state) SELECT t.stage, t.state::jsonb FROM unnest(%s::text[], %s::text[])'
            ' WITH ORDINALITY AS t(stage, state, n) ORDER BY n RETURNING ingress_id',
            [stage for stage, _, _ in items], [json.dumps({'stub': steps}) for _, steps, _ in items])]
        self.plans.update(zip(ids, (plan for _, _, plan in items)))
        return ids

    def insert_one(self, steps, plan, stage='odd'):
        return self.insert([(stage, {stage: steps}, plan)])[0]

    def insert_ordinary(self, number):
        return self.insert([ordinary(self.rng) for _ in range(number)])

    def neighbours(self, number=3, stage='odd'):
        """Queue well-behaved messages behind whatever is there."""
        return self.insert([(stage, {}, Plan((stage,) if stage in ('odd', 'probe', 'c') else None))] * number)

    def read_events(self):
        """Read what is new in the execution log; return all events."""
        with open(self.log_path, 'rb') as file:
            file.seek(self._log_at)
            data = file.read()
        end = data.rfind(b'\n') + 1
        self._log_at += end
        for line in data[:end].splitlines():
            event = checker.Event(*json.loads(line.decode()))
            self.events.append(event)
            if event.what == 'begin':
                self.begun[event.id] = event
        return self.events

    def await_begin(self, id, after=None, timeout_s=20.0):
        """Wait until a message is being executed, once more after the given event; return the event."""
        def found():
            self.read_events()
            event = self.begun.get(id)
            return event if event and event != after else None

        return wait_until(found, timeout_s, 'the begin of message %d' % id)

    def probe(self):
        """A fresh message has to get through at once."""
        begin = time.monotonic()
        id = self.insert_one('', Plan(('probe',)), 'probe')
        self.await_status(id, 'done', timeout_s=PROBE_S)
        self.latencies.append(time.monotonic() - begin)

    # the dispatcher

    def start(self):
        """Start a dispatcher and wait until it works."""
        self.adopt(Dispatcher(self.config))
        self.dispatcher.expect('took over')

    def adopt(self, dispatcher):
        if self.dispatcher:
            self.others.append(self.dispatcher)
            self.check_log(self.dispatcher)
        self.dispatcher, self.files = dispatcher, None

    def check_log(self, dispatcher):
        for bad in ('Traceback', 'internal error', 'ResourceWarning'):
            # Workers write to the same file: theirs are indented or name their own errors.
            assert not re.search(r'(WARNING|ERROR)\s+%s' % bad, dispatcher.log_from()), 'the log has: ' + bad
        dispatcher_errors = re.findall(r'.*internal error.*', dispatcher.log_from())
        assert not dispatcher_errors, dispatcher_errors

    def expect(self, pattern, mark, timeout_s=20.0):
        return self.dispatcher.expect(pattern, mark, timeout_s).group(0)

    def note(self, kind, begin, *explains, ids=None, pids=(), end=None):
        """Remember what was done from `begin` until now."""
        self.incidents.append(Incident(kind, begin, end or time.monotonic(), frozenset(explains), ids, pids))

    @contextlib.contextmanager
    def away(self, kind, *explains):
        """The dispatcher has no session while in the block, and a little longer."""
        begin = time.monotonic() - 1
        yield
        self.note(kind, begin, DEAD, *explains, end=time.monotonic() + 1)

    def kill_dispatcher(self, since=None):
        """Kill it; since: when its last statistics may have been written, if that is long ago."""
        begin = time.monotonic()
        code = self.dispatcher.kill()
        self.note('dispatcher killed', (since or begin) - STATS_S - 2, REPEATS, UNCOUNTED, end=time.monotonic() + 1)
        wait_until(lambda: not self.dispatcher.family(), 5, 'the end of the workers of a killed dispatcher')
        return code

    def end_dispatcher(self, number=signal.SIGTERM, timeout_s=20.0):
        """Stop it in an orderly way: no row may be left running."""
        begin = time.monotonic()
        self.dispatcher.signal(number)
        code = self.dispatcher.wait(timeout_s)
        self.note('dispatcher stopped', begin, DEAD)
        assert code == 0, 'exit code %d' % code
        left = self.sql("SELECT ingress_id FROM queue WHERE status = 'running'")
        assert not left, 'running after the stop: %s' % left
        assert not self.dispatcher.family(), 'workers live on after the stop'
        return time.monotonic() - begin

    def mend(self):
        """Have what a fault that failed may have left broken."""
        self.link.thaw()
        self.worker_link.thaw()
        self.server.start()
        self.write_config()
        self.write_program()
        if self.dispatcher.process.poll() is not None:
            self.start()
        self.dispatcher.signal(signal.SIGCONT)
        self.dispatcher.signal(signal.SIGHUP)
        self.files = None

    def count_files(self):
        """Return how many descriptors the dispatcher has beside those of its workers; the least of a few looks."""
        counts = []
        for _ in range(5):
            try:
                counts.append(len(os.listdir('/proc/%d/fd' % self.dispatcher.pid)) - 2 * len(self.dispatcher.workers()))
            except OSError:
                return 0
            time.sleep(0.02)
        return min(counts)

    def check_files(self):
        """Descriptors do not grow."""
        if self.files is None:
            self.files = self.count_files()
        try:
            wait_until(lambda: self.count_files() <= self.files + 3, 5)
        except AssertionError:
            raise AssertionError('descriptors grew from %d to %d' % (self.files, self.count_files())) from None

    def worker_pids(self, stage):
        return find_marked('PEPSI_STAGE', stage)


def fetch(connection, statement, parameters=()):
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)
        return cursor.fetchall() if cursor.description else []


def ordinary(rng):
    """Return (stage, steps, Plan) of a message as they come."""
    full, dice = ('a', 'b', 'c'), rng.random()
    nap = 'sleep=%.3f ' % rng.choice([0, 0, 0.001, 0.003, 0.01])
    if dice < 0.70:
        return 'a', {'a': nap + 'advance=b'}, Plan(full)
    if dice < 0.76:
        return 'a', {'a': 'advance=c'}, Plan(('a', 'c'))
    if dice < 0.82:
        return 'a', {'b': 'later=c:%.2f' % rng.uniform(0, 0.5)}, Plan(full)
    if dice < 0.86:
        return 'a', {'b': ['pause=%.2f' % rng.uniform(0, 0.4), 'advance=c']}, Plan(('a', 'b', 'b', 'c'))
    if dice < 0.90:
        at = rng.randrange(3)
        number = rng.randint(1, 255)
        return ('a', {full[at]: "fail='%d no luck'" % number},
                Plan(full[:at], ('failed',), 'status: %d no luck' % number, full[at]))
    if dice < 0.93:
        return 'a', {'b': 'sleep=%.2f advance=c' % rng.uniform(0.05, 0.25)}, Plan(full)
    if dice < 0.96:
        return 'a', {'a': 'fused=b:0.001 advance=c'}, Plan(('a', 'c'), fused=('b',))
    if dice < 0.98:
        return 'b', {}, Plan(('b', 'c'))
    if dice < 0.99:
        return 'a', {'c': 'delete'}, Plan(full, (None,))
    at = rng.randrange(3)
    return 'a', {full[at]: rng.choice(['crash=3', 'crash=SEGV'])}, Plan(full[:at], ('failed',), 'crash: ', full[at])


# -- faults ------------------------------------------------------------------------------------------------------------
# Each breaks something, waits for what has to follow, mends it, and returns what proves that it had an effect.

KINDS = collections.OrderedDict()  # type: collections.OrderedDict


def fault(function):
    KINDS[function.__name__] = function
    return function


def slow(function):
    function.slow = True
    return function


# the dispatcher

@fault
def dispatcher_is_killed(w):
    code = w.kill_dispatcher()
    w.start()
    return 'exit %d' % code


@fault
def dispatcher_is_killed_and_comes_back_late(w):
    code = w.kill_dispatcher()
    time.sleep(w.rng.uniform(0.2, 1))
    w.start()
    return 'exit %d' % code


@fault
def dispatcher_is_killed_at_its_start(w):
    w.end_dispatcher()
    for _ in range(2):
        w.adopt(Dispatcher(w.config))
        time.sleep(w.rng.uniform(0.1, 0.6))
        w.kill_dispatcher()
    w.start()
    return 'killed twice'


@fault
def dispatcher_is_stopped(w):
    seconds = w.end_dispatcher()
    w.start()
    return 'in %.2f s' % seconds


@fault
def dispatcher_is_interrupted(w):
    seconds = w.end_dispatcher(signal.SIGINT)
    w.start()
    return 'in %.2f s' % seconds


@fault
def dispatcher_is_stopped_with_a_stubborn_worker(w):
    with w.flag('hang') as flag:
        id = w.insert_one('sigterm=ignore if=%s hang' % flag, Plan(('odd',)))
        w.await_begin(id)
        seconds = w.end_dispatcher()
    w.start()
    w.await_status(id, 'done')
    return 'in %.2f s' % seconds


@fault
def dispatcher_gets_a_second_term(w):
    mark = w.dispatcher.position()
    with w.flag('hang') as flag:
        id = w.insert_one('sigterm=ignore if=%s hang' % flag, Plan(('odd',)))
        w.await_begin(id)
        w.dispatcher.signal(signal.SIGTERM)
        w.expect('stopping on SIGTERM', mark)
        w.end_dispatcher()
    at_once = 'stopping at once' in w.dispatcher.log_from(mark)
    w.start()
    w.await_status(id, 'done')
    if not at_once:
        raise NoEffect('it had stopped before the second signal')
    return 'stopped at once'


@fault
def dispatcher_stands_still(w):
    ids = w.insert([('odd', {'odd': 'sleep=0.4'}, Plan(('odd',)))] * 2)
    w.await_begin(ids[0])
    w.dispatcher.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(w.dispatcher.pid).status() == psutil.STATUS_STOPPED, 5)
        time.sleep(RUNTIME_S + 0.5)  # the answer is there, and its deadline is over
    finally:
        w.dispatcher.signal(signal.SIGCONT)
    w.await_status(ids[0], 'done')
    return 'for %g s' % (RUNTIME_S + 0.5)


@fault
def configuration_changes(w):
    mark = w.dispatcher.position()
    w.write_config(a={'PARALLELISM': w.rng.randint(1, 3), 'QUEUE_LIMIT': w.rng.randint(5, 9)}, b={'MAX_MESSAGES': 11})
    w.dispatcher.signal(signal.SIGHUP)
    evidence = w.expect('reloaded stage=a.*', mark)
    w.probe()
    w.write_config()
    mark = w.dispatcher.position()
    w.dispatcher.signal(signal.SIGHUP)
    w.expect('reloaded stage=a', mark)
    return evidence


@fault
def configuration_is_bad(w):
    mark = w.dispatcher.position()
    w.write_config(a={'PARALLELISM': 'many'})
    w.dispatcher.signal(signal.SIGHUP)
    evidence = w.expect('reload refused', mark)
    w.write_config()
    return evidence


@fault
def stage_is_removed_for_a_while(w):
    mark = w.dispatcher.position()
    w.write_config(odd=None)
    w.dispatcher.signal(signal.SIGHUP)
    evidence = w.expect('reloaded stage=odd: removed', mark)
    id = w.insert_one('', Plan(('odd',)))
    w.probe()
    assert w.row(id)[1] == 'pending'
    w.write_config()
    w.dispatcher.signal(signal.SIGHUP)
    w.await_status(id, 'done')
    return evidence


@fault
def second_dispatcher_is_started_by_mistake(w):
    with contextlib.closing(Dispatcher(w.config, '--no-wait')) as second:
        code = second.wait()
        assert code == 75, code
        return 'exit 75'


@fault
def second_dispatcher_waits_and_takes_over(w):
    second = Dispatcher(w.config)
    try:
        second.expect('waiting for the lock')
        w.probe()
        assert 'took over' not in second.log_from()
    except BaseException:
        second.close()
        raise
    w.kill_dispatcher()
    w.adopt(second)
    return w.expect('took over epoch=.*', 0)


@fault
def descriptors_run_out(w):
    mark = w.dispatcher.position()
    limits = resource.prlimit(w.dispatcher.pid, resource.RLIMIT_NOFILE)
    for pid in w.worker_pids('odd'):
        w.kill_worker(pid)
    resource.prlimit(w.dispatcher.pid, resource.RLIMIT_NOFILE, (6, limits[1]))
    try:
        id = w.insert_one('', Plan(('odd',)))
        evidence = w.expect('cooling stage=odd for .*: cannot start .*', mark)
    finally:
        resource.prlimit(w.dispatcher.pid, resource.RLIMIT_NOFILE, limits)
    w.await_status(id, 'done')
    return evidence


@fault
def signals_rain(w):
    mark = w.dispatcher.position()
    for number in range(10000):
        w.dispatcher.signal((signal.SIGCHLD, signal.SIGUSR1)[number % 100 == 0])
    return w.expect('state phase=serving', mark)


# workers

def kill_worker(w, pid):
    begin = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    w.note('worker killed', begin, CRASH, pids=(pid,))
    return True


World.kill_worker = kill_worker  # type: ignore[attr-defined]


def fails(w, steps, error, status='failed', neighbours=True, effects=()):
    """A message does something bad; its neighbours go through. Returns its error."""
    id = w.insert_one(steps, Plan(effects, (status,), error, 'odd'))
    others = w.neighbours() if neighbours else []
    w.await_status(id, status)
    for other in others:
        w.await_status(other, 'done')
    return w.row(id)[2]


@fault
def worker_is_killed_at_work(w):
    id = w.insert_one('hang', Plan((), ('failed',), 'crash: worker killed by SIGKILL', 'odd'))
    others = w.neighbours()
    pid = w.await_begin(id).pid
    os.kill(pid, signal.SIGKILL)
    w.await_status(id, 'failed')
    for other in others:
        w.await_status(other, 'done')
    return w.row(id)[2]


@fault
def worker_is_killed_idle(w):
    w.probe()
    pids = w.worker_pids('probe')
    mark = w.dispatcher.position()
    if not pids or not w.kill_worker(pids[0]):
        raise NoEffect('no idle worker')
    return w.expect('reaped worker %d .*' % pids[0], mark)


@fault
def worker_is_killed_at_random(w):
    w.insert_ordinary(5)
    for stage in w.rng.sample(['a', 'b', 'c'], 3):
        for pid in w.worker_pids(stage):
            if w.kill_worker(pid):
                return 'worker %d of stage %s' % (pid, stage)
    raise NoEffect('no workers')


@fault
def all_workers_are_killed(w):
    w.insert_ordinary(10)
    killed = [pid for stage in ('a', 'b', 'c') for pid in w.worker_pids(stage) if w.kill_worker(pid)]
    if not killed:
        raise NoEffect('no workers')
    return '%d workers' % len(killed)


@fault
def worker_stands_still(w):
    id = w.insert_one('stop', Plan((), ('timeout',), 'timeout: ', 'odd'))
    others = w.neighbours()
    w.await_status(id, 'timeout')
    for other in others:
        w.await_status(other, 'done')
    return w.row(id)[2]


@fault
def worker_hangs(w):
    return fails(w, 'sigterm=ignore hang', 'timeout: ', 'timeout')


@fault
def worker_crashes(w):
    return fails(w, 'crash=%d' % w.rng.randint(1, 255), 'crash: worker exited with status ')


@fault
def worker_crashes_by_a_signal(w):
    return fails(w, 'crash=SEGV', 'crash: worker killed by SIGSEGV')


@fault
def worker_exits_with_0_and_no_answer(w):
    return fails(w, 'crash=0', 'crash: worker exited with status 0')


@fault
def worker_dies_before_it_reads(w):
    mark = w.dispatcher.position()
    for pid in w.worker_pids('odd'):
        w.kill_worker(pid)
    with w.flag('no-start'):
        ids = w.neighbours()
        evidence = w.expect('cooling stage=odd .* before it read anything', mark)
    for id in ids:
        w.await_status(id, 'done')
    return evidence


@fault
def worker_crashes_between_commit_and_answer(w):
    mark = w.dispatcher.position()
    id = w.insert_one('advance=c commit crash=9', Plan(('odd', 'c')))
    evidence = w.expect('reaped worker .* stage=odd: exited with status 9', mark)
    w.await_status(id, 'done')
    return evidence


@fault
def worker_writes_garbage(w):
    return fails(w, 'say=%00%FFhello hang', 'protocol: not a status line')


@fault
def worker_answers_with_the_wrong_id(w):
    return fails(w, "say='0 id=1' hang", 'protocol: the wrong id')


@fault
def worker_answers_twice(w):
    mark = w.dispatcher.position()
    id = w.insert_one("commit say='0 id={id}'", Plan(('odd',)))
    evidence = w.expect('killing worker .* stage=odd id=None: .*', mark)
    w.await_status(id, 'done')
    return evidence


@fault
def worker_answers_too_long(w):
    return fails(w, 'flood=9000 hang', 'protocol: a line of more than')


@fault
def worker_closes_its_output(w):
    return fails(w, 'close', 'protocol: it closed')


@fault
def worker_leaves_a_grandchild_that_holds_its_output(w):
    begin = time.monotonic()
    evidence = fails(w, '%s=4 crash=2' % w.rng.choice(['child', 'escape']), 'crash: ')
    assert time.monotonic() - begin < 4 + PROBE_S
    return evidence


@fault
def worker_reports_success_and_did_nothing(w):
    return fails(w, 'unfinished', 'unfinished: ')


@fault
def worker_does_not_leave(w):
    mark = w.dispatcher.position()
    with w.flag('no-end'):
        id = w.insert_one('', Plan(('odd',)))
        w.await_status(id, 'done')
        return w.expect('killing worker .* stage=odd: it did not leave within STOP_TIMEOUT', mark)


def spoil_program(w, spoil):
    """Have stage odd need a new worker while its program is spoilt."""
    mark = w.dispatcher.position()
    spoil()
    try:
        for pid in w.worker_pids('odd'):
            w.kill_worker(pid)
        ids = w.neighbours()
        evidence = w.expect('cooling stage=odd for .*', mark)
        w.probe()
    finally:
        w.write_program()
    for id in ids:
        w.await_status(id, 'done')
    return evidence


@fault
def program_is_missing(w):
    return spoil_program(w, lambda: os.remove(w.path('odd')))


@fault
def program_is_not_executable(w):
    return spoil_program(w, lambda: os.chmod(w.path('odd'), 0o644))


@fault
def program_has_a_bad_interpreter(w):
    return spoil_program(w, lambda: w.write_program('#!/no/such/interpreter'))


@fault
def program_is_no_program(w):
    return spoil_program(w, lambda: w.write_program('\0\0\0\0'))


# the link

@slow
@fault
def link_is_frozen(w):
    mark = w.dispatcher.position()
    with w.away('link frozen'):
        w.link.freeze()
        evidence = w.expect('no reply within', mark)
        w.link.thaw()
        w.expect(BACK, mark)
    return evidence


@slow
@fault
def link_is_frozen_within_a_statement(w):
    mark = w.dispatcher.position()
    with w.away('link frozen'):
        with w.transaction('LOCK TABLE queue IN EXCLUSIVE MODE'):
            wait_until(lambda: 'active' in w.sessions(what='state'), 5, 'a statement')
            w.link.freeze()
        evidence = w.expect('no reply within', mark)
        w.link.thaw()
        w.expect(BACK, mark)
    return evidence


@slow
@fault
def old_link_stays_frozen(w):
    mark = w.dispatcher.position()
    [pid] = w.sessions()
    with w.away('link frozen'):
        w.link.freeze(new=False)
        evidence = w.expect('no reply within', mark)
        w.expect(BACK, mark)
    assert pid not in w.sessions()
    w.probe()
    w.link.thaw()
    return evidence


@fault
def link_is_frozen_for_a_moment(w):
    w.link.freeze()
    id = w.insert_one('', Plan(('probe',)), 'probe')
    time.sleep(1.5)
    waited = w.row(id)[1] == 'pending'
    w.link.thaw()
    w.await_status(id, 'done')
    if not waited:
        raise NoEffect('the link was not frozen')
    return 'nothing passed for 1.5 s'


@slow
@fault
def server_is_mute(w):
    mark = w.dispatcher.position()
    with w.away('link mute'):
        w.link.mute()
        evidence = w.expect('no connection within', mark)
        w.link.thaw()
        w.expect(BACK, mark)
    return evidence


@fault
def link_is_refused(w):
    mark = w.dispatcher.position()
    with w.away('link refused'):
        w.link.refuse()
        evidence = w.expect('database away.*refused', mark)
        time.sleep(w.rng.uniform(0, 2))
        w.link.thaw()
        w.expect(BACK, mark)
    return evidence


@fault
def link_is_dropped(w):
    mark = w.dispatcher.position()
    with w.away('link dropped'):
        w.link.drop()
        evidence = w.expect('database away.*', mark)
        w.expect(BACK, mark)
    return evidence


@fault
def link_is_dropped_again_and_again(w):
    mark = w.dispatcher.position()
    with w.away('link dropped'):
        accepted = w.link.accepted
        for _ in range(8):
            w.link.drop()
            time.sleep(w.rng.uniform(0, 0.3))
        w.expect(BACK, mark)
        w.probe()
    return '%d connections' % (w.link.accepted - accepted)


@fault
def link_is_slow(w):
    before = w.link.delayed
    w.link.delay(w.rng.uniform(0.05, 0.2))
    time.sleep(2)
    w.probe()
    w.link.thaw()
    if w.link.delayed == before:
        raise NoEffect('nothing was delayed')
    return '%d bytes came late' % (w.link.delayed - before)


@fault
def link_of_workers_is_dropped(w):
    begin = time.monotonic()
    w.insert([('c', {}, Plan(('c',)))] * 10)
    number = wait_until(w.worker_link.connections, 10)
    w.worker_link.drop()
    w.note('link of workers', begin, REPEATS, CRASH, pids=None)
    return '%d connections' % number


@fault
def link_of_workers_is_frozen(w):
    ids = w.insert([('c', {}, Plan(('c',)))] * 10)
    wait_until(w.worker_link.connections, 10)
    w.worker_link.freeze()
    time.sleep(1.5)
    left = w.row(ids[-1])[1]
    w.worker_link.thaw()
    w.await_status(ids[-1], 'done')
    if left == 'done':
        raise NoEffect('they had finished')
    return 'for 1.5 s'


# the server

def break_server(w, how, pause_s=0.0):
    mark = w.dispatcher.position()
    with w.away('server', REPEATS):
        begin = time.monotonic()
        w.server.stop(how)
        time.sleep(pause_s)
        w.server.start()
        w.expect('database away.*', mark)
        evidence = w.expect(BACK + '.*', mark)
        w.note('workers without a server', begin, CRASH, pids=None, end=time.monotonic() + 10)
    return evidence


@fault
def server_restarts(w):
    return break_server(w, cluster.FAST)


@fault
def server_crashes(w):
    return break_server(w, cluster.IMMEDIATE)


@fault
def server_is_away(w):
    return break_server(w, cluster.FAST, 2.5)


@fault
def session_is_terminated(w):
    mark = w.dispatcher.position()
    with w.away('session terminated'):
        if not w.terminate():
            raise NoEffect('no session')
        evidence = w.expect('database away.*', mark)
        w.expect(BACK, mark)
    return evidence


@fault
def session_is_terminated_again_and_again(w):
    mark = w.dispatcher.position()
    with w.away('session terminated'):
        number = 0
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            number += w.terminate()
            time.sleep(w.rng.uniform(0, 0.1))
        w.expect(BACK, mark)
    if not number:
        raise NoEffect('no session')
    return '%d times' % number


@fault
def session_is_terminated_within_a_statement(w):
    mark = w.dispatcher.position()
    with w.away('session terminated'):
        with w.transaction('LOCK TABLE queue IN EXCLUSIVE MODE'):
            wait_until(lambda: 'active' in w.sessions(what='state'), 5, 'a statement')
            if not w.terminate():
                raise NoEffect('no session')
        evidence = w.expect('database away.*', mark)
        w.expect(BACK, mark)
    return evidence


@fault
def statement_is_cancelled(w):
    mark = w.dispatcher.position()

    def cancelled():
        w.sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE usename = 'dispatch' AND state = 'active'")
        return re.search('canceling statement due to user request', w.dispatcher.log_from(mark))

    with w.transaction('LOCK TABLE queue IN EXCLUSIVE MODE'):
        match = wait_until(cancelled, 5)
    return match.group(0)


@slow
@fault
def server_process_stands_still(w):
    mark = w.dispatcher.position()
    with w.away('server process stopped'):
        [pid] = w.sessions()
        os.kill(pid, signal.SIGSTOP)
        try:
            evidence = w.expect('no reply within', mark)
        finally:
            os.kill(pid, signal.SIGCONT)
        w.expect(BACK, mark)
    return evidence


@fault
def sessions_of_workers_are_terminated(w):
    w.insert_ordinary(10)
    begin = time.monotonic()
    number = wait_until(lambda: w.terminate('stage'), 10)
    w.note('workers terminated', begin, REPEATS, CRASH, pids=None, end=time.monotonic() + 1)
    return '%d sessions' % number


def forbid(w, forbidding, allowing, pattern):
    mark = w.dispatcher.position()
    with w.away('session refused'):
        w.sql(forbidding)
        try:
            w.terminate()
            evidence = w.expect(pattern, mark)
            time.sleep(w.rng.uniform(0, 1))
        finally:
            w.sql(allowing)
        w.expect(BACK, mark)
    return evidence


@fault
def database_is_read_only(w):
    return forbid(w, 'ALTER ROLE dispatch SET default_transaction_read_only = on',
                  'ALTER ROLE dispatch RESET default_transaction_read_only', 'the database is read-only')


@fault
def connections_are_limited(w):
    return forbid(w, 'ALTER ROLE dispatch CONNECTION LIMIT 0', 'ALTER ROLE dispatch CONNECTION LIMIT -1',
                  'too many connections')


@fault
def login_is_refused(w):
    return forbid(w, 'ALTER ROLE dispatch NOLOGIN', 'ALTER ROLE dispatch LOGIN', 'not permitted to log in')


# the tables

@fault
def queue_is_locked(w):
    def waits():
        return w.sql("SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted"
                     " AND relation = 'queue'::regclass AND usename = 'dispatch'")

    with w.transaction('LOCK TABLE queue IN ACCESS EXCLUSIVE MODE'):
        wait_until(waits, 5)
        time.sleep(2)
    return 'it waited'


@fault
def pending_rows_are_locked(w):
    w.insert_ordinary(20)
    with w.transaction("SELECT ingress_id FROM queue WHERE status = 'pending' AND stage = 'a' LIMIT 5 FOR UPDATE"
                       " SKIP LOCKED") as rows:
        if not rows:
            raise NoEffect('no pending rows')
        w.probe()
        time.sleep(1)
        statuses = {w.row(id)[1] for id, in rows}
        assert statuses == {'pending'}, statuses
    return '%d rows' % len(rows)


@fault
def running_rows_are_locked(w):
    w.insert_ordinary(20)
    for _ in range(200):
        with w.transaction("SELECT ingress_id FROM queue WHERE status = 'running' FOR UPDATE SKIP LOCKED") as rows:
            if rows:
                w.probe()
                time.sleep(1)
                return '%d rows' % len(rows)
    raise NoEffect('no running rows')


@contextlib.contextmanager
def bad_row(w, id, status):
    """A row cannot be set to a status."""
    w.sql('CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE $m$not this one$m$; END $$;'
          "CREATE TRIGGER refuse BEFORE UPDATE ON queue FOR EACH ROW WHEN (NEW.ingress_id = %d AND NEW.status = '%s')"
          ' EXECUTE FUNCTION refuse()' % (id, status))
    try:
        yield
    finally:
        w.sql('DROP TRIGGER refuse ON queue; DROP FUNCTION refuse')


@fault
def row_cannot_be_written(w):
    mark = w.dispatcher.position()
    with w.flag('wait') as flag:
        id = w.insert_one("if=%s sleep=0.3 fail='3 no'" % flag, Plan((), ('failed',), 'status: 3 no', 'odd'))
        with bad_row(w, id, 'failed'):
            evidence = w.expect('cannot write what became of %d .*' % id, mark)
            w.probe()
        w.await_status(id, 'failed')
    return evidence


@fault
def row_cannot_be_claimed(w):
    [id] = w.sql("INSERT INTO queue (stage, status) VALUES ('odd', 'paused') RETURNING ingress_id")[0]
    w.plans[id] = Plan(('odd',))
    others = w.neighbours(2)
    with bad_row(w, id, 'running'):
        w.sql("UPDATE queue SET status = 'pending' WHERE ingress_id = %s", id)
        w.probe()
        others += w.neighbours(2)
        w.probe()
        for other in others:
            w.await_status(other, 'done')
        assert w.row(id)[1] == 'pending'
    return 'others passed it'


def hide(w, hiding, showing, pattern):
    mark = w.dispatcher.position()
    begin = time.monotonic() - 1
    w.sql(hiding)
    try:
        evidence = w.expect(pattern, mark)
        time.sleep(w.rng.uniform(0, 1))
    finally:
        w.sql(showing)
    w.note('table unusable', begin, DEAD, end=time.monotonic() + 2)
    return evidence


@fault
def rights_are_revoked(w):
    return hide(w, 'REVOKE UPDATE (status, state) ON queue FROM dispatch',
                'GRANT UPDATE (status, state) ON queue TO dispatch', 'cannot .*permission denied')


@fault
def queue_is_renamed(w):
    return hide(w, 'ALTER TABLE queue RENAME TO other', 'ALTER TABLE other RENAME TO queue', 'cannot .*does not exist')


@fault
def column_is_renamed(w):
    return hide(w, 'ALTER TABLE queue RENAME timeout TO other', 'ALTER TABLE queue RENAME other TO timeout',
                'cannot .*does not exist')


@fault
def column_is_added(w):
    w.sql('ALTER TABLE queue ADD note text')
    w.probe()
    w.sql('ALTER TABLE queue DROP note')
    return 'added and dropped'


@fault
def queue_is_rewritten(w):
    query = "SELECT relfilenode FROM pg_class WHERE oid = 'queue'::regclass"
    before = w.sql(query)
    w.sql('VACUUM FULL queue')
    assert w.sql(query) != before
    return 'vacuumed'


@fault
def statistics_are_locked(w):
    mark = w.dispatcher.position()
    begin = time.monotonic()
    with w.transaction('LOCK TABLE stage_stats, dispatch_stats IN ACCESS EXCLUSIVE MODE'):
        w.insert_ordinary(5)
        evidence = w.expect('cannot write statistics.*', mark)
        w.probe()
    w.note('statistics locked', begin)
    return evidence


@fault
def statistics_are_renamed(w):
    mark = w.dispatcher.position()
    w.sql('ALTER TABLE stage_stats RENAME TO other')
    try:
        w.insert_ordinary(5)
        evidence = w.expect('cannot write statistics.*does not exist', mark)
        w.probe()
    finally:
        w.sql('ALTER TABLE other RENAME TO stage_stats')
    return evidence


@fault
def notifications_pour(w):
    def memory():
        return psutil.Process(w.dispatcher.pid).memory_info().rss

    before = memory()
    [(number,)] = w.sql("SELECT count(pg_notify('ingress', n::text)) FROM generate_series(1, 100000) AS n")
    w.probe()
    assert memory() - before < 32 << 20, 'memory grew from %d to %d' % (before, memory())
    return '%d notifications' % number


# operators

def touch(w, statement, final, effects=()):
    """Do something to rows that are under way, which may then also end with a status in `final` and after passes at the
    stages in `effects`; return how many there were."""
    w.insert([('b', {'b': 'sleep=0.05 advance=c'}, Plan(('b', 'c')))] * 20)
    for _ in range(1000):
        begin = time.monotonic()
        ids = [id for id, in w.sql(statement)]
        if ids:
            for id in ids:
                plan = w.plans[id]
                w.plans[id] = plan._replace(final=tuple(set(plan.final) | set(final)), loose=True,
                                            effects=tuple(plan.effects) + tuple(effects))
            w.note('operator', begin, REPEATS, ids=frozenset(ids), end=time.monotonic() + 30)
            return '%d rows' % len(ids)
    raise NoEffect('no such rows')


# FOR UPDATE: a row that its worker finished this moment is not taken for one that runs, and run once more.
RUNNING = "(SELECT ingress_id FROM queue WHERE status = 'running' AND stage IN ('a', 'b', 'c') LIMIT 3 FOR UPDATE)"
PENDING = "(SELECT ingress_id FROM queue WHERE status = 'pending' AND stage IN ('a', 'b', 'c') LIMIT 3 FOR UPDATE)"


@fault
def operator_deletes_running_rows(w):
    return touch(w, 'DELETE FROM queue WHERE ingress_id IN %s RETURNING ingress_id' % RUNNING, (None,))


@fault
def operator_deletes_pending_rows(w):
    return touch(w, 'DELETE FROM queue WHERE ingress_id IN %s RETURNING ingress_id' % PENDING, (None,))


@fault
def operator_finishes_rows(w):
    return touch(w, "UPDATE queue SET status = 'done' WHERE ingress_id IN %s OR ingress_id IN %s RETURNING ingress_id"
                 % (RUNNING, PENDING), ('done',))


@fault
def operator_pauses_running_rows(w):
    return touch(w, "UPDATE queue SET status = 'paused', timeout = now() + interval '0.3 s' WHERE ingress_id IN %s"
                 ' RETURNING ingress_id' % RUNNING, ())


@fault
def operator_makes_running_rows_pending(w):
    return touch(w, "UPDATE queue SET status = 'pending' WHERE ingress_id IN %s RETURNING ingress_id" % RUNNING, ())


@fault
def operator_moves_running_rows(w):
    return touch(w, "UPDATE queue SET stage = 'c' WHERE ingress_id IN %s RETURNING ingress_id"
                 % RUNNING.replace(", 'c'", ''), ('done',), ('c',))


@fault
def operator_makes_a_row_at_work_pending(w):
    id = w.insert_one('sleep=0.5', Plan(('odd',)))
    first = w.await_begin(id)
    w.sql("UPDATE queue SET status = 'pending' WHERE ingress_id = %s", id)
    w.note('operator', first.time, REPEATS, ids=frozenset([id]), end=time.monotonic() + 20)
    w.await_begin(id, first)
    w.await_status(id, 'done')
    return 'it ran once more, afterwards'


@fault
def operator_deletes_a_row_at_work(w):
    id = w.insert_one('sleep=0.5', Plan((), (None,)))
    w.await_begin(id)
    w.sql('DELETE FROM queue WHERE ingress_id = %s', id)
    return 'gone'


@fault
def operator_spoils_the_state_of_a_failing_row(w):
    id = w.insert_one('hang', Plan((), ('failed',), '', 'odd'))
    pid = w.await_begin(id).pid
    w.sql("UPDATE queue SET state = '[1]' WHERE ingress_id = %s", id)
    os.kill(pid, signal.SIGKILL)
    w.await_status(id, 'failed')
    assert w.sql('SELECT state FROM queue WHERE ingress_id = %s', id) == [([1],)]
    return 'the state was left alone'


@fault
def operator_requeues_a_failed_message(w):
    with w.flag('broken') as flag:
        id = w.insert_one("if=%s fail='4 broken'" % flag, Plan(('odd',)))
        begin = w.await_begin(id).time
        w.await_status(id, 'failed')
    w.note('requeued', begin, REPEATS, ids=frozenset([id]), end=time.monotonic() + 30)
    result = call('-c', w.config, 'requeue', str(id))
    assert result.code == 0, result.err
    w.await_status(id, 'done')
    assert w.row(id)[2] is None
    return result.out.strip()


# two at a time

@fault
def dispatcher_is_stopped_while_the_database_is_away(w):
    mark = w.dispatcher.position()
    with w.away('link refused', REPEATS, UNCOUNTED):
        w.link.refuse()
        evidence = w.expect('database away.*', mark)
        time.sleep(w.rng.uniform(0, 1))
        begin = time.monotonic()
        w.dispatcher.signal(signal.SIGTERM)
        code = w.dispatcher.wait(STOP_S + 3 + 5)
        assert code == 0, code
        seconds = time.monotonic() - begin
        w.link.thaw()
    w.start()
    return '%s; stopped in %.1f s' % (evidence, seconds)


@fault
def dispatcher_is_stopped_while_the_link_is_frozen(w):
    with w.away('link frozen', REPEATS, UNCOUNTED):
        w.link.freeze()
        time.sleep(w.rng.uniform(0, 1))
        begin = time.monotonic()
        w.dispatcher.signal(signal.SIGTERM)
        code = w.dispatcher.wait(STOP_S + 3 + 5)
        assert code == 0, code
        seconds = time.monotonic() - begin
        w.link.thaw()
    w.start()
    return 'stopped in %.1f s' % seconds


@fault
def dispatcher_is_killed_while_the_database_is_away(w):
    mark = w.dispatcher.position()
    begin = time.monotonic()
    with w.away('link refused'):
        w.link.refuse()
        evidence = w.expect('database away.*', mark)
        time.sleep(w.rng.uniform(0, 1))
        w.kill_dispatcher(begin)
        w.link.thaw()
    w.start()
    return evidence


@fault
def dispatcher_is_killed_and_its_session_lives_on(w):
    begin = time.monotonic()
    w.link.freeze(new=False)
    time.sleep(w.rng.uniform(0, 0.5))
    w.kill_dispatcher(begin)
    w.adopt(Dispatcher(w.config))
    evidence = w.expect('waiting for the lock.*', 0)
    assert 'took over' not in w.dispatcher.log_from()
    w.link.thaw()
    w.expect('took over', 0)
    return evidence


@fault
def worker_is_killed_while_the_database_is_away(w):
    mark = w.dispatcher.position()
    with w.flag('hang') as flag:
        id = w.insert_one('if=%s hang' % flag, Plan(('odd',)))
        others = w.neighbours()
        first = w.await_begin(id)
        with w.away('link refused'):
            w.link.refuse()
            w.expect('database away', mark)
            os.kill(first.pid, signal.SIGKILL)
            evidence = w.expect('reaped worker %d .*' % first.pid, mark)
            w.link.thaw()
            w.expect(BACK, mark)
    w.await_begin(id, first)
    for other in [id] + others:
        w.await_status(other, 'done')
    return evidence


@fault
def configuration_changes_while_the_database_is_away(w):
    mark = w.dispatcher.position()
    with w.away('link refused'):
        w.link.refuse()
        w.expect('database away', mark)
        w.write_config(b={'PARALLELISM': 3})
        w.dispatcher.signal(signal.SIGHUP)
        evidence = w.expect('reloaded stage=b.*', mark)
        w.link.thaw()
        w.expect(BACK, mark)
    mark = w.dispatcher.position()
    w.write_config()
    w.dispatcher.signal(signal.SIGHUP)
    w.expect('reloaded stage=b', mark)
    return evidence


# -- the run -----------------------------------------------------------------------------------------------------------

def choose(rng, number, kinds=None, quick=False):
    """Return the names of `number` faults, each kind once before any comes twice.

    kinds: of these only. quick: only one of those that take 5 s and more.
    """
    names = kinds or list(KINDS)
    chosen = []
    while len(chosen) < number:
        batch = list(names)
        rng.shuffle(batch)
        if quick and not kinds:
            slow_ones = [name for name in batch if hasattr(KINDS[name], 'slow')]
            batch = [name for name in batch if name not in slow_ones[1:]]
        chosen += batch
    return chosen[:number]


class Failed(Exception):
    """The run is over: something is wrong."""


def run(directory, server, messages, faults, seed, kinds=None, quick=False, go_on=False, say=print):
    """Do a run; return (complaints, faults without effect, summary)."""
    world = World(directory, server, seed)
    try:
        names = choose(world.rng, faults, kinds, quick)
        idle, complaints = [], []
        begin = time.monotonic()
        world.start()
        world.probe()
        world.check_files()
        share = messages / float(max(1, faults))
        queued = 0
        for number, name in enumerate(names):
            upto = min(messages, int((number + 1) * share) + LEAD)
            world.insert_ordinary(max(0, upto - queued))
            queued = max(queued, upto)
            awaited = queued - int((number + world.rng.random()) * share)
            wait_until(lambda n=awaited: world.unfinished() <= n, 60, 'progress before fault %d, %s' % (number, name))
            started = time.monotonic()
            say('%7.1f s  %3d %s' % (started - begin, number, name))
            try:
                try:
                    evidence = KINDS[name](world)
                except NoEffect as reason:
                    idle.append('fault %d, %s: %s' % (number, name, reason))
                    evidence = None
                world.probe()
                world.check_files()
            except Exception as e:
                if not go_on:
                    raise Failed('fault %d, %s: %s: %s' % (number, name, type(e).__name__, e)) from e
                complaints.append('fault %d, %s: %s: %s' % (number, name, type(e).__name__, e))
                evidence = complaints[-1]
                world.mend()
            world.reports.append((name, time.monotonic() - started, evidence))
            say('             %s (%.1f s)' % (evidence, time.monotonic() - started))
        world.insert_ordinary(max(0, messages - queued))
        complaints += finish(world, max(STUCK_S, messages / 50.0))
        return complaints, idle, summarize(world, messages, seed, time.monotonic() - begin)
    except BaseException:
        show_logs(world)
        raise
    finally:
        world.close()


def finish(world, patience_s):
    """Wait for the end of all messages, stop, and check everything; return complaints."""
    bad = []
    try:
        wait_until(lambda: not world.unfinished(), patience_s)
    except AssertionError:
        bad += ['stuck: %s' % (row,) for row in world.sql(
            "SELECT ingress_id, stage, status, timeout - now() FROM queue"
            " WHERE status IN ('pending', 'running', 'paused') ORDER BY 1 LIMIT 20")]
    wait_until(lambda: not world.dispatcher.workers(), 20, 'the end of idle workers')
    bad += ['zombie: %s' % process for process in world.dispatcher.zombies()]
    world.check_files()
    process = psutil.Process(world.dispatcher.pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(2)
    used = sum(process.cpu_times()[:2]) - before
    if used > 0.2:
        bad.append('an idle dispatcher used %.2f s in 2 s' % used)
    world.end_dispatcher()
    world.check_log(world.dispatcher)
    orphans = [pid for dispatcher in world.others + [world.dispatcher] for pid in dispatcher.family()]
    bad += ['orphan: process %d' % pid for pid in orphans]
    return bad + check(world)


def check(world):
    """Compare everything with everything; return complaints."""
    rows = {id: (stage, status, error) for id, stage, status, error in world.sql(
        "SELECT ingress_id, stage, status, state->>'dispatch_error' FROM queue")}
    effects = world.sql('SELECT id, stage FROM effect')
    stats = {stage: tuple(rest) for stage, *rest in world.sql(
        'SELECT stage, processed, failed, timeouts, crashes FROM stage_stats')}
    [totals] = world.sql('SELECT stages, messages FROM dispatch_stats')
    plans = {id: plan._replace(effects=plan.effects or ()) for id, plan in world.plans.items()}
    events = world.read_events()
    lives = checker.find_lives(events)
    bad, blamed = checker.check_blame(plans, rows, lives, world.incidents)
    for id in blamed:
        plans[id] = plans[id]._replace(final=('failed',), loose=True)
    bad += checker.check_rows(plans, rows)
    bad += checker.check_twice(events, lives)
    bad += checker.check_effects(plans, effects)
    repeats, world.repeats = checker.check_repeats(plans, lives, world.incidents)
    bad += repeats
    bad += checker.check_statistics(plans, lives, effects, world.incidents, stats, totals, rows)
    return bad


def summarize(world, messages, seed, seconds):
    kinds = collections.Counter(name for name, _, _ in world.reports)
    latencies = sorted(world.latencies)
    return ('seed %d: %d messages (%d in all), %d executions, %d faults of %d kinds, %.0f s; executed again: %s; a'
            ' fresh message after a fault took %.2f s (median), %.2f s (95 %%), %.2f s (most); dispatchers: %d'
            % (seed, messages, len(world.plans), sum(e.what == 'begin' for e in world.events), len(world.reports),
               len(kinds), seconds, dict(world.repeats) or 'none', latencies[len(latencies) // 2],
               latencies[int(len(latencies) * 0.95)], latencies[-1], len(world.others) + 1))


def show_logs(world):
    """Print the end of the log of the dispatcher."""
    if world.dispatcher:
        print('--- the end of the log of dispatcher %d\n%s---' % (world.dispatcher.pid,
                                                                world.dispatcher.log_from()[-6000:]), file=sys.stderr)
    with contextlib.suppress(psycopg2.Error):
        print('unfinished: %s' % world.sql("SELECT stage, status, count(*), min(ingress_id) FROM queue WHERE status IN"
                                           " ('pending', 'running', 'paused') GROUP BY 1, 2"), file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--messages', type=int, default=1000)
    parser.add_argument('--faults', type=int, default=30)
    parser.add_argument('--seed', type=int, default=None)
    parser.add_argument('--only', default='', help='kinds, separated by commas')
    parser.add_argument('--quick', action='store_true', help='few of the slow kinds')
    parser.add_argument('--list', action='store_true', help='print the kinds of faults')
    parser.add_argument('--go-on', action='store_true', help='with the next fault when one has failed')
    parser.add_argument('--keep', action='store_true', help='keep logs, and say where')
    options = parser.parse_args(argv)
    if options.list:
        print('\n'.join(KINDS))
        return 0
    seed = random.SystemRandom().randrange(10 ** 6) if options.seed is None else options.seed
    kinds = options.only.split(',') if options.only else None
    directory = tempfile.mkdtemp(prefix='chaos-')
    again = 'python test/chaos.py --messages %d --faults %d --seed %d%s%s' % (
        options.messages, options.faults, seed, ' --only ' + options.only if kinds else '',
        ' --quick' if options.quick else '')
    print('%s   # in %s' % (again, directory), flush=True)
    try:
        with cluster.Cluster() as server:
            complaints, idle, summary = run(directory, server, options.messages, options.faults, seed, kinds,
                                            options.quick, options.go_on, functools.partial(print, flush=True))
        print(summary)
    except Failed as e:
        traceback.print_exception(type(e.__cause__), e.__cause__, e.__cause__.__traceback__)
        complaints, idle = [str(e)], []
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    for line in complaints[:50] + idle:
        print(line)
    if complaints or idle:
        print('%s; again: %s' % ('%d complaints' % len(complaints) if complaints else 'not valid', again))
    return 1 if complaints else 2 if idle else 0


if __name__ == '__main__':
    assert threading.current_thread() is threading.main_thread()
    sys.exit(main())
