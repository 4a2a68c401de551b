"""Faults of the database and of the link to it. The numbers are those of the list of faults to survive."""
import contextlib
import json
import os
import pwd
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

import cluster
import psutil
import psycopg2
import pytest
from pipeline import Counts, Pipeline, get_schema, spawned
from support import Running, call, wait_until, write_config

SESSION = "datname = current_database() AND application_name LIKE 'pepsi-dispatch %%'"  # in pg_stat_activity

MORE = bool(os.environ.get('FAULTS_MORE'))  # set it to try more often and for longer

# Notes each id and answers it; has nothing to do with the database.
NOTER = """
import json, os, sys, time
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
for line in iter(sys.stdin.readline, ''):
    event = [time.monotonic(), os.getpid(), os.environ['PEPSI_STAGE'], int(line), 'begin']
    os.write(log, json.dumps(event).encode() + b'\\n')
    os.write(1, b'1 id=%d noted\\n' % int(line))
"""

# What fails, as often as the table says: the trigger is fired by the dispatcher's session only.
FAULT = """
CREATE TABLE fault (code text, times int);
CREATE SEQUENCE fault_count;
CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE f record;
BEGIN
    SELECT * INTO f FROM fault;
    IF FOUND AND current_setting('application_name') LIKE 'pepsi-dispatch %' AND nextval('fault_count') <= f.times THEN
        IF f.code = 'terminate' THEN
            PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(1);
        ELSE
            RAISE EXCEPTION 'planted' USING ERRCODE = f.code;
        END IF;
    END IF;
    RETURN NEW;
END
$$;
"""
FAULT_AT = {  # where the trigger stands
    'claim': "BEFORE UPDATE ON queue FOR EACH ROW WHEN (OLD.status = 'pending' AND NEW.status = 'running')",
    'requeue': "BEFORE UPDATE ON queue FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.status = 'pending')",
    'retry': "BEFORE UPDATE ON queue FOR EACH ROW WHEN (OLD.status = 'paused' AND NEW.status = 'pending')",
    'settle': "BEFORE UPDATE ON queue FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.status = 'failed')",
    'flush': 'BEFORE UPDATE ON dispatch_stats FOR EACH ROW WHEN (OLD.flush <> NEW.flush)',
    'commit': 'AFTER UPDATE ON queue DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.status <> NEW.status)',
}
CODES = ['terminate', '40001', '40P01', '55P03', '57014', '53100', 'P0001']


class Link:
    """A proxy by TCP in front of the server's socket, whose connections can fall silent or break."""

    def __init__(self, dsn):
        """Listen on a port of its own and serve in a thread until close()."""
        self.dsn = dsn
        self.attempts = 0
        self.mode = 'pass'  # what new connections meet: pass, close (at once), mute (nothing is ever said)
        self._path = '%(host)s/.s.PGSQL.%(port)s' % psycopg2.extensions.parse_dsn(dsn)
        self._peers = {}  # socket -> where what it says goes; both ways
        self._silent = []  # sockets that nobody listens to
        self._lock = threading.Lock()
        self._listener = socket.socket()
        self._listener.bind(('127.0.0.1', 0))
        self._listener.listen(64)
        self.port = self._listener.getsockname()[1]
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def through(self):
        """Return the connection string that leads through the proxy."""
        words = psycopg2.extensions.parse_dsn(self.dsn)
        return 'host=127.0.0.1 port=%d user=%s dbname=%s sslmode=disable' % (self.port, words['user'], words['dbname'])

    def freeze(self):
        """Forward nothing more on the connections that there are, and keep them open."""
        with self._lock:
            self._silent += self._peers
            self._peers = {}
        self._waker.send(b'x')

    def cut(self):
        """Close the connections that there are, silent ones too."""
        with self._lock:
            for end in list(self._peers) + self._silent:
                end.close()
            self._peers, self._silent = {}, []
        self._waker.send(b'x')

    def close(self):
        """End it all."""
        self.cut()
        self._waker.close()
        self._thread.join()
        self._wake.close()
        self._listener.close()

    def _serve(self):
        while True:
            with self._lock:
                ends = [self._listener, self._wake] + list(self._peers)
            try:
                readable = select.select(ends, [], [])[0]
            except (OSError, ValueError):  # one was closed this moment
                continue
            with self._lock:
                for end in readable:
                    if end is self._wake:
                        if not end.recv(100):
                            return
                    elif end is self._listener:
                        self._accept()
                    elif end in self._peers:
                        self._forward(end)

    def _accept(self):
        client = self._listener.accept()[0]
        self.attempts += 1
        server = socket.socket(socket.AF_UNIX)
        try:
            if self.mode == 'close':
                raise OSError
            if self.mode == 'mute':
                server.close()
                self._silent.append(client)
                return
            server.connect(self._path)
        except OSError:
            client.close()
            server.close()
            return
        self._peers[client], self._peers[server] = server, client

    def _forward(self, end):
        other = self._peers[end]
        try:
            data = end.recv(65536)
            other.sendall(data)
        except OSError:
            data = b''
        if not data:
            for each in (end, other):
                del self._peers[each]
                each.close()


@pytest.fixture
def system(tmp_path, dsn, db):
    return Pipeline(tmp_path, dsn, db)


@pytest.fixture
def link(dsn):
    with contextlib.closing(Link(dsn)) as link:
        yield link


@pytest.fixture
def role(system, pg):
    """A role with exactly the rights that `init --print` shows, and none by way of PUBLIC; return its name."""
    name = system.execute("SELECT current_database() || '_role'")[0][0]
    grants = re.findall(r'^-- +(GRANT .*;)$', call('init', '--print').out, re.MULTILINE)
    assert len(grants) == 3
    system.execute('CREATE ROLE %s LOGIN; REVOKE ALL ON SCHEMA public FROM PUBLIC' % name)
    system.execute(''.join(grant.replace('ROLE', name) for grant in grants))
    yield name
    pg.start()
    with contextlib.closing(psycopg2.connect(system.dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            wait_until(lambda: cursor.execute('SELECT 1 FROM pg_stat_activity WHERE usename = %s', [name])
                       or not cursor.fetchall())
            cursor.execute('DROP OWNED BY %s; DROP ROLE %s' % (name, name))


def run_at(system, dsn, stages, options=('-v',), env=None, **settings):
    """Return a Running whose own session goes to another connection string than those of its workers."""
    directory = os.path.join(system.directory, 'direct')
    os.makedirs(directory, exist_ok=True)
    direct = write_config(directory, system.dsn, {})
    settings = dict({'poll_interval': '1 h', 'config_file': direct}, **settings)
    return Running(write_config(system.directory, dsn, stages, **settings), options=options, env=env)


def noter(system):
    """Return the PROGRAM of a worker that notes each id and answers 1."""
    return system.python('noter.py', NOTER)


def delays(system, inserted):
    """Return the times between insert and begin, the longest last; inserted: id -> monotonic time."""
    began = {}
    for when, _, _, id, _ in system.events('begin'):
        began.setdefault(id, when)
    return sorted(began[id] - when for id, when in inserted.items())


def assert_prompt(system, stage='resize', limit_s=2.0):
    """A fresh message starts in time."""
    before = time.monotonic()
    id = system.insert_one(stage)
    wait_until(lambda: id in system.begun(), limit_s + 3, 'begin of %d' % id)
    assert delays(system, {id: before})[-1] < limit_s
    return id


def ready(system, running):
    """Wait until a dispatcher is at work and its stage resize has a worker that answered."""
    running.wait_log('took over')
    system.wait_status(system.insert_one('resize'), 'failed')


def terminate(system):
    """End the dispatcher's session from the server's side."""
    wait_until(lambda: system.execute('SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE ' +
                                      SESSION.replace('%%', '%')))


def warnings(running, start=0):
    """Return the warnings and errors in the log."""
    return [line for line in running.log()[start:].splitlines() if re.search(' (WARNING|ERROR) ', line)]


def statements(running):
    """Return how many statements the dispatcher has sent, as it says itself."""
    start = len(running.log())
    running.signal(signal.SIGUSR1)
    return int(running.wait_log(r'state phase=.* statements=(\d+)', start=start).group(1))


def cpu_s(running):
    """Return the CPU seconds that the dispatcher itself has used."""
    times = psutil.Process(running.pid).cpu_times()
    return times.user + times.system


# -- notifications and the link ----------------------------------------------------------------------------------------

def test_b01_rows_inserted_while_a_statement_is_under_way_start_within_a_second(system):
    system.execute("""
        CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('application_name') LIKE 'pepsi-dispatch %' THEN PERFORM pg_sleep(0.06); END IF;
            RETURN NULL;
        END
        $$;
        CREATE TRIGGER dawdle BEFORE UPDATE ON queue FOR EACH STATEMENT EXECUTE FUNCTION dawdle();
        """)

    seen = []

    def dawdling_anew():  # one insert for each statement
        rows = system.execute("SELECT query_start FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND "
                              + SESSION.replace('%%', '%'))
        if rows and rows[0] not in seen:
            seen.append(rows[0])
            return True

    with system.run({'resize': noter(system)}) as running:
        ready(system, running)
        inserted = {}
        for _ in range(50):
            with contextlib.suppress(AssertionError):  # it was too short for us to see
                wait_until(dawdling_anew, 0.3)
            before = time.monotonic()
            inserted[system.insert_one('resize')] = before
        system.wait_census(failed=51)
    assert len(seen) >= 30
    assert delays(system, inserted)[-1] < 1


def test_b02_a_link_that_falls_silent_while_idle_is_found_and_replaced_and_workers_stay(system, link, tmp_path):
    """And b47: the lost session, which lives on at the server with the lock, keeps the next one out for a moment."""
    slow = system.script('slow', 'read -r id; while [ ! -e %s/go ]; do sleep 0.02; done; echo 1 late; cat\n' % tmp_path)
    with run_at(system, link.through(), {'resize': noter(system), 'slow': slow}, poll_interval='1 s',
                worker_idle_timeout='1 h', options=('-vv',)) as running:
        held = system.insert_one('slow')
        ready(system, running)
        system.wait_status(held, 'running')
        workers = spawned(running)
        # Some heartbeats later the next one asks the longest of its questions: are there rows without an owner?
        wait_until(lambda: running.log().count('replied revive') >= 5)
        link.freeze()
        before = time.monotonic()
        id = system.insert_one('resize')
        system.wait_status(id, 'failed', 30)
        took = time.monotonic() - before
        assert took < 1 + 5 + 2
        running.wait_log('database away: no reply')
        assert float(running.wait_log(r'database is back after ([0-9.]+) s').group(1)) < 2
        assert system.row(held).status == 'running'
        (tmp_path / 'go').touch()
        system.wait_status(held, 'failed', 2)
        assert spawned(running) == workers
        assert 'reaped' not in running.log()


def test_b03_while_a_statement_is_outstanding_on_a_silent_link_everything_else_is_served(system, link, tmp_path):
    wait = 'read -r id; while [ ! -e %s/go ]; do sleep 0.02; done; ' % tmp_path
    stages = {'answers': system.script('answers', wait + 'echo 1 kept; cat\n'),
              'dies': system.script('dies', 'read -r id; exec sleep 100\n'),
              'hangs': {'PROGRAM': system.script('hangs', 'read -r id; exec sleep 100\n'), 'MAX_RUNTIME': '3 s'}}
    with run_at(system, link.through(), stages, stop_timeout='1 s') as running:
        ids = [system.insert_one(stage) for stage in sorted(stages)]
        system.wait_census(running=3)
        wait_until(lambda: len(spawned(running)) == 3)
        began = time.monotonic()
        log = running.log()
        link.freeze()
        link.mode = 'mute'
        (tmp_path / 'go').touch()  # the answer has to be written: a statement is sent, and no reply comes
        running.wait_log('spawned')
        before = time.monotonic()
        assert statements(running)
        assert time.monotonic() - before < 1
        wait_until(lambda: 'unwritten=1' in running.log() or statements(running) < 0)
        worker = re.search('spawned worker (.*) stage=dies', log).group(1)
        before = time.monotonic()
        os.kill(int(worker), signal.SIGKILL)
        running.wait_log('reaped worker %s ' % worker)
        assert time.monotonic() - before < 1
        running.wait_log('killing worker .*stage=hangs.*timeout: ')
        assert time.monotonic() - began < 3 + 1
        before = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - before < 1 + 3
        assert re.search('outcomes are lost.*ids %d' % ids[0], running.log())
    assert system.census() == {'running': 3}
    link.cut()
    with system.run({'resize': noter(system)}) as running:  # the next start heals
        running.wait_log('reset 3 ')
        system.wait_census(pending=3)


@pytest.mark.parametrize('mode', ['close', 'mute'] if MORE else ['close'])
def test_b04_while_the_server_is_away_there_are_few_attempts_one_line_and_no_load(system, link, tmp_path, mode):
    slow = system.script('slow', 'read -r id; while [ ! -e %s/go ]; do sleep 0.02; done; echo 1 late; cat\n' % tmp_path)
    with run_at(system, link.through(), {'slow': slow, 'resize': noter(system)}) as running:
        held = system.insert_one('slow')
        ready(system, running)
        system.wait_status(held, 'running')
        start, used = len(running.log()), cpu_s(running)
        link.mode, link.attempts = mode, 0
        link.cut()
        (tmp_path / 'go').touch()
        before = time.monotonic()
        wait_until(lambda: link.attempts >= (6 if mode == 'close' else 2), 30)
        # 0.1 + 0.2 + 0.4 + 0.8 + 1.6 ... less a quarter at most; 5 s more for each server that is silent
        assert time.monotonic() - before > (2 if mode == 'close' else 5)
        assert system.row(held).status == 'running'
        assert cpu_s(running) - used < 0.4
        away = [line for line in warnings(running, start) if 'database away' in line]
        assert 1 <= len(away) <= 2  # it closed; then what the next ones met
        assert len(warnings(running, start)) == len(away)
        link.mode = 'pass'
        link.cut()
        assert_prompt(system)
        assert system.wait_status(held, 'failed', 2).state['dispatch_error'] == 'status: 1 late'
        running.wait_log('database is back after', start=start)


def test_b05_rows_inserted_around_reconnects_and_starts_never_wait_for_the_heartbeat(system):
    dice = random.Random(5)
    inserted = {}
    for _ in range(4):
        with system.run({'resize': noter(system)}):
            for number in range(20):
                time.sleep(dice.uniform(0, 0.08))  # no proof: it is the random time
                if number in (5, 10, 15):
                    system.execute('SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE '
                                   + SESSION.replace('%%', '%'))
                before = time.monotonic()
                inserted[system.insert_one('resize')] = before
            wait_until(lambda: set(system.begun()) == set(inserted), 10)
    assert len(inserted) == 80
    assert delays(system, inserted)[-1] < 4
    assert len(system.begun()) == 80


def test_b07_an_echo_of_its_own_writes_does_not_keep_the_dispatcher_awake(system):
    system.execute("""
        CREATE TRIGGER echo AFTER UPDATE ON queue FOR EACH STATEMENT EXECUTE FUNCTION pepsi_dispatch_wake();
        CREATE TRIGGER echo AFTER UPDATE ON dispatch_stats FOR EACH STATEMENT EXECUTE FUNCTION pepsi_dispatch_wake();
        """)
    with system.run({'resize': noter(system)}) as running:
        ready(system, running)
        wait_until(lambda: system.totals() == (1, 1))
        before = statements(running)
        time.sleep(2)  # no proof: what is measured is the rate
        assert statements(running) - before <= 4


def test_b07_a_burst_of_notifications_is_folded_and_costs_no_claim_while_no_stage_has_room(system):
    stages = {'hang': {'PROGRAM': system.script('hang', 'exec sleep 100\n'), 'PARALLELISM': 1, 'QUEUE_LIMIT': 1}}
    with Running(system.write_config(stages, stop_timeout=0), options=('-vv',)) as running:
        def storm(seconds):
            start = len(running.log())
            end = time.monotonic() + seconds
            number = 0
            while time.monotonic() < end:
                system.execute("SELECT pg_notify('ingress', i::text) FROM generate_series(1, 50) AS i")
                number += 50
            assert number > 1000
            return running.log()[start:].count('replied claim: ')

        running.wait_log('took over')
        assert storm(2) <= 2 * 50
        wait_until(lambda: 0 < statements(running))
        system.insert('hang', 2)
        system.wait_census(running=1, pending=1)
        running.wait_log('spawned')
        assert storm(1) == 0


@pytest.mark.skipif(not shutil.which('pgbouncer'), reason='there is no pgbouncer here')
@pytest.mark.parametrize('mode, code', [('transaction', 78), ('session', 0)])
def test_b08_a_transaction_pooler_is_refused_and_a_pool_of_sessions_is_not(system, pg, mode, code):
    directory = tempfile.mkdtemp(prefix='pepsi-')  # short, for its socket
    owner = os.stat(pg.base)  # it refuses to run as root, and must be let in to the server's socket
    user = pwd.getpwuid(owner.st_uid) if os.geteuid() == 0 else None
    with open(os.path.join(directory, 'ini'), 'w') as file:
        file.write('[databases]\n* = host=%s user=postgres\n[pgbouncer]\npool_mode=%s\nlisten_addr=\n'
                   'unix_socket_dir=%s\nlisten_port=6543\nauth_type=any\nlogfile=\npidfile=\n'
                   % (pg.base, mode, directory))
    if user:
        os.chown(directory, user.pw_uid, user.pw_gid)

    def become():
        if user:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)

    pooler = subprocess.Popen(['pgbouncer', '-q', os.path.join(directory, 'ini')], preexec_fn=become,
                              stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: os.path.exists(os.path.join(directory, '.s.PGSQL.6543')))
        dsn = re.sub(r'host=\S+ port=\S+', 'host=%s port=6543' % directory, system.dsn)
        with run_at(system, dsn, {'resize': noter(system)}) as running:
            if code:
                assert running.wait() == code
                assert 'transaction pooler' in running.log()
                assert not system.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'")
            else:
                running.wait_log('took over')
                assert_prompt(system)
    finally:
        pooler.kill()
        pooler.wait()
        shutil.rmtree(directory)
    # Its sessions end when they find that it is gone.
    wait_until(lambda: not system.execute('SELECT 1 FROM pg_stat_activity WHERE datname = current_database()'
                                          ' AND pid <> pg_backend_pid()'))


def test_b09_300000_notifications_are_dropped_within_seconds_and_take_no_memory(system):
    with system.run({'resize': noter(system)}) as running:
        ready(system, running)
        process = psutil.Process(running.pid)
        before = process.memory_info().rss
        system.execute("SELECT pg_notify('ingress', i::text) FROM generate_series(1, 300000) AS i")
        started = time.monotonic()
        wait_until(lambda: system.execute('SELECT pg_notification_queue_usage()') == [(0.0,)], 10)
        assert_prompt(system, limit_s=10)
        assert time.monotonic() - started < 10
        assert_prompt(system)
        assert process.memory_info().rss - before < 30e6


def test_b09_an_idle_session_holds_neither_a_transaction_nor_a_snapshot(system):
    with system.run({'resize': noter(system)}) as running:
        ready(system, running)
        wait_until(lambda: system.execute(
            'SELECT state, xact_start IS NULL AND backend_xmin IS NULL AND backend_xid IS NULL FROM pg_stat_activity'
            ' WHERE ' + SESSION.replace('%%', '%')) == [('idle', True)])


# -- errors and lost sessions, at each statement -----------------------------------------------------------------------

@pytest.mark.parametrize('where', sorted(FAULT_AT))
def test_b11_b49_b56_any_error_and_any_loss_at_any_statement_only_delays(system, where):
    system.execute(FAULT)
    system.execute('CREATE %s TRIGGER fault %s EXECUTE FUNCTION fault()'
                   % ('CONSTRAINT' if where == 'commit' else '', FAULT_AT[where]))
    stages = {'a': system.stub('advance=b'), 'b': system.stub()}
    with system.run(stages, stats_interval='100 ms', worker_idle_timeout='1 h') as running:
        running.wait_log('took over')
        codes = CODES[:3] if where == 'flush' else CODES
        for number, code in enumerate(codes, 1):
            system.execute('DELETE FROM fault; INSERT INTO fault VALUES (%s, 1); ALTER SEQUENCE fault_count RESTART',
                           code)
            id = system.insert_one('a', stub={'b': ['pause=0.05', 'fail=at-last']})
            row = system.wait_status(id, 'failed')
            assert row.state['dispatch_error'] == 'status: 1 at-last', code
            if where == 'flush' or code == codes[-1]:
                wait_until(lambda: system.totals() == (3 * number, number))  # noqa: B023 - called at once
            assert system.execute('SELECT is_called FROM fault_count') == [(True,)], code
            assert [e[2] for e in system.events('begin') if e[3] == id] == ['a', 'b', 'b'], code
        assert len(spawned(running)) <= 4  # no worker suffered
    assert system.counts() == {'a': Counts(len(codes), 0, 0, 0), 'b': Counts(len(codes), len(codes), 0, 0)}


def test_b11_many_errors_in_a_row_have_a_growing_delay_and_one_line(system):
    system.execute(FAULT)
    system.execute('CREATE TRIGGER fault %s EXECUTE FUNCTION fault()' % FAULT_AT['claim'])
    system.execute("INSERT INTO fault VALUES ('53100', 1000000)")
    with system.run({'resize': noter(system)}) as running:
        running.wait_log('took over')
        id, used, before = system.insert_one('resize'), cpu_s(running), time.monotonic()
        wait_until(lambda: system.execute('SELECT last_value FROM fault_count')[0][0] >= 6)
        assert time.monotonic() - before > 0.1 + 0.2 + 0.4 + 0.8
        assert cpu_s(running) - used < 0.3
        assert len(warnings(running)) == 1
        system.execute('DELETE FROM fault')
        system.wait_status(id, 'failed', 2)
        running.wait_log('works again after')


@pytest.mark.parametrize('where', ['claim', 'settle', 'retry'])
def test_a_trigger_that_raises_for_one_row_keeps_no_other_from_flowing(system, where):
    """Of the table: trigger that raises for one id: the bad row is parked, the others flow (B16 for results)."""
    with system.run({'resize': system.stub(), 'other': system.stub()}) as running:
        running.wait_log('took over')
        bad = system.insert_one('nowhere', stub=['pause=0.1', 'fail'])
        system.execute("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF NEW.ingress_id = %s AND current_setting('application_name') LIKE 'pepsi-dispatch %%' THEN
                    RAISE EXCEPTION 'not this one';
                END IF;
                RETURN NEW;
            END
            $$""", bad)
        system.execute('CREATE TRIGGER refuse %s EXECUTE FUNCTION refuse()' % FAULT_AT[where])
        system.execute("UPDATE queue SET stage = 'resize' WHERE ingress_id = %s", bad)
        others = system.insert('resize', 20, stub=['pause=0.1', 'fail']) + system.insert('other', 5, stub='fail')
        system.wait_census(15, failed=25, **{{'claim': 'pending', 'settle': 'running', 'retry': 'paused'}[where]: 1})
        assert_prompt(system)
        assert_prompt(system, 'other')
        assert len(warnings(running)) < 10
        system.execute('DROP TRIGGER refuse ON queue; NOTIFY ingress')
        system.wait_status(bad, 'failed', 35)
        passes = system.begun()
    assert sorted(passes) == sorted(2 * others[:20] + others[20:] + [bad, bad] + [max(others) + 1, max(others) + 2])


# -- locks -------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def locking(system, statement, *parameters):
    """Have another session execute a statement in a transaction that ends with the block, rolled back unless
    committed by the block."""
    with contextlib.closing(psycopg2.connect(system.dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)
        yield connection


def test_b43_a_row_that_somebody_has_locked_delays_no_other_and_is_taken_as_it_is_afterwards(system):
    with system.run({'resize': noter(system)}) as running:
        running.wait_log('took over')
        kept, cancelled, moved = system.insert('nowhere', 3)
        with locking(system, "UPDATE queue SET stage = 'resize' WHERE ingress_id = %s", kept) as one, \
                locking(system, "UPDATE queue SET status = 'done' WHERE ingress_id = %s", cancelled) as two, \
                locking(system, "UPDATE queue SET stage = 'attic' WHERE ingress_id = %s", moved) as three:
            for _ in range(5):
                assert_prompt(system)
            one.commit()
            two.commit()
            three.commit()
        system.wait_status(kept, 'failed', 2)
        assert system.row(cancelled)[:2] == ('nowhere', 'done')
        assert system.row(moved)[:2] == ('attic', 'pending')
    assert not {cancelled, moved} & set(system.begun())


def test_b43_a_locked_row_of_our_stage_is_neither_run_twice_nor_run_when_it_was_cancelled(system):
    ids = system.insert('resize', 3)
    with locking(system, "UPDATE queue SET state = '{\"a\": 1}' WHERE ingress_id = %s", ids[0]) as touched, \
            locking(system, "UPDATE queue SET status = 'done' WHERE ingress_id = %s", ids[1]) as cancelled, \
            system.run({'resize': noter(system)}) as running:
        system.wait_status(ids[2], 'failed', 3)  # the start is in it
        for _ in range(5):
            assert_prompt(system)
        touched.commit()
        cancelled.commit()
        system.wait_status(ids[0], 'failed', 2)
        assert running.process.poll() is None
    assert system.row(ids[1]).status == 'done'
    assert ids[1] not in system.begun()
    assert system.begun().count(ids[0]) == 1


def test_b49_a_result_whose_row_is_locked_is_kept_and_delays_no_other(system, tmp_path):
    go = 'await=%s' % (tmp_path / 'go')
    with system.run({'resize': {'PROGRAM': system.stub(), 'PARALLELISM': 2}}) as running:
        id = system.insert_one('resize', stub=go + ' fail=kept')
        system.wait_begun(1)
        with locking(system, 'SELECT 1 FROM queue WHERE ingress_id = %s FOR UPDATE', id):
            (tmp_path / 'go').touch()
            wait_until(lambda: len(system.events('end')) == 1)
            for _ in range(5):
                other = assert_prompt(system)
                system.wait_status(other, 'done', 2)
            assert system.row(id).status == 'running'
        assert system.wait_status(id, 'failed', 2).state['dispatch_error'] == 'status: 1 kept'
        assert running.process.poll() is None
    assert system.begun().count(id) == 1


def test_b50_a_locked_table_only_delays_and_signals_and_watchdogs_are_served_meanwhile(system, tmp_path):
    slow = system.script('slow', 'read -r id; while [ ! -e %s/go ]; do sleep 0.02; done; echo 1 late; cat\n' % tmp_path)
    stages = {'resize': noter(system), 'slow': slow,
              'hang': {'PROGRAM': system.script('hang', 'exec sleep 100\n'), 'MAX_RUNTIME': '2 s'}}
    with system.run(stages) as running:
        ready(system, running)
        held, hangs = system.insert_one('slow'), system.insert_one('hang')
        wait_until(lambda: len(spawned(running)) == 3)
        began = time.monotonic()
        with locking(system, 'LOCK TABLE queue IN ACCESS EXCLUSIVE MODE'), \
                contextlib.closing(psycopg2.connect(system.dsn)) as other:
            other.autocommit = True
            with other.cursor() as cursor:
                cursor.execute('NOTIFY ingress')
            (tmp_path / 'go').touch()
            running.wait_log('killing worker .*timeout: ')
            assert time.monotonic() - began < 3
            for _ in range(5):
                before = time.monotonic()
                statements(running)
                assert time.monotonic() - before < 0.5
            wait_until(lambda: time.monotonic() - began > 3)
        released = time.monotonic()
        assert_prompt(system)
        assert system.wait_status(held, 'failed', 2).state['dispatch_error'] == 'status: 1 late'
        system.wait_status(hangs, 'timeout', 2)
        assert time.monotonic() - released < 3
        assert len(warnings(running)) < 8
    assert system.counts()['slow'] == Counts(0, 1, 0, 0)
    assert system.counts()['hang'] == Counts(0, 0, 1, 0)


def test_b50_limits_that_the_database_sets_for_statements_and_locks_do_no_harm(system):
    system.execute("""
        DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET statement_timeout = 100', current_database());
        EXECUTE format('ALTER DATABASE %I SET lock_timeout = 1', current_database());
        EXECUTE format('ALTER DATABASE %I SET idle_in_transaction_session_timeout = 1', current_database());
        EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', current_database());
        END $$""")
    with system.run({'resize': noter(system)}, poll_interval='100 ms') as running:
        system.insert('resize', 200)
        system.wait_census(failed=200)
        wait_until(lambda: system.totals() == (200, 200))
        assert len(warnings(running)) <= 1  # the first statement may meet the limit
    assert len(system.begun()) == 200


# -- one dispatcher ----------------------------------------------------------------------------------------------------

def test_b46_a_claim_of_a_killed_dispatcher_that_commits_late_strands_no_row(system):
    system.execute("""
        CREATE SEQUENCE once;
        CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('once') = 1 THEN PERFORM pg_sleep(2); END IF;
            RETURN NEW;
        END
        $$;
        CREATE TRIGGER dawdle BEFORE UPDATE ON queue FOR EACH ROW WHEN (NEW.status = 'running')
            EXECUTE FUNCTION dawdle();
        """)
    config = system.write_config({'resize': noter(system)})
    ids = system.insert('resize', 5)
    with Running(config) as first:
        wait_until(lambda: system.execute('SELECT is_called FROM once') == [(True,)])
        first.kill()
        with Running(config) as second:
            second.wait_log('waiting for the lock')  # the server still works for the dead one
            second.wait_log('reset [1-5] ')
            system.wait_census(failed=5)
    assert system.begun() == ids


@pytest.mark.parametrize('other_has_left', [False, True])
def test_b47_a_dispatcher_that_was_away_while_another_took_over_kills_its_workers_and_exits_with_75(
        system, link, other_has_left):
    stages = {'resize': system.stub('unless=%s/again' % system.directory, 'hang')}
    with run_at(system, link.through(), stages) as first:
        id = system.insert_one('resize')
        system.wait_begun(1)
        link.mode = 'close'
        link.cut()
        first.wait_log('database away')
        with system.run(stages) as second:
            second.wait_log('took over epoch=2')
            second.wait_log('killing process')  # the worker of the first one still has the message
            open(os.path.join(system.directory, 'again'), 'w').close()
            system.wait_status(id, 'done')
            if other_has_left:
                assert second.stop() == 0
            link.mode = 'pass'
            assert first.wait() == 75
            assert 'taken over' in first.log()
            assert not first.family()
    assert system.begun() == [id, id]
    assert system.execute('SELECT epoch FROM dispatch_stats') == [(2,)]


# -- the server goes and comes -----------------------------------------------------------------------------------------

def crash_one_backend(pg, system):
    """Kill a server process of somebody else: the postmaster restarts all of them."""
    with contextlib.closing(psycopg2.connect(system.dsn)) as victim:
        os.kill(victim.get_backend_pid(), signal.SIGKILL)

        def thrown_out():  # we, a bystander
            try:
                system.execute('SELECT 1')
            except psycopg2.Error:
                return True

        wait_until(thrown_out)
    pg.start()


@pytest.mark.parametrize('how', [lambda pg, system: pg.restart(), lambda pg, system: (pg.crash(), pg.start()),
                                 crash_one_backend], ids=['restarted fast', 'crashed', 'one backend killed'])
def test_after_the_server_was_gone_work_in_flight_is_kept_and_a_claim_follows_within_2_seconds(system, pg, tmp_path,
                                                                                               how):
    """Of the table: server restarted fast, immediate; one backend killed."""
    slow = system.script('slow', 'read -r id; while [ ! -e %s/go ]; do sleep 0.02; done; echo 1 late; cat\n' % tmp_path)
    with system.run({'slow': slow, 'resize': noter(system)}) as running:
        held = system.insert_one('slow')
        ready(system, running)
        system.wait_status(held, 'running')
        how(pg, system)

        def connected():
            try:
                system.db.close()
                system.db = psycopg2.connect(system.dsn)
                system.db.autocommit = True
                return True
            except psycopg2.OperationalError:
                return False

        wait_until(connected)
        try:
            assert_prompt(system)
            assert system.row(held).status == 'running'
            (tmp_path / 'go').touch()
            assert system.wait_status(held, 'failed', 2).state['dispatch_error'] == 'status: 1 late'
            assert running.log().count('database away') <= 3
            running.wait_log('database is back')
        finally:
            system.db.close()


REFUSALS = {  # how the database refuses a session of a role, and how it takes it again
    'no login': ('ALTER ROLE {role} NOLOGIN', 'ALTER ROLE {role} LOGIN'),
    'connections': ('ALTER ROLE {role} CONNECTION LIMIT 0', 'ALTER ROLE {role} CONNECTION LIMIT -1'),
    'database': ('ALTER DATABASE {db} CONNECTION LIMIT 0', 'ALTER DATABASE {db} CONNECTION LIMIT -1'),
    'right': ('REVOKE CONNECT ON DATABASE {db} FROM PUBLIC', 'GRANT CONNECT ON DATABASE {db} TO PUBLIC'),
    'read-only': ('ALTER ROLE {role} SET default_transaction_read_only = on',
                  'ALTER ROLE {role} RESET default_transaction_read_only'),
}


def test_a_database_that_refuses_sessions_for_a_while_is_waited_for(system, role):
    """Of the table: database read-only, too many connections, refused for a while: one line per change of state."""
    dsn = system.dsn.replace('user=postgres', 'user=' + role)
    names = {'role': role, 'db': system.execute('SELECT current_database()')[0][0]}
    with run_at(system, dsn, {'resize': noter(system)}) as running:
        ready(system, running)
        for what, (refuse, allow) in REFUSALS.items():
            start, used = len(running.log()), cpu_s(running)
            system.execute(refuse.format(**names))
            terminate(system)
            running.wait_log('database away: .*(terminating|closed)', start=start)
            running.wait_log('database away: (?!.*(terminating|closed))', start=start)
            id = system.insert_one('resize')
            assert running.process.poll() is None
            assert cpu_s(running) - used < 0.3, what
            system.execute(allow.format(**names))
            system.wait_status(id, 'failed', 4)
            running.wait_log('database is back', start=start)
            assert len(warnings(running, start)) == 2, what  # the loss, then the refusal
            assert_prompt(system)
        # And at the start of another one.
    system.execute(REFUSALS['no login'][0].format(**names))
    with run_at(system, dsn, {'resize': noter(system)}) as running:
        running.wait_log('database away')
        system.execute(REFUSALS['no login'][1].format(**names))
        running.wait_log('took over')
        assert_prompt(system)
    with run_at(system, dsn, {'resize': noter(system)}) as running:
        running.wait_log('took over')
        system.execute(REFUSALS['read-only'][0].format(**names))
        terminate(system)
        running.wait_log('database away: the database is read-only')
        before = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - before < 3


DAMAGES = {  # at run time, and its repair
    'table renamed': ('ALTER TABLE queue RENAME TO gone', 'ALTER TABLE gone RENAME TO queue'),
    'column dropped': ('ALTER TABLE stage_stats RENAME crashes TO gone',
                       'ALTER TABLE stage_stats RENAME gone TO crashes'),
    'right revoked': ('REVOKE UPDATE (status) ON queue FROM {role}', 'GRANT UPDATE (status) ON queue TO {role}'),
    'rights revoked': ('REVOKE ALL ON dispatch_stats FROM {role}',
                       'GRANT SELECT, INSERT, UPDATE ON dispatch_stats TO {role}'),
    'read-only': ('ALTER SYSTEM SET default_transaction_read_only = on; SELECT pg_reload_conf()',
                  'ALTER SYSTEM RESET default_transaction_read_only; SELECT pg_reload_conf()'),
}


def test_tables_that_are_unusable_at_run_time_are_waited_for(system, role):
    """Of the table: table renamed, column dropped, grant revoked at run time, read-only: waits."""
    dsn = system.dsn.replace('user=postgres', 'user=' + role)
    system.execute('SET default_transaction_read_only = off')  # of our own session
    with run_at(system, dsn, {'resize': noter(system)}, stats_interval='100 ms') as running:
        ready(system, running)
        for number, (what, (damage, repair)) in enumerate(sorted(DAMAGES.items())):
            wait_until(lambda: system.totals()[0] == len(system.begun()))
            start, used = len(running.log()), cpu_s(running)
            try:
                for statement in damage.split('; '):
                    system.execute(statement.format(role=role))
                if what != 'table renamed':
                    id = system.insert_one('resize')
                else:
                    system.execute('NOTIFY ingress')
                running.wait_log(' WARNING cannot ', start=start)
                if number % 2:  # and the session is lost meanwhile
                    terminate(system)
                    running.wait_log('database away', start=start)
                assert running.process.poll() is None
                assert cpu_s(running) - used < 0.5, what
            finally:
                for statement in repair.split('; '):
                    system.execute(statement.format(role=role))
            if what != 'table renamed':
                system.wait_status(id, 'failed', 4)
            assert_prompt(system, limit_s=2.5)
            running.wait_log('INFO .*(is back|works again) after', start=start)
        assert running.process.poll() is None
    assert len(system.begun()) == len(set(system.begun()))
    assert system.totals() == (len(system.begun()),) * 2


def test_a_server_in_recovery_is_waited_for_until_it_is_promoted(pg, tmp_path):
    """Of the table: database in recovery; TERM during recovery."""
    with cluster.Cluster(bindir=pg.bindir) as standby:
        with contextlib.closing(psycopg2.connect(standby.dsn())) as db:
            db.autocommit = True
            db.cursor().execute(get_schema())
        standby.stop()
        open(os.path.join(standby.base, 'data', 'standby.signal'), 'w').close()
        standby.start()
        with contextlib.closing(psycopg2.connect(standby.dsn())) as db:
            db.autocommit = True
            config = write_config(tmp_path, standby.dsn(), {'resize': 'true'})
            with Running(config) as running:
                running.wait_log('database away: the server is in recovery')
                before = time.monotonic()
                assert running.stop() == 0
                assert time.monotonic() - before < 3
            with Running(config) as running:
                running.wait_log('database away: the server is in recovery')
                with db.cursor() as cursor:
                    cursor.execute('SELECT pg_promote()')
                before = time.monotonic()
                running.wait_log('took over')
                assert time.monotonic() - before < 2.5
                assert len(warnings(running)) == 1


@pytest.mark.parametrize('mode', ['close', 'mute'])
def test_term_before_there_is_a_session_ends_it_within_3_seconds(system, link, mode):
    """Of the table: TERM before connect; a server that accepts and stays mute."""
    link.mode = mode
    with run_at(system, link.through(), {'resize': 'true'}) as running:
        wait_until(lambda: link.attempts)
        before = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - before < 3


def test_term_with_the_database_frozen_ends_it_in_time_and_the_next_start_heals(system, link):
    """Of the table: TERM with the database frozen, idle: out within STOP_TIMEOUT + 3 s."""
    with run_at(system, link.through(), {'hang': system.script('hang', 'trap "" TERM; sleep 100\n')},
                stop_timeout='1 s') as running:
        ids = system.insert('hang', 3)
        wait_until(lambda: spawned(running))
        left = system.running('hang')
        link.freeze()
        before = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert time.monotonic() - before < 1 + 3
        assert re.search(r'\bids\b.*\b%d\b' % left[0], running.log())
    link.cut()
    with system.run({'hang': noter(system)}):
        system.wait_census(failed=3)
    assert sorted(system.begun()) == ids


# -- claims and loads --------------------------------------------------------------------------------------------------

def test_b53_a_hanging_and_a_broken_stage_with_a_huge_backlog_delay_no_other(system):
    for stage in ('hang', 'broken', 'dying'):
        system.insert(stage, 20000)
    stages = {'hang': {'PROGRAM': system.script('hang', 'exec sleep 100\n'), 'PARALLELISM': 2},
              'broken': '/no/such/program', 'dying': system.script('dying', 'exit 1\n'), 'resize': noter(system)}
    with system.run(stages, stop_timeout=0) as running:
        running.wait_log('cooling stage=dying')
        running.wait_log('cooling stage=broken')
        assert_prompt(system)
        inserted = {}
        end = time.monotonic() + 3
        while time.monotonic() < end:
            before = time.monotonic()
            inserted[system.insert_one('resize')] = before
            wait_until(lambda: len(system.begun()) > len(inserted))
            assert len(system.running('hang')) <= 8
            assert len(system.running('broken')) <= 16
        late = delays(system, inserted)
        assert late[len(late) * 9 // 10] < 1
        assert late[-1] < 2  # the machine may be busy
        wait_until(lambda: not system.running('broken'))
        assert not system.execute("SELECT 1 FROM queue WHERE status = 'failed' AND stage <> 'resize'")


def test_b54_a_message_costs_at_most_two_row_updates_a_stage(system):
    system.execute("""
        CREATE TABLE written (ingress_id bigint, what text);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('application_name') LIKE 'pepsi-dispatch %' THEN
                INSERT INTO written VALUES (NEW.ingress_id, OLD.status || ' ' || NEW.status);
            END IF;
            RETURN NULL;
        END
        $$;
        CREATE TRIGGER note AFTER UPDATE ON queue FOR EACH ROW EXECUTE FUNCTION note();
        """)
    stages = {'a': system.stub('advance=b'), 'b': system.stub('advance=c'), 'c': system.stub()}
    with system.run(stages, poll_interval='50 ms'):
        system.insert('a', 50)
        failing = system.insert('c', 10, stub='fail')
        system.wait_census(done=50, failed=10)
        wait_until(lambda: system.totals()[0] == 160)
    counts = dict(system.execute('SELECT ingress_id, count(*) FROM written GROUP BY ingress_id'))
    assert all(counts[id] == 2 for id in failing)
    assert all(counts[id] == 5 for id in set(counts) - set(failing))  # three claims, two requeues


def test_b54_claims_stay_fast_behind_many_dead_rows_that_a_snapshot_holds(system):
    with locking(system, 'SELECT count(*) FROM queue') as snapshot:
        snapshot.rollback()
        snapshot.set_session(isolation_level='REPEATABLE READ')
        snapshot.cursor().execute('SELECT count(*) FROM queue')
        system.insert('resize', 100000)
        system.execute("UPDATE queue SET status = 'done'")
        with system.run({'resize': noter(system)}) as running:
            ready(system, running)
            inserted = {}
            for _ in range(30):
                before = time.monotonic()
                inserted[system.insert_one('resize')] = before
                wait_until(lambda: set(inserted) <= set(system.begun()))
        assert delays(system, inserted)[27] < 0.5


def test_b55_20000_rows_due_at_one_instant_come_in_portions_and_delay_no_other_stage(system):
    stages = {'crowd': {'PROGRAM': noter(system), 'PARALLELISM': 1, 'QUEUE_LIMIT': 20}, 'resize': noter(system)}
    system.execute("INSERT INTO queue (stage, status, timeout)"
                   " SELECT 'crowd', 'paused', now() + interval '2 seconds' FROM generate_series(1, 20000)")
    with system.run(stages) as running:
        ready(system, running)
        system.wait_begun(100)
        inserted = {}
        for _ in range(20):
            before = time.monotonic()
            inserted[system.insert_one('resize')] = before
            wait_until(lambda: set(inserted) <= set(system.begun('resize')))
            assert len(system.running('crowd')) <= 20
        late = delays(system, inserted)
        assert late[len(late) * 9 // 10] < 1
        assert late[-1] < 2
        assert 'paused' in system.census()  # it was not over before


def test_b59_rows_at_hostile_or_unknown_stages_are_never_run_nor_shown_raw(system):
    hostile = ["'; DROP TABLE queue; --", '%s%(x)s', 'a\nb', 'c\033[31md\007', '"', 'x' * 10000, '\u202e', '{a,b}']
    system.execute('INSERT INTO queue (stage) SELECT unnest(%s::text[])', hostile)
    worker = system.python('mover.py', """
import os, sys, time
for line in iter(sys.stdin.readline, ''):
    while not os.path.exists(sys.argv[1] + '.moved'):
        time.sleep(0.02)
    os.write(1, b'0\\n')
""")
    with system.run({'resize': {'PROGRAM': worker, 'PARALLELISM': 1, 'QUEUE_LIMIT': 1000}}) as running:
        running.wait_log('took over')
        system.insert('resize', 200)
        system.wait_census(pending=len(hostile), running=200)
        system.execute("UPDATE queue SET stage = (%s::text[])[1 + ingress_id %% %s] WHERE status = 'running'",
                       hostile, len(hostile))  # as a worker would
        open(system.log + '.moved', 'w').close()
        system.wait_census(pending=len(hostile) + 200)
        log = running.log()
    assert len(re.findall('WARNING', log)) <= len(hostile) + 1
    assert 'xxxx' * 300 not in log
    for line in log.splitlines():
        assert line.isprintable()
        assert re.match('20[0-9]{2}-', line)


def test_b59_a_stage_that_is_not_configured_is_reported_once_however_many_rows_go_there(system):
    with system.run({'resize': system.stub('advance=nowhere')}) as running:
        system.insert('resize', 300)
        wait_until(lambda: system.totals()[0] == 300)
        assert len(warnings(running)) == 1
    assert json.loads(call('-c', system.write_config({'resize': 'true'}), 'status', '--json').out
                      )['stages']['nowhere']['pending'] == 300


# -- rights and passwords ----------------------------------------------------------------------------------------------

def test_least_privilege_the_whole_dispatcher_works_with_exactly_the_rights_that_init_shows(system, role):
    assert system.execute("""
        SELECT has_table_privilege(%(r)s, 'queue', 'INSERT'), has_table_privilege(%(r)s, 'queue', 'DELETE'),
               has_column_privilege(%(r)s, 'queue', 'stage', 'UPDATE'),
               has_column_privilege(%(r)s, 'queue', 'timeout', 'UPDATE'),
               has_table_privilege(%(r)s, 'stage_stats', 'DELETE'), has_schema_privilege(%(r)s, 'public', 'CREATE')
        """.replace('%(r)s', "'%s'" % role)) == [(False,) * 6]
    dsn = system.dsn.replace('user=postgres', 'user=' + role)
    lost = system.insert_one('a')
    system.execute("UPDATE queue SET status = 'running'")
    stages = {'a': {'PROGRAM': system.stub(), 'MAX_RUNTIME': '1500 ms', 'PARALLELISM': 8}, 'b': system.stub()}
    with run_at(system, dsn, stages, poll_interval='300 ms') as running:
        system.wait_status(lost, 'done')
        ends = {'advance=b': 'done', 'fail': 'failed', 'crash': 'failed', 'hang': 'timeout', 'say=x hang': 'failed',
                'unfinished': 'failed', 'delete': None}
        ids = {steps: system.insert_one('a', stub={'a': steps}) for steps in ends}
        again = system.insert_one('a', stub=['pause=0.1', ''])
        wait_until(lambda: not {'running', 'pending', 'paused'} & set(system.census()))
        for steps, status in ends.items():
            row = system.row(ids[steps])
            assert (row and row.status) == status, steps
        assert system.row(again).status == 'done'
        terminate(system)  # and a new session
        running.wait_log('database is back')
        system.execute("UPDATE queue SET status = 'running' WHERE ingress_id = %s", lost)
        system.wait_status(lost, 'done')
        wait_until(lambda: system.totals()[0] == 12)
        assert 'denied' not in running.log()
    checked = call('-c', os.path.join(system.directory, 'pepsi.conf'), 'check')
    assert 'rights: enough' in checked.out + checked.err


PASSWORD = "p%(x)s %% ; # = 'q\" \\ $HOME \u00e9"


@pytest.fixture
def secret(system, role, pg):
    """The connection string of a role that needs a password, and has PASSWORD."""
    path = os.path.join(pg.base, 'data', 'pg_hba.conf')
    with open(path) as file:
        before = file.read()
    with open(path, 'w') as file:
        file.write('local all %s scram-sha-256\n' % role + before)
    system.execute('ALTER ROLE %s PASSWORD %%s' % role, PASSWORD)
    system.execute('SELECT pg_reload_conf()')
    plain = system.dsn.replace('user=postgres', 'user=' + role)

    def refused():
        try:
            psycopg2.connect(plain).close()
        except psycopg2.OperationalError:
            return True

    wait_until(refused)
    yield plain + " password='%s'" % PASSWORD.replace('\\', '\\\\').replace("'", "\\'")
    with open(path, 'w') as file:
        file.write(before)
    system.execute('SELECT pg_reload_conf()')


def test_b60_a_password_of_all_kinds_of_characters_works_and_is_shown_nowhere(system, secret, role):
    teller = system.script('teller', 'read -r id; echo "1 $*"; cat > /dev/null\n')
    config = write_config(system.directory, secret, {'tell': teller, 'broken': '/no/such', 'resize': noter(system),
                                                     'dies': system.script('dies', 'read -r id; exit 3\n')})
    with Running(config, options=('-vv',)) as running:
        ready(system, running)
        ids = [system.insert_one(stage) for stage in ('tell', 'dies', 'broken')]
        system.wait_status(ids[0], 'failed')
        system.wait_status(ids[1], 'failed')
        start = len(running.log())
        system.execute("ALTER ROLE %s PASSWORD 'another'" % role)  # refused for a while
        terminate(system)
        running.wait_log('database away: .*password authentication failed', start=start)
        id = system.insert_one('resize')
        system.execute('ALTER ROLE %s PASSWORD %%s' % role, PASSWORD)
        system.wait_status(id, 'failed', 4)
        assert len(warnings(running, start)) <= 3
        running.signal(signal.SIGUSR1)
        running.wait_log('state timer|state worker')
        commands = [word for process in [psutil.Process(running.pid)] + running.workers()
                    for word in process.cmdline()]
        log = running.log()
    shown = log + ' '.join(commands) + ''.join(str(row) for row in system.execute('SELECT state FROM queue'))
    for command in ('check', 'status'):
        result = call('-c', config, '-v', command)
        shown += result.out + result.err
    system.execute("ALTER ROLE %s PASSWORD 'another'" % role)
    for command in (['check'], ['status'], ['requeue', '--all'], ['init']):
        result = call('-c', config, *command)
        assert result.code == 69
        shown += result.out + result.err
    with open(config, 'a') as file:
        file.write('[pepsi-dispatch2]\n[stage-x]\nPROGRAM=true\nQUEUE_LIMIT=x\n')
    shown += call('-c', config).err
    assert 'QUEUE_LIMIT' in shown
    for secret_part in (PASSWORD, 'p%(x)s', '$HOME', 'another', 'password='):
        assert secret_part not in shown.replace('password=********', '')
    assert 'Traceback' not in shown


def test_b60_a_connection_string_that_is_none_is_refused_without_showing_it(tmp_path):
    for dsn in ("password='sesam open", 'postgresql://u:sesam@[bad/x', 'host=x sesam'):
        result = call('-c', write_config(tmp_path, dsn, {'resize': 'true'}))
        assert result.code == 78
        assert 'DATABASE' in result.err
        assert 'sesam' not in result.err


# -- time --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('zone, style', [('Asia/Kathmandu', 'German'), ('America/St_Johns', 'SQL, DMY')])
def test_b65_zones_and_styles_of_the_client_and_of_the_database_change_no_due_time(system, zone, style):
    system.execute("""
        DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %%I SET timezone = ''Pacific/Auckland''', current_database());
        EXECUTE format('ALTER DATABASE %%I SET datestyle = ''Postgres, YMD''', current_database());
        EXECUTE format('ALTER DATABASE %%I SET intervalstyle = ''sql_standard''', current_database());
        EXECUTE format('ALTER DATABASE %%I SET extra_float_digits = -15', current_database());
        END $$""".replace('%%', '%'))
    with system.run({'resize': system.stub()}, env={'TZ': zone, 'PGTZ': zone, 'PGDATESTYLE': style, 'LC_ALL': 'C'}):
        id = system.insert_one('resize', stub=['pause=0.6', 'pause=3600', ''])
        system.wait_begun(2)
        other = system.insert_one('resize', stub=['pause=0.6', ''])
        system.wait_status(other, 'done')
        assert system.row(id).status == 'paused'
    for each in (id, other):
        first, second = [e[0] for e in system.events('begin') if e[3] == each]
        assert 0.6 <= second - first < 2.6


def test_b65_a_wall_clock_that_jumps_by_a_day_changes_nothing(system, tmp_path):
    """The clock of Python; with faketime the C library's would jump as well, but there is no need of it here."""
    (tmp_path / 'jump').mkdir()
    (tmp_path / 'jump' / 'sitecustomize.py').write_text("""
import itertools, time
jumps, real = itertools.cycle([0, 86400, -86400, 3600, -3600]), time.time
time.time = lambda: real() + next(jumps)
""")
    stage = {'PROGRAM': system.stub(), 'MAX_RUNTIME': '1 s', 'PARALLELISM': 2}
    with system.run({'resize': stage}, env={'PYTHONPATH': str(tmp_path / 'jump')}, poll_interval='1 s') as running:
        again = system.insert_one('resize', stub=['pause=0.7', ''])
        hangs = system.insert_one('resize', stub='hang')
        system.wait_status(again, 'done', 5)
        system.wait_status(hangs, 'timeout', 5)
        days = {line[:10] for line in running.log().splitlines()}
        assert len(days) >= 2  # it did jump
        before = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - before < 3
    first, second = [e[0] for e in system.events('begin') if e[3] == again]
    assert 0.7 <= second - first < 2.7
    assert system.counts() == {'resize': Counts(2, 0, 1, 0)}
