"""Faults of the process itself: signals, its log, its process group, the moment of its death. The numbers are those of
the list of faults to survive."""
import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import time

import psutil
import pytest
import support
from pipeline import Counts, Pipeline, spawned
from support import Running, wait_until

MORE = bool(os.environ.get('FAULTS_MORE'))  # set it to try more often and for longer


@pytest.fixture
def system(tmp_path, dsn, db):
    return Pipeline(tmp_path, dsn, db)


@pytest.fixture
def started_by(monkeypatch):
    """Return a function that puts a shell between us and the dispatchers of this test: its text, and "$@" is the
    dispatcher, $0 the argument."""
    def start(text, argument='sh'):
        monkeypatch.setattr(support, 'PYTHON', ['sh', '-c', text, argument] + support.PYTHON)

    return start


def cpu_s(running):
    """Return the CPU seconds that the dispatcher itself has used."""
    times = psutil.Process(running.pid).cpu_times()
    return times.user + times.system


def assert_quiet(running):
    """It does not spin."""
    used = cpu_s(running)
    time.sleep(1)  # no proof: what is measured is the load
    assert cpu_s(running) - used < 0.1


def took_over(system, epoch=1):
    """Wait for a dispatcher whose log cannot be read."""
    wait_until(lambda: system.execute('SELECT epoch FROM dispatch_stats') == [(epoch,)])


# -- signals -----------------------------------------------------------------------------------------------------------

def test_b24_an_idle_dispatcher_ends_within_half_a_second_of_term(system):
    times = []
    for _ in range(3):
        with system.run({'resize': system.stub()}) as running:
            running.wait_log('took over')
            before = time.monotonic()
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
            times.append(time.monotonic() - before)
    assert min(times) < 0.5  # the machine may be busy


def test_b24_a_hundred_thousand_signals_are_harmless_and_it_does_not_spin_afterwards(system):
    with system.run({'resize': system.stub()}) as running:
        running.wait_log('took over')
        system.wait_status(system.insert_one('resize'), 'done')
        numbers = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGCHLD, signal.SIGCHLD)
        for number in range(100000):
            os.kill(running.pid, numbers[number % 4 if number % 100 == 1 else 0])
        system.wait_status(system.insert_one('resize'), 'done', 5)
        system.wait_status(system.insert_one('resize'), 'done', 2)
        assert_quiet(running)
        assert 'wakeup' not in running.log()  # nor does the interpreter complain of a full pipe


@pytest.mark.timeout(300)
def test_b25_signals_and_deaths_without_end_and_a_slow_log_lose_nothing(system, started_by):
    fifo = os.path.join(system.directory, 'fifo')
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    started_by('exec "$@" 2>"$0"', fifo)
    try:
        worker = system.script('worker', 'read -r id; echo 1 id=$id\n')
        config = system.write_config({'resize': {'PROGRAM': worker, 'PARALLELISM': 4, 'PACK_BELOW': 0}})
        with Running(config, options=('-vv',)) as running:
            took_over(system)
            number, end = 0, time.monotonic() + (60 if MORE else 2)
            while time.monotonic() < end:
                number += len(system.insert('resize', 2))
                for _ in range(20):
                    running.signal(signal.SIGCHLD)
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 2000)  # slower than what is written
                time.sleep(0.02)  # no proof: 1,000 signals a second
            system.wait_census(120, failed=number)
            wait_until(lambda: not running.workers())
            assert not running.zombies()
            assert_quiet(running)
            assert running.stop() == 0
    finally:
        os.close(reader)
    assert system.counts() == {'resize': Counts(0, number, 0, 0)}


def test_b28_ctrl_c_reaches_the_dispatcher_only_and_the_workers_finish(system, monkeypatch, tmp_path):
    monkeypatch.setattr(support, 'PYTHON', ['setsid'] + support.PYTHON)
    stage = {'PROGRAM': system.stub('await=%s' % (tmp_path / 'go')), 'PARALLELISM': 2, 'PACK_BELOW': 0}
    with system.run({'resize': stage}, stop_timeout='30 s') as running:
        ids = system.insert('resize', 2)
        system.wait_begun(2)
        wait_until(lambda: os.getpgid(running.pid) == running.pid)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        running.wait_log('stopping on SIGINT')
        assert len(running.workers()) == 2
        (tmp_path / 'go').touch()
        assert running.wait() == 0
        assert 'KeyboardInterrupt' not in running.log()
        assert len(spawned(running)) == 2
    assert {system.row(id).status for id in ids} == {'done'}
    assert system.counts() == {'resize': Counts(2, 0, 0, 0)}


def test_b27_reload_after_reload_under_load_loses_and_orphans_nothing(system):
    stages = {'a': {'PROGRAM': system.stub('advance=b'), 'PARALLELISM': 2}, 'b': system.stub()}
    with system.run(stages) as running:
        running.wait_log('took over')
        number = 0
        for turn in range(10):
            number += len(system.insert('a', 10))
            stages['a']['QUEUE_LIMIT'] = 1 + turn % 5
            system.write_config(stages)
            start = len(running.log())
            running.signal(signal.SIGHUP)
            running.wait_log('reloaded .*pepsi.conf', start=start)
        system.wait_census(60, done=number)
        assert 'WARNING' not in running.log()
        wait_until(lambda: len(running.workers()) <= 6)
    begun = [(e[2], e[3]) for e in system.events('begin')]
    assert sorted(begun) == sorted(set(begun))
    assert len(begun) == 2 * number


# -- children ----------------------------------------------------------------------------------------------------------

def test_b30_a_child_that_it_did_not_start_is_reaped_and_changes_nothing(system, started_by):
    started_by('sleep 1 & sh -c "exit 7" & exec "$@"')
    with system.run({'resize': system.stub()}) as running:
        running.wait_log('took over')
        id = system.insert_one('resize', stub='crash=7')
        system.wait_status(id, 'failed')
        assert re.search(r'crash: .*\b7\b', system.error(id))
        wait_until(lambda: len(running.workers()) == 0 and not running.zombies(), 5)
        system.wait_status(system.insert_one('resize'), 'done')
        assert running.process.poll() is None


def test_b30_as_process_1_it_adopts_and_reaps_orphans_and_tells_how_its_workers_died(system, monkeypatch):
    unshare = ['unshare', '--pid', '--fork', '--mount-proc', '--kill-child']
    try:
        usable = subprocess.call(unshare + ['true'], stderr=subprocess.DEVNULL) == 0
    except FileNotFoundError:
        usable = False
    if not usable:
        pytest.skip('unshare cannot make a namespace of processes here')
    monkeypatch.setattr(support, 'PYTHON', unshare + support.PYTHON)
    with system.run({'resize': system.stub()}, stop_timeout='2 s') as running:
        running.wait_log('started pepsi-dispatch .* pid=1 ')
        [first] = psutil.Process(running.pid).children()
        # An answer between two deaths, or the stage cools down.
        for steps, how in (('escape=0.5 crash=9', 'status 9'), ('child=1000 crash=SEGV', 'SIGSEGV'),
                           ('escape=0.5 done', None), ('escape=1000 crash=0', 'status 0')):
            id = system.insert_one('resize', stub=steps)
            error = system.wait_status(id, 'failed' if how else 'done').state.get('dispatch_error')
            assert error is None if how is None else how in error
        # What is left: the worker, and the orphan that sleeps on; the others were reaped.
        wait_until(lambda: len(first.children(recursive=True)) <= 2, 10)
        assert not running.zombies()
        system.wait_status(system.insert_one('resize'), 'done')
        before = time.monotonic()
        first.send_signal(signal.SIGTERM)
        assert running.wait() == 0  # unshare passes its exit code on
        assert time.monotonic() - before < 5
    assert system.counts() == {'resize': Counts(2, 0, 0, 3)}


# -- the log -----------------------------------------------------------------------------------------------------------

def drain(fd):
    """Read all that is in a pipe now."""
    parts = []
    while select.select([fd], [], [], 0.2)[0]:
        part = os.read(fd, 65536)
        if not part:
            break
        parts.append(part)
    return b''.join(parts)


def test_b31_a_log_that_nobody_reads_neither_blocks_nor_spins_and_what_was_dropped_is_counted(system, started_by):
    fifo = os.path.join(system.directory, 'fifo')
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, 1031, 4096)  # F_SETPIPE_SZ
    try:
        started_by('exec "$@" 2>"$0"', fifo)
        with Running(system.write_config({'resize': system.stub('fail')}), options=('-vv',)) as running:
            took_over(system)
            system.insert('resize', 600)
            system.wait_census(failed=600)
            for _ in range(5):  # the pipe is full
                before = time.monotonic()
                system.wait_status(system.insert_one('resize', stub='done'), 'done')
                assert time.monotonic() - before < 1
            assert_quiet(running)
            text = drain(reader)
            assert len(text) <= 4096
            running.signal(signal.SIGUSR1)
            wait_until(lambda: select.select([reader], [], [], 0)[0])
            text += drain(reader)
            assert running.stop() == 0
        lines = text.decode().splitlines()
        [dropped] = [line for line in lines if 'dropped' in line]
        assert int(re.search(r'dropped (\d+) log lines', dropped).group(1)) > 100
        assert all(re.match('20[0-9-]{8} ', line) for line in lines)  # whole lines
    finally:
        os.close(reader)


def test_b31_a_log_whose_reader_is_gone_ends_nothing(system, started_by):
    fifo = os.path.join(system.directory, 'fifo')
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    started_by('exec "$@" 2>"$0"', fifo)
    with Running(system.write_config({'resize': system.stub('fail')}), options=('-vv',)) as running:
        try:
            took_over(system)
        finally:
            os.close(reader)
        system.insert('resize', 50)
        system.wait_census(failed=50)
        assert_quiet(running)
        assert running.stop() == 0
    assert system.totals() == (50, 50)


@pytest.mark.parametrize('redirection', ['2>/dev/full', '2>&-', '2</dev/null', '<&- >&- 2>&-', '<&-'])
def test_b31_a_log_that_cannot_be_written_ends_nothing(system, started_by, redirection):
    started_by('exec "$@" ' + redirection)
    stages = {'resize': system.stub('fail'), 'fds': system.script('fds', """
read -r id; for fd in 0 1 2 3 4 5 6 7 8 9; do [ -e /proc/$$/fd/$fd ] && open="$open $fd"; done; echo 1 $open; cat
""")}
    with Running(system.write_config(stages), options=('-vv',)) as running:
        took_over(system)
        system.insert('resize', 20)
        system.wait_census(failed=20)
        id = system.insert_one('fds')
        system.wait_status(id, 'failed')
        assert system.error(id).startswith('status: 1 0 1 2')  # whatever we were given; the shell may add its own
        assert_quiet(running)
        assert running.stop() == 0
    assert system.totals() == (21, 21)


# -- death at any moment -----------------------------------------------------------------------------------------------

def test_killed_at_its_nth_send_or_write_the_next_start_recovers_everything(system, monkeypatch):
    """Of the table: dispatcher killed at its n-th send or write, for every n: by strace, of the real one."""
    strace = ['strace', '-o', '/dev/null', '-e', 'trace=sendto,write,pwrite64,writev,sendmsg', '-e']
    try:
        usable = subprocess.call(strace + ['inject=write:signal=KILL:when=1', 'echo'], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.DEVNULL) == -9
    except FileNotFoundError:
        usable = False
    if not usable:
        pytest.skip('there is no strace here that can inject signals')
    python = list(support.PYTHON)
    stages = {'a': system.stub('advance=b'), 'b': system.stub()}
    config = system.write_config(stages)
    killed = number = 0
    for n in range(1, 60) if MORE else range(1, 40, 4):
        steps = {'b': ['pause=0.01', 'fail']}
        number += len(system.insert('a', 2, stub=steps))
        monkeypatch.setattr(support, 'PYTHON', strace + [
            'inject=sendto,write,pwrite64,writev,sendmsg:signal=KILL:when=%d' % n] + python)
        with Running(config) as running:
            try:
                wait_until(lambda: running.process.poll() is not None
                           or system.census() == {'failed': number}, 20)  # noqa: B023
            finally:
                if running.process.poll() is not None:
                    killed += 1
                for process in running.workers():  # strace would leave it stopped
                    if os.path.basename(support.DISPATCHER) in ' '.join(process.cmdline()):
                        process.kill()
                running.kill()
                wait_until(lambda: not running.family(), 5)
    assert killed >= (20 if MORE else 6)
    monkeypatch.setattr(support, 'PYTHON', python)
    with Running(config) as running:
        running.wait_log('took over')
        system.wait_census(failed=number)
    committed = [(e[2], e[3]) for e in system.events('commit') if e[2] == 'a']
    assert sorted(committed) == sorted(set(committed))  # no pass was committed twice
    assert number - killed <= len(committed)  # a worker may die with the dispatcher before it notes its commit
    errors = {error for error, in system.execute("SELECT state->>'dispatch_error' FROM queue")}
    assert errors == {'status: 1'}


def test_stopped_and_continued_under_load_loses_nothing(system):
    """Of the table: dispatcher stopped for a while, continued. Deadlines: see test_startstop."""
    stage = {'PROGRAM': system.stub(), 'PARALLELISM': 2, 'MAX_RUNTIME': '2 s', 'WORKER_IDLE_TIMEOUT': '1 h'}
    with system.run({'resize': stage}) as running:
        number = len(system.insert('resize', 50))
        system.wait_census(done=number)  # its workers are up
        for _ in range(5 if MORE else 1):
            number += len(system.insert('resize', 50))
            running.signal(signal.SIGSTOP)
            time.sleep(2.2)  # no proof: deadlines pass while it is stopped
            number += len(system.insert('resize', 50))
            running.signal(signal.SIGCONT)
        system.wait_census(done=number)
    assert sorted(system.begun()) == sorted(set(system.begun()))
    assert system.counts() == {'resize': Counts(number, 0, 0, 0)}


@pytest.mark.skipif(not shutil.which('faketime'), reason='there is no faketime here; see test_faults_database for b65')
def test_b65_with_faketime_a_day_off_nothing_changes(system, monkeypatch):
    for shift in ('+1d', '-1d'):
        with monkeypatch.context() as patch:
            patch.setattr(support, 'PYTHON', ['faketime', '-f', shift] + support.PYTHON)
            with system.run({'resize': system.stub()}, env={'FAKETIME_DONT_FAKE_MONOTONIC': '1'}):
                id = system.insert_one('resize', stub=['pause=0.5', ''])
                system.wait_status(id, 'done', 10)
