"""The database session: what the dispatcher relies on, of the real one and of the one in the simulation.

The real one is driven by the smallest loop there is; the fake one by its world.
"""
import contextlib
import json
import math
import os
import select
import socket
import threading
import time

import pepsidispatch as m
import psutil
import psycopg2
import pytest
import support
from simulation import World, opened

CONFIG = '[stage-a]\nPROGRAM = x\n'


class Real:
    """Queue against a PostgreSQL, and a second session that plays everybody else."""

    def __init__(self, dsn):
        self.dsn = dsn
        self._other = psycopg2.connect(dsn)
        self._other.autocommit = True
        with self._other.cursor() as cursor:
            cursor.execute(m.SCHEMA)
        self.queue = m.Queue(dsn)

    def close(self):
        self.queue.close()
        self._other.close()

    def wait(self, kind, timeout_s=20.0):
        """Drive the session until a fact of this kind comes; return it."""
        deadline = time.monotonic() + timeout_s
        facts = []
        while not any(isinstance(fact, kind) for fact in facts):
            assert time.monotonic() < deadline, 'waited in vain for %s, got %s' % (kind.__name__, facts)
            fds = [] if self.queue.fd is None else [self.queue.fd]
            wait_s = min(max(0.0, self.queue.deadline - time.monotonic()), 0.2)
            select.select(fds, fds if self.queue.writing else [], [], wait_s)
            facts += self.queue.receive()
            facts += self.queue.tick()
        return next(fact for fact in facts if isinstance(fact, kind))

    def insert(self, id, stage, status='pending', due_s=None):
        self.execute("INSERT INTO queue (ingress_id, stage, status, timeout)"
                     " VALUES (coalesce(%s, nextval(pg_get_serial_sequence('queue', 'ingress_id'))), %s, %s, "
                     "CASE WHEN %s::float8 = 'infinity' THEN 'infinity' ELSE now() + %s * interval '1 s' END)",
                     id, stage, status, due_s, None if due_s == math.inf else due_s)

    def update(self, id, status):
        self.execute('UPDATE queue SET status = %s WHERE ingress_id = %s', status, id)

    def move(self, id, stage):
        self.execute('UPDATE queue SET stage = %s WHERE ingress_id = %s', stage, id)

    def delete(self, id):
        self.execute('DELETE FROM queue WHERE ingress_id = %s', id)

    def notify(self):
        self.execute('NOTIFY ingress')

    def rows(self):
        return {id: (stage, status, state.get('dispatch_error') if isinstance(state, dict) else None)
                for id, stage, status, state in self.execute('SELECT ingress_id, stage, status, state FROM queue')}

    def stats(self):
        return ({row[0]: row[1:] for row in self.execute(
            'SELECT stage, processed, failed, timeouts, crashes, processing_seconds FROM stage_stats')},
            self.execute('SELECT stages, messages FROM dispatch_stats')[0])

    def take_over(self):
        self.execute('UPDATE dispatch_stats SET epoch = epoch + 1')

    def cut(self):
        self.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE "
                     "'pepsi-dispatch %%' AND datname = current_database()")

    def allow(self, status):
        """Let rows have another status; it is final."""
        self.execute('ALTER TABLE queue DROP CONSTRAINT queue_status_check')

    @contextlib.contextmanager
    def refused(self, id):
        """While the block runs a trigger refuses every write to a row."""
        self.execute("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                     "RAISE EXCEPTION 'not this one'; END $$")
        self.execute('CREATE TRIGGER refuse BEFORE UPDATE ON queue FOR EACH ROW WHEN (OLD.ingress_id = %s) '
                     'EXECUTE FUNCTION refuse()', id)
        yield
        self.execute('DROP TRIGGER refuse ON queue')

    @contextlib.contextmanager
    def locked(self, id):
        """While the block runs somebody else holds the lock of a row."""
        with contextlib.closing(psycopg2.connect(self.dsn)) as holder:
            with holder.cursor() as cursor:
                cursor.execute('SELECT FROM queue WHERE ingress_id = %s FOR UPDATE', (id,))
            yield
            holder.rollback()

    def execute(self, sql, *parameters):
        with self._other.cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall() if cursor.description else None


class Fake:
    """FakeQueue in a world whose dispatcher does nothing."""

    def __init__(self):
        self.world = World(CONFIG)
        self.world.claiming = self.world.settling = self.world.replied = lambda *_: None  # the checks are for it
        self.world.sweeping = lambda held: None
        self.queue = self.world.queue
        self._table = self.world.table

    def wait(self, kind, timeout_s=20.0):
        deadline, facts = self.world.now + timeout_s, self.queue.receive() + self.queue.tick()
        while not any(isinstance(fact, kind) for fact in facts):
            assert self.world.now < deadline, 'waited in vain for %s, got %s' % (kind.__name__, facts)
            if self.world.events and self.world.events[0][0] <= self.queue.deadline:
                self.world.step()
            else:
                self.world.now = max(self.world.now, self.queue.deadline)
            facts += self.queue.receive()
            facts += self.queue.tick()
        return next(fact for fact in facts if isinstance(fact, kind))

    def insert(self, id, stage, status='pending', due_s=None):
        self._table.insert(stage, status, None if due_s is None else self.world.now + due_s, id)

    def update(self, id, status):
        self._table.update(id, status=status)

    def move(self, id, stage):
        self._table.update(id, stage=stage)

    def delete(self, id):
        del self._table.rows[id]

    def notify(self):
        self._table.notify()

    def rows(self):
        return {id: (row.stage, row.status, row.state.get('dispatch_error')) for id, row in self._table.rows.items()}

    def stats(self):
        return {stage: tuple(row) for stage, row in self._table.stats.items()}, tuple(self._table.totals)

    def take_over(self):
        self._table.epoch += 1

    def cut(self):
        self.queue.snap()

    def allow(self, status):
        pass

    @contextlib.contextmanager
    def refused(self, id):
        self._table.bad[id] = math.inf
        yield
        del self._table.bad[id]

    @contextlib.contextmanager
    def locked(self, id):
        self._table.locked[id] = math.inf
        yield
        del self._table.locked[id]


@contextlib.contextmanager
def connected(dsn):
    """A real session that is ready, for test_planted."""
    with contextlib.closing(Real(dsn)) as real:
        real.taken = real.wait(m.Taken)
        yield real


@pytest.fixture
def real(dsn):
    """What only the real one has to be tested for."""
    with connected(dsn) as ready:
        yield ready


@pytest.fixture(params=['real', 'fake'])
def system(request):
    """A session that is not connected yet, and everybody else."""
    if request.param == 'fake':
        fake = Fake()
        with opened(fake.world):
            yield fake
        return
    dsn = request.getfixturevalue('dsn')

    with contextlib.closing(Real(dsn)) as real:
        yield real


@pytest.fixture
def ready(system):
    """The same, connected, with the lock."""
    system.taken = system.wait(m.Taken)
    return system


def ask(system, start):
    """Start an operation; return the value of its reply."""
    assert start == []
    assert system.queue.busy()
    reply = system.wait(m.Reply)
    assert reply.error is None and not system.queue.busy()
    return reply.value


def claim(system, wants, held=()):
    return sorted(ask(system, system.queue.claim([m.Want(*want) for want in wants], list(held))))


def settle(system, *outcomes):
    return ask(system, system.queue.settle(outcomes))


def revive(system, sweep=False, held=()):
    return {(what, stage): (rows, next_s) for what, stage, rows, next_s
            in ask(system, system.queue.revive(list(held), sweep))}


def failed(id, stage='a', error='status: 1 no'):
    return m.Outcome(id, stage, m.Row.FAILED, error, column='failed')


def release(id, stage='a'):
    return m.Outcome(id, stage, m.Row.PENDING, ended=False)


# -- life-cycle --------------------------------------------------------------------------------------------------------

def test_a_session_is_away_until_it_has_the_lock(system):
    assert system.queue.link is m.Link.AWAY and system.queue.busy()
    taken = system.wait(m.Taken)
    assert system.queue.link is m.Link.READY and not system.queue.busy()
    assert (taken.epoch, taken.flush) == (system.queue.epoch, 0) == (1, 0)
    assert system.queue.deadline == math.inf and system.queue.fd is not None


def test_a_session_that_is_cut_is_lost_and_comes_back_with_its_epoch(ready):
    ready.cut()
    ready.wait(m.Lost)
    assert ready.queue.link is m.Link.AWAY and ready.queue.busy() and ready.queue.fd is None
    taken = ready.wait(m.Taken)
    assert taken.epoch == ready.taken.epoch and taken.system == ready.taken.system


def test_a_session_that_was_cut_does_not_come_back_after_another_dispatcher(ready):
    ready.take_over()
    ready.cut()
    assert ready.wait(m.Replaced).epoch == ready.taken.epoch + 1


def test_a_session_can_be_given_up(ready):
    assert [type(fact) for fact in ready.queue.give_up('lost its lock')] == [m.Lost]
    assert ready.queue.busy()
    ready.wait(m.Taken)


def test_a_notification_rings_once_however_many_come(ready):
    ready.queue.rung()
    for _ in range(3):
        ready.notify()
    claim(ready, [('a', 1, m.FIRST_ID)])
    claim(ready, [('a', 1, m.FIRST_ID)])
    assert ready.queue.rung() and not ready.queue.rung()


def test_a_notification_that_comes_right_behind_a_reply_rings(real):
    """One read brings both: libpq has both, and the selector will not say so again."""
    real.queue.rung()
    assert real.queue.claim([m.Want('a', 1, m.FIRST_ID)], []) == []
    with peeking(real) as arrived:
        support.wait_until(lambda: b'Z\0\0\0\5I' in arrived(), what='the reply')
        real.notify()
        support.wait_until(lambda: arrived().endswith(b'ingress\0\0'), what='the notification')
    real.wait(m.Reply)
    assert real.queue.rung()


def hears(real):
    """Tell whether a statement right after an insert brings a notification."""
    real.insert(None, 'a')
    claim(real, [('none', 1, m.FIRST_ID)])
    return bool(real.queue.rung())


def hush(real, silent):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, 'HUSH', m.HUSH.replace(m.CROWDED, 'true'))
        facts = real.queue.hush(silent)
        return facts[0].value if facts else real.wait(m.Reply).value


def test_who_inserts_is_not_silent_where_nobody_waits(real):
    assert hush(real, False) is False
    assert ask(real, real.queue.hush(True)) is False
    assert hears(real)


def test_a_crowd_of_those_who_notify_is_seen(real):
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(contextlib.closing(psycopg2.connect(real.dsn))) for _ in range(6)]
        stop = threading.Event()

        def notify(connection):
            connection.autocommit = True
            with connection.cursor() as cursor:
                while not stop.is_set():
                    cursor.execute('NOTIFY elsewhere')

        threads = [threading.Thread(target=notify, args=(connection,)) for connection in crowd]
        for thread in threads:
            thread.start()
        try:
            support.wait_until(lambda: real.execute('SELECT ' + m.CROWDED)[0][0], what='somebody who waits')
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not real.execute('SELECT ' + m.CROWDED)[0][0]


def test_who_inserts_is_silent_while_that_is_in_force(real):
    assert hears(real)
    for _ in range(2):
        assert hush(real, True) is True
        assert not hears(real)
        assert hush(real, False) is False
        assert hears(real)
    for silent in (False, True, True, False):  # twice is no mistake
        assert hush(real, silent) is silent
    assert hears(real)
    hush(real, True)
    real.cut()
    real.wait(m.Lost)
    real.wait(m.Taken)
    assert hears(real)


def test_notifications_are_not_waited_for_before_the_last_silent_transaction_has_ended(real):
    with contextlib.closing(psycopg2.connect(real.dsn)) as other:
        hush(real, True)
        other.cursor().execute("INSERT INTO queue (stage) VALUES ('a')")
        assert hush(real, False) is True
        assert not hears(real)
        real.cut()  # nor by who comes after us
        real.wait(m.Lost)
        real.wait(m.Taken)
        assert hears(real)
        assert hush(real, False) is True
        other.commit()
        assert hush(real, False) is False
        assert len(claim(real, [('a', 9, m.FIRST_ID)])) == 3


def test_who_was_not_told_to_be_silent_notifies(real):
    with contextlib.closing(psycopg2.connect(real.dsn)) as other:
        other.cursor().execute("INSERT INTO queue (stage) VALUES ('a')")
        assert hush(real, True) is True
        assert not hears(real)
        other.commit()
        claim(real, [('none', 1, m.FIRST_ID)])
        assert real.queue.rung()


def test_while_it_is_asked_for_the_end_of_silent_transactions_all_others_notify(real):
    hush(real, True)
    with contextlib.closing(psycopg2.connect(real.dsn)) as asker:
        asker.cursor().execute(m.ALL_HEARD)
        assert hears(real)
        asker.commit()
        assert not hears(real)


def test_a_hush_that_fails_may_have_been_heard(real):
    """An advisory lock that was got stays when its statement fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, 'HUSH', m.HUSH.replace(m.CROWDED, 'true') + ' UNION ALL SELECT 1 / (random() * 0)::int = 0')
        assert real.queue.hush(True) == []
        assert real.wait(m.Reply).error is not None
    assert not hears(real)
    assert hush(real, False) is False
    assert hears(real)
    assert hush(real, True) is True
    assert hush(real, False) is False
    assert hears(real)


def test_a_notification_that_comes_right_behind_an_error_rings(real):
    real.queue.rung()
    with contextlib.closing(psycopg2.connect(real.dsn)) as other:
        other.cursor().execute('LOCK TABLE queue')
        assert real.queue.strangers(['a']) == []
        with peeking(real) as arrived:
            support.wait_until(lambda: b'55P03' in arrived(), what='the error')
            other.rollback()
            real.notify()
            support.wait_until(lambda: arrived().endswith(b'ingress\0\0'), what='the notification')
    assert real.wait(m.Reply).error is not None
    assert real.queue.rung()


def test_a_reply_that_comes_right_before_the_end_of_the_session_counts(real):
    real.insert(1, 'a')
    assert real.queue.claim([m.Want('a', 1, m.FIRST_ID)], []) == []
    with peeking(real) as arrived:
        support.wait_until(lambda: b'Z\0\0\0\5I' in arrived(), what='the reply')
        real.cut()
        support.wait_until(lambda: b'57P01' in arrived() and not psutil.pid_exists(real.queue.backend), what='the end')
    assert real.wait(m.Reply).value == [(1, 'a')]
    real.wait(m.Taken)


@contextlib.contextmanager
def peeking(real):
    """A function that returns what has arrived from the server and was not read."""
    def arrived():
        try:
            return peek.recv(65536, socket.MSG_PEEK)
        except BlockingIOError:
            return b''

    with contextlib.closing(socket.socket(fileno=os.dup(real.queue.fd))) as peek:
        peek.setblocking(False)
        yield arrived


def test_an_insert_and_a_change_of_a_row_that_does_not_run_ring(ready):
    def rings(do, *arguments):
        do(*arguments)
        claim(ready, [('none', 1, m.FIRST_ID)])
        return ready.queue.rung()

    assert rings(ready.insert, 1, 'a')
    assert rings(ready.move, 1, 'b')
    assert rings(ready.update, 1, 'paused')
    assert not rings(ready.update, 1, 'done')
    assert rings(ready.update, 1, 'pending')
    assert not rings(ready.update, 1, 'running')
    assert not rings(ready.move, 1, 'a')
    assert not rings(ready.update, 1, 'pending')  # heard at the answer
    assert not rings(ready.update, 1, 'pending')


def test_nothing_that_the_session_does_rings(ready):
    ready.insert(1, 'a')
    ready.insert(2, 'a', 'paused', -1.0)
    claim(ready, [('a', 1, m.FIRST_ID)])
    ready.queue.rung()
    settle(ready, release(1))
    revive(ready)
    claim(ready, [('a', 5, m.FIRST_ID)])
    settle(ready, failed(1), release(2))
    claim(ready, [('none', 5, m.FIRST_ID)])
    assert not ready.queue.rung()


# -- claim -------------------------------------------------------------------------------------------------------------

def test_a_claim_takes_the_lowest_pending_ids_of_each_stage_up_to_its_cap(ready):
    for id, stage in ((5, 'a'), (3, 'a'), (8, 'a'), (4, 'b'), (9, 'b'), (1, 'c')):
        ready.insert(id, stage)
    assert claim(ready, [('a', 2, m.FIRST_ID), ('b', 5, m.FIRST_ID)]) == [(3, 'a'), (4, 'b'), (5, 'a'), (9, 'b')]
    assert {id: row[1] for id, row in ready.rows().items()} == {
        1: 'pending', 3: 'running', 4: 'running', 5: 'running', 8: 'pending', 9: 'running'}
    assert claim(ready, [('a', 2, m.FIRST_ID)]) == [(8, 'a')]
    assert claim(ready, [('a', 2, m.FIRST_ID)]) == []


def test_a_claim_takes_nothing_below_its_floor_and_nothing_held(ready):
    for id in (1, 2, 3, 4, 2 ** 63 - 1):
        ready.insert(id, 'a')
    assert claim(ready, [('a', 9, 3)], held=[4]) == [(3, 'a'), (2 ** 63 - 1, 'a')]
    assert claim(ready, [('a', 1, m.FIRST_ID)], held=[1, 77]) == [(2, 'a')]


def test_a_claim_takes_pending_rows_only(ready):
    for id, status in enumerate(['running', 'paused', 'done', 'failed', 'timeout', 'pending']):
        ready.insert(id, 'a', status)
    assert claim(ready, [('a', 9, m.FIRST_ID)]) == [(5, 'a')]


def test_a_locked_row_is_passed_over_and_the_session_says_so(ready):
    for id in (1, 2, 3):
        ready.insert(id, 'a')
    assert not ready.queue.skipping()
    with ready.locked(1):
        assert claim(ready, [('a', 2, m.FIRST_ID)]) == [(2, 'a'), (3, 'a')]
        assert ready.queue.skipping()
    assert claim(ready, [('a', 2, m.FIRST_ID)]) == [(1, 'a')]


# -- settle ------------------------------------------------------------------------------------------------------------

def test_an_outcome_is_written_where_the_row_still_runs_at_the_stage(ready):
    ready.insert(1, 'a', 'running')
    ready.insert(2, 'a', 'running')
    assert settle(ready, failed(1), release(2)) == [m.Settled(1, 'failed', 'a', None, True),
                                                    m.Settled(2, 'pending', 'a', None, True)]
    assert ready.rows() == {1: ('a', 'failed', 'status: 1 no'), 2: ('a', 'pending', None)}


def test_a_row_that_runs_at_another_stage_has_advanced_whatever_the_outcome_says(ready):
    ready.insert(1, 'b', 'running')
    assert settle(ready, failed(1)) == [m.Settled(1, 'pending', 'b', None, True)]
    assert ready.rows() == {1: ('b', 'pending', None)}


@pytest.mark.parametrize('status', ['pending', 'done', 'failed', 'timeout'])
def test_a_row_that_does_not_run_is_left_alone_and_reported(ready, status):
    ready.insert(1, 'a', status)
    assert settle(ready, failed(1)) == [m.Settled(1, status, 'a', None, False)]
    assert ready.rows() == {1: ('a', status, None)}


def test_a_row_that_is_gone_is_reported(ready):
    assert settle(ready, failed(1)) == [m.Settled(1, None, None, None, False)]


def test_a_paused_row_is_reported_with_the_seconds_until_it_is_due(ready):
    for id, due_s in ((1, 50.0), (2, None), (3, math.inf), (4, -5.0), (5, 1e10)):
        ready.insert(id, 'a', 'paused', due_s)
    due = [settled.due_s for settled in settle(ready, *map(failed, (1, 2, 3, 4, 5)))]
    assert due[0] == pytest.approx(50, abs=10) and due[1] is None and due[2] is None
    assert due[3] == 0 and due[4] == 1e9


def test_sending_an_outcome_again_is_harmless(ready):
    ready.insert(1, 'a', 'running')
    settle(ready, release(1))
    assert claim(ready, [('a', 1, m.FIRST_ID)]) == [(1, 'a')]
    ready.update(1, 'done')
    assert settle(ready, release(1)) == [m.Settled(1, 'done', 'a', None, False)]


def test_an_outcome_of_a_locked_row_is_not_confirmed_and_the_others_are(ready):
    ready.insert(1, 'a', 'running')
    ready.insert(2, 'a', 'running')
    with ready.locked(1):
        assert [s.id for s in settle(ready, failed(1), failed(2))] == [2]
    assert [s.id for s in settle(ready, failed(1))] == [1]


# -- exchange ----------------------------------------------------------------------------------------------------------

def exchange(system, outcomes, wants, held):
    settled, rows = ask(system, system.queue.exchange(outcomes, [m.Want(*want) for want in wants], list(held)))
    return settled, rows if rows is None else sorted(rows)


def test_outcomes_are_written_and_rows_claimed_at_once(ready):
    for id, stage, status in ((1, 'a', 'running'), (2, 'b', 'running'), (3, 'a', 'done'), (4, 'a', 'pending'),
                              (5, 'b', 'pending'), (6, 'c', 'pending')):
        ready.insert(id, stage, status)
    settled, rows = exchange(ready, [failed(1), failed(2), failed(3), failed(9)],
                             [('a', 5, m.FIRST_ID), ('b', 5, m.FIRST_ID)], [1, 2, 3, 9])
    assert settled == [m.Settled(1, 'failed', 'a', None, True), m.Settled(2, 'pending', 'b', None, True),
                       m.Settled(3, 'done', 'a', None, False), m.Settled(9, None, None, None, False)]
    assert rows == [(4, 'a'), (5, 'b')]  # not 2, which became pending by this very statement
    assert {id: row[1] for id, row in ready.rows().items()} == {
        1: 'failed', 2: 'pending', 3: 'done', 4: 'running', 5: 'running', 6: 'pending'}


def test_an_exchange_may_hold_very_many_ids(ready):
    ready.insert(1, 'a', 'running')
    ready.insert(5000, 'a')
    ready.insert(5001, 'a')
    settled, rows = exchange(ready, [release(1)], [('a', 5, m.FIRST_ID)], range(1, 5001))
    assert [s.id for s in settled] == [1] and rows == [(5001, 'a')]


@pytest.mark.parametrize('locked', [1, 2])
def test_an_exchange_that_meets_a_lock_does_all_the_rest(ready, locked):
    for id, status in ((1, 'running'), (2, 'pending'), (3, 'running'), (4, 'pending')):
        ready.insert(id, 'a', status)
    with ready.locked(locked):
        settled, rows = exchange(ready, [failed(1), failed(3)], [('a', 5, m.FIRST_ID)], [1, 3])
    assert [s.id for s in settled] == [id for id in (1, 3) if id != locked]
    assert [id for id, _ in rows] == [id for id in (2, 4) if id != locked]


def test_an_exchange_with_a_row_that_cannot_be_written_does_all_the_rest(ready):
    for id, status in ((1, 'running'), (2, 'pending'), (3, 'running')):
        ready.insert(id, 'a', status)
    with ready.refused(1):
        settled, rows = exchange(ready, [failed(1), failed(3)], [('a', 5, m.FIRST_ID)], [1, 3])
    assert [s.id for s in settled] == [3] and rows == [(2, 'a')]
    assert [s.id for s in settle(ready, failed(1))] == [1]


@pytest.mark.parametrize('status', ['claimed', 'reset', 'found'])
def test_a_status_of_somebody_else_is_no_claim(ready, status):
    ready.allow(status)
    ready.insert(1, 'a', status)
    settled, rows = exchange(ready, [failed(1)], [('a', 5, m.FIRST_ID)], [1])
    assert settled == [m.Settled(1, status, 'a', None, False)] and rows == []


# -- revive ------------------------------------------------------------------------------------------------------------

def test_due_rows_become_pending_and_the_next_due_time_is_told(ready):
    for id, due_s in ((1, -1.0), (2, 30.0), (3, 90.0), (4, None), (5, math.inf), (6, -2.0)):
        ready.insert(id, 'a', 'paused', due_s)
    reply = revive(ready, held=[6])
    assert reply['retried', 'a'] == (1, None) and reply['ripe', None] == (1, None)
    assert reply['next', None][1] == pytest.approx(30, abs=10)
    assert [status for _, (_, status, _) in sorted(ready.rows().items())] == ['pending'] + ['paused'] * 5
    assert revive(ready, held=[2, 3, 6])['next', None] == (0, None)


def test_without_a_sweep_no_running_row_is_touched(ready):
    ready.insert(1, 'a', 'running')
    reply = revive(ready)
    assert reply['lost', None] == (0, None) and ready.rows()[1][1] == 'running'


def test_a_sweep_resets_running_rows_that_are_not_held_at_any_stage(ready):
    for id, stage in ((1, 'a'), (2, 'a'), (3, 'elsewhere')):
        ready.insert(id, stage, 'running')
    ready.insert(4, 'a', 'done')
    reply = revive(ready, sweep=True, held=[2])
    assert (reply['reset', 'a'], reply['reset', 'elsewhere']) == ((1, None), (1, None))
    assert reply['lost', None] == (2, None) and reply['lock', None][0] == 1
    assert [status for _, (_, status, _) in sorted(ready.rows().items())] == ['pending', 'running', 'pending', 'done']


def test_locked_rows_are_counted_and_left_for_later(ready):
    ready.insert(1, 'a', 'running')
    ready.insert(2, 'a', 'paused', -1.0)
    for id, what, found in ((1, 'reset', 'lost'), (2, 'retried', 'ripe')):
        with ready.locked(id):
            reply = revive(ready, sweep=True)
        assert reply[found, None] == (1, None) and (what, 'a') not in reply
        assert revive(ready, sweep=True)[what, 'a'] == (1, None)
        ready.update(2, 'paused')
    assert ready.rows()[1][1] == 'pending'


def test_pending_rows_of_other_stages_are_found(ready):
    for id, stage, status in ((1, 'a', 'pending'), (2, 'b', 'pending'), (3, 'b', 'pending'), (4, 'c', 'done')):
        ready.insert(id, stage, status)
    assert [tuple(row) for row in ask(ready, ready.queue.strangers(['a', 'z']))] == [('b',)]
    assert sorted(row[0] for row in ask(ready, ready.queue.strangers([]))) == ['a', 'b']


# -- flush -------------------------------------------------------------------------------------------------------------

def batch(number, epoch=1):
    return {'stages': ['a', 'b'], 'processed': [3, 0], 'failed': [1, 0], 'timeouts': [0, 1], 'crashes': [0, 2],
            'seconds': [0.5, 0.0], 'total': 7, 'messages': 4, 'flush': number, 'epoch': epoch}


def test_a_batch_of_statistics_is_added_once(ready):
    assert ask(ready, ready.queue.flush(batch(1))) == [(1, 1, 0)]
    assert ask(ready, ready.queue.flush(batch(1))) == [(None, 1, 1)]
    assert ask(ready, ready.queue.flush(batch(2))) == [(2, 1, 1)]
    assert ready.stats() == ({'a': (6, 2, 0, 0, 1.0), 'b': (0, 0, 2, 4, 0.0)}, (14, 8))


def test_a_batch_of_another_epoch_is_not_added(ready):
    ready.take_over()
    assert ask(ready, ready.queue.flush(batch(1))) == [(None, 2, 0)]
    assert ready.stats() == ({}, (0, 0))


def test_a_batch_without_stages_is_added(ready):
    empty = dict(batch(1), stages=[], processed=[], failed=[], timeouts=[], crashes=[], seconds=[], total=0)
    assert ask(ready, ready.queue.flush(empty)) == [(1, 1, 0)]
    assert ready.stats() == ({}, (0, 4))
    assert json.dumps(empty)
