"""The same no-op job in other job queues for Python, beside a no-op pass of pepsi-dispatch.

    python test/bench_peers.py [--peers NAME,...] [--venv DIR] [--rounds N] [--seconds S] [--quick]

Fetches them from PyPI into a virtual environment, default: one that is removed afterwards; one that cannot be had is
skipped with the reason. All have a concurrency of 4, in four processes where they can, and a backlog to work off; what
is counted is jobs a second while a tenth to 95 % of it are done. The database has durable settings. Celery works
with redis-server, if there is one on PATH, and with files, the brokers that need no server of their own; it writes no
results. The jobs of all others are committed to PostgreSQL by themselves, those of pepsi-dispatch by its workers.
They take turns, --rounds times.
"""
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import bench
import bench_throughput

PACKAGES = ['celery', 'redis', 'procrastinate', 'psycopg[binary]', 'pgqueuer', 'asyncpg']

# Each of these is called with fill or work, then: where bench_worker.py is, the shared file, the database or broker,
# a number (of jobs to add; of jobs at once).
HEAD = """
import asyncio, os, sys
what, tests, path, place, number = sys.argv[1:6]
number = int(number)
sys.path.insert(0, tests)
import bench_worker
shared, slot = bench_worker.map_shared(path), None

def note():
    global slot
    slot = slot or bench_worker.take_slot(path, shared)
    shared[slot] += 1
"""

PROCRASTINATE = HEAD + """
import procrastinate
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=place))

@app.task(name='noop')
async def noop():
    note()

async def main():
    async with app.open_async():
        if what == 'fill':
            await app.schema_manager.apply_schema_async()
            for _ in range(0, number, 1000):
                await noop.batch_defer_async(*[{}] * 1000)
        else:
            await app.run_worker_async(concurrency=number, install_signal_handlers=False)

asyncio.run(main())
"""

PGQUEUER = HEAD + """
import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

async def main():
    words = dict(word.split('=') for word in place.split())
    words['database'] = words.pop('dbname')
    driver = AsyncpgDriver(await asyncpg.connect(**words))
    if what == 'fill':
        queries = Queries(driver)
        await queries.install()
        for _ in range(0, number, 1000):
            await queries.enqueue(['noop'] * 1000, [None] * 1000, [0] * 1000)
    else:
        queue = PgQueuer(driver)

        @queue.entrypoint('noop')
        async def noop(job):
            note()

        limited = {'max_concurrent_tasks': 2 * number} if number < 100 else {}
        await queue.run(batch_size=number, **limited)

asyncio.run(main())
"""

CELERY = HEAD + """
import celery
options = {'data_folder_in': place, 'data_folder_out': place} if os.path.isdir(place) else {}
app = celery.Celery('noop', broker='filesystem://' if options else 'redis+socket://' + place)
app.conf.update(broker_transport_options=options, task_ignore_result=True, worker_prefetch_multiplier=64,
                broker_connection_retry_on_startup=True, worker_enable_remote_control=False)

@app.task(name='noop')
def noop():
    note()

if what == 'fill':
    with app.producer_pool.acquire() as producer:
        for _ in range(number):
            noop.apply_async(producer=producer)
else:
    app.worker_main(['worker', '--pool=prefork', '--concurrency=%d' % number, '--loglevel=ERROR', '--without-gossip',
                     '--without-mingle', '--without-heartbeat'])
"""

ALONE = 'one process and one loop: a crash, a leak or a job that blocks takes all with it'
PROCESSES = 'whole workers in processes of their own; a job that hangs holds its worker'
PREFORK = 'a process for each slot, Python only; killed one by one at a hard time limit'
OURS = 'a process group for each slot, any language; killed one by one, only the head of line is blamed'

# name -> (program, number of jobs to begin with, processes, jobs at once in each, isolation)
PEERS = {
    'procrastinate': (PROCRASTINATE, 2000, 1, 4, ALONE),
    'procrastinate, 4 processes': (PROCRASTINATE, 2000, 4, 1, PROCESSES),
    'pgqueuer, batches of 4': (PGQUEUER, 2000, 1, 4, ALONE),
    'pgqueuer, batches of 100, no limit': (PGQUEUER, 10000, 1, 100, ALONE),
    'celery prefork, redis': (CELERY, 3000, 1, 4, PREFORK),
    'celery prefork, files': (CELERY, 300, 1, 4, PREFORK),
}


def install(directory):
    """Make a virtual environment with the peers, if it is not there yet; return its Python."""
    python = os.path.join(directory, 'bin', 'python')
    if not os.path.exists(python):
        subprocess.check_call([sys.executable, '-m', 'venv', directory])
    for package in PACKAGES:
        subprocess.call([python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', '--only-binary',
                         ':all:', package], stdout=sys.stderr)
    return python


@contextlib.contextmanager
def make_place(name, server, directory):
    """Yield where a peer has its queue, as its program takes it, and the pids of the servers; None: not to be had."""
    if 'redis' in name:
        if not shutil.which('redis-server'):
            yield None, []
            return
        path = os.path.join(directory, 'redis')
        process = subprocess.Popen(['redis-server', '--port', '0', '--unixsocket', path, '--save', '',
                                    '--appendonly', 'no'], stdout=subprocess.DEVNULL, cwd=directory)
        try:
            bench.support.wait_until(lambda: os.path.exists(path), what='redis-server')
            yield path, [process.pid]
        finally:
            process.terminate()
            process.wait()
    elif 'files' in name:
        folder = os.path.join(directory, 'broker')
        os.mkdir(folder)
        yield folder, []
    else:
        yield bench.make_database(server, 'peer', 'SELECT'), None


def stop(processes):
    """End what has a session of its own, with all that it has started."""
    for number, patience_s in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        deadline = time.monotonic() + patience_s
        for process in processes:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass


def measure_peer(name, python, server, jobs):
    """Work off so many jobs with a peer; return jobs a second and CPU microseconds a job. Raises if it cannot."""
    program, _, processes, at_once, _ = PEERS[name]
    with bench.temporary_directory() as directory, make_place(name, server, directory) as (place, pids):
        if place is None:
            raise RuntimeError('no redis-server here')
        shared = bench.Shared(directory)
        script = os.path.join(directory, 'noop.py')
        with open(script, 'w') as file:
            file.write(program)

        def command(what, number):
            return [python, script, what, os.path.dirname(bench.WORKER), shared.path, place, str(number)]

        with open(os.path.join(directory, 'log'), 'w+') as log:
            if subprocess.call(command('fill', jobs), stdout=log, stderr=log, cwd=directory, timeout=120):
                log.seek(0)
                raise RuntimeError('cannot fill: ' + log.read().strip()[-300:])
            workers = [subprocess.Popen(command('work', at_once), stdout=log, stderr=log, cwd=directory,
                                        start_new_session=True) for _ in range(processes)]
            try:
                marks = []
                deadline = time.monotonic() + 60
                while len(marks) < 2:
                    done = shared.passes()
                    if done >= jobs * bench_throughput.WINDOW[len(marks)]:
                        if not marks:
                            family = [bench.psutil.Process(w.pid) for w in workers]
                            family += [child for parent in family for child in parent.children(recursive=True)]
                            meter = bench.Meter(all=[p.pid for p in family] + (
                                bench.server_pids(server) if pids is None else pids))
                        marks.append((time.monotonic(), done))
                    if time.monotonic() > deadline or any(w.poll() is not None for w in workers):
                        log.seek(0)
                        raise RuntimeError('%d of %d jobs: %s' % (done, jobs, log.read().strip()[-300:]))
                    time.sleep(0.005)
                used = meter.read()['all']
            finally:
                stop(workers)
    (began, first), (ended, last) = marks
    return (last - first) / (ended - began), used / (last - first) * 1e6


def measure_ours(queue_limit, server, seconds):
    """Return passes a second and CPU microseconds a pass of pepsi-dispatch."""
    with bench.temporary_directory() as directory, bench_throughput.Rig(
            server, directory, 1, 4, queue_limit, 'durable', limit=False) as rig:
        result = rig.dispatch(max(100, int(rig.warm_up() * seconds)))
    return result['passes_s'], result['dispatcher_us'] + result['server_us'] + result['workers_us']


def main(arguments):
    parser = bench.make_parser(__doc__)
    parser.add_argument('--peers', type=lambda text: text.split(';'), default=list(PEERS),
                        help='some of: ' + '; '.join(PEERS) + ' (separated by ;)')
    parser.add_argument('--venv')
    parser.add_argument('--rounds', type=int, help='default: 3')
    parser.add_argument('--seconds', type=float, help='of a run, roughly; default: 2')
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = options.seconds or (0.3 if options.quick else 2)
    results = {'pepsi-dispatch, QUEUE_LIMIT %d' % limit: [] for limit in (4, 16)}
    results.update((name, []) for name in options.peers)
    skipped = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bench.start_server())
        bench.print_machine(server)
        python = install(options.venv or os.path.join(stack.enter_context(bench.temporary_directory()), 'venv'))
        jobs = {name: PEERS[name][1] for name in options.peers}
        for number in range(options.rounds):
            for name in results:
                if name in skipped:
                    continue
                try:
                    if name in PEERS:
                        rate, cpu_us = measure_peer(name, python, server, jobs[name])
                        jobs[name] = max(jobs[name] // 2, int(rate * options.seconds))
                    else:
                        rate, cpu_us = measure_ours(int(name.split()[-1]), server, options.seconds)
                except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
                    skipped[name] = str(error)
                    bench.print_json(bench='peers', name=name, skipped=str(error))
                    continue
                results[name].append((rate, cpu_us))
                bench.print_json(bench='peers', name=name, round=number + 1, jobs_s=rate, cpu_us=cpu_us)
    rows = []
    for name, rounds in results.items():
        isolation = PEERS[name][4] if name in PEERS else OURS
        rows.append([name, bench.median(r[0] for r in rounds), bench.median(r[1] for r in rounds),
                     'skipped: ' + skipped[name].splitlines()[-1][:80] if name in skipped else isolation])
    bench.print_table('No-op jobs, concurrency 4 (medians of %d rounds)' % options.rounds,
                      ['', 'jobs/s', 'CPU us a job', 'isolation'], rows)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
