"""The real dispatcher under a fake clock: generated histories, and some that are written down.

Environment: PEPSI_HISTORIES how many to generate (default 2000), PEPSI_FIRST_HISTORY the first seed. One that fails is
replayed with `python test/simulation.py SEED`. Each test takes the module that it tests as a default argument:
test_planted runs them against defects.
"""
import collections
import errno
import os
import signal

import pepsidispatch
import pytest
from simulation import HOUR, READ, Broken, FakeChild, World, commit, dying, opened, play, stillborn, working

HISTORIES = int(os.environ.get('PEPSI_HISTORIES', '2000'))
FIRST = int(os.environ.get('PEPSI_FIRST_HISTORY', '0'))
PARTS = 8

QUIET = '[pepsi-dispatch]\nPOLL_INTERVAL = 1 h\n'  # the heartbeat helps nobody


@pytest.fixture(autouse=True)
def nothing_left():
    """The simulation itself looks for what is left, and starts nothing: spare the search for leaks."""


def stage(name='a', **options):
    """A section of the configuration."""
    return '[stage-%s]\nPROGRAM = prog\n%s\n' % (name, '\n'.join('%s = %s' % item for item in options.items()))


def make(module, *sections, **options):
    """A world, its log silenced, to be closed at the end of the block."""
    return opened(World(QUIET + ''.join(sections or (stage(),)), module, **options))


def by_id(world):
    return {id: row.status for id, row in world.table.rows.items()}


def errors(world):
    return [row.state.get('dispatch_error', '').split(':')[0] for _, row in sorted(world.table.rows.items())]


def all_are(world, *statuses):
    return lambda: {row.status for row in world.table.rows.values()} <= set(statuses)


# -- generated ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('part', range(PARTS))
def test_generated_histories_keep_all_promises(part):
    failures = []
    for seed in range(FIRST + part, FIRST + HISTORIES, PARTS):
        try:
            play(seed)
        except Exception as e:
            failures.append('python test/simulation.py %d    %s: %s' % (seed, type(e).__name__, e))
    assert not failures, '%d histories\n%s' % (len(failures), '\n'.join(failures[:20]))


def test_a_history_is_the_same_each_time_it_is_played(capsys):
    printed = []
    for _ in range(2):
        play(7, trace=True)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 500


def test_histories_are_of_many_kinds(monkeypatch):
    seen = collections.Counter()

    def note(world, text, *values):
        seen[(text % values).split()[0]] += 1

    monkeypatch.setattr(World, 'note', note)
    for seed in range(100):
        play(seed)
    assert {'claimed', 'child', 'reset', 'retried', 'settled', 'operator:', 'settle:', 'claim:'} <= set(seen)


# -- a loop that sleeps for ever or spins fails by itself --------------------------------------------------------------

def test_a_dispatcher_that_spins_fails():
    world = World(QUIET + stage())
    world.dispatcher._on_look = lambda: world.dispatcher.timers.set('look', world.now)
    world.dispatcher.timers.set('look', world.now)
    with opened(world), pytest.raises(Broken, match='spin'):
        world.run(seconds=5)


def test_a_dispatcher_that_sleeps_for_ever_fails():
    world = World(QUIET + stage())
    with opened(world):
        world.run(seconds=1)
        for pool in world.dispatcher.pools.values():
            pool.look = lambda id=None: None
        world.table.insert('a')
        with pytest.raises(Broken, match='waits'):
            world.run(until=all_are(world, 'done'))


# -- the ordinary case -------------------------------------------------------------------------------------------------

def test_rows_are_worked_off_and_counted_and_the_last_worker_goes(module=pepsidispatch):
    with make(module, stage('a'), stage('b')) as world:
        for _ in range(50):
            world.table.insert('a')
            world.table.insert('b')
        world.run(until=all_are(world, 'done'), limit_s=2)
        assert set(world.passes.values()) == {1}
        world.run(seconds=6)
        assert world.dispatcher.workers == {}
        world.check_counts()  # without being stopped
        world.stop()


def test_a_message_goes_through_its_stages_without_the_heartbeat(module=pepsidispatch):
    def program(child):
        return working(0.01, **({'stage': 'b'} if child.stage == 'a' else {'status': 'done'}))(child)

    with make(module, stage('a'), stage('b'), program=program) as world:
        for _ in range(20):
            world.table.insert('a')
        world.run(until=all_are(world, 'done'), limit_s=2)
        assert set(world.passes.values()) == {2}
        world.stop()


def test_few_workers_do_quick_work_and_all_do_slow_work(module=pepsidispatch):
    for seconds, workers in ((0.001, 1), (0.5, 4)):
        with make(module, program=working(seconds)) as world:
            for _ in range(3):  # to learn the speed: the first pass of a worker includes its start
                for _ in range(4):
                    world.table.insert('a')
                world.run(seconds=0.1)
                world.run(until=all_are(world, 'done'), limit_s=0.7)
            assert world.spawned == workers
            world.stop()


def test_quick_ids_do_not_wait_behind_a_slow_one(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            yield 60.0 if id == 1 else 0.01
            commit(child, id, {'status': 'done'})
            child.say(b'0\n', ('ok', id, ()))

    with make(module, program=program) as world:
        for _ in range(10):
            world.table.insert('a')
        world.run(until=lambda: list(by_id(world).values()).count('done') == 9, limit_s=1)
        world.stop()


def test_an_idle_dispatcher_makes_two_statements_a_heartbeat_at_most(module=pepsidispatch):
    config = '[pepsi-dispatch]\nPOLL_INTERVAL = 30 s\n' + stage('a') + stage('b')
    world = World(config, module)
    with opened(world):
        world.table.insert('a')
        world.run(seconds=60)
        before, turns = world.queue.statements, world.dispatcher.turns
        world.run(seconds=3000)
        assert 100 <= world.queue.statements - before <= 200
        assert world.dispatcher.turns - turns <= 500
        world.stop()


def test_an_empty_claim_causes_no_claim_and_a_burst_of_notifications_few(module=pepsidispatch):
    with make(module) as world:
        world.run(seconds=10)
        before = world.queue.statements
        world.run(seconds=90)
        assert world.queue.statements == before
        for i in range(1000):
            world.after(i * 0.002, world.table.notify)
        world.run(seconds=2)
        claims = [at for at, name in world.queue.log if name == 'claim' and at >= 1100]
        assert len(claims) <= 30
        world.stop()


def test_a_stream_of_notifications_starves_nobody(module=pepsidispatch):
    with make(module, program=working(0.02)) as world:
        for i in range(20000):
            world.after(i * 0.0002, world.table.notify)
        world.after(1.0, lambda: [world.table.insert('a') for _ in range(20)])
        world.run(seconds=3)
        assert set(world.statuses()) == {'done'}
        assert set(world.dispatcher.outbox.ids()) == set()
        world.stop()


# -- what is not to be missed ------------------------------------------------------------------------------------------

def test_what_has_ended_is_written_soon_though_others_work_on(module=pepsidispatch):
    def program(child):
        return working(0.001 if child.stage == 'a' else 20)(child)

    with make(module, stage('a'), stage('b', PARALLELISM=8), program=program) as world:
        for _ in range(8):
            world.table.insert('b')
        world.run(seconds=2)
        for number in (3, 6):  # first to learn the speed
            world.run(seconds=0.04)  # nothing else is to wake it
            for _ in range(3):
                world.table.insert('a')
            world.run(until=lambda number=number: world.statuses().get('done') == number, limit_s=0.5)
        done = world.now
        world.run(until=lambda: not world.dispatcher.outbox, limit_s=1)
        assert world.now - done < 0.007
        world.stop()


def test_where_notifications_come_thick_it_looks_by_itself_until_they_do_not(module=pepsidispatch):
    with make(module, program=working(0.001)) as world:
        world.run(seconds=10)
        seen = []
        for i in range(1500):
            world.after(i * 0.002, lambda: (world.table.insert('a'), seen.append(world.table.silent)))
        world.run(seconds=3)
        assert seen[0] is False and sum(seen) > 1400
        world.run(until=all_are(world, 'done'), limit_s=0.5)
        world.run(seconds=3)
        assert world.table.silent is False
        before = world.queue.statements
        world.run(seconds=50)
        assert world.queue.statements - before <= 2  # statistics
        for _ in range(20):  # all at once: that is over before it is noticed
            world.table.insert('a')
        world.run(until=lambda: world.table.silent, limit_s=0.1)
        for _ in range(3):
            world.table.insert('a')
            world.run(until=all_are(world, 'done'), limit_s=0.3)
        world.stop()


def test_a_row_that_is_inserted_while_a_statement_is_under_way_is_claimed(module=pepsidispatch):
    for i in range(40):
        with make(module) as world:
            world.table.insert('a')
            world.after(i * 0.0005, lambda world=world: world.table.insert('a'))
            world.run(seconds=0.02)
            world.run(until=all_are(world, 'done'), limit_s=0.5)
            world.stop()


def test_a_row_that_is_inserted_while_the_database_is_away_is_claimed_when_it_is_back(module=pepsidispatch):
    with make(module) as world:
        world.run(seconds=1)
        world.down = True
        world.queue.snap()
        world.run(seconds=10)
        world.table.insert('a')
        world.down = False
        world.run(until=all_are(world, 'done'), limit_s=2)
        world.stop()


def test_a_paused_row_is_retried_when_it_is_due(module=pepsidispatch):
    with make(module) as world:
        for after_s in (100.0, 5.0, 7.0):
            world.table.insert('a', 'paused', world.now + after_s)
        world.table.insert('a', 'paused', None)
        world.table.insert('a', 'paused', float('inf'))
        world.run(seconds=4.9)
        assert world.statuses() == {'paused': 5}
        world.run(seconds=0.4)
        assert world.statuses() == {'paused': 4, 'done': 1}
        world.run(seconds=2)
        assert world.statuses() == {'paused': 3, 'done': 2}
        world.run(seconds=93)
        assert world.statuses() == {'paused': 2, 'done': 3}
        world.stop()


def test_a_due_time_that_somebody_brings_forward_is_heard(module=pepsidispatch):
    with make(module) as world:
        id = world.table.insert('a', 'paused', world.now + 1000)
        world.run(seconds=2)
        world.table.update(id, timeout=world.now + 1)
        world.run(until=all_are(world, 'done'), limit_s=1.5)
        world.stop()


def test_a_message_that_its_worker_pauses_is_heard_of_at_the_answer(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            again = child.world.passes[id]
            child.world.begin(child, id)
            commit(child, id, {'status': 'done'} if again else {'status': 'paused', 'timeout': child.world.now + 3})
            child.world.finish(id)
            child.say(b'0\n', ('ok', id, ()))

    with make(module, program=program) as world:
        world.table.insert('a')
        world.run(until=all_are(world, 'done'), limit_s=4)
        assert world.now >= 1003
        world.stop()


def test_a_message_that_enters_its_own_stage_again_and_again_does_so_at_a_low_rate(module=pepsidispatch):
    for values in ({'status': 'pending'}, {'status': 'paused', 'timeout': 0.0}):
        with make(module, program=working(0.001, **values)) as world:
            world.table.insert('a')
            world.run(seconds=3)
            assert 7 <= world.passes[1] <= 17
            world.stop()


def test_a_locked_row_delays_no_other_and_is_claimed_soon_after_it_is_free(module=pepsidispatch):
    with make(module) as world:
        ids = [world.table.insert('a') for _ in range(3)]
        world.table.locked[ids[0]] = world.now + 20
        world.run(until=lambda: list(by_id(world).values()).count('done') == 2, limit_s=1)
        world.run(seconds=25 - (world.now - 1000) - 3.5)
        world.run(until=all_are(world, 'done'), limit_s=2)
        world.stop()


@pytest.mark.parametrize('trouble', ['locked', 'bad'])
def test_an_outcome_that_cannot_be_written_delays_no_other_and_is_written_later(trouble, module=pepsidispatch):
    delayed(module, trouble)


@pytest.mark.parametrize('trouble', ['locked', 'bad'])
def test_a_few_outcomes_that_cannot_be_written_do_not_stop_a_small_stage(trouble, module=pepsidispatch):
    with make(module, stage(PARALLELISM=1, QUEUE_LIMIT=1)) as world:
        def program(child):
            while True:
                id = yield READ
                if id is None:
                    return 0
                if len(getattr(world.table, trouble)) < 3:
                    getattr(world.table, trouble)[id] = world.now + 100
                child.say(b'3 id=%d no\n' % id, ('fail', id, 3))

        world._program = program
        rows = [world.table.insert('a') for _ in range(10)]
        world.run(until=lambda: sum(world.table.rows[id].status == 'failed' for id in rows) == 7, limit_s=10)
        world.run(until=all_are(world, 'done', 'failed'), limit_s=200)
        world.stop()


def delayed(module, trouble):
    """Row 1 is locked, or a trigger refuses our write to it, while its outcome is to be written."""
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            if id == 1:
                getattr(child.world.table, trouble)[1] = child.world.now + 20
            yield 0.01
            child.say(b'3 id=%d no\n' % id, ('fail', id, 3))

    with make(module, program=program) as world:
        for _ in range(3):
            world.table.insert('a')
        world.run(until=lambda: list(by_id(world).values()).count('failed') == 2, limit_s=2)
        assert by_id(world)[1] == 'running'
        world.run(until=all_are(world, 'failed'), limit_s=40)
        assert errors(world) == ['status'] * 3
        world.stop()


def test_a_second_worker_is_started_as_soon_as_it_may_be(module=pepsidispatch):
    """The answer of an older worker ends the cooldown before others may be started."""
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            yield 0.5 if id == 1 else 50.0
            commit(child, id, {'status': 'done'})
            child.say(b'0\n', ('ok', id, ()))

    with make(module, stage(PARALLELISM=2, QUEUE_LIMIT=1, PACK_BELOW=0), program=program) as world:
        world.table.insert('a')
        world.run(seconds=0.1)
        world.refuse = lambda stage: OSError(errno.EAGAIN, 'Resource temporarily unavailable')
        world.table.insert('a')
        world.table.insert('a')
        world.run(seconds=0.1)
        world.refuse = lambda stage: None
        world.run(until=lambda: sum(w.handed for w in world.dispatcher.workers.values()) == 3, limit_s=2)
        world.stop()


# -- workers that misbehave --------------------------------------------------------------------------------------------

def test_a_crash_fails_the_head_and_nobody_else(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            child.world.begin(child, id)
            yield 0.001
            if id == 3:
                return -signal.SIGSEGV
            commit(child, id, {'status': 'done'})
            child.world.finish(id)
            child.say(b'0\n', ('ok', id, ()))

    with make(module, program=program) as world:
        for _ in range(8):
            world.table.insert('a')
        world.run(until=all_are(world, 'done', 'failed'), limit_s=3)
        assert errors(world) == ['', '', 'crash', '', '', '', '', '']
        assert set(world.passes.values()) == {1}
        world.stop()
        world.check_counts()


def test_what_a_worker_wrote_before_it_died_counts(module=pepsidispatch):
    def program(child):
        id = yield READ
        if id is None:
            return 0
        commit(child, id, {'status': 'done'})
        child.say(b'0 id=%d\n' % id, ('ok', id, ()))
        return 1

    with make(module, program=program) as world:
        world.hasty = True  # it writes and dies while the dispatcher is busy with something else
        for i in range(1000):
            world.after(i * 0.0007, world.table.notify)
        for _ in range(20):
            world.table.insert('a')
        world.run(until=all_are(world, 'done'), limit_s=10)
        world.stop()
        world.check_counts()
        assert world.count.stages['a'][:4] == [20, 0, 0, 0]


def test_an_answer_that_is_there_beats_the_watchdog(module=pepsidispatch):
    """The dispatcher was stopped for longer than MAX_RUNTIME."""
    with make(module, stage(MAX_RUNTIME='2 s'), program=working(1.0)) as world:
        world.table.insert('a')
        world.run(seconds=0.9)
        world.after(0.05, lambda: setattr(world, 'now', world.now + 60))
        world.run(until=all_are(world, 'done', 'timeout'), limit_s=100)
        assert world.statuses() == {'done': 1} and world.kills == 0
        world.stop()


def test_the_watchdog_strikes_after_max_runtime_and_spares_those_behind(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            if id == 3:
                yield HOUR
            commit(child, id, {'status': 'done'})
            child.say(b'0\n', ('ok', id, ()))

    with make(module, stage(PARALLELISM=1, MAX_RUNTIME='2 s'), program=program) as world:
        for _ in range(6):
            world.table.insert('a')
        world.run(seconds=1.9)
        assert by_id(world)[3] == 'running'
        world.run(until=all_are(world, 'done', 'timeout'), limit_s=0.5)
        assert errors(world) == ['', '', 'timeout', '', '', '']
        world.stop()
        world.check_counts()


def test_the_watchdog_is_armed_anew_for_each_head_of_line(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            yield 1.5 if id < 4 else HOUR
            commit(child, id, {'status': 'done'})
            child.say(b'0\n', ('ok', id, ()))

    with make(module, stage(PARALLELISM=1, MAX_RUNTIME='2 s'), program=program) as world:
        for _ in range(4):
            world.table.insert('a')
        world.run(seconds=6.3)
        assert by_id(world)[4] == 'running'
        world.run(until=all_are(world, 'done', 'timeout'), limit_s=0.5)
        world.stop()


def test_a_limit_that_a_reload_brings_holds_for_a_worker_that_hangs(module=pepsidispatch):
    def program(child):
        yield READ
        yield HOUR

    with make(module, stage(MAX_RUNTIME='forever'), program=program) as world:
        world.table.insert('a')
        world.run(seconds=2)
        world.reload(QUIET + stage(MAX_RUNTIME='3 s'))
        world.run(until=all_are(world, 'timeout'), limit_s=2)
        world.stop()


def test_violations_fail_the_head_and_the_stage_goes_on(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            if id == 2:
                child.say(b'0 id=99\n', ('bad',))
                yield HOUR
            commit(child, id, {'status': 'done'})
            child.say(b'0 id=%d\n' % id, ('ok', id, ()))

    with make(module, program=program) as world:
        for _ in range(5):
            world.table.insert('a')
        world.run(until=all_are(world, 'done', 'failed'), limit_s=3)
        assert errors(world) == ['', 'protocol', '', '', '']
        world.stop()
        world.check_counts()


def test_a_pass_that_changes_nothing_fails_as_unfinished(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            child.say(b'0 id=%d other=0.5\n' % id, ('ok', id, (('other', 0.5),)))

    with make(module, program=program) as world:
        world.table.insert('a')
        world.run(until=all_are(world, 'failed'), limit_s=3)
        assert errors(world) == ['unfinished']
        world.stop()
        world.check_counts()
        assert world.table.totals == [2, 1] and set(world.table.stats) == {'other'}


def test_a_worker_that_died_before_it_read_anything_fails_nobody(module=pepsidispatch):
    with make(module, program=stillborn) as world:
        for _ in range(20):
            world.table.insert('a')
        world.run(seconds=600)
        assert world.statuses() == {'pending': 20}
        assert 20 <= world.spawned <= 30  # 1 s, doubling up to 30 s
        world._program = working()
        world.run(until=all_are(world, 'done'), limit_s=32)
        world.stop()


def test_a_missing_program_fails_nobody_and_recovers_at_the_next_probe(module=pepsidispatch):
    tries = []
    with make(module, stage('a'), stage('b')) as world:
        def refuse(stage):
            if stage == 'a':
                tries.append(world.now)
                return OSError(errno.ENOENT, 'No such file or directory')
            return None

        world.refuse = refuse
        for _ in range(20):
            world.table.insert('a')
        for i in range(600):
            world.after(i * 1.0, lambda: world.table.insert('b'))
        world.run(seconds=600)
        assert {row.status for row in world.table.rows.values() if row.stage == 'a'} == {'pending'}
        assert sum(row.status == 'done' for row in world.table.rows.values() if row.stage == 'b') >= 599
        assert 20 <= len(tries) <= 30
        gaps = [round(b - a, 1) for a, b in zip(tries, tries[1:])]
        assert gaps[:5] == [1.0, 2.0, 4.0, 8.0, 16.0] and max(gaps) <= 30.5
        world.refuse = lambda stage: None
        world.run(until=all_are(world, 'done'), limit_s=31)
        world.stop()


def test_a_broken_program_costs_few_messages_and_no_other_stage_anything(module=pepsidispatch):
    """10,000 rows wait for a program that reads and dies every time."""
    def program(child):
        yield from (dying if child.stage == 'bad' else working(5.0))(child)
        return 1

    with make(module, stage('bad', PARALLELISM=4), stage('good', PARALLELISM=2), program=program) as world:
        for _ in range(1500):
            world.table.insert('good')
        for _ in range(10000):
            world.table.rows[world.table.insert('bad')].status = 'pending'
        world.check, check = lambda: None, world.check  # each turn it would look at all rows
        world.run(seconds=3600)
        check()
        counted = collections.Counter((row.stage, row.status) for row in world.table.rows.values())
        assert 10 <= counted['bad', 'failed'] <= 25
        assert counted['good', 'done'] >= 2 * 3600 / 5 - 10
        world.stop()
        world.check_counts()


def test_a_grandchild_that_holds_the_pipe_open_delays_nothing(module=pepsidispatch):
    with make(module, program=dying) as world:
        world.make_child = lambda stage: FakeChild(world, stage, dying, holder=True)
        world.table.insert('a')
        world.run(until=all_are(world, 'failed'), limit_s=1)
        world.stop()


def test_a_worker_that_ignores_end_of_file_is_killed_after_the_grace(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                yield HOUR
            commit(child, id, {'status': 'done'})
            child.say(b'0\n', ('ok', id, ()))

    with make(module, stage(WORKER_IDLE_TIMEOUT='1 s'), program=program) as world:
        world.table.insert('a')
        world.run(seconds=5.9)
        assert len(world.children) == 1
        world.run(seconds=0.3)
        assert not world.children
        world.stop()


def test_workers_are_recycled_and_no_id_is_lost(module=pepsidispatch):
    with make(module, stage(MAX_MESSAGES=3), program=working(0.001)) as world:
        for _ in range(31):
            world.table.insert('a')
        world.run(until=all_are(world, 'done'), limit_s=3)
        assert world.spawned >= 11 and set(world.passes.values()) == {1}
        world.stop()


# -- the database ------------------------------------------------------------------------------------------------------

def test_an_answer_that_comes_during_an_outage_is_kept_and_written(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            child.world.begin(child, id)
            yield 2.0
            child.world.finish(id)
            child.say(b'5 id=%d no\n' % id, ('fail', id, 5))

    with make(module, program=program) as world:
        world.table.insert('a')
        world.run(seconds=1)
        world.down = True
        world.queue.snap()
        world.run(seconds=20)
        assert by_id(world) == {1: 'running'}
        world.down = False
        world.run(until=all_are(world, 'failed'), limit_s=2)
        assert errors(world) == ['status'] and world.passes[1] == 1
        world.stop()
        world.check_counts()


@pytest.mark.parametrize('seconds', [0.05, 5.0])
def test_a_crash_during_an_outage_is_forgiven(seconds, module=pepsidispatch):
    crashing(module, seconds)


def crashing(module, seconds):
    """A worker crashes while the database is away for some seconds: for one attempt to reach it, or for many."""
    with make(module, program=working(1.0)) as world:
        world.table.insert('a')
        world.run(seconds=0.5)
        assert list(world.executing) == [1]
        world.down = seconds > 1
        world.queue.snap()
        world.run(seconds=0.01)
        world.children[0].exit(-signal.SIGSEGV)
        world.run(seconds=seconds)
        world.down = False
        world.run(until=all_are(world, 'done'), limit_s=4)
        world.stop()


@pytest.mark.parametrize('fate', ['send', 'before', 'after', 'silent', 'error'])
@pytest.mark.parametrize('name', ['claim', 'settle', 'exchange', 'revive', 'flush'])
def test_every_statement_may_fail_in_every_way(name, fate, module=pepsidispatch):
    failing(module, name, fate)


def failing(module, name, fate):
    """The first three statements of a name fail; everything is done once, and counted once, all the same."""
    with make(module) as world:
        left = [3]

        def get_fate(asked):
            if asked == name and left[0]:
                left[0] -= 1
                return fate, 0.001
            return 'ok', 0.001

        world.fate = get_fate
        world.slowness = lambda: 20.0
        for _ in range(60):
            world.table.insert('a')
        for after_s in (1.0, 2.0):
            world.table.insert('a', 'paused', world.now + after_s)
        world.run(seconds=40)
        assert not left[0] and world.statuses() == {'done': 62}
        assert set(world.passes.values()) == {1}
        world.stop()
        world.check_counts()


def test_rows_without_an_owner_are_reset_at_start_and_at_the_heartbeat(module=pepsidispatch):
    world = World('[pepsi-dispatch]\nPOLL_INTERVAL = 2 s\n' + stage(), module)
    with opened(world):
        world.table.insert('a', 'running')
        world.table.insert('elsewhere', 'running')
        world.run(seconds=1)
        assert by_id(world) == {1: 'done', 2: 'pending'}
        world.table.insert('a', 'running')
        world.run(seconds=2)
        assert by_id(world) == {1: 'done', 2: 'pending', 3: 'done'}
        world.stop()


def test_a_sweep_that_became_due_while_rows_are_retried_is_done_afterwards(module=pepsidispatch):
    world = World('[pepsi-dispatch]\nPOLL_INTERVAL = 5 s\n' + stage(), module)
    with opened(world):
        world.run(seconds=4.9)
        world.fate = lambda name: ('ok', 0.5)  # so that the heartbeat falls into it
        world.table.insert('a', 'running')
        world.run(until=all_are(world, 'done'), limit_s=4)  # not at the next heartbeat
        world.stop()


def test_nothing_is_reset_before_the_workers_of_an_earlier_dispatcher_are_gone(module=pepsidispatch):
    world = World(QUIET + stage(), module)
    with opened(world):
        world.survivors = 10
        world.table.insert('a', 'running')
        world.run(seconds=0.5)
        assert by_id(world) == {1: 'running'}
        world.run(until=all_are(world, 'done'), limit_s=3)
        world.stop()


def test_a_dispatcher_that_was_replaced_kills_its_workers_and_touches_nothing(module=pepsidispatch):
    with make(module, program=working(5.0)) as world:
        world.table.insert('a')
        world.run(seconds=1)
        world.table.epoch += 1
        world.queue.snap()
        world.run_to_end(2)
        assert world.dispatcher.exit_code == 75
        assert by_id(world) == {1: 'running'} and not world.children


def test_no_wait_gives_up_after_two_seconds(module=pepsidispatch):
    with make(module, wait_for_lock=False) as world:
        world.lock_held_until = world.now + HOUR
        world.run(seconds=1.5)
        assert world.dispatcher.phase is module.Phase.SERVING
        world.run_to_end(2)
        assert world.dispatcher.exit_code == 75


def test_a_lock_that_is_released_in_time_is_waited_for(module=pepsidispatch):
    for options, held_s in (({'wait_for_lock': False}, 1.0), ({}, 100.0)):
        with make(module, **options) as world:
            world.table.insert('a')
            world.lock_held_until = world.now + held_s
            world.run(until=all_are(world, 'done'), limit_s=held_s + 1)
            world.stop()


def test_a_claim_that_took_long_delays_no_row_afterwards(module=pepsidispatch):
    """Rows below those that were seen are looked for at a limited rate; what limits it is not one bad moment."""
    with make(module) as world:
        world.slowness = lambda: 10.0
        old = world.table.insert('a', 'paused', None)
        world.table.insert('a')
        world.run(seconds=1)
        world.fate = lambda name: ('ok', 3.5 if name == 'claim' else 0.001)
        world.table.insert('a')
        world.run(seconds=4)
        world.fate = lambda name: ('ok', 0.001)
        world.table.update(old, status='pending')
        world.run(until=all_are(world, 'done'), limit_s=2)
        world.stop()


def test_an_outage_costs_few_attempts(module=pepsidispatch):
    with make(module) as world:
        world.down = True
        opened_before = world.queue._session
        world.run(seconds=600)
        assert world.queue._session - opened_before <= 2 * 600 / 1.5
        world.stop(5)


# -- stop and reload ---------------------------------------------------------------------------------------------------

def test_a_stop_takes_what_is_answered_in_time_and_gives_back_the_rest(module=pepsidispatch):
    def program(child):
        while True:
            id = yield READ
            if id is None:
                return 0
            yield 1.0
            commit(child, id, {'status': 'done'})
            child.say(b'0\n', ('ok', id, ()))

    def make_child(world):
        def make(stage):
            child = type(world).make_child(world, stage)
            child.deaf = True
            return child
        return make

    with make(module, stage(PARALLELISM=2, PACK_BELOW='10 s'), program=program) as world:
        world.make_child = make_child(world)
        for _ in range(12):
            world.table.insert('a')
        world.run(seconds=0.5)
        world.stop()
        assert set(world.statuses()) <= {'done', 'pending'} and 1 <= world.statuses()['done'] < 12
        world.check_counts()


def test_what_a_claim_brings_after_a_stop_is_given_back(module=pepsidispatch):
    with make(module) as world:
        world.fate = lambda name: ('ok', 0.5 if name == 'claim' else 0.001)
        for _ in range(5):
            world.table.insert('a')
        world.run(seconds=0.1)
        world.stop()
        assert world.statuses() == {'pending': 5} and world.spawned == 0


def test_what_a_claim_brings_to_a_stage_that_cools_down_is_given_back(module=pepsidispatch):
    with make(module, program=stillborn) as world:
        for _ in range(3):
            world.table.insert('a')
        world.run(seconds=0.01)
        world.fate = lambda name: ('ok', 0.5 if name in ('claim', 'exchange') else 0.001)
        for _ in range(10):
            world.table.insert('a')
        world.run(seconds=0.9)
        assert world.statuses() == {'pending': 13}
        world.stop()


def test_nobody_is_blamed_for_a_stop(module=pepsidispatch):
    with make(module, program=working(60.0)) as world:
        for _ in range(5):
            world.table.insert('a')
        world.run(seconds=3)
        world.stop()
        assert world.statuses() == {'pending': 5}
        assert world.now < 1005
        world.check_counts()


def test_a_second_term_kills_at_once(module=pepsidispatch):
    def program(child):
        child.deaf = True
        yield READ
        yield HOUR

    with make(module, program=program) as world:
        world.table.insert('a')
        world.run(seconds=1)
        world.signals.send(signal.SIGTERM)
        world.run(seconds=0.5)
        assert world.children
        world.stop(0.2)
        assert world.statuses() == {'pending': 1} and world.dispatcher.exit_code == 0


def test_a_stop_with_the_database_away_ends_in_time(module=pepsidispatch):
    with make(module, program=working(60.0)) as world:
        world.table.insert('a')
        world.run(seconds=1)
        world.frozen = True
        world.stop(8)
        assert world.dispatcher.exit_code == 0


def test_term_at_any_moment_of_the_start_ends_it_well(module=pepsidispatch):
    for i in range(60):
        with make(module) as world:
            for _ in range(3):
                world.table.insert('a')
            world.after(i * 0.0007, lambda world=world: world.signals.send(signal.SIGTERM))
            world.run_to_end()
            assert set(world.statuses()) <= {'pending', 'done'}
            world.check_counts()


def test_a_reload_gives_changed_stages_new_workers_and_loses_nothing(module=pepsidispatch):
    with make(module, stage('a'), stage('b'), program=working(0.05)) as world:
        for _ in range(40):
            world.table.insert('a')
            world.table.insert('b')
            world.table.insert('c')
        world.run(seconds=0.3)
        before = {w.pid for w in world.dispatcher.workers.values() if w.pool.config.name == 'b'}
        world.reload(QUIET + stage('a', PARALLELISM=1) + stage('b') + stage('c'))
        world.run(seconds=0.02)
        assert before <= set(world.dispatcher.workers)
        world.run(until=all_are(world, 'done'), limit_s=6)
        assert set(world.passes.values()) == {1}
        world.stop()
        world.check_counts()


def test_rows_of_a_removed_stage_wait(module=pepsidispatch):
    with make(module, stage('a'), stage('b'), program=working(0.5)) as world:
        for _ in range(30):
            world.table.insert('a')
        world.run(seconds=0.7)
        world.reload(QUIET + stage('b'))
        world.run(seconds=20)
        assert not world.children and set(world.statuses()) == {'done', 'pending'}
        world.reload(QUIET + stage('a') + stage('b'))
        world.run(until=all_are(world, 'done'), limit_s=10)
        assert set(world.passes.values()) == {1}
        world.stop()
