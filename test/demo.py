"""Show pepsi-dispatch at work on real files: 'tox -e demo', or 'tox -e demo -- PATH...' for files of your own.

Starts a PostgreSQL of its own, makes a message of each file (by default those of Python's standard library), runs
the dispatcher until three stages have read, counted and recorded them all, and compares the result with a plain
recount of the same files. Exits with 1 if they differ. Needs tqdm and psycopg2; leaves nothing behind, also when it
is interrupted by Ctrl-C or TERM.
"""
import contextlib
import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time

import cluster
import psycopg2
import tqdm

HERE = os.path.dirname(os.path.abspath(__file__))
STAGES = 'read', 'count', 'record'
STOP_S = 15  # for a dispatcher that was told to stop: three times its STOP_TIMEOUT
PR_SET_PDEATHSIG = 1  # linux/prctl.h

CONFIG = """\
[pepsi]
DATABASE = %(dsn)s
"""

STAGE = """
[stage-%(name)s]
PROGRAM = %(program)s
PARALLELISM = 2
"""

RESULT = """
CREATE TABLE result (
    message bigint PRIMARY KEY,
    path    text NOT NULL,
    sha256  text NOT NULL,
    lines   bigint NOT NULL,
    words   bigint NOT NULL,
    bytes   bigint NOT NULL
)
"""

QUEUE = """
INSERT INTO queue (stage, state)
SELECT 'read', jsonb_build_object('path', path)
FROM unnest(%s::text[]) AS path
"""

PROGRESS = """
SELECT count(*) FILTER (WHERE status IN ('pending', 'running', 'paused')),
       count(*) FILTER (WHERE status NOT IN ('pending', 'running', 'paused', 'done'))
FROM queue
"""


class Trouble(Exception):
    """The demo has failed; the text says how."""


class Stopped(Exception):
    """Somebody wants us to end."""


class Stop:
    """Remembers that INT or TERM came. Nothing is interrupted: whoever can stop here and now looks."""

    def __init__(self):
        self.number = 0
        for number in signal.SIGINT, signal.SIGTERM:
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.number = number

    def look(self):
        """Raise Stopped if a signal came."""
        if self.number:
            raise Stopped


def main(paths):
    """Run the demo; return its exit code."""
    stop = Stop()
    paths = paths or [sysconfig.get_paths()['stdlib']]
    try:
        files = find_files(paths)
        with cluster.Cluster() as server, tempfile.TemporaryDirectory(prefix='pepsi-demo-') as directory:
            stop.look()
            say('PostgreSQL runs in %s, %d files are in %s' % (server.base, len(files), ' '.join(paths)))
            demonstrate(server, directory, files, stop)
            return 0
    except (Trouble, Stopped, cluster.Unavailable, subprocess.CalledProcessError) as reason:
        if stop.number:  # Ctrl-C ends initdb, too
            print('stopped by %s; nothing is left behind' % signal.Signals(stop.number).name, file=sys.stderr)
            return 128 + stop.number
        print('the demo has failed: %s' % reason, file=sys.stderr)
        return 1


def demonstrate(server, directory, files, stop):
    """Queue the files, have them dispatched, show the statistics, check the result."""
    config = os.path.join(directory, 'pepsi.conf')
    write_config(config, server.dsn())
    with contextlib.closing(psycopg2.connect(server.dsn())) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        run_command(['-c', config, 'init'])
        cursor.execute(RESULT)
        cursor.execute(QUEUE, [files])
        say('queued %d messages at stage %s' % (len(files), STAGES[0]))
        with Dispatcher(config, os.path.join(directory, 'log')) as dispatcher:
            say('started %s' % ' '.join(map(shlex.quote, dispatcher.command)))
            follow(cursor, len(files), dispatcher, stop)
            dispatcher.stop()  # writes the statistics
        for table in 'stage_stats', 'dispatch_stats':
            say('\n%s' % table)
            show(cursor, 'SELECT * FROM %s ORDER BY 1' % table)
        check_statistics(cursor, len(files))
        check_result(cursor, files, stop)


def write_config(path, dsn):
    """Write a pepsi.conf with our three stages."""
    program = ' '.join(map(shlex.quote, [sys.executable, os.path.join(HERE, 'demo_stages.py')]))
    with open(path, 'w', encoding='utf-8') as file:
        file.write(CONFIG % {'dsn': dsn})
        for name in STAGES:
            file.write(STAGE % {'name': name, 'program': program})


def find_command():
    """Return how a user would call pepsi-dispatch: the command that was installed with this Python, else the file."""
    installed = shutil.which('pepsi-dispatch', path=os.path.dirname(sys.executable))
    return [installed] if installed else [sys.executable, os.path.join(os.path.dirname(HERE), 'pepsidispatch.py')]


def run_command(arguments):
    """Run a command of pepsi-dispatch that ends by itself."""
    done = subprocess.run(find_command() + arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          start_new_session=True)
    if done.returncode:
        raise Trouble('pepsi-dispatch %s: %s' % (' '.join(arguments), done.stderr.decode('utf-8', 'replace')))


def find_files(paths):
    """Return the files that are named, and the .py files below the directories that are named, sorted.

    Installed packages are no part of the standard library. Names that are no text are left out: jsonb cannot hold them.
    Raises Trouble if there are none.
    """
    found = set()
    for path in map(os.path.abspath, paths):
        if os.path.isfile(path):
            found.add(path)
        for parent, directories, names in os.walk(path):
            directories[:] = [name for name in directories if name not in ('site-packages', 'dist-packages')]
            found.update(os.path.join(parent, name) for name in names if name.endswith('.py'))
    files = sorted(path for path in found if os.path.isfile(path) and is_text(path))
    if not files:
        raise Trouble('no .py file in %s' % ' '.join(paths))
    return files


def is_text(path):
    """Tell whether a path can be written in UTF-8."""
    try:
        path.encode('utf-8')
    except UnicodeEncodeError:
        return False
    return True


class Dispatcher:
    """A dispatcher that runs as a process of its own; a context manager that ends it."""

    def __init__(self, config, log):
        """Start it; it writes its log to the file log."""
        self.command = find_command() + ['-c', config]
        self._log = log
        prctl = getattr(ctypes.CDLL(None), 'prctl', None)
        with open(log, 'wb') as file:
            # A session of its own: Ctrl-C is for us, who then stop it. And it does not outlive us, whatever happens.
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stderr=file, start_new_session=True,
                preexec_fn=lambda: prctl and prctl(PR_SET_PDEATHSIG, signal.SIGTERM))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._process.poll() is None:
            self._end()

    def look(self):
        """Raise Trouble if it has ended."""
        if self._process.poll() is not None:
            raise Trouble('pepsi-dispatch exited with %d:\n%s' % (self._process.returncode, self.log()))

    def stop(self):
        """Stop it, as supervisord would; raise Trouble if that goes wrong."""
        self.look()
        if self._end():
            self.look()

    def log(self):
        """Return what it has logged."""
        with open(self._log, encoding='utf-8', errors='replace') as file:
            return file.read()

    def _end(self):
        self._process.terminate()
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def follow(cursor, number, dispatcher, stop):
    """Show a progress bar until no message is in the pipeline any more."""
    terminal = sys.stderr.isatty()
    with tqdm.tqdm(total=number, unit=' messages', ascii=not terminal, mininterval=0.1 if terminal else 2) as bar:
        left = number
        while left:
            stop.look()
            dispatcher.look()
            time.sleep(0.1)
            cursor.execute(PROGRESS)
            left, failed = cursor.fetchone()
            bar.update(number - left - bar.n)
    if failed:
        show(cursor, "SELECT ingress_id, stage, status, state ->> 'dispatch_error' AS dispatch_error, state ->> 'path'"
                     " AS path FROM queue WHERE status <> 'done' ORDER BY ingress_id LIMIT 20")
        raise Trouble('%d messages failed:\n%s' % (failed, dispatcher.log()))


def check_statistics(cursor, number):
    """Every file has passed each stage once, as a pass of its own or as a fused one, and nothing went wrong."""
    cursor.execute('SELECT stage, processed, failed, timeouts, crashes FROM stage_stats ORDER BY stage')
    wanted = [(name, number, 0, 0, 0) for name in sorted(STAGES)]
    if cursor.fetchall() != wanted:
        raise Trouble('stage_stats should be: %s' % wanted)
    cursor.execute('SELECT stages, messages FROM dispatch_stats')
    if cursor.fetchall() != [(len(STAGES) * number, number)]:
        raise Trouble('dispatch_stats should have %d stages, %d messages' % (len(STAGES) * number, number))


def check_result(cursor, files, stop):
    """Compare what the stages recorded with a recount of our own."""
    cursor.execute('SELECT path, sha256, lines, words, bytes FROM result')
    recorded = {row[0]: row[1:] for row in cursor}
    counted = {}
    for path in files:
        stop.look()
        counted[path] = recount(path)
    sums = [[sum(row[column] for row in rows.values()) for column in (1, 2, 3)] for rows in (recorded, counted)]
    say('\n            %12s %12s %12s %12s' % ('files', 'lines', 'words', 'bytes'))
    for title, rows, numbers in zip(('recorded', 'recounted'), (recorded, counted), sums):
        say('%-11s %12d %12d %12d %12d' % (title, len(rows), *numbers))
    wrong = sorted(path for path in set(recorded) | set(counted) if recorded.get(path) != counted.get(path))
    if wrong:
        raise Trouble('%d files differ, the first is %s' % (len(wrong), wrong[0]))
    say('They agree, file by file.')


def recount(path):
    """Return sha256, lines, words and bytes of a file; written apart from the stages, not to share their mistakes."""
    digest, lines, words, size = hashlib.sha256(), 0, 0, 0
    with open(path, 'rb') as file:
        for line in file:
            digest.update(line)
            lines += line.endswith(b'\n')
            words += len(line.split())
            size += len(line)
    return digest.hexdigest(), lines, words, size


def show(cursor, query):
    """Print the rows of a query as a table."""
    cursor.execute(query)
    rows = [[column[0] for column in cursor.description]]
    rows += [['%.2f' % value if isinstance(value, float) else str(value) for value in row] for row in cursor]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        say('  '.join(value.ljust(width) if value[:1].isalpha() else value.rjust(width)
                      for value, width in zip(row, widths)).rstrip())


def say(text):
    """Print a line, at once: it keeps its place among the lines of the progress bar."""
    print(text, flush=True)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
