"""The dispatcher under a real supervisord, with the very section that `pepsi-dispatch sample` prints."""
import configparser
import functools
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xmlrpc.client

import psutil
import psycopg2
import pytest
from pipeline import Pipeline
from support import DISPATCHER, PYTHON, RUNNING_MARK, call, find_marked, kill_all, wait_until

try:
    transport: type = importlib.import_module('supervisor.xmlrpc').SupervisorTransport
except ImportError as error:  # up to 3.7 it needs setuptools, too, and does not say so
    pytest.skip('supervisor from PyPI cannot be imported: %s' % error, allow_module_level=True)

NAME = 'pepsi-dispatch'

# How long the database is away; by default longer than two of its reconnects. FAULTS_MORE is for those with time.
AWAY_S = 125 if os.environ.get('FAULTS_MORE') else 4

SUPERVISORD = """
[supervisord]
nodaemon = true
logfile = {directory}/supervisord.log
pidfile = {directory}/supervisord.pid
childlogdir = {directory}
[unix_http_server]
file = {directory}/s.sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl = unix://{directory}/s.sock
"""


@functools.lru_cache(maxsize=None)
def read_sample():
    """Return the options of the section for supervisord in what `sample` prints, as a user would copy it."""
    result = call('sample')
    assert result.code == 0
    text = '\n'.join(line[1:].strip() for line in result.out.splitlines() if line.startswith(';'))
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    assert parser.sections() == ['program:' + NAME]
    return dict(parser.items('program:' + NAME))


class Supervisor:
    """A supervisord with dispatchers as its programs; a context manager that leaves nothing behind."""

    def __init__(self, directory, config, names=(NAME,), **options):
        """Write the configuration and start it. options: in place of those of the sample."""
        self.directory = directory
        self.mark = 'supervisor-%s' % directory
        self._conf = os.path.join(directory, 'supervisord.conf')
        sample = dict(read_sample())
        assert sample['command'].split() == [NAME, '-c', '/etc/pepsi/pepsi.conf', 'run']
        assert sample['stdout_logfile'] == '/var/log/pepsi-dispatch.log'
        sample['command'] = ' '.join(map(shlex.quote, PYTHON + [DISPATCHER, '-c', config, 'run']))
        with open(self._conf, 'w') as file:
            file.write(SUPERVISORD.format(directory=directory))
            for name in names:
                file.write('[program:%s]\n' % name)
                for item in dict(sample, stdout_logfile=self.path(name), **options).items():
                    file.write('%s = %s\n' % item)
        self.start()

    def start(self):
        """Start supervisord itself and return when it answers."""
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'supervisor.supervisord', '-c', self._conf], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ, **{RUNNING_MARK: self.mark}))
        wait_until(self._answers, 30, 'an answer of supervisord')

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind:
            for name in sorted(os.listdir(self.directory)):
                if name.endswith('.log'):
                    with open(os.path.join(self.directory, name), errors='replace') as file:
                        print('--- %s\n%s---' % (name, file.read()))
        elif self.process.poll() is None:
            self.process.terminate()  # it stops its programs
            assert self.process.wait(30) == 0
        self.close()

    def close(self):
        """Kill what is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        kill_all(find_marked(RUNNING_MARK, self.mark))

    def path(self, name=NAME):
        """Return the path of a program's log."""
        return os.path.join(self.directory, name + '.log')

    def log(self, name=NAME):
        """Return the log of a program, or that of 'supervisord'."""
        with open(self.path(name), encoding='utf-8') as file:
            return file.read()

    def ask(self, method, *arguments):
        """Call a method of supervisord."""
        proxy = xmlrpc.client.ServerProxy('http://localhost', transport(
            None, None, 'unix://%s/s.sock' % self.directory))
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        finally:
            proxy('close')()

    def info(self, name=NAME):
        """Return what it knows of a program."""
        return self.ask('getProcessInfo', name)

    def state(self, name=NAME):
        """Return the state of a program: RUNNING, FATAL ..."""
        return self.info(name)['statename']

    def wait(self, state, name=NAME, other_than=0):
        """Wait until a program is in a state, with a pid other than this one, and return what it knows of it."""
        def reached():
            info = self.info(name)
            return info if (info['statename'], info['pid'] != other_than) == (state, True) else None

        return wait_until(reached, 30, '%s to be %s' % (name, state))

    def ctl(self, *arguments):
        """Run supervisorctl and return what it says."""
        return subprocess.run([sys.executable, '-m', 'supervisor.supervisorctl', '-c', self._conf] + list(arguments),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=60).stdout.decode()

    def workers(self, name=NAME):
        """Return the workers of a program as psutil.Process."""
        return psutil.Process(self.info(name)['pid']).children(recursive=True)

    def hold(self, seconds, name=NAME):
        """Look for so long whether a program stays up, in one and the same process."""
        pid, end = self.info(name)['pid'], time.monotonic() + seconds

        def over():
            info = self.info(name)
            assert (info['statename'], info['pid'], info['spawnerr']) == ('RUNNING', pid, '')
            return time.monotonic() > end

        wait_until(over, seconds + 10)

    def _answers(self):
        assert self.process.poll() is None, 'supervisord has ended'
        try:
            return self.ask('getState')['statename'] == 'RUNNING'
        except (OSError, xmlrpc.client.Error):
            return False


@pytest.fixture
def system(tmp_path, dsn, db):
    system = Pipeline(tmp_path, dsn, db)
    yield system
    system.db.close()


def reconnect(system):
    """Give a system a new connection after the server was restarted."""
    system.db.close()
    system.db = psycopg2.connect(system.dsn)
    system.db.autocommit = True


@pytest.fixture
def supervise(system):
    """Return a function that starts a Supervisor for these stages."""
    def start(stages, names=(NAME,), dispatch=None, **options):
        return Supervisor(system.directory, system.write_config(stages, **dispatch or {}), names, **options)

    return start


def test_the_sample_is_what_supervisord_needs(system):
    options = read_sample()
    assert options['autorestart'] == 'true'
    assert options['stopsignal'] == 'TERM'
    assert options['killasgroup'] == 'true'
    assert options['redirect_stderr'] == 'true'
    assert int(options['stopwaitsecs']) >= 5 + 3  # STOP_TIMEOUT, and what a frozen database may add to it


def test_start_stop_and_restart(system, supervise):
    with supervise({'a': system.stub()}) as supervisor:
        first = supervisor.wait('RUNNING')
        system.wait_status(system.insert_one('a'), 'done')
        supervisor.ask('stopProcess', NAME)
        stopped = supervisor.info()
        assert (stopped['statename'], stopped['exitstatus']) == ('STOPPED', 0)
        assert not psutil.pid_exists(first['pid'])
        waiting = system.insert_one('a')
        assert 'started' in supervisor.ctl('start', NAME)
        second = supervisor.wait('RUNNING')
        system.wait_status(waiting, 'done')
        assert re.findall(r': (\w+)$', supervisor.ctl('restart', NAME), re.MULTILINE) == ['stopped', 'started']
        third = supervisor.wait('RUNNING', other_than=second['pid'])
        system.wait_status(system.insert_one('a'), 'done')
        assert system.execute('SELECT epoch FROM dispatch_stats') == [(3,)]
        assert len({first['pid'], second['pid'], third['pid']}) == 3
    assert supervisor.log().count('exit=0') == 3
    assert 'SIGKILL' not in supervisor.log('supervisord')
    assert sorted(system.begun()) == sorted(set(system.begun()))


def test_after_kill_9_it_comes_back_and_nothing_runs_twice(system, supervise, tmp_path):
    hold = 'await=%s' % (tmp_path / 'go')
    with supervise({'a': {'PROGRAM': system.stub(hold), 'PARALLELISM': 2, 'QUEUE_LIMIT': 1}}) as supervisor:
        first = supervisor.wait('RUNNING')
        ids = system.insert('a', 6)
        at_work = sorted(system.wait_begun(2))
        old = supervisor.workers()
        assert len(old) == 2
        os.kill(first['pid'], signal.SIGKILL)
        supervisor.wait('RUNNING', other_than=first['pid'])
        wait_until(lambda: not [p for p in old if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
        system.wait_begun(4)
        assert len(supervisor.workers()) == 2
        assert not {p.pid for p in old} & {p.pid for p in supervisor.workers()}
        (tmp_path / 'go').touch()
        system.wait_census(done=6)
    begun = system.begun()
    assert sorted(begun) == sorted(ids + at_work)  # those at work once more, nothing else
    assert sorted(e[3] for e in system.events('commit')) == ids


def test_one_that_does_not_react_is_killed_with_all_its_workers(system, supervise, tmp_path):
    steps = 'unless=%s' % (tmp_path / 'go'), 'sigterm=ignore', 'hang'
    with supervise({'a': {'PROGRAM': system.stub(*steps), 'PARALLELISM': 2, 'QUEUE_LIMIT': 1}},
                   stopwaitsecs=1, startsecs=0) as supervisor:
        pid = supervisor.wait('RUNNING')['pid']
        system.insert('a', 3)
        system.wait_begun(2)
        os.kill(pid, signal.SIGSTOP)
        supervisor.ask('stopProcess', NAME)
        assert supervisor.state() == 'STOPPED'
        wait_until(lambda: find_marked(RUNNING_MARK, supervisor.mark) == [supervisor.process.pid], 5)
        assert 'SIGKILL' in supervisor.log('supervisord')
        assert system.census() == {'running': 2, 'pending': 1}
        (tmp_path / 'go').touch()
        supervisor.ask('startProcess', NAME)
        system.wait_census(done=3)


@pytest.mark.timeout(120 + 2 * AWAY_S)
def test_while_the_database_is_away_it_stays_up(system, supervise, pg):
    pg.stop()
    try:
        with supervise({'a': system.stub()}) as supervisor:  # away at the start
            supervisor.wait('RUNNING')
            supervisor.hold(AWAY_S)
            pg.start()
            reconnect(system)
            system.wait_status(system.insert_one('a'), 'done')
            pg.crash()  # and later
            supervisor.hold(AWAY_S)
            pg.start()
            reconnect(system)
            system.wait_status(system.insert_one('a'), 'done', 5)
            assert supervisor.log('supervisord').count('spawned: ') == 1
            assert 2 <= supervisor.log().count('database away') <= 4  # a line for each change of state, not each try
    finally:
        pg.start()


def test_the_worst_stop_ends_within_stopwaitsecs(system, supervise, pg):
    with supervise({'a': {'PROGRAM': system.stub('sigterm=ignore', 'hang'), 'PARALLELISM': 3, 'QUEUE_LIMIT': 1}},
                   dispatch={'poll_interval': '30 s'}) as supervisor:
        supervisor.wait('RUNNING')
        system.insert('a', 3)
        system.wait_begun(3)
        pg.stop()
        try:
            supervisor.ask('stopProcess', NAME)  # workers that ignore TERM and end of file, rows that cannot be reset
            info = supervisor.info()
            assert (info['statename'], info['exitstatus']) == ('STOPPED', 0)
        finally:
            pg.start()
        assert find_marked(RUNNING_MARK, supervisor.mark) == [supervisor.process.pid]
        assert 'SIGKILL' not in supervisor.log('supervisord')
        assert 'did not leave within STOP_TIMEOUT' in supervisor.log()
        assert '3 outcomes are lost' in supervisor.log()
        reconnect(system)
        assert system.census() == {'running': 3}
        system.write_config({'a': system.stub()})
        supervisor.ask('startProcess', NAME)
        system.wait_census(done=3)


def test_its_log_is_rotated_by_size(system, supervise):
    with supervise({'a': system.stub('fail="%s"' % ('x' * 200))}, stdout_logfile_maxbytes='20KB',
                   stdout_logfile_backups=50, startsecs=0) as supervisor:
        pid = supervisor.wait('RUNNING')['pid']
        ids = system.insert('a', 200)
        system.wait_census(failed=200)
        supervisor.ask('stopProcess', NAME)
        assert os.path.exists(supervisor.path() + '.2')
        files = [name for name in os.listdir(supervisor.directory) if name.startswith(NAME + '.log')]
        text = ''.join(supervisor.log(name[:-4]) if name.endswith('.log') else
                       open_text(supervisor.directory, name) for name in files)
        assert 'stopped pepsi-dispatch pid=%d' % pid in text
        assert all(' set %d failed ' % id in text for id in ids)  # no line is lost
        assert 'dropped' not in text


def open_text(*path):
    with open(os.path.join(*path), encoding='utf-8') as file:
        return file.read()


def test_its_log_is_opened_again_on_usr2_to_supervisord(system, supervise):
    with supervise({'a': system.stub('fail')}, startsecs=0) as supervisor:
        pid = supervisor.wait('RUNNING')['pid']
        first = system.insert_one('a')
        wait_until(lambda: ' set %d failed ' % first in supervisor.log())
        os.rename(supervisor.path(), supervisor.path() + '.old')  # as logrotate does it
        supervisor.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: os.path.exists(supervisor.path()))
        second = system.insert_one('a')
        wait_until(lambda: ' set %d failed ' % second in supervisor.log())
        assert ' set %d failed ' % first not in supervisor.log()
        assert supervisor.info()['pid'] == pid


def test_a_second_program_by_mistake_waits_and_takes_over_when_the_first_is_stopped(system, supervise):
    with supervise({'a': system.stub()}, names=('one', 'two'), autostart='false') as supervisor:
        supervisor.ask('startProcess', 'one')
        first = supervisor.info('one')['pid']
        wait_until(lambda: 'took over epoch=1' in supervisor.log('one'))
        supervisor.ask('startProcess', 'two')
        wait_until(lambda: re.search(r'WARNING.*pepsi-dispatch %d@' % first, supervisor.log('two')))
        supervisor.hold(3, 'two')
        system.wait_status(system.insert_one('a'), 'done')
        assert system.execute('SELECT epoch FROM dispatch_stats') == [(1,)]
        assert supervisor.log('two').count('WARNING') == 1
        supervisor.ask('stopProcess', 'one')
        wait_until(lambda: 'took over epoch=2' in supervisor.log('two'), 5)
        system.wait_status(system.insert_one('a'), 'done')
        assert supervisor.state('two') == 'RUNNING'
    assert 'FATAL' not in supervisor.log('supervisord')


def test_one_whose_supervisord_was_killed_works_on_and_the_next_waits_for_it(system, supervise):
    with supervise({'a': system.stub('fail')}, startsecs=0) as supervisor:
        first = supervisor.wait('RUNNING')['pid']
        wait_until(lambda: 'took over' in supervisor.log())
        supervisor.process.kill()
        supervisor.process.wait()
        supervisor.start()
        second = supervisor.wait('RUNNING')['pid']
        assert second != first
        wait_until(lambda: re.search(r'WARNING.*pepsi-dispatch %d@' % first, supervisor.log()))
        system.insert('a', 20)  # its log has no reader any more
        system.wait_census(failed=20)
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: 'took over epoch=2' in supervisor.log())
        system.wait_status(system.insert_one('a'), 'failed')
        assert supervisor.info()['pid'] == second


def test_missing_tables_are_no_fatal_state_and_init_heals_them(system, supervise):
    system.execute('DROP TABLE queue')
    with supervise({'a': system.stub()}) as supervisor:
        wait_until(lambda: supervisor.log('supervisord').count('exit status 78') >= 2)
        assert supervisor.state() in ('BACKOFF', 'STARTING')
        assert 'pepsi-dispatch init' in supervisor.log()
        assert call('-c', os.path.join(system.directory, 'pepsi.conf'), 'init').code == 0
        supervisor.wait('RUNNING')
        system.wait_status(system.insert_one('a'), 'done')
    assert 'FATAL' not in supervisor.log('supervisord')


def test_supervisorctl_signal_hup_reloads_it(system, supervise):
    with supervise({'a': system.stub()}, startsecs=0) as supervisor:
        pid = supervisor.wait('RUNNING')['pid']
        wait_until(lambda: 'took over' in supervisor.log())
        waiting = system.insert_one('b')
        system.write_config({'a': system.stub(), 'b': system.stub()})
        assert 'signalled' in supervisor.ctl('signal', 'HUP', NAME)
        system.wait_status(waiting, 'done')
        assert supervisor.info()['pid'] == pid
