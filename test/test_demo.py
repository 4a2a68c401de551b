"""The demo: it must count right, and must not leave anything behind, whatever interrupts it."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import psutil
import pytest
import support

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'demo.py')
LARGE = b'# a line of five words\n' * 500  # too large to be counted where it is read

pytest.importorskip('tqdm', reason='the demo shows its progress with tqdm')


class Demo:
    """A demo that runs, with a directory of its own for everything that it makes; a context manager."""

    def __init__(self, pg, *paths):
        self.directory = tempfile.mkdtemp(prefix='p-')  # short: a socket lies below it
        os.chmod(self.directory, 0o711)  # the server may run as another user
        self._out = os.path.join(self.directory, 'out')
        with open(self._out, 'wb') as out:
            environment = dict(os.environ, PG_BINDIR=pg.bindir, TMPDIR=self.directory)
            self.process = subprocess.Popen(support.PYTHON + [DEMO] + [str(path) for path in paths], env=environment,
                                            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                            start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if kind:
            print(self.output())
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        support.kill_all([pid for pid, _ in self.processes()])
        shutil.rmtree(self.directory)

    def output(self):
        """Return what it has written until now."""
        with open(self._out, encoding='utf-8', errors='replace') as file:
            return file.read()

    def wait(self):
        """Return its exit code."""
        return self.process.wait(100)

    def works(self):
        """Tell whether a stage has been started."""
        return any('demo_stages.py' in command for _, command in self.processes())

    def processes(self):
        """Return (pid, command) of the living processes that have to do with its directory, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                command = ' '.join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and process.pid != self.process.pid and self.directory in (
                        ' '.join([command, process.cwd()] + list(process.environ().values()))):
                    found.append((process.pid, command))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                pass
        return found

    def left(self):
        """Return what is left of it: files and processes."""
        return sorted(set(os.listdir(self.directory)) - {'out'}) + self.processes()


@pytest.fixture
def tree(tmp_path):
    """A directory with small files and large ones; an empty one; names that need quoting; and what is no .py file."""
    directory = tmp_path / 'tree'
    (directory / 'sub').mkdir(parents=True)
    for number in range(6):
        (directory / ('small %d.py' % number)).write_bytes(b'one\ntwo words\r\nno newline: \xff')
        (directory / 'sub' / ("la'rge%%d\u00e4%d.py" % number)).write_bytes(LARGE)
    (directory / 'empty.py').write_bytes(b'')
    (directory / 'other.txt').write_bytes(b'not counted\n')
    return directory


def test_demo_dispatches_and_counts_every_file(pg, tree):
    with Demo(pg, tree) as demo:
        assert demo.wait() == 0
        output = demo.output()
        assert '13 files are in %s' % tree in output
        assert 'started %s' % os.path.dirname(sys.executable) in output, 'not with the interpreter of its caller'
        assert '13/13' in output, 'the progress bar did not reach its end'
        for stage in 'read', 'count', 'record':
            assert re.search(r'^%s +13 +0 +0 +0 +[0-9.]+$' % stage, output, re.MULTILINE), stage
        assert re.search(r'^ +39 +13 +1 +[0-9]+$', output, re.MULTILINE), 'dispatch_stats'
        lines, words, size = 6 * 2 + 6 * 500, 6 * 6 + 6 * 500 * 6, 6 * 28 + 6 * len(LARGE)
        for title in 'recorded', 'recounted':
            assert re.search(r'^%s +13 +%d +%d +%d$' % (title, lines, words, size), output, re.MULTILINE), title
        support.wait_until(lambda: not demo.left(), 10)


def test_demo_fails_if_a_message_fails(pg, tree):
    unreadable = tree / 'unreadable.py'
    unreadable.symlink_to('/proc/self/mem')  # a regular file that no one can read at 0
    with Demo(pg, tree) as demo:
        assert demo.wait() == 1
        output = demo.output()
        assert 'the demo has failed: 1 messages failed' in output
        assert re.search(r'read +failed +status: 1 OSError: .*unreadable\.py$', output, re.MULTILINE)
        support.wait_until(lambda: not demo.left(), 10)


def test_demo_fails_if_there_is_nothing_to_do(pg, tmp_path):
    with Demo(pg, tmp_path) as demo:
        assert demo.wait() == 1
        assert 'no .py file in %s' % tmp_path in demo.output()
        support.wait_until(lambda: not demo.left(), 10)


@pytest.mark.parametrize('number, group', [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_demo_that_is_interrupted_leaves_nothing_behind(pg, number, group):
    """Ctrl-C in a terminal is for the whole group, TERM for the demo alone. By default there is much to do."""
    with Demo(pg) as demo:
        support.wait_until(demo.works, 60)
        (os.killpg if group else os.kill)(demo.process.pid, number)
        assert demo.wait() == 128 + number
        assert 'stopped by %s' % number.name in demo.output()
        assert 'stage_stats' not in demo.output(), 'it had finished before it was interrupted'
        support.wait_until(lambda: not demo.left(), 10)


def test_demo_that_is_interrupted_while_the_server_is_made_leaves_nothing_behind(pg):
    with Demo(pg) as demo:
        support.wait_until(lambda: any('bin/initdb ' in command for _, command in demo.processes()), 60)
        os.killpg(demo.process.pid, signal.SIGINT)
        assert demo.wait() == 128 + signal.SIGINT
        support.wait_until(lambda: not demo.left(), 10)


def test_dispatcher_of_a_demo_that_is_killed_ends_by_itself(pg):
    with Demo(pg) as demo:
        support.wait_until(demo.works, 60)
        demo.process.kill()
        demo.process.wait()
        support.wait_until(lambda: not demo.processes(), 30)
