"""The plans of the statements, whatever the planner believes of the table: nothing is read but what is asked for."""
import contextlib

import bench_claim
import psycopg2
import pytest
from bench_claim import STAGES, STATES, build, claim_params, explain, open_session, scans

import pepsidispatch
from pepsidispatch import FIRST_ID, REVIVE, SWEEP, array

CLAIMS = {'prepared': pepsidispatch.PREPARED_CLAIM, 'plain': pepsidispatch.CLAIM,
          'skipping': pepsidispatch.CLAIM_SKIPPING}
SETTLES = {'prepared': pepsidispatch.PREPARED_SETTLE, 'plain': pepsidispatch.SETTLE,
           'skipping': pepsidispatch.SETTLE_SKIPPING}

ROWS = 6000  # in each state; what a wrong plan reads shows at any size
CAP = 64
PAGES_A_ROW = 40  # touched at most for each row that is taken; seen: 8 to 16


@pytest.fixture(scope='module')
def states(pg):
    """The connection string of a database with the states of STATES, of pending and of paused rows: schemas named
    'pending: STATE' and 'paused: STATE'."""
    with contextlib.closing(psycopg2.connect(pg.dsn())) as admin:
        admin.autocommit = True
        with admin.cursor() as cursor:
            cursor.execute('CREATE DATABASE claim_plan TEMPLATE template0')
            with contextlib.closing(psycopg2.connect(pg.dsn('claim_plan'))) as connection:
                connection.autocommit = True
                for name, steps in STATES.items():
                    for status in ('pending', 'paused'):
                        build(connection.cursor(), '%s: %s' % (status, name), steps, ROWS, status)
            yield pg.dsn('claim_plan')
            cursor.execute('DROP DATABASE claim_plan')


@contextlib.contextmanager
def session_in(dsn, schema):
    """A cursor of a session like the dispatcher's, in a schema."""
    with contextlib.closing(open_session(dsn, schema)) as connection:
        yield connection.cursor()


def rows_of(cursor, sql, params):
    """Run a statement, undo it, and return its rows."""
    cursor.execute('BEGIN')
    cursor.execute(sql, params)
    rows = cursor.fetchall()
    cursor.execute('ROLLBACK')
    return rows


def column(cursor, sql, params=None):
    cursor.execute(sql, params)
    return [row[0] for row in cursor.fetchall()]


def first_ids(cursor, status, number):
    return column(cursor, 'SELECT ingress_id FROM queue WHERE status = %s ORDER BY ingress_id LIMIT %s',
                  (status, number))


def kinds(plan):
    """What a plan read of the queue, apart from parts that were not run: a set of (kind of scan, index or None)."""
    return {scan[:2] for scan in scans(plan) if scan[2]}


def dropped(plan):
    """How many rows of the queue a plan read for nothing."""
    return sum(scan[3] for scan in scans(plan))


def assert_claim_is_cheap(form, plan, held=0):
    read = kinds(plan)
    by_index = {('Index Scan', 'queue_pending'), ('Index Only Scan', 'queue_pending')}
    by_row = {('Tid Scan', None), ('Index Scan', 'queue_pkey')}
    assert len(read & by_index) == 1 and read <= by_index | by_row, (form, read)
    assert dropped(plan) <= held, (form, scans(plan))
    assert bench_claim.buffers(plan) <= PAGES_A_ROW * (CAP * len(STAGES) + held), form


@pytest.mark.parametrize('state', STATES)
def test_the_statistics_are_as_the_state_says(states, state):
    believed = {'analysed': (ROWS, {'pending'}), 'never analysed': (-1, None), 'analysed when empty': (0, None),
                'analysed when all done': (ROWS, {'done'}), 'analysed before 99.9 % were done': (ROWS, {'pending'}),
                'analysed when 99.9 % done': (ROWS, {'done', 'pending'})}[state]
    with session_in(states, 'pending: ' + state) as cursor:
        cursor.execute("SELECT reltuples FROM pg_class WHERE oid = 'queue'::regclass")
        tuples = int(cursor.fetchone()[0])
        cursor.execute("""
            SELECT most_common_vals::text::text[] FROM pg_stats
            WHERE schemaname = current_schema AND tablename = 'queue' AND attname = 'status'
        """)
        values = cursor.fetchall()
        if cursor.connection.server_version < 140000:  # 0 means never, too
            tuples, believed = max(0, tuples), (max(0, believed[0]), believed[1])
        assert (tuples, set(values[0][0]) if values else None) == believed
        pending = column(cursor, "SELECT count(*) FROM queue WHERE status = 'pending'")
        assert pending == [ROWS // 7 if '99.9' in state else ROWS]


@pytest.mark.parametrize('held', [0, 400])
@pytest.mark.parametrize('state', STATES)
def test_a_claim_reads_its_rows_by_the_partial_index_and_takes_no_more_than_its_caps(states, state, held):
    with session_in(states, 'pending: ' + state) as cursor:
        ids = first_ids(cursor, 'pending', held)
        params = claim_params(CAP, held=ids)
        expected = [(id, stage) for stage in STAGES for id in column(cursor, """
            SELECT ingress_id FROM queue
            WHERE status = 'pending' AND stage = %s AND ingress_id <> ALL (%s::bigint[])
            ORDER BY ingress_id LIMIT %s
        """, (stage, array(ids), CAP))]
        assert len(expected) == CAP * len(STAGES)
        for form, sql in CLAIMS.items():
            assert_claim_is_cheap(form, explain(cursor, sql, params), held)
            assert sorted(rows_of(cursor, sql, params)) == sorted(expected), form


@pytest.mark.parametrize('form', CLAIMS)
def test_a_claim_keeps_its_caps_when_the_statistics_know_of_done_rows_only(db, form):
    with db.cursor() as cursor:
        build(cursor, 'q', [('fill', 'done'), ('analyse', None)], 20000)
        cursor.execute("""
            INSERT INTO queue (ingress_id, stage)
            SELECT i, 's' || i % 2 FROM generate_series(20001, 20400) AS i
        """)
        with session_in(db.dsn, 'q') as session:
            session.execute(CLAIMS[form], {'stages': '{s0,s1}', 'caps': '{3,2}', 'floors': array([FIRST_ID] * 2),
                                           'held': '{}'})
            assert sorted(id for id, _ in session.fetchall()) == [20001, 20002, 20003, 20004, 20006]
        assert column(cursor, "SELECT count(*) FROM queue WHERE status = 'running'") == [5]


def test_a_floor_spares_a_claim_the_dead_entries_that_an_old_snapshot_keeps(db):
    with db.cursor() as cursor, contextlib.closing(psycopg2.connect(db.dsn)) as old:
        build(cursor, 'q', STATES['analysed'], ROWS)
        old.cursor().execute("""
            SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
            SELECT FROM q.queue LIMIT 1;
        """)
        cursor.execute("UPDATE queue SET status = 'done' WHERE ingress_id <= %s", (ROWS - 1000,))
        with session_in(db.dsn, 'q') as session:
            for form, sql in CLAIMS.items():
                from_floor = explain(session, sql, claim_params(1, floor=ROWS - 999))
                from_start = explain(session, sql, claim_params(1))
                assert_claim_is_cheap(form, from_floor)
                assert from_floor['Actual Rows'] == from_start['Actual Rows'] == len(STAGES)
                assert bench_claim.buffers(from_floor) <= PAGES_A_ROW * len(STAGES), form
                assert bench_claim.buffers(from_start) > 2 * bench_claim.buffers(from_floor), 'nothing was dead'


@pytest.mark.parametrize('state', STATES)
def test_a_settlement_finds_its_rows_by_primary_key(states, state):
    with session_in(states, 'pending: ' + state) as cursor:
        for number in (1, 64, 1000):
            ids = column(cursor, 'SELECT ingress_id FROM queue ORDER BY hashint8(ingress_id) LIMIT %s', (number,))
            params = {'ids': array(ids), 'stages': array([STAGES[id % 3] for id in ids]),
                      'verdicts': array(['failed'] * number), 'errors': array(['unfinished: x'] * number),
                      'durable': 'off'}
            for form, sql in SETTLES.items():
                cursor.execute('BEGIN')
                cursor.execute("""
                    UPDATE queue SET status = CASE WHEN ingress_id %% 3 = 0 THEN 'done' ELSE 'running' END,
                                     stage = CASE WHEN ingress_id %% 3 = 1 THEN 'next' ELSE stage END
                    WHERE ingress_id = ANY (%s::bigint[])
                """, (array(ids),))
                cursor.execute('EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ' + sql, params)
                plan = cursor.fetchone()[0][0]['Plan']
                cursor.execute('ROLLBACK')
                assert kinds(plan) == {('Index Scan', 'queue_pkey')}, (form, number)
                assert dropped(plan) == 0, (form, number)
                assert bench_claim.buffers(plan) <= PAGES_A_ROW * number, (form, number)


def test_indexes_of_somebody_else_mislead_neither_claim_nor_settlement_nor_retry(db):
    with db.cursor() as cursor:
        build(cursor, 'q', STATES['analysed when all done'], ROWS)
        cursor.execute("""
            CREATE INDEX by_status ON queue (status);
            CREATE INDEX by_both ON queue (status, stage);
            CREATE INDEX by_stage ON queue (stage);
            CREATE INDEX by_timeout ON queue (timeout);
            CREATE INDEX at_work ON queue (stage) WHERE status = 'running';
            SET pepsi.dispatcher = 'on';
        """)
        with session_in(db.dsn, 'q') as session:
            for form, sql in CLAIMS.items():
                assert_claim_is_cheap(form, explain(session, sql, claim_params(CAP)))
            cursor.execute("UPDATE queue SET status = 'running' WHERE status = 'pending' AND stage = 's0'")
            ids = column(session, "SELECT ingress_id FROM queue WHERE status = 'running' LIMIT 64")
            for form, sql in SETTLES.items():
                plan = explain(session, sql, {'ids': array(ids), 'stages': array(['s0'] * 64), 'durable': 'off',
                                              'verdicts': array(['failed'] * 64), 'errors': array(['x'] * 64)})
                assert kinds(plan) == {('Index Scan', 'queue_pkey')}, form
            cursor.execute("UPDATE queue SET status = 'paused', timeout = now() WHERE status = 'running'")
            plan = explain(session, REVIVE, {'held': '{}', 'sweep': False, 'limit': 100, 'key': pepsidispatch.LOCK_KEY})
            assert dropped(plan) == 0, scans(plan)
            assert bench_claim.buffers(plan) <= PAGES_A_ROW * 100


@pytest.mark.parametrize('state', STATES)
def test_an_exchange_reads_what_its_two_halves_read(states, state):
    with session_in(states, 'pending: ' + state) as cursor:
        ids = column(cursor, 'SELECT ingress_id FROM queue ORDER BY hashint8(ingress_id) LIMIT 64')
        cursor.execute('BEGIN')
        cursor.execute("UPDATE queue SET status = 'running' WHERE ingress_id = ANY (%s::bigint[])", (array(ids),))
        params = claim_params(CAP, held=ids)
        params.update(wanted=params['stages'], ids=array(ids), stages=array(['s0'] * 64),
                      verdicts=array(['failed'] * 64), errors=array(['unfinished: x'] * 64), durable='off')
        cursor.execute('EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ' + pepsidispatch.PREPARED_EXCHANGE, params)
        plan = cursor.fetchone()[0][0]['Plan']
        cursor.execute('ROLLBACK')
        assert_claim_is_cheap('exchange', plan, len(ids))


@pytest.mark.parametrize('state', STATES)
def test_an_update_by_a_worker_finds_its_row_by_primary_key(states, state):
    with session_in(states, 'pending: ' + state) as cursor:
        cursor.execute('RESET ALL')
        cursor.execute('SET search_path = "pending: %s"' % state)
        plan = explain(cursor, "UPDATE queue SET status = 'done' WHERE ingress_id = 7 AND status = 'running'", None)
        assert kinds(plan) == {('Index Scan', 'queue_pkey')}, 'an index of ours misleads others'


@pytest.mark.parametrize('state', STATES)
def test_a_retry_reads_due_rows_by_the_index_on_timeout_and_nothing_else(states, state):
    with session_in(states, 'paused: ' + state) as cursor:
        due = first_ids(cursor, 'paused', ROWS)
        for held in (0, 400):
            params = {'held': array(due[:held]), 'sweep': False, 'limit': 100, 'key': pepsidispatch.LOCK_KEY}
            plan = explain(cursor, REVIVE, params)
            assert kinds(plan) <= {('Index Scan', 'queue_paused'), ('Index Only Scan', 'queue_paused'),
                                   ('Tid Scan', None), ('Index Scan', 'queue_pkey')}
            assert dropped(plan) <= 2 * held, scans(plan)
            cursor.execute('BEGIN')
            cursor.execute(REVIVE, params)
            assert sum(row[2] for row in cursor.fetchall() if row[0] == 'retried') == 100
            assert sorted(column(cursor, "SELECT ingress_id FROM queue WHERE status = 'pending'")) \
                == due[held:held + 100]
            cursor.execute('ROLLBACK')


@pytest.mark.parametrize('state', STATES)
def test_a_retry_with_nothing_due_touches_a_handful_of_pages(states, state):
    with session_in(states, 'pending: ' + state) as cursor:
        params = {'held': '{}', 'sweep': False, 'limit': 1000, 'key': pepsidispatch.LOCK_KEY}
        plan = explain(cursor, REVIVE, params)
        assert not any('Seq' in kind for kind, _ in kinds(plan)), 'rows without an owner were looked for'
        assert bench_claim.buffers(plan) <= 20


@pytest.mark.parametrize('state', STATES)
def test_a_sweep_reads_the_table_once_at_most_and_the_rows_that_it_resets_by_their_place(states, state):
    with session_in(states, 'pending: ' + state) as cursor:
        params = {'held': '{}', 'sweep': True, 'limit': 1000, 'key': pepsidispatch.LOCK_KEY}
        cursor.execute("BEGIN; UPDATE queue SET status = 'running' WHERE ingress_id % 100 = 0")
        settings, _, statement = SWEEP.rpartition(';')
        cursor.execute(settings)
        cursor.execute('EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ' + statement, params)
        read = scans(cursor.fetchone()[0][0]['Plan'])
        cursor.execute('ROLLBACK')
        assert sum(loops for kind, _, loops, _ in read if 'Seq' in kind) <= 1
        assert {scan[:2] for scan in read if scan[2] and 'Seq' not in scan[0]} <= {
            ('Tid Scan', None), ('Index Scan', 'queue_pkey'), ('Index Scan', 'queue_paused'),
            ('Index Only Scan', 'queue_paused'), ('Index Scan', 'queue_unfinished')}
        assert sum(lost for kind, _, _, lost in read if 'Seq' not in kind) == 0
