"""What the tests share: waiting for a condition, a dispatcher as a user would start it, and the search for leaks.

Imported as a plain module by the tests, the fixtures and the demo; needs psutil and an importable pepsidispatch.
"""
import collections
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil

import pepsidispatch

# The file that is tested: the installed one where it is installed, as under tox; else that of the work tree.
DISPATCHER = os.path.abspath(pepsidispatch.__file__)

# Our warnings are errors. Not that of docopt 0.6.2 though, whose first import since it was installed prints a
# SyntaxWarning; test_environment compiles our own modules without it.
PYTHON = [sys.executable, '-W', 'error', '-W', 'ignore::SyntaxWarning',
          '-W', 'ignore:invalid escape sequence:DeprecationWarning']

# Environment variables that everything started below inherits: by the first one finds what a test left behind, by the
# second what belongs to one dispatcher, even when its parents are dead and it is in another session.
TEST_MARK = 'PEPSI_TEST'
RUNNING_MARK = 'PEPSI_TEST_RUNNING'

_numbers = itertools.count(1)

Result = collections.namedtuple('Result', 'code out err')


def wait_until(condition, timeout_s=15.0, what=None):
    """Call condition again and again until what it returns is true, and return that.

    Raises AssertionError after timeout_s seconds; the text says what was waited for, default the condition's name,
    and what the condition returned last.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while True:
        late = time.monotonic() > deadline  # asked first: on a busy machine there is one more look after the deadline
        value = condition()
        if value:
            return value
        if late:
            name = what or getattr(condition, '__name__', repr(condition))
            raise AssertionError('waited %g s in vain for: %s (last: %r)' % (timeout_s, name, value))
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def write_config(directory, dsn, stages, **options):
    """Write pepsi.conf into a directory and return its path as a str; replaces one that is there, at one stroke.

    dsn: value of DATABASE.
    stages: name -> PROGRAM (a str, or a list that is quoted as a shell would need it), or name -> dict of options,
    with PROGRAM in either form.
    options: those of the section pepsi-dispatch. Option names are written as they are: max_runtime='2 s' will do.
    """
    lines = ['[pepsi]', 'DATABASE = %s' % dsn, '[pepsi-dispatch]']
    lines += ['%s = %s' % item for item in options.items()]
    for name, stage in stages.items():
        lines.append('[stage-%s]' % name)
        for option, value in (stage if isinstance(stage, dict) else {'PROGRAM': stage}).items():
            lines.append('%s = %s' % (option, ' '.join(map(shlex.quote, value)) if isinstance(value, list) else value))
    path = os.path.join(str(directory), 'pepsi.conf')
    with open(path + '.new', 'w', encoding='utf-8') as file:
        file.write('\n'.join(lines) + '\n')
    os.rename(path + '.new', path)  # a dispatcher that reads it just now sees the old one or the new one
    return path


def call(*arguments, env=None, timeout_s=60):
    """Run pepsi-dispatch with these arguments until it ends and return its (code, out, err), the latter two as str.

    For the commands that end by themselves. env: variables to add; one that is None is removed.
    """
    done = subprocess.run(PYTHON + [DISPATCHER] + list(arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=timeout_s, env=_extend_environment(env))
    return Result(done.returncode, done.stdout.decode('utf-8', 'replace'), done.stderr.decode('utf-8', 'replace'))


class Running:
    """A dispatcher that runs as a process of its own; a context manager.

    At the end of the block one that still runs is stopped and has to exit with 0, and its workers have to be gone.
    If the block raised, the log is printed and everything is killed. In both cases nothing is left.
    """

    def __init__(self, config, *arguments, options=('-v',), env=None, cwd=None):
        """Start `pepsi-dispatch OPTIONS -c CONFIG run ARGUMENTS`; does not wait for anything.

        env: variables to add; one that is None is removed. cwd: its working directory, default ours.
        Its standard error and output go to new files beside config.
        """
        number = next(_numbers)
        self.mark = '%d-%d' % (os.getpid(), number)
        self._err = os.path.join(os.path.dirname(config), 'run-%d.err' % number)
        self._out = os.path.join(os.path.dirname(config), 'run-%d.out' % number)
        command = PYTHON + [DISPATCHER] + list(options) + ['-c', config, 'run'] + list(arguments)
        with open(self._err, 'ab') as err, open(self._out, 'ab') as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd,
                                            env=_extend_environment(env, **{RUNNING_MARK: self.mark}))
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                if self.process.poll() is None:
                    code = self.stop()
                    assert code == 0, 'exit code %d after TERM' % code
                wait_until(lambda: not self.family(), 5, 'the end of the workers of a dispatcher that has ended')
        except BaseException:
            kind = kind or AssertionError
            raise
        finally:
            if kind is not None:
                print('--- log of dispatcher %d\n%s---' % (self.pid, self.log()))  # pytest shows it if a test fails
            self.close()

    def log(self):
        """Return everything that it and its workers wrote to standard error until now, as a str."""
        with open(self._err, 'rb') as file:
            return file.read().decode('utf-8', 'replace')

    def wait_log(self, pattern, timeout_s=15.0, start=0):
        """Wait until a regular expression is found in the log from position start on, and return the match.

        ^ and $ match at lines. To see an event again: start=match.end(), or len(running.log()) before it is caused.
        Raises AssertionError after timeout_s, or at once if the process has ended without writing it.
        """
        search = re.compile(pattern, re.MULTILINE).search

        def found():
            ended = self.process.poll() is not None  # asked first: then all that it wrote is in the file
            match = search(self.log(), start)
            assert match or not ended, 'exited with %s without logging %r' % (self.process.returncode, pattern)
            return match

        return wait_until(found, timeout_s, 'log line %r' % pattern)

    def workers(self):
        """Return the living processes below it, at whatever depth, as psutil.Process; the oldest first."""
        return self._find_below(zombies=False)

    def zombies(self):
        """Return the processes below it that have died and were not waited for, as psutil.Process."""
        return self._find_below(zombies=True)

    def family(self):
        """Return the pids of all living processes that it started, also of those that are no longer below it."""
        return [pid for pid in find_marked(RUNNING_MARK, self.mark) if pid != self.pid]

    def signal(self, number):
        """Send it a signal."""
        self.process.send_signal(number)

    def stop(self, timeout_s=20.0):
        """Send it SIGTERM and return its exit code, as wait() does."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self):
        """Kill it and return its exit code, -9. Its workers are left to notice."""
        self.process.kill()
        return self.process.wait()

    def wait(self, timeout_s=20.0):
        """Wait for its end and return its exit code; negative: the signal that it died of.

        Raises AssertionError if it lives on for timeout_s, if it wrote anything to standard output, or if it left a
        file or socket of its own to the garbage collector.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError('dispatcher %d still runs after %g s' % (self.pid, timeout_s)) from None
        with open(self._out, 'rb') as file:
            out = file.read()
        assert out == b'', 'written to standard output: %r' % out
        assert 'ResourceWarning' not in self.log(), 'a ResourceWarning is in the log'
        return code

    def close(self):
        """Kill whatever is left of it and its workers. For the end of a test, not for tests of an end."""
        left = self.family()  # looked for first, and once more when it cannot start another one
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        kill_all(left + self.family())

    def _find_below(self, zombies):
        found = []
        try:
            for process in psutil.Process(self.pid).children(recursive=True):
                described = _describe(process)
                if described and (described[0] == psutil.STATUS_ZOMBIE) == zombies:
                    found.append(process)
        except psutil.NoSuchProcess:
            pass
        return found


def find_marked(name, value):
    """Return the pids of all living processes, except ours, that were started with this environment variable.

    A zombie has no environment: it is not found.
    """
    entry = os.fsencode('%s=%s' % (name, value))
    found = []
    for pid in os.listdir('/proc'):
        if pid.isdigit() and int(pid) != os.getpid():
            try:
                with open('/proc/%s/environ' % pid, 'rb') as file:
                    environment = file.read()
            except OSError:  # gone meanwhile, or somebody else's
                continue
            if entry in environment.split(b'\0'):
                found.append(int(pid))
    return found


def kill_all(pids):
    """Kill the processes with these pids, where they still exist, and wait until they are dead."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until(lambda: not any(map(_describe_living, pids)), 10, 'the end of killed processes')


class LeakCheck:
    """Remembers what this process holds when it is made; tells later what has been added and was not given back."""

    def __init__(self, mark, get_spared=lambda: ()):
        """mark: value of TEST_MARK in the environment of what this process starts.

        get_spared: returns the pids of children that are meant to stay, and that may be replaced in between.
        """
        self._mark = mark
        self._get_spared = get_spared
        self._files = _list_files()
        self._children = _list_children()
        self._marked = set(find_marked(TEST_MARK, mark))

    def find(self):
        """Return one line for each descriptor, child, zombie and orphan that was not there at the beginning."""
        spared = set(self._get_spared())
        children = {pid: text for pid, text in _list_children().items()
                    if pid not in self._children and pid not in spared}
        orphans = set(find_marked(TEST_MARK, self._mark)) - self._marked - set(children) - spared
        return (['descriptor %d: %s' % item for item in sorted(_list_files() - self._files)]
                + ['child %d: %s' % item for item in sorted(children.items())]
                + ['process %d: %s' % (pid, _describe_living(pid)) for pid in sorted(orphans)])

    def wait(self, timeout_s=5.0):
        """Return what find() finds once that is nothing, or after timeout_s: what ends just now is no leak."""
        try:
            wait_until(lambda: not self.find(), timeout_s)
        except AssertionError:
            pass
        return self.find()

    def kill(self):
        """Kill the processes that were left, so that the next test finds none of them."""
        kill_all(set(find_marked(TEST_MARK, self._mark)) - self._marked - set(self._get_spared()))


def _list_files():
    """Return our open descriptors as a set of (number, what it is)."""
    files = set()
    for fd in os.listdir('/proc/self/fd'):
        try:
            files.add((int(fd), os.readlink('/proc/self/fd/' + fd)))
        except OSError:  # that of the listing itself
            pass
    return files


def _list_children():
    """Return our children, zombies too, as pid -> state and command."""
    children = {}
    for process in psutil.Process().children():
        described = _describe(process)
        if described:
            children[process.pid] = '%s %s' % described
    return children


def _describe(process):
    """Return (state, command) of a psutil.Process; None if it is gone."""
    try:
        state = process.status()
        return state, ' '.join([process.name()] if state == psutil.STATUS_ZOMBIE else process.cmdline())
    except psutil.ZombieProcess:
        return psutil.STATUS_ZOMBIE, ''
    except psutil.NoSuchProcess:
        return None


def _describe_living(pid):
    """Return a text about the process with this pid; None if it is dead, waited for or not."""
    try:
        described = _describe(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return None
    return None if not described or described[0] == psutil.STATUS_ZOMBIE else '%s %s' % described


def _extend_environment(variables=None, **more):
    """Return a copy of our environment with these variables; those that are None are removed."""
    environment = dict(os.environ)
    for name, value in dict(variables or {}, **more).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment
