"""Faults of workers: their pipes, their deaths, programs that do not start. The numbers are those of the list of
faults to survive."""
import collections
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import support
from pipeline import STUB, Counts, Pipeline, spawned
from support import Running, wait_until

MORE = bool(os.environ.get('FAULTS_MORE'))  # set it to try more often and for longer

# Answers its first id, then makes its stdin pipe as small as can be and reads nothing until it is told to; then it
# reads and answers all. Notes what it read.
SLOW_READER = """
import fcntl, json, os, sys, time
def note(line):
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(log, json.dumps([time.monotonic(), os.getpid(), os.environ['PEPSI_STAGE'], int(line), 'begin']).encode()
             + b'\\n')
    os.close(log)
fcntl.fcntl(0, 1031, 4096)  # F_SETPIPE_SZ
line = b''
while not line.endswith(b'\\n'):
    line += os.read(0, 1)
note(line)
os.write(1, b'1 first\\n')
while not os.path.exists(sys.argv[1] + '.read'):
    time.sleep(0.02)
for line in os.fdopen(0, 'rb'):
    note(line)
    os.write(1, b'1 id=%d later\\n' % int(line))
"""


@pytest.fixture
def system(tmp_path, dsn, db):
    return Pipeline(tmp_path, dsn, db)


def descriptors(running):
    """Return what the descriptors of the dispatcher are, without their numbers."""
    directory = '/proc/%d/fd' % running.pid
    found = []
    for fd in os.listdir(directory):
        try:
            found.append(os.readlink(os.path.join(directory, fd)).rstrip('0123456789[]'))
        except OSError:  # closed meanwhile
            pass
    return sorted(found)


def cpu_s(running):
    """Return the CPU seconds that the dispatcher itself has used."""
    times = psutil.Process(running.pid).cpu_times()
    return times.user + times.system


def huge(system, stage, number):
    """Queue messages with ids of 19 digits."""
    return sorted(id for id, in system.execute(
        'INSERT INTO queue (ingress_id, stage) SELECT 8000000000000000000 + n, %s FROM generate_series(1, %s) AS n'
        ' RETURNING ingress_id', stage, number))


# -- pipes -------------------------------------------------------------------------------------------------------------

def test_b18_a_thousand_answers_in_one_heap_are_all_taken(system):
    worker = system.python('heap.py', """
import os, sys
sys.stdin.readline()
os.write(1, b'1 first\\n')
ids = [sys.stdin.readline() for n in range(1000)]
os.write(1, b''.join(b'1 id=%d heap\\n' % int(id) for id in ids))
sys.stdin.readline()
""")
    stage = {'PROGRAM': worker, 'PARALLELISM': 1, 'QUEUE_LIMIT': 1000, 'PACK_BELOW': '1 h', 'MAX_MESSAGES': 0}
    with system.run({'resize': stage}) as running:
        system.insert_one('resize')
        system.wait_census(failed=1)
        system.insert('resize', 1000)
        system.wait_census(failed=1001)
        assert len(spawned(running)) == 1
    assert system.counts() == {'resize': Counts(0, 1001, 0, 0)}


def slow_reader(system):
    return {'PROGRAM': system.python('slow.py', SLOW_READER), 'PARALLELISM': 1, 'QUEUE_LIMIT': 1000,
            'PACK_BELOW': '1 h', 'MAX_MESSAGES': 0, 'WORKER_IDLE_TIMEOUT': '1 h'}


def test_b20_ids_that_do_not_fit_into_the_pipe_are_written_later_and_arrive_whole(system):
    with system.run({'slow': slow_reader(system), 'resize': system.stub()}) as running:
        ids = huge(system, 'slow', 901)
        system.wait_begun(1)
        wait_until(lambda: len(system.running('slow')) >= 900)
        used = cpu_s(running)
        for _ in range(5):  # nobody else waits
            system.wait_status(system.insert_one('resize'), 'done', 2)
        running.signal(signal.SIGUSR1)
        running.wait_log('state worker .*stage=slow serving .*in_flight=900')
        time.sleep(1)  # no proof: what is measured is the load
        assert cpu_s(running) - used < 0.7
        open(system.log + '.read', 'w').close()
        system.wait_census(failed=901, done=5)
        assert len(spawned(running)) == 2
    assert system.begun('slow') == ids


def test_b20_a_worker_that_never_reads_costs_one_message_and_the_others_run_elsewhere(system):
    stage = dict(slow_reader(system), MAX_RUNTIME='3 s')
    with system.run({'slow': stage, 'resize': system.stub()}) as running:
        ids = huge(system, 'slow', 901)
        system.wait_begun(1)
        wait_until(lambda: len(system.running('slow')) >= 900)
        system.wait_status(system.insert_one('resize'), 'done', 2)
        running.wait_log('killing worker .*timeout: ')
        open(system.log + '.read', 'w').close()
        system.wait_census(failed=900, timeout=1, done=1)
    assert system.row(ids[1]).status == 'timeout'
    assert system.begun('slow') == ids[:1] + ids[2:]


def test_b20_a_worker_that_never_reads_and_dies_with_ids_half_written_blames_nobody(system):
    with system.run({'slow': slow_reader(system)}) as running:
        ids = huge(system, 'slow', 901)
        system.wait_begun(1)
        wait_until(lambda: len(system.running('slow')) >= 900)
        running.signal(signal.SIGUSR1)
        running.wait_log('state worker .*in_flight=900')
        os.kill(spawned(running)[0], signal.SIGKILL)
        open(system.log + '.read', 'w').close()
        system.wait_census(failed=901)
    assert system.begun('slow') == ids
    assert system.counts() == {'slow': Counts(0, 901, 0, 0)}


def test_b15_b20_a_worker_that_floods_standard_error_with_any_bytes_blocks_nobody(system):
    worker = system.python('loud.py', """
import os, sys
for line in iter(sys.stdin.readline, ''):
    os.write(2, os.urandom(500000))
    os.write(1, b'1 loud\\n')
""")
    with system.run({'loud': worker, 'resize': system.stub()}) as running:
        system.insert('loud', 10)
        system.wait_status(system.insert_one('resize'), 'done', 5)
        system.wait_census(failed=10, done=1)
        assert running.process.poll() is None


# -- deaths ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('pack_below', ['0', '100 ms'])
def test_b34_workers_that_answer_once_and_leave_do_not_cool_their_stage_down(system, pack_below):
    """The deaths of several that come at once are not in a row without an answer: each of them has answered."""
    worker = system.script('once', 'read -r id; echo 1 once\n')
    stage = {'PROGRAM': worker, 'PARALLELISM': 4, 'PACK_BELOW': pack_below}
    with system.run({'resize': stage}) as running:
        system.insert('resize', 60)
        system.wait_census(failed=60)
        assert 'cooling' not in running.log()
    assert system.counts() == {'resize': Counts(0, 60, 0, 0)}


@pytest.mark.timeout(600)
def test_descriptors_and_memory_are_the_same_after_a_thousand_deaths(system):
    """Of the table: nothing leaks; FAULTS_MORE tries 10,000."""
    number = 10000 if MORE else 1000
    worker = system.script('once', 'read -r id; echo 1 once\n')
    with system.run({'resize': {'PROGRAM': worker, 'PARALLELISM': 4}}) as running:
        system.insert('resize', 100)
        system.wait_census(failed=100)
        wait_until(lambda: not running.workers())
        before, memory = descriptors(running), psutil.Process(running.pid).memory_info().rss
        system.insert('resize', number)
        system.wait_census(400, failed=number + 100)
        wait_until(lambda: not running.workers())
        assert not running.zombies()
        assert descriptors(running) == before
        assert psutil.Process(running.pid).memory_info().rss - memory < 10e6
        assert len(spawned(running)) >= number
    assert system.counts() == {'resize': Counts(0, number + 100, 0, 0)}


def test_b35_no_id_is_lost_or_doubled_between_handing_and_retiring(system):
    stage = {'PROGRAM': system.stub(), 'PARALLELISM': 2, 'WORKER_IDLE_TIMEOUT': '40 ms', 'MAX_MESSAGES': 7}
    with system.run({'resize': stage}) as running:
        pauses = itertools.cycle([0, 0.02, 0.035, 0.04, 0.045, 0.06])
        for _ in range(60):
            system.insert('resize', 2)
            time.sleep(next(pauses))  # no proof: it is the load, tuned to the idle time
        system.wait_census(done=120)
        assert 'WARNING' not in running.log()
    assert sorted(system.begun()) == sorted(set(system.begun()))
    passes = collections.Counter(e[1] for e in system.events('begin'))
    assert max(passes.values()) <= 7
    assert len(passes) >= 120 // 7


def test_b39_nine_quick_ids_are_done_within_a_second_beside_a_slow_one(system):
    with system.run({'resize': {'PROGRAM': system.stub(), 'PARALLELISM': 4}}, worker_idle_timeout='1 h') as running:
        system.insert('resize', 4, stub='sleep=0.3')
        system.wait_census(done=4)  # four workers are up
        system.execute("""
            INSERT INTO queue (stage, state)
            SELECT 'resize', CASE WHEN n = 1 THEN '{"stub": "sleep=5"}' ELSE '{"stub": "sleep=0.02"}' END::jsonb
            FROM generate_series(1, 10) AS n""")
        before = time.monotonic()
        system.wait_census(done=13, running=1)
        assert time.monotonic() - before < 1.5  # one of it for a busy machine
        for worker in running.workers():
            worker.kill()


@pytest.mark.parametrize('steps', ['', 'commit crash=KILL'])
def test_a_worker_killed_between_commit_and_answer_has_done_its_pass_and_the_row_goes_on(system, steps):
    """Of the table: worker killed between commit and answer: the pass counts, the row goes on to its next stage."""
    with system.run({'a': system.stub(), 'b': system.stub()}):
        id = system.insert_one('a', stub={'a': 'advance=b ' + steps})
        assert system.wait_status(id, 'done').stage == 'b'
        wait_until(lambda: system.totals() == (2, 1))
    assert [e[2] for e in system.events('begin')] == ['a', 'b']


def test_a_program_that_reads_and_dies_every_time_costs_few_of_very_many_messages(system):
    """Of the table: about one failed row a probe, three at most before the first, PARALLELISM 4."""
    system.insert('dying', 10000)
    with system.run({'dying': {'PROGRAM': system.script('dies', 'read -r id; exit 3\n'), 'PARALLELISM': 4},
                     'resize': system.stub()}) as running:
        running.wait_log('cooling stage=dying for 2 s', 25)
        wait_until(lambda: not system.running('dying'))
        system.wait_status(system.insert_one('resize'), 'done', 2)
        failed = system.execute("SELECT count(*) FROM queue WHERE status = 'failed'")[0][0]
    assert 3 <= failed <= 4 + 2  # those of the first turn, then one a probe


def test_program_repaired_while_others_run_at_full_rate(system, tmp_path):
    """Of the table: program missing, not executable, later repaired: recovers at the next probe."""
    path = str(tmp_path / 'broken')
    with system.run({'broken': path, 'resize': system.stub('--blind')}) as running:
        ids = system.insert('broken', 10)
        running.wait_log('cooling stage=broken for 1 s')
        system.insert('resize', 200)
        system.wait_census(pending=10, done=200)
        os.rename(system.script('good', 'while read -r id; do echo 1 good; done\n'), path)
        system.wait_census(failed=10, done=200)
        running.wait_log('resumed stage=broken')
    assert {system.error(id) for id in ids} == {'status: 1 good'}


# -- wrappers and survivors --------------------------------------------------------------------------------------------

def test_b33_a_worker_behind_a_wrapper_that_ignores_everything_is_ended_before_its_row_is_reset(system, tmp_path):
    marker = str(tmp_path / 'again')
    # The shell is the worker, what works is its child: only the shell is told of the dispatcher's death.
    wrapper = system.script('wrapper', 'trap "" TERM HUP INT\n"%s" "%s" "--log=%s" unless=%s sigterm=ignore'
                            ' hang "$@"\nexit $?\n' % (sys.executable, STUB, system.log, marker))
    config = system.write_config({'resize': wrapper})
    id = system.insert_one('resize')
    with Running(config) as first:
        system.wait_begun(1)
        wait_until(lambda: len(first.family()) == 2)
        first.kill()
        wait_until(lambda: len(first.family()) <= 1)  # the shell is dead, what works lives on
        [survivor] = first.family()
        open(marker, 'w').close()
        with Running(config) as second:
            second.wait_log(r'killing process %d\b' % survivor)
            system.wait_status(id, 'done')
            log = second.log()
            assert not first.family()
    assert log.index('killing process %d' % survivor) < log.index('reset 1 ')
    assert system.begun() == [id, id]


def test_b12_b33_the_watchdog_reaches_what_works_behind_a_wrapper(system):
    wrapper = system.script('wrapper', '"%s" "%s" "--log=%s" sigterm=ignore hang "$@"\nexit $?\n'
                            % (sys.executable, STUB, system.log))
    with system.run({'resize': {'PROGRAM': wrapper, 'MAX_RUNTIME': '2 s'}}) as running:
        id = system.insert_one('resize')
        system.wait_begun(1)
        system.wait_status(id, 'timeout')
        wait_until(lambda: not running.family(), 2)


@pytest.mark.timeout(300)
def test_b32_a_bystander_in_the_dispatchers_group_survives_500_kills_of_workers(system, monkeypatch):
    bystander = os.path.join(system.directory, 'bystander')
    monkeypatch.setattr(support, 'PYTHON', [
        'setsid', 'sh', '-c', 'sleep 1000 & echo $! > "$0"; exec "$@"', bystander] + support.PYTHON)
    # It answers, so that the stage does not cool down, and is killed for what follows.
    worker = system.script('worker', "read -r id; printf '1 fine\\ngarbage\\n'; exec sleep 100\n")
    number = 500
    stage = {'PROGRAM': worker, 'PARALLELISM': 2, 'PACK_BELOW': 0, 'QUEUE_LIMIT': 1}  # no three deaths in a row
    with system.run({'resize': stage}) as running:
        running.wait_log('took over')
        with open(bystander) as file:
            pid = int(file.read())
        assert os.getpgid(pid) == os.getpgid(running.pid) == running.pid
        system.insert('resize', number)
        system.wait_census(120, failed=number)
        wait_until(lambda: running.log().count('reaped worker') == number)
        assert 'cooling' not in running.log()
        assert running.log().count('SIGKILL') >= number
        assert psutil.Process(pid).status() == psutil.STATUS_SLEEPING
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not running.zombies())  # it was the dispatcher's child all the time, unknown to it
        system.insert('resize', 1)
        system.wait_census(failed=number + 1)
    assert system.counts() == {'resize': Counts(0, number + 1, 0, 0)}


# -- limits of the system ----------------------------------------------------------------------------------------------

def test_descriptors_exhausted_for_a_while_are_waited_for(system):
    """Of the table: descriptors exhausted, then allowed: the loop lives, nothing leaks, parallelism comes back."""
    stages = {'slow': {'PROGRAM': system.stub('sleep=0.5'), 'PARALLELISM': 4, 'PACK_BELOW': 0}, 'resize': system.stub()}
    with system.run(stages, worker_idle_timeout='2 s') as running:
        system.wait_status(system.insert_one('resize'), 'done')  # this one has its worker
        old = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
        before = descriptors(running)
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (len(before), old[1]))
        used = cpu_s(running)
        system.insert('slow', 8)
        running.wait_log('cooling stage=slow .*Too many open files')
        system.wait_status(system.insert_one('resize'), 'done', 2)
        system.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                       " AND application_name LIKE 'pepsi-dispatch %'")
        running.wait_log('database is back')
        running.signal(signal.SIGHUP)
        running.wait_log('reload')
        running.wait_log('cooling stage=slow for 2 s')
        assert cpu_s(running) - used < 0.7
        assert running.process.poll() is None
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, old)
        system.wait_census(done=10)
        assert len(running.workers()) >= 4
        wait_until(lambda: not running.workers())
        assert len(descriptors(running)) <= len(before)
    assert len({e[1] for e in system.events('begin') if e[2] == 'slow'}) == 4
    assert sorted(system.begun()) == sorted(set(system.begun()))


def test_too_few_descriptors_at_the_start_end_in_no_internal_error(system):
    config = system.write_config({'resize': system.stub()})
    for number in range(4, 14) if MORE else range(7, 9):
        process = subprocess.Popen(['prlimit', '--nofile=%d:1024' % number] + support.PYTHON
                                   + [support.DISPATCHER, '-c', config], stdin=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:  # it waits, or works
            process.terminate()
        err = process.communicate(timeout=10)[1].decode()
        if 'started pepsi-dispatch' in err:
            assert 'internal error' not in err, number
            assert process.returncode in (0, 71, 78), (number, err)


@pytest.fixture
def unprivileged(system):
    """Have dispatchers run as a user of their own, whose processes can be counted; skip where that cannot be."""
    if os.geteuid() != 0 or not shutil.which('setpriv'):
        pytest.skip('the limit of processes does not hold for this user, and only root can be another one')
    user = 54000 + os.getpid() % 1000
    prefix = ['setpriv', '--reuid=%d' % user, '--regid=%d' % user, '--clear-groups', '--no-new-privs']
    if subprocess.call(prefix + support.PYTHON + [support.DISPATCHER, '--version'], stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL):
        pytest.skip('another user cannot execute this Python')
    directory = system.directory
    system.directory = tempfile.mkdtemp(prefix='pepsi-')
    os.chmod(system.directory, 0o755)
    system.log = os.path.join(system.directory, 'log')
    open(system.log, 'w').close()
    os.chmod(system.log, 0o666)
    yield prefix
    shutil.rmtree(system.directory)
    system.directory = directory


def test_processes_exhausted_for_a_while_are_waited_for(system, pg, unprivileged, monkeypatch):
    """Of the table: fork refused, then allowed again."""
    def limit(text):  # as that user, who may: root of a container may not
        subprocess.check_call(unprivileged + ['prlimit', '--pid=%d' % running.pid, '--nproc=' + text])

    mode = os.stat(pg.base).st_mode
    os.chmod(pg.base, 0o755)  # for the socket in it
    worker = system.script('slow', 'while read -r id; do sleep 0.3; echo 1; done\n')
    try:
        monkeypatch.setattr(support, 'PYTHON', unprivileged + support.PYTHON)
        with system.run({'slow': {'PROGRAM': worker, 'PARALLELISM': 4, 'PACK_BELOW': 0}}) as running:
            running.wait_log('took over')
            before = descriptors(running)
            limit('1:')  # itself
            used = cpu_s(running)
            system.insert('slow', 8)
            running.wait_log('cooling stage=slow for 2 s: cannot start')
            wait_until(lambda: not system.running('slow'), 2)
            assert descriptors(running) == before
            assert cpu_s(running) - used < 0.5
            limit('500:')
            system.wait_census(failed=8)
            assert len(spawned(running)) == 4
            assert not running.zombies()
    finally:
        os.chmod(pg.base, mode)
