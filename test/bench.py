"""Benchmarks of pepsi-dispatch: what they share, and a program that runs them all, one after the other.

    python test/bench.py [--quick] [--peers] [NAME ...]

NAME: some of throughput, latency, notify, scale, claim; default: all of these. Each is a program of its own,
test/bench_NAME.py, and tells more with --help. --quick: the least of each, to see whether it works; its figures say
nothing. --peers: also compare with other job queues, which are fetched from PyPI. PG_BINDIR or PG_PACKAGE say which
PostgreSQL (see cluster.py); it is a private one, with its own, durable settings unless it says otherwise.

Absolute figures depend on the machine and on what else it does: the ratios of runs that took turns are what counts.
"""
import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
import psycopg2

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import bench_worker
import cluster
import pepsidispatch
import support

NAMES = ('throughput', 'latency', 'notify', 'scale', 'claim')

WORKER = os.path.abspath(bench_worker.__file__)

# Nothing that happens once in a while is to happen in one run and not in the other.
SERVER = {'shared_buffers': '512MB', 'max_wal_size': '8GB', 'checkpoint_timeout': '1h', 'autovacuum': 'off',
          'max_connections': '500'}

# Workers that answer without having touched the row, so that only the dispatcher is at work: the claim itself makes
# the row what a worker would have made of it.
FINISH_AT_CLAIM = """
CREATE FUNCTION finish_at_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.status := 'done';
    RETURN NEW;
END
$$;
CREATE TRIGGER finish_at_claim BEFORE UPDATE ON queue
    FOR EACH ROW WHEN (OLD.status = 'pending' AND NEW.status = 'running') EXECUTE FUNCTION finish_at_claim();
"""

# The workers stay, and nothing happens by the clock.
CALM = {'POLL_INTERVAL': '1 h', 'WORKER_IDLE_TIMEOUT': '1 h', 'MAX_RUNTIME': '1 h'}


# -- the command line and what is printed ------------------------------------------------------------------------------

def make_parser(doc):
    """Return the parser for a benchmark, with the options of all; doc is the docstring of its program."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    parser.add_argument('--quick', action='store_true', help='the least of each, to see whether it works')
    parser.add_argument('--svg', metavar='FILE', help='draw the results; needs matplotlib')
    return parser


def numbers(text):
    """Read 1,4,16."""
    return [int(word) for word in text.split(',')]


def words(text):
    """Read a,b,c."""
    return text.split(',')


def print_json(**values):
    """Print one result as a line of JSON."""
    print(json.dumps({name: _round(value) for name, value in values.items()}), flush=True)


def _round(value):
    if isinstance(value, float):
        return float('%.4g' % value)
    if isinstance(value, dict):
        return {name: _round(part) for name, part in value.items()}
    return value


def print_table(title, header, rows):
    """Print rows of str and numbers for people; None is left blank."""
    cells = [header] + [['' if cell is None else '%.3g' % cell if isinstance(cell, float) and abs(cell) < 100
                         else '{:,.0f}'.format(cell) if isinstance(cell, (int, float)) else cell for cell in row]
                        for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    texts = [all(isinstance(row[i], str) for row in rows) for i in range(len(header))]
    print('\n' + title)
    for row in cells:
        print('  '.join(cell.ljust(width) if text else cell.rjust(width)
                        for cell, width, text in zip(row, widths, texts)).rstrip())
    sys.stdout.flush()


def print_machine(server):
    """Print where and on what this is measured."""
    with contextlib.closing(psycopg2.connect(server.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute('SHOW server_version')
        [(version,)] = cursor.fetchall()
    print_json(bench='machine', cpus=os.cpu_count(), system=platform.platform(), python=platform.python_version(),
               psycopg2=psycopg2.__version__.split()[0], postgresql=version, fsync=server.settings.get('fsync', 'on'),
               load=os.getloadavg()[0], time=time.strftime('%Y-%m-%d %H:%M'))


def judge(value, target, least):
    """Say whether a value reaches a target: at least, or at most, so much. None: there is no target."""
    return None if target is None else 'met' if (value >= target if least else value <= target) else 'MISSED'


def quantile(values, share):
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values):
    """Return the median of the values that are not None; None if none is left."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@contextlib.contextmanager
def drawing(file):
    """Yield pyplot and write what was drawn with it to a file; yields None where that is not wanted or possible."""
    pyplot = None
    if file:
        try:
            importlib.import_module('matplotlib').use('svg')
            pyplot = importlib.import_module('matplotlib.pyplot')
        except ImportError:
            print('no matplotlib here: %s is not drawn' % file, file=sys.stderr)
    yield pyplot
    if pyplot:
        pyplot.savefig(file)
        pyplot.close('all')


# -- the server and its databases --------------------------------------------------------------------------------------

@contextlib.contextmanager
def start_server(**settings):
    """Start a private PostgreSQL with durable commits; a context manager."""
    for name in list(os.environ):
        if re.match('PG[A-Z]|PEPSI_', name):  # not to be taken from whoever runs this
            del os.environ[name]
    with cluster.Cluster(durable=True, **dict(SERVER, **settings)) as server:
        yield server


def make_database(server, name, schema=pepsidispatch.SCHEMA):
    """Make a database with the tables in it and return its connection string; replaces one that is there."""
    with contextlib.closing(connect(server.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute('DROP DATABASE IF EXISTS ' + name)
        cursor.execute('CREATE DATABASE %s TEMPLATE template0' % name)
    with contextlib.closing(connect(server.dsn(name))) as connection, connection.cursor() as cursor:
        cursor.execute(schema)
    return server.dsn(name)


def connect(dsn):
    """Return a connection in autocommit."""
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    return connection


@contextlib.contextmanager
def temporary_directory():
    """Yield a new directory and remove it afterwards; its path is short."""
    directory = tempfile.mkdtemp(prefix='pepsi-')
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# -- what workers and processes did ------------------------------------------------------------------------------------

class Shared:
    """The file in which all workers of a benchmark count their passes and note when they read an id."""

    def __init__(self, directory):
        self.path = os.path.join(directory, 'shared')
        bench_worker.make_shared(self.path)
        self._numbers = bench_worker.map_shared(self.path)

    def passes(self):
        """Return how many passes there were until now."""
        workers = min(self._numbers[0], bench_worker.SLOTS)
        return sum(self._numbers[1:1 + workers])

    def read_at(self, id):
        """Return when an id was read by a worker, in monotonic seconds; 0.0 if it was not."""
        return self._numbers[bench_worker.FIRST_STAMP + id % bench_worker.STAMPS] / 1e9

    def forget(self, id):
        """Clear the stamp of an id that is to be used (again)."""
        self._numbers[bench_worker.FIRST_STAMP + id % bench_worker.STAMPS] = 0

    def command(self, dsn=None, sync='on', following=None, work_s=None):
        """Return the PROGRAM of a worker; see bench_worker.py."""
        options = {'shared': self.path, 'dsn': dsn, 'sync': sync, 'next': following, 'work': work_s}
        # -S saves a third of the start of a program that imports nothing else.
        return [sys.executable] + ['-S'] * (dsn is None) + ['-E', WORKER] + [
            '--%s=%s' % item for item in options.items() if item[1] is not None]


def cpu_s(pid):
    """Return how long all threads of a process were on a CPU until now, in seconds; 0.0 if it is gone."""
    total = 0.0
    try:
        for task in os.listdir('/proc/%d/task' % pid):
            try:
                with open('/proc/%d/task/%s/schedstat' % (pid, task)) as file:
                    total += int(file.read().split()[0]) / 1e9
            except (FileNotFoundError, IndexError):  # a kernel without it
                with open('/proc/%d/task/%s/stat' % (pid, task)) as file:
                    fields = file.read().rpartition(')')[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
    except OSError:
        pass
    return total


def server_pids(server):
    """Return the pids of all processes of a server, also of the backends."""
    return [server.process.pid] + [child.pid for child in psutil.Process(server.process.pid).children()]


class Meter:
    """CPU time of groups of processes, from its making on."""

    def __init__(self, **groups):
        """groups: name -> pids."""
        self._groups = groups
        self._before = self._read()

    def _read(self):
        return {name: sum(map(cpu_s, pids)) for name, pids in self._groups.items()}

    def read(self):
        """Return the CPU seconds since the making, by name."""
        return {name: value - self._before[name] for name, value in self._read().items()}


# -- the dispatcher ----------------------------------------------------------------------------------------------------

def make_launcher(directory):
    """Return the path of a program like the one that pip installs: run as a script the module would be compiled at each
    start, and what that takes of the memory would stay."""
    path = os.path.join(directory, 'pepsi-dispatch')
    with open(path, 'w') as file:
        file.write('import sys\nsys.path.append(%r)\nimport pepsidispatch\nsys.exit(pepsidispatch.main())\n'
                   % os.path.dirname(os.path.abspath(pepsidispatch.__file__)))
    return path


class Dispatcher(support.Running):
    """A dispatcher under measurement; its log tells the pace twice a second."""

    def __init__(self, directory, dsn, stages, **options):
        """stages: name -> options. Waits until it has taken over."""
        config = support.write_config(directory, dsn, stages, **dict(CALM, STATS_INTERVAL='500 ms', **options))
        program, support.DISPATCHER = support.DISPATCHER, make_launcher(directory)
        try:
            super().__init__(config, options=('-v',))
        finally:
            support.DISPATCHER = program
        self.wait_log('took over')

    def ask_state(self):
        """Have it write its state to the log, without waiting for that."""
        self.signal(support.signal.SIGUSR1)

    def states(self, start, number):
        """Wait until so many states are in the log behind a position; return (turns, statements) of each."""
        def find():
            found = re.findall(r'state phase=.* turns=(\d+) statements=(\d+)', self.log()[start:])
            return found if len(found) >= number else None

        return [(int(turns), int(statements)) for turns, statements in support.wait_until(find)]

    def rows_a_claim(self, start):
        """Return the mean of what the log behind a position says about rows a claim; None if it says nothing."""
        found = re.findall(r'paced .* ([0-9.]+) rows a claim', self.log()[start:])
        return statistics.mean(map(float, found)) if found else None

    def rss_kib(self):
        """Return its resident memory in KiB."""
        return psutil.Process(self.pid).memory_info().rss / 1024


# -- all of them -------------------------------------------------------------------------------------------------------

def main(arguments):
    parser = make_parser(__doc__)
    parser.add_argument('--peers', action='store_true')
    parser.add_argument('names', nargs='*', metavar='NAME')
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error('no such benchmark: ' + ', '.join(sorted(unknown)))
    failed = 0
    for name in (options.names or list(NAMES)) + ['peers'] * options.peers:
        command = [sys.executable, os.path.join(os.path.dirname(WORKER), 'bench_%s.py' % name)]
        if name == 'claim':
            command += ['10000', '20000'] if options.quick else []
        else:
            command += ['--quick'] if options.quick else []
            if options.svg:
                stem, extension = os.path.splitext(options.svg)
                command += ['--svg', '%s-%s%s' % (stem, name, extension or '.svg')]
        print('\n== %s' % name, flush=True)
        failed += subprocess.call(command) != 0
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
