"""How the dispatcher starts, stops, is killed and comes back; who is let in beside it, and which code it ends with."""
import contextlib
import json
import os
import signal
import time

import psutil
import psycopg2
import pytest
from pipeline import Counts, Pipeline, spawned
from support import Running, call, wait_until, write_config

LOCK_KEY = 0x7065707369  # of the dispatcher's advisory lock; the tests need no more than this of its inside


@pytest.fixture
def system(tmp_path, dsn, db):
    return Pipeline(tmp_path, dsn, db)


@contextlib.contextmanager
def holding_lock(system):
    """Hold the lock of the dispatcher in another session."""
    with contextlib.closing(psycopg2.connect(system.dsn, application_name='somebody else')) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute('SELECT pg_advisory_lock(%s)', [LOCK_KEY])
            yield


# -- one dispatcher for each database ----------------------------------------------------------------------------------

def test_a_second_dispatcher_says_who_is_there_changes_nothing_and_takes_over_later(system):
    config = system.write_config({'resize': system.stub()})
    with Running(config) as first:
        first.wait_log('took over epoch=1')
        with Running(config) as second:
            second.wait_log(r'WARNING.*pepsi-dispatch %d@' % first.pid)
            id = system.insert_one('resize')
            system.wait_status(id, 'done')
            assert not spawned(second)
            assert system.execute('SELECT epoch FROM dispatch_stats') == [(1,)]
            assert second.log().count('WARNING') == 1
            first.stop()
            second.wait_log('took over epoch=2')
            system.wait_status(system.insert_one('resize'), 'done')
            assert len(spawned(second)) == 1


def test_no_wait_exits_with_75_and_says_who_is_there(system):
    config = system.write_config({'resize': system.stub('hang')}, stop_timeout=0)
    with Running(config) as first:
        id = system.insert_one('resize')
        system.wait_begun(1)
        before = time.monotonic()
        result = call('-c', config, 'run', '--no-wait')
        assert result.code == 75
        assert 1 < time.monotonic() - before < 10
        assert result.out == ''
        assert 'pepsi-dispatch %d@' % first.pid in result.err
        assert system.row(id).status == 'running'
        assert system.execute('SELECT epoch FROM dispatch_stats') == [(1,)]


def test_no_wait_takes_over_from_one_that_leaves_at_this_moment(system):
    config = system.write_config({'resize': system.stub()})
    with holding_lock(system):
        second = Running(config, '--no-wait')
        second.wait_log('somebody else')
    with second:
        second.wait_log('took over')
        system.wait_status(system.insert_one('resize'), 'done')


def test_no_wait_works_as_the_default_command_too(system):
    config = system.write_config({'resize': system.stub()})
    with holding_lock(system):
        assert call('-c', config, '--no-wait').code == 75


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_one_that_waits_for_the_lock_stops_at_once(system, number):
    with holding_lock(system), system.run({'resize': system.stub()}) as running:
        running.wait_log('somebody else')
        before = time.monotonic()
        running.signal(number)
        assert running.wait() == 0
        assert time.monotonic() - before < 3


def test_dispatchers_of_different_databases_do_not_meet(system, pg, tmp_path):
    (tmp_path / 'other').mkdir()
    with contextlib.closing(psycopg2.connect(pg.dsn())) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute('CREATE DATABASE other_system TEMPLATE template0')
            try:
                with contextlib.closing(psycopg2.connect(pg.dsn('other_system'))) as db:
                    db.autocommit = True
                    other = Pipeline(tmp_path / 'other', pg.dsn('other_system'), db)
                    with system.run({'resize': system.stub('hang')}, stop_timeout=0) as first:
                        system.insert_one('resize')
                        system.wait_begun(1)
                        with other.run({'resize': other.stub()}, '--no-wait') as second:
                            other.wait_status(other.insert_one('resize'), 'done')
                            assert second.process.poll() is None
                        assert len(first.workers()) == 1  # no worker of the first was taken for a survivor
                        assert system.census() == {'running': 1}
            finally:
                cursor.execute('DROP DATABASE other_system')


# -- rows without an owner ---------------------------------------------------------------------------------------------

def test_rows_that_are_running_without_an_owner_are_reset_at_start(system):
    system.insert('resize', 5)
    unknown = system.insert('unheard of', 2)
    system.execute("UPDATE queue SET status = 'running'")
    done = system.insert('resize', 2)
    system.execute("UPDATE queue SET status = 'done' WHERE ingress_id = ANY (%s)", done)
    with system.run({'resize': system.stub()}) as running:
        system.wait_census(done=7, pending=2)
        running.wait_log('reset 7 ')
    assert system.row(unknown[0])[:2] == ('unheard of', 'pending')
    assert system.begun() == list(range(1, 6))


def test_rows_of_a_held_stage_are_reset_at_start_too(system):
    system.insert('held', 2)
    system.execute("UPDATE queue SET status = 'running'")
    with system.run({'held': {'PROGRAM': 'true', 'PARALLELISM': 0}}):
        system.wait_census(pending=2)


def test_a_row_that_loses_its_owner_later_is_reset_at_a_heartbeat(system):
    with system.run({'resize': system.stub(), 'deliver': system.stub('hang')}, poll_interval='300 ms', stop_timeout=0):
        held = system.insert_one('deliver')
        system.wait_begun(1)
        id = system.insert_one('unheard of')
        system.execute("UPDATE queue SET status = 'running', stage = 'resize' WHERE ingress_id = %s", id)
        system.wait_status(id, 'done')
        assert system.row(held).status == 'running'  # that one has an owner
    assert system.begun().count(held) == 1


# -- killed ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('steps', [['hang'], ['sigterm=ignore', 'hang'], ['stop'], ['child=3600', 'hang']])
def test_after_kill_9_the_workers_are_gone_before_the_next_dispatcher_resets_their_rows(system, steps):
    config = system.write_config({'resize': {'PROGRAM': system.stub('unless=%s/again' % system.directory, *steps),
                                             'PARALLELISM': 2, 'QUEUE_LIMIT': 2, 'PACK_BELOW': 0}})
    system.insert('resize', 6)
    with Running(config) as first:
        system.wait_begun(2)
        system.wait_census(running=4, pending=2)
        workers = first.family()
        first.kill()
        open(os.path.join(system.directory, 'again'), 'w').close()
        with Running(config) as second:
            second.wait_log('reset 4 ')
            assert not [pid for pid in workers if psutil.pid_exists(pid)
                        and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
            system.wait_census(done=6)
    ended = {e[3] for e in system.events('end')}
    assert ended == set(range(1, 7))
    assert len(system.begun()) == 8  # two were at work when it was killed


def test_workers_that_escaped_their_group_are_found_by_the_next_dispatcher(system):
    config = system.write_config({'resize': system.stub('unless=%s/again' % system.directory, 'escape=3600', 'hang')})
    id = system.insert_one('resize')
    with Running(config) as first:
        wait_until(lambda: len(first.family()) == 2)
        first.kill()
        wait_until(lambda: len(first.family()) == 1)
        open(os.path.join(system.directory, 'again'), 'w').close()
        with Running(config) as second:
            second.wait_log(r'killing process %d\b' % first.family()[0])
            system.wait_status(id, 'done')
            assert not first.family()


def test_many_kills_lose_and_double_nothing_that_was_not_at_work(system):
    config = system.write_config({'a': {'PROGRAM': system.stub('sleep=0.01', 'advance=b'), 'PARALLELISM': 2},
                                  'b': {'PROGRAM': system.stub('sleep=0.01'), 'PARALLELISM': 2}})
    system.insert('a', 200)
    for number in range(1, 6):
        with Running(config) as running:
            wait_until(lambda: len(system.events('end')) >= 40 * number)  # noqa: B023 - called at once
            running.kill()
    with Running(config):
        system.wait_census(done=200)
    committed = [(e[2], e[3]) for e in system.events('commit')]
    assert len(committed) == len(set(committed))  # the guard of the worker lets no pass be committed twice
    begun = [(e[2], e[3]) for e in system.events('begin')]
    assert len(set(begun)) == 400
    assert len(begun) <= 400 + 5 * 4  # a kill costs each of four workers what it had at work, and nothing else


# -- stopped -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_an_idle_dispatcher_stops_at_once_with_0(system, number):
    with system.run({'resize': system.stub()}) as running:
        system.wait_status(system.insert_one('resize'), 'done')
        before = time.monotonic()
        running.signal(number)
        assert running.wait() == 0
        assert time.monotonic() - before < 4  # the grace is longer
        assert not running.family()
    assert system.totals() == (1, 1)


def test_answers_that_still_come_during_a_stop_count_and_the_rest_goes_back(system, tmp_path):
    stage = {'PROGRAM': system.stub('await=%s' % (tmp_path / 'go')), 'PARALLELISM': 2, 'QUEUE_LIMIT': 4}
    with system.run({'resize': stage}, stop_timeout='30 s') as running:
        system.insert('resize', 20)
        system.wait_begun(2)
        system.wait_census(running=8, pending=12)
        running.signal(signal.SIGTERM)
        running.wait_log('stopping on SIGTERM')
        late = system.insert_one('resize')  # nothing more is claimed
        (tmp_path / 'go').touch()
        assert running.wait() == 0
    assert system.row(late).status == 'pending'
    finished = len(system.events('end'))
    assert 2 <= finished <= 8
    assert system.census() == {'done': finished, 'pending': 21 - finished}
    assert system.counts() == {'resize': Counts(finished, 0, 0, 0)}
    assert system.totals() == (finished, finished)


def test_workers_that_hang_are_killed_after_stop_timeout_and_their_rows_go_back(system):
    stage = {'PROGRAM': system.stub('sigterm=ignore', 'child=3600', 'hang'), 'PARALLELISM': 2, 'PACK_BELOW': 0}
    with system.run({'resize': stage}, stop_timeout='1 s') as running:
        system.insert('resize', 10)
        system.wait_begun(2)
        before = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert 0.9 < time.monotonic() - before < 1 + 3
        assert not running.family()
    assert system.census() == {'pending': 10}
    assert system.counts() == {}
    assert system.totals() == (0, 0)


@pytest.mark.parametrize('second', [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_at_once_and_the_rows_go_back_all_the_same(system, second):
    with system.run({'resize': system.stub('sigterm=ignore', 'hang')}, stop_timeout='1 h') as running:
        system.insert('resize', 10)
        system.wait_begun(1)
        running.signal(signal.SIGTERM)
        running.wait_log('stopping on SIGTERM')
        before = time.monotonic()
        running.signal(second)
        assert running.wait() == 0
        assert time.monotonic() - before < 3
        assert not running.family()
    assert system.census() == {'pending': 10}


def test_workers_are_sent_sigterm_and_the_end_of_their_input_at_stop(system):
    worker = system.script('worker', """
trap 'echo got TERM >&2' TERM
read -r id; echo 1
while read -r id; do :; done
while read -r id; do :; done  # the trap interrupts the first one in some shells
echo got EOF >&2
""")
    with system.run({'resize': worker}, worker_idle_timeout='1 h', stop_timeout='10 s') as running:
        system.insert_one('resize')
        system.wait_census(failed=1)
        assert running.stop() == 0
        assert 'got TERM' in running.log()
        assert 'got EOF' in running.log()
        assert 'killing' not in running.log()


def test_a_worker_that_dies_of_the_stop_costs_no_message(system):
    with system.run({'resize': system.stub('sigterm=default', 'hang'), 'deliver': system.stub('sleep=0.5', 'crash')},
                    stop_timeout='5 s') as running:
        system.insert('resize', 4)
        system.insert('deliver', 4)
        system.wait_begun(2)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert system.census() == {'pending': 8}
    assert system.counts() == {}


def test_rows_that_others_left_running_meanwhile_are_reset_at_stop(system):
    with system.run({'resize': system.stub()}) as running:
        running.wait_log('took over')
        system.wait_status(system.insert_one('resize'), 'done')
        ids = system.insert('unheard of', 3)
        system.execute("UPDATE queue SET status = 'running' WHERE ingress_id = ANY (%s)", ids)
    assert system.census() == {'done': 1, 'pending': 3}


def test_a_stage_in_cooldown_does_not_hold_up_a_stop(system):
    with system.run({'resize': '/no/such/program'}) as running:
        system.insert('resize', 3)
        running.wait_log('cooling')
        before = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - before < 4  # the grace is longer
    assert system.census() == {'pending': 3}


def test_descriptors_stay_the_same_over_many_workers(system):
    def descriptors():
        directory = '/proc/%d/fd' % running.pid
        return sorted(os.readlink(os.path.join(directory, fd)).rstrip('0123456789[]') for fd in os.listdir(directory))

    with system.run({'resize': {'PROGRAM': system.script('worker', 'read -r id; echo 1\n'), 'PARALLELISM': 4},
                     'deliver': '/no/such/program'}) as running:
        system.wait_status(system.insert_one('resize'), 'failed')  # all that is done at the start is over
        wait_until(lambda: not running.workers())
        before = descriptors()
        system.insert('deliver', 4)
        system.insert('resize', 60)
        wait_until(lambda: system.census() == {'failed': 61, 'pending': 4})
        wait_until(lambda: not running.workers())
        assert descriptors() == before


# -- what does not start -----------------------------------------------------------------------------------------------

def test_missing_tables_end_the_start_with_78(tmp_path, dsn, db):
    config = write_config(tmp_path, dsn, {'resize': 'true'})
    result = call('-c', config, 'run')
    assert result.code == 78
    assert 'init' in result.err
    assert 'Traceback' not in result.err
    assert result.out == ''


@pytest.mark.parametrize('damage', [
    'ALTER TABLE queue DROP COLUMN timeout CASCADE',
    'ALTER TABLE queue ALTER COLUMN state DROP DEFAULT, ALTER COLUMN state TYPE text',
    'DROP TABLE stage_stats',
    'ALTER TABLE dispatch_stats DROP COLUMN epoch',
    'DELETE FROM dispatch_stats',
])
def test_unusable_tables_end_the_start_with_78(system, damage):
    system.execute(damage)
    result = call('-c', system.write_config({'resize': 'true'}), timeout_s=15)
    assert result.code == 78
    assert 'Traceback' not in result.err
    assert len([line for line in result.err.splitlines() if 'ERROR' in line]) == 1


WRONG = {  # configuration -> what the error has to name
    '[pepsi-dispatch]\nMAX_RUNTIME = soon\n': ['pepsi-dispatch', 'MAX_RUNTIME', 'soon', '300 s'],
    '[pepsi-dispatch]\nSTOP_TIMEOUT = forever\n': ['pepsi-dispatch', 'STOP_TIMEOUT', 'forever'],
    '[pepsi-dispatch]\nPOLL_INTERVAL = 0\n': ['pepsi-dispatch', 'POLL_INTERVAL', '0'],
    '[stage-x]\n': ['stage-x', 'PROGRAM'],
    '[stage-x]\nPROGRAM = true\nQUEUE_LIMIT = 0\n': ['stage-x', 'QUEUE_LIMIT', '0', '1000'],
    '[stage-x]\nPROGRAM = true\nQUEUE_LIMIT = 1001\n': ['stage-x', 'QUEUE_LIMIT', '1001', '1000'],
    '[stage-x]\nPROGRAM = true\nPARALLELISM = -1\n': ['stage-x', 'PARALLELISM', '-1'],
    '[stage-x]\nPROGRAM = "true\n': ['stage-x', 'PROGRAM', '"true'],
    '[stage-x]\nPROGRAM = true\nprogram = false\n': ['stage-x', 'PROGRAM'],
    '[stage-x]\nPROGRAM = true\n[stage-x]\nPROGRAM = true\n': ['stage-x'],
    '[stage-id]\nPROGRAM = true\n': ['stage-id'],
    '[DEFAULT]\nPROGRAM = true\n': ['DEFAULT'],
    'PROGRAM = true\n': ['1'],
    '[stage-x]\nPROGRAM\n': ['2'],
}


def test_every_error_of_the_configuration_ends_the_start_with_78_and_one_clear_line(tmp_path):
    for text, names in WRONG.items():
        config = tmp_path / 'pepsi.conf'
        config.write_text(text)
        result = call('-c', str(config), 'run')
        assert result.code == 78, text
        assert result.out == ''
        [line] = [line for line in result.err.splitlines() if 'ERROR' in line]
        for name in names + [str(config)]:
            assert name in line
        assert 'Traceback' not in result.err


def test_a_configuration_that_cannot_be_read_ends_the_start_with_78(tmp_path):
    for path in (tmp_path / 'missing', tmp_path):
        result = call('-c', str(path))
        assert result.code == 78
        assert str(path) in result.err
    (tmp_path / 'latin').write_bytes(b'[pepsi]\nDATABASE = \xe9\n')
    assert call('-c', str(tmp_path / 'latin')).code == 78


def test_the_configuration_is_found_by_option_then_by_environment(system, tmp_path):
    config = system.write_config({'resize': system.stub()})
    (tmp_path / 'other').write_text('[pepsi-dispatch]\nMAX_RUNTIME = wrong\n')
    result = call(env={'PEPSI_CONFIG': str(tmp_path / 'other')})
    assert result.code == 78
    assert str(tmp_path / 'other') in result.err
    with Running(config, env={'PEPSI_CONFIG': str(tmp_path / 'other')}):
        system.wait_status(system.insert_one('resize'), 'done')


def test_an_unknown_option_or_section_is_a_warning_that_names_the_nearest_known_one(system, tmp_path):
    config = system.write_config({'resize': {'PROGRAM': system.stub(), 'PARALELISM': 1}}, max_runtme='1 s')
    with open(config, 'a') as file:
        file.write('[pepsi-dispach]\nX = 1\n[pepsi-httpd]\nPORT = 1\n[stages-x]\nPROGRAM = true\n')
    with Running(config) as running:
        system.wait_status(system.insert_one('resize'), 'done')
        warnings = '\n'.join(line for line in running.log().splitlines() if 'WARNING' in line)
    for names in (('PARALELISM', 'PARALLELISM'), ('MAX_RUNTME', 'MAX_RUNTIME'), ('pepsi-dispach', 'pepsi-dispatch'),
                  ('stages-x', 'stage-')):
        for name in names:
            assert name in warnings
    assert 'httpd' not in warnings
    assert len(warnings.splitlines()) == 4


def test_percent_and_dollar_signs_in_the_configuration_are_ordinary(system, tmp_path):
    answer = system.script('answer', 'while read -r id; do echo "1 $1 $2"; done\n')
    text = '[PEPSI]\n'.lower() + 'database = %s\n; a comment\n# another\n[stage-100%%]\nprogram = %s %%(x)s $HOME\n' % (
        system.dsn, answer)
    (tmp_path / 'pepsi.conf').write_text('\ufeff' + text.replace('%%', '%'), encoding='utf-8')
    with Running(str(tmp_path / 'pepsi.conf')):
        id = system.insert_one('100%')
        system.wait_status(id, 'failed')
    assert system.error(id) == 'status: 1 %(x)s $HOME'


def test_a_database_that_is_not_there_is_waited_for(system, pg):
    pg.stop()
    try:
        with system.run({'resize': system.stub()}) as running:
            running.wait_log('WARNING.*database')
            assert running.process.poll() is None
            assert running.stop() == 0
        with system.run({'resize': system.stub()}) as running:
            running.wait_log('WARNING.*database')
            pg.start()
            running.wait_log('took over')
    finally:
        pg.start()


def test_nothing_that_a_worker_or_the_log_writes_reaches_standard_output(system):
    with system.run({'resize': system.stub('print=hello')}) as running:
        system.wait_status(system.insert_one('resize'), 'done')
        assert running.log().count('hello') == 3
        assert running.stop() == 0  # and looks into standard output


def test_the_log_tells_version_stages_and_limits_at_start_and_why_it_ends(system):
    with system.run({'resize': system.stub(), 'deliver': system.stub()}) as running:
        running.wait_log(r'started pepsi-dispatch \d+\.\d+.*stages=2')
        running.stop()
        running.wait_log('stopping on SIGTERM')
        running.wait_log('stopped .*exit=0')


def test_outside_text_in_the_log_is_escaped_one_line_an_event(system):
    worker = system.script('worker', "read -r id; printf '1 a\\033[31mb\\n'; read -r id; printf 'c\\033[0md\\n'; cat\n")
    with system.run({'resize\u2713 "x"': {'PROGRAM': worker, 'PARALLELISM': 1}}) as running:
        system.insert('resize\u2713 "x"', 2)
        system.wait_census(failed=2)
        log = running.log()
    assert '\033' not in log
    for line in log.splitlines():
        assert line[:2] == '20'  # a time


def test_log_json_writes_one_object_a_line(system):
    config = system.write_config({'resize': system.stub('fail="a %22b%22"')})
    with Running(config, options=('--log-json',)) as running:
        system.insert_one('resize')
        system.wait_census(failed=1)
        running.stop()
        events = [json.loads(line) for line in running.log().splitlines()]
    assert {'time', 'level', 'message'} <= set(events[0])
    assert any('failed' in event['message'] for event in events)


def test_quiet_logs_warnings_only(system):
    with Running(system.write_config({'resize': system.stub('fail')}), options=('-q',)) as running:
        system.insert_one('resize')
        system.wait_census(failed=1)
        running.stop()
        assert running.log() == ''


# -- other signals -----------------------------------------------------------------------------------------------------

def reload(running):
    """Send SIGHUP and wait until it was served; return what was logged."""
    start = len(running.log())
    running.signal(signal.SIGHUP)
    match = running.wait_log('^.*(reloaded .*pepsi.conf|reload refused).*$', start=start)
    return running.log()[start:match.end() - len(running.log())] + match.group()


def test_sighup_gives_changed_stages_new_workers_as_the_old_ones_finish(system, tmp_path):
    hold = 'await=%s' % (tmp_path / 'go')
    with system.run({'a': {'PROGRAM': system.stub(hold), 'PARALLELISM': 1, 'QUEUE_LIMIT': 2}, 'b': system.stub()},
                    worker_idle_timeout='1 h') as running:
        system.wait_status(system.insert_one('b'), 'done')
        ids = system.insert('a', 4)
        system.wait_begun(2)
        first = set(spawned(running))
        system.write_config({'a': {'PROGRAM': system.stub('fail=new'), 'PARALLELISM': 1}, 'b': system.stub()},
                            worker_idle_timeout='1 h')
        reload(running)
        system.wait_status(system.insert_one('b'), 'done')
        (tmp_path / 'go').touch()
        wait_until(lambda: not {'pending', 'running'} & set(system.census()))
        assert len(set(spawned(running)) - first) == 1  # b has still its old one
        assert 'WARNING' not in running.log()
    begun = {e[3]: e[1] for e in system.events('begin') if e[2] == 'a'}
    assert sorted(begun) == ids
    assert len(system.begun('a')) == 4
    old = [id for id in ids if begun[id] in first]
    assert 1 <= len(old) <= 2  # what it had already
    assert [id for id in ids if system.row(id).status == 'done'] == old
    assert {system.error(id) for id in ids if id not in old} == {'status: 1 new'}


def test_sighup_adds_and_removes_stages(system):
    with system.run({'a': system.stub()}) as running:
        system.wait_status(system.insert_one('a'), 'done')
        waiting = system.insert_one('b')
        system.write_config({'b': system.stub()})
        reload(running)
        system.wait_status(waiting, 'done')
        held = system.insert_one('a')
        system.wait_status(system.insert_one('b'), 'done')
        assert system.row(held).status == 'pending'
        system.write_config({'a': system.stub(), 'b': system.stub()})
        reload(running)
        system.wait_status(held, 'done')


def test_sighup_changes_parallelism_up_and_down(system):
    with system.run({'a': {'PROGRAM': system.stub('hang'), 'PARALLELISM': 1, 'QUEUE_LIMIT': 1}},
                    stop_timeout=0) as running:
        system.insert('a', 6)
        system.wait_begun(1)
        assert system.census() == {'running': 1, 'pending': 5}
        system.write_config({'a': {'PROGRAM': system.stub('hang'), 'PARALLELISM': 3, 'QUEUE_LIMIT': 1}}, stop_timeout=0)
        reload(running)
        system.wait_begun(3)
        assert system.census() == {'running': 3, 'pending': 3}
        system.write_config({'a': {'PROGRAM': system.stub(), 'PARALLELISM': 0}}, stop_timeout=0)
        reload(running)
        for worker in running.workers():
            worker.kill()
        system.wait_census(failed=3, pending=3)
        wait_until(lambda: not running.workers())


def test_sighup_with_a_bad_file_changes_nothing(system):
    config = system.write_config({'a': system.stub()})
    with Running(config) as running:
        system.wait_status(system.insert_one('a'), 'done')
        with open(config) as file:
            good = file.read()
        for bad in (good + 'QUEUE_LIMIT = 0\n', 'nonsense\n', None):
            if bad is None:
                os.remove(config)
            else:
                with open(config, 'w') as file:
                    file.write(bad)
            log = reload(running)
            assert 'ERROR' in log
            assert 'refused' in log
            system.wait_status(system.insert_one('a'), 'done')
        with open(config, 'w') as file:
            file.write(good.replace('dbname=', 'dbname=another_'))
        assert 'restart' in reload(running)
        system.wait_status(system.insert_one('a'), 'done')


def test_sighup_while_a_stage_cools_down_tries_the_repaired_program_at_once(system):
    with system.run({'a': '/no/such/program'}) as running:
        id = system.insert_one('a')
        running.wait_log('cooling stage=a for 4 s')
        system.write_config({'a': system.stub()})
        reload(running)
        system.wait_status(id, 'done', 3.5)  # the cooldown is longer


def test_sigusr1_writes_the_state_of_the_pools_to_the_log(system):
    with system.run({'a': {'PROGRAM': system.stub('hang'), 'PARALLELISM': 2}, 'b': system.stub()},
                    stop_timeout=0) as running:
        id = system.insert_one('a')
        system.wait_begun(1)
        [worker] = [w.pid for w in running.workers()]
        running.signal(signal.SIGUSR1)
        running.wait_log('state stage=b ')
        assert running.wait_log(r'state worker %d .*\b%d\b' % (worker, id))
        assert running.process.poll() is None


def test_a_storm_of_signals_does_no_harm(system):
    system.insert('a', 50)
    with system.run({'a': {'PROGRAM': system.stub('sleep=0.01'), 'PARALLELISM': 2}}, stop_timeout=0) as running:
        running.wait_log('took over')
        for _ in range(3000):
            running.signal(signal.SIGCHLD)
            running.signal(signal.SIGUSR1)
        system.wait_census(done=50)
        system.wait_status(system.insert_one('a'), 'done', 5)
    assert sorted(system.begun()) == sorted(set(system.begun()))


def test_a_stop_of_the_process_for_a_while_times_nobody_out_that_answered_in_time(system):
    with system.run({'a': {'PROGRAM': system.stub('sleep=0.3'), 'MAX_RUNTIME': '1 s', 'PARALLELISM': 2}}) as running:
        system.insert('a', 2)
        system.wait_begun(2)
        running.signal(signal.SIGSTOP)
        wait_until(lambda: len(system.events('end')) == 2)
        time.sleep(1.2)  # no proof: it makes the deadlines pass while it is stopped
        running.signal(signal.SIGCONT)
        wait_until(lambda: system.totals()[0] == 2)
    assert system.census() == {'done': 2}
    assert system.counts() == {'a': Counts(2, 0, 0, 0)}
