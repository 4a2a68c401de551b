"""Fixtures: a PostgreSQL for all tests, a database for each, and a test that leaves something behind fails."""
import contextlib
import itertools
import os
import re
import sys
from typing import List

import hypothesis
import psycopg2
import pytest

# The work tree comes last: under tox it is the installed dispatcher that is tested.
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import cluster
import support

# Where libpq connects to and what pepsi-dispatch reads must not come from the environment of whoever runs the tests.
# PG_HOME and the like are ours.
for name in list(os.environ):
    if re.match('PG[A-Z]|PEPSI_|NO_COLOR$|JOURNAL_STREAM$|SUPERVISOR_', name):
        del os.environ[name]

MARK = 'pytest-%d' % os.getpid()
os.environ[support.TEST_MARK] = MARK

# The machine may be busy with another environment's tests: what takes long is found by pytest-timeout.
hypothesis.settings.register_profile('pepsi', deadline=None, print_blob=True)
hypothesis.settings.load_profile('pepsi')

_servers: List[cluster.Cluster] = []  # that of the fixture pg, while there is one
_numbers = itertools.count(1)


LONG = {'test_bench', 'test_chaos', 'test_demo', 'test_docs', 'test_faults_database', 'test_faults_process',
        'test_faults_workers', 'test_operator', 'test_planted', 'test_simulation', 'test_script', 'test_supervisor',
        'test_sweep'}


def pytest_collection_modifyitems(items):
    """Mark the tests that take long, and those that need PostgreSQL: the others need not run again for each version of
    it."""
    for item in items:
        if item.module.__name__ in LONG:
            item.add_marker('long')
        if 'pg' in getattr(item, 'fixturenames', ()):
            item.add_marker('pg')


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Note at the test whether it failed."""
    outcome = yield
    if outcome.get_result().failed:
        item.has_failed = True


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Fail a test that leaves a descriptor, a child, a zombie or an orphan; kill what it left.

    A test that failed already keeps its variables alive for the traceback: it is not blamed once more.
    """
    check = support.LeakCheck(MARK, lambda: [server.process.pid for server in _servers])
    yield
    left = check.wait(0 if _has_failed(request) else 5)
    check.kill()
    if left and not _has_failed(request):
        pytest.fail('left behind:\n' + '\n'.join(left), pytrace=False)


@pytest.fixture(scope='session')
def pg():
    """The cluster.Cluster that all tests share. It survives being stopped, crashed and started again."""
    try:
        server = cluster.Cluster()
    except cluster.Unavailable as reason:
        pytest.skip(str(reason))
    with server:
        _servers.append(server)
        yield server
        _servers.remove(server)


@pytest.fixture
def dsn(request, pg):
    """The connection string of a new, empty database. A test that leaves a connection to it open fails."""
    pg.start()  # where a test before stopped it and failed
    name = 'test_%d' % next(_numbers)
    _execute(pg.dsn(), 'CREATE DATABASE %s TEMPLATE template0' % name)
    yield pg.dsn(name)
    pg.start()
    left = _wait_for_disconnect(pg.dsn(), name, 0 if _has_failed(request) else 5)
    _execute(pg.dsn(), 'ALTER DATABASE %s ALLOW_CONNECTIONS false' % name)
    _execute(pg.dsn(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '%s'" % name)
    _wait_for_disconnect(pg.dsn(), name, 10)
    _execute(pg.dsn(), 'DROP DATABASE ' + name)
    if left and not _has_failed(request):
        pytest.fail('connections left open (pid, application, state, query): %s' % left, pytrace=False)


@pytest.fixture
def db(dsn):
    """A connection, in autocommit, to the database of the fixture dsn. There are no tables in it yet."""
    with contextlib.closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        yield connection


def _has_failed(request):
    return getattr(request.node, 'has_failed', False)


def _execute(dsn, statement):
    """Run one statement in a connection of its own; return its rows, None if it is of a kind that has none."""
    with contextlib.closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else None


def _wait_for_disconnect(dsn, name, timeout_s):
    """Return the sessions that a database still has, once that is none, or after timeout_s."""
    def find():
        return _execute(dsn, "SELECT pid, application_name, state, query FROM pg_stat_activity"
                             " WHERE datname = '%s' AND backend_type = 'client backend'" % name)

    try:
        support.wait_until(lambda: not find(), timeout_s)
    except AssertionError:
        pass
    return find()
