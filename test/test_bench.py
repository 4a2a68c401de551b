"""The benchmarks run, and what they print can be read; what it says is nothing that a test could judge."""
import collections
import json
import os
import subprocess
import sys

import bench
import bench_throughput
import bench_worker


def run(name, *arguments):
    """Run a benchmark with the server that the tests use; return its JSON lines and the lines of its table."""
    program = os.path.join(os.path.dirname(bench.WORKER), 'bench_%s.py' % name)
    done = subprocess.run([sys.executable, program] + list(arguments), stdin=subprocess.DEVNULL, timeout=110,
                          stdout=subprocess.PIPE, universal_newlines=True)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    return ([json.loads(line) for line in lines if line.startswith('{')],
            [line for line in lines if line and not line.startswith('{')])


def test_throughput_compares_the_dispatcher_with_the_limit_and_prints_what_can_be_read(pg):
    results, table = run('throughput', '--pairs=1', '--seconds=0.05', '--queue-limits=4', '--parallelism=1',
                         '--stages=1,2', '--modes=durable,alone')
    assert results[0]['bench'] == 'machine'
    pairs = [r for r in results if 'pair' in r]
    summaries = [r for r in results if r.get('summary')]
    assert [(s['mode'], s['stages']) for s in summaries] == [('durable', 1), ('durable', 2), ('alone', 1)]
    assert len(pairs) == len(summaries) == len(table) - 2  # a title and a header
    for pair in pairs:
        sides = [pair['dispatcher']] + ([] if pair['mode'] == 'alone' else [pair['limit']])
        for side in sides:
            assert side['passes'] > 0 and side['seconds'] > 0
            assert abs(side['passes_s'] - side['passes'] / side['seconds']) < 0.01 * side['passes_s']
            assert side['server_us'] > 0 and side['workers_us'] > 0
        assert pair['dispatcher']['dispatcher_us'] > 0
        assert 0 < pair['dispatcher']['statements_a_pass'] < 10
    assert all(s['ratio'] > 0 for s in summaries if s['mode'] == 'durable')


def test_a_worker_counts_its_passes_and_notes_when_it_read_an_id(tmp_path):
    shared = bench.Shared(str(tmp_path))
    worker = subprocess.Popen(shared.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    began = bench.time.monotonic()
    answers, _ = worker.communicate(b'7\n%d\n' % (2 ** 40 + 8))
    assert answers == b'0 id=7\n0 id=%d\n' % (2 ** 40 + 8)
    assert worker.returncode == 0
    assert shared.passes() == 2
    assert began < shared.read_at(7) <= shared.read_at(2 ** 40 + 8) < bench.time.monotonic()
    assert shared.read_at(9) == 0


def test_every_worker_has_a_counter_of_its_own(tmp_path):
    shared = bench.Shared(str(tmp_path))
    numbers = bench_worker.map_shared(shared.path)
    assert len({bench_worker.take_slot(shared.path, numbers) for _ in range(100)}) == 100


def test_the_limit_keeps_all_its_workers_at_work_however_few_ids_there_are(tmp_path):
    shared = bench.Shared(str(tmp_path))
    loops = bench_throughput.Loops([shared.command(work_s=0.001)], 4)
    ids, answered = collections.deque(range(100)), []

    def done():
        loops.feed(0, ids)
        answered.extend(loops.answers(0))
        return len(answered) == 100

    try:
        bench.support.wait_until(done)
    finally:
        loops.close()
    assert sorted(answered) == list(range(100))
    assert all(10 < passes < 50 for passes in bench_worker.map_shared(shared.path)[1:5])


def test_cpu_time_of_a_process_is_seen():
    before = bench.cpu_s(os.getpid())
    bench.support.wait_until(lambda: sum(range(10000)) and bench.cpu_s(os.getpid()) > before)


def test_the_quantile_of_a_few_values_is_one_of_them():
    assert [bench.quantile([3, 1, 2], share) for share in (0, 0.5, 0.99, 1)] == [1, 2, 3, 3]


def test_every_configuration_with_a_target_is_measured_by_default():
    options = bench.argparse.Namespace(modes=['durable', 'relaxed', 'alone'], stages=[1, 3], parallelism=[1, 4, 8],
                                       queue_limits=[1, 4, 16, 64], full=False)
    measured = set(bench_throughput.configurations(options))
    assert {(stages, 4, limit, mode) for stages, limit, mode in bench_throughput.RATIOS} <= measured
    assert {(1, 4, limit, 'alone') for limit in bench_throughput.DISPATCHER_US} <= measured
