"""The one file, copied to a host: which interpreter runs it, what it needs, and what it finds there."""
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest
from pipeline import Pipeline
from support import DISPATCHER, RUNNING_MARK, find_marked, kill_all, wait_until

DEBIAN = '/usr/bin/python3'
LATIN = b'\xff\xfe'  # no UTF-8


def find_missing(interpreter):
    """Return why an interpreter cannot run the dispatcher, '' if it can."""
    if not os.access(interpreter, os.X_OK):
        return 'there is no %s' % interpreter
    done = subprocess.run([interpreter, '-c', 'import psycopg2, docopt'], stderr=subprocess.PIPE, cwd='/',
                          universal_newlines=True)
    return '' if done.returncode == 0 else '%s: %s' % (interpreter, done.stderr.strip().splitlines()[-1])


@pytest.fixture(params=[sys.executable, DEBIAN], ids=['ours', 'debian'])
def interpreter(request):
    """The interpreter of the tests, then the one of the distribution with its packages."""
    missing = find_missing(request.param)
    if missing:
        pytest.skip('python3-psycopg2 and python3-docopt of the distribution are not installed: %s' % missing)
    return request.param


@pytest.fixture
def system(tmp_path, dsn, db):
    return Pipeline(tmp_path, dsn, db)


@pytest.fixture
def script(tmp_path):
    """A copy of the one file in a directory of its own, executable."""
    (tmp_path / 'alone').mkdir()
    path = tmp_path / 'alone' / 'pepsidispatch.py'
    shutil.copyfile(DISPATCHER, str(path))
    path.chmod(0o755)
    return str(path)


def execute(command, **variables):
    """Run a command until it ends; return (exit code, standard output, standard error) with bytes in the latter."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd='/',
                          timeout=60, env=make_environment(variables))
    return done.returncode, done.stdout, done.stderr


def make_environment(variables):
    return {name: value for name, value in dict(os.environ, **variables).items() if value is not None}


class Started:
    """A dispatcher that is started by a command of the test's own; a context manager that stops it."""

    def __init__(self, system, command, **variables):
        self.mark = 'script-%s' % system.directory
        self.path = os.path.join(system.directory, 'script.err')
        with open(self.path, 'wb') as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                                            cwd='/', env=make_environment(dict(variables, **{RUNNING_MARK: self.mark})))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self.process.send_signal(signal.SIGTERM)
                assert self.process.wait(20) == 0
                assert self.process.stdout.read() == b''
                wait_until(lambda: not find_marked(RUNNING_MARK, self.mark), 5)
            else:
                print(self.log())
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            kill_all(find_marked(RUNNING_MARK, self.mark))

    def log(self):
        with open(self.path, 'rb') as file:
            return file.read().decode('utf-8', 'backslashreplace')


# -- alone on a host ---------------------------------------------------------------------------------------------------

def test_the_one_file_is_all_it_takes(interpreter, script, system):
    config = system.write_config({'a': system.stub('advance=b'), 'b': system.stub()})
    system.execute('DROP TABLE queue, stage_stats, dispatch_stats')
    assert execute([interpreter, script, '-c', config, 'init'])[0] == 0
    code, out, _ = execute([interpreter, script, '-c', config, 'check'])
    assert code == 0, out
    assert b'error' not in out
    with Started(system, [interpreter, script, '-c', config]):
        system.wait_status(system.insert_one('a'), 'done')
        code, out, err = execute([interpreter, script, '-c', config, 'status'])
        assert (code, err) == (0, b'')
        assert out.startswith(b'dispatcher pid ')
    code, out, err = execute([interpreter, script, '-c', config, 'requeue', '--all'])
    assert (code, out) == (0, b'requeued 0 messages\n')
    for arguments in ('sample', '--help', '--version', 'init --print'):
        code, out, err = execute([interpreter, script] + arguments.split())
        assert (code, err) == (0, b'')
        assert out
    assert set(os.listdir(os.path.dirname(script))) == {'pepsidispatch.py'}  # it writes nothing beside itself


def test_it_works_through_a_symbolic_link_and_from_a_directory_that_cannot_be_written(interpreter, script, system,
                                                                                     tmp_path):
    config = system.write_config({'a': system.stub()})
    (tmp_path / 'bin').mkdir()
    link = tmp_path / 'bin' / 'pepsi-dispatch'
    link.symlink_to(script)
    for directory in (os.path.dirname(script), str(tmp_path / 'bin')):
        os.chmod(directory, stat.S_IRUSR | stat.S_IXUSR)
    try:
        with Started(system, [interpreter, str(link), '-c', config]):
            system.wait_status(system.insert_one('a'), 'done')
    finally:
        for directory in (os.path.dirname(script), str(tmp_path / 'bin')):
            os.chmod(directory, stat.S_IRWXU)


def test_it_is_executable_as_it_is(script, system):
    missing = find_missing(shutil.which('python3') or DEBIAN)
    if missing:
        pytest.skip('what /usr/bin/env finds as python3 cannot run it: %s' % missing)
    code, out, err = execute([script, '--version'])
    assert (code, err) == (0, b'')
    assert out.startswith(b'pepsi-dispatch ')


@pytest.mark.parametrize('module', ['psycopg2', 'docopt'])
@pytest.mark.parametrize('arguments', ['run', '--help'])
def test_a_missing_module_is_one_sentence_with_the_names_of_the_packages(script, tmp_path, module, arguments):
    (tmp_path / 'block').mkdir()
    (tmp_path / 'block' / (module + '.py')).write_text('raise ImportError("No module named %r")\n' % module)
    code, out, err = execute([sys.executable, script, arguments], PYTHONPATH=str(tmp_path / 'block'))
    assert code == 78  # not 1, by which status tells that no dispatcher is running
    assert out == b''
    [line] = err.decode().splitlines()
    assert line.startswith('pepsi-dispatch: ')
    for word in (module, 'psycopg2-binary', 'docopt', 'python3-psycopg2', 'python3-docopt'):
        assert word in line


# -- standard descriptors ----------------------------------------------------------------------------------------------

def find_descriptors(pid):
    """Return what the descriptors 0 to 2 of a process are."""
    return [os.readlink('/proc/%d/fd/%d' % (pid, number)) for number in range(3)]


@pytest.mark.parametrize('closing', ['<&-', '>&-', '2>&-', '<&- >&- 2>&-'])
def test_closed_standard_descriptors_are_not_taken_by_its_own_pipes(script, system, closing):
    worker = system.script('worker', 'echo started >&2; while read -r id; do echo "1 id=$id told"; done\n')
    config = system.write_config({'a': {'PROGRAM': worker, 'PARALLELISM': 1}}, worker_idle_timeout='1 h')
    command = ['sh', '-c', 'exec "$@" ' + closing, 'sh', sys.executable, script, '-v', '-c', config]
    with Started(system, command) as run:
        for _ in range(4):  # what is logged in between goes into no pipe of a worker
            id = system.insert_one('a')
            system.wait_status(id, 'failed')
            assert system.error(id) == 'status: 1 told'
        for number, closed in enumerate(('<&-', '>&-', '2>&-')):
            if closed in closing.split():
                assert find_descriptors(run.process.pid)[number] == '/dev/null'
        [worker] = [pid for pid in find_marked(RUNNING_MARK, run.mark) if pid != run.process.pid]
        theirs = find_descriptors(worker)
        assert theirs[0].startswith('pipe:') and theirs[1].startswith('pipe:') and theirs[0] != theirs[1]
        assert theirs[2] == find_descriptors(run.process.pid)[2]
    if '2>&-' not in closing.split():
        assert 'exit=0' in run.log()
        assert 'WARNING' not in run.log()


COMMANDS = {'sample': 0, '--help': 0, 'status': 1, 'status --json': 1, 'nonsense': 64, 'check': 0, 'requeue -': 0}


@pytest.mark.parametrize('closing', ['<&-', '>&-', '2>&-', '<&- >&- 2>&-'])
def test_commands_with_closed_standard_descriptors_end_as_usual(script, system, closing):
    config = system.write_config({'a': 'true'})
    for arguments, expected in COMMANDS.items():
        code, out, err = execute(['sh', '-c', 'exec "$@" ' + closing, 'sh', sys.executable, script] + arguments.split(),
                                 PEPSI_CONFIG=config)
        assert (arguments, code) == (arguments, expected), err
        assert b'Traceback' not in err
        assert not out or (code != 64 and '>&-' not in closing.split())
        assert not err or '2>&-' not in closing.split()


# -- the environment ---------------------------------------------------------------------------------------------------

def test_warnings_as_errors_do_no_harm_neither_here_nor_in_its_workers(script, system):
    config = system.write_config({'a': system.stub('print=hello')})
    command = [sys.executable, '-W', 'error', '-W', 'ignore::SyntaxWarning', '-W',
               'ignore:invalid escape sequence:DeprecationWarning', script, '-c', config]
    with Started(system, command, PYTHONWARNINGS='error,ignore::SyntaxWarning') as started:
        system.wait_status(system.insert_one('a'), 'done')
    assert 'Traceback' not in started.log()
    assert 'Warning' not in started.log()


STAGES = ['gr\u00f6\u00dfe', '\u65e5\u672c \u2713']


@pytest.mark.parametrize('locale', ['C', 'POSIX'])
def test_names_beyond_ascii_work_in_every_locale(interpreter, script, system, locale):
    environment = {'LC_ALL': locale, 'LANG': None, 'PYTHONUTF8': None, 'PYTHONIOENCODING': None,
                   'PYTHONCOERCECLOCALE': None}
    answer = system.script('\u00e4ntwort', 'while read -r id; do echo "1 $1 $PEPSI_STAGE"; done\n')
    config = system.write_config({stage: [answer, 'w\u00f6rt'] for stage in STAGES})
    renamed = os.path.join(os.path.dirname(config), 'k\u00f6nfig')
    os.rename(config, renamed)
    native = os.fsencode(renamed)
    code, out, _ = execute([interpreter, script, '-c', native, 'check'], **environment)
    assert code == 0, out
    with Started(system, [interpreter, script, '-v', '-c', native], **environment) as started:
        ids = [system.insert_one(stage) for stage in STAGES]
        for id, stage in zip(ids, STAGES):
            system.wait_status(id, 'failed')
            assert system.error(id) == 'status: 1 w\u00f6rt ' + stage
        code, out, err = execute([interpreter, script, '-c', native, 'status', '--prometheus'], **environment)
        assert code == 0, err
        for stage in STAGES:
            assert ('pepsi_queue_messages{stage="%s",status="failed"} 1' % stage).encode() in out
        code, out, err = execute([interpreter, script, '-c', native, 'status'], **environment)
        assert code == 0, err
        for stage in STAGES:
            assert stage.encode() in out
        code, out, err = execute([interpreter, script, '-c', native, 'requeue', '--dry-run',
                                  b'--stage=' + STAGES[0].encode()], **environment)
        assert (code, out) == (0, b'would requeue 1 message\n'), err
    assert 'stage="gr\u00f6\u00dfe"' in started.log() or 'stage=gr\u00f6\u00dfe' in started.log()
    assert 'Traceback' not in started.log()


def test_a_configuration_whose_name_is_no_text_is_found_and_named(script, tmp_path):
    path = os.fsencode(str(tmp_path)) + b'/' + LATIN
    code, out, err = execute([sys.executable, script, '-c', path, 'check'])
    assert code == 78
    assert b'Traceback' not in err
    assert b'No such file' in out + err


def test_a_stage_whose_name_is_no_text_is_a_usage_error(script, system):
    config = system.write_config({'a': 'true'})
    code, out, err = execute([sys.executable, script, '-c', config, 'requeue', b'--stage=' + LATIN])
    assert (code, out) == (64, b'')
    assert b'Traceback' not in err
