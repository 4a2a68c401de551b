"""What an operator sees and does: status in all its forms, requeue, reload, the report on USR1, and the log."""
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import psycopg2
import pytest
from pipeline import Pipeline, spawned
from support import DISPATCHER, PYTHON, Running, call, wait_until, write_config

import pepsidispatch

STATUSES = ('pending', 'running', 'paused', 'done', 'failed', 'timeout')
SHOWN = tuple(status for status in STATUSES if status != 'done')

# Whoever may INSERT may do so with these. The longest is last.
HOSTILE = ['plain', "it's", 'say "hi"', 'back\\slash', 'two\nlines', 'carriage\rreturn', '100%', '%s%(x)s%%',
           '\x1b[31mred', '\x01\x07\x7f\x80\x9b', 'tab\tbed', '{brace}=,', '-', '', ' ', 'gr\u00f6\u00dfe',
           '\u65e5\u672c', '\U0001f600', 'right\u202eto left', 'two\u2028lines', "'; DROP TABLE queue; --", 'x' * 10000]


@pytest.fixture
def system(tmp_path, dsn, db):
    return Pipeline(tmp_path, dsn, db)


def fill(system, names):
    """Queue a row of each status at each stage, and count something for each."""
    for name in names:
        for status in STATUSES:
            system.execute('INSERT INTO queue (stage, status) VALUES (%s, %s)', name, status)
        system.execute('INSERT INTO stage_stats VALUES (%s, 1, 2, 3, 4, 5.5)', name)


# -- status ------------------------------------------------------------------------------------------------------------

def test_status_json_has_the_keys_of_the_contract_whatever_stages_are_called(system):
    fill(system, HOSTILE)
    system.execute("UPDATE queue SET timeout = now() + interval '100 s' WHERE status = 'paused' AND stage = 'plain'")
    system.execute('UPDATE dispatch_stats SET stages = 7, messages = 8')
    with Running(system.write_config({'configured': 'true'})) as running:
        running.wait_log('took over epoch=1')
        result = call('-c', system.directory + '/pepsi.conf', 'status', '--json')
    assert (result.code, result.err) == (0, '')
    [line] = result.out.splitlines()
    seen = json.loads(line)
    assert set(seen) == {'dispatcher', 'stages', 'totals', 'next_due_seconds'}
    assert set(seen['dispatcher']) == {'pid', 'host', 'since', 'epoch'}
    assert seen['totals'] == {'stages': 7, 'messages': 8}
    assert 0 < seen['next_due_seconds'] <= 100
    assert set(seen['stages']) == set(HOSTILE) | {'configured'}
    for name in HOSTILE:
        row = seen['stages'][name]
        assert set(row) == {'pending', 'running', 'paused', 'failed', 'timeout', 'oldest_pending_seconds', 'workers',
                            'processed', 'processing_seconds'}
        assert sum(row[status] for status in SHOWN) == 5
        assert (row['workers'], row['processed'], row['processing_seconds']) == (0, 1, 5.5)


def test_status_for_prometheus_is_read_by_its_own_parser_whatever_stages_are_called(system):
    parser = pytest.importorskip('prometheus_client.parser', reason='prometheus_client from PyPI is not installed')
    fill(system, HOSTILE)
    system.execute('UPDATE dispatch_stats SET stages = 7, messages = 8')
    result = subprocess.run(PYTHON + [DISPATCHER, '-c', system.write_config({'configured': 'true'}), 'status',
                                      '--prometheus'], stdout=subprocess.PIPE, env=dict(os.environ, PYTHONUTF8='1'))
    assert result.returncode == 1
    families = {f.name: f for f in parser.text_string_to_metric_families(result.stdout.decode('utf-8'))}
    samples = {}
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            key = sample.name, sample.labels.get('stage'), sample.labels.get('status')
            assert key not in samples
            samples[key] = sample.value
    for name in HOSTILE:
        assert [samples['pepsi_queue_messages', name, status] for status in SHOWN] == [1] * 5
        assert [samples['pepsi_stage_%s_total' % column, name, None] for column in (
            'processed', 'failed', 'timeouts', 'crashes', 'processing_seconds')] == [1, 2, 3, 4, 5.5]
    assert samples['pepsi_queue_messages', 'configured', 'failed'] == 0
    assert samples['pepsi_stages_total', None, None] == 7
    assert samples['pepsi_messages_total', None, None] == 8
    assert samples['pepsi_dispatcher_up', None, None] == 0
    assert {name: family.type for name, family in families.items()} == {
        'pepsi_queue_messages': 'gauge', 'pepsi_oldest_pending_seconds': 'gauge', 'pepsi_stage_processed': 'counter',
        'pepsi_stage_failed': 'counter', 'pepsi_stage_timeouts': 'counter', 'pepsi_stage_crashes': 'counter',
        'pepsi_stage_processing_seconds': 'counter', 'pepsi_stages': 'counter', 'pepsi_messages': 'counter',
        'pepsi_dispatcher_up': 'gauge'}


def test_status_is_a_table_of_one_narrow_line_a_stage_whatever_stages_are_called(system):
    fill(system, HOSTILE)
    result = subprocess.run(PYTHON + [DISPATCHER, '-c', system.write_config({'configured': 'true'}), 'status'],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, PYTHONUTF8='1'))
    assert (result.returncode, result.stderr) == (1, b'')
    text = result.stdout.decode('utf-8')
    assert all(char.isprintable() or char == '\n' for char in text)
    lines = text.split('\n')[:-1]
    assert lines[1].split() == ['STAGE', 'PENDING', 'RUNNING', 'PAUSED', 'FAILED', 'TIMEOUT', 'OLDEST', 'WORKERS',
                                'PROCESSED']
    stages = [line for line in lines if re.search(r' 1 +1 +1 +1 +1 +- +0 +1$', line)]
    assert len(set(stages)) == len(HOSTILE)
    assert [line for line in stages if re.match('plain +1 ', line)]
    assert max(map(len, lines)) < 160  # the longest name takes no screen to itself
    assert len(lines) < len(HOSTILE) + 10


@pytest.mark.parametrize('form', ['', '--json', '--prometheus'])
def test_status_without_a_database_writes_nothing_to_standard_output(tmp_path, form):
    config = write_config(tmp_path, 'host=%s dbname=nothing' % tmp_path, {'a': 'true'})
    result = call('-c', config, 'status', *form.split())
    assert (result.code, result.out) == (69, '')
    assert len(result.err.splitlines()) == 1
    assert call('-c', str(tmp_path / 'missing'), 'status', *form.split()).code == 78


class Terminal:
    """A command on a terminal of its own; a context manager."""

    def __init__(self, *arguments, rows=50, columns=200, **variables):
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', rows, columns, 0, 0))
        self.process = subprocess.Popen(
            PYTHON + [DISPATCHER] + list(arguments), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # else Ctrl-C reaches nobody
            env=dict(os.environ, TERM='xterm', **variables))
        os.close(theirs)
        self.text = ''

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)

    def read(self):
        """Take what is there and return all that was written until now."""
        while select.select([self._fd], [], [], 0)[0]:
            try:
                self.text += os.read(self._fd, 65536).decode('utf-8', 'replace')
            except OSError:  # its other end is closed
                break
        return self.text

    def type(self, text):
        """Type at the terminal."""
        os.write(self._fd, text.encode())

    def wait(self):
        """Wait for the end of the command and return its exit code."""
        wait_until(lambda: self.read() is None or self.process.poll() is not None, 20, 'the end of the command')
        self.read()
        return self.process.returncode

    def screens(self):
        """Return the complete screens of --watch, without colours."""
        return re.findall(r'\033\[H(.*?)\033\[J', re.sub(r'\033\[[0-9;]*m', '', self.read()), re.DOTALL)

    def wait_screens(self, number):
        """Wait until there are so many screens and return them."""
        wait_until(lambda: len(self.screens()) >= number, 20, '%d screens' % number)
        return self.screens()


def test_status_on_a_terminal_is_coloured_unless_it_is_told_otherwise(system):
    fill(system, ['a'])
    config = system.write_config({'a': 'true'})
    with Terminal('-c', config, 'status') as terminal:
        assert terminal.wait() == 1
        assert '\033[31m' in terminal.text
        assert '\033[H' not in terminal.text
    with Terminal('-c', config, 'status', NO_COLOR='1') as terminal:
        assert terminal.wait() == 1
        assert '\033' not in terminal.text
    with Terminal('-c', config, 'status', '--json') as terminal:
        assert terminal.wait() == 1
        assert '\033' not in terminal.text


def test_status_watch_refreshes_in_place_until_ctrl_c(system):
    with Terminal('-c', system.write_config({'a': 'true'}), 'status', '--watch') as terminal:
        terminal.wait_screens(1)
        system.insert('a', 3)
        first, second = terminal.wait_screens(2)
        terminal.type('\x03')
        assert terminal.wait() == 0
        assert 'Traceback' not in terminal.text
        assert 'KeyboardInterrupt' not in terminal.text
    assert 4 <= len(first.splitlines()) <= len(second.splitlines()) <= 6
    assert re.search(r'^a +0 ', first, re.MULTILINE)
    assert re.search(r'^a +3 ', second, re.MULTILINE)
    for line in second.splitlines()[:-1]:
        assert line.endswith('\033[K')  # what stood there before is gone


def test_status_watch_shows_rates_over_the_time_in_which_the_counters_grew(system):
    """The counters are written every STATS_INTERVAL, which is longer than the time between two looks."""
    system.execute("INSERT INTO stage_stats (stage, processed) VALUES ('a', 1000)")
    with Terminal('-c', system.write_config({'a': 'true'}), 'status', '--watch') as terminal:
        terminal.wait_screens(3)
        system.execute('UPDATE stage_stats SET processed = 1600')
        screens = terminal.wait_screens(4)
        terminal.type('\x03')
        terminal.wait()
    assert 'RATE/s' in screens[-1]
    [rate] = re.findall(r'^a .* 1600 +([0-9.]+)', screens[-1], re.MULTILINE)
    assert 75 < float(rate) < 150  # 600 in six seconds


def test_status_watch_outlives_a_restart_of_the_database(system, pg):
    with Terminal('-c', system.write_config({'a': 'true'}), 'status', '--watch') as terminal:
        terminal.wait_screens(1)
        system.db.close()
        pg.stop()
        try:
            wait_until(lambda: 'cannot reach the database' in terminal.read(), 20)
        finally:
            pg.start()
        assert 'RUNNING' in terminal.wait_screens(len(terminal.screens()) + 2)[-1]
        terminal.type('\x03')
        assert terminal.wait() == 0


def test_status_reads_nothing_of_what_is_done(system):
    system.execute("INSERT INTO queue (stage, status) SELECT 'a', 'done' FROM generate_series(1, 50000)")
    fill(system, ['a', 'b'])
    system.execute('VACUUM (ANALYZE) queue')
    looked = []
    for name, statement in sorted(vars(pepsidispatch).items()):
        if name.startswith('STATUS_') and 'queue' in statement:
            plan = [line for line, in system.execute('EXPLAIN ' + statement.replace(
                '%(stages)s', "'{a,b}'"))]
            assert not [line for line in plan if re.search('Seq Scan on queue', line)], '\n'.join(plan)
            looked.append(name)
    assert {'STATUS_ROWS', 'STATUS_OLDEST', 'STATUS_TOTALS'} <= set(looked)


@contextlib.contextmanager
def locked(system, statement):
    """Hold locks in another session, by a statement."""
    with contextlib.closing(psycopg2.connect(system.dsn)) as connection:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            yield


def test_status_and_requeue_do_not_wait_for_a_lock_for_ever(system):
    config = system.write_config({'a': 'true'})
    id = system.insert_one('a')
    system.execute("UPDATE queue SET status = 'failed'")
    with locked(system, 'LOCK TABLE queue'):
        status = subprocess.Popen(PYTHON + [DISPATCHER, '-c', config, 'status'], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE)
        requeue = call('-c', config, 'requeue', '--all', timeout_s=20)
        out, err = status.communicate(timeout=20)
    assert (status.returncode, out) == (69, b'')
    assert b'lock' in err
    assert (requeue.code, requeue.out) == (69, '')
    assert 'lock' in requeue.err
    assert system.row(id).status == 'failed'


@pytest.mark.parametrize('rows, columns', [(12, 80), (24, 100), (8, 60)])
def test_status_watch_fits_a_small_terminal(system, rows, columns):
    for number in range(30):
        system.insert('stage%d' % number, number + 1)
    config = system.write_config({'a': 'true'})
    with Terminal('-c', config, 'status', '--watch', rows=rows, columns=columns) as terminal:
        screen = terminal.wait_screens(2)[1].replace('\033[K', '').replace('\r', '')
        terminal.type('\x03')
        terminal.wait()
    lines = screen.rstrip('\n').split('\n')
    assert lines[0].startswith('no dispatcher')  # nothing was scrolled away
    assert len(lines) <= rows
    assert max(map(len, lines)) <= max(columns, 97)  # the numbers stay, the bar goes
    assert re.search(r'\d+ more', screen)
    assert re.search(r'^stage29 +30 ', screen, re.MULTILINE)  # who has most to do is not among those left out


# -- check -------------------------------------------------------------------------------------------------------------

def test_check_of_a_read_only_database_says_just_that(system):
    config = system.write_config({'a': 'true'})
    result = call('-c', config, 'check', env={'PGOPTIONS': '-c default_transaction_read_only=on'})
    assert result.code == 1
    [line] = [line for line in (result.out + result.err).splitlines() if 'ok: ' not in line]
    assert 'read-only' in line
    assert 'refused' not in line


def test_check_names_many_stages_without_a_section_in_one_line(system):
    for number in range(25):
        system.insert('stage%d' % number, 2)
    result = call('-c', system.write_config({'a': 'true'}), 'check')
    assert result.code == 0
    [line] = [line for line in result.out.splitlines() if line.startswith('warning')]
    assert '25' in line
    assert 'stage0' in line


@pytest.mark.parametrize('command', ['run', 'status', 'requeue --all'])
def test_a_role_that_lacks_rights_is_told_so_and_not_to_run_init(system, command):
    system.execute('CREATE ROLE lacking LOGIN')
    try:
        config = write_config(system.directory, system.dsn.replace('user=postgres', 'user=lacking'), {'a': 'true'})
        result = call('-c', config, *command.split())
        assert result.code == 78
        [line] = [line for line in result.err.splitlines() if 'ERROR' in line]
        assert 'permission denied' in line
        assert 'check' in line
        assert 'init' not in line
    finally:
        system.execute('DROP ROLE lacking')


TRAPS = {
    'a comment behind a value': ('[stage-a]\nPROGRAM = true # quick\n', ['PROGRAM', '#']),
    'an option that is indented': ('[stage-a]\nPROGRAM = true\n  PARALLELISM = 1\n', ['PROGRAM', 'PARALLELISM']),
    'a capital': ('[Stage-a]\nPROGRAM = true\n', ['[Stage-a]', '[stage-a]']),
    'a blank': ('[stage a]\nPROGRAM = true\n', ['[stage a]', '[stage-a]']),
    'capitals': ('[PEPSI]\n[stage-a]\nPROGRAM = true\n', ['[PEPSI]', '[pepsi]']),
    'an option of another section': ('[stage-a]\nPROGRAM = true\nSTOP_TIMEOUT = 1\n',
                                     ['STOP_TIMEOUT', '[stage-a]', '[pepsi-dispatch]']),
}


@pytest.mark.parametrize('trap', sorted(TRAPS))
def test_a_trap_in_the_configuration_is_pointed_out(trap):
    text, words = TRAPS[trap]
    try:
        lines = pepsidispatch.parse_config(text, 'pepsi.conf').warnings
    except pepsidispatch.Failure as error:
        lines = error.lines
    assert [line for line in lines if all(word in line for word in words)], lines


# -- requeue -----------------------------------------------------------------------------------------------------------

def test_requeue_wakes_an_idle_dispatcher_and_leaves_what_is_running_to_its_worker(system, tmp_path):
    go = str(tmp_path / 'go')
    with system.run({'a': system.stub('await=' + go), 'b': system.stub()}) as running:
        at_work = system.insert_one('a')
        system.wait_begun(1)
        for status in ('failed', 'timeout', 'paused', 'done'):
            system.execute("INSERT INTO queue (stage, status) VALUES ('b', %s)", status)
        before = system.execute('SELECT ctid, * FROM queue WHERE ingress_id = %s', at_work)
        running.wait_log('took over')
        result = call('-c', system.directory + '/pepsi.conf', 'requeue', '--all')
        assert (result.code, result.out) == (0, 'requeued 2 messages\n')
        system.wait_census(5, done=3, running=1, paused=1)  # a heartbeat is an hour away
        result = call('-c', system.directory + '/pepsi.conf', 'requeue', str(at_work))
        assert (result.code, result.out[:11]) == (0, 'requeued 0 ')
        assert system.execute('SELECT ctid, * FROM queue WHERE ingress_id = %s', at_work) == before
        (tmp_path / 'go').touch()
        system.wait_status(at_work, 'done')
    assert sorted(system.begun()) == sorted(set(system.begun()))


@pytest.mark.parametrize('text', ['', '\n'])
def test_requeue_of_an_empty_input_requeues_nothing(system, text):
    system.execute("INSERT INTO queue (stage, status) SELECT 'a', 'failed' FROM generate_series(1, 5)")
    done = subprocess.run(PYTHON + [DISPATCHER, '-c', system.write_config({'a': 'true'}), 'requeue', '-'],
                          input=text.encode(), stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert re.match(rb'requeued 0\b', done.stdout)
    assert system.census() == {'failed': 5}


def test_requeue_of_thousands_beside_a_busy_dispatcher_runs_each_once_more(system):
    system.execute("INSERT INTO queue (stage, status) SELECT 'a', 'failed' FROM generate_series(1, 2000)")
    with system.run({'a': system.stub()}):
        system.insert('a', 1000)
        system.wait_begun(100)
        assert call('-c', system.directory + '/pepsi.conf', 'requeue', '--stage=a').out == 'requeued 2000 messages\n'
        system.wait_census(60, done=3000)
    assert len(system.begun()) == len(set(system.begun())) == 3000


# -- reload ------------------------------------------------------------------------------------------------------------

def reload(running):
    """Send SIGHUP, wait until it was served, and return what was logged for it."""
    running.wait_log('started pepsi-dispatch')
    start = len(running.log())
    running.signal(signal.SIGHUP)
    match = running.wait_log('^.*(reloaded .*pepsi.conf|reload refused).*$', start=start)
    return running.log()[start:].partition(match.group())[0] + match.group()


def test_a_reload_of_the_same_file_replaces_no_worker(system):
    with system.run({'a': system.stub(), 'b': system.stub()}, worker_idle_timeout='1 h') as running:
        for stage in 'ab':
            system.wait_status(system.insert_one(stage), 'done')
        log = reload(running)
        assert 'stage=' not in log
        for stage in 'ab':
            system.wait_status(system.insert_one(stage), 'done')
        assert len(spawned(running)) == 2


def test_a_reload_says_which_options_have_changed_and_how(system):
    with system.run({'a': {'PROGRAM': system.stub(), 'PARALLELISM': 3}, 'b': {'PROGRAM': 'true', 'MAX_RUNTIME': '7 s'}},
                    max_runtime='5 min') as running:
        running.wait_log('took over')
        system.write_config({'a': {'PROGRAM': system.stub(), 'PARALLELISM': 2}, 'c': 'true',
                             'b': {'PROGRAM': 'true', 'MAX_RUNTIME': '7 s'}}, max_runtime='1 h')
        log = reload(running)
        assert re.search(r'stage=a: .*PARALLELISM 3 -> 2\b', log)
        assert re.search(r'stage=a: .*MAX_RUNTIME 300 s -> 3600 s', log)
        assert re.search(r'stage=c: added', log)
        assert 'stage=b' not in log  # which has its own
        system.write_config({'a': {'PROGRAM': system.stub(), 'PARALLELISM': 2}}, max_runtime='1 h')
        log = reload(running)
        assert re.search(r'stage=b: removed', log)
        assert 'stage=a' not in log


def test_a_stage_is_held_and_released_by_a_reload(system, tmp_path):
    go = 'await=%s' % (tmp_path / 'go')
    stage = {'PROGRAM': system.stub(go), 'PARALLELISM': 1, 'QUEUE_LIMIT': 1}
    with system.run({'a': stage, 'b': system.stub()}) as running:
        ids = system.insert('a', 3)
        system.wait_begun(1)
        system.write_config({'a': dict(stage, PARALLELISM=0), 'b': system.stub()})
        reload(running)
        (tmp_path / 'go').touch()
        system.wait_census(done=1, pending=2)  # the old one finishes what it has, and answers
        system.wait_status(system.insert_one('b'), 'done')
        assert system.begun('a') == ids[:1]
        system.write_config({'a': stage, 'b': system.stub()})
        reload(running)
        system.wait_census(done=4)
    assert system.begun('a') == ids


def test_a_bad_file_is_refused_with_every_error_and_nothing_of_it_is_taken(system):
    config = system.write_config({'a': system.stub()})
    with Running(config) as running:
        system.wait_status(system.insert_one('a'), 'done')
        write_config(system.directory, system.dsn, {'a': {'PROGRAM': 'false', 'QUEUE_LIMIT': 0}, 'b': system.stub()},
                     max_runtime='soon')
        log = reload(running)
        assert log.count('ERROR') == 3
        for words in (('stage-a', 'QUEUE_LIMIT', "'0'"), ('pepsi-dispatch', 'MAX_RUNTIME', "'soon'"), ('refused',)):
            assert [line for line in log.splitlines() if all(word in line for word in words)]
        waiting = system.insert_one('b')
        system.wait_status(system.insert_one('a'), 'done')
        assert system.row(waiting).status == 'pending'


def test_a_reload_while_the_database_is_away_counts_when_it_is_back(system, pg):
    with system.run({'a': system.stub()}) as running:
        running.wait_log('took over')
        system.db.close()
        pg.stop()
        try:
            running.wait_log('WARNING.*database away')
            system.write_config({'b': system.stub()})
            reload(running)
        finally:
            pg.start()
        running.wait_log('database is back')
        system.db = psycopg2.connect(system.dsn)
        system.db.autocommit = True
        with contextlib.closing(system.db):
            system.wait_status(system.insert_one('b'), 'done')


def test_another_database_takes_a_restart_and_says_so_without_its_password(system):
    config = system.write_config({'a': system.stub()})
    with Running(config) as running:
        running.wait_log('took over')
        write_config(system.directory, system.dsn + ' password=s3cret', {'a': system.stub()}, poll_interval='1 h')
        log = reload(running)
        assert re.search(r'WARNING.*DATABASE.*restart', log)
        assert 's3cret' not in log
        system.wait_status(system.insert_one('a'), 'done')
        assert 'DATABASE' in reload(running)  # it is still so


# -- the report on USR1 ------------------------------------------------------------------------------------------------

def report(running):
    """Send SIGUSR1 and return the lines of the report, without time and level."""
    running.wait_log('started pepsi-dispatch')
    start = len(running.log())
    running.signal(signal.SIGUSR1)
    running.wait_log('state timer heartbeat', start=start)
    return [line.split(None, 3)[3] for line in running.log()[start:].splitlines() if ' state ' in line]


def test_usr1_reports_pools_workers_cooldowns_deadlines_and_the_connection(system):
    with system.run({'a': {'PROGRAM': system.stub('hang'), 'PARALLELISM': 2, 'QUEUE_LIMIT': 1, 'MAX_RUNTIME': '50 s'},
                     'broken': '/no/such/program', 'idle': 'true'}, stop_timeout=0) as running:
        ids = system.insert('a', 3)
        system.wait_begun(2)
        system.insert_one('broken')
        running.wait_log('cooling stage=broken for 2 s')
        lines = report(running)
        for pattern in (r'state phase=serving link=ready server_process=[0-9]+ epoch=1 ',
                        r'state stage=a workers=2/2 in_flight=2 .*cooling=no',
                        r'state stage=broken workers=0/4 in_flight=0 .*cooling=[0-9.]+ s',
                        r'state stage=idle workers=0/4 in_flight=0 .*cooling=no',
                        r'state timer cooldown broken in [0-9.]+ s',
                        r'state timer heartbeat in 3[0-9]{3} s'):
            assert [line for line in lines if re.match(pattern, line)], (pattern, lines)
        pattern = r'state worker (\d+) stage=a serving age=[0-9.]+ s .*in_flight=1 head=(\d+) since=[0-9.]+ s'
        workers = [re.match(pattern, line) for line in lines if line.startswith('state worker')]
        assert {int(m.group(1)) for m in workers} == set(spawned(running))
        assert {int(m.group(2)) for m in workers} == set(ids[:2])
        watchdogs = [re.match(r'state timer watchdog (\d+) in [34][0-9](\.[0-9])? s', line) for line in lines
                     if 'watchdog' in line]
        assert {int(m.group(1)) for m in watchdogs} == set(spawned(running))


def test_usr1_tells_that_the_database_is_away_and_why(system, pg):
    with system.run({'a': system.stub()}) as running:
        running.wait_log('took over')
        system.db.close()
        pg.stop()
        try:
            running.wait_log('WARNING.*database away')
            [line] = [line for line in report(running) if line.startswith('state phase')]
        finally:
            pg.start()
        assert re.search(r'link=(away|opening) .*database away: ', line)
        running.wait_log('database is back')


def test_usr1_shows_no_more_than_a_screen_of_timers(system):
    with system.run({'a': {'PROGRAM': system.stub('hang'), 'PARALLELISM': 40, 'QUEUE_LIMIT': 1}},
                    stop_timeout=0) as running:
        system.insert('a', 40)
        wait_until(lambda: len(spawned(running)) == 40)
        start = len(running.log())
        running.signal(signal.SIGUSR1)
        running.wait_log('state timer', start=start)
        running.signal(signal.SIGHUP)
        running.wait_log('reloaded', start=start)
        assert running.log().count('state worker') == 40
        assert running.log().count('state timer') <= 25


# -- the log -----------------------------------------------------------------------------------------------------------

REASONS = ['plain', 'a "quoted" \\ one', '\u00e4' * 2000, '\U0001f600' * 2000, '\u2028\u202e\x9b', '\x1b[31m']


def test_every_line_of_log_json_is_an_object_with_the_same_keys(system):
    stages = {'a': {'PROGRAM': system.stub(), 'PARALLELISM': 1},
              '\u65e5\u672c "x"': system.stub('say=nonsense%ff', 'hang'),
              'broken': '/no/such/program', 'c': {'PROGRAM': system.stub('crash=KILL'), 'QUEUE_LIMIT': 3}}
    config = system.write_config(stages, unknown='option')
    with Running(config, options=('--log-json', '-vv')) as running:
        for reason in REASONS:
            system.execute("INSERT INTO queue (stage, state) VALUES ('a', jsonb_build_object('stub', %s::text))",
                           "fail='%s'" % reason)
        for stage in ('\u65e5\u672c "x"', 'broken', 'c'):
            system.insert_one(stage)
        wait_until(lambda: system.census() == {'failed': len(REASONS) + 2, 'pending': 1})
        for number in (signal.SIGUSR1, signal.SIGHUP):
            running.signal(number)
        running.wait_log('reloaded')
        with open(config, 'a') as file:
            file.write('nonsense\n')
        running.signal(signal.SIGHUP)
        running.wait_log('reload refused')
        running.stop()
        events = [json.loads(line) for line in running.log().splitlines()]
    for event in events:
        assert set(event) == {'time', 'level', 'pid', 'message'}
        assert event['level'] in ('trace', 'debug', 'info', 'warning', 'error')
        assert event['pid'] == running.pid
        assert re.match(r'\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d{3}', event['time'])
        assert '\n' not in event['message']
    assert {event['level'] for event in events} == {'trace', 'debug', 'info', 'warning', 'error'}
    for id in range(1, 1 + len(REASONS)):
        assert [event for event in events if ' %d failed' % id in event['message']]


def test_a_long_line_is_cut_at_a_character(system):
    stage = '\U0001f600' * 150
    with system.run({stage: {'PROGRAM': system.stub(), 'PARALLELISM': 1}}) as running:
        for shift in range(4):
            system.execute("INSERT INTO queue (stage, state) VALUES (%s, jsonb_build_object('stub', %s::text))",
                           stage, "fail='%s'" % ('x' * shift + '\U0001f600' * 2000))
        system.wait_census(failed=4)
        running.stop()
        lines = [line for line in running.log().splitlines() if ' failed stage=' in line]
    assert len(lines) == 4
    for line in lines:
        assert '\ufffd' not in line
        assert 'status: 1 ' in line
        assert len(line.encode()) < 4096  # in one piece into a pipe


@pytest.mark.parametrize('options, levels', [
    ((), {'INFO', 'WARNING'}), (('-q',), {'WARNING'}), (('-v',), {'INFO', 'WARNING', 'DEBUG'}),
    (('-v', '-v'), {'INFO', 'WARNING', 'DEBUG', 'TRACE'}), (('-vv',), {'INFO', 'WARNING', 'DEBUG', 'TRACE'})])
def test_how_much_is_logged_follows_q_and_v(system, options, levels):
    config = system.write_config({'a': system.stub('fail=reason'), 'broken': '/no/such/program'})
    with Running(config, options=options) as running:
        system.execute("INSERT INTO queue (stage, state) VALUES ('a', '{\"content\": \"private\"}'), ('broken', '{}')")
        system.wait_census(failed=1, pending=1)
        running.wait_log('cooling stage=broken')
        running.stop()
        log = running.log()
    assert {line.split()[2] for line in log.splitlines()} == levels
    assert 'private' not in log


def test_a_program_that_is_missing_for_a_while_costs_a_line_a_cooldown(system):
    with system.run({'broken': '/no/such/program', 'a': system.stub()}, poll_interval='50 ms') as running:
        system.insert('broken', 100)
        for _ in range(20):
            system.wait_status(system.insert_one('a'), 'done')
        running.wait_log('cooling stage=broken for 4 s')
        lines = [line for line in running.log().splitlines() if 'broken' in line and ' DEBUG ' not in line]
        assert len(lines) == 3  # 1 s, 2 s, 4 s
        for line in lines:
            assert re.search(r'WARNING.*cannot start /no/such/program: No such file or directory', line)


def test_a_failed_statement_that_is_repeated_is_logged_once_until_it_works_again(system):
    with system.run({'a': system.stub()}, poll_interval='100 ms') as running:
        system.wait_status(system.insert_one('a'), 'done')
        system.execute('ALTER TABLE queue RENAME TO elsewhere')
        running.wait_log('WARNING')
        start = time.monotonic()
        wait_until(lambda: time.monotonic() > start + 3)  # no proof by itself: time for many repetitions
        assert running.log().count('WARNING') <= 4  # one for each operation that has failed
        system.execute('ALTER TABLE elsewhere RENAME TO queue')
        running.wait_log('INFO .*after')
        system.wait_status(system.insert_one('a'), 'done')


def test_many_rows_of_a_stage_that_is_not_configured_are_one_line(system):
    with system.run({'a': system.stub('advance=nowhere')}) as running:
        system.insert('a', 50)
        system.wait_census(pending=50)
        wait_until(lambda: system.execute('SELECT DISTINCT stage FROM queue') == [('nowhere',)])
        running.stop()
        [line] = [line for line in running.log().splitlines() if 'nowhere' in line and ' DEBUG ' not in line]
    assert 'WARNING' in line
    assert 'section' in line


def test_a_trickle_of_messages_leaves_no_trace_in_the_log_for_each(system):
    with Running(system.write_config({'a': system.stub()}, worker_idle_timeout=0), options=()) as running:
        for _ in range(5):
            system.wait_status(system.insert_one('a'), 'done')
            wait_until(lambda: not running.workers())
        assert 'reaped' not in running.log()
        assert len(running.log().splitlines()) == 2


def test_rows_that_somebody_queues_for_a_stage_without_a_section_are_reported_once(system):
    with system.run({'a': system.stub()}, poll_interval='200 ms') as running:
        running.wait_log('took over')
        system.insert('nowhere', 3)
        start = running.wait_log('WARNING.*nowhere').end()
        for _ in range(3):
            system.wait_status(system.insert_one('a'), 'done')
            system.insert('nowhere', 3)
        time.sleep(0.7)  # no proof by itself: three heartbeats
        assert 'nowhere' not in running.log()[start:]
