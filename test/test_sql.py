"""What each statement of the dispatcher does and what it leaves alone, on a real PostgreSQL."""
import contextlib
import io
import re
import threading
import time

import psycopg2
import psycopg2.errorcodes
import pytest
import support

import pepsidispatch
from pepsidispatch import FIRST_ID, LAST_ID, LOCK_KEY, array

CLAIMS = {'prepared': pepsidispatch.PREPARED_CLAIM, 'plain': pepsidispatch.CLAIM,
          'skipping': pepsidispatch.CLAIM_SKIPPING}
SETTLES = {'prepared': pepsidispatch.PREPARED_SETTLE, 'plain': pepsidispatch.SETTLE,
           'skipping': pepsidispatch.SETTLE_SKIPPING}
WAITING = [form for form in CLAIMS if form != 'skipping']

HOSTILE = ["'; DROP TABLE queue; --", '"', "'", '\\', 'a\\', '%', '%s', '%(stages)s', '{a,b}', 'NULL', 'null', '', ' ',
           'a,b', 'line\nfeed', 'tab\t', '\x01\x1b[31m', '\u2028\u00e9\U0001f600', '$1', 'x' * 10000]

# A queue that somebody else made: more columns, no check, nullable everywhere it can be.
FOREIGN = """
CREATE TABLE queue (
    ingress_id bigint PRIMARY KEY,
    priority integer,
    stage text,
    status text DEFAULT 'pending',
    timeout timestamptz,
    state jsonb,
    received timestamptz DEFAULT now()
)
"""


@pytest.fixture(scope='module')
def home(pg):
    """The connection string of a database with the tables, for all tests that leave them as they are."""
    with contextlib.closing(psycopg2.connect(pg.dsn())) as admin:
        admin.autocommit = True
        admin.cursor().execute('CREATE DATABASE statements TEMPLATE template0')
        with contextlib.closing(psycopg2.connect(pg.dsn('statements'))) as connection, connection:
            connection.cursor().execute(pepsidispatch.SCHEMA)
        yield pg.dsn('statements')
        admin.cursor().execute('DROP DATABASE statements')


@pytest.fixture
def sql(home):
    """A cursor of somebody else's session, in autocommit; the tables are empty."""
    with contextlib.closing(psycopg2.connect(home)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute('TRUNCATE queue, stage_stats; UPDATE dispatch_stats SET stages = 0, messages = 0, epoch = 0,'
                           ' flush = 0')
            yield cursor


@pytest.fixture
def us(sql, home):
    """A cursor of the dispatcher's session."""
    with dispatcher_session(home) as cursor:
        yield cursor


@pytest.fixture
def theirs(sql, home):
    """Cursors of somebody else's session and of the dispatcher's, in a schema with a queue that somebody else made."""
    sql.execute('CREATE SCHEMA theirs; SET search_path = theirs')
    sql.execute(FOREIGN + ';' + pepsidispatch.SCHEMA)
    try:
        with dispatcher_session(home, options='-c search_path=theirs') as us:
            yield sql, us
    finally:
        sql.execute('DROP SCHEMA theirs CASCADE')


def each(forms, sql):
    """Yield the names of the forms of a statement, with the queue empty each time."""
    for form in forms:
        sql.execute('TRUNCATE queue')
        yield form


@contextlib.contextmanager
def dispatcher_session(dsn, **options):
    """A cursor of a session that is made what the dispatcher's is."""
    with contextlib.closing(psycopg2.connect(dsn, **options)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(pepsidispatch.SETTINGS, {'names': list(pepsidispatch.SESSION),
                                                'values': list(pepsidispatch.SESSION.values())})
        cursor.execute(pepsidispatch.RELAX)
        cursor.execute(pepsidispatch.PREPARE)
        yield cursor


def claim(us, stages, held=(), floor=FIRST_ID, form='prepared'):
    """Claim; stages: name -> cap. Returns (id, stage) in order of ids."""
    us.execute(CLAIMS[form], {'stages': array(list(stages)), 'caps': array(list(stages.values())),
                              'floors': array([floor] * len(stages)), 'held': array(list(held))})
    return sorted(us.fetchall())


def settle(us, *outcomes, form='prepared', durable='off'):
    """Settle outcomes, each (id, stage, verdict, error). Returns (found, written): id -> (status, stage, due_s)."""
    ids, stages, verdicts, errors = zip(*outcomes)
    us.execute(SETTLES[form], {'ids': array(ids), 'stages': array(stages), 'verdicts': array(verdicts),
                               'errors': array(errors), 'durable': durable})
    found, written = {}, {}
    for id, status, stage, due_s, mark in us.fetchall():
        (written if mark is None else found)[id] = (status, stage, due_s)
    return found, written


def exchange(us, outcomes, stages, held=()):
    """Settle and claim in one statement. Returns (found, written) as settle() does, and what claim() does."""
    ids, at, verdicts, errors = zip(*outcomes)
    us.execute(pepsidispatch.PREPARED_EXCHANGE, {
        'ids': array(ids), 'stages': array(at), 'verdicts': array(verdicts), 'errors': array(errors), 'durable': 'off',
        'wanted': array(list(stages)), 'caps': array(list(stages.values())), 'floors': array([FIRST_ID] * len(stages)),
        'held': array(list(held))})
    found, written, claimed = {}, {}, []
    for id, status, stage, due_s, mark in us.fetchall():
        if due_s == -1:
            claimed.append((id, stage))
        else:
            (written if mark is None else found)[id] = (status, stage, due_s)
    return found, written, sorted(claimed)


def revive(us, held=(), sweep=False, limit=1000):
    """Retry and, with sweep, reset. Returns (counts, seconds until the next is due): counts has a number for each of
    lock, reset, retried, lost, ripe."""
    us.execute(pepsidispatch.SWEEP if sweep else pepsidispatch.REVIVE,
               {'held': array(list(held)), 'sweep': sweep, 'limit': limit, 'key': LOCK_KEY})
    counts, next_s = dict.fromkeys(['lock', 'reset', 'retried', 'lost', 'ripe'], 0), None
    for what, _, number, due_s in us.fetchall():
        if what == 'next':
            next_s = due_s
        else:
            counts[what] += number
    return counts, next_s


def flush(us, number, epoch, stages, total=0, messages=0):
    """Flush statistics; stages: name -> (processed, failed, timeouts, crashes, seconds). Returns what FLUSH says."""
    columns = list(zip(*stages.values())) or [()] * 5
    us.execute(pepsidispatch.FLUSH, dict(
        zip(('processed', 'failed', 'timeouts', 'crashes', 'seconds'), map(array, columns)),
        stages=array(list(stages)), total=total, messages=messages, flush=number, epoch=epoch))
    [row] = us.fetchall()
    return row


def insert(sql, id, stage='a', status='pending', timeout=None, state='{}'):
    """Add a row; timeout is an SQL expression, state is JSON."""
    sql.execute('INSERT INTO queue (ingress_id, stage, status, timeout, state) VALUES (%%s, %%s, %%s, %s, %%s)'
                % (timeout or 'NULL'), (id, stage, status, state))


def rows(sql, columns='status'):
    """The queue as id -> columns, a tuple if there are several of them."""
    sql.execute('SELECT ingress_id, %s FROM queue' % columns)
    return {row[0]: row[1] if len(row) == 2 else row[1:] for row in sql.fetchall()}


@contextlib.contextmanager
def transaction(home, *statements):
    """A session of somebody else that has run statements and has not committed; yields its connection."""
    with contextlib.closing(psycopg2.connect(home)) as connection:
        for statement in statements:
            connection.cursor().execute(statement)
        yield connection
        connection.rollback()  # the server is done with it when this returns, unlike with close()


def while_waiting(sql, us, call, other):
    """Make a call in a session that waits for a lock of another transaction; commit that, and return the result."""
    us.execute("SET lock_timeout = '30s'")  # the busiest machine commits before
    pid, results = us.connection.get_backend_pid(), []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def waits():
        sql.execute('SELECT cardinality(pg_blocking_pids(%s))', (pid,))
        return sql.fetchone()[0]

    try:
        support.wait_until(waits, what='the statement to wait for the lock')
    finally:
        other.commit()
        thread.join(30)
    return results[0]


def assert_gives_up_on_the_lock(call):
    began = time.monotonic()
    with pytest.raises(psycopg2.OperationalError) as error:
        call()
    assert error.value.pgcode == psycopg2.errorcodes.LOCK_NOT_AVAILABLE == pepsidispatch.LOCKED
    assert time.monotonic() - began < 10


# claim

def test_a_claim_takes_the_lowest_ids_of_each_stage_in_numeric_order(sql, us):
    for form in each(CLAIMS, sql):
        for id in (LAST_ID, 10, 9, 1000000000000, -5, FIRST_ID, 2 ** 31):
            insert(sql, id, 'a')
        insert(sql, 7, 'b')
        insert(sql, 8, 'c')
        assert claim(us, {'a': 4, 'b': 4, 'none': 4}, form=form) == [
            (FIRST_ID, 'a'), (-5, 'a'), (7, 'b'), (9, 'a'), (10, 'a')]
        assert claim(us, {'a': 10}, form=form) == [(2 ** 31, 'a'), (1000000000000, 'a'), (LAST_ID, 'a')]
        assert [id for id, status in rows(sql).items() if status != 'running'] == [8]


def test_a_claim_leaves_rows_alone_that_are_held_or_below_the_floor_or_not_pending(sql, us):
    for form in each(CLAIMS, sql):
        statuses = ['pending'] * 5 + ['running', 'paused', 'done', 'failed', 'timeout']
        for id, status in enumerate(statuses):
            insert(sql, id, status=status, timeout='now()')
        assert claim(us, {'a': 100}, held=[2, 3, LAST_ID, FIRST_ID], floor=1, form=form) == [(1, 'a'), (4, 'a')]
        assert claim(us, {'a': 100}, held=[0, 2, 3], form=form) == []
        assert claim(us, {'a': 100}, floor=LAST_ID, form=form) == []
        statuses[1] = statuses[4] = 'running'
        assert rows(sql) == dict(enumerate(statuses))


def test_a_claim_finds_hostile_stage_names_and_executes_none_of_them(sql, us):
    for form in each(CLAIMS, sql):
        for id, stage in enumerate(HOSTILE):
            insert(sql, id, stage)
        assert claim(us, dict.fromkeys(HOSTILE, 2), form=form) == list(enumerate(HOSTILE))


def test_a_claim_leaves_rows_without_a_stage_alone(theirs):
    sql, us = theirs
    for form in each(CLAIMS, sql):
        insert(sql, 1, None)
        insert(sql, 2, 'a', state=None)
        assert claim(us, {'a': 10, 'NULL': 10}, form=form) == [(2, 'a')]
        assert rows(sql) == {1: 'pending', 2: 'running'}


def test_a_claim_gives_up_on_a_locked_row_within_the_lock_timeout_and_claims_nothing(sql, us, home):
    for form in each(WAITING, sql):
        for id in (1, 2, 3):
            insert(sql, id)
        with transaction(home, "UPDATE queue SET state = '{}' WHERE ingress_id = 2"):
            assert_gives_up_on_the_lock(lambda form=form: claim(us, {'a': 10}, form=form))
            assert set(rows(sql).values()) == {'pending'}
        assert len(claim(us, {'a': 10}, form=form)) == 3


def test_a_skipping_claim_passes_over_locked_rows_and_fills_up_behind_them(sql, us, home):
    for id in range(1, 7):
        insert(sql, id)
    with transaction(home, "UPDATE queue SET state = '{}' WHERE ingress_id IN (1, 3)"):
        assert claim(us, {'a': 3}, form='skipping') == [(2, 'a'), (4, 'a'), (5, 'a')]
    assert claim(us, {'a': 3}, form='skipping') == [(1, 'a'), (3, 'a'), (6, 'a')]


@pytest.mark.parametrize('change, claimed, left', [
    ("UPDATE queue SET status = 'done'", None, ('a', 'done')),
    ("UPDATE queue SET status = 'paused', timeout = 'infinity'", None, ('a', 'paused')),
    ("UPDATE queue SET status = 'running'", None, ('a', 'running')),
    ("UPDATE queue SET stage = 'elsewhere'", None, ('elsewhere', 'pending')),
    ("UPDATE queue SET stage = 'b'", 'b', ('b', 'running')),
    ("UPDATE queue SET state = '{\"touched\": true}'", 'a', ('a', 'running')),
    ('DELETE FROM queue', None, None),
], ids=['finished', 'paused', 'running', 'moved away', 'moved within the claim', 'touched', 'deleted'])
def test_a_claim_judges_a_row_by_what_it_is_when_its_lock_is_free(sql, us, home, change, claimed, left):
    for form in each(WAITING, sql):
        for id in (1, 2, 3):
            insert(sql, id)
        with transaction(home, change + ' WHERE ingress_id = 2') as other:
            got = while_waiting(sql, us, lambda form=form: claim(us, {'a': 10, 'b': 10}, form=form), other)
        assert got == sorted([(1, 'a'), (3, 'a')] + [(2, claimed)] * (claimed is not None))
        assert rows(sql, 'stage, status').get(2) == left


# settle

def test_a_settlement_writes_the_verdict_on_a_row_that_is_still_running_at_its_stage(sql, us):
    for form in each(SETTLES, sql):
        for id in (1, 2, 3):
            insert(sql, id, 'a', 'running', state='{"page": 3, "dispatch_error": "old"}')
        found, written = settle(us, (1, 'a', 'failed', 'status: 1 x'), (2, 'a', 'timeout', 'timeout: 5 s'),
                                (3, 'a', 'pending', None), form=form)
        assert found == dict.fromkeys((1, 2, 3), ('running', 'a', None))
        assert written == {1: ('failed', 'a', None), 2: ('timeout', 'a', None), 3: ('pending', 'a', None)}
        assert rows(sql, 'status, stage, state') == {
            1: ('failed', 'a', {'page': 3, 'dispatch_error': 'status: 1 x'}),
            2: ('timeout', 'a', {'page': 3, 'dispatch_error': 'timeout: 5 s'}),
            3: ('pending', 'a', {'page': 3, 'dispatch_error': 'old'})}


def test_a_settlement_requeues_a_row_that_has_advanced_and_blames_it_for_nothing(sql, us):
    for form in each(SETTLES, sql):
        for id in (1, 2, 3):
            insert(sql, id, 'b', 'running', state='{"page": 3}')
        found, written = settle(us, (1, 'a', 'failed', 'crash: x'), (2, 'a', 'timeout', 'timeout: 5 s'),
                                (3, 'a', 'pending', None), form=form)
        assert found == dict.fromkeys((1, 2, 3), ('running', 'b', None))
        assert written == dict.fromkeys((1, 2, 3), ('pending', 'b', None))
        assert rows(sql, 'status, stage, state') == dict.fromkeys((1, 2, 3), ('pending', 'b', {'page': 3}))


def test_a_settlement_leaves_a_row_alone_that_is_not_running(sql, us):
    for form in each(SETTLES, sql):
        cases = [(status, stage) for status in ('pending', 'paused', 'done', 'failed', 'timeout') for stage in 'ab']
        for id, (status, stage) in enumerate(cases):
            insert(sql, id, stage, status)
        before = rows(sql, 'status, stage, state, xmin::text')
        found, written = settle(us, *[(id, 'a', 'failed', 'crash: x') for id in range(len(cases))], form=form)
        assert [found[id][:2] for id in range(len(cases))] == cases and not written
        assert rows(sql, 'status, stage, state, xmin::text') == before


def test_a_settlement_of_a_row_that_is_gone_returns_nothing_for_it(sql, us):
    for form in each(SETTLES, sql):
        insert(sql, 2, 'a', 'running')
        found, written = settle(us, (1, 'a', 'failed', 'crash: x'), (2, 'a', 'failed', 'crash: x'), form=form)
        assert (list(found), list(written)) == ([2], [2])


def test_a_settlement_that_is_sent_again_changes_nothing(sql, us):
    for form in each(SETTLES, sql):
        for id, stage in ((1, 'a'), (2, 'b')):
            insert(sql, id, stage, 'running')
        outcomes = [(1, 'a', 'failed', 'crash: x'), (2, 'a', 'failed', 'crash: x')]
        settle(us, *outcomes, form=form)
        before = rows(sql, 'status, stage, state, xmin::text')
        assert settle(us, *outcomes, form=form) == ({1: ('failed', 'a', None), 2: ('pending', 'b', None)}, {})
        assert rows(sql, 'status, stage, state, xmin::text') == before


def test_a_reason_goes_into_a_state_that_is_an_object_or_missing_and_into_no_other(theirs):
    sql, us = theirs
    reason = {'dispatch_error': 'crash: x'}
    cases = [(None, reason), ('{}', reason), ('{"dispatch_error": {"a": 1}, "b": 2}', dict(reason, b=2)),
             ('null', None), ('[1, {"a": 2}]', [1, {'a': 2}]), ('[]', []), ('"text"', 'text'), ('7', 7)]
    for form in each(SETTLES, sql):
        for id, (state, _) in enumerate(cases):
            insert(sql, id, 'a', 'running', state=state)
        settle(us, *[(id, 'a', 'failed', 'crash: x') for id in range(len(cases))], form=form)
        assert rows(sql, 'status, state, state IS NULL') == {
            id: ('failed', after, False) for id, (_, after) in enumerate(cases)}


def test_a_settlement_takes_the_ends_of_the_range_of_ids_hostile_stages_and_hostile_reasons(sql, us):
    for form in each(SETTLES, sql):
        ids = [FIRST_ID, -1, 2 ** 31, LAST_ID] + list(range(len(HOSTILE)))
        stages = ['a'] * 4 + HOSTILE
        for id, stage in zip(ids, stages):
            insert(sql, id, stage, 'running')
        found, written = settle(us, *[(id, stage, 'failed', 'status: 1 ' + stage) for id, stage in zip(ids, stages)],
                                form=form)
        assert {id: stage for id, (_, stage, _) in written.items()} == dict(zip(ids, stages))
        assert rows(sql, "state ->> 'dispatch_error'") == {id: 'status: 1 ' + stage for id, stage in zip(ids, stages)}


def test_a_settlement_tells_when_a_row_that_its_worker_paused_is_due(sql, us):
    cases = [("now() + interval '1 h'", 3500, 3600), ("now() - interval '1 h'", -1e12, 0), ("'-infinity'", -1e12, 0),
             ("'4000-01-01 BC'", -1e12, 0), ("'20000-01-01'", 1e9, 1e9), ("'infinity'", None, None),
             ('NULL', None, None)]
    for form in each(SETTLES, sql):
        insert(sql, 100, 'a', 'done', "now() + interval '1 h'")
        for id, (timeout, _, _) in enumerate(cases):
            insert(sql, id, 'a', 'paused', timeout)
        found, _ = settle(us, (100, 'a', 'failed', 'x'), *[(id, 'a', 'failed', 'x') for id in range(len(cases))],
                          form=form)
        for id, (timeout, least, most) in enumerate(cases):
            due_s = found[id][2]
            assert due_s is None if least is None else due_s is not None and least <= due_s <= most, timeout
        assert found[100] == ('done', 'a', None)


def test_a_settlement_gives_up_on_a_locked_row_within_the_lock_timeout_and_writes_nothing(sql, us, home):
    for form in each(WAITING, sql):
        for id in (1, 2, 3):
            insert(sql, id, status='running')
        with transaction(home, 'SELECT FROM queue WHERE ingress_id = 2 FOR UPDATE'):
            outcomes = [(id, 'a', 'failed', 'x') for id in (1, 2, 3)]
            assert_gives_up_on_the_lock(lambda form=form, outcomes=outcomes: settle(us, *outcomes, form=form))
            assert set(rows(sql).values()) == {'running'}


def test_a_skipping_settlement_writes_what_is_not_locked_and_tells_the_rest_apart(sql, us, home):
    for id in (1, 2, 3):
        insert(sql, id, status='running')
    outcomes = [(id, 'a', 'failed', 'x') for id in (1, 2, 3)]
    with transaction(home, 'SELECT FROM queue WHERE ingress_id = 2 FOR UPDATE'):
        found, written = settle(us, *outcomes, form='skipping')
        assert {id: status for id, (status, _, _) in found.items()} == dict.fromkeys((1, 2, 3), 'running')
        assert sorted(written) == [1, 3]
        assert rows(sql) == {1: 'failed', 2: 'running', 3: 'failed'}
    assert sorted(settle(us, *outcomes, form='skipping')[1]) == [2]


@pytest.mark.parametrize('change, written, left', [
    ("UPDATE queue SET status = 'done'", None, ('done', 'a', {})),
    ("UPDATE queue SET status = 'paused'", None, ('paused', 'a', {})),
    ("UPDATE queue SET stage = 'b'", ('pending', 'b', None), ('pending', 'b', {})),
    ("UPDATE queue SET state = '{\"x\": 1}'", ('failed', 'a', None),
     ('failed', 'a', {'x': 1, 'dispatch_error': 'y'})),
    ('DELETE FROM queue', None, None),
], ids=['finished', 'paused', 'advanced', 'touched', 'deleted'])
def test_a_settlement_judges_a_row_by_what_it_is_when_its_lock_is_free(sql, us, home, change, written, left):
    for form in each(WAITING, sql):
        for id in (1, 2):
            insert(sql, id, status='running')
        with transaction(home, change + ' WHERE ingress_id = 1') as other:
            got = while_waiting(sql, us, lambda form=form: settle(us, (1, 'a', 'failed', 'y'), (2, 'a', 'failed', 'y'),
                                                                  form=form), other)
        assert got[0][1] == ('running', 'a', None), 'found as it was before'
        assert got[1].get(1) == written
        assert got[1][2] == ('failed', 'a', None)
        assert rows(sql, 'status, stage, state').get(1) == left


def test_a_row_whose_worker_took_its_stage_away_is_requeued_without_blame(theirs):
    sql, us = theirs
    for form in each(SETTLES, sql):
        insert(sql, 1, None, 'running', state=None)
        settle(us, (1, 'a', 'failed', 'crash: x'), form=form)
        assert rows(sql, 'status, state') == {1: ('pending', None)}


def test_a_settlement_is_as_durable_as_it_is_asked_to_be_and_leaves_the_session_as_it_was(theirs):
    sql, us = theirs
    sql.execute("""
        CREATE TABLE seen (synchronous_commit text);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER at_commit AFTER UPDATE ON queue DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION look();
    """)
    for form in each(SETTLES, sql):
        for id, durable in enumerate(['on', 'off', 'local']):
            insert(sql, id, status='running')
            settle(us, (id, 'a', 'failed', 'x'), form=form, durable=durable)
            us.execute('SHOW synchronous_commit')
            assert us.fetchone() == ('off',)
    sql.execute('SELECT * FROM seen')
    assert [row[0] for row in sql.fetchall()] == ['on', 'off', 'local'] * len(SETTLES)


# both at once

def test_an_exchange_settles_and_claims_but_claims_nothing_that_it_settles(sql, us):
    for id, stage, status in [(1, 'a', 'running'), (2, 'b', 'running'), (3, 'a', 'done'), (4, 'a', 'pending'),
                              (5, 'b', 'pending'), (6, 'a', 'pending'), (7, 'a', 'pending'), (8, 'c', 'pending')]:
        insert(sql, id, stage, status)
    insert(sql, 9, 'a', 'paused', 'now()')
    outcomes = [(id, 'a', 'failed', 'crash: x') for id in (1, 2, 3, 6, 9, 10)]
    found, written, claimed = exchange(us, outcomes, {'a': 2, 'b': 2}, held=[6])
    assert {id: row[:2] for id, row in found.items()} == {
        1: ('running', 'a'), 2: ('running', 'b'), 3: ('done', 'a'), 6: ('pending', 'a'), 9: ('paused', 'a')}
    assert 0 >= found[9][2] != -1
    assert written == {1: ('failed', 'a', None), 2: ('pending', 'b', None)}
    assert claimed == [(4, 'a'), (5, 'b'), (7, 'a')]
    assert rows(sql) == {1: 'failed', 2: 'pending', 3: 'done', 4: 'running', 5: 'running', 6: 'pending',
                         7: 'running', 8: 'pending', 9: 'paused'}


def test_an_exchange_does_all_or_nothing_where_a_row_is_locked(sql, us, home):
    for locked in (1, 2):
        sql.execute('TRUNCATE queue')
        insert(sql, 1, 'a', 'running')
        insert(sql, 2, 'a', 'pending')
        with transaction(home, 'SELECT FROM queue WHERE ingress_id = %d FOR UPDATE' % locked):
            assert_gives_up_on_the_lock(lambda: exchange(us, [(1, 'a', 'failed', 'x')], {'a': 1}))
            assert rows(sql) == {1: 'running', 2: 'pending'}
        assert exchange(us, [(1, 'a', 'failed', 'x')], {'a': 1})[2] == [(2, 'a')]


# revive

@pytest.mark.parametrize('zone, style', [('UTC', 'ISO'), ('Pacific/Kiritimati', 'German'), ('America/New_York', 'SQL')])
def test_a_retry_flips_what_is_due_by_the_clock_of_the_server_and_tells_when_the_next_is(sql, us, zone, style):
    us.execute("SET TimeZone = '%s'; SET DateStyle = '%s'" % (zone, style))
    due = ["now() - interval '1 s'", 'now()', "'-infinity'", "'4000-01-01 BC'", "now() - interval '2 d'"]
    later = ["now() + interval '1 h'", "now() + interval '2 h'", "'20000-01-01'", "'infinity'", 'NULL']
    for id, timeout in enumerate(due + later):
        insert(sql, id, 'a', 'paused', timeout)
    counts, next_s = revive(us)
    assert counts['retried'] == counts['ripe'] == len(due)
    assert 3590 < next_s <= 3600
    assert [status for _, status in sorted(rows(sql).items())] == ['pending'] * len(due) + ['paused'] * len(later)


@pytest.mark.parametrize('timeout, expected', [("'20000-01-01'", 1e9), ("'infinity'", None), ('NULL', None)])
def test_a_retry_bounds_the_time_until_the_next_and_knows_of_none_that_never_comes(sql, us, timeout, expected):
    insert(sql, 1, 'a', 'paused', timeout)
    assert revive(us)[1] == expected


def test_a_retry_leaves_held_rows_alone_and_does_not_wait_for_them(sql, us):
    for id, timeout in ((1, 'now()'), (2, 'now()'), (3, "now() + interval '1 h'"), (4, "now() + interval '2 h'")):
        insert(sql, id, 'a', 'paused', timeout)
    counts, next_s = revive(us, held=[1, 3, LAST_ID])
    assert counts['retried'] == counts['ripe'] == 1
    assert 7190 < next_s <= 7200
    assert rows(sql) == {1: 'paused', 2: 'pending', 3: 'paused', 4: 'paused'}


def test_a_retry_leaves_rows_alone_that_are_not_paused_whatever_their_timeout(sql, us):
    statuses = ['pending', 'running', 'done', 'failed', 'timeout']
    for id, status in enumerate(statuses):
        insert(sql, id, 'a', status, "'-infinity'")
    assert revive(us) == (dict.fromkeys(['lock', 'reset', 'retried', 'lost', 'ripe'], 0), None)
    assert rows(sql) == dict(enumerate(statuses))


def test_a_retry_takes_a_portion_and_the_most_urgent_first(sql, us):
    for id in range(10):
        insert(sql, id, 'a', 'paused', "now() - interval '%d s'" % (id + 1))
    assert revive(us, limit=4)[0]['ripe'] == 4
    assert {id for id, status in rows(sql).items() if status == 'pending'} == {6, 7, 8, 9}


def test_a_retry_skips_locked_rows_counts_them_and_takes_them_when_they_are_free(sql, us, home):
    for id in (1, 2, 3):
        insert(sql, id, 'a', 'paused', 'now()')
    with transaction(home, 'SELECT FROM queue WHERE ingress_id = 2 FOR UPDATE'):
        counts, _ = revive(us)
        assert (counts['ripe'], counts['retried']) == (3, 2)
    counts, _ = revive(us)
    assert (counts['ripe'], counts['retried']) == (1, 1)


def test_a_retry_that_does_not_sweep_resets_nothing(sql, us):
    insert(sql, 1, 'a', 'running')
    assert revive(us)[0] == dict.fromkeys(['lock', 'reset', 'retried', 'lost', 'ripe'], 0)
    assert rows(sql) == {1: 'running'}


def test_a_sweep_resets_running_rows_that_are_not_held_at_any_stage_and_no_others(sql, us):
    statuses = ['running'] * 5 + ['pending', 'paused', 'done', 'failed', 'timeout']
    ids = [FIRST_ID, 2, 3, 4, LAST_ID, 6, 7, 8, 9, 10]
    for id, status in zip(ids, statuses):
        insert(sql, id, HOSTILE[id % 7], status, "'infinity'")
    counts, _ = revive(us, held=[2, 4], sweep=True)
    assert (counts['lost'], counts['reset']) == (3, 3)
    statuses[0] = statuses[2] = statuses[4] = 'pending'
    assert rows(sql) == dict(zip(ids, statuses))


def test_a_sweep_skips_locked_rows_counts_them_and_resets_them_when_they_are_free(sql, us, home):
    for id in (1, 2, 3):
        insert(sql, id, 'a', 'running')
    with transaction(home, "UPDATE queue SET state = '{}' WHERE ingress_id = 2"):
        counts, _ = revive(us, sweep=True)
        assert (counts['lost'], counts['reset']) == (3, 2)
    counts, _ = revive(us, sweep=True)
    assert (counts['lost'], counts['reset']) == (1, 1)
    assert set(rows(sql).values()) == {'pending'}


def test_a_sweep_tells_whether_the_lock_is_still_ours_and_leaves_the_settings_as_they_were(sql, us):
    before = [us.execute('SHOW ' + name) or us.fetchone() for name in ('statement_timeout', 'enable_seqscan')]
    assert revive(us, sweep=True)[0]['lock'] == 0
    us.execute(pepsidispatch.LOCK, {'key': LOCK_KEY})
    assert us.fetchone() == (True,)
    assert revive(us, sweep=True)[0]['lock'] == 1
    sql.execute('SELECT pg_try_advisory_lock(%s)', (LOCK_KEY,))
    assert sql.fetchone() == (False,)
    assert before == [us.execute('SHOW ' + name) or us.fetchone() for name in ('statement_timeout', 'enable_seqscan')]


# flush

def stats(sql):
    sql.execute('SELECT * FROM stage_stats')
    stages = {row[0]: row[1:] for row in sql.fetchall()}
    sql.execute('SELECT stages, messages, epoch, flush FROM dispatch_stats')
    return stages, sql.fetchone()


def test_a_flush_is_added_once_however_often_it_is_sent(sql, us):
    sql.execute("UPDATE dispatch_stats SET epoch = 7; INSERT INTO stage_stats VALUES ('a', 1, 2, 3, 4, 0.5)")
    batch = {'a': (10, 20, 30, 40, 0.25), 'b': (1, 0, 0, 0, 1e-9)}
    assert flush(us, 1, 7, batch, total=101, messages=5) == (1, 7, 0)
    expected = ({'a': (11, 22, 33, 44, 0.75), 'b': (1, 0, 0, 0, 1e-9)}, (101, 5, 7, 1))
    assert stats(sql) == expected
    for _ in range(2):
        assert flush(us, 1, 7, batch, total=101, messages=5) == (None, 7, 1)
        assert stats(sql) == expected
    assert flush(us, 2, 7, {'b': (1, 0, 0, 0, 0.0)}, total=1) == (2, 7, 1)
    assert stats(sql) == ({'a': (11, 22, 33, 44, 0.75), 'b': (2, 0, 0, 0, 1e-9)}, (102, 5, 7, 2))


@pytest.mark.parametrize('epoch', [6, 8])
def test_a_flush_of_another_epoch_is_not_added_at_all(sql, us, epoch):
    sql.execute('UPDATE dispatch_stats SET epoch = 7')
    assert flush(us, 1, epoch, {'a': (1, 1, 1, 1, 1.0)}, total=4, messages=4) == (None, 7, 0)
    assert stats(sql) == ({}, (0, 0, 7, 0))


def test_a_flush_may_have_no_stage_or_hostile_ones(sql, us):
    assert flush(us, 1, 0, {}, total=3, messages=2) == (1, 0, 0)
    names = HOSTILE[:-1] + ['x' * 1000]
    assert flush(us, 2, 0, dict.fromkeys(names, (2 ** 40, 0, 0, 0, 1e300))) == (2, 0, 1)
    assert stats(sql) == (dict.fromkeys(names, (2 ** 40, 0, 0, 0, 1e300)), (3, 2, 0, 2))


# all of them

def test_no_statement_waits_long_for_a_lock_on_the_whole_table(sql, us, home):
    insert(sql, 1)
    insert(sql, 2, status='running')
    with transaction(home, 'LOCK TABLE queue, dispatch_stats IN ACCESS EXCLUSIVE MODE'):
        for form in CLAIMS:
            assert_gives_up_on_the_lock(lambda form=form: claim(us, {'a': 1}, form=form))
            assert_gives_up_on_the_lock(lambda form=form: settle(us, (2, 'a', 'failed', 'x'), form=form))
        for sweep in (False, True):
            assert_gives_up_on_the_lock(lambda sweep=sweep: revive(us, sweep=sweep))
        assert_gives_up_on_the_lock(lambda: flush(us, 1, 0, {}))
    assert claim(us, {'a': 1}) == [(1, 'a')]


def test_the_statements_work_on_a_table_that_is_changed_or_replaced_while_the_session_lasts(theirs):
    sql, us = theirs
    insert(sql, 1)
    assert claim(us, {'a': 1}) == [(1, 'a')]
    sql.execute('ALTER TABLE queue ADD COLUMN more integer DEFAULT 0, DROP COLUMN priority; REINDEX TABLE queue;'
                'ANALYZE queue')
    assert settle(us, (1, 'a', 'failed', 'x'))[1] == {1: ('failed', 'a', None)}
    sql.execute('DROP TABLE queue;' + pepsidispatch.SCHEMA)
    insert(sql, 2)
    assert claim(us, {'a': 1}) == [(2, 'a')]
    assert settle(us, (2, 'a', 'failed', 'x'))[1] == {2: ('failed', 'a', None)}


def test_every_statement_of_the_session_works_with_no_other_rights_than_those_that_init_shows(db, dsn):
    role = 'least_of_' + re.search(r'dbname=(\w+)', dsn).group(1)
    grants = re.findall(r'^-- +(GRANT .*)$', pepsidispatch.GRANTS, re.MULTILINE)
    assert grants
    with db.cursor() as sql:
        sql.execute(pepsidispatch.SCHEMA + 'REVOKE ALL ON SCHEMA public FROM PUBLIC; CREATE ROLE %s LOGIN;' % role)
        try:
            sql.execute(' '.join(grants).replace('ROLE', role))
            for id, status in enumerate(['pending', 'paused', 'running', 'pending', 'pending']):
                insert(sql, id, 'a', status, 'now()')
            with dispatcher_session(dsn, user=role) as us:
                use_every_statement(us)
        finally:
            sql.execute('DROP OWNED BY %s; DROP ROLE %s' % (role, role))


def use_every_statement(us):
    for statement in (pepsidispatch.CONDITION, pepsidispatch.TABLES, pepsidispatch.LOCK, pepsidispatch.HOLDER,
                      pepsidispatch.TAKE_OVER, pepsidispatch.EPOCH, pepsidispatch.LISTEN, pepsidispatch.KEPT):
        us.execute(statement, {'key': LOCK_KEY, 'channel': pepsidispatch.CHANNEL})
    assert revive(us, sweep=True)[0] == {'lock': 1, 'reset': 1, 'retried': 1, 'lost': 1, 'ripe': 1}
    for form in CLAIMS:
        [(id, stage)] = claim(us, {'a': 1}, form=form)
        assert settle(us, (id, stage, 'failed', 'x'), form=form)[1] == {id: ('failed', 'a', None)}
    assert exchange(us, [(0, 'a', 'failed', 'x')], {'a': 1}) == ({0: ('failed', 'a', None)}, {}, [(3, 'a')])
    for number in (1, 2):
        assert flush(us, number, 1, {'a': (1, 0, 0, 0, 1.0)})[0] == number
    for refused in ("INSERT INTO queue (stage) VALUES ('a')", 'DELETE FROM queue', "UPDATE queue SET stage = 'b'",
                    'UPDATE queue SET timeout = now()', 'DELETE FROM stage_stats', 'DELETE FROM dispatch_stats'):
        with pytest.raises(psycopg2.ProgrammingError) as error:
            us.execute(refused)
        assert error.value.pgcode == psycopg2.errorcodes.INSUFFICIENT_PRIVILEGE, refused


# what init installs

@pytest.fixture
def heard(sql, home):
    """A function that runs a statement in the session of `sql` or of another cursor and returns how many
    notifications of the dispatcher's channel it caused."""
    with contextlib.closing(psycopg2.connect(home)) as listener:
        listener.autocommit = True
        listener.cursor().execute('LISTEN %s; LISTEN sentinel' % pepsidispatch.CHANNEL)

        def run(statement, params=None, cursor=sql):
            if callable(statement):
                statement()
            else:
                cursor.execute(statement, params)
            cursor.execute('NOTIFY sentinel')  # delivered in the order of the commits
            channels = []

            def ended():
                listener.poll()
                channels.extend(notify.channel for notify in listener.notifies)
                del listener.notifies[:]
                return 'sentinel' in channels

            support.wait_until(ended)
            assert channels.pop() == 'sentinel'
            return len(channels)

        yield run


def test_whatever_adds_rows_wakes_the_dispatcher_once_a_statement(sql, heard):
    assert heard("INSERT INTO queue (stage) VALUES ('a')") == 1
    assert heard("INSERT INTO queue (stage) SELECT 'a' FROM generate_series(1, 1000)") == 1
    assert heard("INSERT INTO queue (stage, status, timeout) VALUES ('a', 'paused', now())") == 1

    def copy():
        with io.StringIO('a\nb\n') as file:
            sql.copy_from(file, 'queue', columns=['stage'])

    assert heard(copy) == 1


def test_an_update_that_leaves_a_row_waiting_that_was_not_running_wakes_the_dispatcher(sql, us, heard):
    for before, change in [
            ('done', "status = 'pending'"), ('failed', "status = 'pending'"), ('paused', "status = 'pending'"),
            ('timeout', "status = 'pending', stage = 'b'"), ('pending', "status = 'paused', timeout = now()"),
            ('done', "status = 'paused'"), ('pending', "stage = 'b'"), ('paused', "stage = 'b'"),
            ('paused', 'timeout = now()'), ('paused', 'timeout = NULL')]:
        assert count_wakes(sql, us, heard, before, change) == 1, (before, change)


def test_no_other_update_wakes_the_dispatcher(sql, us, heard):
    for before, change in [
            ('pending', "stage = 'a', status = 'pending'"), ('pending', "state = '[1]'"), ('paused', "state = '[1]'"),
            ('pending', "status = 'done'"), ('pending', "status = 'running'"), ('paused', "status = 'failed'"),
            ('done', "stage = 'b'"), ('done', 'timeout = now()'), ('running', "status = 'done'"),
            ('running', "status = 'failed', state = '[1]'"), ('running', "status = 'paused', timeout = now()"),
            ('running', "stage = 'b'"), ('running', "status = 'pending', stage = 'b'")]:
        assert count_wakes(sql, us, heard, before, change) == 0, (before, change)


def count_wakes(sql, us, heard, before, change):
    """How often an update of several rows by somebody else notifies; the dispatcher's own never does."""
    for id in range(20):
        insert(sql, id, 'a', before, "'2030-01-01'")
    heard('SELECT 1')
    update = 'UPDATE queue SET %s WHERE ingress_id %% 2 = ' % change
    assert heard(update + '1', cursor=us) == 0
    wakes = heard(update + '0')
    assert heard('DELETE FROM queue') == 0
    return wakes


def test_no_statement_of_the_dispatcher_wakes_it(sql, us, heard):
    for form in each(CLAIMS, sql):
        for id, status in enumerate(['pending', 'paused', 'running', 'running', 'running']):
            insert(sql, id, 'a', status, 'now()')
        heard('SELECT 1')
        assert heard(lambda form=form: claim(us, {'a': 1}, form=form)) == 0
        assert heard(lambda form=form: settle(us, (2, 'a', 'pending', None), (3, 'x', 'pending', None),
                                              form=form)) == 0
        assert heard(lambda: exchange(us, [(4, 'a', 'pending', None)], {'a': 1}, held=[4])) == 0
        assert heard(lambda: revive(us, sweep=True)) == 0
        assert set(rows(sql).values()) == {'pending'}


def test_init_leaves_alone_what_is_there_and_adds_what_is_missing_to_a_table_of_somebody_else(theirs):
    sql, us = theirs
    insert(sql, 1, 'a', 'archived', state=None)
    sql.execute(pepsidispatch.SCHEMA)  # once more
    sql.execute("""
        SELECT (SELECT count(*) FROM pg_trigger WHERE tgrelid = 'queue'::regclass AND NOT tgisinternal),
               (SELECT count(*) FROM dispatch_stats),
               (SELECT count(*) FROM pg_attribute WHERE attrelid = 'queue'::regclass AND attnum > 0),
               (SELECT count(*) FROM pg_constraint WHERE conrelid = 'queue'::regclass AND contype = 'c'),
               (SELECT array_agg(pg_get_indexdef(indexrelid) || ';' ORDER BY indexrelid)::text FROM pg_index
                WHERE indrelid = 'queue'::regclass)
    """)
    triggers, singles, columns, checks, indexes = sql.fetchone()
    assert (triggers, singles, columns, checks) == (2, 1, 7, 0)
    for part in ("(stage, ingress_id) WHERE (status = 'pending'::text);",
                 "(timeout) WHERE (status = 'paused'::text);"):
        assert indexes.replace('"', '').count(part) == 1, indexes
    insert(sql, 2)
    assert claim(us, {'a': 10}) == [(2, 'a')]
    assert settle(us, (1, 'a', 'failed', 'x'), (2, 'a', 'failed', 'x')) == (
        {1: ('archived', 'a', None), 2: ('running', 'a', None)}, {2: ('failed', 'a', None)})


def test_the_table_that_init_makes_is_cleaned_up_often_and_its_pages_are_filled(sql):
    sql.execute("SELECT unnest(reloptions) FROM pg_class WHERE oid = 'queue'::regclass")
    options = dict(row[0].split('=') for row in sql.fetchall())
    assert float(options['autovacuum_vacuum_scale_factor']) <= 0.05
    assert float(options['autovacuum_analyze_scale_factor']) <= 0.1
    assert float(options['autovacuum_vacuum_insert_scale_factor']) <= 0.1
    assert 'fillfactor' not in options, 'a change of status is never a heap-only update: room left free is lost'
