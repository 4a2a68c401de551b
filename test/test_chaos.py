"""A short chaos run, and tests of the tools that it relies on: the proxy breaks links, the checker sees what is wrong.

CHAOS_SEED  seed of the run, default: a new one each time; a run that fails says which
"""
import contextlib
import os
import random
import socket
import threading

import chaos
import checker
import cluster
import psycopg2
import pytest
from checker import CRASH, DEAD, REPEATS, UNCOUNTED, Incident, Plan
from proxy import Proxy
from support import wait_until

MESSAGES, FAULTS = 1000, 30


# Far beyond what it takes: 70 s on a machine with two cores that has nothing else to do.
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_done_twice_and_nobody_blamed_for_others_in_chaos(tmp_path, pg):
    seed = int(os.environ.get('CHAOS_SEED', random.randrange(10 ** 6)))
    print('CHAOS_SEED=%d, or: python test/chaos.py --messages %d --faults %d --quick --seed %d'
          % (seed, MESSAGES, FAULTS, seed))
    with cluster.Cluster(pg.bindir) as server:
        complaints, idle, summary = chaos.run(str(tmp_path), server, MESSAGES, FAULTS, seed, quick=True)
    print(summary)
    assert not complaints
    assert not idle, 'the run proves nothing'


def test_chaos_knows_at_least_thirty_kinds_of_faults_and_a_run_tries_all_before_one_twice():
    assert len(chaos.KINDS) >= 30
    chosen = chaos.choose(random.Random(1), len(chaos.KINDS))
    assert sorted(chosen) == sorted(chaos.KINDS)
    assert chaos.choose(random.Random(1), 20) == chosen[:20]


# -- the proxy ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def proxy(tmp_path):
    """A proxy before a server that sends back what it gets."""
    path = os.path.relpath(str(tmp_path / 's'))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        threads = []

        def echo(end):
            with end:
                while True:
                    data = end.recv(4096)
                    if not data:
                        return
                    end.sendall(data)

        def serve():
            while True:
                end, _ = listener.accept()
                if stopped.is_set():
                    end.close()
                    return
                threads.append(threading.Thread(target=echo, args=[end]))
                threads[-1].start()

        stopped = threading.Event()
        server = threading.Thread(target=serve)
        server.start()
        with Proxy(path) as made:
            yield made
        stopped.set()
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(path)
        server.join()
        for thread in threads:
            thread.join()


@pytest.fixture
def client(proxy):
    with contextlib.closing(connect(proxy)) as end:
        yield end


def connect(proxy):
    return socket.create_connection(('127.0.0.1', proxy.port), 5)


def speak(end, timeout_s=5.0):
    """Send something and return what comes back; None if that is nothing in time."""
    end.settimeout(timeout_s)
    end.sendall(b'hello')
    try:
        return end.recv(100)
    except socket.timeout:
        return None


def test_proxy_passes_on_more_than_fits_into_its_buffers(proxy, client):
    data = os.urandom(3 << 20)
    threading.Thread(target=client.sendall, args=[data]).start()
    got = b''
    while len(got) < len(data):
        got += client.recv(1 << 16)
    assert got == data


def test_frozen_link_says_nothing_and_goes_on_when_it_is_thawed(proxy, client):
    proxy.freeze()
    assert speak(client, 0.2) is None
    with contextlib.closing(connect(proxy)) as other:
        assert speak(other, 0.2) is None
        proxy.thaw()
        client.settimeout(5)
        assert client.recv(100) == b'hello'
        other.settimeout(5)
        assert other.recv(100) == b'hello'


def test_old_link_is_frozen_and_a_new_one_is_not(proxy, client):
    assert speak(client) == b'hello'
    proxy.freeze(new=False)
    assert speak(client, 0.2) is None
    with contextlib.closing(connect(proxy)) as other:
        assert speak(other) == b'hello'


def test_refused_connections_are_taken_again_at_the_same_port(proxy, client):
    proxy.refuse()
    with pytest.raises((ConnectionError, socket.timeout)):
        assert speak(client) == b'hello'
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.thaw()
    with contextlib.closing(connect(proxy)) as other:
        assert speak(other) == b'hello'


def test_mute_server_takes_connections_and_says_nothing(proxy, client):
    proxy.mute()
    with contextlib.closing(connect(proxy)) as other:
        assert speak(other, 0.2) is None
        proxy.thaw()
        with pytest.raises(ConnectionResetError):
            other.recv(100)


def test_slow_link_delays_both_directions(proxy, client):
    proxy.delay(0.15)
    assert speak(client, 0.2) is None
    client.settimeout(5)
    assert client.recv(100) == b'hello'
    wait_until(lambda: proxy.delayed == 10)


def test_dropped_link_is_reset(proxy, client):
    assert speak(client) == b'hello'
    proxy.drop()
    with pytest.raises(ConnectionError):
        client.recv(100)


def test_postgresql_is_reached_through_the_proxy(pg):
    with Proxy(os.path.join(pg.base, '.s.PGSQL.5432')) as proxy:
        with contextlib.closing(psycopg2.connect(host='127.0.0.1', port=proxy.port, user='postgres')) as connection:
            with connection.cursor() as cursor:
                cursor.execute('SELECT 1')
                assert cursor.fetchone() == (1,)


# -- the checker -------------------------------------------------------------------------------------------------------

PLANS = {1: Plan(('a', 'b')), 2: Plan(('a',), ('failed',), 'status: 3', 'b')}
ROWS = {1: ('b', 'done', None), 2: ('b', 'failed', 'status: 3 no')}
EFFECTS = [(1, 'a'), (1, 'b'), (2, 'a')]
STATS, TOTALS = {'a': (2, 0, 0, 0), 'b': (1, 1, 0, 0)}, (4, 2)


def events(*lives):
    """Return the events of lives (id, stage, pid, begin, end), with a commit unless end is None or the pass failed."""
    found = []
    for id, stage, pid, begin, end in lives:
        found.append(checker.Event(begin, pid, stage, id, 'begin'))
        if end is not None:
            if (id, stage) != (2, 'b'):
                found.append(checker.Event(end, pid, stage, id, 'commit'))
            found.append(checker.Event(end, pid, stage, id, 'end'))
    return sorted(found, key=lambda event: event.time)


LOG = [(1, 'a', 10, 1, 2), (2, 'a', 10, 2, 3), (1, 'b', 11, 3, 4), (2, 'b', 11, 4, 5)]


def complain(plans=PLANS, rows=ROWS, effects=EFFECTS, log=LOG, incidents=(), stats=STATS, totals=TOTALS, more=()):
    """Return what the checker says about a run that is fine but for these changes."""
    all_events = events(*log) + list(more)
    lives = checker.find_lives(all_events)
    return (checker.check_rows(plans, rows) + checker.check_blame(plans, rows, lives, incidents)[0]
            + checker.check_twice(all_events, lives) + checker.check_effects(plans, effects)
            + checker.check_repeats(plans, lives, incidents)[0]
            + checker.check_statistics(plans, lives, effects, incidents, stats, totals, rows))


def test_checker_is_content_with_a_run_in_which_all_went_well():
    assert complain() == []


@pytest.mark.parametrize('changes', [
    {'rows': {2: ROWS[2]}},
    {'rows': {1: ('b', 'running', None), 2: ROWS[2]}},
    {'rows': {1: ('b', 'failed', 'crash: worker exited with status 1'), 2: ROWS[2]}},
    {'rows': {1: ROWS[1], 2: ('b', 'failed', 'crash: worker exited with status 1')}},
    {'rows': {1: ROWS[1], 2: ('b', 'done', None)}},
    {'effects': EFFECTS + [(1, 'a')]},
    {'effects': EFFECTS[1:]},
    {'log': LOG + [(1, 'b', 12, 3.5, 6)]},
    {'log': LOG + [(1, 'b', 12, 5, 6)]},
    {'more': [checker.Event(9, 12, 'b', 1, 'double')]},
    {'stats': {'a': (3, 0, 0, 0), 'b': (1, 1, 0, 0)}},
    {'stats': {'a': (1, 0, 0, 0), 'b': (1, 1, 0, 0)}},
    {'stats': {'a': (2, 0, 0, 0), 'b': (1, 2, 0, 0)}},
    {'stats': {'a': (2, 0, 0, 0), 'b': (1, 1, 1, 0)}},
    {'totals': (4, 1)},
    {'totals': (4, 3)},
    {'totals': (3, 2)},
], ids=lambda changes: ' '.join('%s' % key for key in changes))
def test_checker_complains(changes):
    assert complain(**changes)


REPEATED = LOG[:3] + [(2, 'b', 11, 4, None), (2, 'b', 12, 6, 7)]


def test_checker_accepts_a_repetition_for_a_reason_only():
    assert complain(log=REPEATED)
    assert not complain(log=REPEATED, incidents=[Incident('killed', 5, 5, frozenset([DEAD]))])
    assert complain(log=REPEATED, incidents=[Incident('killed', 8, 8, frozenset([DEAD]))])
    assert complain(log=REPEATED, incidents=[Incident('killed', 5, 5, frozenset([DEAD]), frozenset([1]))])
    ended = LOG + [(2, 'b', 12, 6, 7)]
    assert complain(log=ended, incidents=[Incident('killed', 4.5, 5.5, frozenset([DEAD]))])
    assert not complain(log=ended, incidents=[Incident('killed', 4.5, 5.5, frozenset([REPEATS]))])


def test_checker_never_accepts_the_repetition_of_a_pass_that_was_committed():
    again = LOG + [(1, 'b', 12, 6, 7)]
    assert complain(log=again, incidents=[Incident('killed', 3, 6, frozenset([REPEATS]))])


def test_checker_accepts_one_blame_for_each_worker_that_was_killed_and_of_the_message_at_its_head():
    killed = [Incident('worker killed', 4, 4, frozenset([CRASH]), pids=(11,))]
    died = LOG[:3] + [(2, 'b', 11, 4, None)]
    lives = checker.find_lives(events(*died))
    head = {1: ROWS[1], 2: ('b', 'failed', 'crash: worker killed by SIGKILL')}
    assert checker.check_blame(PLANS, head, lives, killed) == ([], {2})
    assert checker.check_blame(PLANS, head, lives, [])[0]
    other = {1: ('b', 'failed', 'crash: worker killed by SIGKILL'), 2: ROWS[2]}
    assert checker.check_blame(PLANS, other, lives, killed)[0]


def test_checker_forgives_missing_counts_only_where_a_dispatcher_was_killed():
    few = {'a': (2, 0, 0, 0), 'b': (0, 1, 0, 0)}
    assert complain(stats=few)
    assert not complain(stats=few, incidents=[Incident('killed', 3.5, 4.5, frozenset([UNCOUNTED]))])
    assert complain(stats=few, incidents=[Incident('killed', 6, 7, frozenset([UNCOUNTED]))])
