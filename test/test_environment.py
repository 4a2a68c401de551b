"""The ground that the other tests stand on: interpreter, PostgreSQL, and the search for leaks."""
import contextlib
import os
import select
import signal
import subprocess
import sys
import warnings

import cluster
import psycopg2
import pytest
import support
import worker_stub

ENVIRONMENT = os.environ.get('TOX_ENV_NAME', '')


def test_interpreter_is_the_one_that_tox_was_asked_for():
    if not ENVIRONMENT.startswith('py3'):
        pytest.skip('no environment of tox that is named after an interpreter')
    assert ENVIRONMENT == 'py%d%d' % sys.version_info[:2]


def test_server_is_the_one_that_tox_was_asked_for(db):
    if not ENVIRONMENT.startswith('pg'):
        pytest.skip('no environment of tox that is named after a PostgreSQL')
    assert ENVIRONMENT == 'pg%d' % (db.server_version // 10000)


def test_all_modules_compile_without_a_warning():
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.join(here, name) for name in sorted(os.listdir(here)) if name.endswith('.py')]
    for path in paths + [support.DISPATCHER, worker_stub.__file__]:
        with open(path, encoding='utf-8') as file, warnings.catch_warnings():
            warnings.simplefilter('error')
            compile(file.read(), path, 'exec')


def test_a_notification_arrives(dsn, db):
    db.cursor().execute('LISTEN ingress')
    with contextlib.closing(psycopg2.connect(dsn)) as other:
        other.autocommit = True
        other.cursor().execute("NOTIFY ingress, 'look'")
    support.wait_until(lambda: select.select([db], [], [], 0)[0], what='a notification')
    db.poll()
    assert [notice.payload for notice in db.notifies] == ['look']


def test_server_keeps_a_database_across_a_restart(pg, dsn):
    before = pg.process.pid
    pg.restart()
    assert pg.process.pid != before
    psycopg2.connect(dsn).close()


def test_server_keeps_what_was_committed_across_a_crash(pg, dsn):
    with contextlib.closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute('CREATE TABLE kept AS SELECT 1 AS one')
        pg.crash()
        with pytest.raises(psycopg2.Error):
            cursor.execute('SELECT 1')
    pg.start()
    with contextlib.closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute('SELECT one FROM kept')
        assert cursor.fetchall() == [(1,)]


def test_a_server_of_ones_own_leaves_nothing_behind(pg):
    with cluster.Cluster(pg.bindir, durable=True, max_connections='12') as server:
        with contextlib.closing(psycopg2.connect(server.dsn())) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('fsync'), current_setting('max_connections')")
            assert cursor.fetchall() == [('on', '12')]
    assert not os.path.exists(server.base)
    assert not server.running()


def test_what_never_comes_is_named():
    with pytest.raises(AssertionError, match=r'waited 0 s in vain for: the moon \(last: \[\]\)'):
        support.wait_until(list, 0, 'the moon')


@pytest.fixture
def leaks():
    """A check like the one around each test."""
    return support.LeakCheck(os.environ[support.TEST_MARK])


def test_a_descriptor_left_open_is_found(leaks):
    reader, writer = os.pipe()
    os.close(writer)
    found = leaks.find()
    os.close(reader)
    assert len(found) == 1 and found[0].startswith('descriptor %d: pipe:' % reader)
    assert leaks.wait() == []


def test_a_child_left_alive_is_found_and_killed(leaks):
    with subprocess.Popen(['sleep', '60']) as child:
        support.wait_until(lambda: 'sleep 60' in leaks.find()[0])
        assert leaks.find()[0].startswith('child %d: ' % child.pid)
        leaks.kill()
        assert child.wait() == -signal.SIGKILL
    assert leaks.wait() == []


def test_a_zombie_is_found(leaks):
    with subprocess.Popen(['true']) as child:
        support.wait_until(lambda: leaks.find() == ['child %d: zombie true' % child.pid])
    assert leaks.wait() == []


def test_an_orphan_in_a_session_of_its_own_is_found_and_killed(leaks):
    subprocess.check_call(['setsid', 'sh', '-c', 'sleep 60 & exit 0'])
    assert len(leaks.find()) == 1 and leaks.find()[0].startswith('process ')
    leaks.kill()
    assert leaks.wait() == []
